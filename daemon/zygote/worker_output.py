"""What workers say to their standard output and error: passed on to the daemon's log, by the line and within bounds.

A worker has a pipe there, not the log itself. Kernels print through it, as many lines as their tenant likes; and one
that was taken over could empty a log that is a file, or write others' lines into it.
"""

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_SAID_BYTES: Final = 64 << 10
"""Of one worker, in its life: room for many tracebacks. Then its pipe is closed, and what it says costs nobody
anything. Stops a kernel that prints in a loop from filling the log's disk."""

SAID_BYTES_PER_S: Final = 16 << 10
"""Of all workers, on the average. Stops a tenant that has one lease after the other print."""

BURST_BYTES: Final = 1 << 20
"""Of all workers at once, after they were silent for a minute."""

MAX_LINE_BYTES: Final = 900
"""Of one line; what is longer is several. Less than what a record shows of a text."""

RECORD_BYTES: Final = 250
"""What a record has besides what was said. Stops a kernel from filling the log with lines of one character."""

_READ_BYTES: Final = 4096


@dataclass(slots=True)
class _Pipe:
    """One worker's."""

    pid: int
    said_bytes: int = 0
    begun: bytes = b""
    lost_lines: int = 0


class WorkerOutput:
    """The pipes of all workers of a zygote.

    Args:
        poll: Tells of the descriptors that `hear` is to be called with.
        log: Called with a worker's process id, a line of its, and how many before it were lost.
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
        self._left_bytes = float(BURST_BYTES)
        self._counted_s = clock()

    def __contains__(self, fd: int) -> bool:
        return fd in self._pipes

    def listen(self, fd: int, pid: int) -> None:
        """Listen to a worker's pipe, which is closed here in the end."""
        self._pipes[fd] = _Pipe(pid)
        self._poll.register(fd, select.POLLIN)

    def hear(self, fd: int) -> None:
        """Something was said, or the worker is gone."""
        pipe = self._pipes[fd]
        data = os.read(fd, _READ_BYTES)
        pipe.said_bytes += len(data)
        *lines, pipe.begun = (pipe.begun + data).split(b"\n")
        if len(pipe.begun) > MAX_LINE_BYTES or (pipe.begun and not data):
            lines.append(pipe.begun)
            pipe.begun = b""
        for line in lines:
            for at in range(0, len(line), MAX_LINE_BYTES):
                self._pass_on(pipe, line[at : at + MAX_LINE_BYTES])
        if pipe.said_bytes > MAX_SAID_BYTES:
            self._pass_on(pipe, f"(it has said {MAX_SAID_BYTES} bytes; the rest is lost)".encode())
        if pipe.said_bytes > MAX_SAID_BYTES or not data:
            self._poll.unregister(fd)
            del self._pipes[fd]
            os.close(fd)

    def close(self) -> None:
        """In a worker just forked: let go of what is others'."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _pass_on(self, pipe: _Pipe, line: bytes) -> None:
        now_s = self._clock()
        self._left_bytes = min(BURST_BYTES, self._left_bytes + (now_s - self._counted_s) * SAID_BYTES_PER_S)
        self._counted_s = now_s
        pipe.said_bytes += RECORD_BYTES
        if len(line) + RECORD_BYTES > self._left_bytes:
            pipe.lost_lines += 1
            return
        self._left_bytes -= len(line) + RECORD_BYTES
        self._log(pipe.pid, line.decode(errors="backslashreplace"), pipe.lost_lines)
        pipe.lost_lines = 0


def say_to(fd: int) -> None:
    """In a worker just forked: have standard output and error be that end of a pipe, and wait for no room in it."""
    os.set_blocking(fd, False)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
