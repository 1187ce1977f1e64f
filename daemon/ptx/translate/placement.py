"""Test to which space an address belongs (PTX ISA sections 9.7.9.19 and 9.7.9.23 to 9.7.9.24).

A cluster is one block here, so an address in another block of the cluster is the block's own.
"""

from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Instruction, Space, Symbol
from gpulease.daemon.ptx.translate.access import window_base, window_limit
from gpulease.daemon.ptx.translate.forms import Family, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = Family("Places of addresses", "9.7.9")

_POINTER = SCALARS["u64"]
_WORD = SCALARS["u32"]
_WINDOWS = (Space.SHARED, Space.LOCAL)


@FAMILY.form("isspacep.space", 2, space=("global", "shared", "shared::cta", "shared::cluster", "local"))
def lies_in(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`isspacep`: whether a generic address lies in a space; an address in no window is global."""
    space = Space(m["space"].split("::")[0])
    address = t.read(i.operands[1], _POINTER)
    if space in _WINDOWS:
        t.write(i.operands[0], PREDICATE, _is_in(t, address, space))
        return
    shared, local = (_is_in(t, address, window) for window in _WINDOWS)
    t.write(i.operands[0], PREDICATE, t.ir.invert(t.ir.binary("or", shared, local)))


def _is_in(t: OperandTranslator, address: Value, space: Space) -> Value:
    base = t.ir.cast("ptrtoint", window_base(t, space), "i64")
    # One unsigned comparison: an address below the window wraps to a huge offset.
    return t.ir.compare("icmp ult", t.ir.binary("sub", address, base), window_limit(t, space))


@FAMILY.form("mapa{.space}.type", 3, space=("shared::cluster",), type=("u32", "u64"))
def of_block(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`mapa`: the address in a block of the cluster that corresponds to the given one, which is the same here."""
    scalar = m.scalar()
    source = i.operands[1]
    if isinstance(source, Symbol) and (source.variable.space is not Space.SHARED or "space" not in m):
        raise t.problem(f"{source.variable.name[:60]} has no such address in .shared::cluster")
    # Read only so that a wrong operand is refused.
    t.read(i.operands[2], _WORD)
    t.write(i.operands[0], scalar, t.read(source, scalar))


@FAMILY.form("getctarank{.space}.type", 2, space=("shared::cluster",), type=("u32", "u64"))
def block_of(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`getctarank`: the block of the cluster that an address belongs to, which is always the only one."""
    t.read(i.operands[1], m.scalar())
    t.write(i.operands[0], _WORD, constant("i32", 0))
