"""Parses the body of a function: its declarations, labels and instructions (PTX ISA section 4.3)."""

from collections.abc import Mapping
from dataclasses import field, replace

from gpulease.daemon.ptx.limits import (
    MAX_BLOCK_DEPTH,
    MAX_CALL_BYTES,
    MAX_INSTRUCTIONS,
    MAX_LOCAL_BYTES,
    MAX_REGISTERS_PER_RANGE,
    MAX_STATIC_SHARED_BYTES,
)
from gpulease.daemon.ptx.parse import stack_memory
from gpulease.daemon.ptx.parse.declarations import parse_scalar, parse_variable, round_up
from gpulease.daemon.ptx.parse.lexer import Cursor, Lexeme
from gpulease.daemon.ptx.parse.operands import LISTS, UNRESOLVED, CallParser
from gpulease.daemon.ptx.parse.scopes import Listing, NameTaken, RegisterFile, Scope, TooManyRegisters
from gpulease.daemon.ptx.parse.syntax import (
    SCALARS,
    DeclaredVariable,
    Instruction,
    Operand,
    PredicateGuard,
    Register,
    Signature,
    Space,
    Target,
)
from gpulease.protocol.fast_dataclass import dataclass

_AREA_LIMITS = {Space.SHARED: MAX_STATIC_SHARED_BYTES, Space.LOCAL: MAX_LOCAL_BYTES, Space.CALL: MAX_CALL_BYTES}

# These are refused before their operands are parsed, because the operands have a different syntax (PTX ISA sections
# 9.7.10 and 9.7.11).
_TEXTURED = frozenset(("tex", "tld4", "suld", "sust", "sured"))

# Matrix products by groups of warps, with up to 128 registers as operands, are refused in the same way.
_GROUPED = "wgmma"


def _advice(opcode: str, modifiers: list[str]) -> str | None:
    """Return the advice for an instruction that is refused with any operands; None for other instructions."""
    if opcode in _TEXTURED:
        return "read and write plain memory instead of textures and surfaces"
    if opcode == _GROUPED or "tensor" in modifiers:
        return "compile for sm_80, which does without it"
    return None


@dataclass(slots=True)
class Area:
    """The memory that a function's variables in one space take. It grows as declarations are parsed."""

    space: Space
    size: int = 0
    alignment: int = 1
    # Module-wide shared variables take memory only in the functions that name them.
    adopted: dict[str, DeclaredVariable] = field(default_factory=dict)

    def place(self, variable: DeclaredVariable) -> DeclaredVariable:
        """Append a variable to the area, aligned. Returns the variable with its offset."""
        offset = round_up(self.size, variable.alignment)
        self.size = offset + variable.size
        self.alignment = max(self.alignment, variable.alignment)
        return replace(variable, offset=offset)


class BodyParser(CallParser):
    """Parses one body. Nested blocks do not use Python's stack, so deep nesting can't overflow it."""

    def __init__(self, cursor: Cursor, outer: Scope, signature: Signature, signatures: Mapping[str, Signature]) -> None:
        super().__init__(cursor, signatures)
        self.scope = Scope(outer)
        self.registers = RegisterFile()
        self.instructions: list[Instruction] = []
        # Number of instructions, and of labels of indexed branches, which become operands.
        self.steps = 0
        self.shared = Area(Space.SHARED)
        self.local = Area(Space.LOCAL)
        self.calls = Area(Space.CALL)
        self._pending: list[tuple[int, Scope, Lexeme]] = []
        self._depth = 0
        self._stack: stack_memory.StackMemory | None = None
        # Parameters and results are names of the outermost block.
        for parameter in (*signature.parameters, *signature.results):
            self.scope.declare(parameter.name, parameter)

    def parse(self) -> None:
        """Parse the whole body, from its `{` to the matching `}`."""
        cursor = self.cursor
        cursor.expect("{")
        while True:
            match cursor.peek.kind:
                case "}":
                    cursor.take()
                    if self._depth == 0:
                        break
                    self._leave()
                case "{":
                    self._enter()
                case _:
                    self._parse_statement()
        # Resolve labels at the end, because a branch may name a later label.
        self._resolve_labels()

    def find(self, name: str) -> Register | DeclaredVariable | None:
        """Return the register or variable with a name in the current block; None if the name is unknown.

        A module's shared variable gets its offset when the function first names it.
        """
        declared = self.scope.find(name, self.registers)
        # Only a module-wide shared variable with a size has a different offset in each function.
        if not isinstance(declared, DeclaredVariable) or declared.space is not Space.SHARED or declared.is_dynamic:
            return declared
        if declared.offset >= 0:
            return declared
        if name not in self.shared.adopted:
            self.shared.adopted[name] = self._place(self.shared, declared, self.cursor.peek)
        return self.shared.adopted[name]

    def _enter(self) -> None:
        at = self.cursor.take()
        self._depth += 1
        if self._depth > MAX_BLOCK_DEPTH:
            raise self.cursor.problem(f"more than {MAX_BLOCK_DEPTH} blocks in one another", at)
        self.scope = Scope(self.scope)

    def _leave(self) -> None:
        self._depth -= 1
        if self.scope.parent is not None:
            self.scope = self.scope.parent

    def _parse_statement(self) -> None:
        cursor = self.cursor
        at = cursor.peek
        # The scopes have no line numbers, so add the line to their errors here.
        try:
            match at.kind:
                case "directive":
                    self._parse_directive(cursor.take())
                case "@" | "word":
                    self._parse_instruction_or_label()
                case ";":
                    cursor.take()
                case _:
                    raise cursor.problem(f"{at.text or 'the end'!r} begins no statement", at)
        except NameTaken as error:
            raise cursor.problem(f"{str(error)[:60]} is declared twice", at) from None
        except TooManyRegisters as error:
            raise cursor.problem(str(error), at) from None

    def _parse_directive(self, at: Lexeme) -> None:
        cursor = self.cursor
        match at.text[1:]:
            case "reg":
                self._parse_registers()
            case "shared":
                self._declare(parse_variable(cursor, Space.SHARED), self.shared, at)
            case "local":
                self._declare(parse_variable(cursor, Space.LOCAL), self.local, at)
            case "param":
                self._declare(parse_variable(cursor, Space.CALL), self.calls, at)
            case "loc" | "file":
                # Skip debug information.
                cursor.skip_line(at.line)
            case "pragma":
                cursor.expect("string")
                cursor.expect(";")
            case _:
                raise cursor.problem(f"the directive {at.text[:60]} is not supported in a kernel", at)

    def _declare(self, variable: DeclaredVariable, area: Area, at: Lexeme) -> None:
        self.scope.declare(variable.name, self._place(area, variable, at))

    def _place(self, area: Area, variable: DeclaredVariable, at: Lexeme) -> DeclaredVariable:
        placed = area.place(variable)
        # A tenant chooses the declared sizes, so check their sum before anything is allocated.
        limit = _AREA_LIMITS[area.space]
        if area.size > limit:
            raise self.cursor.problem(f"the kernel needs over {limit} bytes of .{area.space.value} memory", at)
        return placed

    def _parse_registers(self) -> None:
        """Parse the rest of `.reg .b32 %r<10>, %x;` (PTX ISA section 5.1.1)."""
        cursor = self.cursor
        scalar = parse_scalar(cursor)
        # Ranges and single registers may be mixed in one directive.
        while True:
            name = cursor.expect("word").text
            if cursor.accept("<"):
                at = cursor.peek
                count = cursor.integer()
                if count > MAX_REGISTERS_PER_RANGE:
                    raise cursor.problem(f"{count} registers are more than {MAX_REGISTERS_PER_RANGE}", at)
                cursor.expect(">")
                # Keep a range as a range. A member becomes a register only if an instruction names it.
                self.scope.declare_range(name, count, scalar)
            else:
                self.scope.declare(name, self.registers.add(name, scalar))
            if not cursor.accept(","):
                break
        cursor.expect(";")

    def _parse_instruction_or_label(self) -> None:
        cursor = self.cursor
        first = cursor.peek
        # Step 1: parse an optional guard, then a word. If a colon follows, the word is a label, otherwise an opcode.
        guard = self._parse_guard()
        opcode = cursor.expect("word")
        if guard is None and cursor.accept(":"):
            self.scope.declare_label(opcode.text, len(self.instructions))
            if cursor.peek.text in LISTS:
                self.scope.listings[opcode.text] = self.parse_listing()
            return
        # Step 2: parse the modifiers, each of which is one directive token.
        modifiers = []
        while (modifier := cursor.directive()) is not None:
            modifiers.append(modifier)
        # Step 3: refuse instructions that are not supported with any operands. The error gives advice. Without this
        # step, the error would be about the operands' syntax.
        if advice := _advice(opcode.text, modifiers):
            spelling = ".".join((opcode.text, *modifiers))
            reason = f"the instruction {spelling[:80]} is not supported by the embedded driver: {advice}"
            raise cursor.problem(reason, opcode)
        # Step 4: parse the operands. Those of `call` have a different syntax.
        operands: tuple[Operand, ...]
        operands = self.parse_call() if opcode.text == "call" else self.parse_operands()
        if len(self.instructions) >= MAX_INSTRUCTIONS:
            raise cursor.problem(f"more than {MAX_INSTRUCTIONS} instructions", first)
        # A label may be defined later, so remember the block from which to look it up.
        if any(isinstance(operand, Target) for operand in operands):
            self._pending.append((len(self.instructions), self.scope, first))
        # Step 5: replace the instructions for stack memory, such as `alloca`, with simpler ones.
        text = cursor.source.line_text(first.start)
        instruction = Instruction(first.line, text, guard, opcode.text, tuple(modifiers), operands)
        self.instructions.extend(
            self._stack_steps(instruction, opcode) if instruction.opcode in stack_memory.OPCODES else (instruction,)
        )

    def _stack_steps(self, instruction: Instruction, at: Lexeme) -> list[Instruction]:
        # The first such instruction of a function reserves the memory and the registers.
        if self._stack is None:
            room = self._place(self.local, stack_memory.ROOM, at)
            used, is_over = (self.registers.add(f"alloca.{name}", SCALARS[name]) for name in ("u64", "pred"))
            self._stack = stack_memory.StackMemory(room, used, is_over)
        steps = self._stack.steps(instruction)
        if steps is None:
            raise self.cursor.problem(
                f"this form of {instruction.spelling[:80]} is not supported by the embedded driver", at
            )
        return steps

    def _parse_guard(self) -> PredicateGuard | None:
        if not self.cursor.accept("@"):
            return None
        negated = self.cursor.accept("!")
        return PredicateGuard(self._parse_register(), negated)

    def _resolve_labels(self) -> None:
        """Replace the names of labels in operands by indices of instructions."""
        self.steps = len(self.instructions)
        # An indexed branch gets all labels of its list as operands. A short text can have many branches with a long
        # list, so also count these operands.
        for index, scope, at in self._pending:
            instruction = self.instructions[index]
            operands: list[Operand] = []
            for operand in instruction.operands:
                if isinstance(operand, Target) and operand.index == UNRESOLVED:
                    names = self._listed(operand.name, scope) if instruction.opcode == "brx" else (operand.name,)
                    self.steps += len(names) - 1
                    if self.steps > MAX_INSTRUCTIONS:
                        raise self.cursor.problem(f"more than {MAX_INSTRUCTIONS} instructions and labels", at)
                    operands.extend(self._place_of(name, scope, at) for name in names)
                else:
                    operands.append(operand)
            self.instructions[index] = replace(instruction, operands=tuple(operands))

    def _listed(self, name: str, scope: Scope) -> tuple[str, ...]:
        """Return the labels of the .branchtargets with this name; the name itself if there is none."""
        listing = scope.find_listing(name)
        return listing.names if isinstance(listing, Listing) and listing.kind == ".branchtargets" else (name,)

    def _place_of(self, name: str, scope: Scope, at: Lexeme) -> Target:
        place = scope.find_label(name)
        if place is None:
            raise self.cursor.problem(f"unknown name {name[:60]}", at)
        return Target(name, place)
