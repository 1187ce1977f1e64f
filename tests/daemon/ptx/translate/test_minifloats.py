"""Floats of 8 bits against a list of all of them."""

import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers
from helpers.exact import KINDS, Kind, decode, encode

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
FEW = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LAYOUTS = {"e4m3": Kind(8, 3, 7), "e5m2": Kind(8, 2, 15)}


def value_of(kind: str, byte: int) -> float:
    """What a byte means; e4m3 uses the patterns that would be infinity and most of NaN's as numbers."""
    layout, magnitude = LAYOUTS[kind], byte & 0x7F
    sign = -1.0 if byte & 0x80 else 1.0
    if kind == "e4m3" and magnitude >= layout.infinity:
        return sign * (math.nan if magnitude == 0x7F else (magnitude % 8 + 8) * 32.0)
    return sign * abs(float(decode(magnitude, layout)))


NUMBERS = {
    kind: [(value_of(kind, byte), byte) for byte in range(0x80) if math.isfinite(value_of(kind, byte))]
    for kind in LAYOUTS
}


def nearest(kind: str, value: float | Fraction, relu: str) -> int:
    """The nearest number's byte, of two the even one; past the largest that; NaN is 0x7f."""
    if value != value:
        return 0x7F
    if relu and value <= 0:
        return 0
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    size = value if value > 0 else -value
    if size > NUMBERS[kind][-1][0]:
        return sign | NUMBERS[kind][-1][1]
    return sign | min(NUMBERS[kind], key=lambda pair: (abs(Fraction(pair[0]) - Fraction(size)), pair[1] & 1))[1]


def middles(kind: str) -> Values[float]:
    """Numbers in the middle of two neighbours, and just beside it."""
    values = [number for number, _ in NUMBERS[kind]]
    pairs = one_of(list(pairwise(values)))
    return built(lambda pair, nudge, s: s * (sum(pair) / 2 * (1 + nudge / 2**10)), pairs, whole_numbers(-1, 1), SIGNS)


def single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


SIGNS = one_of([1.0, -1.0])
SPECIAL = one_of([0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, 464.0, 466.0, 57344.0, 61440.0, 2.0**-30])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("relu", ["", ".relu"])
@FEW
@given(data=st.data())
def test_from_singles_and_halves(compute: Compute, data: st.DataObject, kind: str, relu: str) -> None:
    drawn = SPECIAL | middles(kind) | built(single, whole_numbers(0, 2**32 - 1))
    pairs = data.draw(drawn_rows(drawn, drawn))
    rows = [tuple(int.from_bytes(struct.pack("<f", v), "little") for v in pair) for pair in pairs]
    exact = [tuple(single(bits) for bits in row) for row in rows]
    found = compute(f"cvt.rn.satfinite{relu}.{kind}x2.f32 %d, %a, %b;", ["f32", "f32"], "b16", rows)
    assert found == [nearest(kind, a, relu) << 8 | nearest(kind, b, relu) for a, b in exact]
    halves = [tuple(encode(v, KINDS["f16"]) for v in pair) for pair in exact]
    packed = [(a << 16 | b,) for a, b in halves]
    found = compute(f"cvt.rn.satfinite{relu}.{kind}x2.f16x2 %d, %a;", ["b32"], "b16", packed)
    back = [[decode(bits, KINDS["f16"]) for bits in pair] for pair in halves]
    assert found == [nearest(kind, a, relu) << 8 | nearest(kind, b, relu) for a, b in back]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_to_halves(compute: Compute, kind: str, relu: str) -> None:
    rows = [(byte << 8 | (byte * 7 & 0xFF),) for byte in range(256)]

    def half(byte: int) -> int:
        value = value_of(kind, byte)
        return 0 if relu and value <= 0 else encode(value, KINDS["f16"])

    found = compute(f"cvt.rn{relu}.f16x2.{kind}x2 %d, %a;", ["b16"], "b32", rows)
    assert found == [half(row[0] >> 8) << 16 | half(row[0] & 0xFF) for row in rows]
