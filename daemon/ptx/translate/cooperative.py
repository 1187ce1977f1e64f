"""Finds the kernels in PTX that only a cooperative launch can run.

nvcc's grid synchronisation reads the address of the grid's barrier from %envreg1 and %envreg2, and traps if it is 0.
The address is 0 in every launch that is not cooperative. So this module assumes that it is 0, computes the registers
that depend on it, and decides which branches are taken. For example, the code behind `if (grid.is_valid())` never runs.
A kernel needs a cooperative launch if a branch that depends on the address always leads to a trap. The module can't
track an address through a stack or a call (nvcc -G). If there is such an address, a kernel needs a cooperative launch
if it can reach any trap.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import eq, ge, gt, le, lt, ne
from typing import Final

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.architecture import Architecture
from gpulease.daemon.ptx.limits import MAX_IMAGE_BYTES
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.parse.syntax import (
    Address,
    Function,
    Image,
    Instruction,
    Integer,
    Operand,
    Register,
    Special,
    Vector,
)
from gpulease.daemon.ptx.translate.call_graph import CallGraph, link
from gpulease.daemon.ptx.translate.liveness import ENDS, Block, blocks_of, registers_of
from gpulease.daemon.ptx.translate.specials import GRID_BARRIER
from gpulease.protocol.fast_dataclass import dataclass

_TARGET: Final = re.compile(rb"^[ \t]*\.target\s+sm_(\d{2,3})", re.MULTILINE)

_SHARED_SPACES: Final = ("global", "shared")
"""nvcc never stores the address in these spaces. Stacks and the parameters of calls are in other spaces."""

_MAX_ROUNDS: Final = 4
"""Maximum number of rounds in which unreachable code is removed. Each round may make more code unreachable, so hostile
code could otherwise need a round for each block."""

_KNOWN_BELOW: Final = 128
"""Only values below this one are computed, because they are the same in all integer types."""

_COMPARISONS: Final[dict[str, Callable[[int, int], bool]]] = {
    "eq": eq, "ne": ne, "lt": lt, "le": le, "gt": gt, "ge": ge, "lo": lt, "ls": le, "hi": gt, "hs": ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a function in a launch that is not cooperative.

    Attributes:
        reached: The instructions that may run.
        needs_barrier: Whether a trap depends on the barrier's address.
        passes_on: Whether the address, or a value computed from it, is stored to a stack or to parameters of a call.
    """

    reached: tuple[Instruction, ...]
    needs_barrier: bool = False
    passes_on: bool = False


def cooperative_kernels(tree: Image) -> frozenset[str]:
    """Return the kernels of a linked image that only a cooperative launch can run."""
    # Usually, no function reads the barrier's address.
    functions = (*tree.functions, *tree.subroutines)
    if not any(_reads_barrier(function) for function in functions):
        return frozenset()
    # Step 1: for each function separately, find the code that can run, and what depends on the address.
    facts = {f.name: _facts(f) if _reads_barrier(f) else _Facts(f.instructions) for f in functions}
    trapping = {name for name, fact in facts.items() if any(i.opcode == "trap" for i in fact.reached)}
    # Step 2: make a call graph of the code that can run. It reads only calls, so it does not matter that the labels of
    # the reduced code are wrong.
    kernels, subroutines = (
        tuple(replace(f, instructions=facts[f.name].reached) for f in part)
        for part in (tree.functions, tree.subroutines)
    )
    graph = CallGraph(replace(tree, functions=kernels, subroutines=subroutines))
    fact: set[str] = set()
    # Step 3: in each kernel and all functions that it reaches, search for a trap that depends on the address. If an
    # address was passed on, search for any trap.
    for kernel in kernels:
        names = {kernel.name, *graph.reached(kernel)}
        passes_on = any(facts[name].passes_on for name in names)
        if any(facts[name].needs_barrier for name in names) or (passes_on and names & trapping):
            fact.add(kernel.name)
    return frozenset(fact)


def confirm_by_text(ptx: bytes, kernels: frozenset[str]) -> frozenset[str]:
    """Return those of `kernels` that need a cooperative launch according to their PTX.

    The caller has found `kernels` in machine code, which does not show the condition of a trap. If this module can't
    parse the PTX, it returns all of them.
    """
    target = _TARGET.search(ptx)
    if not kernels or target is None or len(ptx) > MAX_IMAGE_BYTES:
        return kernels
    # A card's driver may accept text that this parser refuses, so a refusal proves nothing.
    try:
        tree = link(parse(ptx.decode(), Architecture(int(target[1]))))
    except (ImageRejected, UnicodeDecodeError):
        return kernels
    if tree.refusals:
        return kernels
    return kernels & cooperative_kernels(tree)


def _reads_barrier(function: Function) -> bool:
    return any(_is_barrier(operand) for i in function.instructions for operand in _operands(i))


def _is_barrier(operand: Operand) -> bool:
    return isinstance(operand, Special) and operand.name[1:] in GRID_BARRIER


def _operands(instruction: Instruction) -> list[Operand]:
    """Return the operands, with vectors replaced by their elements, without addresses.

    Addresses are left out because a loaded value does not depend on the barrier's address.
    """
    operands: list[Operand] = []
    for operand in instruction.operands:
        operands += operand.elements if isinstance(operand, Vector) else [operand]
    return [operand for operand in operands if not isinstance(operand, Address)]


def _facts(function: Function) -> _Facts:
    # Step 1: compute values from the code that can run, and the code that can run from the values, until nothing
    # changes.
    body = function.instructions
    blocks = blocks_of(body)
    reached = list(range(len(blocks)))
    for _ in range(_MAX_ROUNDS):
        values = _Values([body[n] for number in reached for n in range(blocks[number].start, blocks[number].end)])
        follows = [_followers(body[block.end - 1], block, values, falls=block.end < len(body)) for block in blocks]
        before, reached = reached, _reached(follows)
        if reached == before:
            break
    # Step 2: find the blocks that always lead to a trap, and whether the address decides if such a block runs.
    sure = _always_trapping([body[block.end - 1] for block in blocks], follows, values)
    needs_barrier = any(
        values.decides(last) and (number in sure if last.opcode == "trap" else not sure.isdisjoint(follows[number]))
        for number in reached
        for last in (body[blocks[number].end - 1],)
    )
    # Step 3: collect the code that can run, without instructions with a guard that is known to be false.
    runs = [body[n] for number in reached for n in range(blocks[number].start, blocks[number].end)]
    runs = [i for i in runs if values.runs(i) is not False]
    return _Facts(tuple(runs), needs_barrier, any(values.leave_by(i) for i in runs))


def _followers(last: Instruction, block: Block, values: "_Values", *, falls: bool) -> tuple[int, ...]:
    """Return the blocks that may run after a block. `last` is its last instruction.

    `falls` says whether there is a block after this one in the code. In `block.follows` it comes after branch targets.
    """
    runs = values.runs(last)
    if runs is None or last.guard is None or last.opcode not in ENDS:
        return block.follows
    targets = len(block.follows) - falls
    return block.follows[:targets] if runs else block.follows[targets:]


def _reached(follows: Sequence[Sequence[int]]) -> list[int]:
    reached, pending = {0}, [0]
    while pending:
        fresh = [number for number in follows[pending.pop()] if number not in reached]
        reached.update(fresh)
        pending.extend(fresh)
    return sorted(reached)


def _always_trapping(last: Sequence[Instruction], follows: Sequence[Sequence[int]], values: "_Values") -> set[int]:
    """Return the blocks that always lead to a trap. `last` has the last instruction of each block."""
    # Walk backwards from the traps, through blocks with only one possible next block.
    before: dict[int, list[int]] = {}
    for number, followers in enumerate(follows):
        if len(set(followers)) == 1:
            before.setdefault(followers[0], []).append(number)
    trapping = {n for n, i in enumerate(last) if i.opcode == "trap" and (i.guard is None or values.decides(i))}
    trapping -= {n for n in trapping if values.runs(last[n]) is False}
    pending = list(trapping)
    while pending:
        fresh = [number for number in before.get(pending.pop(), ()) if number not in trapping]
        trapping.update(fresh)
        pending.extend(fresh)
    return trapping


class _Values:
    """The values of registers in a launch that is not cooperative, as far as they follow from the address 0.

    `_known` maps registers to their values. `_derived` has the registers that depend on the address.
    """

    def __init__(self, body: Sequence[Instruction]) -> None:
        self._known: dict[int, int] = {}
        self._derived: set[int] = set()
        self._writes = Counter(register.index for i in body for register in _results(i))
        readers: dict[int, list[Instruction]] = {}
        for instruction in body:
            for register in _registers_read(instruction):
                readers.setdefault(register, []).append(instruction)
        pending = deque(body)
        # A register becomes derived at most once and known at most once, so this visits each instruction a few times.
        while pending:
            for register in self._follow(pending.popleft()):
                pending.extend(readers.get(register, ()))

    def runs(self, instruction: Instruction) -> bool | None:
        """Return whether an instruction runs, according to its guard; None if unknown."""
        guard = instruction.guard
        if guard is None:
            return True
        value = self._known.get(guard.register.index)
        return None if value is None else bool(value) != guard.negated

    def decides(self, instruction: Instruction) -> bool:
        """Return whether the barrier's address decides if a guarded instruction runs."""
        guard = instruction.guard
        return guard is not None and (guard.register.index in self._derived or guard.register.index in self._known)

    def leave_by(self, instruction: Instruction) -> bool:
        """Return whether an instruction stores a value derived from the address to a stack or a call's parameters."""
        is_private = instruction.opcode == "st" and not any(m.startswith(_SHARED_SPACES) for m in instruction.modifiers)
        return is_private and not self._derived.isdisjoint(_registers_read(instruction))

    def _follow(self, instruction: Instruction) -> list[int]:
        """Visit an instruction. Return the registers that became derived or known."""
        changed: list[int] = []
        value = self._value(instruction)
        is_derived = any(map(_is_barrier, _operands(instruction))) or any(
            register in self._derived for register in _registers_read(instruction)
        )
        for register in _results(instruction):
            fresh = is_derived and register.index not in self._derived
            if fresh:
                self._derived.add(register.index)
            # If several instructions write a register, its value is not known.
            if value is not None and self._writes[register.index] == 1 and register.index not in self._known:
                self._known[register.index], fresh = value, True
            if fresh:
                changed.append(register.index)
        return changed

    def _value(self, instruction: Instruction) -> int | None:
        """Return the value that an instruction writes to its only result, if it is known and small."""
        # A guarded instruction may not run. Then the register keeps its earlier value.
        if instruction.guard is not None or not isinstance(next(iter(instruction.operands), None), Register):
            return None
        value = _evaluate(instruction, [self._of(operand) for operand in _operands(instruction)[1:]])
        return value if value is not None and value < _KNOWN_BELOW else None

    def _of(self, operand: Operand) -> int | None:
        match operand:
            case Integer(value):
                return value if value < _KNOWN_BELOW else None
            case Register(index):
                return self._known.get(index)
        return 0 if _is_barrier(operand) else None


def _results(instruction: Instruction) -> list[Register]:
    """Return the registers that an instruction may write, which are in its first operand."""
    first = instruction.operands[:1]
    return [register for operand in first if not isinstance(operand, Address) for register in registers_of(operand)]


def _registers_read(instruction: Instruction) -> list[int]:
    """Return the registers of an instruction's guard and sources, without those in addresses."""
    guard = [] if instruction.guard is None else [instruction.guard.register.index]
    sources = (operand for operand in instruction.operands[1:] if not isinstance(operand, Address))
    return guard + [register.index for operand in sources for register in registers_of(operand)]


def _evaluate(instruction: Instruction, values: Sequence[int | None]) -> int | None:
    """Compute an instruction's result; None if it is unknown. `values` are its sources, None for an unknown one."""
    match instruction.opcode, values:
        # One known source can be enough: the condition of a selection, a 0 in an AND, or a true in an OR.
        case "selp", [first, second, int(chosen)]:
            return first if chosen else second
        case "and", _ if 0 in values:
            return 0
        case "or", _ if 1 in values and instruction.modifiers == ("pred",):
            return 1
        # If zeros are packed, inserted or shifted, the result is zero.
        case "mov", _ if not any(value is None or value for value in values):
            return 0
        case (("bfi" | "shl" | "shr"), [0, *rest]) if instruction.opcode != "bfi" or rest[0] == 0:
            return 0
        # For floats, only 0 is represented by the same bits as the integer.
        case (("mov" | "cvt"), [int(value)]) if value == 0 or "f" not in "".join(instruction.modifiers):
            return value
        case (("and" | "or" | "xor" | "add" | "setp"), [int(first), int(second)]):
            return _combine(instruction, first, second)
        case "not", [int(value)] if instruction.modifiers == ("pred",):
            return 1 - value
    return None


def _combine(instruction: Instruction, first: int, second: int) -> int | None:
    match instruction.opcode, instruction.modifiers:
        case "setp", (name, kind) if name in _COMPARISONS and kind[0] in "sub":
            return int(_COMPARISONS[name](first, second))
        case "and", _:
            return first & second
        case "or", _:
            return first | second
        case "xor", _:
            return first ^ second
        case "add", (kind,) if kind[0] in "su":
            return first + second
    return None
