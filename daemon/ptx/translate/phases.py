"""Barriers in shared memory: `mbarrier` (PTX ISA section 9.7.13.15).

An object has 8 bytes: pending arrivals, expected arrivals, bytes that have not arrived, and the phase. A phase is
complete when no arrivals and no bytes are pending. Asynchronous copies are made synchronously, so their bytes arrive
at once. A thread that finds a phase incomplete lets other threads of its block run.
"""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Address, Instruction, Operand
from gpulease.daemon.ptx.translate.access import shared_pointer
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import LIKELY, Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator
from gpulease.daemon.ptx.translate.wait_points import let_others_run

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

_OBJECT = SCALARS["b64"]
_COUNT = SCALARS["u32"]
_OBJECT_BYTES = 8

# Bits 0 to 19 are the pending arrivals, 20 to 39 the expected arrivals, 40 to 60 the pending bytes (signed), and 63 the
# phase.
_COUNT_BITS = 20
_COUNT_MASK = (1 << _COUNT_BITS) - 1

_SPACES = ("shared", "shared::cta", "shared::cluster")
_SCOPES = ("cta", "cluster")

FAMILY = InstructionFamily(
    "Barriers in memory", "9.7.13.15", scope=_SCOPES, space=_SPACES, order=("release", "relaxed")
)

# Counts `come` arrivals, expects `dropped` arrivals fewer in later phases, and adds `bytes` to the pending bytes.
# Returns the object before the change.
_ARRIVE = "mbarrier_arrive"
_ARRIVE_IR = f"""
declare i64 @llvm.usub.sat.i64(i64, i64)
define internal i64 @{_ARRIVE}(ptr %at, i64 %come, i64 %dropped, i64 %bytes) noinline {{
  %old = load i64, ptr %at
  %pending.old = and i64 %old, {_COUNT_MASK}
  %moved = lshr i64 %old, 20
  %expected.old = and i64 %moved, {_COUNT_MASK}
  %top = shl i64 %old, 3
  %left.old = ashr i64 %top, 43
  %pending = call i64 @llvm.usub.sat.i64(i64 %pending.old, i64 %come)
  %expected = call i64 @llvm.usub.sat.i64(i64 %expected.old, i64 %dropped)
  %left = add i64 %left.old, %bytes
  %open = or i64 %pending, %left
  %is.complete = icmp eq i64 %open, 0
  %pending.new = select i1 %is.complete, i64 %expected, i64 %pending
  %phase = and i64 %old, {-1 << 63}
  %phase.next = xor i64 %phase, {-1 << 63}
  %phase.new = select i1 %is.complete, i64 %phase.next, i64 %phase
  %left.top = shl i64 %left, 43
  %left.placed = lshr i64 %left.top, 3
  %expected.placed = shl i64 %expected, 20
  %counts = or i64 %pending.new, %expected.placed
  %all = or i64 %counts, %left.placed
  %new = or i64 %all, %phase.new
  store i64 %new, ptr %at
  ret i64 %old
}}
"""


@FAMILY.form("mbarrier.init{.space}.b64", 2, writes=False)
def initialise(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Initialise an object that expects the given number of arrivals in each phase."""
    place, count = _object(t, i.operands[0], m), _count(t, i.operands[1])
    t.ir.store(t.ir.binary("or", t.ir.binary("shl", count, _COUNT_BITS), count), place)


@FAMILY.form("mbarrier.inval{.space}.b64", 1, writes=False)
def invalidate(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Set the object to zero. Its memory may then be used for something else."""
    t.ir.store(constant("i64", 0), _object(t, i.operands[0], m))


@FAMILY.form("mbarrier.expect_tx{.relaxed}{.scope}{.space}.b64", 2, writes=False)
@FAMILY.form("mbarrier.complete_tx{.relaxed}{.scope}{.space}.b64", 2, writes=False)
def count_bytes(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Add to the pending bytes (`expect_tx`), or count bytes as arrived (`complete_tx`)."""
    change = t.ir.cast("sext", t.read(i.operands[1], _COUNT), "i64")
    if "complete_tx" in m:
        change = t.ir.binary("sub", constant("i64", 0), change)
    update_counts(t, _object(t, i.operands[0], m), added_bytes=change)


@FAMILY.form("mbarrier.arrive{.noComplete}{.order}{.scope}{.space}.b64", (1, 2, 3))
@FAMILY.form("mbarrier.arrive_drop{.noComplete}{.order}{.scope}{.space}.b64", (1, 2, 3))
def arrive(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Count one or several arrivals. `arrive_drop` also expects fewer arrivals in later phases."""
    into, place, operands = _split(t, i)
    arrivals = _count(t, operands[0]) if operands else constant("i64", 1)
    state = update_counts(t, _object(t, place, m), arrivals=arrivals, dropouts=arrivals if "arrive_drop" in m else None)
    if into is not None:
        t.write(into, _OBJECT, state)


@FAMILY.form("mbarrier.way.expect_tx{.order}{.scope}{.space}.b64", (2, 3), way=("arrive", "arrive_drop"))
def arrive_expecting(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Add to the pending bytes and count one arrival, in one step."""
    into, place, operands = _split(t, i)
    if len(operands) != 1:
        raise t.problem("expected a number of bytes")
    expected, one = t.ir.cast("sext", t.read(operands[0], _COUNT), "i64"), constant("i64", 1)
    dropouts = one if m["way"] == "arrive_drop" else None
    state = update_counts(t, _object(t, place, m), arrivals=one, dropouts=dropouts, added_bytes=expected)
    if into is not None:
        t.write(into, _OBJECT, state)


@FAMILY.form("mbarrier.pending_count.b64", 2)
def pending(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return the number of pending arrivals in a state that an arrival has returned."""
    state = t.ir.binary("and", t.read(i.operands[1], _OBJECT), _COUNT_MASK)
    t.write(i.operands[0], _COUNT, t.ir.cast("trunc", state, "i32"))


@FAMILY.form(
    "mbarrier.way{.parity}{.order}{.scope}{.space}.b64",
    (3, 4),
    way=("test_wait", "try_wait"),
    order=("acquire", "relaxed"),
)
def wait(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Test whether the phase with a state or a parity is complete. If it is not, let other threads run."""
    ir = t.ir
    # The time limit of try_wait is ignored, because it may return early.
    if len(i.operands) == 4:
        if m["way"] == "test_wait":
            raise t.problem("test_wait takes no time")
        t.read(i.operands[3], _COUNT)
    now = ir.load("i64", _object(t, i.operands[1], m))
    # A phase is complete if the object's phase bit differs from the given one.
    if "parity" in m:
        parity = t.read(i.operands[2], _COUNT)
        then = ir.binary("shl", ir.cast("zext", parity, "i64"), 63)
    else:
        then = t.read(i.operands[2], _OBJECT)
    done = ir.compare("icmp slt", ir.binary("xor", now, then), 0)
    t.write(i.operands[0], PREDICATE, done)
    # test_wait also lets other threads run, because it is used in loops.
    turn, go_on = ir.fresh("turn"), ir.fresh("goon")
    ir.branch_if(done, go_on, turn, extra=LIKELY)
    ir.block(turn)
    let_others_run(t)
    ir.block(go_on)


@FAMILY.form("cp.async.mbarrier.arrive{.noinc}{.space}.b64", 1, writes=False, space=("shared", "shared::cta"))
def arrive_behind_copies(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Count an arrival for the thread's copies, which are complete.

    Without .noinc, the instruction first expects one arrival more, so nothing changes.
    """
    place = _object(t, i.operands[0], m)
    if "noinc" in m:
        update_counts(t, place, arrivals=constant("i64", 1))


def update_counts(
    t: OperandTranslator,
    place: Value,
    *,
    arrivals: Value | None = None,
    dropouts: Value | None = None,
    added_bytes: Value | None = None,
) -> Value:
    """Change an object's counts, and begin the next phase if nothing is pending. Returns the object before that."""
    changes = (change or constant("i64", 0) for change in (arrivals, dropouts, added_bytes))
    return t.ir.function(_ARRIVE, "i64", _ARRIVE_IR, place, *changes)


def object_of(t: OperandTranslator, operand: Operand, *, is_generic: bool) -> Value:
    """Return a checked pointer to an mbarrier object."""
    return shared_pointer(t, operand, _OBJECT_BYTES, Access.ATOMIC, is_generic=is_generic)


def _object(t: OperandTranslator, operand: Operand, m: Modifiers) -> Value:
    return object_of(t, operand, is_generic="space" not in m)


def _count(t: OperandTranslator, operand: Operand) -> Value:
    return t.ir.binary("and", t.ir.cast("zext", t.read(operand, _COUNT), "i64"), _COUNT_MASK)


def _split(t: OperandTranslator, i: Instruction) -> tuple[Operand | None, Operand, tuple[Operand, ...]]:
    """Split operands into the register for the state or None, the object's address, and the rest."""
    if isinstance(i.operands[0], Address):
        return None, i.operands[0], i.operands[1:]
    if len(i.operands) < 2:
        raise t.problem("expected an address in brackets")
    return i.operands[0], i.operands[1], i.operands[2:]
