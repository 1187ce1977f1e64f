"""Bulk copies (PTX ISA section 9.7.9.25.4, "cp.async.bulk"), made synchronously. Copies of tensors are refused."""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Integer, Space
from gpulease.daemon.ptx.translate.access import address_in, fail_unless, reach
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import IrWriter, Value, constant
from gpulease.daemon.ptx.translate.loads_stores import check_policy
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT, LAUNCH, LOCAL, OperandTranslator
from gpulease.daemon.ptx.translate.phases import object_of, update_counts

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

_WORD = SCALARS["u32"]
_COUNTED = "mbarrier::complete_tx::bytes"
_HINT = "L2::cache_hint"

FAMILY = InstructionFamily("Bulk copies", "9.7.9.25.4", counted=(_COUNTED,), policy=(_HINT,))

# Addresses and sizes must be multiples of this number of bytes. A copy is made in steps of this size.
_STEP = 16

_OFFSET = Value("ptr", "%offset")

# A copy's function adds one of these numbers to the number of copied bytes if it was not allowed to read the source or
# to write the destination. They are less than _STEP, so the two parts of the sum can be separated.
_FAILED = {Access.LOAD: 1, Access.STORE: 2}


@FAMILY.form(
    "cp.async.bulk.into.source.counted{.policy}",
    (4, 5),
    writes=False,
    into=("shared::cluster", "shared::cta"),
    source=("global",),
)
@FAMILY.form("cp.async.bulk.into.source.counted", 4, writes=False, into=("shared::cluster",), source=("shared::cta",))
def copy_counted(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Copy to shared memory, and report the bytes as arrived to an mbarrier."""
    spaces = [Space(m[name].split("::")[0]) for name in ("into", "source")]
    # Check the mbarrier's address before copying anything.
    place = object_of(t, i.operands[3], is_generic=False)
    size = _copy(t, i, spaces, m, 4)
    update_counts(t, place, added_bytes=t.ir.binary("sub", constant("i64", 0), size))


@FAMILY.form("cp.async.bulk.global.shared::cta.bulk_group{.policy}", (3, 4), writes=False)
def copy_grouped(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Copy from shared to global memory, as part of a bulk group."""
    _copy(t, i, [Space.GLOBAL, Space.SHARED], m, 3)


@FAMILY.form("cp.async.bulk.commit_group", 0, writes=False)
@FAMILY.form("cp.async.bulk.wait_group{.read}", 1, writes=False)
def wait(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing, because every copy is already complete."""
    if i.operands and not isinstance(i.operands[0], Integer):
        raise t.problem("the number of groups must be a constant")


@FAMILY.form("cp.async.bulk.prefetch.L2.global{.policy}", (2, 3), writes=False)
def prefetch(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Check the operands, and do nothing else, because a prefetch only affects caches."""
    address_in(t, i.operands[0], Space.GLOBAL)
    t.read(i.operands[1], _WORD)
    check_policy(t, i, m, 2)


def _copy(t: "ThreadTranslator", i: Instruction, spaces: list[Space], m: Modifiers, count: int) -> Value:
    ir = t.ir
    check_policy(t, i, m, count)
    # Step 1: read the addresses and the size, which must be a multiple of _STEP.
    (into, into_space), (source, source_space) = (
        address_in(t, operand, space) for operand, space in zip(i.operands, spaces, strict=False)
    )
    if [into_space, source_space] != spaces:
        raise t.problem("an address lies in another space than the instruction says")
    size = ir.cast("zext", t.read(i.operands[2], _WORD), "i64")
    is_whole = ir.compare("icmp eq", ir.binary("and", size, _STEP - 1), 0)
    fail_unless(t, is_whole, Access.STORE, into_space, ir.binary("add", into, size), _STEP)
    # Step 2: copy, by a function for these two spaces.
    name = f"bulk.{into_space.value}.{source_space.value}"
    _define(t, name, into_space, source_space)
    arguments = ", ".join(map(str, (LAUNCH, ENVIRONMENT, LOCAL, into, source, size)))
    ended = ir.value("i64", f"call i64 @{name}({arguments})")
    # Step 3: split the function's result into the number of copied bytes and the access that failed, if one did.
    done = ir.binary("and", ended, -_STEP)
    places = ((source, source_space, Access.LOAD), (into, into_space, Access.STORE))
    for address, space, access in places:
        is_well = ir.compare("icmp ne", ir.binary("and", ended, _STEP - 1), _FAILED[access])
        fail_unless(t, is_well, access, space, ir.binary("add", address, done), _STEP)
    return size


def _define(t: "ThreadTranslator", name: str, into_space: Space, source_space: Space) -> None:
    """Define a function that copies step by step, until all bytes are copied or an access is not allowed.

    The function returns the number of copied bytes, plus one of `_FAILED` if an access was not allowed.
    """
    inner = OperandTranslator(t.function, {}, IrWriter(t.declarations))
    ir = inner.ir
    into, source, size = (Value("i64", f"%{name}") for name in ("into", "source", "size"))
    # Loop over the steps. Each step checks both addresses, because the ranges may span several allocations.
    ir.block("entry")
    ir.emit(f"{_OFFSET.text} = alloca i64")
    ir.store(constant("i64", 0), _OFFSET)
    ir.block("each")
    offset = ir.load("i64", _OFFSET)
    ir.branch_if(ir.compare("icmp ult", offset, size), "check", "done")
    ir.block("check")
    to, at = ir.binary("add", into, offset), ir.binary("add", source, offset)
    source_pointer = reach(inner, at, source_space, (_STEP, Access.LOAD), "unread")
    target_pointer = reach(inner, to, into_space, (_STEP, Access.STORE), "unwritten")
    ir.emit(f"store {ir.load('i128', source_pointer)}, {target_pointer}, align {_STEP}")
    ir.store(ir.binary("add", offset, _STEP), _OFFSET)
    ir.branch("each")
    # A failed check reports the offset at which it happened.
    for label, access in (("unread", Access.LOAD), ("unwritten", Access.STORE)):
        ir.block(label)
        ir.ret_value(ir.binary("add", offset, _FAILED[access]))
    ir.block("done")
    ir.ret_value(offset)
    signature = ", ".join(map(str, (LAUNCH, ENVIRONMENT, LOCAL, into, source, size)))
    ir.require("\n".join([f"define internal i64 @{name}({signature}) noinline {{", *ir.lines[1:], "}"]))
