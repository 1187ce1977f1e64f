"""Requests with a reply that is known in advance, byte for byte: one frame out, one frame back, and no parsing.

A successful reply without a body is known in advance; one with a handle is known except for the handle. A reply that
comes while this side still spins for it is compared instead of parsed, so a round trip takes a few microseconds.
Failures and late replies take the general path (`RequestPipeline`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeAlias, TypeVar

from gpulease.client.core.exchange import operation_of, receive
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.transport.channel import AskOutcome
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET, data_prefix, pack_mem_read
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.ring import NO_DATA

T = TypeVar("T")

_REPLY: Final = int(Flag.REPLY)


@dataclass(slots=True)
class Done(Generic[T]):
    """The reply has come and reports success. `value` is its content."""

    value: T


@dataclass(slots=True)
class Pending:
    """The request was sent; `rest` waits for its reply and returns the reply's body.

    If the reply brings a new object, use `RequestPipeline.made` instead.
    """

    receive: Callable[[int], Procedure[Any]]
    request_id: int

    @property
    def rest(self) -> Procedure[Any]:
        """The procedure that waits for the reply's body."""
        return self.receive(self.request_id)


class NotSent:
    """Nothing was sent, because the session is not at rest or the channel can't send this way now."""


Outcome: TypeAlias = Done[T] | Pending | NotSent

NOT_SENT: Final = NotSent()
DONE: Final = Done(None)

_NO_LATE: Final = 0, NO_DATA, None

# Looking up a member of an enum takes several steps; a global takes one.
_ANSWERED: Final = AskOutcome.ANSWERED
_NOT_SENT: Final = AskOutcome.NOT_SENT


class _KnownReply:
    """Base of `FastRequest` and `SmallRead`: one operation, sent only after the session's last request was answered."""

    def __init__(self, operations: RequestPipeline, op: Opcode, undo: Opcode | None = None) -> None:
        """Prepare the operation.

        Args:
            operations: The session's operations.
            op: The operation.
            undo: The operation that frees the object in a reply; None if a reply brings none.
        """
        self._operations = operations
        self._attachment = operations.attachment
        self._op = op
        self._creates = undo
        self._late: tuple[int, memoryview, memoryview | None] = _NO_LATE

    def _ask(
        self,
        request_id: int,
        request: bytes,
        reply: tuple[bytes, bytes, bytes],
        into: memoryview = NO_DATA,
        more_ns: int = 0,
        late_into: memoryview | None = None,
    ) -> Outcome[None]:
        """Send by `Channel.ask`, and expect the reply if it is late.

        Raises RegionFailed if the reply has come and is a region's refusal.

        Args:
            request_id: The request's id.
            request: Its frame.
            reply: The expected reply, in parts that the channel joins while the request is on its way.
            into: Target of the data after the reply.
            more_ns: As in `Channel.ask`.
            late_into: Target of a late reply's data; None if a late reply is to be parsed.
        """
        operations, channel = self._operations, self._attachment.channel
        # Until `ask` returns, assume that the request was sent and not answered. If this is interrupted, the next user
        # of the channel then makes the link expect the reply.
        self._late = request_id, into, late_into
        channel.unfinished = self._expect_late
        status = channel.ask(request, reply, into, more_ns)
        if status is not _ANSWERED and status is not _NOT_SENT:
            self._expect_late()
        channel.unfinished = None
        self._late = _NO_LATE
        if status is _ANSWERED:
            if operations.freed:
                operations.settle(None, "")
            if self._op in operations.fences or operations.acknowledged_id == request_id - 1:
                operations.acknowledged_id = request_id  # as in `RequestPipeline.acknowledge`
            return DONE
        if status is _NOT_SENT:
            return NOT_SENT
        if status is AskOutcome.REFUSED:
            self._raise_refusal(request_id)
        return Pending(self._receive, request_id)

    def _raise_refusal(self, request_id: int) -> None:
        """If the reply has come and is a region's refusal, which is urgent, raise it. Leave any other reply."""
        channel = self._attachment.channel
        channel.pump()
        refusal = channel.link.take_region_refusal(request_id)
        if refusal is not None:
            try:
                self._operations.settle(refusal, operation_of(self._op))
            except GpuLeaseError as error:
                raise error.with_traceback(None)  # noqa: B904  # its traceback begins at the caller's line

    def _expect_late(self) -> None:
        """Make the link expect the reply to the last request, which was sent. Calling it twice is harmless."""
        channel = self._attachment.channel
        request_id, into, late_into = self._late
        if self._creates is None or not any(into):
            channel.link.expect_late(self._op, request_id, late_into, self._creates)
            channel.feed()

    def _receive(self, request_id: int) -> Procedure[Any]:
        operations = self._operations
        # Treat the late reply like any other reply: it may be a failure, and it acknowledges earlier requests.
        result: Body | Failure = yield from receive(self._attachment.channel, request_id, operations.deadline)
        operations.settle(result, operation_of(self._op))
        operations.acknowledge(self._op, request_id)
        return result


@cache
def _frame_prefixes(op: Opcode, payload_bytes: int, answer_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before the request id in the frames of a request and of its reply: the same for all sessions."""
    # Build one frame of each kind by the general code, and cut it.
    request = build_frame(op, bytes(payload_bytes), request_id=0)
    reply = build_frame(op, bytes(answer_bytes), request_id=0, flags=_REPLY)
    return request[:REQUEST_ID_OFFSET], reply[:REQUEST_ID_OFFSET]


class FastRequest(_KnownReply):
    """A request with a payload of the same size each time."""

    def __init__(
        self,
        operations: RequestPipeline,
        op: Opcode,
        payload_bytes: int = 0,
        answer_bytes: int = 0,
        undo: Opcode | None = None,
    ) -> None:
        """Build the frames' constant parts.

        Args:
            operations: The session's operations.
            op: The operation.
            payload_bytes: Size of the request's payload.
            answer_bytes: Size of a successful reply's body.
            undo: As in `Link.expect`.
        """
        super().__init__(operations, op, undo)
        self._head, self._reply_head = _frame_prefixes(op, payload_bytes, answer_bytes)
        # In both frames, only the session's id is between the request id and the payload (`framing.HEADER`).
        self._middle = self._reply_tail = self._attachment.session_id.to_bytes(16)

    def ask(self, payload: bytes = b"", more_ns: int = 0, into: memoryview = NO_DATA) -> Outcome[None]:
        """Send the request, under the session's lock.

        Args:
            payload: The request's payload.
            more_ns: As in `Channel.ask`.
            into: Receives the reply's body.
        """
        attachment = self._attachment
        # Send only if the session is at rest: if other replies were due, this one would not be the next.
        if not attachment.is_at_rest:
            return NOT_SENT
        request_id = attachment.connection.next_request_id()
        number = request_id.to_bytes(8, "big")
        request = b"".join((self._head, number, self._middle, payload))
        # Recognise only a successful reply with a body of the expected size. Any other reply is received by the general
        # path.
        return self._ask(request_id, request, (self._reply_head, number, self._reply_tail), into, more_ns)

    def do(self, payload: bytes = b"", more_ns: int = 0) -> Procedure[None]:
        """Send the request, by the fast path if possible, and wait for the reply."""
        # There are three outcomes: nothing was sent, so use the general path; the reply is late, so wait for it; or the
        # reply has come.
        match self.ask(payload, more_ns):
            case NotSent():
                yield from self._operations.ask(self._op, payload)
            case Pending(rest=rest):
                yield from rest


class SmallRead(_KnownReply):
    """A MEM_READ with a reply that is compared as a whole: a known beginning, then data that is received in place."""

    def __init__(self, operations: RequestPipeline) -> None:
        super().__init__(operations, Opcode.MEM_READ)
        self._session_bytes = self._attachment.session_id.to_bytes(16)
        # The last read's size, and the bytes of its reply before and after the request id.
        self._length, self._reply_head, self._reply_tail = 0, b"", b""

    def ask(self, handle: int, offset: int, into: memoryview) -> Outcome[None]:
        """Read `len(into)` bytes from byte `offset`, under the session's lock."""
        attachment = self._attachment
        # As in FastRequest: if other replies were due, this one would not be the next.
        if not attachment.is_at_rest:
            return NOT_SENT
        length = len(into)
        if length != self._length:
            reply = data_prefix(length, request_id=0, session_id=attachment.session_id)
            self._reply_head, self._reply_tail = reply[:REQUEST_ID_OFFSET], reply[MIDDLE_AT:]
            self._length = length
        request_id = attachment.connection.next_request_id()
        request = pack_mem_read(request_id, self._session_bytes, handle, offset, length)
        reply_parts = self._reply_head, request_id.to_bytes(8, "big"), self._reply_tail
        return self._ask(request_id, request, reply_parts, into, late_into=into)
