"""Floating-point formats narrower than double, and rounding to them (PTX ISA sections 5.2.3 and 6.5.2).

Results are computed as doubles, which can represent every number of these formats, and rounded to the format in a last
step. If the exact result is not a double, it is rounded to odd: of the two doubles around it, the one with an odd last
digit is chosen. A double has at least two digits more than each format, so rounding it again gives the same number as
rounding the exact result. Digits are binary digits here.
"""

from gpulease.daemon.ptx.translate.approximate import real
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator
from gpulease.protocol.fast_dataclass import dataclass

# Parts of a double.
_MAGNITUDE = (1 << 63) - 1
_SIGN = -1 << 63
_EXPONENT = 0x7FF << 52
_BIAS = 1023
_DIGITS = 52
_INFINITY = 0x7FF << 52


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format.

    Attributes:
        bits: Its width in memory.
        digits: Number of stored digits of the fraction.
        bias: The number that is added to an exponent. It is also the largest exponent.
        nan: The bits of the NaN that instructions produce.
    """

    bits: int
    digits: int
    bias: int
    nan: int

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        """The bits of infinity. Larger magnitudes are NaN."""
        return (2 * self.bias + 1) << self.digits

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.digits) * 2.0**self.bias

    @property
    def smallest_normal(self) -> float:
        """The smallest normal number; smaller ones are subnormal."""
        return 2.0 ** (1 - self.bias)


F16 = Format(bits=16, digits=10, bias=15, nan=0x7FFF)
BF16 = Format(bits=16, digits=7, bias=127, nan=0x7FFF)
F32 = Format(bits=32, digits=23, bias=127, nan=0x7FFFFFFF)
# A .tf32 is an f32 with 0 in its last 13 bits.
TF32 = Format(bits=32, digits=10, bias=127, nan=0x7FFFFFFF)

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "tf32": TF32}


def bits_of(t: OperandTranslator, value: Value) -> Value:
    return t.ir.cast("bitcast", value, "i64")


def double_of(t: OperandTranslator, bits: Value) -> Value:
    return t.ir.cast("bitcast", bits, "double")


def decode(t: OperandTranslator, bits: Value, source: Format) -> Value:
    """Convert a number, given by its bits, to a double. This is exact."""
    ir = t.ir
    # All formats except for .f16 are the upper part of an f32.
    if source != F16:
        word = ir.resize(bits, "i32", signed=False)
        if source == BF16:
            word = ir.binary("shl", word, 16)
        return ir.cast("fpext", ir.cast("bitcast", word, "float"), "double")
    wide = ir.resize(bits, "i64", signed=False)
    magnitude = ir.binary("and", wide, 0x7FFF)
    # Shift exponent and fraction to their places. The multiplication then corrects the bias, even for subnormals.
    placed = ir.binary("shl", magnitude, _DIGITS - F16.digits)
    scaled = ir.binary("fmul", double_of(t, placed), real("double", 2.0 ** (_BIAS - F16.bias)))
    # Infinity and NaN have the largest exponent. The product would be an ordinary number, so use the largest exponent.
    special = ir.binary("or", placed, _INFINITY)
    is_special = ir.compare("icmp uge", magnitude, 0x7C00)
    number = ir.select(is_special, special, bits_of(t, scaled))
    sign = ir.binary("shl", ir.binary("and", wide, 0x8000), 48)
    return double_of(t, ir.binary("or", number, sign))


def encode(t: OperandTranslator, value: Value, into: Format) -> Value:
    """Return the bits of a double in a format that can represent it. Any NaN becomes the format's `nan`."""
    ir = t.ir
    is_nan = ir.compare("fcmp uno", value, value)
    if into == F16:
        number = _encode_f16(t, value)
    else:
        number = ir.cast("bitcast", ir.cast("fptrunc", value, "float"), "i32")
        if into == BF16:
            number = ir.cast("trunc", ir.binary("lshr", number, 16), "i16")
    return ir.select(is_nan, constant(number.type, into.nan), number)


def _encode_f16(t: OperandTranslator, value: Value) -> Value:
    # Normal numbers: correct the bias and shift the fraction into place.
    ir = t.ir
    bits = bits_of(t, value)
    magnitude = ir.binary("and", bits, _MAGNITUDE)
    rebiased = ir.binary("sub", magnitude, (_BIAS - F16.bias) << _DIGITS)
    normal = ir.binary("lshr", rebiased, _DIGITS - F16.digits)
    # Subnormal numbers are multiples of 2^-24, which is the unit of a double's last digit just above 2^28.
    counted = ir.binary("fadd", double_of(t, magnitude), real("double", 2.0**28))
    subnormal = ir.binary("and", bits_of(t, counted), 0x7FF)
    is_small = ir.compare("icmp ult", magnitude, (_BIAS + 1 - F16.bias) << _DIGITS)
    number = ir.select(is_small, subnormal, normal)
    number = ir.select(ir.compare("icmp eq", magnitude, _INFINITY), constant("i64", 0x7C00), number)
    sign = ir.binary("and", ir.binary("lshr", bits, 48), 0x8000)
    return ir.cast("trunc", ir.binary("or", number, sign), "i16")


def round_to(t: OperandTranslator, value: Value, into: Format, mode: str) -> Value:
    """Round a double to a number of the format, in the mode rn, rz, rm, rp, or rna (ties away from zero)."""
    ir = t.ir
    # Step 1: round the magnitude. Its exponent, clamped to the format's range, decides where the last digit is.
    bits = bits_of(t, value)
    sign = ir.binary("and", bits, _SIGN)
    magnitude = ir.binary("and", bits, _MAGNITUDE)
    size = double_of(t, magnitude)
    exponent = ir.binary("and", magnitude, _EXPONENT)
    for name, bound in (("umax", _BIAS + 1 - into.bias), ("umin", _BIAS + into.bias)):
        exponent = ir.intrinsic(f"llvm.{name}.i64", "i64", exponent, constant("i64", bound << _DIGITS))
    # The last digit of a double of this size is the format's last digit. So adding it rounds there, to nearest even.
    rounder = double_of(t, ir.binary("add", exponent, (_DIGITS - into.digits) << _DIGITS))
    nearest = ir.binary("fsub", ir.binary("fadd", size, rounder), rounder)
    # The other modes need one unit of the last digit.
    unit = double_of(t, ir.binary("sub", exponent, into.digits << _DIGITS))
    is_negative = ir.compare("icmp slt", bits, 0)
    rounded = _pick(t, mode, (size, nearest, unit), is_negative)
    # Step 2: on overflow, the result is infinity or the largest number, depending on the mode.
    infinity, largest = real("double", float("inf")), real("double", into.largest)
    past = {"rn": infinity, "rna": infinity, "rz": largest}.get(mode)
    if past is None:
        below, above = (infinity, largest) if mode == "rm" else (largest, infinity)
        past = ir.select(is_negative, below, above)
    rounded = ir.select(ir.compare("fcmp ogt", rounded, largest), past, rounded)
    # Step 3: infinity stays infinity. Restore the sign.
    rounded = ir.select(ir.compare("fcmp oeq", size, infinity), infinity, rounded)
    return double_of(t, ir.binary("or", bits_of(t, rounded), sign))


def _pick(t: OperandTranslator, mode: str, around: tuple[Value, Value, Value], is_negative: Value) -> Value:
    """Round a magnitude to a multiple of the unit. `around` is the magnitude, its nearest multiple, and the unit."""
    ir = t.ir
    size, nearest, unit = around
    if mode == "rn":
        return nearest
    # The nearest multiple may be above the magnitude. Rounding towards zero needs the multiple below.
    lower = ir.select(ir.compare("fcmp ogt", nearest, size), ir.binary("fsub", nearest, unit), nearest)
    if mode == "rz":
        return lower
    upper = ir.binary("fadd", lower, unit)
    if mode == "rna":
        half = ir.binary("fmul", unit, real("double", 0.5))
        return ir.select(ir.compare("fcmp oge", ir.binary("fsub", size, lower), half), upper, lower)
    # Rounding down increases a negative number's magnitude, and rounding up increases a positive number's.
    farther = ir.select(ir.compare("fcmp olt", lower, size), upper, lower)
    return ir.select(is_negative, *((farther, lower) if mode == "rm" else (lower, farther)))


def sum_to_odd(t: OperandTranslator, left: Value, right: Value) -> Value:
    """Return the sum of two doubles, rounded to odd. For zeros, infinities and NaN this is the host's sum."""
    ir = t.ir
    # If the sum is inexact and even, the result is the neighbour in the direction of the error, which is odd.
    total, error = sum_and_error(t, left, right)
    bits = bits_of(t, total)
    points_down = ir.compare("icmp slt", ir.binary("xor", bits, bits_of(t, error)), 0)
    moved = ir.binary("add", bits, ir.select(points_down, constant("i64", -1), constant("i64", 1)))
    is_even = ir.compare("icmp eq", ir.binary("and", bits, 1), 0)
    must_move = ir.binary("and", is_even, ir.compare("fcmp one", error, real("double", 0.0)))
    return double_of(t, ir.select(must_move, moved, bits))


def sum_and_error(t: OperandTranslator, left: Value, right: Value) -> tuple[Value, Value]:
    """Return the rounded sum of two doubles, and the exact error of the rounding, by Knuth's two-sum."""
    ir = t.ir
    total = ir.binary("fadd", left, right)
    right_part = ir.binary("fsub", total, left)
    left_part = ir.binary("fsub", total, right_part)
    error = ir.binary("fadd", ir.binary("fsub", left, left_part), ir.binary("fsub", right, right_part))
    return total, error


def flush_narrow(t: OperandTranslator, value: Value, kind: Format) -> Value:
    """Flush a double to a zero of the same sign if it is subnormal in the format."""
    ir = t.ir
    bits = bits_of(t, value)
    limit = bits_of(t, real("double", kind.smallest_normal))
    is_small = ir.compare("icmp ult", ir.binary("and", bits, _MAGNITUDE), limit)
    return double_of(t, ir.select(is_small, ir.binary("and", bits, _SIGN), bits))
