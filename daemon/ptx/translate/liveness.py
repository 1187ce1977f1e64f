"""Finds the live registers, whose values may still be read. A waiting thread's frame keeps only these.

This is the usual backward analysis over basic blocks. A set of registers is an int with a bit for each register.
"""

from collections.abc import Sequence

from gpulease.daemon.ptx.limits import MAX_LIVENESS_BITS, MAX_LIVENESS_VISITS, MAX_MERGES
from gpulease.daemon.ptx.parse.syntax import (
    Address,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Target,
    Vector,
)
from gpulease.protocol.fast_dataclass import dataclass

# Instructions after which the next instruction does not run, unless they are guarded.
ENDS = ("bra", "brx", "ret", "exit", "trap")


class TooComplex(Exception):
    """The analysis would take more memory or time than a tenant may have."""


@dataclass(frozen=True, slots=True)
class RegisterEffect:
    """The registers that an instruction reads, and those that it always writes, each as bits."""

    reads: int
    writes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: the instructions from `start` up to but not including `end`, and the blocks that may run next."""

    start: int
    end: int
    follows: tuple[int, ...]


def registers_of(operand: Operand) -> list[Register]:
    """Return the registers that an operand names."""
    match operand:
        case Register():
            return [operand]
        case Negated(register):
            return [register]
        case Address(Register() as base, _):
            return [base]
        case Pair(first, second):
            return registers_of(first) + registers_of(second)
        case Vector(elements):
            return [register for element in elements for register in registers_of(element)]
        case _:
            return []


def effect_of(instruction: Instruction, *, writes_first: bool) -> RegisterEffect:
    """Return the registers that an instruction reads and writes. `writes_first`: whether it writes operand 0."""
    reads = writes = 0
    for position, operand in enumerate(instruction.operands):
        bits = 0
        for register in registers_of(operand):
            bits |= 1 << register.index
        # An address as the first operand is read, not written.
        if position == 0 and writes_first and not isinstance(operand, Address):
            writes = bits
        else:
            reads |= bits
    # A guarded instruction may not run and so keep the old values, so treat the registers that it writes as read.
    if instruction.guard is not None:
        reads |= 1 << instruction.guard.register.index
        reads |= writes
        writes = 0
    return RegisterEffect(reads, writes)


def live_after(
    instructions: Sequence[Instruction], effects: Sequence[RegisterEffect], indices: set[int]
) -> dict[int, int]:
    """Return the registers that are live after each instruction in `indices`, as bits. Raises TooComplex."""
    blocks = blocks_of(instructions)
    live_in = live_at_starts(blocks, effects)
    result: dict[int, int] = {}
    # In each block, go backwards from the registers that are live at the starts of the next blocks.
    for block in blocks:
        live = 0
        for follower in block.follows:
            live |= live_in[follower]
        for index in range(block.end - 1, block.start - 1, -1):
            if index in indices:
                result[index] = live
            live = effects[index].reads | (live & ~effects[index].writes)
    return result


def blocks_of(instructions: Sequence[Instruction]) -> list[Block]:
    """Return the basic blocks of a body, in their order."""
    starts = sorted(leaders(instructions))
    ends = [*starts[1:], len(instructions)]
    block_at = {start: number for number, start in enumerate(starts)}
    return [
        Block(start, end, tuple(_followers(instructions, end, block_at)))
        for start, end in zip(starts, ends, strict=True)
    ]


def live_at_starts(blocks: Sequence[Block], effects: Sequence[RegisterEffect]) -> list[int]:
    """Return the registers that are live at the start of each block, as bits. Raises TooComplex."""
    # Check the size of the sets before building any, because the text is a tenant's.
    width = max((effect.reads | effect.writes).bit_length() for effect in effects)
    if width * len(blocks) > MAX_LIVENESS_BITS:
        raise TooComplex("too many registers and blocks in a kernel with barriers")
    summary = [_summary(effects[block.start : block.end]) for block in blocks]
    return _settle([block.follows for block in blocks], summary)


def count_merges(instructions: Sequence[Instruction], effects: Sequence[RegisterEffect], *, waits: bool) -> int:
    """Return the number of values that LLVM must merge at blocks with several predecessors.

    These are the live registers that are written more than once. With `waits`, all live registers count, because a
    thread that has waited loads its registers again. If there are certainly few enough, returns 0. Raises TooComplex.
    """
    if not instructions:
        return 0
    blocks = blocks_of(instructions)
    registers = 0
    written = rewritten = 0
    # Find the registers that are written more than once.
    for instruction, effect in zip(instructions, effects, strict=True):
        registers |= effect.reads | effect.writes
        # A guarded instruction may keep the old values of the registers that it writes, so these also count as read.
        writes = effect.writes if instruction.guard is None else effect.reads
        rewritten |= written & writes
        written |= writes
    # If merging all registers in every block is within the limit, no exact count is needed.
    if registers.bit_count() * len(blocks) <= MAX_MERGES:
        return 0
    live_in = live_at_starts(blocks, effects)
    # Values are merged only in blocks with several predecessors.
    predecessors = [0] * len(blocks)
    for number in (follower for block in blocks for follower in block.follows):
        predecessors[number] += 1
    # Registers are 0 at first. If this 0 may still be read, it is a second value.
    counted = registers if waits else rewritten | live_in[0]
    return sum((live & counted).bit_count() for live, count in zip(live_in, predecessors, strict=True) if count > 1)


def leaders(instructions: Sequence[Instruction]) -> set[int]:
    """Return the indices at which basic blocks begin: the start, labels in operands, and after instructions of ENDS."""
    starts = {0}
    for index, instruction in enumerate(instructions):
        starts.update(target.index for target in instruction.operands if isinstance(target, Target))
        if instruction.opcode in ENDS:
            starts.add(index + 1)
    starts.discard(len(instructions))
    return starts


def _followers(instructions: Sequence[Instruction], end: int, block_at: dict[int, int]) -> list[int]:
    last = instructions[end - 1]
    starts = [target.index for target in last.operands if isinstance(target, Target)]
    if last.opcode not in ENDS or last.guard is not None:
        starts.append(end)
    return [block_at[index] for index in starts if index in block_at]


def _summary(effects: Sequence[RegisterEffect]) -> RegisterEffect:
    """Return the registers that a block reads before it writes them, and those that it writes."""
    reads = writes = 0
    for effect in reversed(effects):
        reads = effect.reads | (reads & ~effect.writes)
        writes |= effect.writes
    return RegisterEffect(reads, writes)


def _settle(follows: Sequence[Sequence[int]], summary: Sequence[RegisterEffect]) -> list[int]:
    """Repeat the analysis until nothing changes. Returns the live registers at the start of each block."""
    before: list[list[int]] = [[] for _ in follows]
    for number, followers in enumerate(follows):
        for follower in followers:
            before[follower].append(number)
    live_in = [effect.reads for effect in summary]
    pending = list(range(len(follows)))
    queued = set(pending)
    for _ in range(MAX_LIVENESS_VISITS):
        if not pending:
            return live_in
        number = pending.pop()
        queued.discard(number)
        live = live_in[number]
        for follower in follows[number]:
            live |= live_in[follower] & ~summary[number].writes
        # If more registers are live in a block than before, visit its predecessors again.
        if live != live_in[number]:
            live_in[number] = live
            fresh = [previous for previous in before[number] if previous not in queued]
            pending.extend(fresh)
            queued.update(fresh)
    raise TooComplex("the control flow is too tangled")
