"""Barriers of a block (PTX ISA section 9.7.13.1, "bar, barrier").

A barrier for all threads is complete when all threads that have not ended wait at it. A barrier for a number of threads
counts whole warps. Lanes that have ended, and lanes that a partial warp does not have, count with the rest of their
warp. If threads wait at the same barrier with different thread counts or operations, or if more threads wait than the
barrier's number, they are never released. Both are faults.
"""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import BARRIERS, Access, BlockEnvironment
from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Instruction, Integer, Operand, Space
from gpulease.daemon.ptx.translate.access import fail_unless
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT
from gpulease.daemon.ptx.translate.specials import WARP_THREADS, block_threads, flat_thread
from gpulease.daemon.ptx.translate.wait_points import wait_at_barrier

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

FAMILY = InstructionFamily("Barriers", "9.7.13.1")

_WORD = SCALARS["b32"]
_MAX_COUNT = 1024

# A barrier's kind is its number in the bits below this one, and the operation in the bits from this one on.
_KIND_SHIFT = 4
_REDUCTIONS = ("popc", "and", "or")
_CLUSTER = (1 + len(_REDUCTIONS)) << _KIND_SHIFT


@FAMILY.form("bar{.cta}.sync", (1, 2), writes=False)
@FAMILY.form("barrier{.cta}.sync{.aligned}", (1, 2), writes=False)
def barrier(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Wait for all threads of the block, or for the given number of them."""
    number = _number(t, i.operands[0])
    wait_at_barrier(t, number, _count(t, i.operands[1:], number))


@FAMILY.form("bar{.cta}.arrive", 2, writes=False)
@FAMILY.form("barrier{.cta}.arrive{.aligned}", 2, writes=False)
def arrive(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Count as one of the threads for which a barrier waits, without waiting."""
    ir = t.ir
    number = _number(t, i.operands[0])
    _count(t, i.operands[1:], number)
    # Arrivals are counted in an array before the block's frames, which native/block.ll reads.
    board = ir.load("ptr", ir.offset(ENVIRONMENT, BlockEnvironment.frames.offset))
    place = ir.offset(board, ir.binary("shl", ir.cast("zext", number, "i64"), 2))
    threads = block_threads(ir)
    # The block's last thread also counts the lanes that its warp does not have.
    is_last = ir.compare("icmp eq", ir.binary("add", flat_thread(ir), 1), threads)
    lacking = ir.binary("and", ir.binary("sub", constant("i32", 0), threads), WARP_THREADS - 1)
    arrived = ir.binary("add", ir.select(is_last, lacking, constant("i32", 0)), 1)
    ir.store(ir.binary("add", ir.load("i32", place), arrived), place)


@FAMILY.form("bar{.cta}.red.popc.u32", (3, 4))
@FAMILY.form("barrier{.cta}.red.popc{.aligned}.u32", (3, 4))
def count_flags(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Wait, and return the number of threads with a true predicate."""
    _, trues = _reduce(t, i, "popc")
    t.write(i.operands[0], SCALARS["u32"], trues)


@FAMILY.form("bar{.cta}.red.op.pred", (3, 4), op=("and", "or"))
@FAMILY.form("barrier{.cta}.red.op{.aligned}.pred", (3, 4), op=("and", "or"))
def combine_flags(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Wait, and return whether the predicate is true in all threads (`and`), or in any thread (`or`)."""
    arrived, trues = _reduce(t, i, m["op"])
    result = t.ir.compare("icmp eq", trues, arrived) if m["op"] == "and" else t.ir.compare("icmp ne", trues, 0)
    t.write(i.operands[0], PREDICATE, result)


@FAMILY.form("barrier.cluster.arrive{.order}{.aligned}", 0, writes=False, order=("release", "relaxed"))
def arrive_in_cluster(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing, because the wait that follows waits for all threads (section 9.7.13.3)."""


@FAMILY.form("barrier.cluster.wait{.acquire}{.aligned}", 0, writes=False)
def wait_in_cluster(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Wait for all threads of the cluster, which always consists of one block."""
    wait_at_barrier(t, constant("i32", _CLUSTER), constant("i32", 0))


def _reduce(t: "ThreadTranslator", i: Instruction, operation: str) -> tuple[Value, Value]:
    number = _number(t, i.operands[1])
    count = _count(t, i.operands[2:-1], number)
    flag = t.read(i.operands[-1], PREDICATE)
    # Threads at the same barrier with different operations must not match, so the kind contains the operation.
    kind = t.ir.binary("or", number, (1 + _REDUCTIONS.index(operation)) << _KIND_SHIFT)
    return wait_at_barrier(t, kind, count, flag)


def _number(t: "ThreadTranslator", operand: Operand) -> Value:
    number = t.read(operand, _WORD)
    # Check a constant now, a register when the kernel runs.
    if isinstance(operand, Integer):
        if operand.value >= BARRIERS:
            raise t.problem(f"barriers are numbered 0 to {BARRIERS - 1}")
        return number
    _check(t, t.ir.compare("icmp ult", number, BARRIERS), number)
    return number


def _count(t: "ThreadTranslator", operands: tuple[Operand, ...], number: Value) -> Value:
    """Return the number of threads for which a barrier waits; 0 for all."""
    if not operands:
        return constant("i32", 0)
    count = t.read(operands[0], _WORD)
    operand = operands[0]
    if isinstance(operand, Integer):
        if not 0 < operand.value <= _MAX_COUNT or operand.value % WARP_THREADS:
            raise t.problem(f"a barrier must be for a multiple of {WARP_THREADS} threads, {_MAX_COUNT} at most")
        return count
    is_whole = t.ir.compare("icmp eq", t.ir.binary("and", count, WARP_THREADS - 1), 0)
    fits = t.ir.compare("icmp ult", t.ir.binary("sub", count, 1), _MAX_COUNT)
    _check(t, t.ir.binary("and", is_whole, fits), number)
    return count


def _check(t: "ThreadTranslator", valid: Value, number: Value) -> None:
    fail_unless(t, valid, Access.BARRIER_OPERAND, Space.GENERIC, t.ir.cast("zext", number, "i64"), 0)
