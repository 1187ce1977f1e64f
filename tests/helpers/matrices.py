"""The elements of a matrix that each thread has (PTX ISA section 9.7.15.5), and sums in the order of an H100."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from helpers.exact import KINDS, Kind, Number, decode, encode

# The row and column of element i of a lane, from the lane's group g and its number t in the group.
Place = Callable[[int, int, int], tuple[int, int]]

TF32 = KINDS["f32"]
E4M3 = Kind(8, 3, 7)
FORMATS = {**KINDS, "tf32": TF32, "e4m3": E4M3, "e5m2": Kind(8, 2, 15)}
PLACES_BEHIND = 25


@dataclass(frozen=True)
class Shape:
    """One shape: how many elements of A, B and C each lane has, and where they are in the matrices."""

    m: int
    n: int
    k: int
    counts: tuple[int, int, int]
    a: Place
    b: Place
    c: Place


def _c16(g: int, t: int, i: int) -> tuple[int, int]:
    return g + 8 * (i >= 2), 2 * t + i % 2


SHAPES = {
    "m16n8k8.16": Shape(
        16, 8, 8, (4, 2, 4), lambda g, t, i: (g + 8 * (i >= 2), 2 * t + i % 2), lambda g, t, i: (2 * t + i, g), _c16
    ),
    "m16n8k16.16": Shape(
        16,
        8,
        16,
        (8, 4, 4),
        lambda g, t, i: (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i >= 4)),
        lambda g, t, i: (2 * t + i % 2 + 8 * (i >= 2), g),
        _c16,
    ),
    "m16n8k4.32": Shape(16, 8, 4, (2, 1, 4), lambda g, t, i: (g + 8 * i, t), lambda g, t, i: (t, g), _c16),
    "m16n8k8.32": Shape(
        16,
        8,
        8,
        (4, 2, 4),
        lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i >= 2)),
        lambda g, t, i: (t + 4 * i, g),
        _c16,
    ),
    "m8n8k16.8": Shape(
        8,
        8,
        16,
        (4, 4, 2),
        lambda g, t, i: (g, 4 * t + i),
        lambda g, t, i: (4 * t + i, g),
        lambda g, t, i: (g, 2 * t + i),
    ),
    "m16n8k16.8": Shape(
        16,
        8,
        16,
        (8, 4, 4),
        lambda g, t, i: (g + 8 * (i >= 4), 4 * t + i % 4),
        lambda g, t, i: (4 * t + i, g),
        _c16,
    ),
    "m16n8k32.8": Shape(
        16,
        8,
        32,
        (16, 8, 4),
        lambda g, t, i: (g + 8 * (i // 4 % 2), 4 * t + i % 4 + 16 * (i >= 8)),
        lambda g, t, i: (4 * t + i % 4 + 16 * (i >= 4), g),
        _c16,
    ),
    "m8n8k4.64": Shape(
        8, 8, 4, (1, 1, 2), lambda g, t, i: (g, t), lambda g, t, i: (t, g), lambda g, t, i: (g, 2 * t + i)
    ),
    **{
        f"m16n8k{k}.64": Shape(
            16,
            8,
            k,
            (k // 2, k // 4, 4),
            lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i // 2)),
            lambda g, t, i: (t + 4 * i, g),
            _c16,
        )
        for k in (4, 8, 16)
    },
}


def of_bytes(a: Sequence[int], b: Sequence[int], c: int, kinds: tuple[str, str]) -> int:
    """Return the bits of a row times a column plus a number, for floats of 8 bits.

    They are multiplied as f16: first the lower two of each four elements, then the upper two. Then C is added.
    """
    half, single = KINDS["f16"], KINDS["f32"]
    sofar = 0
    for upper in (0, 2):
        chosen = [k for k in range(len(a)) if k % 4 in (upper, upper + 1)]
        left = [as_half(a[k], kinds[0]) for k in chosen]
        right = [as_half(b[k], kinds[1]) for k in chosen]
        sofar = dot(left, right, sofar, (half, half), single, single)
    left_over, added = decode(sofar, single), decode(c, single)
    if isinstance(left_over, Fraction) and isinstance(added, Fraction):
        return encode(left_over + added, single)
    return encode(float(left_over) + float(added), single)


def as_half(byte: int, kind: str) -> int:
    """Return a float of 8 bits as f16, which is exact. E4m3 has no infinities and a single NaN."""
    magnitude, sign = byte & 0x7F, (byte & 0x80) << 8
    if kind == "e5m2":
        return byte << 8
    if magnitude == 0x7F:
        return KINDS["f16"].nan
    if magnitude >= 0x78:
        return sign | encode(Fraction(32 * (magnitude % 8 + 8)), KINDS["f16"])
    return sign | encode(decode(magnitude, E4M3), KINDS["f16"])


def exponent(bits: int, kind: Kind) -> int:
    """Return the exponent in the bits; a subnormal number has the least exponent."""
    return max((bits & kind.nan) >> kind.digits, 1) - kind.bias


def dot(a: Sequence[int], b: Sequence[int], c: int, kinds: tuple[Kind, Kind], added: Kind, into: Kind) -> int:
    """Return the bits of a row times a column plus a number.

    All terms are truncated 25 places after the greatest exponent, and then added exactly.
    """
    terms: list[tuple[Number, int]] = [(decode(c, added), exponent(c, added))]
    for x, y in zip(a, b, strict=True):
        left, right = decode(x, kinds[0]), decode(y, kinds[1])
        exact = isinstance(left, Fraction) and isinstance(right, Fraction)
        product = left * right if exact else float(left) * float(right)
        terms.append((product, exponent(x, kinds[0]) + exponent(y, kinds[1])))
    if not all(math.isfinite(value) for value, _ in terms):
        return encode(sum(float(value) for value, _ in terms), into)
    top = max(-126 if value == 0 else power for value, power in terms)
    unit = Fraction(2) ** (top - PLACES_BEHIND)
    total = sum((math.trunc(Fraction(value) / unit) for value, _ in terms), 0) * unit
    if into.bits == 32 and abs(total) >= 2**128:
        return encode(math.copysign(math.inf, total), into)
    bits = encode(total, into, "rz" if into.bits == 32 else "rn")
    return bits if bits & into.nan else 0
