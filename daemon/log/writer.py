"""The log: events to records, records to lines, lines to standard error without waiting for their reader.

**Lines.** A record is a line of JSON for programs, or a line for people. Text from a tenant, a kernel or a driver is
always in a field. It is cut, and characters that control a terminal or begin another line are escaped. Other processes
write to the same pipe, so a line fits into one atomic write (pipe(7), PIPE_BUF).

**Writing.** No caller ever waits for the reader. In the broker, a thread writes lines from a bounded queue. Processes
that fork have no threads, and write at once if there is room. Lines without room are dropped and counted, and the count
is logged when there is room again.
"""

import contextlib
import json
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
import traceback
from collections import deque
from datetime import datetime
from functools import cache, lru_cache
from types import TracebackType
from typing import Final, Protocol

from gpulease.daemon.host.compact_json import compact_encoder
from gpulease.daemon.host.processes import start_thread
from gpulease.daemon.host.utc_time import utc_bytes, utc_text
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import printable, shortened
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.time_units import NS_PER_US, US_PER_S

Value = str | int | float | bool | list[str] | None

ATTRIBUTE: Final = "gpulease"
"""The attribute of a `logging.LogRecord` that holds its event and fields."""

_log: Final = logging.getLogger("gpulease")
_root: Final = logging.getLogger()


def log_event(event: LogEvent, /, *, is_fault: bool = False, **fields: Value) -> None:
    """Log one event.

    Args:
        event: The event. It must have each field that its message shows.
        is_fault: Whether to add the traceback of the exception that is being handled.
        fields: Fields of the event; those that are None are left out. A lease's id is given as a number.
    """
    if not _log.isEnabledFor(event.level):
        return
    record = _record(event, fields)
    if "{" in event.kind.message:
        record.msg = event.kind.message.format(**fields)
    if is_fault:
        record.exc_info = sys.exc_info()
    _log.handle(record)


def log_fields(event: LogEvent, fields: dict[str, Value], level: int | None = None) -> None:
    """Log one event for which `is_logged` was true. The caller must not use `fields` afterwards.

    Args:
        event: The event.
        fields: Its fields.
        level: The record's level; None for the event's own.
    """
    handlers = _root.handlers
    # A broker has one handler, without filters. It needs no LogRecord, and making one takes as long as writing the
    # line.
    if (
        len(handlers) == 1
        and isinstance(handler := handlers[0], QueueingHandler)
        and not (_log.handlers or _log.filters)
    ):
        handler.emit_event(event, fields, event.level if level is None else level)
    else:
        _log.handle(_record(event, fields, level))


def is_logged(event: LogEvent, level: int | None = None) -> bool:
    """Return whether events of this level are logged; None for the event's own level."""
    return _log.isEnabledFor(event.level if level is None else level)


def _record(event: LogEvent, fields: dict[str, Value], level: int | None = None) -> "_EventRecord":
    if isinstance(number := fields.get("lease_id"), int):
        fields["lease_id"] = lease_text(number) if number else None
    # Not `Logger.log`: it finds the caller's file and line, which no line shows, and takes twice as long.
    return _EventRecord(event, fields, event.level if level is None else level)


class _EventRecord(logging.LogRecord):
    """A record with copied constant members. `LogRecord` computes all members, which is as slow as writing the line."""

    def __init__(self, event: LogEvent, fields: dict[str, Value], level: int) -> None:
        created_s = time.time()
        self.__dict__ = members = _constant_members(event, level).copy()
        members["created"] = created_s
        members["msecs"] = float(int(created_s % 1 * 1000))
        members["process"] = os.getpid()
        members[ATTRIBUTE] = (event.kind.name, fields)


@cache
def _constant_members(event: LogEvent, level: int) -> dict[str, object]:
    members = vars(logging.LogRecord(_log.name, level, "", 0, event.kind.message, (), None))
    return members | {"thread": None, "threadName": None}


MAX_LINE_BYTES: Final = 4000
"""Maximum number of bytes of one line, with its newline and a syslog prefix: less than PIPE_BUF on Linux, 4,096."""

TEXT_LIMITS: Final = (1000, 200, 40)
"""Maximum numbers of characters of a text in a line, so that a tenant can't fill a record. The first number that makes
the line short enough is used."""

MAX_TRACEBACK_CHARS: Final = 2000
"""Maximum number of characters of a traceback, from its end, where the error is."""

MIN_REPEATED_CHARS: Final = 4
"""A shorter value is shown even if the message contains it: "1" is in any message."""

MAX_CONSTANT_PARTS: Final = 256
"""Maximum number of encoded parts of lines that are kept, one for each event and some for libraries' messages: half a
MiB at most."""

_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Priorities of syslog(3), as in sd-daemon(3)."""

_COLOUR: Final = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}
_encode: Final = json.JSONEncoder(separators=(",", ":"), default=str).encode
_encode_plain: Final = compact_encoder()


class Shape(Protocol):
    """The form of the log's lines: `JsonShape` for programs, `HumanShape` for people."""

    def line(self, record: logging.LogRecord) -> bytes:
        """Return a record's line, with its newline."""

    def plain_line(self, event: LogEvent, fields: dict[str, Value], level: int) -> bytes:
        """Return the line of an event's record if it can be made without the record; otherwise b"".

        Use this only in a process that does not fork, because its id may be remembered.
        """


class JsonShape:
    """Lines of one JSON object each (RFC 8259), in ASCII.

    Args:
        process: The name of this process, one of the daemon's.
        for_journal: Whether lines begin with their priority, such as `<6>`, for systemd's journal (sd-daemon(3)).
    """

    def __init__(self, process: str, *, for_journal: bool = False) -> None:
        self._process = process
        self._for_journal = for_journal
        self._constant: dict[tuple[LogEvent, int], tuple[bytes, bytes]] = {}

    def line(self, record: logging.LogRecord) -> bytes:
        # Most records need no cutting or escaping, so make their lines the fast way.
        event, fields = _event_and_fields(record)
        return self._plain_line(record, event, fields) or self._cut_line(record, event, fields)

    def plain_line(self, event: LogEvent, fields: dict[str, Value], level: int) -> bytes:
        if isinstance(number := fields.get("lease_id"), int):
            fields["lease_id"] = lease_text(number) if number else None
        # Encode only once the members that all lines of an event and a level share.
        constant = self._constant.get((event, level))
        if constant is None:
            kind, name = event.kind, logging.getLevelName(level)
            prefix = _prefix(level).encode() if self._for_journal else b""
            constant = prefix, _constant_part(name, kind.name, kind.message, self._process, os.getpid())
            self._constant[event, level] = constant
        return _joined(*constant, time.time_ns() // NS_PER_US, fields)

    def _plain_line(self, record: logging.LogRecord, event: str, fields: dict[str, Value]) -> bytes:
        """Return the line if none of its texts has to be cut or escaped, as in most records; otherwise b""."""
        message = record.getMessage()
        if len(message) > TEXT_LIMITS[0]:
            return b""
        prefix = _prefix(record.levelno).encode() if self._for_journal else b""
        constant = _constant_part(record.levelname, event, message, self._process, record.process)
        return _joined(prefix, constant, round(record.created * US_PER_S), fields)

    def _cut_line(self, record: logging.LogRecord, event: str, fields: dict[str, Value]) -> bytes:
        members: dict[str, object] = {
            "time": utc_text(round(record.created * US_PER_S)),
            "monotonic_ns": time.monotonic_ns(),
            "level": record.levelname.lower(),
            "event": event,
            "message": "",
            "process": self._process,
            "pid": record.process,
        }
        prefix = _prefix(record.levelno) if self._for_journal else ""
        message = record.getMessage()
        text = ""
        # Cut all texts to ever shorter lengths until the line fits. A line with only the message always fits.
        for limit in TEXT_LIMITS:
            members["message"] = shown(message, limit)
            shown_fields = {name: _shown_value(value, limit) for name, value in fields.items() if value is not None}
            text = f"{prefix}{_encode(members | shown_fields)}\n"
            if len(text) <= MAX_LINE_BYTES:
                break
        else:
            text = f"{prefix}{_encode(members)}\n"
        return text.encode()


def _joined(prefix: bytes, constant: bytes, created_us: int, fields: dict[str, Value]) -> bytes:
    """Return a line with these members and fields if none of its texts has to be cut or escaped; otherwise b""."""
    try:
        members = _encode_plain(fields)
        # Fields without a value are left out. Searching the result for one is faster than checking each field.
        if b":null" in members:
            fields = {name: value for name, value in fields.items() if value is not None}
            members = _encode_plain(fields)
    except ValueError:  # Half of a surrogate pair.
        return b""
    # `shown` would not change any of these texts, and JSON escapes none of them.
    if len(members) > TEXT_LIMITS[0] or not members.isascii():
        return b""
    if b"\\" in members or b"[" in members or b"\x7f" in members:
        return b""
    line = b'%b{"time":"%b","monotonic_ns":%d,%b%b%b\n' % (
        prefix,
        utc_bytes(created_us),
        time.monotonic_ns(),
        constant,
        b"," if fields else b"",
        members[1:],
    )
    return line if len(line) <= MAX_LINE_BYTES else b""


@lru_cache(maxsize=MAX_CONSTANT_PARTS)
def _constant_part(level: str, event: str, message: str, process: str, pid: int | None) -> bytes:
    """Encode members that the records of an event share."""
    # Leave out the braces, because the part goes into the middle of the object.
    members = {"level": level.lower(), "event": event, "message": shown(message, TEXT_LIMITS[0])}
    return _encode(members | {"process": process, "pid": pid})[1:-1].encode()


class HumanShape:
    """Time, level, message and fields: `2026-03-01 12:00:00.000 INFO    lease granted  lease_id=… tenant=ann`.

    A field is left out if the message contains its value. A traceback follows in separate lines, each marked as such.
    """

    def __init__(self, *, in_colour: bool = False, for_journal: bool = False) -> None:
        self._in_colour = in_colour
        self._for_journal = for_journal

    def plain_line(self, event: LogEvent, fields: dict[str, Value], level: int) -> bytes:
        return b""

    def line(self, record: logging.LogRecord) -> bytes:
        _, fields = _event_and_fields(record)
        prefix = _prefix(record.levelno) if self._for_journal else ""
        at = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        head = f"{prefix}{at} {self._level(record)} "
        message = record.getMessage()
        text = ""
        for limit in TEXT_LIMITS:
            text = head + _message_and_fields(shown(message, limit), fields, limit)
            if len(text.encode()) < MAX_LINE_BYTES:
                break
        # Every line of a traceback also has the priority, because each line becomes an entry of the journal.
        traceback = fields.get("traceback")
        lines = [
            text,
            *(f"{prefix}    | {shown(line, 500)}" for line in (traceback if isinstance(traceback, list) else ())),
        ]
        return ("\n".join(lines) + "\n").encode()

    def _level(self, record: logging.LogRecord) -> str:
        name = f"{record.levelname:<7}"
        colour = _COLOUR.get(record.levelno) if self._in_colour else None
        return f"\x1b[{colour}m{name}\x1b[0m" if colour else name


def shown(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, and escape those that control a terminal or begin another line.

    Control characters, and those that change a line's direction, are shown as escapes of Python source.
    """
    # Nearly every text returns here, after two tests in C.
    if len(text) <= limit and text.isprintable():
        return text
    return shortened(printable(text[: limit + 1], allowed="\t"), limit)


def is_journal(fd: int) -> bool:
    """Return whether systemd's journal reads `fd`, which `JOURNAL_STREAM` then names (systemd.exec(5))."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


def _event_and_fields(record: logging.LogRecord) -> tuple[str, dict[str, Value]]:
    """Return a record's event and fields; for a library's record, LOG_OTHER and the logger's name."""
    # Records of libraries have no fields of ours.
    own: tuple[str, dict[str, Value]] | None = getattr(record, ATTRIBUTE, None)
    event, fields = own or (LogEvent.LOG_OTHER.kind.name, {"logger": record.name})
    if record.exc_info and record.exc_info[0] is not None:
        # Keep the end of a traceback, because the error is there.
        text = "".join(traceback.format_exception(*record.exc_info))
        fields = fields | {"traceback": text[-MAX_TRACEBACK_CHARS:].splitlines()}
    return event, fields


def _shown_value(value: Value, limit: int) -> Value:
    if isinstance(value, str):
        return shown(value, limit)
    if isinstance(value, list):
        return [shown(str(element), limit) for element in value[:limit]]
    return value


def _message_and_fields(message: str, fields: dict[str, Value], limit: int) -> str:
    parts = []
    for name, value in fields.items():
        if value is None or name == "traceback":
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if len(text) < MIN_REPEATED_CHARS or text not in message:
            parts.append(f"{name}={_quoted(shown(text, limit))}")
    return f"{message}  {' '.join(parts)}" if parts else message


_TO_QUOTE: Final = frozenset(' "=\t')


def _quoted(text: str) -> str:
    plain = text and _TO_QUOTE.isdisjoint(text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _prefix(level: int) -> str:
    return f"<{_PRIORITY.get(level, 6)}>"


MAX_WAITING_BYTES: Final = 4 << 20
"""Maximum number of bytes of waiting lines, about ten thousand lines, so that a stopped reader does not make them fill
the broker's memory."""

WRITE_BYTES: Final = 4096
"""Maximum number of bytes of one write: PIPE_BUF (pipe(7)), so that lines of several processes never mix in a pipe."""

GATHER_S: Final = 0.005
"""How long the thread lets lines gather between two writes, in seconds. A request logs several lines, and waking the
thread for each line takes the broker longer than making the line."""

GATHERS: Final = 4
"""Number of times in a row that the thread finds no line before it sleeps until a line wakes it."""

FLUSH_S: Final = 1.0
"""The longest wait, at the daemon's end, for the reader to read the last lines."""


class QueueingHandler(logging.Handler):
    """Queues lines for a thread that writes them to a descriptor. Raises NoThread."""

    def __init__(self, shape: Shape, fd: int = 2) -> None:
        self._shape = shape
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        # `_is_torn`: a part of a line was written. `_is_writing`: the thread has taken lines. `_is_given_up`: a flush
        # took too long. `_has_ended`: the thread returns. `_is_asleep`: a line must wake the thread.
        self._dropped_in_write = 0
        self._is_torn = False
        self._is_writing = False
        self._is_closed = False
        self._is_given_up = False
        self._has_ended = False
        self._is_asleep = False
        # `emit` takes the lock itself: entering the condition would cost it one more call.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="gpul-log", daemon=True)
        start_thread(self._thread)
        # Call this last, because the interpreter, when it ends, closes every handler registered here, even a half-made
        # one.
        super().__init__()

    def createLock(self) -> None:
        """Share the lock of `emit`, which its callers may hold: Python 3.13 always takes the handler's lock."""
        self.lock = self._lock

    def take_shape(self, shape: Shape) -> None:
        self._shape = shape

    def emit(self, record: logging.LogRecord) -> None:
        """Implement `logging.Handler.emit`. Never waits and raises nothing."""
        try:
            # Also hold the lock while formatting, so that lines are in the order of their times.
            with self._lock:
                self._queue(self._shape.line(record))
        except Exception:
            # Memory ran out, or the record can't be formatted. Only this line is lost.
            self._dropped += 1

    def emit_event(self, event: LogEvent, fields: dict[str, Value], level: int) -> None:
        """Do what `emit` does with the event's record, without that record if the line needs none."""
        try:
            with self._lock:
                shape = self._shape
                self._queue(shape.plain_line(event, fields, level) or shape.line(_record(event, fields, level)))
        except Exception:
            self._dropped += 1

    def _queue(self, line: bytes) -> None:
        """Queue a line, or count it as dropped if the queue is full. The caller holds the lock."""
        if self._is_closed or self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self._dropped += 1
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)
        # A thread that is awake takes the line when it has gathered enough.
        if self._is_asleep:
            self._is_asleep = False
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, at most FLUSH_S. After a wait that was too short, never wait again."""
        deadline_s = time.monotonic() + FLUSH_S
        with self._changed:
            # Lines that were taken may not be written yet, so an empty queue does not show that all lines are written.
            while (self._lines or self._is_writing) and not self._is_given_up:
                self._is_given_up = not self._changed.wait(max(0.0, deadline_s - time.monotonic()))

    def close(self) -> None:
        """Write the waiting lines and stop the thread."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            # `logging.shutdown` holds this lock while it closes. Waiting for the condition, unlike a join, releases the
            # lock for the thread. If the thread hangs in write(2), do not wait.
            if not self._is_given_up:
                self._changed.wait_for(lambda: self._has_ended, FLUSH_S)
        if self._has_ended:
            self._thread.join()
        super().close()

    def _run(self) -> None:
        while (lines := self._take()) is not None:
            # After a torn line, end that line first.
            end_of_torn = b"\n" if self._is_torn else b""
            data = end_of_torn + lines
            written = self._write(data)
            if written:
                self._is_torn = data[written - 1 : written] != b"\n"
            if written < len(data):
                self._count_lost(lines, max(0, written - len(end_of_torn)))

    def _write(self, data: bytes) -> int:
        """Return how many bytes were written: fewer if the reader is gone or the disk is full (no log can say so)."""
        written = 0
        # A write may be partial, for example because of a signal. Continue with the rest.
        with contextlib.suppress(OSError):
            while written < len(data):
                written += os.write(self._fd, data[written:])
        return written

    def _count_lost(self, lines: bytes, written: int) -> None:
        with self._changed:
            # Count whole lines that were not written: the newlines after the last written byte.
            self._dropped += lines.count(b"\n", written)
            if self._dropped_in_write and lines.find(b"\n") >= written:
                # The first lost line is the one that reported earlier losses.
                self._dropped += self._dropped_in_write - 1

    def _take(self) -> bytes | None:
        """Wait for lines, and return those for the next write; None when the handler is closed."""
        with self._changed:
            # The lines of the last call are written, so `flush` may return.
            self._is_writing = False
            self._changed.notify_all()
            while not self._lines and not self._is_closed:
                self._await_line()
            if not self._lines:
                # From now on the thread does not take the lock, so a caller that holds the lock may join the thread.
                self._has_ended = True
                self._changed.notify_all()
                return None
            self._is_writing = True
            # Write the count of dropped lines first, which shows that lines are missing before the next one.
            chunk = bytearray()
            self._dropped_in_write, self._dropped = self._dropped, 0
            if self._dropped_in_write:
                chunk += self._shape.line(_dropped_record(self._dropped_in_write))
            # Take as many whole lines as the kernel writes in one piece. A single line always fits.
            while self._lines and (not chunk or len(chunk) + len(self._lines[0]) <= WRITE_BYTES):
                line = self._lines.popleft()
                self._waiting_bytes -= len(line)
                chunk += line
            return bytes(chunk)

    def _await_line(self) -> None:
        """Wait for lines or the end, with the lock released."""
        # Lines come in bursts: during a burst, poll from time to time instead of being woken.
        for _ in range(GATHERS):
            self._lock.release()
            try:
                time.sleep(GATHER_S)
            finally:
                self._lock.acquire()
            if self._lines or self._is_closed:
                return
        # The burst is over. The next line is written at once.
        self._is_asleep = True
        self._changed.wait()
        self._is_asleep = False


class NonblockingHandler(logging.Handler):
    """Writes each line at once, or drops it if its reader is too slow."""

    def __init__(self, shape: Shape, fd: int = 2, *, reopens: bool = True) -> None:
        super().__init__()
        self._shape = shape
        self._end = NonblockingWriter(fd, reopens=reopens)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Implement `logging.Handler.emit`. Never waits and raises nothing."""
        try:
            line = self._shape.line(record)
            count_line = self._shape.line(_dropped_record(self._dropped)) if self._dropped else b""
            # The count and the line are too long for one write, so write the count first.
            if len(count_line) + len(line) > WRITE_BYTES and self._end.write(count_line):
                count_line, self._dropped = b"", 0
            # Use a single write, because a pipe may have room for only one more write, however short.
            if self._end.write(count_line + line):
                self._dropped = 0
            else:
                self._dropped += 1
        except Exception:
            self._dropped += 1

    def close(self) -> None:
        self._end.close()
        super().close()


class NonblockingWriter:
    """Writes to a file, pipe, socket or terminal without waiting.

    O_NONBLOCK would apply to every process that shares the descriptor, such as a shell. So a pipe or a terminal is
    opened again (proc(5), /proc/PID/fd), if that is allowed and `reopens` is true. Otherwise poll(2) shows whether
    there is room, which another writer may use first.
    """

    def __init__(self, fd: int, *, reopens: bool = True) -> None:
        self._fd = fd
        self._own_fd = -1
        self._sock: socket.socket | None = None
        self._torn_rest = b""
        if not reopens:
            return
        with contextlib.suppress(OSError):
            # There are three kinds of ends: a socket has a flag for each send; a pipe or a terminal is opened again,
            # with O_NONBLOCK; anything else is polled before each write.
            mode = os.fstat(fd).st_mode
            if stat.S_ISSOCK(mode):
                self._sock = socket.socket(fileno=os.dup(fd))
            elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                self._own_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def write(self, line: bytes) -> bool:
        """Write a line and return whether there was room. The rest of a torn line goes before the next one."""
        # The rest of a torn line goes first, because otherwise the new line would be appended to half of it.
        data = self._torn_rest + line
        try:
            written = self._write(data)
        except OSError:
            return False
        # Not even the rest of the torn line fitted. The new line was not begun, so it counts as dropped.
        if written < len(self._torn_rest):
            self._torn_rest = self._torn_rest[written:]
            return False
        self._torn_rest = data[written:]
        return True

    def close(self) -> None:
        """Close the descriptors that were opened here."""
        if self._sock is not None:
            self._sock.close()
        if self._own_fd >= 0:
            os.close(self._own_fd)
        self._sock, self._own_fd = None, -1

    def _write(self, data: bytes) -> int:
        if self._sock is not None:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._own_fd >= 0:
            return os.write(self._own_fd, data)
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        # Raise the same error as a descriptor with O_NONBLOCK.
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self._fd, data)


def _dropped_record(count: int) -> logging.LogRecord:
    return _record(LogEvent.LOG_DROPPED, {"count": count})


FORMATS: Final = ("auto", "human", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

VARIABLE: Final = "GPULEASE_LOG"
"""The environment variable that passes the style to the daemon's own processes. The daemon itself ignores it."""


@dataclass(frozen=True, slots=True)
class LogStyle:
    """The form, one of `FORMATS`, and the lowest level, one of `LEVELS`. Auto: for people on a terminal, else JSON."""

    form: str = "auto"
    level: str = "info"

    def shape(self, process: str) -> Shape:
        """Return the shape of this process's lines on standard error."""
        # Decide this for each process, because a helper's standard error may lead elsewhere than the broker's.
        for_journal = is_journal(2)
        is_terminal = os.isatty(2)
        if self.form == "json" or (self.form == "auto" and not is_terminal):
            return JsonShape(process, for_journal=for_journal)
        in_colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        return HumanShape(in_colour=in_colour, for_journal=for_journal)


def begin_logging(settings: LogStyle) -> None:
    """Begin to log in this process, the broker, and in those that it starts. Call it again to change the settings."""
    # Processes that are started from now on read their style here; running processes keep theirs.
    os.environ[VARIABLE] = f"{settings.form},{settings.level}"
    _set_level(settings)
    shape = settings.shape("broker")
    root = logging.getLogger()
    # A reload changes the existing handler, because a second one would log every line twice.
    for handler in root.handlers:
        if isinstance(handler, QueueingHandler):
            handler.take_shape(shape)
            return
    root.addHandler(QueueingHandler(shape))
    _log_uncaught()


def go_on_logging(process: str, *, reopens: bool = True) -> None:
    """Begin to log in a process that the broker started. It forks, so it logs without a thread.

    Args:
        process: The name of the process.
        reopens: False for a process that closes unknown descriptors, and so uses only standard error.
    """
    form, _, level = os.environ.get(VARIABLE, "").partition(",")
    # The variable may be set by another program; a wrong word must not prevent the start.
    settings = LogStyle(form if form in FORMATS else "auto", level if level in LEVELS else "info")
    _set_level(settings)
    logging.getLogger().addHandler(NonblockingHandler(settings.shape(process), reopens=reopens))
    _log_uncaught()


def stop_logging() -> None:
    """Stop logging in a process that was just forked. It then writes to its standard error directly."""
    root = logging.getLogger()
    # The parent's thread does not exist in the child, so its queue would never be written.
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def flush_logs() -> None:
    """Wait until logged lines are written, before the caller writes to standard error itself."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stderr.flush()


def is_for_people() -> bool:
    """Return whether people read the log, so that a daemon that ends gives its reason as a sentence."""
    return not is_journal(2) and os.environ.get(VARIABLE, "").partition(",")[0] != "json"


def _set_level(settings: LogStyle) -> None:
    # No line shows the thread or process: see "Optimization" in Python's Logging HOWTO.
    logging.logThreads = logging.logMultiprocessing = False
    logging.getLogger().setLevel(settings.level.upper())
    # Below that level, asyncio logs its own internals.
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, logging.getLogger().level))


def _log_uncaught() -> None:
    """Log warnings and uncaught exceptions as events, because Python's plain text would break the log's format."""
    logging.captureWarnings(True)

    def on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _log_fault("uncaught", error)

    def on_unraisable(args: "sys.UnraisableHookArgs") -> None:
        _log_fault(f"{args.err_msg or 'ignored in'} {args.object!r}", args.exc_value)

    def on_end_of_thread(args: threading.ExceptHookArgs) -> None:
        _log_fault(f"thread {args.thread.name if args.thread else ''}", args.exc_value)

    sys.excepthook, sys.unraisablehook, threading.excepthook = on_uncaught, on_unraisable, on_end_of_thread


def _log_fault(operation: str, error: BaseException | None) -> None:
    try:
        if error is not None:
            # Raise the error again, because a line contains the traceback of the exception that is being handled.
            raise error
    except BaseException:
        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=operation)
