"""Memory that the broker reserves, so that leases can still end, be renewed and be proved free when memory runs out.

For a process, a lack of memory is a failed mmap(2) only if it has a limit (RLIMIT_AS, RLIMIT_DATA), or if the host does
not overcommit. The failure can occur anywhere, so the broker checks for room beforehand. New work starts only where
there is room for it; work in progress may use the reserve.
"""

import asyncio
import contextlib
import mmap
import resource
import time
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event

RESERVE_BYTES: Final = 32 << 20
"""Size of the reserve, which has addresses but no touched pages. It is enough for the messages and timers of all live
leases."""

ROOM_BYTES: Final = 2 << 20
"""The most that one event may take: a message of 128 KiB, a worker's page, and an arena of Python's objects, 1 MiB."""

CHECK_NS: Final = 1_000_000
"""Shortest time between two checks while no new work starts. The events of one millisecond fit into one arena."""

UNLIMITED_CHECK_NS: Final = 20 * CHECK_NS
"""Shortest time between two checks in a process without a limit.

There, the next mapping can fail only if the process has too many of them (mmap(2), ENOMEM), and only new work makes
more. A check waits for any thread that is getting a page mapped at that moment: 0.1 ms on a busy host, longer if that
thread is not scheduled."""

_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")


class MemoryReserve:
    """A mapping that is released when the process has no other room.

    Attributes:
        is_short: Whether the reserve is released. No new work may start then.
    """

    def __init__(self) -> None:
        self.is_short = False
        self._asked_ns = 0
        self._checked_ns = 0
        self._is_strict = _is_host_strict()
        self._mapping: mmap.mmap | None = None
        self._keep_back()

    def secure(self) -> None:
        """Make sure that there is room for one more event, by releasing the reserve if necessary."""
        now_ns = time.monotonic_ns()
        # A check is a system call, and this method is called before every event, so check rarely.
        if now_ns - self._asked_ns < CHECK_NS:
            return
        self._asked_ns = now_ns
        if self._is_strict or _is_limited() or now_ns - self._checked_ns >= UNLIMITED_CHECK_NS:
            self._check()

    def is_enough(self) -> bool:
        """Return whether new work may start. Before that, restores the reserve if there is room for it again."""
        self._check()
        # Restore the reserve only if there is room to spare, so that it is not taken and released in turns.
        if self.is_short and _has_room(RESERVE_BYTES + ROOM_BYTES):
            self._keep_back()
        return not self.is_short

    def release(self) -> None:
        """Unmap the reserve, so that work in progress has room, and refuse new work. Logs the shortage once."""
        # Without a reserve from the start, the daemon begins with a shortage and grants nothing until it has the
        # reserve.
        if self._mapping is None:
            return
        # Unmap it before the shortage is reported, because the log line needs memory as well.
        self.close()
        self.is_short = True
        log_event(LogEvent.MEMORY_SHORT)

    def release_on_memory_error(self, loop: asyncio.AbstractEventLoop) -> None:
        """Release the reserve when a callback of `loop` raised MemoryError. The loop then reads its descriptors again.

        Other exceptions go to the loop's default handler, and so does a MemoryError after the release.
        """

        def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if isinstance(context.get("exception"), MemoryError) and self._mapping is not None:
                self.release()
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(on_exception)

    def close(self) -> None:
        """Unmap the reserve without reporting a shortage."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _check(self) -> None:
        # The event of a request that was checked just before needs no second check.
        self._asked_ns = self._checked_ns = time.monotonic_ns()
        if not _has_room(ROOM_BYTES) and self._mapping is not None:
            self.release()

    def _keep_back(self) -> None:
        with contextlib.suppress(OSError):
            # This takes only addresses: pages cost memory when they are touched, and these never are.
            self._mapping = _map(RESERVE_BYTES)
        if self._mapping is None:
            self.is_short = True
        elif self.is_short:
            self.is_short = False
            log_event(LogEvent.MEMORY_BACK)


def _is_limited() -> bool:
    """Return whether a limit applies now. It is read each time, because an operator may set it later (prlimit(2))."""
    limits = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_DATA)[0]
    return limits != (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def _is_host_strict() -> bool:
    """Return whether the host never overcommits (proc_sys_vm(5), overcommit_memory); True if that can't be read."""
    try:
        return _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return True


def _map(size_bytes: int) -> mmap.mmap:
    """Map private memory, like a heap's, because RLIMIT_DATA does not count shared memory (getrlimit(2))."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _has_room(size_bytes: int) -> bool:
    try:
        _map(size_bytes).close()
    except OSError:
        return False
    return True
