"""A session's streams, the one that the worker has selected, and the launches and copies that go into each.

The worker puts launches and copies into the stream that the last STREAM_SELECT named. The client sends a STREAM_SELECT
before the first operation for another stream, so a program with one stream sends none. The client relies on a selection
only after the whole frame was sent: after an interrupted send the selection is unknown, and the next operation selects
again.
"""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final, NamedTuple, TypeVar

from gpulease.client.core.exchange import send
from gpulease.client.core.fast_request import DONE, FastRequest, Pending
from gpulease.client.core.operations import STREAMS_FENCES, RequestPipeline
from gpulease.client.core.waits import Deadline, MaybePending, Procedure
from gpulease.client.errors import GpuLeaseError, InvalidHandle, InvalidRequest
from gpulease.client.handles import Buffer, Handle
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.fastpath import ARENA_COPY, HANDLE, STREAM_WAIT
from gpulease.protocol.messages import EventPair, EventRecord, Ping

T = TypeVar("T")
S = TypeVar("S", bound="StreamHandle")

DEFAULT: Final = 0
"""Number of the default stream, which always exists."""

TRUSTED_NS: Final = 1_000_000
"""Time after a sync during which an unused session is assumed to be alive, in nanoseconds. In this time a sync with
nothing to wait for sends no request, so it may notice the end of a lease late, by at most this time."""

_UNKNOWN: Final = -1


class StreamHandle(Handle):
    """A queue of launches and copies; the base of both APIs' streams. Number 0 is the default stream."""

    __slots__ = ("_streams",)

    _free_op = Opcode.STREAM_DESTROY

    def __init__(self, streams: "Streams", handle: int) -> None:
        super().__init__(None, handle)
        self._streams = streams

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.handle}{'' if self.is_alive else ', gone'}>"

    def streams(self, subject: str) -> "Streams":
        """Return its session's streams. Raises InvalidHandle, naming the operation `subject`, if it was closed."""
        if self.owner is None:
            raise InvalidHandle(f"{subject}: stream {self.handle} is closed")
        return self._streams

    def drop(self) -> None:
        """Make the session's next operation free it, without waiting for a reply. Calling it twice is harmless."""
        owner, self.owner = self.owner, None
        if owner is not None and self.handle:
            owner.dropped.append((self._free_op, self.handle))

    def __del__(self) -> None:
        if getattr(self, "handle", DEFAULT) != DEFAULT:
            super().__del__()


class EventHandle(Handle):
    """The moment at which a stream has finished all work queued before the event; the base of both APIs' events."""

    __slots__ = ("_streams",)

    _free_op = Opcode.EVENT_DESTROY

    def __init__(self, streams: "Streams", handle: int) -> None:
        super().__init__(None, handle)
        self._streams = streams

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.handle}{'' if self.is_alive else ', gone'}>"


E = TypeVar("E", bound=EventHandle)


class PrintedText(NamedTuple):
    """The output of a session's kernels.

    Attributes:
        text: What they printed.
        is_lost: True if they printed more than MAX_PRINTED_BYTES: the later part is missing.
    """

    text: str
    is_lost: bool


PrintedCallback = Callable[[PrintedText], object]
"""Receives what kernels have printed."""


class Streams:
    """Makes, orders and waits for the streams of one session.

    Attributes:
        attachment: The session's connection.
        operations: The session's operations.
        selected: Number of the stream that the worker has selected; -1 while that is unknown.
    """

    def __init__(self, operations: RequestPipeline) -> None:
        self.operations = operations
        self.attachment = operations.attachment
        self.selected = DEFAULT
        self._last_event = 0
        # The last request that a sync found finished, and the time until which the session is assumed to be alive.
        self._ended_id = self._ended_until_ns = 0
        self._sync = FastRequest(operations, Opcode.SYNC)
        self._stream_sync = FastRequest(operations, Opcode.STREAM_SYNC, HANDLE.size)

    # --- making and freeing streams ---

    def create(self, kind: type[S]) -> Procedure[S]:
        """Make a stream of the class `kind`. Raises InvalidRequest while the session records."""
        self.operations.check_recording("stream")
        return self._create(kind)

    def _create(self, kind: type[S]) -> Procedure[S]:
        # With a second stream, the reply to a read no longer shows that all other work has ended.
        def created(reply: Any) -> S:
            self.operations.fences = STREAMS_FENCES
            return kind(self, reply.handle)

        making = self.operations.make(Opcode.STREAM_CREATE, b"", Opcode.STREAM_DESTROY, created)
        return (yield from self.operations.do("stream", making))

    def default(self, kind: type[S]) -> S:
        """Return the default stream as an object of the class `kind`."""
        stream = kind(self, DEFAULT)
        stream.owner = self.attachment
        return stream

    def destroy(self, stream: StreamHandle) -> Procedure[None]:
        """Free a stream. Its queued work still runs, and its arrays stay lent until a sync."""
        if stream.handle == DEFAULT:
            raise InvalidRequest("close: the default stream can't be closed")
        yield from self.operations.free_unless_ended(stream, StreamHandle)

    # --- order ---

    def wait_for(self, stream: StreamHandle, other: StreamHandle | None) -> MaybePending[None]:
        """Make a stream's later launches and copies wait for all work that is now queued in another stream.

        The request is sent immediately, under the session's lock.
        """
        self._check_recording("wait_for")
        operations = self.operations
        self.attachment.check_open("wait_for")
        # Send a quiet request: the caller need not wait for the worker, and a later reply reports a failure.
        pair = STREAM_WAIT.pack(self.number(stream, "wait_for"), self.number(other, "wait_for"))
        frame = operations.quiet_frame(Opcode.STREAM_WAIT, pair)
        if operations.put(frame):
            return None
        return operations.go_on("wait_for", send(self.attachment.channel, (frame,), operations.deadline))

    def record(self, stream: StreamHandle, kind: type[E]) -> Procedure[E]:
        """Record an event of the class `kind` in a stream, in order with the stream's launches."""
        self._check_recording("event")
        self.attachment.require(Opcode.EVENT_RECORD, "event")
        return (yield from self.operations.do("event", self._record(self.number(stream, "event"), kind)))

    def _record(self, number: int, kind: type[E]) -> Procedure[E]:
        self._last_event += 1
        body = build_body(EventRecord(number, self._last_event))
        # The client numbers events, so that recording one needs no reply. The event gets its owner when its frame is
        # queued: from then on, it has to be freed when its last reference is dropped.
        event = kind(self, self._last_event)

        def note() -> None:
            event.owner = self.attachment

        yield from self.operations.send_noting(self.operations.quiet_frame(Opcode.EVENT_RECORD, body), note)
        return event

    def printed(self) -> Procedure[PrintedText]:
        """Wait for all streams, and return what kernels have printed since the last call."""
        self._check_recording("printed")
        self.attachment.require(Opcode.PRINTED, "printed")
        asking = self.operations.ask(Opcode.PRINTED, operation="printed")
        reply = yield from self.operations.do("printed", self._taking_back(asking))
        return PrintedText(reply.data.decode(errors="replace"), bool(reply.is_lost))

    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> Procedure[float]:
        """Wait for two events; returns the milliseconds from the first to the second."""
        operation, operations = "elapsed_ms", self.operations
        self._check_recording(operation)
        # Both must be this session's: another session's event number would name an unrelated event here.
        for event in (start, end):
            operations.check(event, EventHandle, operation)
        pair = build_body(EventPair(start.handle, end.handle))
        reply = yield from operations.do(operation, operations.ask(Opcode.EVENT_ELAPSED, pair, operation=operation))
        return float(reply.nanoseconds / 1e6)

    def sync(self) -> Procedure[None]:
        """Wait until all streams have finished. Raises InvalidRequest while the session records."""
        self.operations.check_recording("sync")
        return self.operations.do("sync", self._taking_back(self.operations.ask(Opcode.SYNC)))

    def sync_at_once(self) -> MaybePending[None]:
        """`sync`, tried immediately, under the session's lock."""
        attachment = self.attachment
        connection = attachment.connection
        # Try three ways, the cheapest first. 1. Without a request since the last sync, all work has ended, and the
        # session was alive moments ago. 2. The shared sync word, without a frame. 3. A SYNC request.
        if attachment.has_sync_word:
            if (
                connection.last_request_id == self._ended_id
                and monotonic_ns() < self._ended_until_ns
                and attachment.end is None
                and attachment.lease.end_failure is None
                and not attachment.dropped
                and attachment.recording is None
            ):
                return None
            if attachment.is_at_rest and attachment.channel.await_work(connection.next_request_id()):
                self._note_end()
                return None
        outcome = self._sync.ask()
        # The reply came at once: everything before it has ended.
        if outcome is DONE:
            self._note_end()
            return None
        if isinstance(outcome, Pending):
            # The reply is late; wait for it, then take the lent arrays back.
            return self.operations.go_on("sync", self._taking_back(outcome.rest))
        return self.sync()

    def _note_end(self) -> None:
        """Record that the work of all requests so far has ended without failure."""
        operations, attachment = self.operations, self.attachment
        # If no request comes before the next sync, that sync needs only these values to return.
        self._ended_id = operations.acknowledged_id = attachment.connection.last_request_id
        self._ended_until_ns = monotonic_ns() + TRUSTED_NS
        if operations.freed:
            operations.settle(None, "")
        if attachment.lent.is_used:
            attachment.lent.take_back()

    def sync_one(self, stream: StreamHandle) -> Procedure[None]:
        """Wait until one stream has finished all of its queued work."""
        self._check_recording("sync")
        number = self.number(stream, "sync")
        asking = self.operations.ask(Opcode.STREAM_SYNC, HANDLE.pack(number))
        yield from self.operations.do("sync", self._taking_back(asking, number))

    def sync_one_at_once(self, stream: StreamHandle) -> MaybePending[None]:
        """`sync_one`, tried immediately, under the session's lock."""
        self._check_recording("sync")
        number = self.number(stream, "sync")
        outcome = self._stream_sync.ask(HANDLE.pack(number))
        if outcome is DONE:
            self.attachment.lent.take_back(number)
            return None
        if isinstance(outcome, Pending):
            return self.operations.go_on("sync", self._taking_back(outcome.rest, number))
        return self.sync_one(stream)

    def fence(self, deadline: Deadline, stream: StreamHandle | None = None) -> Procedure[None]:
        """Wait for all streams, or for one, under the session's lock; raise a failure that was not raised before.

        A session that was opened by token and loaded no module waits for its own requests only, because all kernels,
        and their failures, belong to other sessions.
        """
        # A failure that was raised already is not raised again at the end of the block.
        operations, raised = self.operations, self.attachment.last_raised
        # A PING is answered in order, so its reply shows that this connection's own requests are done.
        if self.attachment.token and not self.attachment.has_loaded:
            waiting = operations.ask(Opcode.PING, build_body(Ping(0)), deadline, "sync")
        elif stream is None:
            waiting = self._taking_back(operations.ask(Opcode.SYNC, deadline=deadline))
        else:
            asking = operations.ask(Opcode.STREAM_SYNC, HANDLE.pack(stream.handle), deadline)
            waiting = self._taking_back(asking, stream.handle)
        try:
            yield from operations.guarded("sync", waiting)
        except GpuLeaseError as error:
            # After a fault that ended the context, every request is answered with that fault.
            if error.failure != raised:
                raise

    def _taking_back(self, waiting: Procedure[T], number: int | None = None) -> Procedure[T]:
        """Wait for a stream, or for all of them; then take back the arrays that their copies used."""
        result = yield from waiting
        if number is None and self.operations.acknowledged_id == self.attachment.connection.last_request_id:
            self._note_end()
        else:
            self.attachment.lent.take_back(number)
        return result

    # --- launches and copies in them ---

    def run_in(self, stream: StreamHandle | None, procedure: Procedure[T]) -> Procedure[T]:
        """Execute an operation in a stream, under the session's lock."""
        number = self.number(stream, "mem_write or mem_read")
        if self.selected != number:
            # The selected stream is unknown until the whole frame was sent, because an interrupt may come in between.
            self.selected = _UNKNOWN
            yield from self.operations.send_frames(self._select(number))
            self.selected = number
        return (yield from procedure)

    def begin_copy(
        self, op: Opcode, stream: StreamHandle | None, buffer: Buffer, offset: int, view: memoryview
    ) -> Procedure[None] | None:
        """Return the procedure that starts a copy with the arena; None without a stream, or for other memory."""
        # Only a copy to or from the arena can continue after the call: the caller may reuse any other memory as soon as
        # the call returns.
        number, arena = self.number(stream, "mem_write or mem_read"), self.attachment.arena
        place = None if number == DEFAULT or arena is None else arena.offset_of(view)
        if place is None:
            return None
        return self._begin(op, number, ARENA_COPY.pack(buffer.handle, offset, place, len(view)), place, view)

    def _begin(self, op: Opcode, number: int, copy: bytes, place: int, view: memoryview) -> Procedure[None]:
        # Lend the array before sending: an interrupted send may have started the copy.
        self.attachment.lent.lend(number, place, view)
        yield from self.operations.send_frames(self.operations.quiet_frame(op, copy))

    def hand_over(self, stream: StreamHandle | None, number: int, frame: bytes, operation: str) -> MaybePending[int]:
        """Queue the quiet request `number` for a stream, under the session's lock; the result is that number.

        Args:
            stream: The stream; None for the default one.
            number: The request id in the frame.
            frame: The request.
            operation: The operation, for messages.
        """
        # Select the stream first if the worker has selected another one, or if its selection is unknown.
        if stream is not None or self.selected != DEFAULT:
            unsent = self._put_in(stream, frame, operation)
        else:
            unsent = b"" if self.operations.put(frame) else frame
        # Send the launch first, then the frees that are due.
        if self.attachment.dropped and not unsent:
            self.operations.try_queue_frees()
        return self.operations.go_on(operation, self._send_rest(number, unsent)) if unsent else number

    def _send_rest(self, number: int, frame: bytes) -> Procedure[int]:
        yield from send(self.attachment.channel, (frame,), self.operations.deadline)
        return number

    def _put_in(self, stream: StreamHandle | None, frame: bytes, operation: str) -> bytes:
        """Queue a frame in a stream. Returns the bytes that remain to be sent, empty if all were queued."""
        number = self.number(stream, operation)
        if self.selected != number:
            # Both frames go together: no other launch can come between selection and launch.
            frame = self._select(number) + frame
            self.selected = _UNKNOWN
        if not self.operations.put(frame):
            return frame
        self.selected = number
        return b""

    def number(self, stream: StreamHandle | None, operation: str) -> int:
        """Return a stream's number; None means the default stream. Raises InvalidHandle."""
        if stream is None:
            return DEFAULT
        self.operations.check(stream, StreamHandle, operation)
        return stream.handle

    def _select(self, number: int) -> bytes:
        return self.operations.quiet_frame(Opcode.STREAM_SELECT, HANDLE.pack(number))

    def _check_recording(self, operation: str) -> None:
        # A stream refers to the session itself, not to the recording that stands in for it.
        if self.attachment.recording is not None:
            raise not_recorded(operation)


def not_recorded(operation: str) -> InvalidRequest:
    """Return the error for any operation but a launch or a copy while a session records."""
    return InvalidRequest(
        f"{operation}: the session is recording a launch graph, which can contain only launches and copies",
        "Do it before or after the `with` block",
    )
