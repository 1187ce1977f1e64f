"""A session's streams: which numbers a connection knows them by, and which one it has selected.

Each connection has a place of its own: its streams are nobody else's, and go with it. The context is told which stream
is selected whenever that changes, so that launches and copies need not know of streams at all.
"""

from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.session.ledger import Operations, Refused, SessionResources, invalid_handle
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure
from gpulease.protocol.fastpath import HANDLE, STREAM_WAIT, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_STREAMS
from gpulease.protocol.messages import Handle, StreamWait
from gpulease.protocol.opcodes import Status

DEFAULT: Final = 0
"""The stream that is always there, by its number on the wire and by the driver's."""


class Place:
    """One connection's streams, and what its requests met.

    Attributes:
        selected: The number of the one that launches and copies go into.
        skipped_by: The failure for which a quiet request of the connection was skipped last, until it is told.
    """

    __slots__ = ("known", "selected", "skipped_by")

    def __init__(self) -> None:
        self.selected = DEFAULT
        self.known = {DEFAULT: DEFAULT}
        self.skipped_by: Failure | None = None


class StreamOperations(Operations):
    """See Operations.

    Attributes:
        place: The connection's that is served now.
    """

    def __init__(self, holdings: SessionResources) -> None:
        super().__init__(holdings)
        self._stream_count = 0
        self._last = DEFAULT
        self.place = Place()

    def sit(self, place: Place) -> None:
        """Serve this connection from now on."""
        if place is not self.place:
            self.place = place
            self._context.stream_select(place.known[place.selected])

    def leave(self, place: Place) -> None:
        """The connection is gone, and its streams with it."""
        for number in [number for number in place.known if number != DEFAULT]:
            self._let_go(place, number)

    def create(self, frame: Frame) -> bytes:
        """STREAM_CREATE."""
        if frame.payload:
            raise BodyError("STREAM_CREATE takes no payload")
        if self._stream_count >= MAX_STREAMS:
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"the session has {MAX_STREAMS} streams, the most allowed",
                    hint="Use fewer, and let go of those that are no longer needed.",
                )
            )
        self._ledger.keep_streams(self._context.streams_bytes(self._stream_count + 1))
        self._count()
        stream = self._context.stream_create()
        self._holdings.may_have_grown = True
        self._stream_count += 1
        self._last += 1
        self.place.known[self._last] = stream
        return done(frame, Handle(self._last))

    def destroy(self, frame: Frame) -> bytes:
        """STREAM_DESTROY."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._stream(number)
        if number == DEFAULT:
            raise BodyError("the default stream is always there")
        self._let_go(self.place, number)
        return empty(frame)

    def select(self, frame: Frame) -> bytes:
        """STREAM_SELECT."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        stream = self._stream(number)
        self.place.selected = number
        self._context.stream_select(stream)
        return empty(frame)

    def select_anyway(self, frame: Frame) -> None:
        """STREAM_SELECT where other requests would be skipped: one that is wrong changes nothing."""
        try:
            self.select(frame)
        except (BodyError, Refused):
            return

    def wait(self, frame: Frame) -> bytes:
        """STREAM_WAIT."""
        number, other = parse_fixed(STREAM_WAIT, StreamWait, memoryview(frame.payload))
        self._context.stream_wait(self._stream(number), self._stream(other))
        return empty(frame)

    def sync(self, frame: Frame) -> bytes:
        """STREAM_SYNC."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._context.stream_sync(self._stream(number), self._check_lease)
        self._counters[Counter.SYNCS] += 1
        return empty(frame)

    def _stream(self, number: int) -> int:
        stream = self.place.known.get(number)
        if stream is None:
            raise invalid_handle(f"{number} is not a stream of this connection's")
        return stream

    def _let_go(self, place: Place, number: int) -> None:
        self._context.stream_destroy(place.known.pop(number))
        self._stream_count -= 1
        if place.selected == number:
            place.selected = DEFAULT
            if place is self.place:
                self._context.stream_select(DEFAULT)
