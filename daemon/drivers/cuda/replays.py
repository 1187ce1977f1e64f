"""What a context knows of its launch graphs, and of memory that is locked for the card."""

from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as api

from gpulease.daemon.drivers.cuda.faults import Faults
from gpulease.daemon.drivers.cuda.graphs import PinnedBytes
from gpulease.daemon.drivers.cuda.markers import Markers
from gpulease.daemon.drivers.interface import DriverError


class Replays(Faults):
    """The part of a context that graphs need."""

    _markers: Markers | None

    def __init__(self) -> None:
        super().__init__()
        self._retired: list[PinnedBytes] = []
        self._pinned: list[int] = []

    @property
    def is_watched(self) -> bool:
        """Whether each kernel's end must be seen."""
        return self._markers is not None

    @property
    def stream(self) -> Any:
        """Where launches go, as the driver's API takes it."""
        return api.CUstream(self._stream.handle)

    def replayed(self, tag: int, kernels: Sequence[str]) -> None:
        """A graph of these was queued."""
        self._launcher.state.launches += 1
        self._launcher.state.tag = tag
        self._last_kernel = kernels[0] if len(kernels) == 1 else ""

    def retire(self, memory: PinnedBytes) -> None:
        """Keep what copies that are queued may still read until the next graph is made."""
        self._retired.append(memory)

    def unlock(self) -> None:
        """Let go of all memory that was locked for the card; nothing that is queued uses it. Raises DriverError."""
        while self._retired:
            self._retired.pop().release()
        while self._pinned:
            (error,) = api.cuMemHostUnregister(self._pinned.pop())
            if error:
                raise self.failure(error)

    def failure(self, error: Any) -> DriverError:
        """What a call of the driver's API failed with."""
        _, text = api.cuGetErrorString(error)
        return self._error(DriverError(f"the driver's call failed: {text.decode()}"))
