"""A connection without I/O: bytes in, events out; messages in, bytes out. Its states are a table.

Both peers keep the same state and change it by the same table, whichever side sends. A connection starts with HELLO,
and then carries control requests, any number of them in flight. ATTACH is the last control request, and may only be
sent while no other request is in flight: the daemon passes the socket, with every byte after the ATTACH, to the
session's worker, and after that can't answer earlier requests. GPU_SUBMIT does the same with the submit's own worker.
If the daemon refuses, the connection is a control connection again. If it accepts, the connection carries session
operations until it is closed.

`TRANSITIONS` lists everything that is allowed. A forbidden request gets the answer INVALID_REQUEST and changes nothing.

Order of calls: pass received bytes to `receive_data`, or through the `reader`'s `get_buffer` and `buffer_updated`. Then
take events with `next_event` until it returns None. Each `send_*` returns the bytes to write; outgoing bytes are not
buffered. No further event comes after `StreamBroken` or `EndOfStream`.
"""

from enum import Enum, auto
from typing import Any, Final

from gpulease.protocol.codec import build_body, parse_body, reply_body, request_body
from gpulease.protocol.connection_states import REPLIES, TRANSITIONS, State, WireTrigger
from gpulease.protocol.errors import BodyError, FramingError, LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_frame, build_header
from gpulease.protocol.limits import MAX_IN_FLIGHT, RECEIVE_BUFFER_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.messages import Body, LeaseEvent, LeaseUnsubscribe, RegionEvent
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.operations import EVENTS_OF, HANDING_OVER, SPECS


def request_trigger(op: Opcode) -> WireTrigger | None:
    """Return the trigger of a request for an operation; None for an operation without requests."""
    return _REQUESTS[op]


def reply_trigger(op: Opcode, *, refused: bool) -> WireTrigger | None:
    """Return the trigger of a reply to an operation; None for an operation without requests."""
    return _REPLIES[op][refused]


_REQUESTS: Final = {op: spec.trigger for op, spec in SPECS.items()}
_REPLIES: Final = {op: (None, None) if trigger is None else REPLIES[trigger] for op, trigger in _REQUESTS.items()}
_EVENT_OPERATIONS: Final = frozenset(map(int, EVENTS_OF.values()))


class Role(Enum):
    """The side of a connection: the client sends requests, and the server answers them."""

    CLIENT = auto()
    SERVER = auto()


@dataclass(frozen=True, slots=True)
class Request:
    """The peer's request. Unless `is_quiet`, the peer waits for `send_reply` or `send_failure`."""

    op: Opcode
    request_id: int
    session_id: int
    is_quiet: bool
    body: Body


@dataclass(frozen=True, slots=True)
class Rejected:
    """An invalid request: answer with `failure`, then continue."""

    op: int
    request_id: int
    session_id: int
    is_quiet: bool
    failure: Failure


@dataclass(frozen=True, slots=True)
class Reply:
    """The peer's reply to one of this side's requests: a body or a failure."""

    op: Opcode
    request_id: int
    result: Body | Failure


@dataclass(frozen=True, slots=True)
class Notification:
    """An event of a subscription, which is the request id of its LEASE_SUBSCRIBE."""

    subscription: int
    event: LeaseEvent


@dataclass(frozen=True, slots=True)
class RegionNotification:
    """An event of a subscription, which is the request id of its REGION_WATCH."""

    subscription: int
    event: RegionEvent


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer is about to close the connection, for this reason."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The peer has sent bytes that are not a valid frame. Send a goodbye with `failure`, then close."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The peer has closed the connection; `is_clean` is False if it did so inside a frame."""

    is_clean: bool


Event = Request | Rejected | Reply | Notification | RegionNotification | Goodbye | StreamBroken | EndOfStream


class Connection:
    """One side of a connection, from HELLO on; with `state=State.ATTACHING`, one side of a session, from ATTACH on.

    Args:
        role: This side.
        max_payload_bytes: The largest payload that this side accepts.
        state: The initial state.
        buffer_bytes: The size of the receive buffer. A larger frame grows it while the buffer holds that frame.

    Attributes:
        last_request_id: The number of this side's latest request. Code that builds requests by itself must increment
            it.
    """

    def __init__(
        self,
        role: Role,
        *,
        max_payload_bytes: int,
        state: State = State.OPENING,
        buffer_bytes: int = RECEIVE_BUFFER_BYTES,
    ) -> None:
        self.role = role
        self.state = state
        # A daemon has many control connections, with small buffers: keep none of these grown between frames.
        retained_bytes = RETAINED_BUFFER_BYTES if buffer_bytes >= RECEIVE_BUFFER_BYTES else buffer_bytes
        self.reader = FrameReader(
            max_payload_bytes,
            buffer_bytes=min(buffer_bytes, max_payload_bytes + HEADER_BYTES),
            retained_bytes=retained_bytes,
        )
        # On the client, the requests that await a reply; on the server, those that it has not answered yet.
        self._in_flight: dict[int, Opcode] = {}
        self.last_request_id = 0
        self._has_eof = False
        self._subscriptions = Subscriptions()
        # The client's request that was written right after HELLO, before HELLO's reply: (op, request id, body).
        self._behind_hello: tuple[Opcode, int, Body] | None = None

    # --- receiving ---

    def receive_data(self, data: bytes | memoryview) -> None:
        self.reader.receive_data(data)

    def receive_eof(self) -> None:
        """Record that the peer has closed its side.

        Once all received frames are taken, `next_event` returns EndOfStream.
        """
        self._has_eof = True

    def take_rest(self) -> bytes:
        """Return the received bytes after the last event taken, for another owner of the stream."""
        return self.reader.take_rest()

    @property
    def subscriptions(self) -> int:
        return len(self._subscriptions)

    @property
    def in_flight(self) -> int:
        """The number of unanswered requests: those that this side has sent as a client, or received as a server."""
        return len(self._in_flight)

    def next_event(self) -> Event | None:
        """Return the next event, or None until more bytes arrive."""
        # After a goodbye, a broken stream or an end, ignore the remaining bytes.
        if self.state is State.CLOSED:
            return None
        start = self.reader.start
        try:
            frame = self.reader.next_frame()
            if frame is not None:
                return self._receive_reply(frame) if self.role is Role.CLIENT else self._receive_request(frame)
        except FramingError as error:
            self.state = State.CLOSED
            return StreamBroken(Failure(error.status, str(error)))
        except BaseException:
            # Ctrl-C in a client's process: rewind, so that the next call starts with the same frame.
            self.reader.start = start
            raise
        # Report the end of the stream only after every complete frame before it.
        if self._has_eof:
            self.state = State.CLOSED
            return EndOfStream(is_clean=not self.reader.is_mid_frame)
        return None

    def _receive_request(self, frame: Frame) -> Event:
        # Step 1: check for errors that no valid client makes. After one, the stream can no longer be trusted, so it
        # ends the connection.
        if frame.is_reply:
            raise FramingError("a client sent a reply")
        if frame.request_id in self._in_flight:
            raise FramingError(f"request id {frame.request_id} is already in flight")
        if frame.request_id == 0:
            raise FramingError("request id 0 is reserved for goodbyes")
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise FramingError(f"{MAX_IN_FLIGHT} requests await their reply, the maximum", Status.BUSY)
        # Step 2: check for errors within this frame. They get an error reply, and do not affect the state and the next
        # frames.
        try:
            op = self._accept_request(frame)
            body = parse_body(request_body(op), frame.payload)
        except BodyError as error:
            failure = Failure(error.status, str(error))
            return Rejected(frame.op, frame.request_id, frame.session_id, frame.is_quiet, failure)
        # Step 3: accept the request. A quiet one gets no reply, so it is never in flight.
        self.state = TRANSITIONS[self.state, _trigger(op)]
        if not frame.is_quiet:
            self._in_flight[frame.request_id] = op
            self._subscriptions.on_request(frame.request_id, body)
        return Request(op, frame.request_id, frame.session_id, frame.is_quiet, body)

    def _accept_request(self, frame: Frame) -> Opcode:
        # Answer UNSUPPORTED for an operation of a later version, so that a newer client can distinguish it from its own
        # mistakes.
        try:
            op = Opcode(frame.op)
        except ValueError:
            raise BodyError(f"unknown operation {frame.op:#06x}", Status.UNSUPPORTED) from None
        trigger = request_trigger(op)
        if trigger is None or (self.state, trigger) not in TRANSITIONS:
            raise BodyError(f"{op.name} is not allowed in state {self.state.name}")
        if op in EVENTS_OF and frame.request_id in self._subscriptions:
            # With two subscriptions of one number, events and LEASE_UNSUBSCRIBE would be ambiguous.
            raise BodyError(f"this connection already has a subscription {frame.request_id}")
        # The worker that takes over the connection has no record of the broker's subscriptions and open requests.
        if op in HANDING_OVER and self._subscriptions:
            raise BodyError(f"{op.name} is not allowed while the connection has subscriptions: end them first")
        if op in HANDING_OVER and self._in_flight:
            raise BodyError(
                f"{op.name} is not allowed while other requests are in flight: wait for their replies first"
            )
        if frame.is_quiet and trigger is not WireTrigger.SESSION_REQUEST:
            raise BodyError(f"{op.name} can't be quiet: only session operations can")
        return op

    def _receive_reply(self, frame: Frame) -> Event:
        if not frame.is_reply:
            raise FramingError("the daemon sent a request")
        # Goodbye and events belong to no request, so check for them first.
        if frame.op == Opcode.GOODBYE and frame.request_id == 0:
            self.state = State.CLOSED
            return Goodbye(_failure_of(frame))
        if frame.op in _EVENT_OPERATIONS:
            return self._receive_notification(frame, Opcode(frame.op))
        # Every other frame must answer an open request with its own operation.
        op = self._in_flight.get(frame.request_id)
        if op is None or op != frame.op:
            raise FramingError(f"a reply arrived for request {frame.request_id}, which was not sent")
        try:
            result = _failure_of(frame) if frame.status else parse_body(reply_body(op), frame.payload)
        except BodyError as error:
            raise FramingError(f"{op.name}: {error}", error.status) from None
        # Change the state by the refusal or the success, as the daemon did when it sent this.
        state = _state_after(self.state, reply_trigger(op, refused=frame.status != 0), op)
        self._subscriptions.on_reply(op, frame.request_id, succeeded=not frame.status)
        request_behind = self._behind_hello if op is Opcode.HELLO and not frame.status else None
        if request_behind is not None:
            # Treat the pipelined request as sent now: the daemon answered HELLO before it read the request.
            next_op, request_id, body = request_behind
            state = _state_after(state, request_trigger(next_op), next_op)
            self._in_flight[request_id] = next_op
            self._subscriptions.on_request(request_id, body)
        reply = Reply(op, frame.request_id, result)
        # No call may follow: after an interrupt, either nothing has changed and the call can be repeated, or everything
        # has.
        self.state = state
        if request_behind is not None:
            self._behind_hello = None
        del self._in_flight[frame.request_id]
        return reply

    def _receive_notification(self, frame: Frame, op: Opcode) -> Notification | RegionNotification:
        try:
            event: Any = parse_body(reply_body(op), frame.payload)
        except BodyError as error:
            raise FramingError(f"{op.name}: {error}", error.status) from None
        # Sequence numbers must rise, so that a client does not count an event twice.
        if frame.status or not self._subscriptions.is_next(op, frame.request_id, event.sequence):
            raise FramingError(f"event {event.sequence} of unknown subscription {frame.request_id}")
        if isinstance(event, RegionEvent):
            return RegionNotification(frame.request_id, event)
        return Notification(frame.request_id, event)

    # --- sending ---

    def next_request_id(self) -> int:
        """Return the number for a quiet request. The caller builds its frame."""
        self.last_request_id += 1
        return self.last_request_id

    def send_request(self, op: Opcode, body: Body, *, session_id: int = 0, quiet: bool = False) -> tuple[int, bytes]:
        """Return the request id and the bytes to write. Raises LocalProtocolError for a request not allowed now."""
        # Make the same checks as the daemon's `_accept_request`, so that a request that it would refuse is not sent.
        if op in HANDING_OVER and (self._in_flight or self._subscriptions):
            raise LocalProtocolError(
                f"{op.name} is not allowed while other requests are in flight, or there are subscriptions"
            )
        if type(body) is not request_body(op):
            raise LocalProtocolError(
                f"{op.name} must have a body of type {request_body(op).__name__}, not {type(body).__name__}"
            )
        if quiet and request_trigger(op) is not WireTrigger.SESSION_REQUEST:
            raise LocalProtocolError(f"{op.name} can't be quiet: only session operations can")
        request_id = self.last_request_id + 1
        flags = Flag.QUIET if quiet else 0
        frame = build_frame(op, build_body(body), request_id=request_id, session_id=session_id, flags=flags)
        # A quiet request has no reply, so it only changes the state.
        if quiet:
            self._move(request_trigger(op), op)
            return self.next_request_id(), frame
        # `expect_reply` uses the frame's number, because no other request is numbered between these lines.
        self.expect_reply(op)
        self._subscriptions.on_request(request_id, body)
        return request_id, frame

    def send_behind_hello(self, op: Opcode, body: Body, *, session_id: int = 0) -> tuple[int, bytes]:
        """Return the request id and the bytes of one control request, to be written directly after HELLO.

        The request counts as sent once HELLO's reply has come. Raises LocalProtocolError if HELLO is not awaiting its
        reply, or if another request already follows it.
        """
        # HELLO's reply decides whether the request is served, so it is not in flight yet, and `state` stays GREETING.
        if self.state is not State.GREETING or self._behind_hello is not None:
            raise LocalProtocolError(f"{op.name} can't be sent right after HELLO now")
        if type(body) is not request_body(op) or (State.CONTROL, request_trigger(op)) not in TRANSITIONS:
            raise LocalProtocolError(f"{op.name} of {type(body).__name__} can't be sent right after HELLO")
        request_id = self.next_request_id()
        self._behind_hello = op, request_id, body
        return request_id, build_frame(op, build_body(body), request_id=request_id, session_id=session_id)

    def expect_reply(self, op: Opcode) -> int:
        """Return the number for a session request and await its reply. The caller builds the request's frame."""
        # The daemon would end a connection that exceeds this limit, so fail only this request.
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise LocalProtocolError(f"{MAX_IN_FLIGHT} requests await their reply, the maximum", Status.BUSY)
        request_id = self.last_request_id + 1
        self.expect_reply_to(op, request_id)
        return self.next_request_id()

    def expect_reply_to(self, op: Opcode, request_id: int) -> None:
        """Await the reply to a request that already has a number from `next_request_id`."""
        self._move(request_trigger(op), op)
        self._in_flight[request_id] = op

    def forget_unsent(self) -> None:
        """Await no more replies: an interrupted caller has numbered requests without sending them."""
        self._in_flight.clear()

    def send_reply(self, request: Request, body: Body) -> bytes:
        if type(body) is not reply_body(request.op):
            raise LocalProtocolError(f"{request.op.name} is not answered with {type(body).__name__}")
        payload = build_body(body)
        return self._answer(request, payload, Status.OK)

    def send_reply_header(self, request: Request, payload_bytes: int) -> bytes:
        """Return the header of a successful reply. The caller sends the body, which is the same for many peers."""
        header = build_header(
            request.op,
            payload_bytes,
            request_id=request.request_id,
            session_id=request.session_id,
            flags=Flag.REPLY,
            status=Status.OK,
        )
        self._note_answer(request, Status.OK)
        return header

    def send_failure(self, request: Request | Rejected, failure: Failure) -> bytes:
        return self._answer(request, build_body(failure.to_body()), failure.status)

    def send_event(self, subscription: int, event: LeaseEvent | RegionEvent) -> bytes:
        """Return the bytes of an event. Raises LocalProtocolError without a matching subscription."""
        op = Opcode.LEASE_EVENT if type(event) is LeaseEvent else Opcode.REGION_EVENT
        if not self._subscriptions.is_next(op, subscription, event.sequence):
            raise LocalProtocolError(f"event {event.sequence} of unknown subscription {subscription}")
        return build_frame(op, build_body(event), request_id=subscription, flags=Flag.REPLY)

    def send_goodbye(self, failure: Failure) -> bytes:
        """Return the last bytes on a connection, with the reason for closing it."""
        # Nothing may follow a goodbye, not even replies that are due.
        self.state = State.CLOSED
        return failure.to_frame(Opcode.GOODBYE, request_id=0)

    def _answer(self, request: Request | Rejected, payload: bytes, status: Status) -> bytes:
        frame = build_frame(
            request.op,
            payload,
            request_id=request.request_id,
            session_id=request.session_id,
            flags=Flag.REPLY,
            status=status,
        )
        # A rejected request has changed nothing, so its refusal changes nothing either.
        if isinstance(request, Request):
            self._note_answer(request, status)
        return frame

    def _note_answer(self, request: Request, status: Status) -> None:
        # In state ATTACHING, another process may have received the ATTACH and passed the socket to this one.
        if request.request_id not in self._in_flight and self.state is not State.ATTACHING:
            raise LocalProtocolError(f"request {request.request_id} was answered before, or was quiet")
        # Both sides change their state by the same reply, so a refused ATTACH returns both to CONTROL.
        self._move(reply_trigger(request.op, refused=status is not Status.OK), request.op)
        self._in_flight.pop(request.request_id, None)
        self._subscriptions.on_reply(request.op, request.request_id, succeeded=status is Status.OK)

    def _move(self, trigger: WireTrigger | None, op: Opcode) -> None:
        self.state = _state_after(self.state, trigger, op)


def _state_after(state: State, trigger: WireTrigger | None, op: Opcode) -> State:
    after = None if trigger is None else TRANSITIONS.get((state, trigger))
    if after is None:
        raise LocalProtocolError(f"{op.name} is not allowed in state {state.name}")
    return after


class Subscriptions:
    """The subscriptions of one connection. Both peers derive them from requests and replies.

    A subscription begins with the reply to its LEASE_SUBSCRIBE or REGION_WATCH and ends with the reply to its
    LEASE_UNSUBSCRIBE. All its events have the same operation.
    """

    def __init__(self) -> None:
        # By subscription: the operation of its events, and the sequence of the latest one.
        self._events: dict[int, Opcode] = {}
        self._last: dict[int, int] = {}
        # By the request id of a LEASE_UNSUBSCRIBE in flight: the subscription that it ends.
        self._ending: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, number: int) -> bool:
        return number in self._last

    def on_request(self, request_id: int, body: Any) -> None:
        """Record a request that awaits a reply, because a reply does not say which subscription it ends."""
        if type(body) is LeaseUnsubscribe:
            self._ending[request_id] = body.subscription

    def on_reply(self, op: Opcode, request_id: int, *, succeeded: bool) -> None:
        # Both sides begin and end a subscription with the reply, so no event can come before or after it.
        if op in EVENTS_OF and succeeded:
            self._events[request_id] = EVENTS_OF[op]
            self._last[request_id] = 0
        elif op is Opcode.LEASE_UNSUBSCRIBE:
            # Drop the record of the request in any case, but the subscription only if the daemon has ended it.
            ended = self._ending.pop(request_id, 0)
            if succeeded:
                self._events.pop(ended, None)
                self._last.pop(ended, None)

    def is_next(self, op: Opcode, subscription: int, sequence: int) -> bool:
        """Return whether an event of that operation and number may come now. If so, count it."""
        if self._events.get(subscription) is not op or not self._last[subscription] < sequence:
            return False
        self._last[subscription] = sequence
        return True


def _failure_of(frame: Frame) -> Failure:
    try:
        return Failure.from_payload(frame.status, frame.payload)
    except BodyError as error:
        raise FramingError(f"an error reply is malformed: {error}", error.status) from None


def _trigger(op: Opcode) -> WireTrigger:
    trigger = request_trigger(op)
    if trigger is None:
        raise LocalProtocolError(f"{op.name} is never requested")
    return trigger
