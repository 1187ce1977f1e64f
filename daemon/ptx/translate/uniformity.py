"""Finds the branches that may separate lanes, and the registers that are equal in all lanes.

Lanes that a branch has separated run one after another, in the order of their blocks. They run together again at the
latest at the first block that is on all paths from the branch; this module calls that block the branch's end. If all
blocks on the paths to the end come before it in the code, this follows:

- A block that is on no such path is common: all lanes that have not ended run it together.
- A register that is written on only one path stays equal in all lanes, unless the written values differ between lanes,
  or a lane that has not made the write needs the register, on the other path or after the end.

A branch to the end of the kernel separates no lanes: some of them end, and the rest stay together.
"""

from collections.abc import Mapping, Sequence

from gpulease.daemon.ptx.parse.syntax import Address, Instruction, Operand, Special, Target, Vector
from gpulease.daemon.ptx.translate.liveness import Block, RegisterEffect, blocks_of, live_at_starts, registers_of
from gpulease.protocol.fast_dataclass import dataclass

# Special registers that differ between the threads in a row of a block.
_VARYING = ("tid.x", "laneid", "warpid", "lanemask_")

# Special registers that differ between the threads of a warp, which may span several rows.
_VARYING_IN_WARPS = (*_VARYING, "tid.y", "tid.z")

_RETURNS = ("ret", "exit")


class Unordered(Exception):
    """A block on a path from a branch comes after the branch's end in the code, so lanes may stay separated."""


@dataclass(frozen=True, slots=True)
class Uniformity:
    """The result of the analysis of a kernel.

    Attributes:
        blocks: The basic blocks.
        live: The registers that are live at the beginning of each block, as bits.
        varying: The registers that may differ between lanes, as bits.
        apart: The blocks that a part of the lanes may run. All other blocks are common.
        meeting: The blocks in which exchanges between lanes are possible: see `_Ways.lets_meet`.
    """

    blocks: tuple[Block, ...]
    live: tuple[int, ...]
    varying: int
    apart: frozenset[int]
    meeting: frozenset[int]


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of instructions that matter for lanes, each as a set of indices.

    Attributes:
        private: Instructions with a different result for each lane.
        common: Instructions with the same result for all lanes, computed from all of them.
        barriers: Instructions at which all threads of a block wait for each other.
        exchanges: Instructions at which lanes exchange values.
    """

    private: frozenset[int] = frozenset()
    common: frozenset[int] = frozenset()
    barriers: frozenset[int] = frozenset()
    exchanges: frozenset[int] = frozenset()


def leaves_at(body: Sequence[Instruction], index: int) -> bool:
    """Return whether a thread that arrives at an index ends there."""
    return index >= len(body) or (body[index].opcode in _RETURNS and body[index].guard is None)


def uniformity_of(body: Sequence[Instruction], effects: Sequence[RegisterEffect], kinds: Kinds) -> Uniformity:
    """Analyse a kernel. Raises Unordered, or TooComplex like `live_at_starts`."""
    blocks = blocks_of(body)
    live = live_at_starts(blocks, effects)
    ways = _Ways(body, blocks)
    written = [written_by(instruction, effect) for instruction, effect in zip(body, effects, strict=True)]
    # Repeat until nothing changes: registers that vary let branches separate lanes, which makes more registers vary.
    varying, apart = 0, frozenset[int]()
    while True:
        grown = _spread(body, effects, kinds, varying)
        branches = [number for number in range(len(blocks)) if _parts(body, blocks[number], grown)]
        regions = [ways.from_branch(number) for number in branches]
        for sides, end in regions:
            # Registers that are written on only one path may vary after the paths join.
            grown |= _mixed(sides, end, blocks, written, live)
        apart = frozenset(number for sides, _ in regions for side in sides for number in side)
        if grown == varying:
            meeting = ways.lets_meet(dict(zip(branches, regions, strict=True)), kinds)
            return Uniformity(tuple(blocks), tuple(live), varying, apart, meeting)
        varying = grown


def _spread(body: Sequence[Instruction], effects: Sequence[RegisterEffect], kinds: Kinds, varying: int) -> int:
    """Add the registers that vary because an instruction reads a varying one, in one pass over the code."""
    for index, (instruction, effect) in enumerate(zip(body, effects, strict=True)):
        depends = effect.reads & varying or index in kinds.private
        # If the guard varies, even a common result varies, because some lanes keep the old value.
        guard = instruction.guard is not None and varying >> instruction.guard.register.index & 1
        if index in kinds.common and not guard:
            continue
        specials = _VARYING_IN_WARPS if kinds.exchanges else _VARYING
        if depends or any(_is_varying(operand, specials) for operand in instruction.operands):
            varying |= written_by(instruction, effect)
    return varying


def written_by(instruction: Instruction, effect: RegisterEffect) -> int:
    """Return the registers that an instruction may write, as bits."""
    # `RegisterEffect.writes` does not include guarded writes, so find them here.
    if instruction.guard is None:
        return effect.writes
    registers = [operand for operand in instruction.operands[:1] if not isinstance(operand, Address)]
    return sum({1 << register.index for operand in registers for register in registers_of(operand)})


def _is_varying(operand: Operand, specials: tuple[str, ...]) -> bool:
    match operand:
        case Special(name):
            return name.removeprefix("%").startswith(specials)
        case Vector(elements):
            return any(_is_varying(element, specials) for element in elements)
    return False


def _parts(body: Sequence[Instruction], block: Block, varying: int) -> bool:
    """Return whether a block ends in a branch that separates lanes."""
    last = body[block.end - 1]
    if last.guard is None or last.opcode != "bra" or not varying >> last.guard.register.index & 1:
        return False
    exits = [block.end, *(target.index for target in last.operands if isinstance(target, Target))]
    return not any(leaves_at(body, index) for index in exits)


def _mixed(
    sides: Sequence[set[int]], end: int, blocks: Sequence[Block], written: Sequence[int], live: Sequence[int]
) -> int:
    """Return the registers that lanes on one path write and other lanes may still need."""
    reached = 0
    for side, other in (sides, sides[::-1]):
        # Find the registers that are needed at the end, or anywhere on the other path.
        needed = live[end] if end < len(blocks) else 0
        for number in other:
            needed |= live[number]
        for number in side:
            for registers in written[blocks[number].start : blocks[number].end]:
                reached |= registers & needed
    return reached


class _Ways:
    """The paths through a body, without those that only lead to the end of the kernel."""

    def __init__(self, body: Sequence[Instruction], blocks: Sequence[Block]) -> None:
        self._end = len(blocks)
        self._blocks, self._body = blocks, body
        # Leave out paths that only lead to the end of the kernel, because they separate no lanes.
        every, going_on = ([self._followers(body, block, keep=keep) for block in blocks] for keep in (True, False))
        arriving = self._arriving(going_on)
        # If lanes leave a loop only to end, keep these paths; otherwise, no path would lead out of the loop.
        self._follows = [
            go if n in arriving else all_ for n, (go, all_) in enumerate(zip(going_on, every, strict=True))
        ]
        self._behind = self._postdominators()

    def from_branch(self, number: int) -> tuple[tuple[set[int], set[int]], int]:
        """Return the blocks on each of the two paths from a branch to its end, and the end. Raises Unordered."""
        end = self._meeting(number)
        follows = self._follows[number]
        sides = tuple(self._reached(follower, end) for follower in follows)
        # Blocks run in the order of the code, so all of them must come before the end.
        if any(block >= end for side in sides for block in side):
            raise Unordered
        return (sides[0], sides[1] if len(sides) > 1 else set()), end

    def lets_meet(self, regions: Mapping[int, tuple[tuple[set[int], set[int]], int]], kinds: Kinds) -> frozenset[int]:
        """Return the blocks in which exchanges are possible.

        In such a block, either all lanes are present, or the missing ones have skipped a branch that has only one path,
        and wait at a barrier. So they can't arrive later, or take part in another exchange.
        """
        reached = set(range(self._end))
        for number, (sides, end) in regions.items():
            others = [sides[1], sides[0]]
            for side, other in zip(sides, others, strict=True):
                if other or number in side or not self._awaits_barrier(end, kinds):
                    reached -= side
        return frozenset(reached)

    def _awaits_barrier(self, start: int, kinds: Kinds) -> bool:
        """Return whether every path from a block reaches a barrier before the end of the kernel or an exchange."""
        visited: set[int] = set()
        pending = [start]
        while pending:
            number = pending.pop()
            if number in visited:
                continue
            visited.add(number)
            if number == self._end or leaves_at(self._body, self._blocks[number].start):
                return False
            # The first barrier or exchange in the block decides. If there is none, the next blocks decide.
            places = range(self._blocks[number].start, self._blocks[number].end)
            first = next((n for n in places if n in kinds.barriers or n in kinds.exchanges), None)
            if first is None:
                pending.extend(self._blocks[number].follows)
                if self._end in self._follows[number] or self._body[places[-1]].opcode in _RETURNS:
                    return False
            elif first in kinds.exchanges or self._body[first].guard is not None:
                return False
        return True

    def _followers(self, body: Sequence[Instruction], block: Block, *, keep: bool) -> list[int]:
        """Return the blocks that may run next. Blocks at which the kernel ends are included only with `keep`."""
        follows = [n for n in block.follows if keep or not leaves_at(body, self._blocks[n].start)]
        last = body[block.end - 1]
        runs_off = block.end == len(body) and (last.opcode not in ("bra", *_RETURNS) or last.guard is not None)
        if not follows or runs_off:
            follows.append(self._end)
        return list(dict.fromkeys(follows))

    def _arriving(self, follows: Sequence[Sequence[int]]) -> set[int]:
        """Return the blocks from which a path leads to the end of the kernel."""
        before: dict[int, list[int]] = {}
        for number, followers in enumerate(follows):
            for follower in followers:
                before.setdefault(follower, []).append(number)
        reached, pending = {self._end}, [self._end]
        while pending:
            fresh = [number for number in before.get(pending.pop(), ()) if number not in reached]
            reached.update(fresh)
            pending.extend(fresh)
        return reached

    def _postdominators(self) -> list[int]:
        """Return for each block the blocks that are on every path from it to the end, as bits, including itself."""
        every = (1 << (self._end + 1)) - 1
        # Start with all blocks, and remove those that a path avoids, until nothing changes.
        postdominators = [every] * self._end + [1 << self._end]
        changed = True
        while changed:
            changed = False
            for number in range(self._end - 1, -1, -1):
                common = every
                for follower in self._follows[number]:
                    common &= postdominators[follower]
                if (common := common | 1 << number) != postdominators[number]:
                    postdominators[number], changed = common, True
        return postdominators

    def _meeting(self, number: int) -> int:
        """Return a branch's end: the first block on every path from the branch. Raises Unordered if there is none."""
        # All other blocks that are on every path from the branch are also on every path from the branch's end.
        candidates = self._behind[number] & ~(1 << number)
        for other in range(self._end + 1):
            if candidates >> other & 1 and self._behind[other] == candidates:
                return other
        raise Unordered

    def _reached(self, start: int, end: int) -> set[int]:
        reached: set[int] = set()
        pending = [start]
        while pending:
            number = pending.pop()
            if number == end or number in reached or number == self._end:
                continue
            reached.add(number)
            pending.extend(self._follows[number])
        return reached
