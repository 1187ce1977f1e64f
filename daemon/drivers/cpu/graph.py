"""Launch graphs: launches checked and packed once, queued one behind the other.

The queue takes a launch in a microsecond, so a replay saves what comes before: frames, plans, checks of the shape.
Copies are done by the caller's thread, which waits for the kernels before them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpulease.daemon.drivers.cpu.native.layout import Launch
from gpulease.daemon.drivers.interface import Poll
from gpulease.daemon.drivers.steps import SEGMENT_STEPS, DataStep, KernelStep, Step

if TYPE_CHECKING:
    from gpulease.daemon.drivers.cpu.context import CpuContext

_TAG_AT: Final = Launch.tag.offset
_TAG_END: Final = _TAG_AT + Launch.tag.size

_Replay = Callable[[bytes, Poll], None]
"""Does one step, given the tag as the queue has it."""


class CpuGraph:
    """See `gpulease.daemon.drivers.steps.Graph`."""

    device_bytes = 0

    def __init__(self, context: "CpuContext", steps: Sequence[Step]) -> None:
        """Raises LaunchRejected for a launch that no replay could queue."""
        self._context = context
        self._steps = list(steps)
        self._replays = [self._replay_of(step) for step in steps]

    def bind(self, step: int, params: bytes) -> None:
        """See Graph."""
        kernel_step = self._steps[step]
        if not isinstance(kernel_step, KernelStep):
            raise TypeError("only launches have parameters")
        self._replays[step] = self._replay_of(replace(kernel_step, params=params))

    def replay(self, tag: int, poll: Poll) -> None:
        """See Graph."""
        packed = tag.to_bytes(_TAG_END - _TAG_AT, "little")
        for number, step in enumerate(self._replays):
            if number and number % SEGMENT_STEPS == 0:
                poll()
            step(packed, poll)

    def close(self) -> None:
        """See Graph: what is in the queue is a copy."""
        self._steps.clear()
        self._replays.clear()

    def _replay_of(self, step: Step) -> _Replay:
        context = self._context
        if isinstance(step, KernelStep):
            record, is_shared = context.record(
                step.kernel, step.grid, step.block, step.shared_bytes, step.params, tag=0
            )
            before, behind = record[:_TAG_AT], record[_TAG_END:]
            return lambda tag, _: context.submit(b"".join((before, tag, behind)), is_shared)
        address, memory = step.address, memoryview(step.data) if isinstance(step, DataStep) else step.memory
        if isinstance(step, DataStep) or step.to_device:
            return lambda _, poll: context.mem_write(address, memory, poll)
        return lambda _, poll: context.mem_read(address, memory, poll)
