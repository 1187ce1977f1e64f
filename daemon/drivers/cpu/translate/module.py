"""A whole image to IR: for each kernel a thread function and the runner around it."""

from dataclasses import dataclass

from gpulease.daemon.drivers.cpu.ptx.declarations import round_up
from gpulease.daemon.drivers.cpu.ptx.syntax import Image
from gpulease.daemon.drivers.cpu.translate.access import RECORD_FAULT_IR
from gpulease.daemon.drivers.cpu.translate.ir import METADATA
from gpulease.daemon.drivers.cpu.translate.runner import RunnerWriter
from gpulease.daemon.drivers.cpu.translate.thread import ThreadTranslator

# Local windows of a block lie side by side; each begins as aligned as any variable may ask for.
_LOCAL_STEP = 256


@dataclass(frozen=True, slots=True)
class Translation:
    """The IR of an image, and under which name each kernel's runner is in it."""

    text: str
    runners: dict[str, str]


def translate(image: Image) -> Translation:
    """The IR of all kernels. Raises ImageRejected for the first thing that is not supported."""
    places = {variable.name: number for number, variable in enumerate(image.variables)}
    declarations: set[str] = set()
    parts = [RECORD_FAULT_IR]
    runners: dict[str, str] = {}
    for number, function in enumerate(image.functions):
        thread = ThreadTranslator(function, places, declarations)
        parts.append(thread.translate(f"thread{number}"))
        runner = RunnerWriter(
            f"thread{number}",
            frame_bytes=thread.frame_bytes,
            local_bytes=round_up(function.local_bytes, _LOCAL_STEP),
            suspends=thread.suspends,
        )
        runners[function.name] = f"kernel{number}"
        parts.append(runner.write(f"kernel{number}"))
    return Translation("\n".join([*sorted(declarations), *parts, METADATA]), runners)
