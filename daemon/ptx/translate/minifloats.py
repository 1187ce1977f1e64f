"""Conversions from and to floats of 8 bits, in pairs (PTX ISA sections 5.2.3 and 9.7.9.21).

E4m3 has no infinities. Its only NaN has all bits set except for the sign. Conversions to 8 bits saturate: infinities
and numbers with a larger magnitude than the largest number become that number. NaN becomes the destination's NaN.
"""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction
from gpulease.daemon.ptx.translate.approximate import real
from gpulease.daemon.ptx.translate.formats import F16, bits_of, decode, double_of, encode
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator
from gpulease.protocol.fast_dataclass import dataclass

FAMILY = InstructionFamily("Floats of 8 bits", "9.7.9.21")

_PAIR = SCALARS["b16"]
_HALVES = SCALARS["b32"]
_NAN = 0x7F
_MAGNITUDE = (1 << 63) - 1
_BIAS, _DIGITS = 1023, 52


@dataclass(frozen=True, slots=True)
class Minifloat:
    """A format of 8 bits: the number of digits of the fraction, the bias of the exponent, and the largest number."""

    digits: int
    bias: int
    largest: float


_KINDS = {"e4m3x2": Minifloat(3, 7, 448.0), "e5m2x2": Minifloat(2, 15, 57344.0)}


@FAMILY.form("cvt.rn.satfinite{.relu}.into.f32", 3, into=tuple(_KINDS))
def from_singles(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert two f32: a goes to the upper byte, b to the lower."""
    numbers = [t.ir.cast("fpext", t.read(i.operands[n], SCALARS["f32"]), "double") for n in (1, 2)]
    _write_pair(t, i, m, numbers)


@FAMILY.form("cvt.rn.satfinite{.relu}.into.f16x2", 2, into=tuple(_KINDS))
def from_halves(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert a pair of f16: the upper half goes to the upper byte, the lower to the lower."""
    pair = t.read(i.operands[1], _HALVES)
    halves = [t.ir.cast("trunc", t.ir.binary("lshr", pair, shift), "i16") for shift in (16, 0)]
    _write_pair(t, i, m, [decode(t, half, F16) for half in halves])


@FAMILY.form("cvt.rn{.relu}.f16x2.source", 2, source=tuple(_KINDS))
def to_halves(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert both bytes to f16, which is exact."""
    ir, kind = t.ir, _KINDS[m["source"]]
    pair = t.read(i.operands[1], _PAIR)
    result = constant("i32", 0)
    for shift in (8, 0):
        bits = ir.binary("and", ir.cast("zext", ir.binary("lshr", pair, shift), "i64"), 0xFF)
        value = _relu(t, m, _decode(t, bits, kind))
        half = ir.cast("zext", encode(t, value, F16), "i32")
        result = ir.binary("or", result, ir.binary("shl", half, 2 * shift))
    t.write(i.operands[0], _HALVES, result)


def _write_pair(t: OperandTranslator, i: Instruction, m: Modifiers, numbers: list[Value]) -> None:
    ir, kind = t.ir, _KINDS[m["into"]]
    upper, lower = (ir.cast("trunc", _encode(t, _relu(t, m, number), kind), "i16") for number in numbers)
    t.write(i.operands[0], _PAIR, ir.binary("or", ir.binary("shl", upper, 8), lower))


def _relu(t: OperandTranslator, m: Modifiers, value: Value) -> Value:
    """With .relu, replace values that are not above 0 with 0. NaN stays."""
    if "relu" not in m:
        return value
    return t.ir.select(t.ir.compare("fcmp ole", value, real("double", 0.0)), real("double", 0.0), value)


def _decode(t: OperandTranslator, bits: Value, kind: Minifloat) -> Value:
    ir = t.ir
    # As for .f16, shift exponent and fraction to their places, and correct the bias by a multiplication.
    magnitude = ir.binary("and", bits, 0x7F)
    placed = double_of(t, ir.binary("shl", magnitude, _DIGITS - kind.digits))
    size = ir.binary("fmul", placed, real("double", 2.0 ** (_BIAS - kind.bias)))
    # E5m2 has infinity and NaN like .f16. E4m3 has only one NaN.
    if kind.bias == F16.bias:
        infinity = 31 << kind.digits
        size = ir.select(ir.compare("icmp eq", magnitude, infinity), real("double", float("inf")), size)
        is_nan = ir.compare("icmp ugt", magnitude, infinity)
    else:
        is_nan = ir.compare("icmp eq", magnitude, _NAN)
    size = ir.select(is_nan, real("double", float("nan")), size)
    sign = ir.binary("shl", ir.binary("and", bits, 0x80), 56)
    return double_of(t, ir.binary("or", bits_of(t, size), sign))


def _encode(t: OperandTranslator, value: Value, kind: Minifloat) -> Value:
    """Round a double to nearest even, and return the byte as i64."""
    ir = t.ir
    # Step 1: saturate, then round at the format's last digit, which for small numbers is the last digit of subnormals.
    bits = bits_of(t, value)
    size = double_of(t, ir.binary("and", bits, _MAGNITUDE))
    largest = real("double", kind.largest)
    size = ir.select(ir.compare("fcmp ogt", size, largest), largest, size)
    least = (_BIAS + 1 - kind.bias) << _DIGITS
    exponent = ir.binary("and", bits_of(t, size), 0x7FF << _DIGITS)
    exponent = ir.intrinsic("llvm.umax.i64", "i64", exponent, constant("i64", least))
    # The last digit of a double of this size is the format's last digit. So adding it rounds there.
    rounder = double_of(t, ir.binary("add", exponent, (_DIGITS - kind.digits) << _DIGITS))
    nearest = ir.binary("fsub", ir.binary("fadd", size, rounder), rounder)
    # Step 2: compute the bits of a normal number, with the format's bias.
    rebiased = ir.binary("sub", bits_of(t, nearest), (_BIAS - kind.bias) << _DIGITS)
    normal = ir.binary("lshr", rebiased, _DIGITS - kind.digits)
    # A subnormal is a number of units. Adding this constant puts the number into the last digits of a double.
    unit_digit = real("double", 2.0 ** (1 - kind.bias + _DIGITS - kind.digits))
    subnormal = ir.binary("and", bits_of(t, ir.binary("fadd", nearest, unit_digit)), 0xF)
    is_small = ir.compare("fcmp olt", nearest, real("double", 2.0 ** (1 - kind.bias)))
    number = ir.select(is_small, subnormal, normal)
    # Step 3: add the sign, and select NaN, which the previous steps have changed into a number.
    sign = ir.binary("and", ir.binary("lshr", bits, 56), 0x80)
    is_nan = ir.compare("fcmp uno", value, value)
    return ir.select(is_nan, constant("i64", _NAN), ir.binary("or", number, sign))
