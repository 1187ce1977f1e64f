"""A call through memory that a caller and a model server share: it has two regions, for one request and one reply.

    at     what           written by
    0      the request    the caller; its status also by the server
    32768  the reply      the server; its status also by the caller

Each region begins with the same 17 bytes, **little-endian** and without gaps, and its payload follows:

    +0   request_id   u64
    +8   method_id    u32
    +12  status       u8    a CallStatus
    +13  payload_len  u32   at most MAX_PAYLOAD_BYTES
    +17  payload

A call: while both statuses are EMPTY, the caller writes its request and then its status, REQUEST_READY, and rings the
bell. The bell is a byte on the socket. The server sets the status to PROCESSING, takes the payload out, and sets the
status to EMPTY when it is done. It writes the reply, with the request's id, and then the reply's status, RESPONSE_READY
or ERROR, and rings. The caller takes the reply out and sets its status to EMPTY. A reply's `method_id` is the method
that answered, which may differ from the method asked for.

Each side writes a status last and reads it first. On x86-64 stores become visible in program order (Intel SDM 3A,
9.2.2), so a side that polls and sees a status finds its bytes there. On other machines a side must wait for the bell
first: sending and receiving a byte orders memory on every machine.

A caller may give its call a time limit. It writes the request's id (u64) and the time left (u32, milliseconds) before
the request's status. They are in the last 12 bytes of the reply's region, which is unused before the reply. Another id
there, or 0, means no limit, so a caller that does not support time limits need not change.

Method 0, DESCRIBE, has no payload; its reply describes what is served. An ERROR's payload is a CallError. Every reader
checks all of this, and the socket's first message, because the other side can write any byte at any time. Each reads a
header once and uses that copy.
"""

import struct
from enum import IntEnum
from typing import Any, Final, Self

import construct as c

from gpulease.protocol.fast_dataclass import dataclass

RPC_VERSION: Final = 1
"""The version of everything in this module."""

# The two halves of the memory. A side writes only into its own half, and the status of the other.
REQUEST_AT: Final = 0
REPLY_AT: Final = 32768
SHARED_BYTES: Final = 65536
"""The size of the memory, which one caller shares with the server alone."""

HEADER_BYTES: Final = 17
STATUS_AT: Final = 12
MAX_PAYLOAD_BYTES: Final = REPLY_AT - REQUEST_AT - HEADER_BYTES
"""The rest of a region: 32,751 bytes. Stops a length beyond the region's end."""

TIME_LEFT_AT: Final = SHARED_BYTES - 12
"""The offset of a call's time limit."""

TIME_LEFT_BYTES: Final = 12

MAX_LEFT_MS: Final = 2**32 - 1
"""The longest time limit: seven weeks."""

MAX_ERROR_TEXT_BYTES: Final = 1024
"""Maximum number of bytes of an error's text; a longer one is truncated."""

DESCRIBE: Final = 0
"""The method that every server has."""


# Once assigned, a number keeps its meaning in every version.
class CallStatus(IntEnum):
    """A region's status; any other byte is a mistake."""

    EMPTY = 0
    REQUEST_READY = 1
    PROCESSING = 2
    RESPONSE_READY = 3
    ERROR = 4


class CallErrorCode(IntEnum):
    """The reason of a failed call. A code never changes its meaning; callers treat an unknown code as INTERNAL."""

    INTERNAL = 1
    """The server is at fault."""
    INVALID_REQUEST = 2
    """The request is invalid; nothing was done."""
    NO_SUCH_METHOD = 3
    """No model has that number."""
    QUEUE_FULL = 4
    """Nothing was done; ask again later."""
    TOO_LATE = 5
    """The call can't be done, or was not started, within its time limit; nothing was done."""
    UNAVAILABLE = 6
    """The model has no lease now; nothing was done."""
    LEASE_LOST = 7
    """The model's lease ended during the request: it may have been computed, but without a result."""
    KERNEL_FAILED = 8
    """The model's kernel failed or ran for too long."""


HEADER: Final = c.Struct(
    "request_id" / c.Int64ul, "method_id" / c.Int32ul, "status" / c.Int8ul, "payload_len" / c.Int32ul
)
"""The definition of a region's header; HEADER_FAST reads the same bytes faster."""

# For each call, both sides build and parse headers, and with construct that would cost more than the call.
HEADER_FAST: Final = struct.Struct("<QIBI")

TIME_LEFT: Final = c.Struct("request_id" / c.Int64ul, "left_ms" / c.Int32ul)
"""The definition of the time limit at TIME_LEFT_AT; TIME_LEFT_FAST reads the same bytes faster."""

TIME_LEFT_FAST: Final = struct.Struct("<QI")

CALL_ERROR: Final = c.Struct("code" / c.Int32ul, "retry_after_ms" / c.Int32ul, "text" / c.GreedyBytes)
"""An ERROR's payload: a CallErrorCode, milliseconds until a retry may succeed (0 if unknown), UTF-8."""

GREETING: Final = c.Struct(
    "magic" / c.Const(b"gpulrpc"), "version" / c.Int8ul, "shared_bytes" / c.Int32ul, "padding" / c.Const(bytes(4))
)
"""A server's first message on the socket; the memory's descriptor comes with its first byte (SCM_RIGHTS, unix(7))."""

GREETING_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CallHeader:
    """A region's header: which call, which method, its status, and the payload's bytes."""

    request_id: int
    method_id: int
    status: int
    payload_len: int

    def to_bytes(self) -> bytes:
        return HEADER_FAST.pack(self.request_id, self.method_id, self.status, self.payload_len)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Return the header of 17 bytes, which are read once. Every byte sequence is a header."""
        return cls(*HEADER_FAST.unpack(data))

    @property
    def fits(self) -> bool:
        """True if the payload ends within the region."""
        return self.payload_len <= MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """A call's time limit, counted from its request."""

    request_id: int
    left_ms: int

    def to_bytes(self) -> bytes:
        return TIME_LEFT_FAST.pack(self.request_id, self.left_ms)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Return the time limit of 12 bytes. Every byte sequence is one."""
        return cls(*TIME_LEFT_FAST.unpack(data))

    def of_call(self, request_id: int) -> int | None:
        """Return a call's time limit in milliseconds; None if its caller gave none."""
        # Another id belongs to an earlier call: this caller wrote no limit.
        return self.left_ms or None if request_id == self.request_id else None


@dataclass(frozen=True, slots=True)
class CallError:
    """A failed call.

    Attributes:
        code: The reason, for programs.
        text: The reason, for people.
        retry_after_ms: Milliseconds until a retry may succeed; 0 if unknown.
    """

    code: CallErrorCode
    text: str
    retry_after_ms: int = 0

    def to_bytes(self) -> bytes:
        # A cut may fall inside a character: decode drops the incomplete one.
        text = self.text.encode()[:MAX_ERROR_TEXT_BYTES].decode(errors="ignore").encode()
        # Cut a time that is too long for the field: to a caller, seven weeks mean the same.
        built: bytes = CALL_ERROR.build(
            {"code": self.code, "retry_after_ms": min(self.retry_after_ms, 2**32 - 1), "text": text}
        )
        return built

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Return the error of an ERROR's payload; None if the payload is too short."""
        try:
            error: Any = CALL_ERROR.parse(data)
        except c.ConstructError:
            return None
        # Treat the code of a later server as INTERNAL: the caller is notified that the call failed, and the text
        # contains the reason.
        is_known = error.code in CallErrorCode._value2member_map_
        code = CallErrorCode(error.code) if is_known else CallErrorCode.INTERNAL
        return cls(code, error.text[:MAX_ERROR_TEXT_BYTES].decode(errors="replace"), error.retry_after_ms)


def greeting() -> bytes:
    built: bytes = GREETING.build({"version": RPC_VERSION, "shared_bytes": SHARED_BYTES})
    return built


def is_greeting(data: bytes) -> bool:
    """Return whether this is the first message of a server of this version."""
    return data == greeting()
