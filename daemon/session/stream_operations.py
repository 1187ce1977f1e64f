"""A session's streams: the numbers that each connection uses for its streams, and the stream that it has selected.

Every connection has its own streams, which end with it. Whenever another stream is selected, the context is notified,
so launches and copies need not name a stream.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import DriverError, DriverEvent
from gpulease.daemon.session.ledger import invalid_handle
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fastpath import HANDLE, STREAM_WAIT, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_EVENTS, MAX_STREAMS
from gpulease.protocol.messages import Elapsed, EventPair, EventRecord, Handle, StreamWait
from gpulease.protocol.opcodes import Opcode, Status

DEFAULT: Final = 0
"""The default stream's number, on the wire and in the driver. This stream always exists."""


class ConnectionStreams:
    """The streams of a connection, and the token by which its requests are served.

    Attributes:
        known: The driver's stream by the number on the wire.
        selected: The number, on the wire, of the stream that launches and copies go into.
        events: The driver's event by the number on the wire.
        has_second_token: Whether the connection was attached with a second token.
        uses_second_token: Whether its requests are served by that token.
    """

    __slots__ = ("events", "has_second_token", "known", "selected", "uses_second_token")

    def __init__(self) -> None:
        self.selected = DEFAULT
        self.known = {DEFAULT: DEFAULT}
        self.events: dict[int, DriverEvent] = {}
        self.has_second_token = self.uses_second_token = False


class StreamOperations(OperationHandler):
    """Serves the STREAM operations.

    Attributes:
        current: The streams of the connection that is being served.
        live: The driver's numbers of all streams of the session.
        on_select: Called after another stream has been selected.
        on_destroy: Called with the driver's number of a stream that is about to be destroyed.
    """

    def __init__(self, resources: SessionResources) -> None:
        super().__init__(resources)
        self.live = {DEFAULT}
        self.on_select: Callable[[], None] = lambda: None
        self.on_destroy: Callable[[int], None] = lambda _stream: None
        self._stream_count = 0
        self._event_count = 0
        self._last_number = DEFAULT
        self.current = ConnectionStreams()

    @property
    def last_number(self) -> int:
        """The highest number that a stream ever had on the wire."""
        return self._last_number

    def event_times(self, connection: ConnectionStreams) -> tuple[tuple[int, int], ...]:
        """Return the number and the time of each event of a connection. All events must be done.

        Raises DriverError.
        """
        times_ns = self._context.event_times_ns(list(connection.events.values()))
        return tuple(zip(connection.events, times_ns, strict=True))

    def restore(
        self,
        connection: ConnectionStreams,
        numbers: Iterable[int],
        selected: int,
        events: Collection[tuple[int, int]] = (),
    ) -> None:
        """Restore the streams and events that a connection had in another process, by their numbers on the wire.

        Raises Refused or DriverError.
        """
        if self._event_count + len(events) > MAX_EVENTS:
            raise DriverError(f"there are more than {MAX_EVENTS} events")
        connection.events |= {number: self._context.adopt_event(time_ns) for number, time_ns in events}
        self._event_count += len(connection.events)
        for number in numbers:
            connection.known[number] = self._make()
            self._last_number = max(self._last_number, number)
        if selected in connection.known:
            connection.selected = selected

    def restore_last_number(self, number: int) -> None:
        """Set the highest number that a stream had in another process, so that no number is given out twice."""
        self._last_number = max(self._last_number, number)

    def switch_to(self, connection: ConnectionStreams) -> None:
        if connection is not self.current:
            self.current = connection
            self._select(connection.known[connection.selected])

    def release(self, connection: ConnectionStreams) -> None:
        """Destroy all streams of a connection that has ended, and forget its events."""
        self._event_count -= len(connection.events)
        connection.events.clear()
        # All connections share the default stream, so keep it.
        for number in [number for number in connection.known if number != DEFAULT]:
            self._destroy(connection, number)

    @serves(Opcode.STREAM_CREATE)
    def create(self, frame: Frame) -> bytes:
        if frame.payload:
            raise BodyError("STREAM_CREATE takes no payload")
        if self._stream_count >= MAX_STREAMS:
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"the session has {MAX_STREAMS} streams, the maximum",
                    hint="Use fewer streams, and release those that you no longer need.",
                )
            )
        stream = self._make()
        # Numbers on the wire are never reused within a session; the driver's numbers may be.
        self._last_number += 1
        self.current.known[self._last_number] = stream
        return done(frame, Handle(self._last_number))

    def _make(self) -> int:
        # Charge before the driver makes the stream, because the context keeps the memory of streams.
        self._ledger.charge_streams(self._context.streams_bytes(self._stream_count + 1))
        self._record_usage()
        stream = self._context.stream_create()
        self._resources.may_have_grown = True
        self._stream_count += 1
        self.live.add(stream)
        return stream

    @serves(Opcode.STREAM_DESTROY)
    def destroy(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._stream(number)
        if number == DEFAULT:
            raise BodyError("the default stream can't be destroyed")
        self._destroy(self.current, number)
        return empty(frame)

    @serves(Opcode.STREAM_SELECT)
    def select(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        stream = self._stream(number)
        self.current.selected = number
        self._select(stream)
        return empty(frame)

    @serves(Opcode.USE_TOKEN)
    def use_token(self, frame: Frame) -> bytes:
        """Serve USE_TOKEN: check the connection's later requests against the token with this number."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        if number > 1 or (number and not self.current.has_second_token):
            raise Refused(
                Failure(
                    Status.INVALID_REQUEST,
                    f"the connection has no token with the number {number}",
                    hint="Attach with a second token; then the number 1 begins its use, and 0 ends it.",
                )
            )
        self.current.uses_second_token = bool(number)
        return empty(frame)

    def choose_anyway(self, frame: Frame) -> None:
        """Serve STREAM_SELECT or USE_TOKEN while the session skips other requests. An invalid one changes nothing."""
        try:
            if frame.op == Opcode.USE_TOKEN:
                self.use_token(frame)
            else:
                self.select(frame)
        except (BodyError, Refused):
            return

    @serves(Opcode.STREAM_WAIT)
    def wait(self, frame: Frame) -> bytes:
        number, other = parse_fixed(STREAM_WAIT, StreamWait, memoryview(frame.payload))
        self._context.stream_wait(self._stream(number), self._stream(other))
        return empty(frame)

    @serves(Opcode.STREAM_SYNC)
    def sync(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._context.stream_sync(self._stream(number), self._resources.check_sync)
        self._counters[Counter.SYNCS] += 1
        return empty(frame)

    @serves(Opcode.EVENT_RECORD)
    def record_event(self, frame: Frame) -> bytes:
        body = parse_body(EventRecord, frame.payload)
        stream, events = self._stream(body.stream), self.current.events
        # The client chooses the numbers. Recording an existing event again moves it.
        is_new = body.event not in events
        if is_new and self._event_count >= MAX_EVENTS:
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"the session has {MAX_EVENTS} events, the maximum",
                    hint="Release events that you no longer need.",
                )
            )
        # Count the event only after the driver has made it.
        events[body.event] = self._context.event(stream)
        self._event_count += is_new
        return empty(frame)

    @serves(Opcode.EVENT_ELAPSED)
    def elapsed(self, frame: Frame) -> bytes:
        """Serve EVENT_ELAPSED: wait for both events as a sync does."""
        body = parse_body(EventPair, frame.payload)
        # Both events must belong to this connection.
        pair = [self._event(number) for number in (body.start, body.end)]
        self._context.event_wait(pair, self._resources.check_sync)
        nanoseconds = self._context.elapsed_ns(*pair)
        if nanoseconds < 0:
            raise BodyError(f"event {body.end} happened {-nanoseconds} ns before event {body.start}: swap them")
        return done(frame, Elapsed(nanoseconds))

    @serves(Opcode.EVENT_DESTROY)
    def destroy_event(self, frame: Frame) -> bytes:
        """Serve EVENT_DESTROY. An unknown event is not an error if its record was skipped after a failure."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        if self.current.events.pop(number, None) is not None:
            self._event_count -= 1
        return empty(frame)

    def _event(self, number: int) -> DriverEvent:
        event = self.current.events.get(number)
        if event is None:
            raise invalid_handle(f"{number} is not an event of this connection")
        return event

    def _stream(self, number: int) -> int:
        stream = self.current.known.get(number)
        if stream is None:
            raise invalid_handle(f"{number} is not a stream of this connection")
        return stream

    def _destroy(self, connection: ConnectionStreams, number: int) -> None:
        stream = connection.known.pop(number)
        self.live.discard(stream)
        # Regions refer to streams by the driver's numbers, so make them forget this one before it can be reused.
        self.on_destroy(stream)
        self._context.stream_destroy(stream)
        self._stream_count -= 1
        # If the destroyed stream was selected, select the default stream.
        if connection.selected == number:
            connection.selected = DEFAULT
            if connection is self.current:
                self._select(DEFAULT)

    def _select(self, stream: int) -> None:
        self._context.stream_select(stream)
        # The region gate has cached what it admitted for the previous stream, so notify it.
        if stream != self._resources.stream:
            self._resources.stream = stream
            self.on_select()
