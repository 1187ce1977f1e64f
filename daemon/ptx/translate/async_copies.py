"""Asynchronous copies to shared memory (PTX ISA section 9.7.9.25, "cp.async"). They are made synchronously."""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import (
    PREDICATE,
    SCALARS,
    Instruction,
    Integer,
    Negated,
    Operand,
    Register,
    Space,
)
from gpulease.daemon.ptx.translate.access import checked_pointer
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.loads_stores import check_policy

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

FAMILY = InstructionFamily("Asynchronous copies", "9.7.9.25")

_INTO = ("shared", "shared::cta")
_PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")
_WORD = SCALARS["u32"]


@FAMILY.form(
    "cp.async.way.into.global{.policy}{.prefetch}",
    (3, 4, 5),
    writes=False,
    way=("ca", "cg"),
    into=_INTO,
    policy=("L2::cache_hint",),
    prefetch=_PREFETCHES,
)
def copy(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Copy 4, 8 or 16 bytes. With a source size or a predicate, the bytes that are not copied become zeros."""
    ir, size = t.ir, copied_bytes(t, i, m)
    kind = f"i{8 * size}"
    into = checked_pointer(t, i.operands[0], Space.SHARED, size, Access.STORE)
    # The optional fourth operand is the number of bytes, or a predicate. A cache policy may follow.
    count = len(i.operands) - ("policy" in m)
    check_policy(t, i, m, 3 if count == 3 else 4)
    if count == 3:
        ir.emit(f"store {_source(t, i, size, None)}, {into}, align {size}")
        return
    # Only the bytes that are copied must be allocated. So write zeros, then read the source only if any are copied.
    source_bytes = bytes_taken(t, i.operands[3], size)
    ir.emit(f"store {kind} 0, {into}, align {size}")
    some, done = ir.fresh("some"), ir.fresh("copied")
    ir.branch_if(ir.compare("icmp ne", source_bytes, 0), some, done)
    ir.block(some)
    value = _source(t, i, size, ir.cast("zext", source_bytes, "i64"))
    # Mask the bytes that are not copied.
    unwanted = ir.binary("sub", constant("i32", 8 * size), ir.binary("shl", source_bytes, 3))
    mask = ir.binary("lshr", Value(kind, "-1"), ir.resize(unwanted, kind, signed=False))
    ir.emit(f"store {ir.binary('and', value, mask)}, {into}, align {size}")
    ir.block(done)


@FAMILY.form("cp.async.commit_group", 0, writes=False)
@FAMILY.form("cp.async.wait_all", 0, writes=False)
@FAMILY.form("cp.async.wait_group", 1, writes=False)
def wait(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing, because every copy is already complete."""
    if i.operands and not isinstance(i.operands[0], Integer):
        raise t.problem("the number of groups must be a constant")


def copied_bytes(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> int:
    """Return the size of a copy in bytes. Raises ImageRejected if the instruction can't have this size."""
    size = i.operands[2]
    if not isinstance(size, Integer) or size.value not in ((16,) if m["way"] == "cg" else (4, 8, 16)):
        raise t.problem("a copy must be of 4, 8 or 16 bytes, with .cg of 16")
    return size.value


def _source(t: "ThreadTranslator", i: Instruction, size: int, needed_bytes: Value | None) -> Value:
    """Load the source. Only its first `needed_bytes` bytes must be allocated; None for all."""
    source = checked_pointer(t, i.operands[1], Space.GLOBAL, size, Access.LOAD, needed_bytes=needed_bytes)
    return t.ir.value(f"i{8 * size}", f"load i{8 * size}, {source}, align {size}")


def bytes_taken(t: "ThreadTranslator", operand: Operand, size: int) -> Value:
    """Compute how many bytes to copy, at most `size`. If the operand is a predicate, true means none, false all."""
    is_flag = isinstance(operand, Negated) or (isinstance(operand, Register) and operand.type == PREDICATE)
    if is_flag:
        ignored = t.read(operand, PREDICATE)
        return t.ir.select(ignored, constant("i32", 0), constant("i32", size))
    return t.ir.intrinsic("llvm.umin.i32", "i32", t.read(operand, _WORD), constant("i32", size))
