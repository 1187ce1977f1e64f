"""Finds the places at which a kernel's threads wait for each other (PTX ISA sections 9.7.9, 9.7.13 and 10).

Threads wait at barriers, in exchanges (until all members of a mask have arrived), in gatherings (`activemask`: until no
other thread of the warp can run), and in loops that poll memory, where a thread regularly lets the others run. An
instruction watches memory if it reads or changes memory that other threads may write or poll.
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

# Maximum number of words of 8 bytes that each waiting instruction shows to its warp. `mma` may also show the words of
# later ones.
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
        sites: The instructions at which a thread may wait.
        yields: The sites that are branches back in loops that watch memory.
        is_short: Whether all waits are at barrier 0 for all threads, so that frames have a short head.
        words: Maximum number of words that a thread shows.
        parks: Whether a thread may let others run in a loop. Then all threads of a block may wait for another block.
    """

    sites: frozenset[int]
    yields: frozenset[int]
    is_short: bool
    words: int
    parks: bool

    @property
    def head_bytes(self) -> int:
        """The size of the part of a frame before the saved registers."""
        return SHORT_HEAD_BYTES if self.is_short else HEAD_BYTES + 2 * SLOT_BYTES * self.words


def watches(i: Instruction) -> bool:
    """Return whether an instruction watches memory."""
    return i.opcode in _WATCHING or (i.opcode == "ld" and not _WATCHING_LOADS.isdisjoint(i.modifiers))


def find_waits(body: Sequence[Instruction], watching_functions: Set[str] = frozenset()) -> Waits:
    """Find the waits of a kernel. `watching_functions` is the result of `call_graph.watching_functions`."""
    # `yields` are branches. They count as waits, because the thread may wait there.
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
    """Return the backward branches over an instruction that watches memory.

    Every cycle that contains such an instruction has at least one such branch.
    """
    # Prefix sums show for any range whether it contains such an instruction.
    watching_before = [0]
    for i in body:
        site = i.operands[-1] if i.opcode == "call" else None
        calls = isinstance(site, CallSite) and site.name in watching_functions
        watching_before.append(watching_before[-1] + (calls or watches(i)))
    branches = set()
    for index, i in enumerate(body):
        # For a branch back, the range is from its target up to and including the branch.
        for target in i.operands:
            if not isinstance(target, Target) or target.index > index:
                continue
            if watching_before[index + 1] > watching_before[target.index]:
                branches.add(index)
    return branches
