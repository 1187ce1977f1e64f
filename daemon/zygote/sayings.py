"""What workers say to their standard output and error: passed on to the daemon's log, by the line and within bounds.

A worker has a pipe there, not the log itself. Kernels print through it, as many lines as their tenant likes; and one
that was taken over could empty a log that is a file, or write others' lines into it.
"""

import os
import select
import sys
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

MAX_LINE_BYTES: Final = 1000
"""Of one line; what is longer is several. Less than PIPE_BUF, so that a log with any room has room for it."""

_READ_BYTES: Final = 4096


@dataclass(slots=True)
class _Pipe:
    """One worker's."""

    pid: int
    said_bytes: int = 0
    begun: bytes = b""


class Sayings:
    """The pipes of all workers of a zygote.

    Args:
        poll: Tells of the descriptors that `hear` is to be called with.
        write: Takes a line for the log; None for standard error.
    """

    def __init__(
        self,
        poll: "select.poll",
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll = poll
        self._write = write or write_if_there_is_room
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
                self._pass_on(pipe.pid, line[at : at + MAX_LINE_BYTES])
        if pipe.said_bytes > MAX_SAID_BYTES:
            self._pass_on(pipe.pid, f"(it has said {MAX_SAID_BYTES} bytes; the rest is lost)".encode())
        if pipe.said_bytes > MAX_SAID_BYTES or not data:
            self._poll.unregister(fd)
            del self._pipes[fd]
            os.close(fd)

    def close(self) -> None:
        """In a worker just forked: let go of what is others'."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _pass_on(self, pid: int, line: bytes) -> None:
        now_s = self._clock()
        self._left_bytes = min(BURST_BYTES, self._left_bytes + (now_s - self._counted_s) * SAID_BYTES_PER_S)
        self._counted_s = now_s
        if len(line) <= self._left_bytes:
            self._left_bytes -= len(line)
            self._write(f"worker {pid}: {_shown(line)}\n")


def say_to(fd: int) -> None:
    """In a worker just forked: have standard output and error be that end of a pipe, and wait for no room in it."""
    os.set_blocking(fd, False)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)


def write_if_there_is_room(line: str) -> None:
    """To standard error, unless that would wait: whoever reads the log must not hold up the zygote."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):
        sys.stderr.write(line)


def _shown(line: bytes) -> str:
    """With nothing in it that a terminal would obey, or take for another line."""
    text = line.decode(errors="backslashreplace")
    return "".join(char if char.isprintable() or char == "\t" else f"\\x{ord(char):02x}" for char in text)
