"""The frame header, and the reader that cuts a byte stream into frames.

     0        1        2        3        4        5        6        7
    +--------+--------+--------+--------+--------+--------+--------+--------+
    |  'G'      'P'      'L'      'S'   | version|  flags |       op        |  0
    +--------+--------+--------+--------+--------+--------+--------+--------+
    |   status (i16)  |  reserved (0)   |         payload length            |  8
    +--------+--------+--------+--------+--------+--------+--------+--------+
    |                             request id                                | 16
    +--------+--------+--------+--------+--------+--------+--------+--------+
    |                             session id                                | 24
    |                                                                       | 32
    +--------+--------+--------+--------+--------+--------+--------+--------+
    |  payload ...                                                          | 40

`HEADER` is the definition. Every received header is read through `_FAST`, one struct.Struct over the same 40 bytes in
which magic, version, flags and op are one integer, so that one comparison checks four fields.
"""

import struct
from typing import Final, NamedTuple

import construct as c

from gpulease.protocol.errors import FramingError, LocalProtocolError
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, PROTOCOL_VERSION, RECEIVE_BUFFER_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.opcodes import KNOWN_FLAGS, Flag, Opcode, Status
from gpulease.protocol.primitives import I16, U8, U16, U32, U64, U128

MAGIC: Final = b"GPLS"

HEADER: Final = c.Struct(
    "magic" / c.Const(MAGIC),
    "version" / c.Const(PROTOCOL_VERSION, U8),
    "flags" / U8,
    "op" / U16,
    "status" / I16,
    "reserved" / c.Const(0, U16),
    "payload_length" / U32,
    "request_id" / U64,
    "session_id" / U128,
)
HEADER_BYTES: Final[int] = HEADER.sizeof()

_OP_AT: Final = len(MAGIC) + 2
"""The offset of the op, after the version and the flags."""

_FAST: Final = struct.Struct(">QhHIQ16s")
"""The fields: head (magic, version, flags, op), status, reserved, payload length, request id, session id."""

# The first eight bytes of every valid header as one number: magic and version here, flags and op added by `head_of`.
_HEAD_BASE: Final = int.from_bytes(MAGIC, "big") << 32 | PROTOCOL_VERSION << 24
# Plain integers, because an operation on an IntFlag costs more than reading the whole header.
_REPLY: Final = int(Flag.REPLY)
_QUIET: Final = int(Flag.QUIET)
_REPLY_AND_QUIET: Final = int(Flag.REPLY | Flag.QUIET)


def head_of(op: int, flags: int) -> int:
    """Return the header's first eight bytes as the integer that `_FAST` reads."""
    return _HEAD_BASE | flags << 16 | op


_PLAIN_HEADERS: Final = {
    head_of(op, flags): (int(op), int(flags)) for op in Opcode for flags in (0, Flag.QUIET, Flag.REPLY)
}
"""Heads that need no further check, with their op and flags. Nearly every received header has one."""


class Frame(NamedTuple):
    """A frame. A received payload is a view into the reader's buffer: copy bytes that must outlive the next read."""

    op: int
    flags: int
    status: int
    request_id: int
    session_id: int
    payload: bytes | memoryview

    @property
    def is_reply(self) -> bool:
        return bool(self.flags & _REPLY)

    @property
    def is_quiet(self) -> bool:
        return bool(self.flags & _QUIET)


def build_frame(
    op: int,
    payload: bytes | memoryview = b"",
    *,
    request_id: int,
    session_id: int = 0,
    flags: int = 0,
    status: int = 0,
) -> bytes:
    """Return a frame's bytes. Raises LocalProtocolError for a frame that a receiver would refuse."""
    header = build_header(op, len(payload), request_id=request_id, session_id=session_id, flags=flags, status=status)
    return b"".join((header, payload))


def build_header(
    op: int, payload_bytes: int, *, request_id: int, session_id: int = 0, flags: int = 0, status: int = 0
) -> bytes:
    """Return the header of a frame; its payload is sent after it. Raises LocalProtocolError as `build_frame` does."""
    flags = int(flags)
    # Refuse a frame here if the receiver would refuse it: that refusal would end the connection, with every other
    # request on it.
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(f"a payload must have at most {MAX_PAYLOAD_BYTES} bytes, not {payload_bytes}")
    if op >> 16:
        raise LocalProtocolError(f"the operation must be a u16, not {op:#x}")
    _check_header(flags, status, 0, LocalProtocolError)
    try:
        return _FAST.pack(head_of(op, flags), status, 0, payload_bytes, request_id, session_id.to_bytes(16, "big"))
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"a header field is out of range: {error}") from None


def parse_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int, int, int, int, bytes]:
    """Check a header. Returns op, flags, status, payload length, request id, and session id as 16 bytes.

    The buffer must have HEADER_BYTES from `offset` on. Raises FramingError.
    """
    head, status, reserved, length, request_id, session_id = _FAST.unpack_from(buffer, offset)
    # Step 1: recognise the usual headers by one look-up. Only the length and the ids remain, all values of which are
    # valid.
    cached = _PLAIN_HEADERS.get(head)
    if cached is not None and not status and not reserved:
        return *cached, 0, length, request_id, session_id
    # Step 2: the header is unusual or invalid. Check the magic first, because without it no other field has a meaning.
    if head >> 32 != _HEAD_BASE >> 32:
        raise FramingError("the stream does not start with GPLS: the peer speaks another protocol")
    version = head >> 24 & 0xFF
    if version != PROTOCOL_VERSION:
        raise FramingError(
            f"the peer uses version {version} of the protocol; this side uses version {PROTOCOL_VERSION}",
            Status.UNSUPPORTED,
        )
    # Accept an unknown operation here: the connection refuses it later, and the stream continues.
    flags = head >> 16 & 0xFF
    _check_header(flags, status, reserved, FramingError)
    return head & 0xFFFF, flags, status, length, request_id, session_id


def _check_header(flags: int, status: int, reserved: int, error: type[FramingError] | type[LocalProtocolError]) -> None:
    if flags & ~KNOWN_FLAGS:
        raise error(f"unknown header flags {flags & ~KNOWN_FLAGS:#04x}", Status.UNSUPPORTED)
    if reserved:
        raise error("the reserved header field is not zero")
    # QUIET means that no reply is wanted, so a reply can't have this flag.
    if flags & _REPLY_AND_QUIET == _REPLY_AND_QUIET:
        raise error("a reply can't be quiet")
    if status and not flags & _REPLY:
        raise error("a request carries a status")
    if status > 0:
        # Accept an unknown negative status, so that a later version can add one without disconnecting older clients.
        raise error(f"status {status}; no status is positive")


class FrameReader:
    """Cuts received bytes into frames; no I/O.

    Feed the reader with `receive_data`, or read into `get_buffer()` and call `buffer_updated`. Then take frames until
    `next_frame` returns None. The buffer grows with the bytes that arrive, to `max_payload_bytes` and a header at most.
    It shrinks again after a very large frame.
    """

    def __init__(
        self,
        max_payload_bytes: int,
        *,
        buffer_bytes: int = RECEIVE_BUFFER_BYTES,
        retained_bytes: int = RETAINED_BUFFER_BYTES,
    ) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._initial_bytes = buffer_bytes
        self._retained_bytes = max(buffer_bytes, retained_bytes)
        self.buffer = bytearray(buffer_bytes)
        self.view = memoryview(self.buffer)
        # Bytes from `start` to `end` have arrived and are not taken yet.
        self.start = 0
        self.end = 0

    def get_buffer(self) -> memoryview:
        """Return the room for the next bytes, never empty. Views of earlier frames become invalid."""
        # If no bytes are pending, begin at the front again, and release the memory of a very large frame.
        if self.start == self.end:
            self.start = self.end = 0
            if len(self.buffer) > self._retained_bytes:
                self._resize(self._initial_bytes)
        # The pending bytes reach the buffer's end, or more than half of the buffer is before them.
        elif self.end == len(self.buffer) or self.start > len(self.buffer) >> 1:
            self._make_room()
        return self.view[self.end :]

    def buffer_updated(self, count: int) -> None:
        """Count the bytes that the caller has put into the last `get_buffer()`."""
        self.end += count

    def receive_data(self, data: bytes | memoryview) -> None:
        """Take all of these bytes, however many frames they hold."""
        room = self.get_buffer()
        pending = self.end - self.start
        # If they do not fit, make one new buffer, at least twice as large, so that many small feeds take linear time.
        if len(room) < len(data):
            self._resize(max(pending + len(data), self._next_size()))
            self.start, self.end = 0, pending
        self.view[self.end : self.end + len(data)] = data
        self.buffer_updated(len(data))

    def peek_op(self) -> int:
        """Return the operation of the next frame, unchecked; 0 if too little of the frame has arrived."""
        begin = self.start + _OP_AT
        return self.buffer[begin] << 8 | self.buffer[begin + 1] if self.end > begin + 1 else 0

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None until more arrives. After a FramingError the reader is unusable."""
        # Once the header has arrived, check the length at once, before the buffer grows for the payload.
        have = self.end - self.start
        if have < HEADER_BYTES:
            return None
        op, flags, status, length, request_id, session_id = parse_header(self.buffer, self.start)
        if length > self._max_payload_bytes:
            raise FramingError(
                f"a payload of {length} bytes is announced; this side accepts at most {self._max_payload_bytes}"
            )
        if have < HEADER_BYTES + length:
            return None
        begin = self.start + HEADER_BYTES
        # Take the frame before its view is made: after an interrupt between the two, the caller rewinds `start`.
        self.start = begin + length
        payload = self.view[begin : self.start]
        return Frame(op, flags, status, request_id, int.from_bytes(session_id, "big"), payload)

    @property
    def is_mid_frame(self) -> bool:
        """True if received bytes are not taken yet. After `next_frame` returned None they are part of a frame."""
        return self.end > self.start

    def take_rest(self) -> bytes:
        """Return the bytes not yet taken as frames, and empty the reader."""
        rest = bytes(self.view[self.start : self.end])
        self.start = self.end = 0
        return rest

    def _make_room(self) -> None:
        pending = self.end - self.start
        # Move the pending bytes to the front if they fill at most half the buffer, otherwise to a larger buffer.
        if pending <= len(self.buffer) >> 1:
            self.buffer[:pending] = self.buffer[self.start : self.end]
        else:
            self._resize(max(pending, self._next_size()))
        self.start, self.end = 0, pending

    def _next_size(self) -> int:
        return min(len(self.buffer) * 2, self._max_payload_bytes + HEADER_BYTES)

    def _resize(self, size: int) -> None:
        # Views of earlier frames may hold the old buffer, so it can't be resized in place.
        fresh = bytearray(max(size, self._initial_bytes))
        pending = self.end - self.start
        fresh[:pending] = self.view[self.start : self.end]
        self.buffer = fresh
        self.view = memoryview(fresh)
