"""A session's replies: a frame for a success, and for an error or an ended lease a failure that a tenant can act on."""

from typing import Final

from gpulease.daemon.drivers.interface import DriverError, ImageRejected, LaunchRejected
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import SESSION_REFUSALS, Failure, Refused
from gpulease.protocol.fastpath import HANDLE, MIDDLE_AT, REQUEST_ID_OFFSET
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.operations import SPECS

_DRIVER_FAILURES: Final = {int(spec.op): spec.driver_failure for spec in SPECS.values() if spec.is_session}


def refusal_of(status: Status, reason: str = "") -> Failure:
    """Return the failure that every operation gets after the lease's end, with the broker's reason if there is one."""
    message, hint = SESSION_REFUSALS.get(status, ("the lease has ended", "Acquire a new lease."))
    return Failure(status, f"{message}: {reason}" if reason else message, hint=hint)


def failure_of(error: Exception, op: int) -> Failure:
    """Return the failure for an operation's error. Raises the error itself if no operation may end with it."""
    # Match the special errors before the driver's general one.
    match error:
        case Refused():
            return error.failure
        case BodyError():
            return Failure(error.status, str(error))
        case ImageRejected():
            return Failure(Status.LOAD_FAILED, str(error), hint=error.hint, log=error.log, line=error.line)
        case LaunchRejected():
            return Failure(Status.LAUNCH_FAILED, str(error), hint=error.hint)
        case DriverError():
            return Failure(_DRIVER_FAILURES.get(op, Status.SESSION_FAILED), str(error), hint=error.hint)
    raise error


# A plain integer, because an operation on an enum's member costs more than the rest.
_REPLY: Final = int(Flag.REPLY)

NO_NUMBER: Final = bytes(8)
"""A request id that no request may have, as on the wire."""

_EMPTY_REPLIES: Final[dict[int, tuple[int, bytes, bytes]]] = {}
"""Empty successful replies by opcode: the session id, and the reply's bytes before and after the request id."""


_REFUSALS: Final = {status: build_body(refusal_of(status).to_body()) for status in SESSION_REFUSALS}
"""The refusals' payloads by status, built in advance: building one takes ten times as long as everything else between a
lease's end and its report."""


class SyncPattern:
    """The bytes of a session's SYNC and of its successful reply around the request id.

    With them a SYNC is recognised without parsing.
    """

    def __init__(self, session_id: int) -> None:
        # The request id is the only part that differs from one SYNC to the next.
        request = build_frame(Opcode.SYNC, request_id=0, session_id=session_id)
        reply = build_frame(Opcode.SYNC, request_id=0, session_id=session_id, flags=_REPLY)
        self._front, self._tail = request[:REQUEST_ID_OFFSET], request[MIDDLE_AT:]
        self._reply_front, self._reply_tail = reply[:REQUEST_ID_OFFSET], reply[MIDDLE_AT:]

    @property
    def texts(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The SYNC's bytes before and after its request id, then those of its reply."""
        return self._front, self._tail, self._reply_front, self._reply_tail

    def number(self, reader: FrameReader) -> bytes:
        """Return the request id, as on the wire, of a SYNC that is first in the reader; b"" if there is none."""
        # Compare the bytes around the request id, which is faster than a parse.
        start, stands_at = reader.start, reader.buffer.startswith
        if reader.end - start < HEADER_BYTES or not stands_at(self._front, start):
            return b""
        return bytes(reader.buffer[start + REQUEST_ID_OFFSET : start + MIDDLE_AT]) * stands_at(
            self._tail, start + MIDDLE_AT
        )

    def reply(self, number: bytes) -> bytes:
        return b"".join((self._reply_front, number, self._reply_tail))


def done(frame: Frame, body: Body) -> bytes:
    """Return the reply to a request that succeeded with this body."""
    return build_frame(
        frame.op, build_body(body), request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY
    )


def handle_reply(frame: Frame, value: int) -> bytes:
    """Return the reply to a request that succeeded with a handle: the same as `done` returns, but much faster."""
    return build_frame(
        frame.op, HANDLE.pack(value), request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY
    )


def empty(frame: Frame) -> bytes:
    """Return the reply, without a body, to a request that succeeded; b"" if the request was quiet."""
    if frame.flags:
        return b""
    op, session_id = frame.op, frame.session_id
    # Built once per operation and session; only the request id is put in.
    cached = _EMPTY_REPLIES.get(op)
    if cached is None or cached[0] != session_id:
        template = build_frame(op, request_id=0, session_id=session_id, flags=_REPLY)
        cached = _EMPTY_REPLIES[op] = (session_id, template[:REQUEST_ID_OFFSET], template[MIDDLE_AT:])
    return b"".join((cached[1], frame.request_id.to_bytes(8, "big"), cached[2]))


def refused(frame: Frame, status: Status, reason: str) -> bytes:
    """Return the reply to a request after the lease's end; `reason` is the broker's, or ""."""
    # Without a reason, the payload was built in advance.
    payload = None if reason else _REFUSALS.get(status)
    if payload is None:
        return failed(frame, refusal_of(status, reason))
    return build_frame(
        frame.op, payload, request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY, status=status
    )


def failed(frame: Frame, failure: Failure) -> bytes:
    return failure.to_frame(frame.op, request_id=frame.request_id, session_id=frame.session_id)
