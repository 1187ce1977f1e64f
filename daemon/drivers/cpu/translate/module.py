"""A whole image to IR: for each kernel a thread function and the runner around it."""

from dataclasses import dataclass, field

from gpulease.daemon.drivers.cpu.limits import (
    MAX_OPTIMISED_ACCESSES,
    MAX_OPTIMISED_ACCESSES_PER_IMAGE,
    MAX_OPTIMISED_INSTRUCTIONS,
)
from gpulease.daemon.drivers.cpu.native.block import DECLARATIONS as BLOCK_DECLARATIONS
from gpulease.daemon.drivers.cpu.native.block import block_code
from gpulease.daemon.drivers.cpu.ptx.declarations import round_up
from gpulease.daemon.drivers.cpu.ptx.syntax import Function, Image
from gpulease.daemon.drivers.cpu.translate.access import RECORD_FAULT_IR
from gpulease.daemon.drivers.cpu.translate.ir import METADATA
from gpulease.daemon.drivers.cpu.translate.runner import RunnerWriter
from gpulease.daemon.drivers.cpu.translate.scheduler import SchedulerWriter
from gpulease.daemon.drivers.cpu.translate.thread import ThreadTranslator

# Local windows of a block lie side by side; each begins as aligned as any variable may ask for.
_LOCAL_STEP = 256

# What has checks of its own, or a place where the thread may stop: see MAX_OPTIMISED_ACCESSES.
_COSTLY = ("ld", "st", "atom", "red", "cp", "bar", "barrier", "shfl", "vote", "match", "redux", "elect", "activemask")


@dataclass(slots=True)
class Part:
    """Kernels that are compiled together, in the same way.

    Attributes:
        runners: Under which name each kernel's runner is in the IR.
    """

    is_optimised: bool
    runners: dict[str, str] = field(default_factory=dict)
    _definitions: list[str] = field(default_factory=list)
    _declarations: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The IR."""
        return "\n".join([*sorted(self._declarations), RECORD_FAULT_IR, *self._definitions, METADATA])

    def add(self, function: Function, places: dict[str, int]) -> None:
        """Translate one kernel. Raises ImageRejected."""
        number = len(self.runners)
        thread = ThreadTranslator(function, places, self._declarations)
        self._definitions.append(thread.translate(f"thread{number}"))
        writer = RunnerWriter if thread.waits.is_short else SchedulerWriter
        if not thread.waits.is_short:
            block_code()
            self._declarations.update(BLOCK_DECLARATIONS)
        runner = writer(
            f"thread{number}",
            frame_bytes=thread.frame_bytes,
            local_bytes=round_up(function.local_bytes, _LOCAL_STEP),
            waits=thread.waits,
        )
        self._definitions.append(runner.write(f"kernel{number}"))
        self.runners[function.name] = f"kernel{number}"


def translate(image: Image) -> list[Part]:
    """The IR of all kernels. Raises ImageRejected for the first thing that is not supported."""
    places = {variable.name: number for number, variable in enumerate(image.variables)}
    optimised, plain = Part(is_optimised=True), Part(is_optimised=False)
    left = MAX_OPTIMISED_ACCESSES_PER_IMAGE
    for function in image.functions:
        accesses = sum(instruction.opcode in _COSTLY for instruction in function.instructions)
        is_small = accesses <= min(left, MAX_OPTIMISED_ACCESSES)
        if is_small and len(function.instructions) <= MAX_OPTIMISED_INSTRUCTIONS:
            left -= accesses
            optimised.add(function, places)
        else:
            plain.add(function, places)
    return [part for part in (optimised, plain) if part.runners]
