"""Standard output and error of workers, passed on to the daemon's log line by line and within bounds.

A worker writes to a pipe, never to the log itself. Kernels also print through the pipe, and a tenant can print any
number of lines. With access to the log, a compromised worker could empty its file, or write lines in other processes'
names.
"""

import os
import select
import time
from collections.abc import Callable
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.log_budget import LogBudget
from gpulease.protocol.time_units import NS_PER_S

MAX_OUTPUT_BYTES: Final = 64 << 10
"""Maximum number of bytes that one worker may print in its life, enough for many tracebacks, so that a kernel that
prints in a loop can't fill the log's disk. After that the worker's pipe is closed, and further output costs nothing."""

OUTPUT_BYTES_PER_S: Final = 16 << 10
"""Bytes that all workers together may print per second, on average. Also limits a tenant that prints in one lease after
another."""

BURST_BYTES: Final = 1 << 20
"""Bytes that all workers together may print at once, after about a minute without output."""

MAX_LINE_BYTES: Final = 900
"""Maximum number of bytes of one line; a longer line is split. A log record shows longer texts uncut."""

RECORD_BYTES: Final = 250
"""Bytes that are counted for each record in addition to the line, so that a kernel can't fill the log with
one-character lines."""

_READ_BYTES: Final = 4096


@dataclass(slots=True)
class _Pipe:
    """The pipe of one worker.

    Attributes:
        pid: The worker's process id.
        output_bytes: Bytes counted against MAX_OUTPUT_BYTES.
        partial: The beginning of a line whose end has not arrived yet.
        lost_lines: Lines dropped since a line was last logged.
    """

    pid: int
    output_bytes: int = 0
    partial: bytes = b""
    lost_lines: int = 0


class WorkerOutput:
    """The pipes of all workers of a zygote.

    Args:
        poll: The poll object at which pipes are registered; call `on_readable` for each that is ready.
        log: Called with a worker's process id, a line, and how many of its lines were dropped before this one.
        clock: Seconds on a monotonic clock.
    """

    def __init__(
        self,
        poll: "select.poll",
        log: Callable[[int, str, int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll = poll
        self._log = log
        self._clock = clock
        self._pipes: dict[int, _Pipe] = {}
        self._budget = LogBudget(BURST_BYTES, NS_PER_S // OUTPUT_BYTES_PER_S)

    def __contains__(self, fd: int) -> bool:
        return fd in self._pipes

    def add(self, fd: int, pid: int) -> None:
        """Read a worker's pipe from now on, and close it at its end."""
        self._pipes[fd] = _Pipe(pid)
        self._poll.register(fd, select.POLLIN)

    def on_readable(self, fd: int) -> None:
        """Read a pipe that has data or is at its end."""
        pipe = self._pipes[fd]
        # Step 1: read at most one buffer, so that a worker that prints much does not delay the zygote.
        data = os.read(fd, _READ_BYTES)
        pipe.output_bytes += len(data)
        # Step 2: log the complete lines, and a partial one if it is too long or the last.
        *lines, pipe.partial = (pipe.partial + data).split(b"\n")
        if len(pipe.partial) > MAX_LINE_BYTES or (pipe.partial and not data):
            lines.append(pipe.partial)
            pipe.partial = b""
        for line in lines:
            for at in range(0, len(line), MAX_LINE_BYTES):
                self._log_line(pipe, line[at : at + MAX_LINE_BYTES])
        # Step 3: close the pipe at its end, or when the worker has printed as much as it may in its life.
        if pipe.output_bytes > MAX_OUTPUT_BYTES:
            self._log_line(pipe, f"(it has printed {MAX_OUTPUT_BYTES} bytes; the rest is lost)".encode())
        if pipe.output_bytes > MAX_OUTPUT_BYTES or not data:
            self._poll.unregister(fd)
            del self._pipes[fd]
            os.close(fd)

    def close(self) -> None:
        """Close all pipes in a newly forked worker, because they belong to other workers."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _log_line(self, pipe: _Pipe, line: bytes) -> None:
        """Log a line, or drop it if all workers together have used up their rate."""
        # Dropped lines count as well, so a flood reaches the worker's bound even while nothing is logged.
        pipe.output_bytes += RECORD_BYTES
        if self._budget.spend(round(self._clock() * NS_PER_S), len(line) + RECORD_BYTES) is None:
            pipe.lost_lines += 1
            return
        self._log(pipe.pid, line.decode(errors="backslashreplace"), pipe.lost_lines)
        pipe.lost_lines = 0


def redirect_output(fd: int) -> None:
    """Make a pipe's end the standard output and error of a newly forked worker; output to a full pipe is lost."""
    # A full pipe must lose output, not block the worker.
    os.set_blocking(fd, False)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
