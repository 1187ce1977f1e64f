"""A session's replies as frames."""

from typing import Final

from gpulease.protocol.codec import build_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET
from gpulease.protocol.framing import Frame, build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag

# A plain integer: an operation on an enum's member costs more than the rest.
_REPLY: Final = int(Flag.REPLY)

_EMPTY_REPLIES: Final[dict[int, tuple[int, bytes, bytes]]] = {}
"""By operation: a session, and its successful reply without a body before and behind the request id."""


def done(frame: Frame, body: Body) -> bytes:
    """The request succeeded with this body."""
    return build_frame(
        frame.op, build_body(body), request_id=frame.request_id, session_id=frame.session_id, flags=_REPLY
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


def failed(frame: Frame, failure: Failure) -> bytes:
    """The request failed."""
    return failure.to_frame(frame.op, request_id=frame.request_id, session_id=frame.session_id)
