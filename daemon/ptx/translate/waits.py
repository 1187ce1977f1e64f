"""Find where a kernel's threads wait for one another (PTX ISA sections 9.7.9, 9.7.13 and 10).

Threads wait at barriers, in exchanges (all of a member mask must come), in gatherings (`activemask`: whoever comes),
and in loops that watch memory, where a thread lets the others run now and then.
"""

from collections.abc import Sequence, Set

from gpulease.daemon.ptx.native.structures import (
    HEAD_BYTES,
    SHORT_HEAD_BYTES,
    SLOT_BYTES,
)
from gpulease.daemon.ptx.parse.syntax import CallSite, Instruction, Integer, Target
from gpulease.daemon.ptx.translate.ir import Value
from gpulease.protocol.fast_dataclass import dataclass

FRAME = Value("ptr", "%frame")

# How many words of 8 bytes each waiting instruction shows to its warp, at most; `mma` also those of later ones.
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

# Loads that may see another thread's writes since the last load.
_WATCHING_LOADS = {"volatile", "relaxed", "acquire", "mmio", "cv"}
_WATCHING = ("atom", "fence", "membar", "nanosleep", "mbarrier")


@dataclass(frozen=True, slots=True)
class Waits:
    """The places where the threads of a kernel wait.

    Attributes:
        sites: The instructions at which a thread may stop.
        yields: Those of them that branch back in a loop which watches memory.
        is_short: Whether all waits are at barrier 0, for all threads.
        words: How many words a thread can show.
        parks: Whether a thread may yield, so that all of a block's threads may come to do only that.
    """

    sites: frozenset[int]
    yields: frozenset[int]
    is_short: bool
    words: int
    parks: bool

    @property
    def head_bytes(self) -> int:
        """The size of a frame's part before the registers kept."""
        return SHORT_HEAD_BYTES if self.is_short else HEAD_BYTES + 2 * SLOT_BYTES * self.words


def watches(i: Instruction) -> bool:
    """Say whether an instruction reads or changes memory that other threads may write or poll."""
    return i.opcode in _WATCHING or (i.opcode == "ld" and not _WATCHING_LOADS.isdisjoint(i.modifiers))


def find_waits(body: Sequence[Instruction], watching_functions: Set[str] = frozenset()) -> Waits:
    """Find the waits of a kernel that may call functions which watch memory; "" stands for one behind a pointer."""
    # `yields` are branches; they count as waits because the thread may stop there.
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
    """Return branches back over something that watches memory: at least one of every cycle through such a thing."""
    # Prefix sums show for any range whether something in it watches.
    watching_before = [0]
    for i in body:
        site = i.operands[-1] if i.opcode == "call" else None
        calls = isinstance(site, CallSite) and site.name in watching_functions
        watching_before.append(watching_before[-1] + (calls or watches(i)))
    branches = set()
    for index, i in enumerate(body):
        # For a branch back, the range is from its target to the branch itself.
        for target in i.operands:
            if not isinstance(target, Target) or target.index > index:
                continue
            if watching_before[index + 1] > watching_before[target.index]:
                branches.add(index)
    return branches
