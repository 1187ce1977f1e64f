"""Find the branches that may part lanes, and the registers with one value for all lanes.

Lanes that a branch has parted run one after another, the earliest block first, and meet again at the latest where all
ways from the branch lead: its end. Two things follow if every block on these ways comes before the end:

- a block on no such way is run by all lanes that have not ended at once: it is common;
- a register written on one way only keeps one value for all lanes, unless the values written differ between lanes, or
  some lane needs the register on the other way or after the end, where it has not made the write itself.

A branch to where a kernel ends parts no lanes: they only become fewer.
"""

from collections.abc import Mapping, Sequence

from gpulease.daemon.ptx.parse.syntax import Address, Instruction, Operand, Special, Target, Vector
from gpulease.daemon.ptx.translate.liveness import Block, RegisterEffect, blocks_of, live_at_starts, registers_of
from gpulease.protocol.fast_dataclass import dataclass

# Special registers that differ within a row of a block.
_VARYING = ("tid.x", "laneid", "warpid", "lanemask_")

# These differ within a warp, too.
_VARYING_IN_WARPS = (*_VARYING, "tid.y", "tid.z")

_RETURNS = ("ret", "exit")


class Unordered(Exception):
    """A path from a branch is after the join in the text, so lanes that it separates may stay separated."""


@dataclass(frozen=True, slots=True)
class Uniformity:
    """Facts about a kernel's lanes.

    Attributes:
        live: The registers needed where each block begins, as bits.
        varying: Registers that may differ between lanes, as bits.
        apart: Blocks that may be run by a part of the lanes.
        meeting: Those of them, and all others, in which lanes may meet: see `_Ways.lets_meet`.
    """

    blocks: tuple[Block, ...]
    live: tuple[int, ...]
    varying: int
    apart: frozenset[int]
    meeting: frozenset[int]


@dataclass(frozen=True, slots=True)
class Kinds:
    """The meanings of instructions for lanes, by their places in the body.

    Attributes:
        private: Instructions that give each lane a result of its own.
        common: Instructions that give all lanes the same result, computed from all of them.
        barriers: Where all threads of a block meet.
        exchanges: Where lanes meet.
    """

    private: frozenset[int] = frozenset()
    common: frozenset[int] = frozenset()
    barriers: frozenset[int] = frozenset()
    exchanges: frozenset[int] = frozenset()


def leaves_at(body: Sequence[Instruction], index: int) -> bool:
    """Say whether a kernel ends at an instruction, or after the last one."""
    return index >= len(body) or (body[index].opcode in _RETURNS and body[index].guard is None)


def uniformity_of(body: Sequence[Instruction], effects: Sequence[RegisterEffect], kinds: Kinds) -> Uniformity:
    """Analyse a kernel. Raises Unordered, and TooComplex as liveness does."""
    blocks = blocks_of(body)
    live = live_at_starts(blocks, effects)
    ways = _Ways(body, blocks)
    written = [written_by(instruction, effect) for instruction, effect in zip(body, effects, strict=True)]
    # A fixed point: registers that vary make branches part lanes, which make more registers vary.
    varying, apart = 0, frozenset[int]()
    while True:
        grown = _spread(body, effects, kinds, varying)
        branches = [number for number in range(len(blocks)) if _parts(body, blocks[number], grown)]
        regions = [ways.from_branch(number) for number in branches]
        for sides, end in regions:
            # Registers written on one way only are mixed where the ways meet.
            grown |= _mixed(sides, end, blocks, written, live)
        apart = frozenset(number for sides, _ in regions for side in sides for number in side)
        if grown == varying:
            meeting = ways.lets_meet(dict(zip(branches, regions, strict=True)), kinds)
            return Uniformity(tuple(blocks), tuple(live), varying, apart, meeting)
        varying = grown


def _spread(body: Sequence[Instruction], effects: Sequence[RegisterEffect], kinds: Kinds, varying: int) -> int:
    """Return the registers that varying ones make vary, in the order of the code: later rounds do the rest."""
    for index, (instruction, effect) in enumerate(zip(body, effects, strict=True)):
        depends = effect.reads & varying or index in kinds.private
        # A guard that varies makes even a common result vary, since some lanes keep the old value.
        guard = instruction.guard is not None and varying >> instruction.guard.register.index & 1
        if index in kinds.common and not guard:
            continue
        specials = _VARYING_IN_WARPS if kinds.exchanges else _VARYING
        if depends or any(_is_varying(operand, specials) for operand in instruction.operands):
            varying |= written_by(instruction, effect)
    return varying


def written_by(instruction: Instruction, effect: RegisterEffect) -> int:
    """Return the registers that an instruction may write, as bits."""
    # Liveness does not count a guarded write as one; here it is.
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
    """Say whether a block ends in a branch that some lanes may take and others not."""
    last = body[block.end - 1]
    if last.guard is None or last.opcode != "bra" or not varying >> last.guard.register.index & 1:
        return False
    exits = [block.end, *(target.index for target in last.operands if isinstance(target, Target))]
    return not any(leaves_at(body, index) for index in exits)


def _mixed(
    sides: Sequence[set[int]], end: int, blocks: Sequence[Block], written: Sequence[int], live: Sequence[int]
) -> int:
    """Return the registers that lanes on one way write and others may still need."""
    reached = 0
    for side, other in (sides, sides[::-1]):
        # Needed: at the end, or anywhere on the other way.
        needed = live[end] if end < len(blocks) else 0
        for number in other:
            needed |= live[number]
        for number in side:
            for registers in written[blocks[number].start : blocks[number].end]:
                reached |= registers & needed
    return reached


class _Ways:
    """The ways through a body, without those that only end lanes."""

    def __init__(self, body: Sequence[Instruction], blocks: Sequence[Block]) -> None:
        self._end = len(blocks)
        self._blocks, self._body = blocks, body
        # Leave out ways that lead only to the kernel's end: they part no lanes.
        every, going_on = ([self._followers(body, block, keep=keep) for block in blocks] for keep in (True, False))
        arriving = self._arriving(going_on)
        # If lanes leave a loop only to end, its ways out are kept: otherwise it would lead nowhere.
        self._follows = [
            go if n in arriving else all_ for n, (go, all_) in enumerate(zip(going_on, every, strict=True))
        ]
        self._behind = self._postdominators()

    def from_branch(self, number: int) -> tuple[tuple[set[int], set[int]], int]:
        """Return the blocks on either way from a branch to its end, and the end. Raises Unordered."""
        end = self._meeting(number)
        follows = self._follows[number]
        sides = tuple(self._reached(follower, end) for follower in follows)
        # Blocks run in the order of the text, so all of them must come before the end.
        if any(block >= end for side in sides for block in side):
            raise Unordered
        return (sides[0], sides[1] if len(sides) > 1 else set()), end

    def lets_meet(self, regions: Mapping[int, tuple[tuple[set[int], set[int]], int]], kinds: Kinds) -> frozenset[int]:
        """Return the blocks in which lanes may meet: absent lanes can't come later, or meet others elsewhere.

        Either all lanes are there, or the others have skipped a choice without an alternative, and wait for a barrier.
        """
        reached = set(range(self._end))
        for number, (sides, end) in regions.items():
            others = [sides[1], sides[0]]
            for side, other in zip(sides, others, strict=True):
                if other or number in side or not self._awaits_barrier(end, kinds):
                    reached -= side
        return frozenset(reached)

    def _awaits_barrier(self, start: int, kinds: Kinds) -> bool:
        """Say whether every way from a block comes to a barrier before the end or an exchange."""
        visited: set[int] = set()
        pending = [start]
        while pending:
            number = pending.pop()
            if number in visited:
                continue
            visited.add(number)
            if number == self._end or leaves_at(self._body, self._blocks[number].start):
                return False
            # The first barrier or exchange in the block decides; without one, so do the blocks that follow.
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
        """Return the blocks that may follow; those where the kernel ends only with `keep`."""
        follows = [n for n in block.follows if keep or not leaves_at(body, self._blocks[n].start)]
        last = body[block.end - 1]
        runs_off = block.end == len(body) and (last.opcode not in ("bra", *_RETURNS) or last.guard is not None)
        if not follows or runs_off:
            follows.append(self._end)
        return list(dict.fromkeys(follows))

    def _arriving(self, follows: Sequence[Sequence[int]]) -> set[int]:
        """Return the blocks from which some way leads to the end."""
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
        """Return for each block the blocks that every way from it to the end goes through, as bits; itself included."""
        every = (1 << (self._end + 1)) - 1
        # Start with everything and remove what some way avoids, until nothing changes.
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
        """Return the first block that every way from a branch comes to."""
        # Among the blocks on every path from a branch, the first one comes before all others.
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
