"""What a record looks like: a line of JSON for programs, or a line for people.

Whatever comes from a tenant, a kernel or a driver stands in a field, is cut, and has nothing in it that a terminal
would obey, or that would begin another line. A line fits one write that the kernel does not tear (pipe(7), PIPE_BUF):
other processes write to the same pipe.
"""

import json
import logging
import os
import time
import traceback
from datetime import UTC, datetime
from typing import Final, Protocol

from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import ATTRIBUTE, Value

MAX_LINE_BYTES: Final = 4000
"""Of one line, its newline and a syslog prefix included: less than PIPE_BUF on Linux, 4,096."""

TEXT_LIMITS: Final = (1000, 200, 40)
"""Characters of a text, as it is shown; the first of these with which its line is short enough. A record is not a
tenant's to fill."""

MAX_TRACEBACK_CHARS: Final = 2000
"""Of a traceback, from its end: what happened is there."""

MIN_REPEATED_CHARS: Final = 4
"""Of what the message is taken to say already: "1" is found in any."""

_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""syslog(3)'s, as sd-daemon(3) has them."""

_COLOUR: Final = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}
_encode: Final = json.JSONEncoder(separators=(",", ":"), default=str).encode


class Shape(Protocol):
    """Makes lines of records."""

    def line(self, record: logging.LogRecord) -> bytes:
        """One line with its newline."""


class JsonShape:
    """One JSON object a line (RFC 8259), in ASCII.

    Args:
        process: Which of the daemon's processes speaks.
        for_journal: Begin lines with their priority, `<6>`, as systemd's journal takes it (sd-daemon(3)).
    """

    def __init__(self, process: str, *, for_journal: bool = False) -> None:
        self._process = process
        self._for_journal = for_journal

    def line(self, record: logging.LogRecord) -> bytes:
        """As above."""
        event, fields = _told(record)
        members: dict[str, object] = {
            "time": _time_text(record.created),
            "monotonic_ns": time.monotonic_ns(),
            "level": record.levelname.lower(),
            "event": event,
            "message": "",
            "process": self._process,
            "pid": record.process,
        }
        prefix = _prefix(record) if self._for_journal else ""
        message = record.getMessage()
        text = ""
        for limit in TEXT_LIMITS:
            members["message"] = shown(message, limit)
            told = {name: _shown_value(value, limit) for name, value in fields.items() if value is not None}
            text = f"{prefix}{_encode(members | told)}\n"
            if len(text) <= MAX_LINE_BYTES:
                break
        else:
            text = f"{prefix}{_encode(members)}\n"
        return text.encode()


class HumanShape:
    """When, how bad, what, and the fields: `2026-03-01 12:00:00.000 INFO    lease granted  lease_id=… tenant=ann`.

    A field that the message says is not said again. A traceback follows in lines of its own, each marked as one.
    """

    def __init__(self, *, in_colour: bool = False, for_journal: bool = False) -> None:
        self._in_colour = in_colour
        self._for_journal = for_journal

    def line(self, record: logging.LogRecord) -> bytes:
        """As above."""
        _, fields = _told(record)
        prefix = _prefix(record) if self._for_journal else ""
        at = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        head = f"{prefix}{at} {self._level(record)} "
        message = record.getMessage()
        text = ""
        for limit in TEXT_LIMITS:
            text = head + _message_and_fields(shown(message, limit), fields, limit)
            if len(text.encode()) < MAX_LINE_BYTES:
                break
        more = fields.get("traceback")
        lines = [text, *(f"{prefix}    | {shown(line, 500)}" for line in (more if isinstance(more, list) else ()))]
        return ("\n".join(lines) + "\n").encode()

    def _level(self, record: logging.LogRecord) -> str:
        name = f"{record.levelname:<7}"
        colour = _COLOUR.get(record.levelno) if self._in_colour else None
        return f"\x1b[{colour}m{name}\x1b[0m" if colour else name


def shown(text: str, limit: int) -> str:
    """A text with nothing in it that a terminal would obey, or take for another line, and not longer than `limit`.

    Controls and what turns the direction of a line are shown by their number.
    """
    text = text[: limit + 1]
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char == "\t" else _number(char) for char in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def is_journal(fd: int) -> bool:
    """Whether what is written to `fd` goes to systemd's journal: `JOURNAL_STREAM` names it (systemd.exec(5))."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


def _told(record: logging.LogRecord) -> tuple[str, dict[str, Value]]:
    """The event and its fields; of a library's record, that and the logger's name."""
    other: tuple[str, dict[str, Value]] = (LogEvent.LOG_OTHER.value.name, {"logger": record.name})
    event, fields = getattr(record, ATTRIBUTE, other)
    if record.exc_info and record.exc_info[0] is not None:
        told = "".join(traceback.format_exception(*record.exc_info))
        fields = fields | {"traceback": told[-MAX_TRACEBACK_CHARS:].splitlines()}
    return event, fields


def _shown_value(value: Value, limit: int) -> Value:
    if isinstance(value, str):
        return shown(value, limit)
    if isinstance(value, list):
        return [shown(str(one), limit) for one in value[:limit]]
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


def _quoted(text: str) -> str:
    plain = text and not any(char in text for char in ' "=\t')
    return text if plain else json.dumps(text, ensure_ascii=False)


def _number(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _prefix(record: logging.LogRecord) -> str:
    return f"<{_PRIORITY.get(record.levelno, 6)}>"


def _time_text(created_s: float) -> str:
    """RFC 3339, UTC, microseconds."""
    return f"{datetime.fromtimestamp(created_s, UTC).replace(tzinfo=None).isoformat('T', 'microseconds')}Z"
