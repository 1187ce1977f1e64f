"""Dot products, sums of differences, 24-bit products and pairs of 16-bit integers (PTX ISA section 9.7.1)."""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction
from gpulease.daemon.ptx.translate.forms import INTEGERS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.integer import ones
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = InstructionFamily("Further integer arithmetic", "9.7.1")

_WORD = SCALARS["b32"]
_BOTH = ("u32", "s32")
_PAIRS = ("u16x2", "s16x2")


@FAMILY.form("dp4a.left.right", 4, left=_BOTH, right=_BOTH)
@FAMILY.form("dp2a.half.left.right", 4, half=("lo", "hi"), left=_BOTH, right=_BOTH)
def dot_product(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`dp4a` adds four products of bytes to c, `dp2a` two products of a half and a byte (9.7.1.23 and 9.7.1.24)."""
    ir = t.ir
    left, right = (t.read(i.operands[n], _WORD) for n in (1, 2))
    result = t.read(i.operands[3], _WORD)
    count = 4 if i.opcode == "dp4a" else 2
    # dp2a uses the lower or the upper two bytes of b.
    start = 16 if m.get("half") == "hi" else 0
    for number in range(count):
        first = _part(t, left, 32 // count * number, 32 // count, m["left"] == "s32")
        second = _part(t, right, start + 8 * number, 8, m["right"] == "s32")
        result = ir.binary("add", result, ir.binary("mul", first, second))
    t.write(i.operands[0], _WORD, result)


@FAMILY.form("sad.type", 4, type=INTEGERS)
def absolute_difference(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Add the absolute difference of a and b to c (section 9.7.1.7)."""
    scalar, ir = m.scalar(), t.ir
    left, right, added = (t.read(i.operands[n], scalar) for n in (1, 2, 3))
    # The difference may exceed the signed range. So subtract the smaller number from the larger; the sum wraps.
    is_less = ir.compare(f"icmp {'s' if scalar.is_signed else 'u'}lt", left, right)
    difference = ir.select(is_less, ir.binary("sub", right, left), ir.binary("sub", left, right))
    t.write(i.operands[0], scalar, ir.binary("add", added, difference))


@FAMILY.form("mul24.half.type", 3, half=("lo", "hi"), type=_BOTH)
@FAMILY.form("mad24.half.type", 4, half=("lo", "hi"), type=_BOTH)
def multiply24(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the lower or upper 32 bits of a 48-bit product. `mad24` adds c (sections 9.7.1.5 and 9.7.1.6)."""
    scalar, ir = m.scalar(), t.ir
    parts = []
    for position in (1, 2):
        # Only the low 24 bits of an operand are used. They are extended according to the type.
        short = ir.cast("trunc", t.read(i.operands[position], scalar), "i24")
        parts.append(ir.resize(short, "i64", signed=scalar.is_signed))
    product = ir.binary("mul", *parts)
    if m["half"] == "hi":
        product = ir.binary("lshr", product, 16)
    result = ir.cast("trunc", product, "i32")
    if i.opcode == "mad24":
        result = ir.binary("add", result, t.read(i.operands[3], scalar))
    t.write(i.operands[0], scalar, result)


@FAMILY.form("min|max.s32.relu", 3)
@FAMILY.form("min|max.relu.s32", 3)
def clamped_extreme(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return the smaller or larger operand, or 0 if that is negative."""
    left, right = (t.read(i.operands[n], SCALARS["s32"]) for n in (1, 2))
    result = t.ir.intrinsic(f"llvm.s{i.opcode}.i32", "i32", left, right)
    t.write(i.operands[0], _WORD, t.ir.intrinsic("llvm.smax.i32", "i32", result, constant("i32", 0)))


@FAMILY.form("add|min|max.type", 3, type=_PAIRS)
@FAMILY.form("min|max.s16x2.relu", 3)
@FAMILY.form("min|max.relu.s16x2", 3)
def pairs(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Add, or return the smaller or larger operand, separately for each half of packed 16-bit integers."""
    ir = t.ir
    operands = [t.read(i.operands[n], _WORD) for n in (1, 2)]
    sign = "u" if m.get("type") == "u16x2" else "s"
    result = constant("i32", 0)
    # Extract each half, compute, and put the result back at its place.
    for shift in (0, 16):
        left, right = (ir.cast("trunc", ir.binary("lshr", word, shift), "i16") for word in operands)
        if i.opcode == "add":
            half = ir.binary("add", left, right)
        else:
            half = ir.intrinsic(f"llvm.{sign}{i.opcode}.i16", "i16", left, right)
        if "relu" in m:
            half = ir.intrinsic("llvm.smax.i16", "i16", half, constant("i16", 0))
        result = ir.binary("or", result, ir.binary("shl", ir.cast("zext", half, "i32"), shift))
    t.write(i.operands[0], _WORD, result)


@FAMILY.form("bmsk.mode.b32", 3, mode=("clamp", "wrap"))
def bit_mask(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return a mask with b ones from bit a on. Both are reduced modulo 32 or clamped to 32 (section 9.7.1.20)."""
    ir = t.ir
    start, length = (t.read(i.operands[n], _WORD) for n in (1, 2))
    if m["mode"] == "wrap":
        start, length = ir.binary("and", start, 31), ir.binary("and", length, 31)
    # Compute in 64 bits, so that a start or length of 32 is a defined shift.
    wide = [ir.intrinsic("llvm.umin.i32", "i32", value, constant("i32", 32)) for value in (start, length)]
    start, length = (ir.resize(value, "i64", signed=False) for value in wide)
    t.write(i.operands[0], _WORD, ir.cast("trunc", ir.binary("shl", ones(t, length), start), "i32"))


@FAMILY.form("szext.mode.type", 3, mode=("clamp", "wrap"), type=_BOTH)
def extend(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Extend the low b bits of a by sign or zeros. b is reduced modulo 32 or clamped to 32 (section 9.7.1.21)."""
    ir, scalar = t.ir, m.scalar()
    value, count = t.read(i.operands[1], scalar), t.read(i.operands[2], SCALARS["u32"])
    if m["mode"] == "wrap":
        count = ir.binary("and", count, 31)
    count = ir.intrinsic("llvm.umin.i32", "i32", count, constant("i32", 32))
    # Shift the field's top bit to bit 31, then shift back down. Compute in 64 bits, because the shift may be 32.
    shift = ir.resize(ir.binary("sub", constant("i32", 32), count), "i64", signed=False)
    moved = ir.binary("shl", ir.resize(value, "i64", signed=False), shift)
    moved = ir.resize(ir.cast("trunc", moved, "i32"), "i64", signed=scalar.is_signed)
    result = ir.binary("ashr" if scalar.is_signed else "lshr", moved, shift)
    t.write(i.operands[0], scalar, ir.cast("trunc", result, "i32"))


def _part(t: OperandTranslator, word: Value, start: int, bits: int, signed: bool) -> Value:
    """Return a range of bits as a 32-bit number, sign-extended if `signed`."""
    part = t.ir.cast("trunc", t.ir.binary("lshr", word, start), f"i{bits}")
    return t.ir.resize(part, "i32", signed=signed)
