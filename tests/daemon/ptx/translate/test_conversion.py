import math
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, drawn_rows, one_of, whole_numbers
from helpers.exact import limits, number

pytestmark = pytest.mark.exhaustive

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
ComputeAll = Callable[..., dict[str, list[int]]]

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
ROUND: dict[str, Callable[[float], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def decoded(pattern: int, kind: str) -> float:
    code, size = ("<f", 4) if kind == "f32" else ("<d", 8)
    return float(struct.unpack(code, pattern.to_bytes(size, "little"))[0])


def encoded(value: float, kind: str) -> int:
    with np.errstate(over="ignore"):
        return int.from_bytes((np.float32 if kind == "f32" else np.float64)(value).tobytes(), "little")


def nearest_single(value: int) -> float:
    """An integer rounded once to 24 digits, ties to even."""
    shift = max(0, abs(value).bit_length() - 24)
    kept, rest = abs(value) >> shift, abs(value) & ((1 << shift) - 1)
    half = 1 << shift - 1 if shift else 1
    kept += int(shift > 0 and (rest > half or (rest == half and kept & 1 == 1)))
    return math.copysign(float(kept << shift), value)


def integers(kind: str) -> Values[int]:
    most = (1 << int(kind[1:])) - 1
    return one_of([0, 1, most, most // 2, most // 2 + 1]) | whole_numbers(0, most)


def floats(kind: str) -> Values[int]:
    halves = [encoded(v, kind) for v in (0.5, 1.5, -0.5, -1.5, 2.5, 1e10, -1e10, 1e30, 127.5, -129.0, 65535.9, -0.0)]
    return one_of(halves) | whole_numbers(0, (1 << int(kind[1:])) - 1)


SETTINGS = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("source", INTEGERS)
@settings(SETTINGS, max_examples=2)
@given(data=st.data())
def test_integers_are_cut_extended_or_clamped(compute_all: ComputeAll, data: st.DataObject, source: str) -> None:
    rows = data.draw(drawn_rows(integers(source)))
    values = [number(pattern, source) for (pattern,) in rows]
    for into in INTEGERS:
        low, high = limits(into)
        mask = (1 << int(into[1:])) - 1
        wanted = {
            f"cvt.{into}.{source} %d, %a;": [value & mask for value in values],
            f"cvt.sat.{into}.{source} %d, %a;": [max(low, min(high, value)) & mask for value in values],
        }
        assert compute_all(wanted, [source], into, rows) == wanted


def whole(value: float, mode: str, into: str, source: str) -> int:
    low, high = limits(into)
    if math.isnan(value):
        # Section 9.7.9.21: where 64 bits are involved, the top bit alone.
        result = 1 << int(into[1:]) - 1 if "64" in into + source else 0
    elif math.isinf(value):
        result = high if value > 0 else low
    else:
        result = max(low, min(high, ROUND[mode](value)))
    return result & ((1 << int(into[1:])) - 1)


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("into", INTEGERS[2:])
@SETTINGS
@given(data=st.data())
def test_floats_become_the_nearest_integer_there_is(
    compute_all: ComputeAll, data: st.DataObject, into: str, source: str
) -> None:
    rows = data.draw(drawn_rows(floats(source)))
    wanted = {
        f"cvt.{mode}.{into}.{source} %d, %a;": [whole(decoded(row, source), mode, into, source) for (row,) in rows]
        for mode in ROUND
    }
    assert compute_all(wanted, [source], into, rows) == wanted


@pytest.mark.parametrize("into", ["f32", "f64"])
@pytest.mark.parametrize("source", INTEGERS)
@SETTINGS
@given(data=st.data())
def test_integers_become_the_nearest_float(compute: Compute, data: st.DataObject, into: str, source: str) -> None:
    rows = data.draw(drawn_rows(integers(source)))
    convert = nearest_single if into == "f32" else float
    expected = [encoded(convert(number(pattern, source)), into) for (pattern,) in rows]
    assert compute(f"cvt.rn.{into}.{source} %d, %a;", [source], into, rows) == expected


@SETTINGS
@given(data=st.data())
def test_doubles_become_the_nearest_single(compute: Compute, data: st.DataObject) -> None:
    rows = data.draw(drawn_rows(floats("f64")))
    results = compute("cvt.rn.f32.f64 %d, %a;", ["f64"], "f32", rows)
    for (pattern,), result in zip(rows, results, strict=True):
        value = decoded(pattern, "f64")
        kept = pattern >> 32 & 1 << 31 | pattern >> 29 & 0x7FFFFF | 0x7FC00000
        assert result == (kept if math.isnan(value) else encoded(value, "f32"))


def test_a_nan_is_kept_or_made_anew_as_a_card_does(compute: Compute) -> None:
    assert compute("cvt.f32.f32 %d, %a;", ["f32"], "f32", [(0xFFC00001,)]) == [0xFFC00001]
    assert compute("cvt.rni.f32.f32 %d, %a;", ["f32"], "f32", [(0xFFC00001,)]) == [0x7FFFFFFF]
    assert compute("cvt.ftz.f64.f32 %d, %a;", ["f32"], "f64", [(0xFFC00001,)]) == [0x7FFFFFFFE0000000]


@pytest.mark.parametrize("mode", [*ROUND])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_rounding_keeps_the_type_and_the_sign(compute: Compute, mode: str, kind: str) -> None:
    values = [0.5, -0.5, 1.5, 2.5, -2.5, 1e20, -0.0, 7.0, math.inf]
    rows = [(encoded(v, kind),) for v in values]
    expected = [
        encoded(v if math.isinf(v) else math.copysign(float(ROUND[mode](float(decoded(r, kind)))), v), kind)
        for v, (r,) in zip(values, rows, strict=True)
    ]
    assert compute(f"cvt.{mode}.{kind}.{kind} %d, %a;", [kind], kind, rows) == expected


def test_narrow_results_are_extended_into_wide_registers(compute: Compute) -> None:
    assert compute("cvt.s8.s32 %d, %a;", ["s32"], "u32", [(0x1FF,), (0x7F,)]) == [0xFFFFFFFF, 0x7F]
    assert compute("cvt.u8.u32 %d, %a;", ["u32"], "u32", [(0x1FF,)]) == [0xFF]
