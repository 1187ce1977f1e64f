"""Memory the broker keeps back, so that leases end, renew and are proved free when there is none for anything new.

A process meets the end of memory as a failed mmap(2) only under a limit of its own (RLIMIT_AS, RLIMIT_DATA, a host
that does not overcommit). It may come in the middle of anything, so it is looked for before: what is new begins only
where there is room for it, and what goes on gets what was kept back.

How often Python's collector of cycles goes through all that the broker holds: it holds up the loop for as long.

With ten thousand leases a full round takes 0.1 s, in which no deadline is kept and nobody is answered. What a request
leaves in cycles (what is parsed, by `construct`) dies young, and is found by the short rounds.

And what malloc keeps of that for later: after a crowd of connections, more than all the rest of the broker.
"""

import asyncio
import contextlib
import ctypes
import gc
import mmap
import resource
import time
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event

RESERVE_BYTES: Final = 32 << 20
"""Kept back: addresses, of which no page is touched. For the messages and timers of all leases there are."""

ROOM_BYTES: Final = 2 << 20
"""What a single event may take at most: a message of 128 KiB, a worker's page, and an arena of Python's objects, 1 MiB.
"""

LOOK_NS: Final = 1_000_000
"""Between two looks for room at the least, where nothing new is to begin: the events of a millisecond are served from
the same arena."""

UNLIMITED_LOOK_NS: Final = 20 * LOOK_NS
"""The same where this process has no limit: only too many mappings can make the next one fail then (mmap(2), ENOMEM),
and those come with what is new. A look waits for whatever thread has a page mapped meanwhile: 0.1 ms on a busy host,
and longer if that thread waits for its turn."""

_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")


class MemoryReserve:
    """The reserve.

    Attributes:
        is_short: Whether it is given up, because there was no room besides it: nothing new may begin.
    """

    def __init__(self) -> None:
        self.is_short = False
        self._asked_ns = 0
        self._looked_ns = 0
        self._is_strict = _is_host_strict()
        self._reserve: mmap.mmap | None = None
        self._keep_back()

    def secure(self) -> None:
        """See that there is room for one more event, if need be by giving up the reserve."""
        now_ns = time.monotonic_ns()
        if now_ns - self._asked_ns < LOOK_NS:
            return
        self._asked_ns = now_ns
        if self._is_strict or _is_limited() or now_ns - self._looked_ns >= UNLIMITED_LOOK_NS:
            self._looked_ns = now_ns
            self._look()

    def _look(self) -> None:
        if not _has_room(ROOM_BYTES) and self._reserve is not None:
            self.give_up()

    def is_enough(self) -> bool:
        """Whether something new may begin: there is room besides the reserve, which is kept back again if so."""
        self._look()
        if self.is_short and _has_room(RESERVE_BYTES + ROOM_BYTES):
            self._keep_back()
        return not self.is_short

    def give_up(self) -> None:
        """Something needs it."""
        if self._reserve is None:
            return
        self._reserve.close()
        self._reserve = None
        self.is_short = True
        log_event(LogEvent.MEMORY_SHORT)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give it up when anything that `loop` called met the end of memory: what the kernel has is read again then."""

        def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if isinstance(context.get("exception"), MemoryError) and self._reserve is not None:
                self.give_up()
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(on_exception)

    def close(self) -> None:
        """Nothing is kept back any more."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    def _keep_back(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve = _mapping(RESERVE_BYTES)
        if self._reserve is None:
            self.is_short = True
        elif self.is_short:
            self.is_short = False
            log_event(LogEvent.MEMORY_BACK)


def _is_limited() -> bool:
    """Whether somebody has set this process a limit, which may be now."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


def _is_host_strict() -> bool:
    """Whether the host promises no more memory than it has (proc_sys_vm(5), overcommit_memory), or does not say."""
    try:
        return _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return True


def _mapping(size_bytes: int) -> mmap.mmap:
    """Private, as a heap's memory is: a limit on data does not count what is shared (getrlimit(2), RLIMIT_DATA)."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _has_room(size_bytes: int) -> bool:
    try:
        _mapping(size_bytes).close()
    except OSError:
        return False
    return True


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
