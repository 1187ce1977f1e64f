"""Floating-point formats by their definition: converts bits to exact numbers, and rounds exact numbers to bits."""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Kind:
    bits: int
    digits: int
    bias: int

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.digits

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nan(self) -> int:
        return self.sign - 1

    @property
    def edges(self) -> list[int]:
        normal, one = 1 << self.digits, self.bias << self.digits
        some = [0, 1, normal - 1, normal, normal + 1, one - 1, one, one + 1, one + normal // 2, self.infinity - 1]
        some += [self.infinity, self.infinity + 1, self.nan]
        return some + [v | self.sign for v in some]


KINDS = {"f16": Kind(16, 10, 15), "bf16": Kind(16, 7, 127), "f32": Kind(32, 23, 127), "f64": Kind(64, 52, 1023)}

# An exact number; a float only for infinities, NaN, and zero, which has a sign.
Number = Fraction | float


def decode(bits: int, kind: Kind) -> Number:
    negative, magnitude = bits >> (kind.bits - 1), bits & kind.nan
    exponent, fraction = magnitude >> kind.digits, magnitude & ((1 << kind.digits) - 1)
    if magnitude == 0:
        return -0.0 if negative else 0.0
    if magnitude >= kind.infinity:
        return math.nan if fraction else -math.inf if negative else math.inf
    if exponent:
        fraction |= 1 << kind.digits
    value = Fraction(fraction) * Fraction(2) ** (max(exponent, 1) - kind.bias - kind.digits)
    return -value if negative else value


def encode(value: Number, kind: Kind, mode: str = "rn") -> int:
    """Return the bits of a number, rounded by mode rn, rz, rm, rp or rna. Every NaN gets all bits except the sign."""
    if isinstance(value, float):
        if math.isnan(value):
            return kind.nan
        if math.isinf(value) or value == 0:
            return (kind.sign if math.copysign(1, value) < 0 else 0) | (kind.infinity if value else 0)
        value = Fraction(value)
    if value == 0:
        return 0
    size, negative = abs(value), value < 0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, 1 - kind.bias) - kind.digits)
    count = _whole(size / unit, mode, negative)
    rounded = count * unit
    sign = kind.sign if negative else 0
    if rounded >= Fraction(2) ** (kind.bias + 1):
        towards_zero = mode == "rz" or mode == ("rp" if negative else "rm")
        return sign | (kind.infinity - 1 if towards_zero else kind.infinity)
    # Bit patterns of positive numbers are ordered like the numbers, so add units in the last place to the exponent's
    # first number.
    if exponent < 1 - kind.bias:
        return sign | count
    return sign | (((exponent + kind.bias) << kind.digits) + count - (1 << kind.digits))


def signed(value: int, bits: int) -> int:
    """Return the number that `bits` bits represent in two's complement."""
    return value - (1 << bits) if value >> (bits - 1) else value


def number(pattern: int, kind: str) -> int:
    """Return the number that a bit pattern represents in an integer type."""
    return signed(pattern, int(kind[1:])) if kind[0] == "s" else pattern


def limits(kind: str) -> tuple[int, int]:
    """Return the least and the greatest number of an integer type."""
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _whole(value: Fraction, mode: str, negative: bool) -> int:
    if mode == "rn":
        return round(value)
    if mode == "rna":
        return math.floor(value + Fraction(1, 2))
    away = mode == ("rm" if negative else "rp")
    return math.ceil(value) if away else math.floor(value)


def flushed(bits: int, kind: Kind) -> int:
    """Return subnormal bits as zero with the same sign, and other bits unchanged."""
    return bits & kind.sign if bits & kind.nan < 1 << kind.digits else bits


def clamped(value: Number) -> Number:
    """Apply .sat: clamp to [0, 1]; NaN and -0 become +0."""
    return value if value > 0 and value < 1 else 1.0 if value >= 1 else 0.0
