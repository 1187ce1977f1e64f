"""Replaces the instructions for stack memory, such as `alloca` (PTX ISA section 9.7.17), with simpler instructions.

A function with `alloca` gets a local variable as its stack, and a register with the number of bytes in use. Like all
registers, this one is 0 at first. `stacksave` reads it, and `stackrestore` writes it.
"""

from gpulease.daemon.ptx.limits import MAX_STACK_BYTES
from gpulease.daemon.ptx.parse.syntax import (
    DeclaredVariable,
    Instruction,
    Integer,
    Operand,
    PredicateGuard,
    Register,
    Space,
    Symbol,
)
from gpulease.protocol.fast_dataclass import dataclass

OPCODES = frozenset(("alloca", "stacksave", "stackrestore"))

ROOM = DeclaredVariable("alloca", Space.LOCAL, MAX_STACK_BYTES, 16, 0, b"", False, ())
"""The stack, to be placed in the function's local memory. Its alignment is the largest that `alloca` may request."""

_DEFAULT_ALIGNMENT = 8

_U64, _B64, _PRED = ("u64",), ("b64",), ("gt", "u64")


@dataclass(frozen=True, slots=True)
class StackMemory:
    """A function's stack.

    Attributes:
        room: The variable.
        taken: The register with the number of bytes in use, .u64.
        is_over: A predicate register for the checks against the limit.
    """

    room: DeclaredVariable
    taken: Register
    is_over: Register

    def steps(self, first: Instruction) -> list[Instruction] | None:
        """Return the instructions that replace an instruction of OPCODES; None if the instruction is not valid."""
        operands = first.operands
        # 64-bit PTX has only the 64-bit forms. With `.local`, the result is an address of local memory.
        if first.modifiers not in (("u64",), ("local", "u64")) or not operands:
            return None
        match first.opcode, operands:
            case "stacksave", (Register() as into,):
                return [self._step(first, "mov", _U64, into, self.taken)]
            case "stackrestore", (value,):
                return [self._step(first, "mov", _U64, self.taken, value)]
            # The optional third operand is the alignment, a constant.
            case "alloca", (Register() as into, size, *rest) if first.guard is None and len(rest) <= 1:
                alignment = rest[0].value if rest and isinstance(rest[0], Integer) else _DEFAULT_ALIGNMENT
                if alignment & alignment - 1 or not 0 < alignment <= ROOM.alignment:
                    return None
                return self._taken(first, into, size, alignment)
        return None

    def _taken(self, first: Instruction, into: Register, size: Operand, alignment: int) -> list[Instruction]:
        limit, taken, over = Integer(MAX_STACK_BYTES), self.taken, self.is_over
        stop = self._step(first, "trap", (), guard=PredicateGuard(over, negated=False))
        return [
            # Check both the size and the sum, because with a huge size the sum could wrap around to a small number.
            self._step(first, "setp", _PRED, over, size, limit),
            stop,
            # Round the count up to the alignment.
            self._step(first, "add", _U64, taken, taken, Integer(alignment - 1)),
            self._step(first, "and", _B64, taken, taken, Integer(-alignment & 2**64 - 1)),
            # The result is the variable's address plus the count. Then add the size to the count.
            self._step(first, "mov", _U64, into, Symbol(self.room)),
            self._step(first, "add", _U64, into, into, taken),
            self._step(first, "add", _U64, taken, taken, size),
            self._step(first, "setp", _PRED, over, taken, limit),
            stop,
        ]

    def _step(
        self,
        first: Instruction,
        opcode: str,
        modifiers: tuple[str, ...],
        *operands: Operand,
        guard: PredicateGuard | None = None,
    ) -> Instruction:
        return Instruction(first.line, first.text, guard or first.guard, opcode, modifiers, operands)
