import math
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]

SETTINGS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAN = 0x7FFFFFFF
INFINITY, ONE = 0x7F800000, 0x3F800000
SIGN = 1 << 31
SUBNORMAL = 0x00400000


def single(bits: int) -> float:
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def double(bits: int) -> float:
    return float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])


def bits_of(value: float, dtype: type[np.floating]) -> int:
    with np.errstate(all="ignore"):
        return int.from_bytes(dtype(value).tobytes(), "little")


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def inverse_root(value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(1) / np.sqrt(np.float64(value)))


def inverse(value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(1) / np.float64(value))


def quiet(function: Callable[[np.float64], np.float64]) -> Callable[[float], float]:
    def call(value: float) -> float:
        with np.errstate(all="ignore"):
            return float(function(np.float64(value)))

    return call


FUNCTIONS: dict[str, Callable[[float], float]] = {
    "ex2": quiet(np.exp2),
    "lg2": quiet(np.log2),
    "sin": quiet(np.sin),
    "cos": quiet(np.cos),
    "tanh": quiet(np.tanh),
    "rsqrt": inverse_root,
    "rcp": inverse,
    "sqrt": quiet(np.sqrt),
}


def near(result: int, exact: float) -> bool:
    """Within one unit in the last place of the rounded value: the tightest of the ISA's bounds (that of rcp)."""
    expected = bits_of(exact, np.float32)
    if math.isnan(exact):
        return result == NAN
    return result == expected or (result ^ expected < SIGN and abs(result - expected) <= 1)


def arguments() -> Values[int]:
    edges = [0, 1, SUBNORMAL, 0x00800000, ONE, 0x40490FDB, 0x42FE0000, 0x43000000, 0x7F7FFFFF, INFINITY, 0x7FC00001]
    small = built(lambda n: bits_of(n / 2**16, np.float32), whole_numbers(-160 << 16, 160 << 16))
    return one_of(edges + [e | SIGN for e in edges]) | small | whole_numbers(0, 2**32 - 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("name", [*FUNCTIONS])
@SETTINGS
@given(data=st.data())
def test_a_function_is_within_its_bound(compute: Compute, data: st.DataObject, name: str, ftz: str) -> None:
    if name == "tanh":
        ftz = ""
    rows = data.draw(drawn_rows(arguments()))
    for (row,), result in zip(rows, compute(f"{name}.approx{ftz}.f32 %d, %a;", ["f32"], "f32", rows), strict=True):
        value = flushed(single(row)) if ftz else single(row)
        exact = FUNCTIONS[name](value)
        if ftz and abs(exact) < 2.0**-126:
            assert single(result) in (0.0, single(0x00800000), -single(0x00800000)), (row, result)
        else:
            assert near(result, exact), (hex(row), hex(result), exact)


SPECIAL = [
    ("ex2", {0: ONE, SIGN: ONE, INFINITY: INFINITY, SIGN | INFINITY: 0, SUBNORMAL: ONE, 0x43000000: INFINITY}),
    ("lg2", {0: SIGN | INFINITY, SIGN: SIGN | INFINITY, INFINITY: INFINITY, SIGN | INFINITY: NAN, SIGN | ONE: NAN}),
    ("sin", {0: 0, SIGN: SIGN, INFINITY: NAN, SIGN | INFINITY: NAN, SUBNORMAL: SUBNORMAL}),
    ("cos", {0: ONE, SIGN: ONE, INFINITY: NAN, SIGN | INFINITY: NAN, SUBNORMAL: ONE}),
    ("tanh", {0: 0, SIGN: SIGN, INFINITY: ONE, SIGN | INFINITY: SIGN | ONE, SUBNORMAL: SUBNORMAL}),
    ("rsqrt", {0: INFINITY, SIGN: SIGN | INFINITY, INFINITY: 0, SIGN | INFINITY: NAN, SIGN | ONE: NAN}),
    ("rcp", {0: INFINITY, SIGN: SIGN | INFINITY, INFINITY: 0, SIGN | INFINITY: SIGN}),
    ("sqrt", {0: 0, SIGN: SIGN, INFINITY: INFINITY, SIGN | INFINITY: NAN, SIGN | ONE: NAN}),
    ("lg2.ftz", {SUBNORMAL: SIGN | INFINITY}),
    ("sin.ftz", {SIGN | SUBNORMAL: SIGN}),
    ("rcp.ftz", {SIGN | SUBNORMAL: SIGN | INFINITY, 0x7F000000: 0}),
]


@pytest.mark.parametrize(("name", "table"), SPECIAL)
def test_the_isa_s_special_values_are_exact(compute: Compute, name: str, table: dict[int, int]) -> None:
    opcode, _, ftz = name.partition(".")
    rows = [*((row,) for row in table), (0xFFC00001,)]
    spelling = f"{opcode}.approx{'.ftz' if ftz else ''}.f32 %d, %a;"
    assert compute(spelling, ["f32"], "f32", rows) == [*table.values(), NAN]


@pytest.mark.parametrize("mode", ["approx", "full", "approx.ftz", "full.ftz"])
@SETTINGS
@given(data=st.data())
def test_division_is_within_its_bound(compute: Compute, data: st.DataObject, mode: str) -> None:
    rows = data.draw(drawn_rows(arguments(), arguments()))
    results = compute(f"div.{mode}.f32 %d, %a, %b;", ["f32", "f32"], "f32", rows)
    for row, result in zip(rows, results, strict=True):
        left, right = (flushed(single(v)) if "ftz" in mode else single(v) for v in row)
        if "approx" in mode and 2.0**126 < abs(right) < math.inf:
            exact = left * math.copysign(0.0, right)
        else:
            with np.errstate(all="ignore"):
                exact = float(np.float64(left) / np.float64(right))
        if "ftz" in mode and abs(exact) < 2.0**-126:
            assert abs(single(result)) in (0.0, 2.0**-126)
        else:
            assert near(result, exact), (row, result)


def doubles() -> Values[int]:
    edges = [0, 1, 1 << 52, 1023 << 52, 0x7FE << 52, (0x7FF << 52) - 1, 0x7FF << 52, 0x7FF8 << 48]
    return one_of(edges + [e | 1 << 63 for e in edges]) | whole_numbers(0, 2**64 - 1)


@SETTINGS
@given(rows=drawn_rows(doubles()))
def test_the_double_inverse_root_is_within_one_unit(compute: Compute, rows: list[tuple[int]]) -> None:
    for (row,), result in zip(rows, compute("rsqrt.approx.f64 %d, %a;", ["f64"], "f64", rows), strict=True):
        exact = inverse_root(double(row))
        if math.isnan(exact):
            assert math.isnan(double(result))
        else:
            assert abs(result - bits_of(exact, np.float64)) <= 1


@pytest.mark.parametrize("name", ["rcp", "rsqrt"])
@SETTINGS
@given(rows=drawn_rows(doubles()))
def test_gross_results_use_and_have_the_upper_half(compute: Compute, name: str, rows: list[tuple[int]]) -> None:
    for (row,), result in zip(rows, compute(f"{name}.approx.ftz.f64 %d, %a;", ["f64"], "f64", rows), strict=True):
        value = double(row >> 32 << 32)
        if abs(value) < 2.0**-1022:
            value = math.copysign(0.0, value)
        exact = inverse(value) if name == "rcp" else inverse_root(value)
        assert result & 0xFFFFFFFF == 0
        if math.isnan(exact):
            assert math.isnan(double(result))
        elif exact in (0.0, math.inf, -math.inf) or abs(exact) < 2.0**-1022:
            assert double(result) == (exact if abs(exact) >= 2.0**-1022 else 0.0) or abs(double(result)) == 2.0**-1022
        else:
            assert abs(double(result) / exact - 1) <= 2.0**-20
