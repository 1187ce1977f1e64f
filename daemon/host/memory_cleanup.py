"""Determines when Python's cycle collector runs in the broker, and when malloc returns freed memory to the host.

A full collection visits every object that the broker holds, which takes 0.1 s with ten thousand leases. The broker
meets no deadline and answers no request in that time, so full collections are rare. Cycles that a request leaves
(`construct` creates them as it parses) die young, and the short collections find them.

After many connections have closed, malloc keeps more memory than the rest of the broker uses.
"""

import asyncio
import contextlib
import ctypes
import gc
from typing import Final

YOUNG: Final = 1000
"""Number of net new objects between two short collections. A collection takes well under a millisecond."""

MIDDLE: Final = 10
"""Number of short collections before a collection of middle length."""

FULL: Final = 100
"""Number of collections of middle length before a full one, so one per million objects that stay. Python's default is
10."""

CROWD: Final = 64
"""Number of closed connections after which the heap is trimmed. Fewer connections hold little memory."""

TRIM_AFTER_S: Final = 1.0
"""Delay of a trim. Connections often close together, so one trim serves many."""


class Trimmer:
    """Returns memory of closed connections to the host (malloc_trim(3))."""

    def __init__(self) -> None:
        self._closed = 0
        self._timer: asyncio.TimerHandle | None = None

    def count_closed(self) -> None:
        self._closed += 1
        if self._closed >= CROWD and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._closed, self._timer = 0, None
        # Do this in a thread: ctypes releases the interpreter's lock, and going through a large heap takes
        # milliseconds.
        with contextlib.suppress(RuntimeError, MemoryError):
            asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> None:
    """Return freed memory from malloc to the host. Does nothing with a C library that lacks the call."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_rarely() -> None:
    """Make full collections rare, and exempt the objects that exist now, at the end of the start."""
    # Collect the garbage of the start, then freeze the rest: modules and tables live until the end of the process.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)
