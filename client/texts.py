"""Checks of strings from the program: one that can't go over the wire is refused where it was passed."""

from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES

MAX_QUOTED_CHARS: Final = 120
"""Maximum number of characters that a message quotes. Stops an overlong string from filling the error message too."""


def quoted(value: Any) -> str:
    """A value as Python writes it, for a message: on one line, cut to `MAX_QUOTED_CHARS`."""
    if isinstance(value, str | bytes | bytearray) and len(value) > MAX_QUOTED_CHARS:
        return f"{value[:MAX_QUOTED_CHARS]!r}..."
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or endlessly nested lists.
        return "a value that can't be shown"
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."


def utf8(text: Any, subject: str) -> bytes:
    """Encode a string.

    Args:
        text: What the program gave.
        subject: How messages name it.

    Raises InvalidRequest if it is not a string, or has lone surrogates, which UTF-8 excludes (RFC 3629).
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"{subject} must be a string, not {quoted(text)}")
    # Python strings may hold half of a surrogate pair, for example from a file name that is not UTF-8.
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{subject}: the string has a lone surrogate at {error.start}, which is not a character"
        ) from None


def bounded(text: Any, subject: str, most_bytes: int) -> str:
    """Return a string that has 1 to `most_bytes` bytes of UTF-8 and no NUL; raises InvalidRequest for any other."""
    # The limits are of bytes: a character takes up to four.
    size_bytes = len(utf8(text, subject))
    if not 0 < size_bytes <= most_bytes:
        raise InvalidRequest(f"{subject} must have 1 to {most_bytes} bytes, not {size_bytes}")
    # C libraries and logs would end the text at a NUL.
    if "\0" in text:
        raise InvalidRequest(f"{subject}: {quoted(text)} has a NUL in it")
    return str(text)


def kernel_name(name: Any, operation: str) -> str:
    """Return a kernel's name if the wire can carry it; raises InvalidRequest otherwise."""
    return bounded(name, f"{operation}: a kernel's name", MAX_KERNEL_NAME_BYTES)
