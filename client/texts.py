"""Checks of strings and callbacks from the program, in the call to which they are passed."""

from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES

MAX_QUOTED_CHARS: Final = 120
"""Maximum number of characters of a value that a message quotes, so that a long string can't fill the message."""

_LONG_NUMBER: Final = "Exceeds the limit"
"""The beginning of Python's message for a number of thousands of digits, because its conversion takes quadratic
time."""


def quoted(value: Any) -> str:
    """Return a value in Python's notation, for a message: on one line, cut to `MAX_QUOTED_CHARS`."""
    if isinstance(value, str | bytes | bytearray) and len(value) > MAX_QUOTED_CHARS:
        return f"{value[:MAX_QUOTED_CHARS]!r}..."
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # The value is an integer of thousands of digits, or lists that are nested too deeply.
        return "a value that can't be shown"
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."


def parse_problem(error: Exception) -> str:
    """Return why a text can't be parsed as JSON or TOML, as a clause for a message.

    Python's own texts for nested brackets and for long numbers name functions of Python.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it has a number with too many digits" if str(error).startswith(_LONG_NUMBER) else str(error)


def utf8(text: Any, subject: str) -> bytes:
    """Encode a string.

    Args:
        text: The value that the program passed.
        subject: The value's name, for messages.

    Raises InvalidRequest if it is not a string, or has lone surrogates, which UTF-8 excludes (RFC 3629).
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"{subject} must be a string, not {quoted(text)}")
    # Python strings may contain half of a surrogate pair, for example from a file name that is not UTF-8.
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{subject}: the string has a lone surrogate at {error.start}, which is not a character"
        ) from None


def bounded(text: Any, subject: str, most_bytes: int) -> str:
    """Return a string if it has 1 to `most_bytes` bytes of UTF-8 and no NUL. Raises InvalidRequest otherwise."""
    # Count bytes: a character takes up to four.
    size_bytes = len(utf8(text, subject))
    if not 0 < size_bytes <= most_bytes:
        raise InvalidRequest(f"{subject} must have 1 to {most_bytes} bytes, not {size_bytes}")
    # Refuse a NUL, because C libraries and logs would end the text there.
    if "\0" in text:
        raise InvalidRequest(f"{subject}: {quoted(text)} has a NUL in it")
    return str(text)


def kernel_name(name: Any, operation: str) -> str:
    """Return a kernel's name if the protocol can carry it. Raises InvalidRequest otherwise."""
    return bounded(name, f"{operation}: a kernel's name", MAX_KERNEL_NAME_BYTES)


def check_callback(callback: Any, subject: str) -> None:
    """Raise InvalidRequest if a value can't be called: a thread or task would call it later, and its event be lost."""
    if not callable(callback):
        raise InvalidRequest(f"{subject} must be a function, not {quoted(callback)}")
