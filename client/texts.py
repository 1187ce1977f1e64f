"""Checks of texts that a program gives: a text that can't go over the wire is refused where it is given."""

from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES

MAX_QUOTED_CHARS: Final = 120
"""Most characters that a message quotes. Stops a text that is too long from filling the error, too."""


def quoted(given: Any) -> str:
    """Quote a value for a message, as Python writes it, on one line and cut to `MAX_QUOTED_CHARS`."""
    if isinstance(given, str | bytes | bytearray) and len(given) > MAX_QUOTED_CHARS:
        return f"{given[:MAX_QUOTED_CHARS]!r}..."
    try:
        text = repr(given)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or lists in lists without end.
        return "a value that can't be shown"
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."


def utf8(text: Any, what: str) -> bytes:
    """Encode a text. Raises InvalidRequest if it is no text, or has surrogates, which UTF-8 excludes (RFC 3629)."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{what} must be a string, not {quoted(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what}: the string has a lone surrogate at {error.start}, which is not a character"
        ) from None


def bounded(text: Any, what: str, most_bytes: int) -> str:
    """Check a text: 1 to `most_bytes` bytes of UTF-8, none of them 0. Raises InvalidRequest."""
    size_bytes = len(utf8(text, what))
    if not 0 < size_bytes <= most_bytes:
        raise InvalidRequest(f"{what} must have 1 to {most_bytes} bytes, not {size_bytes}")
    if "\0" in text:
        raise InvalidRequest(f"{what}: {quoted(text)} has a NUL in it")
    return str(text)


def kernel_name(name: Any, doing: str) -> str:
    """Check a kernel's name. Raises InvalidRequest."""
    return bounded(name, f"{doing}: a kernel's name", MAX_KERNEL_NAME_BYTES)
