"""How lines get out: nobody who logs ever waits for whoever reads.

The broker has a thread that writes what waits in a bounded line. Processes that fork have no threads, and write at once
if there is room. What finds none is dropped and counted, and the count is told once there is room again.
"""

import contextlib
import logging
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from typing import Final

from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.shapes import Shape
from gpulease.daemon.logs.telling import ATTRIBUTE
from gpulease.daemon.threads import start_thread

MAX_WAITING_BYTES: Final = 4 << 20
"""Of lines that wait for a reader: ten thousand. Stops a reader that stopped from filling the broker's memory."""

WRITE_BYTES: Final = 4096
"""At most in one write: PIPE_BUF (pipe(7)), so that lines of several processes never mix in a pipe."""

FLUSH_S: Final = 1.0
"""How long the daemon's end waits for what it said last to be taken."""


class QueueingHandler(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor. Raises NoThread."""

    def __init__(self, shape: Shape, fd: int = 2) -> None:
        self._shape = shape
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._told_dropped = 0
        self._is_torn = False
        self._is_writing = False
        self._is_closed = False
        self._is_given_up = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gpul-log", daemon=True)
        start_thread(self._thread)
        # Last: what it registers is closed when the interpreter ends, whole or not.
        super().__init__()

    def take_shape(self, shape: Shape) -> None:
        """Write like this from now on."""
        self._shape = shape

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler` has it; does not wait, and raises nothing."""
        try:
            line = self._shape.line(record)
            with self._changed:
                if self._is_closed or self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                    self._dropped += 1
                    return
                self._lines.append(line)
                self._waiting_bytes += len(line)
                if len(self._lines) == 1:
                    self._changed.notify_all()
        except Exception:
            # Out of memory, or a record that can't be shown: what is lost is one line.
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all is written, once, and not for ever."""
        until = time.monotonic() + FLUSH_S
        with self._changed:
            while (self._lines or self._is_writing) and not self._is_given_up:
                self._is_given_up = not self._changed.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Write what waits, and no more."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self._is_given_up:
            self._thread.join(FLUSH_S)
        super().close()

    def _run(self) -> None:
        while (lines := self._take()) is not None:
            # Behind a piece of a line the next one begins a line of its own.
            end_of_torn = b"\n" if self._is_torn else b""
            data = end_of_torn + lines
            written = self._write(data)
            if written:
                self._is_torn = data[written - 1 : written] != b"\n"
            if written < len(data):
                self._lose(lines, max(0, written - len(end_of_torn)))

    def _write(self, data: bytes) -> int:
        """How much was written: not all, if nobody reads any more or the disk is full. There is nobody to tell then."""
        written = 0
        with contextlib.suppress(OSError):
            while written < len(data):
                written += os.write(self._fd, data[written:])
        return written

    def _lose(self, lines: bytes, written: int) -> None:
        with self._changed:
            self._dropped += lines.count(b"\n", written)
            if self._told_dropped and lines.find(b"\n") >= written:
                # The line that is lost first is the one that would have told of others.
                self._dropped += self._told_dropped - 1

    def _take(self) -> bytes | None:
        """The lines for the next write; waits for there to be any. None: it is closed."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            while not self._lines and not self._is_closed:
                self._changed.wait()
            if not self._lines:
                return None
            self._is_writing = True
            chunk = bytearray()
            self._told_dropped, self._dropped = self._dropped, 0
            if self._told_dropped:
                chunk += self._shape.line(_dropped_record(self._told_dropped))
            while self._lines and (not chunk or len(chunk) + len(self._lines[0]) <= WRITE_BYTES):
                line = self._lines.popleft()
                self._waiting_bytes -= len(line)
                chunk += line
            return bytes(chunk)


class HeedlessHandler(logging.Handler):
    """Writes at once, or drops."""

    def __init__(self, shape: Shape, fd: int = 2, *, opens_own: bool = True) -> None:
        super().__init__()
        self._shape = shape
        self._end = HeedlessEnd(fd, opens_own=opens_own)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler` has it; does not wait, and raises nothing."""
        try:
            line = self._shape.line(record)
            told = self._shape.line(_dropped_record(self._dropped)) if self._dropped else b""
            if len(told) + len(line) > WRITE_BYTES and self._end.write(told):
                told, self._dropped = b"", 0
            # In one write: a pipe may have room for one, however short.
            if self._end.write(told + line):
                self._dropped = 0
            else:
                self._dropped += 1
        except Exception:
            self._dropped += 1

    def close(self) -> None:
        """Let go of what it holds."""
        self._end.close()
        super().close()


class HeedlessEnd:
    """The end of a file, pipe, socket or terminal that is written to without waiting.

    To make the descriptor itself non-blocking would make it so for all who share it, a shell among them: a pipe or a
    terminal is opened once more instead (proc(5), /proc/PID/fd), where that is allowed and `opens_own`. Else it is
    asked whether there is room, which another writer may take.
    """

    def __init__(self, fd: int, *, opens_own: bool = True) -> None:
        self._fd = fd
        self._own = -1
        self._sock: socket.socket | None = None
        self._rest = b""
        if not opens_own:
            return
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISSOCK(mode):
                self._sock = socket.socket(fileno=os.dup(fd))
            elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                self._own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def write(self, line: bytes) -> bool:
        """Whether there was room. What a terminal or socket takes a part of goes on with the next line."""
        data = self._rest + line
        try:
            written = self._write(data)
        except OSError:
            return False
        if written < len(self._rest):
            self._rest = self._rest[written:]
            return False
        self._rest = data[written:]
        return True

    def close(self) -> None:
        """Let go of what was opened here."""
        if self._sock is not None:
            self._sock.close()
        if self._own >= 0:
            os.close(self._own)
        self._sock, self._own = None, -1

    def _write(self, data: bytes) -> int:
        if self._sock is not None:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._own >= 0:
            return os.write(self._own, data)
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self._fd, data)


def _dropped_record(count: int) -> logging.LogRecord:
    kind = LogEvent.LOG_DROPPED.value
    record = logging.LogRecord("gpulease", kind.level, "", 0, kind.message, (), None)
    setattr(record, ATTRIBUTE, (kind.name, {"count": count}))
    return record
