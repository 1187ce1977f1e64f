"""Conversions with .f16, .bf16 and .tf32, and with rounding other than to nearest even (PTX ISA section 9.7.9.21).

The source is converted to a double, exactly or rounded to odd, and the double is rounded once. NaN becomes the
destination's NaN, or 0 with .sat. In conversions from f64 to f32 and f16, NaN keeps its sign and the upper part of its
payload. An overflow gives infinity, or the largest number if the mode rounds towards zero in that direction.
"""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Scalar
from gpulease.daemon.ptx.translate.approximate import real
from gpulease.daemon.ptx.translate.conversion import TO_INTEGER, keep_nan, nearest_integer
from gpulease.daemon.ptx.translate.floating import flush, saturate
from gpulease.daemon.ptx.translate.formats import (
    F16,
    F32,
    FORMATS,
    TF32,
    Format,
    decode,
    encode,
    flush_narrow,
    round_to,
    sum_and_error,
)
from gpulease.daemon.ptx.translate.forms import INTEGERS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = InstructionFamily("Conversion with rounding", "9.7.9.21")

_F64 = SCALARS["f64"]
_WORD = SCALARS["b32"]
_ALL_INTEGERS = ("u8", "s8", *INTEGERS)
_ROUND = ("rn", "rz", "rm", "rp")
_DIRECTED = _ROUND[1:]
_IRND = tuple(TO_INTEGER)


@FAMILY.form("cvt.round{.ftz}{.sat}.into.source", 2, round=_ROUND, into=("f16",), source=("f32",))
@FAMILY.form("cvt.round{.ftz}.into.source", 2, round=_ROUND, into=("bf16",), source=("f32",))
@FAMILY.form("cvt.round.relu.into.source", 2, round=("rn", "rz"), into=("f16", "bf16"), source=("f32",))
@FAMILY.form("cvt.round{.sat}.into.source", 2, round=_ROUND, into=("f16",), source=("f64", "bf16"))
@FAMILY.form("cvt.round.into.source", 2, round=_ROUND, into=("bf16",), source=("f64", "f16"))
@FAMILY.form("cvt.round{.ftz}{.sat}.into.source", 2, round=_DIRECTED, into=("f32",), source=("f64",))
@FAMILY.form("cvt.round.into.source", 2, round=("rna",), into=("tf32",), source=("f32",))
@FAMILY.form("cvt.round{.relu}.into.source", 2, round=("rn", "rz"), into=("tf32",), source=("f32",))
@FAMILY.form("cvt{.ftz}{.sat}.into.source", 2, into=("f32",), source=("f16",))
@FAMILY.form("cvt{.sat}.into.source", 2, into=("f64",), source=("f16",))
@FAMILY.form("cvt.into.source", 2, into=("f64",), source=("bf16",))
def float_to_float(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert between floats. If the destination is shorter, there is one rounding."""
    write_double(t, i, m, m["into"], read_double(t, i, 1, m, m["source"]))


@FAMILY.form("cvt.f32.bf16", 2)
def widened(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Put the bits of a bf16 into the upper half of an f32. This also keeps the bits of a NaN."""
    bits = t.ir.cast("zext", t.read(i.operands[1], SCALARS["b16"]), "i32")
    t.write(i.operands[0], _WORD, t.ir.binary("shl", bits, 16))


@FAMILY.form("cvt.round{.relu}.into.source", 3, round=("rn", "rz"), into=("f16x2", "bf16x2"), source=("f32",))
def pair(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert two f32 to a pair: the first operand goes to the upper half, the second to the lower half."""
    into = FORMATS[m["into"].removesuffix("x2")]
    upper, lower = (
        t.ir.resize(encode(t, _narrowed(t, m, into, read_double(t, i, n, m, "f32")), into), "i32", signed=False)
        for n in (1, 2)
    )
    t.write(i.operands[0], _WORD, t.ir.binary("or", t.ir.binary("shl", upper, 16), lower))


@FAMILY.form("cvt.round{.sat}.into.source", 2, round=_ROUND, into=("f16",), source=_ALL_INTEGERS)
@FAMILY.form("cvt.round.into.source", 2, round=_ROUND, into=("bf16",), source=_ALL_INTEGERS)
@FAMILY.form("cvt.round{.sat}.into.source", 2, round=_DIRECTED, into=("f32", "f64"), source=_ALL_INTEGERS)
@FAMILY.form("cvt.rn.sat.into.source", 2, into=("f32", "f64"), source=_ALL_INTEGERS)
def integer_to_float(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert an integer of any width with one rounding."""
    source, ir = m.scalar("source"), t.ir
    value = t.read_wide(i.operands[1], source)
    # An integer of up to 32 bits is exact as a double. A longer one must not be rounded twice.
    if source.bits < 64:
        number = ir.cast("sitofp" if source.is_signed else "uitofp", value, "double")
    elif m["into"] == "f64":
        number = _long_to_double(t, source, value, m.get("round"))
    else:
        number = _long_to_odd(t, source, value)
    write_double(t, i, m, m["into"], number)


@FAMILY.form("cvt.round{.sat}.into.source", 2, round=_IRND, into=_ALL_INTEGERS, source=("f16", "bf16"))
@FAMILY.form("cvt.round{.ftz}{.sat}.into.source", 2, round=_IRND, into=("u8", "s8"), source=("f32",))
@FAMILY.form("cvt.round{.sat}.into.source", 2, round=_IRND, into=("u8", "s8"), source=("f64",))
def float_to_integer(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Round in the given mode, then clamp to the range of the type."""
    into = m.scalar("into")
    value = read_double(t, i, 1, m, m["source"])
    value = t.ir.intrinsic(f"llvm.{TO_INTEGER[m['round']]}.f64", "double", value)
    t.write_wide(i.operands[0], into, nearest_integer(t, into, m.scalar("source"), value))


@FAMILY.form("cvt{.whole}{.sat}.into.source", 2, whole=_IRND, into=("f16",), source=("f16",))
@FAMILY.form("cvt.whole.into.source", 2, whole=_IRND, into=("bf16",), source=("bf16",))
def to_whole(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Round to an integral value in the same format and, with .sat, clamp to [0, 1]."""
    value = read_double(t, i, 1, m, m["source"])
    if "whole" in m:
        value = t.ir.intrinsic(f"llvm.{TO_INTEGER[m['whole']]}.f64", "double", value)
    write_double(t, i, m, m["into"], value)


@FAMILY.form("cvt.pack.sat.into.s32", 3, into=("u16", "s16"))
@FAMILY.form("cvt.pack.sat.into.s32.b32", 4, into=("u8", "s8"))
def pack(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Clamp operands a and b, and pack them. For bytes, the low half of c is put above (section 9.7.9.22)."""
    into, ir = m.scalar("into"), t.ir
    low = -(1 << into.bits - 1) if into.is_signed else 0
    high = low + (1 << into.bits) - 1
    result = constant("i32", 0)
    # The lowest bits of the result are b; a is above it.
    for position, shift in ((1, into.bits), (2, 0)):
        value = t.read(i.operands[position], SCALARS["s32"])
        value = ir.intrinsic("llvm.smin.i32", "i32", value, constant("i32", high))
        value = ir.intrinsic("llvm.smax.i32", "i32", value, constant("i32", low))
        part = ir.binary("shl", ir.binary("and", value, (1 << into.bits) - 1), shift)
        result = ir.binary("or", result, part)
    if into.bits == 8:
        result = ir.binary("or", result, ir.binary("shl", t.read(i.operands[3], _WORD), 16))
    t.write(i.operands[0], _WORD, result)


def read_double(t: OperandTranslator, i: Instruction, position: int, m: Modifiers, kind: str) -> Value:
    """Read a float operand of any type, and return a double. .ftz flushes an f32, unless the result is an f16."""
    scalar = SCALARS[kind]
    value = t.read(i.operands[position], scalar)
    if kind == "f64":
        return value
    if kind == "f32":
        return t.ir.cast("fpext", flush(t, value) if "ftz" in m and m.get("into") != "f16" else value, "double")
    return decode(t, value, FORMATS[kind])


def write_double(t: OperandTranslator, i: Instruction, m: Modifiers, kind: str, value: Value) -> None:
    """Round, clamp and write a result of any float type."""
    if kind == "f64":
        t.write(i.operands[0], _F64, saturate(t, _F64, value) if "sat" in m else quiet(t, value))
        return
    into = FORMATS[kind]
    scalar = _WORD if into == TF32 else SCALARS[kind]
    bits = encode(t, _narrowed(t, m, into, value), into)
    # A NaN of f64 keeps its sign and payload. For other sources, the destination's NaN is written.
    if m.get("source") == "f64" and into in (F32, F16) and "sat" not in m:
        bits = keep_nan(t, value, bits, into)
    t.write(i.operands[0], scalar, bits)


def quiet(t: OperandTranslator, value: Value) -> Value:
    """Return a double. If it is a signalling NaN, make it a quiet one."""
    bits = t.ir.cast("bitcast", value, "i64")
    quieted = t.ir.cast("bitcast", t.ir.binary("or", bits, 1 << 51), "double")
    return t.ir.select(t.ir.compare("fcmp uno", value, value), quieted, value)


def _narrowed(t: OperandTranslator, m: Modifiers, into: Format, value: Value) -> Value:
    """Round a double to a format, and apply .ftz, .sat and .relu. The result is still a double."""
    value = round_to(t, value, into, m.get("round") or "rn")
    if "ftz" in m and into == F32:
        value = flush_narrow(t, value, into)
    if "sat" in m:
        value = saturate(t, _F64, value)
    if "relu" in m:
        # NaN stays, because it is not less than or equal to 0. The comparison includes 0 so that -0 becomes +0.
        value = t.ir.select(t.ir.compare("fcmp ole", value, real("double", 0.0)), real("double", 0.0), value)
    return value


def _long_to_odd(t: OperandTranslator, source: Scalar, value: Value) -> Value:
    """Convert a 64-bit integer to a double, rounded to odd: if a lower digit is lost, the last digit is set."""
    ir = t.ir
    sign, size = _sign_and_size(t, source, value)
    # From 2^53 on, a double can't represent all integers. So drop 11 bits, and set the last remaining bit if any of
    # them was set.
    is_long = ir.compare("icmp uge", size, 1 << 53)
    lost = ir.compare("icmp ne", ir.binary("and", size, 0x7FF), 0)
    short = ir.binary("or", ir.binary("lshr", size, 11), ir.cast("zext", lost, "i64"))
    scaled = ir.binary("fmul", ir.cast("uitofp", short, "double"), real("double", 2.0**11))
    number = ir.select(is_long, scaled, ir.cast("uitofp", size, "double"))
    return ir.select(sign, ir.unary("fneg", number), number)


def _long_to_double(t: OperandTranslator, source: Scalar, value: Value, mode: str) -> Value:
    """Convert a 64-bit integer to a double, rounded in the given mode."""
    ir = t.ir
    sign, size = _sign_and_size(t, source, value)
    # Both halves are exact doubles, so two-sum gives the nearest double and the exact error.
    high = ir.cast("uitofp", ir.binary("lshr", size, 32), "double")
    low = ir.cast("uitofp", ir.binary("and", size, 0xFFFFFFFF), "double")
    total, error = sum_and_error(t, ir.binary("fmul", high, real("double", 2.0**32)), low)
    bits = ir.cast("bitcast", total, "i64")
    zero = real("double", 0.0)
    # If the nearest double is on the wrong side, use its neighbour towards or away from zero.
    less = ir.select(ir.compare("fcmp olt", error, zero), ir.binary("sub", bits, 1), bits)
    rounded_up = ir.select(ir.compare("fcmp ogt", error, zero), ir.binary("add", bits, 1), bits)
    # Choose the rounding of the magnitude by the mode, for negative and for positive numbers.
    picks = {"rz": (less, less), "rm": (rounded_up, less), "rp": (less, rounded_up)}.get(mode, (bits, bits))
    number = ir.cast("bitcast", ir.select(sign, *picks), "double")
    return ir.select(sign, ir.unary("fneg", number), number)


def _sign_and_size(t: OperandTranslator, source: Scalar, value: Value) -> tuple[Value, Value]:
    if not source.is_signed:
        return constant("i1", 0), value
    negative = t.ir.compare("icmp slt", value, 0)
    return negative, t.ir.select(negative, t.ir.binary("sub", constant("i64", 0), value), value)
