"""Inlines functions into kernels if a thread may wait in them, at barriers, at warp operations or in loops.

A kernel can be suspended at such an instruction and resumed later, because it keeps its state in a frame. A natively
called function can't. The inliner changes the tree, so all later stages get one body.
"""

from collections.abc import Callable
from dataclasses import replace

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.limits import MAX_INSTRUCTIONS, MAX_LOCAL_BYTES, MAX_REGISTERS_PER_FUNCTION, rejected
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import (
    Address,
    CallSite,
    DeclaredVariable,
    Function,
    Instruction,
    Negated,
    Operand,
    Pair,
    PredicateGuard,
    Register,
    Space,
    Symbol,
    Target,
    Vector,
)
from gpulease.daemon.ptx.translate.waits import WAITING

# Instructions at which threads wait for each other (PTX ISA sections 9.7.9.23 to 9.7.9.28, 9.7.13, 9.7.14), including
# unsupported ones.
MEETINGS = WAITING.union(("wgmma",))

# Maximum depth of inlined functions in inlined functions. It also bounds the use of Python's stack.
_MAX_DEPTH = 64

_TOO_MANY = "too many calls of functions with barriers or warp operations"


def meets(function: Function) -> bool:
    """Return whether the function's own body has an instruction of MEETINGS."""
    return any(instruction.opcode in MEETINGS for instruction in function.instructions)


class Inliner:
    """Replaces calls of some functions with the functions' bodies.

    Args:
        functions: The functions of the image, by name.
        to_inline: The names of the functions to inline.
        max_instructions: Maximum number of instructions of a function after inlining.
    """

    def __init__(
        self, functions: dict[str, Function], to_inline: set[str], max_instructions: int = MAX_INSTRUCTIONS
    ) -> None:
        self._functions = functions
        self._to_inline = to_inline
        self._expanded: dict[str, Function] = {}
        self._max_instructions = max_instructions
        # The number of instructions that all results together may still have. It bounds the work for an image with many
        # functions that each expand to the limit.
        self._instruction_budget = 4 * MAX_INSTRUCTIONS

    def expand(self, function: Function, within: tuple[str, ...] = ()) -> Function:
        """Return the function with the calls replaced with bodies, which are expanded first. Raises ImageRejected."""
        if function.name not in self._expanded:
            bodies = {}
            for number, instruction in enumerate(function.instructions):
                name = self._callee_of(instruction)
                if name is None:
                    continue
                # `within` is the chain of callers. If the callee is one of them, there is recursion.
                if name in within or name == function.name or len(within) >= _MAX_DEPTH:
                    raise _problem(function, instruction, f"{name[:60]} waits for other threads and calls itself")
                bodies[number] = self.expand(self._functions[name], (*within, function.name))
            self._expanded[function.name] = self._joined(function, bodies)
        return self._expanded[function.name]

    def _joined(self, function: Function, bodies: dict[int, Function]) -> Function:
        """Replace the calls at the indices in `bodies`, and count the result against the limit for the whole image."""
        if not bodies:
            return function
        joined = _splice(function, bodies, self._max_instructions)
        self._instruction_budget -= len(joined.instructions)
        if self._instruction_budget < 0:
            raise rejected(_TOO_MANY, kernel=function.name)
        return joined

    def _callee_of(self, instruction: Instruction) -> str | None:
        site = instruction.operands[-1] if instruction.operands else None
        return site.name if isinstance(site, CallSite) and site.name in self._to_inline else None


def _problem(function: Function, instruction: Instruction, reason: str) -> ImageRejected:
    return rejected(reason, line=instruction.line, text=instruction.text, kernel=function.name)


def _splice(caller: Function, bodies: dict[int, Function], max_instructions: int) -> Function:
    """Replace the call at each index in `bodies` with the body. Raises ImageRejected if the result is too large."""
    # Step 1: compute where each instruction of the caller will be. A guarded call needs an additional instruction, the
    # branch around the body.
    places = [0]
    for number, instruction in enumerate(caller.instructions):
        body = bodies.get(number)
        length = 1 if body is None else len(body.instructions) + (instruction.guard is not None)
        places.append(places[-1] + length)
    # Step 2: check the limits before building anything, because a few lines of text could become gigabytes.
    steps = {body.name: _steps(body) for body in {id(body): body for body in bodies.values()}.values()}
    built = len(caller.instructions) + sum(steps[body.name] for body in bodies.values())
    registers = len(caller.registers) + sum(len(body.registers) for body in bodies.values())
    if built > max_instructions or registers > MAX_REGISTERS_PER_FUNCTION:
        raise rejected(_TOO_MANY, kernel=caller.name)
    # Step 3: copy the instructions, with the caller's labels moved and the calls replaced.
    instructions: list[Instruction] = []
    for number, instruction in enumerate(caller.instructions):
        if number not in bodies:
            instructions.append(_map(instruction, _Renaming(target=lambda index: places[index])))
            continue
        after = places[number + 1]
        # The call's guard becomes a branch over the body, which is taken if the guard is false.
        if instruction.guard is not None:
            skip = PredicateGuard(instruction.guard.register, not instruction.guard.negated)
            instructions.append(replace(instruction, guard=skip, opcode="bra", operands=(Target("", after),)))
        caller, inlined = _body(caller, instruction, bodies[number], len(instructions), after)
        instructions += inlined
    if max(caller.local_bytes, caller.call_bytes) > MAX_LOCAL_BYTES:
        raise rejected("the functions it calls need too much memory", kernel=caller.name)
    return replace(caller, instructions=tuple(instructions))


def _steps(function: Function) -> int:
    """Return the number of instructions plus the number of labels of indexed branches, which are operands."""
    return sum(len(i.operands) if i.opcode == "brx" else 1 for i in function.instructions)


def _body(
    caller: Function, call: Instruction, callee: Function, start: int, after: int
) -> tuple[Function, list[Instruction]]:
    """Return the caller with a callee's registers and variables added, and the callee's instructions that use them."""
    site = call.operands[-1]
    # After inlining, the callee's parameters and results are the caller's variables, so these must be different ones.
    if not isinstance(site, CallSite) or set(site.arguments) & set(site.results):
        raise _problem(caller, call, "a result takes an argument's place")
    # The callee's local and call variables are appended to the caller's, aligned.
    local = round_up(caller.local_bytes, callee.local_alignment)
    calls = round_up(caller.call_bytes, callee.call_alignment)
    # Parameters and results become the variables that the caller passes.
    passed = dict(zip(callee.parameters + callee.results, site.arguments + site.results, strict=True))
    if any(actual.alignment < formal.alignment for formal, actual in passed.items()):
        raise _problem(caller, call, "an argument is less aligned than its parameter")

    def place(variable: DeclaredVariable) -> DeclaredVariable:
        if variable.space is Space.LOCAL:
            return replace(variable, offset=variable.offset + local)
        if variable.space is Space.CALL:
            return replace(variable, offset=variable.offset + calls)
        return passed.get(variable, variable)

    renaming = _Renaming(len(caller.registers), place, lambda index: start + index)
    instructions = []
    for instruction in callee.instructions:
        # A parameter is now a variable of the caller, so the callee must not compute its address.
        if "param" in instruction.modifiers and not _names_its_parameter(instruction):
            raise _problem(callee, instruction, "a function with barriers can't compute its parameters' addresses")
        # A return becomes a branch to the instruction after the call.
        if instruction.opcode == "ret":
            instruction = replace(instruction, opcode="bra", modifiers=(), operands=(Target("", after - start),))
        instructions.append(_map(instruction, renaming))
    # Append the callee's registers to the caller's. Those of the next call will be appended to both.
    registers = tuple(replace(r, index=r.index + len(caller.registers)) for r in callee.registers)
    room = replace(
        caller,
        registers=caller.registers + registers,
        local_bytes=local + callee.local_bytes,
        local_alignment=max(caller.local_alignment, callee.local_alignment),
        call_bytes=calls + callee.call_bytes,
        call_alignment=max(caller.call_alignment, callee.call_alignment),
    )
    return room, instructions


def _names_its_parameter(instruction: Instruction) -> bool:
    addresses = [operand for operand in instruction.operands if isinstance(operand, Address)]
    return all(isinstance(address.base, DeclaredVariable) for address in addresses)


class _Renaming:
    """Maps registers, variables and labels of instructions.

    Args:
        registers: Number that is added to the index of each register.
        place: Maps each variable.
        target: Maps the index in each label.
    """

    def __init__(
        self,
        registers: int = 0,
        place: Callable[[DeclaredVariable], DeclaredVariable] = lambda variable: variable,
        target: Callable[[int], int] = lambda index: index,
    ) -> None:
        self.registers = registers
        self.place = place
        self.target = target

    def register(self, register: Register) -> Register:
        return replace(register, index=register.index + self.registers) if self.registers else register

    def operand(self, operand: Operand) -> Operand:
        """Map an operand. Elements of vectors and pairs are single operands, so the recursion is at most two deep."""
        match operand:
            case Register():
                return self.register(operand)
            case Target(name, index):
                return Target(name, self.target(index))
            case Symbol(variable, offset):
                return Symbol(self.place(variable), offset)
            case Address(Register() as base, offset):
                return Address(self.register(base), offset)
            case Address(DeclaredVariable() as variable, offset):
                return Address(self.place(variable), offset)
            case Vector(elements):
                return Vector(tuple(self.operand(element) for element in elements))
            case Pair(first, second):
                return Pair(self.operand(first), self.operand(second))
            case Negated(register):
                return Negated(self.register(register))
            case CallSite(_, _, arguments, results):
                arguments, results = (tuple(self.place(v) for v in passed) for passed in (arguments, results))
                return replace(operand, arguments=arguments, results=results)
        return operand


def _map(instruction: Instruction, renaming: _Renaming) -> Instruction:
    guard = instruction.guard
    if guard is not None:
        guard = PredicateGuard(renaming.register(guard.register), guard.negated)
    operands = tuple(renaming.operand(operand) for operand in instruction.operands)
    return replace(instruction, guard=guard, operands=operands)


def map_variables(function: Function, place: Callable[[DeclaredVariable], DeclaredVariable]) -> Function:
    """Return the function with `place` applied to each variable that it names."""
    renaming = _Renaming(place=place)
    return replace(function, instructions=tuple(_map(i, renaming) for i in function.instructions))
