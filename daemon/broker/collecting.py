"""How often Python's collector of cycles goes through all that the broker holds: it holds up the loop for as long.

With ten thousand leases a full round takes 0.1 s, in which no deadline is kept and nobody is answered. What a request
leaves in cycles (what is parsed, by `construct`) dies young, and is found by the short rounds.

And what malloc keeps of that for later: after a crowd of connections, more than all the rest of the broker.
"""

import asyncio
import contextlib
import ctypes
import gc
from typing import Final

YOUNG: Final = 1000
"""New objects, those that are gone again not counted, between two short rounds: each takes well under a millisecond."""

MIDDLE: Final = 10
"""Short rounds for one of middle length."""

FULL: Final = 100
"""Rounds of middle length for a full one, where 10 is Python's default: one for a million objects that stay."""

CROWD: Final = 64
"""Connections that have left, until their memory is given back. Fewer hold little."""

TRIM_AFTER_S: Final = 1.0
"""From then on: a crowd leaves together. Bounds how often the heap is gone through."""


class Trimmer:
    """Has malloc give back to the host what connections held that have left (malloc_trim(3))."""

    def __init__(self) -> None:
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def left(self) -> None:
        """One more has left."""
        self._left += 1
        if self._left >= CROWD and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._left, self._timer = 0, None
        # In a thread: the call leaves the interpreter, and going through a large heap takes milliseconds.
        with contextlib.suppress(RuntimeError, MemoryError):
            asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> None:
    """Give back what malloc keeps of memory that was freed. A C library that has no such call keeps it."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_rarely() -> None:
    """Once the daemon has started: what there is by now stays, and need not be gone through at all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)
