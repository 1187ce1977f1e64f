"""Conversions between types (PTX ISA section 9.7.9.21).

Conversions to a shorter float round to nearest even; conversions to an integer round in any of the four modes. The
other conversions are in narrow_conversions.py. A float outside of the range of an integer type becomes the nearest
number of the type. NaN becomes 0; if the float or the integer has 64 bits, it becomes the number with only the top bit
set. The ISA also requires the top bit for conversions from f64 to 8 bits, but an H100 gives 0, and so does this module.
"""

from gpulease.daemon.ptx.parse.syntax import Instruction, Kind, Scalar
from gpulease.daemon.ptx.translate.floating import finish, flush
from gpulease.daemon.ptx.translate.formats import F32, Format
from gpulease.daemon.ptx.translate.forms import FLOATS, INTEGERS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator, ir_type

FAMILY = InstructionFamily("Conversion", "9.7.9.21")

_ALL_INTEGERS = ("u8", "s8", *INTEGERS)
# 0x7fffffff as a double.
_FLUSHED_NAN = 0x7FFFFFFFE0000000

TO_INTEGER = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@FAMILY.form("cvt{.sat}.into.source", 2, into=_ALL_INTEGERS, source=_ALL_INTEGERS)
def integer_to_integer(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Truncate or extend, according to the source's type. With .sat, clamp to the range of the type."""
    into, source = m.scalar("into"), m.scalar("source")
    # Registers wider than the types are allowed on both sides (section 9.4.1).
    value = t.read_wide(i.operands[1], source)
    if "sat" in m:
        value = _clamp(t, value, source, into)
    t.write_wide(i.operands[0], into, t.ir.resize(value, ir_type(into), signed=source.is_signed))


@FAMILY.form("cvt.rn.into.source", 2, into=FLOATS, source=_ALL_INTEGERS)
def integer_to_float(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert to the nearest float, ties to even."""
    into, source = m.scalar("into"), m.scalar("source")
    operation = "sitofp" if source.is_signed else "uitofp"
    value = t.read_wide(i.operands[1], source)
    t.write(i.operands[0], into, t.ir.cast(operation, value, ir_type(into)))


@FAMILY.form("cvt.round{.ftz}{.sat}.into.source", 2, round=tuple(TO_INTEGER), into=INTEGERS, source=("f32",))
@FAMILY.form("cvt.round{.sat}.into.source", 2, round=tuple(TO_INTEGER), into=INTEGERS, source=("f64",))
def float_to_integer(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Round in the given mode, then clamp to the range of the type."""
    into, source = m.scalar("into"), m.scalar("source")
    value = t.read(i.operands[1], source)
    if "ftz" in m:
        value = flush(t, value)
    value = t.ir.intrinsic(f"llvm.{TO_INTEGER[m['round']]}.f{source.bits}", value.type, value)
    t.write_wide(i.operands[0], into, nearest_integer(t, into, source, value))


@FAMILY.form("cvt{.round}{.ftz}{.sat}.f32.f32", 2, round=tuple(TO_INTEGER))
def f32_to_f32(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Round to an integer that stays a float, flush subnormals, or clamp to [0, 1]."""
    _float_to_same(t, i, m, "f32")


@FAMILY.form("cvt{.round}{.sat}.f64.f64", 2, round=tuple(TO_INTEGER))
def f64_to_f64(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Round to an integer that stays a float, or clamp to [0, 1]."""
    _float_to_same(t, i, m, "f64")


@FAMILY.form("cvt.rn{.ftz}{.sat}.f32.f64", 2)
def f64_to_f32(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert to the nearest f32, ties to even. NaN keeps its sign and the upper part of its payload."""
    into, source = m.scalar("f32"), m.scalar("f64")
    value = t.read(i.operands[1], source)
    result = finish(t, into, m, t.ir.cast("fptrunc", value, "float"))
    t.write(i.operands[0], into, result if "sat" in m else keep_nan(t, value, t.to_bits(result, into)))


@FAMILY.form("cvt{.ftz}{.sat}.f64.f32", 2)
def f32_to_f64(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert exactly. As on an H100, with .ftz a NaN becomes the NaN of f32 instructions."""
    into, source = m.scalar("f64"), m.scalar("f32")
    value = t.read(i.operands[1], source)
    if "ftz" in m:
        value = flush(t, value)
    result = finish(t, into, m, t.ir.cast("fpext", value, "double"))
    if "ftz" in m and "sat" not in m:
        is_nan = t.ir.compare("fcmp uno", value, value)
        result = t.ir.select(is_nan, constant("i64", _FLUSHED_NAN), t.to_bits(result, into))
    t.write(i.operands[0], into, result)


def nearest_integer(t: OperandTranslator, into: Scalar, source: Scalar, value: Value) -> Value:
    """Convert a float without a fraction to the nearest number of an integer type. `source` is the operand's type."""
    sign = "s" if into.is_signed else "u"
    kind = f"i{into.bits}"
    width = 64 if value.type == "double" else 32
    # LLVM's saturating conversion gives 0 for NaN. This is correct unless one of the types has 64 bits.
    number = t.ir.intrinsic(f"llvm.fpto{sign}i.sat.{kind}.f{width}", kind, value)
    if 64 not in (into.bits, source.bits):
        return number
    is_nan = t.ir.compare("fcmp uno", value, value)
    return t.ir.select(is_nan, constant(kind, 1 << (into.bits - 1)), number)


def keep_nan(t: OperandTranslator, value: Value, result: Value, into: Format = F32) -> Value:
    """Return `result`, or if the double is NaN, a NaN with its sign and the upper part of its payload."""
    ir = t.ir
    bits = ir.cast("bitcast", value, "i64")
    sign = ir.binary("and", ir.binary("lshr", bits, 64 - into.bits), into.sign)
    payload = ir.binary("and", ir.binary("lshr", bits, 52 - into.digits), (1 << into.digits) - 1)
    # Make it a quiet NaN, as a card does.
    quiet = into.infinity | 1 << (into.digits - 1)
    nan = ir.cast("trunc", ir.binary("or", ir.binary("or", sign, payload), quiet), f"i{into.bits}")
    return ir.select(ir.compare("fcmp uno", value, value), nan, result)


def _float_to_same(t: OperandTranslator, i: Instruction, m: Modifiers, name: str) -> None:
    scalar = m.scalar(name)
    value = t.read(i.operands[1], scalar)
    # A conversion without modifiers is a move. It keeps the bits, even those of a NaN.
    if not m.found.keys() - {name}:
        t.write(i.operands[0], scalar, value)
        return
    if "ftz" in m:
        value = flush(t, value)
    if "round" in m:
        value = t.ir.intrinsic(f"llvm.{TO_INTEGER[m['round']]}.f{scalar.bits}", value.type, value)
    t.write(i.operands[0], scalar, finish(t, scalar, m, value))


def _clamp(t: OperandTranslator, value: Value, source: Scalar, into: Scalar) -> Value:
    """Clamp to the range of the destination type. The result still has the source's width."""
    sign = "s" if source.is_signed else "u"
    low, high = _range(into)
    lowest, highest = _range(source)
    # Leave out a bound that the source type can't exceed, because it might not fit the constant's type.
    if high < highest:
        value = t.ir.intrinsic(f"llvm.{sign}min.{value.type}", value.type, value, constant(value.type, high))
    if low > lowest:
        value = t.ir.intrinsic(f"llvm.{sign}max.{value.type}", value.type, value, constant(value.type, low))
    return value


def _range(scalar: Scalar) -> tuple[int, int]:
    if scalar.kind is Kind.SIGNED:
        return -(2 ** (scalar.bits - 1)), 2 ** (scalar.bits - 1) - 1
    return 0, 2**scalar.bits - 1
