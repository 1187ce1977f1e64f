"""Logic and shifts (PTX ISA section 9.7.8)."""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Integer
from gpulease.daemon.ptx.translate.forms import BITS, INTEGERS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = InstructionFamily("Logic and shifts", "9.7.8")

_LOGIC = ("pred", *BITS)
_AMOUNT = SCALARS["u32"]
_WORD = SCALARS["b32"]


@FAMILY.form("and|or|xor.type", 3, type=_LOGIC)
def bitwise(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    t.write(i.operands[0], scalar, t.ir.binary(i.opcode, left, right))


@FAMILY.form("not.type", 2, type=_LOGIC)
def invert(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    value = t.read(i.operands[1], scalar)
    t.write(i.operands[0], scalar, t.ir.binary("xor", value, constant(value.type, -1)))


@FAMILY.form("lop3.b32", 5)
def any_logic(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute any function of three bits. Its value is bit 4a+2b+c of the table (section 9.7.8.6)."""
    table = i.operands[4]
    if not isinstance(table, Integer) or table.value > 255:
        raise t.problem("the table of lop3 must be a constant from 0 to 255")
    inputs = [t.read(i.operands[n], _WORD) for n in (1, 2, 3)]
    # Compute the disjunction of conjunctions, one for each bit that is set in the table.
    inverses = [t.ir.binary("xor", value, -1) for value in inputs]
    result = constant("i32", 0)
    for case in range(8):
        if table.value >> case & 1:
            a, b, c = ((inputs if case >> (2 - n) & 1 else inverses)[n] for n in range(3))
            result = t.ir.binary("or", result, t.ir.binary("and", t.ir.binary("and", a, b), c))
    t.write(i.operands[0], _WORD, result)


@FAMILY.form("shl.type", 3, type=BITS)
def shift_left(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Shift left. Amounts above the width give 0 (section 9.7.8.8)."""
    _shift(t, i, m, "shl")


@FAMILY.form("shr.type", 3, type=(*BITS, *INTEGERS))
def shift_right(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Shift right. Amounts above the width give 0 or, for signed types, copies of the sign (section 9.7.8.9)."""
    _shift(t, i, m, "ashr" if m.scalar().is_signed else "lshr")


@FAMILY.form("shf.side.mode.b32", 4, side=("l", "r"), mode=("clamp", "wrap"))
def funnel_shift(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Shift the pair b:a left or right, and return one of its words (section 9.7.8.7)."""
    low, high = (t.read(i.operands[n], _WORD) for n in (1, 2))
    amount = t.read(i.operands[3], _AMOUNT)
    # .wrap takes the amount modulo 32, .clamp limits it to 32.
    if m["mode"] == "wrap":
        amount = t.ir.binary("and", amount, 31)
    else:
        amount = t.ir.intrinsic("llvm.umin.i32", "i32", amount, constant("i32", 32))
    low, high, amount = (t.ir.cast("zext", value, "i64") for value in (low, high, amount))
    joined = t.ir.binary("or", t.ir.binary("shl", high, 32), low)
    # The result is the upper word of the shifted pair for a left shift, and the lower word for a right shift.
    if m["side"] == "l":
        joined = t.ir.binary("lshr", t.ir.binary("shl", joined, amount), 32)
    else:
        joined = t.ir.binary("lshr", joined, amount)
    t.write(i.operands[0], _WORD, t.ir.cast("trunc", joined, "i32"))


def _shift(t: OperandTranslator, i: Instruction, m: Modifiers, operation: str) -> None:
    scalar, ir = m.scalar(), t.ir
    value, amount = t.read(i.operands[1], scalar), t.read(i.operands[2], _AMOUNT)
    # LLVM's shifts by the width or more are undefined. So clamp the amount, and select the result for this case.
    amount_within = ir.intrinsic("llvm.umin.i32", "i32", amount, constant("i32", scalar.bits - 1))
    shifted = ir.binary(operation, value, ir.resize(amount_within, value.type, signed=False))
    if operation != "ashr":
        is_past = ir.compare("icmp uge", amount, scalar.bits)
        shifted = ir.select(is_past, Value(value.type, "0"), shifted)
    t.write(i.operands[0], scalar, shifted)
