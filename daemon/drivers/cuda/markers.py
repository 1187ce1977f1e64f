"""Events between launches, which tell how many have ended without waiting for any (CUDA driver API, cuEventQuery).

There are fewer of them than the driver lets launches wait, so a launch never blocks inside the driver, where nobody
could see how long the kernel before it has been running.
"""

import time
from collections import deque
from typing import Any, Final

import pycuda.driver as cuda

from gpulease.daemon.drivers.interface import Poll

MAX_WAITING: Final = 512
"""Launches in flight. The driver blocks at about 1024."""

_SLEEP_S: Final = 2e-4


class Markers:
    """One event behind each launch of a stream that is not known to have ended."""

    def __init__(self, stream: Any, poll: Poll) -> None:
        self._stream = stream
        self._poll = poll
        self._queued = 0
        self._waiting: deque[Any] = deque()
        self._spare: list[Any] = []

    def make_room(self) -> None:
        """Wait until one more launch may be queued."""
        self._poll()
        while len(self._waiting) >= MAX_WAITING and self._collect() >= MAX_WAITING:
            time.sleep(_SLEEP_S)
            self._poll()

    def add(self) -> None:
        """A launch was queued."""
        event = self._spare.pop() if self._spare else cuda.Event(cuda.event_flags.DISABLE_TIMING)
        event.record(self._stream)
        self._queued += 1
        self._waiting.append(event)

    def progress(self) -> tuple[int, int]:
        """How many launches were queued, and how many of them are known to have ended."""
        waiting = self._collect()
        return self._queued, self._queued - waiting

    def _collect(self) -> int:
        """Take back the events that were reached; how many were not."""
        waiting = self._waiting
        try:
            while waiting and waiting[0].query():
                self._spare.append(waiting.popleft())
        except cuda.Error:
            # The context is lost, and its kernels with it; the next real call says so.
            waiting.clear()
        return len(waiting)
