"""A call through memory that a caller and a model server share: two regions, one request and one reply at a time.

    at     what           written by
    0      the request    the caller; its status also by the server
    32768  the reply      the server; its status also by the caller

Each region begins with the same 17 bytes, **little-endian** and without gaps, and its payload follows:

    +0   request_id   u64
    +8   method_id    u32
    +12  status       u8    see CallStatus
    +13  payload_len  u32   at most MAX_PAYLOAD_BYTES
    +17  payload

A call: while both statuses are EMPTY the caller writes its request and then its status, REQUEST_READY, and rings. The
server sets it to PROCESSING, takes the payload out, and when it is done sets it to EMPTY; it writes the reply, with the
request's id, and then the reply's status, RESPONSE_READY or ERROR, and rings. The caller takes the reply out and sets
its status to EMPTY. A reply's `method_id` is the method that answered, which may be another than was asked.

A status is written last and read first. On x86-64 stores are seen in the order they were made (Intel SDM 3A, 9.2.2), so
a status that is seen by looking has its bytes behind it. Elsewhere nobody may look before the bell was heard: a byte on
the socket, whose sending and receiving orders memory on every machine.

A caller may say how long its call is worth doing: the last 12 bytes of the reply's region, which are nobody's until the
reply is written, hold the request's id (u64) and what is left (u32, milliseconds), written before the request's status.
With another id there, or with 0, nothing is said; who knows nothing of this has it so, and may stay as they are.

Method 0, DESCRIBE, takes nothing and answers with what is served. An ERROR's payload is a CallError. All of it, and the
socket's first message, is checked by whoever reads it, because the other side can write any byte at any time: a header
is read once, and used from where it was read to.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Self

import construct as c

RPC_VERSION: Final = 1
"""Of all that is said here."""

REQUEST_AT: Final = 0
REPLY_AT: Final = 32768
SHARED_BYTES: Final = 65536
"""Of the memory: a caller's own, shared with nobody else."""

HEADER_BYTES: Final = 17
STATUS_AT: Final = 12
MAX_PAYLOAD_BYTES: Final = REPLY_AT - REQUEST_AT - HEADER_BYTES
"""What is left of a region: 32,751. Stops a length that leads out of it."""

TIME_LEFT_AT: Final = SHARED_BYTES - 12
"""Where a caller says how long its call is worth doing."""

TIME_LEFT_BYTES: Final = 12

MAX_LEFT_MS: Final = 2**32 - 1
"""What can be said of that: seven weeks."""

MAX_ERROR_TEXT_BYTES: Final = 1024
"""Of an error's text; more is cut."""

DESCRIBE: Final = 0
"""The method every server has."""


class CallStatus(IntEnum):
    """A region's status; any other byte is a mistake."""

    EMPTY = 0
    REQUEST_READY = 1
    PROCESSING = 2
    RESPONSE_READY = 3
    ERROR = 4


class CallErrorCode(IntEnum):
    """Why a call came to nothing. Never given another meaning; a caller takes one it does not know for INTERNAL."""

    INTERNAL = 1
    """The server is at fault."""
    INVALID_REQUEST = 2
    """The request makes no sense; nothing was done."""
    NO_SUCH_METHOD = 3
    """No model has that number."""
    QUEUE_FULL = 4
    """Nothing was done; ask again later."""
    TOO_LATE = 5
    """It can't be done, or was not begun, in its time; nothing was done."""
    UNAVAILABLE = 6
    """The model has no lease now; nothing was done."""
    LEASE_LOST = 7
    """Its lease ended under the request: it may have been computed, but there is no result."""
    KERNEL_FAILED = 8
    """The model's kernel failed or ran for too long."""


HEADER: Final = c.Struct(
    "request_id" / c.Int64ul, "method_id" / c.Int32ul, "status" / c.Int8ul, "payload_len" / c.Int32ul
)
"""The definition; HEADER_FAST is the same, for the way of every call."""

HEADER_FAST: Final = struct.Struct("<QIBI")

TIME_LEFT: Final = c.Struct("request_id" / c.Int64ul, "left_ms" / c.Int32ul)
"""At TIME_LEFT_AT; TIME_LEFT_FAST is the same."""

TIME_LEFT_FAST: Final = struct.Struct("<QI")

CALL_ERROR: Final = c.Struct("code" / c.Int32ul, "retry_after_ms" / c.Int32ul, "text" / c.GreedyBytes)
"""An ERROR's payload: a CallErrorCode, when it may be worth asking again (0: nothing is known of that), UTF-8."""

GREETING: Final = c.Struct(
    "magic" / c.Const(b"gpulrpc"), "version" / c.Int8ul, "shared_bytes" / c.Int32ul, "padding" / c.Const(bytes(4))
)
"""A server's first message on the socket; the memory's descriptor comes beside its first byte (SCM_RIGHTS, unix(7))."""

GREETING_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What a region says before its payload."""

    request_id: int
    method_id: int
    status: int
    payload_len: int

    def to_bytes(self) -> bytes:
        """As it lies in memory."""
        return HEADER_FAST.pack(self.request_id, self.method_id, self.status, self.payload_len)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Of 17 bytes, which are read once; whatever they are, it has a meaning."""
        return cls(*HEADER_FAST.unpack(data))

    @property
    def fits(self) -> bool:
        """Whether the payload ends where the region does, at the latest."""
        return self.payload_len <= MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """How long a call is worth doing, from when it is asked."""

    request_id: int
    left_ms: int

    def to_bytes(self) -> bytes:
        """As it lies in memory."""
        return TIME_LEFT_FAST.pack(self.request_id, self.left_ms)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Of 12 bytes; whatever they are, they have a meaning."""
        return cls(*TIME_LEFT_FAST.unpack(data))

    def of_call(self, request_id: int) -> int | None:
        """What is left of that call's time in milliseconds; None if its caller has not said."""
        return self.left_ms or None if request_id == self.request_id else None


@dataclass(frozen=True, slots=True)
class CallError:
    """Why a call came to nothing.

    Attributes:
        code: For programs.
        text: For people.
        retry_after_ms: When it may be worth asking again; 0: nothing is known of that.
    """

    code: CallErrorCode
    text: str
    retry_after_ms: int = 0

    def to_bytes(self) -> bytes:
        """As an ERROR's payload."""
        text = self.text.encode()[:MAX_ERROR_TEXT_BYTES].decode(errors="ignore").encode()
        built: bytes = CALL_ERROR.build(
            {"code": self.code, "retry_after_ms": min(self.retry_after_ms, 2**32 - 1), "text": text}
        )
        return built

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """As it came; None if it is too short to be one."""
        try:
            found: Any = CALL_ERROR.parse(data)
        except c.ConstructError:
            return None
        known = found.code in CallErrorCode._value2member_map_
        code = CallErrorCode(found.code) if known else CallErrorCode.INTERNAL
        return cls(code, found.text[:MAX_ERROR_TEXT_BYTES].decode(errors="replace"), found.retry_after_ms)


def greeting() -> bytes:
    """A server's first message."""
    built: bytes = GREETING.build({"version": RPC_VERSION, "shared_bytes": SHARED_BYTES})
    return built


def is_greeting(data: bytes) -> bool:
    """Whether this is what a server of this version says first."""
    return data == greeting()
