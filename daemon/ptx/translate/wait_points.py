"""Find where a kernel's threads wait for one another, and write the wait (PTX ISA sections 9.7.9, 9.7.13 and 10).

Threads wait at barriers, in exchanges (all of a member mask must come), in gatherings (`activemask`: whoever comes),
and in loops that watch memory, where a thread lets the others run now and then. A wait leaves in the thread's frame
what native/block.ll needs to know; behind it the frame has what the others said.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import (
    HEAD_BYTES,
    SHORT_HEAD_BYTES,
    SLOT_BYTES,
    Access,
    FrameHead,
    State,
    Status,
)
from gpulease.daemon.ptx.parse.syntax import CallSite, Instruction, Integer, Operand, Space, Target
from gpulease.daemon.ptx.translate.access import fail_unless
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.specials import WARP_THREADS, flat_thread

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

FRAME = Value("ptr", "%frame")

# The words of 8 bytes each instruction that waits shows to its warp, at most; an `mma` also those of others behind it.
_SHOWN_WORDS = {
    "bar": 0,
    "barrier": 0,
    "vote": 0,
    "activemask": 0,
    "elect": 0,
    "shfl": 1,
    "match": 1,
    "redux": 1,
    "ldmatrix": 1,
    "stmatrix": 3,
    "movmatrix": 1,
    "mma": 16,
    "wmma": 9,
    "mbarrier": 0,
}
WAITING = frozenset(_SHOWN_WORDS)

# Loads that may see what another thread has written since the last time.
_WATCHING_LOADS = {"volatile", "relaxed", "acquire", "mmio", "cv"}
_WATCHING = ("atom", "fence", "membar", "nanosleep", "mbarrier")


@dataclass(frozen=True, slots=True)
class Waits:
    """Places where the threads of a kernel wait.

    Attributes:
        sites: The instructions at which a thread may stop.
        yields: Those of them that go back in a loop which watches memory.
        is_short: Whether there is nothing but barrier 0 for all.
        words: How many words a thread can show.
        parks: Whether a thread may yield, so that a block can come to have none but such.
    """

    sites: frozenset[int]
    yields: frozenset[int]
    is_short: bool
    words: int
    parks: bool

    @property
    def head_bytes(self) -> int:
        """The part of a frame before the registers kept."""
        return SHORT_HEAD_BYTES if self.is_short else HEAD_BYTES + 2 * SLOT_BYTES * self.words


def watches(i: Instruction) -> bool:
    """Say whether an instruction looks at, or changes, what other threads may write or look at."""
    return i.opcode in _WATCHING or (i.opcode == "ld" and not _WATCHING_LOADS.isdisjoint(i.modifiers))


def find_waits(body: Sequence[Instruction], watching_functions: Set[str] = frozenset()) -> Waits:
    """Look through a kernel that may call functions which watch memory; "" is one behind a pointer."""
    waiting = {index for index, i in enumerate(body) if i.opcode in _SHOWN_WORDS}
    yields = _watching_branches(body, watching_functions)
    is_short = not yields and all(_is_plain_barrier(body[index]) for index in waiting)
    words = max((_SHOWN_WORDS[body[index].opcode] for index in waiting), default=0)
    parks = bool(yields) or any(body[index].opcode == "mbarrier" for index in waiting)
    return Waits(frozenset(waiting | yields), frozenset(yields), is_short, words, parks)


def _is_plain_barrier(i: Instruction) -> bool:
    is_block_wide = i.opcode in ("bar", "barrier") and "warp" not in i.modifiers
    return is_block_wide and "sync" in i.modifiers and i.operands == (Integer(0),)


def _watching_branches(body: Sequence[Instruction], watching_functions: Set[str]) -> set[int]:
    """Branches back over something that watches memory. Of every cycle through it at least one is found."""
    watching_before = [0]
    for i in body:
        site = i.operands[-1] if i.opcode == "call" else None
        calls = isinstance(site, CallSite) and site.name in watching_functions
        watching_before.append(watching_before[-1] + (calls or watches(i)))
    found = set()
    for index, i in enumerate(body):
        for target in i.operands:
            if not isinstance(target, Target) or target.index > index:
                continue
            if watching_before[index + 1] > watching_before[target.index]:
                found.add(index)
    return found


def lane(t: "ThreadTranslator") -> Value:
    """The thread's number in its warp."""
    return t.ir.binary("and", flat_thread(t.ir), WARP_THREADS - 1)


def wait_at_barrier(t: "ThreadTranslator", kind: Value, count: Value, flag: Value | None = None) -> tuple[Value, Value]:
    """Wait for the others; how many came, and of how many the flag is set (0 where nobody could ask)."""
    _stop(t, State.AT_BARRIER, kind, count, flag)
    if t.waits.is_short:
        return constant("i32", 0), constant("i32", 0)
    return _result(t, FrameHead.group.offset), _result(t, FrameHead.ballot.offset)


def exchange(
    t: "ThreadTranslator", mask: Operand, shown: Sequence[Value] = (), flag: Value | None = None
) -> tuple[Value, Value]:
    """Wait for all of a member mask that have not ended; which lanes came, and of which the flag is set.

    They must come to an instruction with the same qualifiers and mask; it need not be this one. What each has shown is
    there for `word_of` until the thread waits again.
    """
    members = t.read(mask, t.WORD)
    own = t.ir.binary("lshr", members, lane(t))
    own = t.ir.cast("trunc", own, "i1")
    fail_unless(t, own, Access.NO_MEMBER, Space.GENERIC, t.ir.cast("zext", members, "i64"), 0)
    for number, word in enumerate(shown):
        t.ir.store(t.ir.resize(word, "i64", signed=False), t.ir.offset(FRAME, HEAD_BYTES + SLOT_BYTES * number))
    _stop(t, State.IN_EXCHANGE, constant("i32", t.kind_of_exchange()), members, flag)
    return _result(t, FrameHead.group.offset), _result(t, FrameHead.ballot.offset)


def meet(t: "ThreadTranslator", shown: Sequence[Value] = ()) -> None:
    """Wait for all 32 threads of the warp, which must come to an instruction with the same qualifiers (".aligned").

    What each has shown lies side by side where `kept_words` says. Faults if a lane has ended or never was.
    """
    distance = 0
    for value in shown:
        t.ir.store(value, t.ir.offset(FRAME, HEAD_BYTES + distance))
        distance += int(value.type[1:]) // 8
    everyone = constant("i32", -1)
    _stop(t, State.IN_EXCHANGE, constant("i32", t.kind_of_exchange()), everyone, None)
    group = _result(t, FrameHead.group.offset)
    is_whole = t.ir.compare("icmp eq", group, -1)
    fail_unless(t, is_whole, Access.PART_OF_WARP, Space.GENERIC, t.ir.cast("zext", group, "i64"), 0)


def gather(t: "ThreadTranslator") -> Value:
    """Wait until no other thread of the warp can go on; which lanes are at this instruction."""
    _stop(t, State.IN_GATHERING, constant("i32", t.index), constant("i32", 0), None)
    return _result(t, FrameHead.group.offset)


def word_of(t: "ThreadTranslator", which: Value, number: int = 0) -> Value:
    """Return the word that a lane showed in the exchange just complete; the lane must have been there."""
    return t.ir.load("i64", t.ir.offset(kept_words(t, which), SLOT_BYTES * number))


def kept_words(t: "ThreadTranslator", which: Value) -> Value:
    """Return the place of the words that a lane showed in the exchange just complete."""
    distance = t.ir.resize(t.ir.binary("sub", which, lane(t)), "i64", signed=True)
    frame = t.ir.offset(FRAME, t.ir.binary("mul", distance, t.frame_size()))
    return t.ir.offset(frame, HEAD_BYTES + SLOT_BYTES * t.waits.words)


def own_room(t: "ThreadTranslator") -> Value:
    """Return the place for as many words as the thread has shown, until it shows others."""
    return t.ir.offset(FRAME, HEAD_BYTES)


def shown_words(t: "ThreadTranslator") -> tuple[Value, Value, Value]:
    """For the functions of native/block.ll: the warp's frames, their size, and the place of the first word shown."""
    stride = t.frame_size()
    back = t.ir.binary("mul", t.ir.resize(lane(t), "i64", signed=False), stride)
    frames = t.ir.offset(FRAME, t.ir.binary("sub", constant("i64", 0), back))
    return frames, stride, constant("i64", HEAD_BYTES + SLOT_BYTES * t.waits.words)


def let_others_run(t: "ThreadTranslator") -> None:
    """Go to the end of the queue of the block's threads."""
    _stop(t, State.YIELDED, constant("i32", 0), constant("i32", 0), None)


def _stop(t: "ThreadTranslator", state: State, kind: Value, members: Value, flag: Value | None) -> None:
    ir = t.ir
    if not t.waits.is_short:
        line = constant("i32", t.instruction.line if t.instruction else 0)
        flag = constant("i32", 0) if flag is None else ir.cast("zext", flag, "i32")
        said = {"state": constant("i32", state), "kind": kind, "members": members, "flag": flag, "line": line}
        for field, value in said.items():
            ir.store(value, ir.offset(FRAME, getattr(FrameHead, field).offset))
    t.suspend(Status.WAITS)


def _result(t: "ThreadTranslator", offset: int) -> Value:
    return t.ir.load("i32", t.ir.offset(FRAME, offset))
