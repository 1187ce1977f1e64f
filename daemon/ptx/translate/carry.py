"""Arithmetic with carry (PTX ISA section 9.7.2).

The carry flag lives from an instruction ending in .cc to the next one that reads it. Here the flag is an IR value of
straight code: a chain that a branch, a label or a barrier breaks, or that depends on a predicate, is refused.
"""

from gpulease.daemon.ptx.parse.syntax import Instruction, Scalar
from gpulease.daemon.ptx.translate.forms import Family, Modifiers
from gpulease.daemon.ptx.translate.integer import product
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = Family("Arithmetic with carry", "9.7.2")

_WORDS = ("u32", "s32", "u64", "s64")


@FAMILY.form("add.cc.type", 3, type=_WORDS)
@FAMILY.form("addc{.cc}.type", 3, type=_WORDS)
@FAMILY.form("sub.cc.type", 3, type=_WORDS)
@FAMILY.form("subc{.cc}.type", 3, type=_WORDS)
def add_sub(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`add`, `sub` with carry: the flag is the carry or borrow out."""
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    flag = _flag(t, i.opcode[:3]) if i.opcode.endswith("c") else None
    _finish(t, i, m, i.opcode[:3], _with_flag(t, i.opcode[:3], (left, right), flag))


@FAMILY.form("mad.half.cc.type", 4, half=("lo", "hi"), type=_WORDS)
@FAMILY.form("madc.half{.cc}.type", 4, half=("lo", "hi"), type=_WORDS)
def multiply_add(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`mad` with carry: one half of a*b, plus c and the carry; the flag is the carry out of the sum."""
    scalar: Scalar = m.scalar()
    left, right, added = (t.read(i.operands[n], scalar) for n in (1, 2, 3))
    part = product(t, m["half"], scalar, left, right)
    flag = _flag(t, "add") if i.opcode == "madc" else None
    _finish(t, i, m, "add", _with_flag(t, "add", (part, added), flag))


def _with_flag(
    t: OperandTranslator, operation: str, operands: tuple[Value, Value], flag: Value | None
) -> tuple[Value, Value]:
    """Return a sum or difference, with the flag in if there is one, and whether it carried out."""
    ir, (left, right) = t.ir, operands
    result = ir.binary(operation, left, right)
    # A sum that wrapped is below either term; a difference wraps if more is subtracted than there is.
    carried = ir.compare("icmp ult", *((result, left) if operation == "add" else (left, right)))
    if flag is None:
        return result, carried
    # The flag is added or subtracted in a second step, which carries only from the last number before a wrap.
    more = ir.resize(flag, left.type, signed=False)
    again = ir.binary(operation, result, more)
    at_end = ir.compare("icmp eq", again if operation == "add" else result, constant(left.type, 0))
    return again, ir.binary("or", carried, ir.binary("and", at_end, flag))


def _flag(t: OperandTranslator, operation: str) -> Value:
    made_by, flag = t.carry or ("", None)
    if flag is None:
        raise t.problem("the carry comes from no .cc instruction right before, in the same straight code")
    # Additions and subtractions leave opposite flags, so who made it matters.
    if made_by == operation:
        return flag
    if operation == "sub":
        raise t.problem("a carry taken as a borrow is not supported")
    # A card subtracts by adding the complement and 1, so an addition finds a carry where nothing was borrowed. CUDA's
    # own division of 128-bit integers relies on it, though the ISA's text does not mention it.
    # own division of 128-bit integers relies on it; the ISA's text has no word of it.
    return t.ir.invert(flag)


def _finish(t: OperandTranslator, i: Instruction, m: Modifiers, operation: str, result: tuple[Value, Value]) -> None:
    t.write(i.operands[0], m.scalar(), result[0])
    if "cc" not in m:
        return
    if i.guard is not None:
        raise t.problem("a carry that depends on a predicate is not supported")
    t.carry = operation, result[1]
