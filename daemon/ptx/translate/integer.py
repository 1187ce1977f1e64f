"""Integer arithmetic, bit fields, and arithmetic with carry (PTX ISA sections 9.7.1 and 9.7.2).

An instruction with .cc sets the carry flag, and a later one reads it. Here the flag is an IR value, so both must be in
the same straight-line code. If a branch, a label or a barrier is between them, or if the flag depends on a predicate,
the kernel is refused.
"""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Scalar
from gpulease.daemon.ptx.translate.forms import INTEGERS, SIGNED, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

INTEGER = InstructionFamily("Integer arithmetic", "9.7.1")

_NARROW = ("u16", "u32", "s16", "s32")
_WORDS = ("u32", "u64", "s32", "s64")
_BIT_WORDS = ("b32", "b64")
# The type of counts and positions.
_LENGTH = SCALARS["u32"]


def _wider(scalar: Scalar) -> Scalar:
    return SCALARS[f"{scalar.kind.value}{2 * scalar.bits}"]


@INTEGER.form("add|sub.type", 3, type=INTEGERS)
def add_sub(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    t.write(i.operands[0], scalar, t.ir.binary(i.opcode, *_pair(t, i, scalar)))


@INTEGER.form("add|sub.sat.s32", 3)
def saturating(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Clamp the result to the smallest or largest number, instead of wrapping."""
    scalar = SCALARS["s32"]
    left, right = _pair(t, i, scalar)
    t.write(i.operands[0], scalar, t.ir.intrinsic(f"llvm.s{i.opcode}.sat.i32", "i32", left, right))


@INTEGER.form("mul.half.type", 3, half=("lo", "hi"), type=INTEGERS)
def multiply(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the lower or upper half of the whole product."""
    scalar = m.scalar()
    left, right = _pair(t, i, scalar)
    t.write(i.operands[0], scalar, product(t, m["half"], scalar, left, right))


@INTEGER.form("mad.half.type", 4, half=("lo", "hi"), type=INTEGERS)
def multiply_add(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the lower or upper half of the whole product, plus c."""
    scalar = m.scalar()
    left, right = _pair(t, i, scalar)
    part = product(t, m["half"], scalar, left, right)
    t.write(i.operands[0], scalar, t.ir.binary("add", part, t.read(i.operands[3], scalar)))


@INTEGER.form("mul.wide.type", 3, type=_NARROW)
@INTEGER.form("mad.wide.type", 4, type=_NARROW)
def multiply_wide(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the whole product. `mad` adds c, which has the product's width."""
    scalar = m.scalar()
    wide = _wider(scalar)
    left, right = _pair(t, i, scalar)
    result = _whole_product(t, scalar, left, right)
    if i.opcode == "mad":
        result = t.ir.binary("add", result, t.read(i.operands[3], wide))
    t.write(i.operands[0], wide, result)


@INTEGER.form("div|rem.type", 3, type=INTEGERS)
def divide(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute a quotient or remainder.

    The ISA does not define division by zero. As on an H100, quotient and remainder are all ones, without a trap. The
    smallest signed number divided by -1 wraps around, with remainder 0.
    """
    scalar, ir = m.scalar(), t.ir
    left, right = _pair(t, i, scalar)
    # The host may trap if the divisor is 0 or, for signed numbers, -1. In these cases divide by 1, and select the
    # correct result afterwards.
    is_zero = ir.compare("icmp eq", right, 0)
    unsafe = is_zero
    if scalar.is_signed:
        unsafe = ir.binary("or", is_zero, ir.compare("icmp eq", right, -1))
    safe = ir.select(unsafe, constant(right.type, 1), right)
    operation = f"{'s' if scalar.is_signed else 'u'}{i.opcode}"
    result = ir.binary(operation, left, safe)
    if i.opcode == "div" and scalar.is_signed:
        by_minus_one = ir.compare("icmp eq", right, -1)
        result = ir.select(by_minus_one, ir.binary("sub", constant(left.type, 0), left), result)
    result = ir.select(is_zero, constant(left.type, -1), result)
    t.write(i.operands[0], scalar, result)


@INTEGER.form("min|max.type", 3, type=INTEGERS)
def minimum_maximum(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    left, right = _pair(t, i, scalar)
    sign = "s" if scalar.is_signed else "u"
    name = f"llvm.{sign}{i.opcode}.i{scalar.bits}"
    t.write(i.operands[0], scalar, t.ir.intrinsic(name, left.type, left, right))


@INTEGER.form("neg.type", 2, type=SIGNED)
def negate(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Negate. The smallest number stays the same, because its negative does not exist."""
    scalar = m.scalar()
    value = t.read(i.operands[1], scalar)
    t.write(i.operands[0], scalar, t.ir.binary("sub", constant(value.type, 0), value))


@INTEGER.form("abs.type", 2, type=SIGNED)
def absolute(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the absolute value. The smallest number stays the same, because its negative does not exist."""
    scalar = m.scalar()
    value = t.read(i.operands[1], scalar)
    name = f"llvm.abs.i{scalar.bits}"
    # The flag 0 says that the result is also defined for the smallest number.
    t.write(i.operands[0], scalar, t.ir.intrinsic(name, value.type, value, constant("i1", 0)))


@INTEGER.form("popc|clz.type", 2, type=_BIT_WORDS)
def count_bits(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`popc` counts ones. `clz` counts leading zeros; for 0, these are all bits."""
    scalar = m.scalar()
    value = t.read(i.operands[1], scalar)
    if i.opcode == "popc":
        count = t.ir.intrinsic(f"llvm.ctpop.i{scalar.bits}", value.type, value)
    else:
        count = t.ir.intrinsic(f"llvm.ctlz.i{scalar.bits}", value.type, value, constant("i1", 0))
    t.write(i.operands[0], _LENGTH, t.ir.resize(count, "i32", signed=False))


@INTEGER.form("brev.type", 2, type=_BIT_WORDS)
def reverse_bits(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    value = t.read(i.operands[1], scalar)
    t.write(i.operands[0], scalar, t.ir.intrinsic(f"llvm.bitreverse.i{scalar.bits}", value.type, value))


@INTEGER.form("bfind{.shiftamt}.type", 2, type=_WORDS)
def find_bit(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return the position of the highest bit that differs from the sign; all ones if there is none.

    With .shiftamt, return the distance of that bit from the top bit.
    """
    scalar, ir = m.scalar(), t.ir
    value = t.read(i.operands[1], scalar)
    # Complement a negative number, so that the bit to find is a one in all cases.
    if scalar.is_signed:
        value = ir.binary("xor", value, ir.binary("ashr", value, scalar.bits - 1))
    in_front = ir.intrinsic(f"llvm.ctlz.i{scalar.bits}", value.type, value, constant("i1", 0))
    position = in_front
    if "shiftamt" not in m:
        position = ir.binary("sub", constant(value.type, scalar.bits - 1), in_front)
    position = ir.select(ir.compare("icmp eq", value, 0), constant(value.type, -1), position)
    t.write(i.operands[0], _LENGTH, ir.resize(position, "i32", signed=False))


@INTEGER.form("bfe.type", 4, type=_WORDS)
def extract_field(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Extract `length` bits from `start` on. A signed field is extended by its sign (section 9.7.1.18)."""
    scalar, ir = m.scalar(), t.ir
    kind = f"i{scalar.bits}"
    value = t.read(i.operands[1], scalar)
    start, length = (_field_number(t, i, n, kind) for n in (2, 3))
    # LLVM's shifts by the width or more are undefined. So clamp the position, and select the result for this case.
    last = constant(kind, scalar.bits - 1)
    is_past = ir.compare("icmp ugt", start, last)
    shifted = ir.binary("lshr", value, ir.intrinsic(f"llvm.umin.{kind}", kind, start, last))
    field = ir.binary("and", ir.select(is_past, constant(kind, 0), shifted), ones(t, length))
    if scalar.is_signed:
        # The sign bit is the field's last bit, or the value's last bit if the field extends beyond the value.
        end = ir.binary("sub", ir.binary("add", start, length), 1)
        top = ir.intrinsic(f"llvm.umin.{kind}", kind, end, last)
        sign = ir.cast("trunc", ir.binary("lshr", value, top), "i1")
        is_negative = ir.binary("and", sign, ir.compare("icmp ne", length, 0))
        # Fill all bits above those that were extracted from the value with the sign.
        value_bits = ir.intrinsic(f"llvm.usub.sat.{kind}", kind, constant(kind, scalar.bits), start)
        filled = ir.binary("xor", ones(t, ir.intrinsic(f"llvm.umin.{kind}", kind, value_bits, length)), -1)
        field = ir.binary("or", field, ir.select(is_negative, filled, constant(kind, 0)))
    t.write(i.operands[0], scalar, field)


@INTEGER.form("bfi.type", 5, type=_BIT_WORDS)
def insert_field(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Insert the low `length` bits of a into b, at `start` (section 9.7.1.19)."""
    scalar, ir = m.scalar(), t.ir
    kind = f"i{scalar.bits}"
    field, into = t.read(i.operands[1], scalar), t.read(i.operands[2], scalar)
    start, length = (_field_number(t, i, n, kind) for n in (3, 4))
    last = constant(kind, scalar.bits - 1)
    shift = ir.intrinsic(f"llvm.umin.{kind}", kind, start, last)
    is_past = ir.compare("icmp ugt", start, last)
    # Compute the mask of the bits to replace. It is empty if the field starts above the value's highest bit.
    mask = ir.select(is_past, constant(kind, 0), ir.binary("shl", ones(t, length), shift))
    outside_bits = ir.binary("and", into, ir.binary("xor", mask, -1))
    t.write(
        i.operands[0], scalar, ir.binary("or", outside_bits, ir.binary("and", ir.binary("shl", field, shift), mask))
    )


def _pair(t: OperandTranslator, i: Instruction, scalar: Scalar) -> tuple[Value, Value]:
    return t.read(i.operands[1], scalar), t.read(i.operands[2], scalar)


def product(t: OperandTranslator, half: str, scalar: Scalar, left: Value, right: Value) -> Value:
    """Return the lower or upper half of a product."""
    if half == "lo":
        return t.ir.binary("mul", left, right)
    high = t.ir.binary("lshr", _whole_product(t, scalar, left, right), scalar.bits)
    return t.ir.cast("trunc", high, left.type)


def _whole_product(t: OperandTranslator, scalar: Scalar, left: Value, right: Value) -> Value:
    wide = f"i{2 * scalar.bits}"
    left, right = (t.ir.resize(value, wide, signed=scalar.is_signed) for value in (left, right))
    return t.ir.binary("mul", left, right)


def _field_number(t: OperandTranslator, i: Instruction, position: int, kind: str) -> Value:
    """Read a field's start or length, a .u32 (sections 9.7.1.18 and 9.7.1.19).

    The ISA does not define the result for numbers above 255. As an H100 does, use only the low 8 bits for a 32-bit
    field, and all bits for a 64-bit field.
    """
    number = t.read(i.operands[position], _LENGTH)
    if kind == "i32":
        return t.ir.binary("and", number, 255)
    return t.ir.resize(number, kind, signed=False)


def ones(t: OperandTranslator, length: Value) -> Value:
    """Return a number with the low `length` bits set. If the type has fewer bits, all are set."""
    bits = int(length.type[1:])
    # In LLVM, a shift by the width is undefined, so select the result for this case.
    is_all = t.ir.compare("icmp uge", length, bits)
    amount = t.ir.select(is_all, constant(length.type, 0), length)
    low_ones = t.ir.binary("sub", t.ir.binary("shl", constant(length.type, 1), amount), 1)
    return t.ir.select(is_all, constant(length.type, -1), low_ones)


CARRY = InstructionFamily("Arithmetic with carry", "9.7.2")

_CARRYING = ("u32", "s32", "u64", "s64")


@CARRY.form("add|sub.cc.type", 3, type=_CARRYING)
@CARRY.form("addc|subc{.cc}.type", 3, type=_CARRYING)
def add_sub_carrying(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Add or subtract with carry. With .cc, set the flag if there is a carry or borrow."""
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    flag = _flag(t, i.opcode[:3]) if i.opcode.endswith("c") else None
    _finish(t, i, m, i.opcode[:3], _with_flag(t, i.opcode[:3], (left, right), flag))


@CARRY.form("mad.half.cc.type", 4, half=("lo", "hi"), type=_CARRYING)
@CARRY.form("madc.half{.cc}.type", 4, half=("lo", "hi"), type=_CARRYING)
def multiply_add_carrying(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute one half of a*b, plus c and the carry flag. With .cc, set the flag if the sum has a carry."""
    scalar: Scalar = m.scalar()
    left, right, added = (t.read(i.operands[n], scalar) for n in (1, 2, 3))
    part = product(t, m["half"], scalar, left, right)
    flag = _flag(t, "add") if i.opcode == "madc" else None
    _finish(t, i, m, "add", _with_flag(t, "add", (part, added), flag))


def _with_flag(
    t: OperandTranslator, operation: str, operands: tuple[Value, Value], flag: Value | None
) -> tuple[Value, Value]:
    """Return a sum or difference, including the flag if it is not None, and whether there is a carry or borrow."""
    ir, (left, right) = t.ir, operands
    result = ir.binary(operation, left, right)
    # If a sum wraps, it is less than either term. A difference wraps if the subtrahend is larger.
    carried = ir.compare("icmp ult", *((result, left) if operation == "add" else (left, right)))
    if flag is None:
        return result, carried
    # Add or subtract the flag in a second step. This step has a carry only if the result was the last number before a
    # wrap.
    carry = ir.resize(flag, left.type, signed=False)
    again = ir.binary(operation, result, carry)
    at_end = ir.compare("icmp eq", again if operation == "add" else result, constant(left.type, 0))
    return again, ir.binary("or", carried, ir.binary("and", at_end, flag))


def _flag(t: OperandTranslator, operation: str) -> Value:
    made_by, flag = t.carry or ("", None)
    if flag is None:
        raise t.problem("the carry comes from no .cc instruction right before, in the same straight code")
    # The flag of a subtraction is the opposite of an addition's, so check which of them set it.
    if made_by == operation:
        return flag
    if operation == "sub":
        raise t.problem("a carry taken as a borrow is not supported")
    # A card subtracts by adding the complement and 1. So if nothing was borrowed, an addition gets a carry. CUDA's
    # division of 128-bit integers depends on this, although the ISA does not mention it.
    return t.ir.invert(flag)


def _finish(t: OperandTranslator, i: Instruction, m: Modifiers, operation: str, result: tuple[Value, Value]) -> None:
    t.write(i.operands[0], m.scalar(), result[0])
    if "cc" not in m:
        return
    if i.guard is not None:
        raise t.problem("a carry that depends on a predicate is not supported")
    t.carry = operation, result[1]
