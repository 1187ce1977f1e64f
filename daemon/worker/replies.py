"""A session's replies as frames."""

from typing import Final

from gpulease.daemon.worker.reasons import REFUSALS, refusal_of
from gpulease.protocol.codec import build_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.fastpath import HANDLE, MIDDLE_AT, REQUEST_ID_OFFSET
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag, Opcode, Status

# A plain integer: an operation on an enum's member costs more than the rest.
_REPLY: Final = int(Flag.REPLY)

NO_NUMBER: Final = bytes(8)
"""The request id that no request may have."""

_EMPTY_REPLIES: Final[dict[int, tuple[int, bytes, bytes]]] = {}
"""By operation: a session, and its successful reply without a body before and behind the request id."""


_REFUSALS: Final = {status: build_body(refusal_of(status).to_body()) for status in REFUSALS}
"""By status: the payload. Building one takes ten times as long as all else between a lease's end and its telling."""


class SyncPattern:
    """What a session's SYNC and its successful reply look like but for the number, to know one without parsing it."""

    def __init__(self, session_id: int) -> None:
        request = build_frame(Opcode.SYNC, request_id=0, session_id=session_id)
        reply = build_frame(Opcode.SYNC, request_id=0, session_id=session_id, flags=_REPLY)
        self._front, self._tail = request[:REQUEST_ID_OFFSET], request[MIDDLE_AT:]
        self._reply_front, self._reply_tail = reply[:REQUEST_ID_OFFSET], reply[MIDDLE_AT:]

    @property
    def texts(self) -> tuple[bytes, bytes, bytes, bytes]:
        """What stands before and behind the number: of the SYNC, and of its reply."""
        return self._front, self._tail, self._reply_front, self._reply_tail

    def number(self, reader: FrameReader) -> bytes:
        """The number of a SYNC at the front of what has arrived, as it travels; nothing if there is none."""
        start, stands_at = reader.start, reader.buffer.startswith
        if reader.end - start < HEADER_BYTES or not stands_at(self._front, start):
            return b""
        return bytes(reader.buffer[start + REQUEST_ID_OFFSET : start + MIDDLE_AT]) * stands_at(
            self._tail, start + MIDDLE_AT
        )

    def reply(self, number: bytes) -> bytes:
        """Its reply."""
        return b"".join((self._reply_front, number, self._reply_tail))


def done(frame: Frame, body: Body) -> bytes:
    """The request succeeded with this body."""
    return build_frame(
        frame.op, build_body(body), request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY
    )


def number(frame: Frame, value: int) -> bytes:
    """The request succeeded with a handle: the same as `done`, in a fraction of the time."""
    return build_frame(
        frame.op, HANDLE.pack(value), request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY
    )


def empty(frame: Frame) -> bytes:
    """The request succeeded and has nothing to say; no bytes at all if it was quiet."""
    if frame.flags:
        return b""
    op, session_id = frame.op, frame.session_id
    known = _EMPTY_REPLIES.get(op)
    if known is None or known[0] != session_id:
        whole = build_frame(op, request_id=0, session_id=session_id, flags=_REPLY)
        known = _EMPTY_REPLIES[op] = (session_id, whole[:REQUEST_ID_OFFSET], whole[MIDDLE_AT:])
    return b"".join((known[1], frame.request_id.to_bytes(8, "big"), known[2]))


def refused(frame: Frame, status: Status, reason: str) -> bytes:
    """The lease is over; `reason` is what is said of that, if anything."""
    payload = None if reason else _REFUSALS.get(status)
    if payload is None:
        return failed(frame, refusal_of(status, reason))
    return build_frame(
        frame.op, payload, request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY, status=status
    )


def failed(frame: Frame, failure: Failure) -> bytes:
    """The request failed."""
    return failure.to_frame(frame.op, request_id=frame.request_id, session_id=frame.session_id)
