"""The first bytes of a connection: whether they may begin a TLS handshake, and how many make up its first record.

A record is five bytes, type, version and length, and so many more (RFC 8446, 5.1); the first one of a client holds its
ClientHello, type 1 of the handshake messages (4), or the beginning of it.
"""

from typing import Final

LOOK_BYTES: Final = 6
"""What has to be there to tell."""

RECORD_HEADER_BYTES: Final = 5

MAX_RECORD_BYTES: Final = 1 << 14
"""Of a record that is not encrypted (RFC 8446, 5.1)."""

NOT_TLS_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 10))
"""A fatal alert, unexpected_message (RFC 8446, 6.2): what whoever does not speak TLS is told."""

_HANDSHAKE: Final = 22
_MAJOR_VERSION: Final = 3
_CLIENT_HELLO: Final = 1


def first_record_bytes(begin: bytes) -> int | None:
    """How long the first record is with its header, by at least LOOK_BYTES of it; None if that is no TLS."""
    kind, major, _, high, low, message = begin[:LOOK_BYTES]
    length = high << 8 | low
    if (kind, major, message) != (_HANDSHAKE, _MAJOR_VERSION, _CLIENT_HELLO) or not 4 <= length <= MAX_RECORD_BYTES:
        return None
    return RECORD_HEADER_BYTES + length
