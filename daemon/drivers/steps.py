"""What a launch graph is made of, for a driver: its steps, and what a driver makes of them.

Whatever can be checked without the driver was checked when a step was made (`worker.graphs`).
"""

from dataclasses import dataclass
from typing import Final, Protocol

from gpulease.daemon.drivers.interface import Dim3, Kernel, Poll

SEGMENT_STEPS: Final = 32
"""Steps queued between two looks at the lease: so many kernels and copies may begin after its end. On a card a segment
takes some 2 us to queue, whatever it holds, so longer ones gain little."""


@dataclass(frozen=True, slots=True)
class KernelStep:
    """A launch; see `Context.launch`."""

    kernel: Kernel
    grid: Dim3
    block: Dim3
    shared_bytes: int
    params: bytes


@dataclass(frozen=True, slots=True)
class DataStep:
    """A copy to the device of bytes that never change."""

    address: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A copy between the device and memory that was given to `Context.pin`: `to_device`, or from it."""

    address: int
    memory: memoryview
    to_device: bool


Step = KernelStep | DataStep | CopyStep


class AdmitGraph(Protocol):
    """What a driver asks before it makes a graph; it raises if there is no room."""

    def __call__(self, device_bytes: int) -> None:
        """See `Graph.device_bytes`."""


def admit_any(device_bytes: int) -> None:
    """The `AdmitGraph` that leaves it to the card."""


class Graph(Protocol):
    """A sequence that can be queued as a whole, again and again."""

    @property
    def device_bytes(self) -> int:
        """What it takes of the card, which keeps it for later graphs when this one goes."""

    def bind(self, step: int, params: bytes) -> None:
        """Give a KernelStep another parameter buffer; replays that were queued before keep theirs."""

    def replay(self, tag: int, poll: Poll) -> None:
        """Queue all steps in order, calling `poll` before each segment but the first; it may raise to end the replay.

        `tag` is what a fault of one of its kernels tells. A driver may have to wait before a copy, and calls `poll`
        then. Raises LaunchRejected, or KernelFault for an earlier launch; some steps may have been queued then.
        """

    def close(self) -> None:
        """Give back what it takes; replays that were queued run to their end. Never waits."""
