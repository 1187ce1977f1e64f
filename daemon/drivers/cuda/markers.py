"""Events behind what is put in streams: how much has ended, told without a wait (CUDA driver API, cuEventQuery).

There are fewer of them than the driver lets launches wait, so a launch never blocks inside the driver, where nobody
could see how long the kernel before it has been running. Copies and waits for other streams are marked too: the time
that a stream takes for them is no kernel's.
"""

import time
from collections import deque
from typing import Any, Final

import pycuda.driver as cuda

from gpulease.daemon.drivers.interface import Poll

MAX_WAITING: Final = 512
"""Launches, copies and waits in flight, in all streams together. The driver blocks at about 1024."""

_SLEEP_S: Final = 2e-4


class _Marked:
    """What one stream holds: an event behind each thing that is not known to have ended, and whether it is a kernel."""

    __slots__ = ("ended", "waiting")

    def __init__(self) -> None:
        self.ended = 0
        self.waiting: deque[tuple[Any, bool]] = deque()


class Markers:
    """One event behind everything in any stream that is not known to have ended."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._marked: dict[int, _Marked] = {}
        self._spare: list[Any] = []
        self._count = 0

    def make_room(self) -> None:
        """Wait until one more may be put in a stream."""
        self._poll()
        while self._count >= MAX_WAITING and self._collect() >= MAX_WAITING:
            time.sleep(_SLEEP_S)
            self._poll()

    def add_kernel(self, number: int, stream: Any) -> None:
        """A launch was put in a stream. Raises cuda.Error."""
        self._add(number, stream, is_kernel=True)

    def add_other(self, number: int, stream: Any) -> None:
        """A copy or a wait was. Raises cuda.Error."""
        self._add(number, stream, is_kernel=False)

    def _add(self, number: int, stream: Any, *, is_kernel: bool) -> None:
        event = self._spare.pop() if self._spare else cuda.Event(cuda.event_flags.DISABLE_TIMING)
        event.record(stream)
        self._count += 1
        marked = self._marked.get(number)
        if marked is None:
            marked = self._marked[number] = _Marked()
        marked.waiting.append((event, is_kernel))

    def running(self) -> dict[int, int]:
        """See `Context.running`."""
        self._collect()
        return {
            number: marked.ended for number, marked in self._marked.items() if marked.waiting and marked.waiting[0][1]
        }

    def _collect(self) -> int:
        """Take back the events that were reached; how many were not."""
        try:
            for marked in self._marked.values():
                waiting = marked.waiting
                while waiting and waiting[0][0].query():
                    self._spare.append(waiting.popleft()[0])
                    marked.ended += 1
                    self._count -= 1
        except cuda.Error:
            # The context is lost, and its kernels with it; the next real call says so.
            self._marked.clear()
            self._count = 0
        return self._count
