"""Translates a whole image to IR, in parts that are compiled separately.

Each kernel has a function that runs one thread or several lanes, and a runner, which calls that function for all
threads of a block.
"""

from dataclasses import field

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.native.compiler import Effort
from gpulease.daemon.ptx.limits import (
    MAX_IMAGE_IR_LINES,
    MAX_IR_LINES,
    MAX_LANE_ACCESSES,
    MAX_LANE_INSTRUCTIONS,
    MAX_OPTIMISED_ACCESSES,
    MAX_OPTIMISED_CALLING_ACCESSES,
    MAX_OPTIMISED_FUNCTIONS,
    MAX_OPTIMISED_INSTRUCTIONS,
    MAX_OPTIMISED_LINES,
    MAX_SIMPLIFIED_ACCESSES,
    rejected,
)
from gpulease.daemon.ptx.memory import KernelNeeds
from gpulease.daemon.ptx.native.library import DECLARATIONS as BLOCK_DECLARATIONS
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import Function, Image, Instruction, Vector
from gpulease.daemon.ptx.translate.access import RECORD_FAULT_IR, STAND_IN_IR
from gpulease.daemon.ptx.translate.call_graph import CallGraph, link, watching_functions
from gpulease.daemon.ptx.translate.callees import Callees
from gpulease.daemon.ptx.translate.functions import FunctionTranslator
from gpulease.daemon.ptx.translate.heap import HEAP_IR
from gpulease.daemon.ptx.translate.ir import METADATA
from gpulease.daemon.ptx.translate.lanes import LOCAL_STEP, LaneTranslator
from gpulease.daemon.ptx.translate.runner import LaneRunnerWriter, RunnerWriter, WarpRunnerWriter
from gpulease.daemon.ptx.translate.scheduler import SchedulerWriter
from gpulease.daemon.ptx.translate.thread_body import BodyTranslator
from gpulease.daemon.ptx.translate.vectors import NotAsLanes
from gpulease.daemon.ptx.translate.vprintf import print_ir
from gpulease.daemon.ptx.translate.waits import WAITING
from gpulease.protocol.fast_dataclass import dataclass

# Instructions with a check of an address, or at which a thread may wait: see MAX_OPTIMISED_ACCESSES.
_MEMORY = ("ld", "st", "atom", "red", "cp")
_COSTLY = WAITING.union(_MEMORY)

# A `stmatrix` counts as this many accesses, because it stores a row word by word.
_STMATRIX_ACCESSES = 8


@dataclass(slots=True)
class IrBudget:
    """The number of lines of IR that all parts of an image together may still have."""

    lines: int

    def take(self, text: str, function: Function) -> None:
        """Count a function's IR. Raises ImageRejected if the budget is used up."""
        count = text.count("\n")
        if count > self.lines:
            reason = f"the image takes more than {MAX_IMAGE_IR_LINES} steps"
            raise rejected(reason, line=function.line, kernel=function.name)
        self.lines -= count


@dataclass(slots=True)
class ModulePart:
    """Kernels that are compiled together: a single one, or all that call functions.

    Attributes:
        effort: How much LLVM optimises the code.
        budget: The lines of IR that the image may still have.
        callees: The functions that the kernels call.
        runners: The name of each kernel's runner in the IR, by kernel.
        needs: The memory that a block of each kernel needs, by kernel.
        lines: The number of lines of IR of this part.
        shuffle: The seed for the order in which warps and blocks run; None for the order of their numbers.
        is_once: Whether the code must be compiled with this effort only, because the functions' checks of the stack
            depend on the size of the frames.
    """

    effort: Effort
    budget: IrBudget
    callees: Callees = field(default_factory=Callees)
    runners: dict[str, str] = field(default_factory=dict)
    needs: dict[str, KernelNeeds] = field(default_factory=dict)
    lines: int = 0
    shuffle: int | None = None
    is_once: bool = False
    _definitions: list[str] = field(default_factory=list)
    _declarations: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The IR of the part, including all functions that its code uses."""
        dispatchers = self.callees.dispatchers(self._declarations)
        if self.callees.prints:
            dispatchers.append(print_ir(self._declarations))
        if self.callees.allocates:
            dispatchers.append(HEAP_IR)
        # Sort the declarations, so that equal images have equal text. The cache of compiled code needs this.
        return "\n".join(
            [*sorted(self._declarations), RECORD_FAULT_IR, STAND_IN_IR, *self._definitions, *dispatchers, METADATA]
        )

    def add(self, function: Function, address_indices: dict[str, int]) -> None:
        """Translate one kernel and the functions that it calls. If this raises ImageRejected, the part is unchanged.

        `address_indices` has, by name, the index of each variable and function in the image's table of addresses.
        """
        definitions, lines, mark = len(self._definitions), self.lines, self.callees.mark()
        try:
            self._add(function, address_indices)
        # Undo the changes, because the part's other kernels must be compiled without the remains of this kernel.
        except ImageRejected:
            del self._definitions[definitions:]
            self.lines = lines
            self.callees.undo(mark)
            self.runners.pop(function.name, None)
            raise

    def _add(self, function: Function, address_indices: dict[str, int]) -> None:
        # Step 1: translate the function that runs one thread.
        number = len(self.runners)
        thread = BodyTranslator(function, address_indices, self._declarations, self.callees)
        self._define(thread.translate(f"thread{number}"), function)
        # Step 2: write the runner. If barrier 0 is the only wait, a simple one is enough.
        writer = RunnerWriter if thread.waits.is_short else SchedulerWriter
        if not thread.waits.is_short:
            self._declarations.update(BLOCK_DECLARATIONS)
        runner = writer(
            f"thread{number}",
            frame_bytes=thread.frame_bytes,
            local_bytes=round_up(thread.local_limit, LOCAL_STEP),
            waits=thread.waits,
            shuffle=self.shuffle,
        )
        self._definitions.append(runner.write(f"kernel{number}"))
        self.runners[function.name] = f"kernel{number}"
        self.needs[function.name] = runner.needs
        # Step 3: translate the functions that the kernel calls, directly or not.
        while self.callees.pending:
            self._add_callee(self.callees.pending.pop(), address_indices)

    def add_lanes(self, function: Function, address_indices: dict[str, int]) -> bool:
        """Translate a kernel for lanes. Returns False if its threads can't run together. Raises ImageRejected."""
        number = len(self.runners)
        if len(function.instructions) > MAX_LANE_INSTRUCTIONS:
            return False
        # Translate the kernel before adding anything to the part, because this may fail at any instruction.
        try:
            lanes = LaneTranslator(function, address_indices, self._declarations)
            definition = lanes.translate(f"thread{number}")
        except NotAsLanes:
            return False
        writer = WarpRunnerWriter if lanes.is_warp else LaneRunnerWriter
        runner = writer(
            f"thread{number}",
            lanes=lanes.ir.lanes,
            frame_bytes=lanes.frame_bytes,
            local_bytes=lanes.local_step,
            waits=lanes.waits,
            shuffle=self.shuffle,
        )
        self._define(definition, function)
        self._definitions.append(runner.write(f"kernel{number}"))
        self.runners[function.name] = f"kernel{number}"
        self.needs[function.name] = runner.needs
        return True

    def _add_callee(self, name: str, address_indices: dict[str, int]) -> None:
        translator = FunctionTranslator(
            self.callees.functions[name],
            address_indices,
            self._declarations,
            self.callees,
            is_optimised=self.effort is not Effort.LEAST,
        )
        self._define(translator.translate(self.callees.name(name) or ""), self.callees.functions[name])

    def _define(self, text: str, function: Function) -> None:
        """Add a function's IR. Raises ImageRejected if the part or the image becomes too large."""
        self._definitions.append(text)
        self.budget.take(text, function)
        self.lines += text.count("\n")
        if self.lines > MAX_IR_LINES:
            reason = f"the kernel, or those it has functions in common with, take more than {MAX_IR_LINES} steps"
            raise rejected(reason, line=function.line, kernel=function.name)


def translate(image: Image, shuffle: int | None = None) -> list[ModulePart]:
    """Return the IR of all kernels that can be translated, and add the refusals of the others to the linked image.

    Raises ImageRejected with the first refusal if no kernel can be translated.
    """
    image = link(image)
    parts = _translate(image, shuffle)
    image.check()
    return parts


def _translate(image: Image, shuffle: int | None) -> list[ModulePart]:
    translator, graph = _ImageTranslator(image, shuffle), CallGraph(image)
    for function in image.functions:
        # If a function that a kernel may call is refused, also refuse the kernel.
        reached = graph.reached(function)
        refused = [name for name in (function.name, *sorted(reached)) if name in image.refusals]
        if refused:
            image.refusals[function.name] = image.refusals[refused[0]]
            continue
        try:
            translator.add(function, reached)
        except ImageRejected as error:
            image.refusals[function.name] = error
    return translator.parts


class _ImageTranslator:
    """Distributes the kernels of one linked image over parts.

    Kernels that call functions share parts with those functions. Each of the other kernels has a separate part.
    """

    def __init__(self, image: Image, shuffle: int | None) -> None:
        # The table of addresses has the variables first, then the functions with addresses that are taken.
        addressed = image.addressed or ()
        names = [*(variable.name for variable in image.variables), *addressed]
        self._address_indices = {name: n for n, name in enumerate(names)}
        self._functions = {function.name: function for function in image.subroutines}
        self._sizes = {name: _size(function) for name, function in self._functions.items()}
        self._addressed, self._first_function_index = addressed, len(image.variables)
        self._watching = watching_functions(image)
        self._shuffle = shuffle
        self._budget = IrBudget(MAX_IMAGE_IR_LINES)
        # Kernels that call functions are compiled together, so their sizes add up.
        self._accesses_left = MAX_OPTIMISED_CALLING_ACCESSES
        self._separate_parts: list[ModulePart] = []
        self._shared_parts = {effort: self._part(effort, calls=True) for effort in (Effort.FULL, Effort.LEAST)}

    @property
    def parts(self) -> list[ModulePart]:
        return [part for part in (*self._separate_parts, *self._shared_parts.values()) if part.runners]

    def add(self, function: Function, reached: set[str]) -> None:
        """Translate a kernel and its functions. If this raises ImageRejected, the parts are unchanged."""
        sizes = [_size(function), *(self._sizes[name] for name in reached)]
        accesses = sum(accesses for accesses, _ in sizes)
        has_room = not reached or accesses <= self._accesses_left
        is_small = _fits(sizes, MAX_OPTIMISED_ACCESSES) and has_room
        # Choice 1: run threads together, if this is possible. This is the fastest code.
        lanes_part = self._part(Effort.FEW)
        is_short = max(count for count, _ in sizes) <= MAX_LANE_ACCESSES
        if is_short and has_room and lanes_part.add_lanes(function, self._address_indices):
            self._separate_parts.append(lanes_part)
            return
        # Choice 2: if the kernel calls functions, add it to the shared part for its effort.
        if reached:
            self._accesses_left -= accesses if is_small else 0
            self._shared_parts[Effort.FULL if is_small else Effort.LEAST].add(function, self._address_indices)
            return
        # Choice 3: make a separate part, with as much effort as its size permits.
        simplified = Effort.SOME if _fits(sizes, MAX_SIMPLIFIED_ACCESSES) else Effort.LEAST
        part = self._part(Effort.FULL if is_small else simplified)
        part.add(function, self._address_indices)
        # An instruction may become hundreds of lines of IR, so the size is known only now.
        if part.lines > MAX_OPTIMISED_LINES:
            part.effort = Effort.LEAST
        self._separate_parts.append(part)

    def _part(self, effort: Effort, *, calls: bool = False) -> ModulePart:
        called = self._addressed if calls else ()
        callees = Callees(self._functions, called, self._first_function_index, self._watching)
        return ModulePart(effort, self._budget, callees, shuffle=self._shuffle, is_once=calls)


def _fits(sizes: list[tuple[int, int]], most_accesses: int) -> bool:
    """Return whether a kernel and the functions that it reaches can be optimised in a short time."""
    return (
        len(sizes) <= MAX_OPTIMISED_FUNCTIONS
        and max(accesses for accesses, _ in sizes) <= most_accesses
        and max(instructions for _, instructions in sizes) <= MAX_OPTIMISED_INSTRUCTIONS
    )


def _size(function: Function) -> tuple[int, int]:
    """Return the number of accesses and waits of a function, and the number of its instructions."""
    return sum(map(_accesses_of, function.instructions)), len(function.instructions)


def _accesses_of(i: Instruction) -> int:
    """Return the number of accesses as which an instruction counts. Atomic operations on vectors count per element."""
    if i.opcode == "stmatrix":
        return _STMATRIX_ACCESSES
    if i.opcode in ("atom", "red"):
        return max([1, *(len(operand.elements) for operand in i.operands if isinstance(operand, Vector))])
    return int(i.opcode in _COSTLY)
