"""Conversions between types (PTX ISA section 9.7.9.21).

Rounding is to nearest even where a number becomes a shorter float, and any of the four to-integer modes; narrowing.py
has the others. A float that is too large for an integer type becomes its nearest number; NaN becomes 0.
"""

from gpulease.daemon.drivers.cpu.ptx.scalars import Kind, Scalar
from gpulease.daemon.drivers.cpu.ptx.syntax import Instruction
from gpulease.daemon.drivers.cpu.translate.floating import finish, flush
from gpulease.daemon.drivers.cpu.translate.forms import FLOATS, INTEGERS, Family, Modifiers
from gpulease.daemon.drivers.cpu.translate.ir import Value, constant
from gpulease.daemon.drivers.cpu.translate.operands import OperandTranslator, ir_type

FAMILY = Family("Conversion", "9.7.9.21")

_ALL_INTEGERS = ("u8", "s8", *INTEGERS)
TO_INTEGER = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@FAMILY.form("cvt{.sat}.into.source", 2, into=_ALL_INTEGERS, source=_ALL_INTEGERS)
def integer_to_integer(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Cut off or extended by the source's sign; with .sat the nearest number the type has."""
    into, source = m.scalar("into"), m.scalar("source")
    value = t.read_wide(i.operands[1], source)
    if "sat" in m:
        value = _clamp(t, value, source, into)
    t.write_wide(i.operands[0], into, t.ir.resize(value, ir_type(into), signed=source.is_signed))


@FAMILY.form("cvt.rn.into.source", 2, into=FLOATS, source=_ALL_INTEGERS)
def integer_to_float(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """The nearest float, ties to even."""
    into, source = m.scalar("into"), m.scalar("source")
    operation = "sitofp" if source.is_signed else "uitofp"
    value = t.read_wide(i.operands[1], source)
    t.write(i.operands[0], into, t.ir.cast(operation, value, ir_type(into)))


@FAMILY.form("cvt.round{.ftz}{.sat}.into.source", 2, round=tuple(TO_INTEGER), into=INTEGERS, source=("f32",))
@FAMILY.form("cvt.round{.sat}.into.source", 2, round=tuple(TO_INTEGER), into=INTEGERS, source=("f64",))
def float_to_integer(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Rounded as told, then the nearest number the type has."""
    into, source = m.scalar("into"), m.scalar("source")
    value = t.read(i.operands[1], source)
    if "ftz" in m:
        value = flush(t, value)
    value = t.ir.intrinsic(f"llvm.{TO_INTEGER[m['round']]}.f{source.bits}", value.type, value)
    sign = "s" if into.is_signed else "u"
    name = f"llvm.fpto{sign}i.sat.i{into.bits}.f{source.bits}"
    t.write_wide(i.operands[0], into, t.ir.intrinsic(name, ir_type(into), value))


@FAMILY.form("cvt{.round}{.ftz}{.sat}.f32.f32", 2, round=tuple(TO_INTEGER))
def f32_to_f32(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Rounded to an integer that stays a float, flushed, or clamped."""
    _float_to_same(t, i, m, "f32")


@FAMILY.form("cvt{.round}{.sat}.f64.f64", 2, round=tuple(TO_INTEGER))
def f64_to_f64(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Rounded to an integer that stays a float, or clamped."""
    _float_to_same(t, i, m, "f64")


@FAMILY.form("cvt.rn{.ftz}{.sat}.f32.f64", 2)
def f64_to_f32(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """The nearest float, ties to even."""
    into, source = m.scalar("f32"), m.scalar("f64")
    value = t.ir.cast("fptrunc", t.read(i.operands[1], source), "float")
    t.write(i.operands[0], into, finish(t, into, m, value))


@FAMILY.form("cvt{.ftz}{.sat}.f64.f32", 2)
def f32_to_f64(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Exact."""
    into, source = m.scalar("f64"), m.scalar("f32")
    value = t.read(i.operands[1], source)
    if "ftz" in m:
        value = flush(t, value)
    t.write(i.operands[0], into, finish(t, into, m, t.ir.cast("fpext", value, "double")))


def _float_to_same(t: OperandTranslator, i: Instruction, m: Modifiers, name: str) -> None:
    scalar = m.scalar(name)
    value = t.read(i.operands[1], scalar)
    if "ftz" in m:
        value = flush(t, value)
    if "round" in m:
        value = t.ir.intrinsic(f"llvm.{TO_INTEGER[m['round']]}.f{scalar.bits}", value.type, value)
    t.write(i.operands[0], scalar, finish(t, scalar, m, value))


def _clamp(t: OperandTranslator, value: Value, source: Scalar, into: Scalar) -> Value:
    """The number of the target type that is nearest, still in the source's width."""
    sign = "s" if source.is_signed else "u"
    low, high = _range(into)
    least, most = _range(source)
    if high < most:
        value = t.ir.intrinsic(f"llvm.{sign}min.{value.type}", value.type, value, constant(value.type, high))
    if low > least:
        value = t.ir.intrinsic(f"llvm.{sign}max.{value.type}", value.type, value, constant(value.type, low))
    return value


def _range(scalar: Scalar) -> tuple[int, int]:
    if scalar.kind is Kind.SIGNED:
        return -(2 ** (scalar.bits - 1)), 2 ** (scalar.bits - 1) - 1
    return 0, 2**scalar.bits - 1
