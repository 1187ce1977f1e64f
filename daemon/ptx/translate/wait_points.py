"""Writes the code with which a thread waits for others (PTX ISA sections 9.7.9, 9.7.13 and 10).

`waits.py` finds the places at which threads wait. Before a wait, the thread describes it in its frame, for
native/block.ll. When the thread resumes, the frame contains the results. In an exchange, a thread also stores words
that the other threads of its warp can read afterwards: it "shows" these words.
"""

from collections.abc import Sequence

from gpulease.daemon.ptx.native.structures import (
    HEAD_BYTES,
    SLOT_BYTES,
    Access,
    FrameHead,
    ReturnStatus,
    ThreadState,
)
from gpulease.daemon.ptx.parse.syntax import Operand, Space
from gpulease.daemon.ptx.translate.access import fail_unless
from gpulease.daemon.ptx.translate.ir import LIKELY, Value, constant
from gpulease.daemon.ptx.translate.specials import WARP_THREADS, flat_thread
from gpulease.daemon.ptx.translate.thread import ThreadTranslator
from gpulease.daemon.ptx.translate.waits import FRAME

# Number of iterations of a polling loop after which a thread lets the others run. Suspending a thread costs
# about 20 ns, which is at most a few per cent of this many iterations. If a thread waits for many others, it does not
# poll for long.
TURNS = 1024

# Counts the iterations down, and restarts at TURNS whenever the function is entered.
TURNS_LEFT = Value("ptr", "%turns")


def lane(t: ThreadTranslator) -> Value:
    return t.ir.binary("and", flat_thread(t.ir), WARP_THREADS - 1)


def wait_at_barrier(t: ThreadTranslator, kind: Value, count: Value, flag: Value | None = None) -> tuple[Value, Value]:
    """Wait at a barrier. Returns the number of threads that arrived, and the number of those with the flag set.

    If the kernel has only barrier 0, no instruction uses these numbers, and both are 0.
    """
    _stop(t, ThreadState.AT_BARRIER, kind, count, flag)
    # Short frames have no results.
    if t.waits.is_short:
        return constant("i32", 0), constant("i32", 0)
    return _result(t, FrameHead.group.offset), _result(t, FrameHead.ballot.offset)


def exchange(
    t: ThreadTranslator, mask: Operand, shown: Sequence[Value] = (), flag: Value | None = None
) -> tuple[Value, Value]:
    """Wait for all members of a mask that have not ended. Returns the lanes that arrived, and those with the flag set.

    They must arrive at an instruction with the same opcode, modifiers and mask, which need not be this one. The words
    that each lane has shown can be read with `word_of` until the thread waits again.
    """
    members = t.read(mask, t.WORD)
    # A thread must be in its own mask (section 9.7.13).
    own_flag = t.ir.binary("lshr", members, lane(t))
    own_flag = t.ir.cast("trunc", own_flag, "i1")
    fail_unless(t, own_flag, Access.NO_MEMBER, Space.GENERIC, t.ir.cast("zext", members, "i64"), 0)
    # Store the words after the frame's head, each in one slot.
    for number, word in enumerate(shown):
        t.ir.store(t.ir.resize(word, "i64", signed=False), t.ir.offset(FRAME, HEAD_BYTES + SLOT_BYTES * number))
    _stop(t, ThreadState.IN_EXCHANGE, constant("i32", t.kind_of_exchange()), members, flag)
    return _result(t, FrameHead.group.offset), _result(t, FrameHead.ballot.offset)


def meet(t: ThreadTranslator, shown: Sequence[Value] = ()) -> None:
    """Wait for all 32 threads of the warp, which must arrive at an instruction with the same opcode and modifiers.

    The values that a lane has shown are then adjacent, without padding, at the lane's address from `kept_words`. It is
    a fault if a lane has ended or does not exist.
    """
    offset_bytes = 0
    for value in shown:
        t.ir.store(value, t.ir.offset(FRAME, HEAD_BYTES + offset_bytes))
        offset_bytes += int(value.type[1:]) // 8
    everyone = constant("i32", -1)
    _stop(t, ThreadState.IN_EXCHANGE, constant("i32", t.kind_of_exchange()), everyone, None)
    group = _result(t, FrameHead.group.offset)
    is_whole = t.ir.compare("icmp eq", group, -1)
    fail_unless(t, is_whole, Access.PART_OF_WARP, Space.GENERIC, t.ir.cast("zext", group, "i64"), 0)


def gather(t: ThreadTranslator) -> Value:
    """Wait until no other thread of the warp can run. Returns the lanes that are at this instruction."""
    _stop(t, ThreadState.IN_GATHERING, constant("i32", t.index), constant("i32", 0), None)
    return _result(t, FrameHead.group.offset)


def word_of(t: ThreadTranslator, thread: Value) -> Value:
    """Return the first word that a lane has shown in the last exchange. The lane must have taken part."""
    return t.ir.load("i64", kept_words(t, thread))


def kept_words(t: ThreadTranslator, thread: Value) -> Value:
    """Return the address of the words that a lane has shown in the last exchange."""
    # The frames of a warp are adjacent, so the distance to another lane's frame is a multiple of the frame size.
    distance = t.ir.resize(t.ir.binary("sub", thread, lane(t)), "i64", signed=True)
    frame = t.ir.offset(FRAME, t.ir.binary("mul", distance, t.frame_size()))
    return t.ir.offset(frame, HEAD_BYTES + SLOT_BYTES * t.waits.words)


def own_room(t: ThreadTranslator) -> Value:
    """Return the address of memory for as many words as the thread shows. The next exchange overwrites it."""
    return t.ir.offset(FRAME, HEAD_BYTES)


def shown_words(t: ThreadTranslator) -> tuple[Value, Value, Value]:
    """Return the warp's first frame, the size of a frame, and the offset of the shown words, for native/block.ll."""
    stride = t.frame_size()
    offset = t.ir.binary("mul", t.ir.resize(lane(t), "i64", signed=False), stride)
    frames = t.ir.offset(FRAME, t.ir.binary("sub", constant("i64", 0), offset))
    return frames, stride, constant("i64", HEAD_BYTES + SLOT_BYTES * t.waits.words)


def let_others_run(t: ThreadTranslator) -> None:
    """Let all other threads of the block that can run do so, then continue."""
    _stop(t, ThreadState.YIELDED, constant("i32", 0), constant("i32", 0), None)


def count_turn(t: ThreadTranslator) -> None:
    """At the end of a loop that polls memory, let other threads run after every TURNS iterations.

    They may write the memory that this thread polls.
    """
    if t.index not in t.waits.yields:
        return
    turns_left = t.ir.binary("sub", t.ir.load("i32", TURNS_LEFT), 1)
    t.ir.store(turns_left, TURNS_LEFT)
    turn, go_on = t.ir.fresh("turn"), t.ir.fresh("goon")
    t.ir.branch_if(t.ir.compare("icmp ne", turns_left, 0), go_on, turn, extra=LIKELY)
    t.ir.block(turn)
    let_others_run(t)
    t.ir.block(go_on)


def _stop(t: ThreadTranslator, state: ThreadState, kind: Value, members: Value, flag: Value | None) -> None:
    # With short frames, all waits are at barrier 0, so no description is needed.
    ir = t.ir
    if not t.waits.is_short:
        line = constant("i32", t.instruction.line if t.instruction else 0)
        flag = constant("i32", 0) if flag is None else ir.cast("zext", flag, "i32")
        fields = {"state": constant("i32", state), "kind": kind, "members": members, "flag": flag, "line": line}
        for field, value in fields.items():
            ir.store(value, ir.offset(FRAME, getattr(FrameHead, field).offset))
    t.suspend(ReturnStatus.WAITS)


def _result(t: ThreadTranslator, offset: int) -> Value:
    return t.ir.load("i32", t.ir.offset(FRAME, offset))
