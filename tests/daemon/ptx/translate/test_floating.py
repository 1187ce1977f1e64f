import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, drawn_rows, one_of, whole_numbers

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
ComputeAll = Callable[..., dict[str, list[int]]]

CANONICAL_NAN = 0x7FFFFFFF
SMALLEST_NORMAL = 2.0**-126


def decode(bits: int, kind: str) -> float:
    code, size = ("<f", 4) if kind == "f32" else ("<d", 8)
    return float(struct.unpack(code, bits.to_bytes(size, "little"))[0])


def encode(value: float, kind: str) -> int:
    return int.from_bytes((np.float32 if kind == "f32" else np.float64)(value).tobytes(), "little")


def nearest(exact: Fraction, kind: str) -> float:
    """The float nearest to an exact number, ties to even; overflow to infinity."""
    if exact == 0:
        return 0.0
    digits, least, most = (24, -149, 128) if kind == "f32" else (53, -1074, 1024)
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    rounded = round(magnitude / unit) * unit
    if rounded >= Fraction(2) ** most:
        return math.inf if exact > 0 else -math.inf
    return float(rounded) if exact > 0 else -float(rounded)


def fused(a: float, b: float, c: float, kind: str) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            product = np.float64(a) * np.float64(b) if not (math.isfinite(a) and math.isfinite(b)) else np.float64(0)
            return float(product + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product_negative = (math.copysign(1, a) < 0) != (math.copysign(1, b) < 0)
        both_negative = product_negative and math.copysign(1, c) < 0
        is_zero_sum = Fraction(a) * Fraction(b) == 0
        return -0.0 if both_negative and is_zero_sum else 0.0
    return nearest(exact, kind)


def least(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min(a, b, key=lambda v: (v, math.copysign(1, v)))


def most(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return max(a, b, key=lambda v: (v, math.copysign(1, v)))


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def clamped(value: float) -> float:
    return 0.0 if math.isnan(value) or value <= 0 else min(value, 1.0)


def arithmetic(name: str, kind: str, *operands: float) -> float:
    dtype = np.float32 if kind == "f32" else np.float64
    values = [dtype(v) for v in operands]
    functions: dict[str, Callable[..., float]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "sqrt": np.sqrt,
        "rcp": lambda a: np.divide(dtype(1), a),
        "neg": np.negative,
        "abs": np.abs,
        "fma": lambda a, b, c: fused(float(a), float(b), float(c), kind),
        "min": lambda a, b: least(float(a), float(b)),
        "max": lambda a, b: most(float(a), float(b)),
    }
    with np.errstate(all="ignore"):
        return float(functions[name](*values))


FORMS = [
    *((name, f"{name}.f32", "f32", 2) for name in ("add", "sub", "mul", "min", "max")),
    *((name, f"{name}.ftz.f32", "f32", 2) for name in ("add", "sub", "mul", "min", "max")),
    *((name, f"{name}.sat.f32", "f32", 2) for name in ("add", "sub", "mul")),
    *((name, f"{name}.rn.ftz.sat.f32", "f32", 2) for name in ("add", "sub", "mul")),
    *((name, f"{name}.f64", "f64", 2) for name in ("add", "sub", "mul", "min", "max")),
    *((name, f"{name}.rn{ftz}.f32", "f32", 1) for name in ("sqrt", "rcp") for ftz in ("", ".ftz")),
    *((name, f"{name}.rn.f64", "f64", 1) for name in ("sqrt", "rcp")),
    *((name, f"{name}.{kind}", kind, 1) for name in ("neg", "abs") for kind in ("f32", "ftz.f32", "f64")),
    *(("div", f"div.rn.{kind}", kind, 2) for kind in ("f32", "ftz.f32", "f64")),
    *(("fma", f"fma.rn.{kind}", kind, 3) for kind in ("f32", "ftz.f32", "sat.f32", "f64")),
    ("fma", "mad.rn.f32", "f32", 3),
]

EDGES = {
    "f32": (
        0,
        1 << 31,
        1,
        0x007FFFFF,
        0x00800000,
        0x80800001,
        0x3F800000,
        0x7F7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00001,
    ),
    "f64": (
        0,
        1 << 63,
        1,
        0x000FFFFFFFFFFFFF,
        0x3FF0000000000000,
        0x7FEFFFFFFFFFFFFF,
        0x7FF << 52,
        0xFFF << 52,
        0x7FF8 << 48,
    ),
}


def patterns(kind: str) -> Values[int]:
    return one_of(EDGES[kind]) | whole_numbers(0, (1 << int(kind[1:])) - 1)


ALIKE = sorted({(kind.split(".")[-1], arity) for _, _, kind, arity in FORMS})


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "arity"), ALIKE)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_is_rounded_once_and_flushed_where_told(
    compute_all: ComputeAll, data: st.DataObject, kind: str, arity: int
) -> None:
    rows = data.draw(drawn_rows(*[patterns(kind)] * arity))
    names = ", ".join(f"%{letter}" for letter in "abc"[:arity])
    forms = {
        f"{spelling} %d, {names};": name
        for name, spelling, number, count in FORMS
        if (number.split(".")[-1], count) == (kind, arity)
    }
    for body, results in compute_all(forms, [kind] * arity, kind, rows).items():
        for row, result in zip(rows, results, strict=True):
            expected = result_of(forms[body], body, kind, row)
            if math.isnan(expected):
                assert math.isnan(decode(result, kind))
                assert kind == "f64" or result == CANONICAL_NAN
            else:
                assert result == encode(expected, kind), (body, row, expected)


def result_of(name: str, spelling: str, kind: str, row: Sequence[int]) -> float:
    operands = [decode(bits, kind) for bits in row]
    if ".ftz" in spelling:
        operands = [flushed(v) for v in operands]
    expected = arithmetic(name, kind, *operands)
    if ".ftz" in spelling:
        expected = flushed(expected)
    return clamped(expected) if ".sat" in spelling else expected


def test_product_and_sum_stay_two_roundings(compute: Compute) -> None:
    a, b = 1 + 2.0**-12, -(1 + 2.0**-11)
    row = tuple(encode(v, "f32") for v in (a, a, b))
    assert compute("mul.f32 %d, %a, %b; add.f32 %d, %d, %c;", ["f32"] * 3, "f32", [row]) == [0]
    assert compute("fma.rn.f32 %d, %a, %b, %c;", ["f32"] * 3, "f32", [row]) == [encode(2.0**-24, "f32")]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_copysign_takes_the_sign_of_the_first(compute: Compute, kind: str) -> None:
    row = (encode(-1.0, kind), encode(3.0, kind))
    assert compute(f"copysign.{kind} %d, %a, %b;", [kind] * 2, kind, [row]) == [encode(-3.0, kind)]
