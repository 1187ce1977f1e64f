"""A session's streams on the client's side: which one the worker has selected, and what copies under way still use.

The worker puts launches and copies where the last STREAM_SELECT said. It is sent in front of the first operation that
is meant for another stream, so who uses one stream alone sends none. It is relied on only once all of it went: an
interrupted send leaves the selection unknown, and the next operation selects again.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from gpulease.client.engine.attachment import Attached
from gpulease.client.engine.exchange import send
from gpulease.client.engine.fast_request import FastRequest
from gpulease.client.engine.lease import LeaseState
from gpulease.client.engine.steps import Limit, Procedure, Step
from gpulease.client.errors import GpuLeaseError, InvalidRequest
from gpulease.client.handles import Buffer, StreamHandle
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.fastpath import ARENA_COPY, HANDLE, STREAM_WAIT
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Ping
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.ring import Wanted

if TYPE_CHECKING:
    from gpulease.client.engine.session import SessionCore

T = TypeVar("T")
S = TypeVar("S", bound=StreamHandle)

DEFAULT: Final = 0
"""The number of the stream that is always there."""

_UNKNOWN: Final = -1

_FENCES: Final = frozenset({Opcode.SYNC})
"""What waits for everything where there are several streams."""


def not_recorded(doing: str) -> InvalidRequest:
    """Why something else than a launch or a copy is refused while a session records."""
    return InvalidRequest(
        f"{doing}: the session is recording a launch graph, which has launches and copies only",
        "Do it before or behind the `with` block",
    )


class Streamed(Attached):
    """An attached connection that knows of streams.

    Attributes:
        selected: The number of the stream that the worker puts things in now; another than any if that is not known.
        held: By stream, and there by place and size, the arrays that copies under way read or write. The worker may
            still do so when nobody else knows them any more, so the arena must not give their memory out again.
    """

    def __init__(self, lease: LeaseState, lock: Any, *, wanted: Wanted, patience: SpinPolicy) -> None:
        super().__init__(lease, lock, wanted=wanted, patience=patience)
        self.selected = DEFAULT
        self.held: dict[int, dict[tuple[int, int], memoryview]] = {}
        self._stream_sync = FastRequest(Opcode.STREAM_SYNC, HANDLE.size, self.session_id)

    def finish(self, failure: Failure) -> None:
        """See Attached. Without the arena nothing gives memory out again."""
        super().finish(failure)
        self.held.clear()

    # --- streams ---

    def stream_create(self, kind: type[S]) -> Procedure[S]:
        """A stream, as a face's kind."""
        reply = yield from self._operation("stream", self.ask(Opcode.STREAM_CREATE))
        self.fences = _FENCES
        return kind(self, reply.handle)

    def default_stream(self, kind: type[S]) -> S:
        """The stream that is always there, as a face's kind."""
        return kind(self, DEFAULT)

    def stream_destroy(self, stream: StreamHandle) -> Procedure[None]:
        """Let go of a stream; what it holds goes on, and so do its arrays until the session is waited for."""
        if stream.handle == DEFAULT:
            raise InvalidRequest("close: the default stream is always there")
        yield from self._free(stream, StreamHandle, "close")

    def stream_wait(self, stream: StreamHandle, other: StreamHandle | None) -> Procedure[None]:
        """Order what is put in a stream from now on behind what another holds."""
        self._check_recording("wait_for")
        pair = STREAM_WAIT.pack(self._number(stream, "wait_for"), self._number(other, "wait_for"))
        yield from self._operation("wait_for", send(self.channel, (self._quiet(Opcode.STREAM_WAIT, pair),), self.limit))

    def stream_sync(self, stream: StreamHandle) -> Procedure[None]:
        """Wait until all that a stream holds has ended."""
        self._check_recording("sync")
        number = self._number(stream, "sync")
        asking = self.ask(Opcode.STREAM_SYNC, HANDLE.pack(number))
        yield from self._operation("sync", self.releasing(asking, number))

    def stream_sync_promptly(self, stream: StreamHandle) -> Procedure[None] | None:
        """The same at once, under the session's lock: None if it is done, else what has still to be driven."""
        self._check_recording("sync")
        number = self._number(stream, "sync")
        session = cast("SessionCore", self)
        is_done = self._stream_sync.ask(session, HANDLE.pack(number))
        if is_done is None:
            return self.stream_sync(stream)
        if is_done:
            self.held.pop(number, None)
            return None
        return self._go_on("sync", self.releasing(self._stream_sync.rest(session), number))

    def fence(self, limit: Limit, stream: StreamHandle | None = None) -> Procedure[None]:
        """Wait for all streams, or for one, under the session's lock; raise what failed and was not raised before.

        A guest without kernels of its own asks what became of its requests: kernels and failures are the others'.
        """
        raised = self._raised
        if self.lease.token and not self.has_loaded:
            waiting = self.ask(Opcode.PING, build_body(Ping(0)), limit, "sync")
        elif stream is None:
            waiting = self.releasing(self.ask(Opcode.SYNC, limit=limit))
        else:
            asking = self.ask(Opcode.STREAM_SYNC, HANDLE.pack(stream.handle), limit)
            waiting = self.releasing(asking, stream.handle)
        try:
            yield from self._guarded("sync", waiting)
        except GpuLeaseError as error:
            # A context that a fault ended answers everything with that fault.
            if error.failure != raised:
                raise

    def releasing(self, procedure: Procedure[T], number: int | None = None) -> Procedure[T]:
        """Wait for a stream, or for all of them, under the session's lock: their copies are done then."""
        result = yield from procedure
        if number is None:
            self.held.clear()
            self.lent.clear()
        else:
            self.held.pop(number, None)
        return result

    # --- what goes into them ---

    def on(self, stream: StreamHandle | None, procedure: Procedure[T]) -> Procedure[T]:
        """Do something in a stream; under the session's lock."""
        number = self._number(stream, "mem_write or mem_read")
        if self.selected != number:
            self.selected = _UNKNOWN
            yield from self._send_quiet(self._select(number))
            self.selected = number
        return (yield from procedure)

    def begun(
        self, op: Opcode, stream: StreamHandle | None, buffer: Buffer, offset: int, view: memoryview
    ) -> Procedure[None] | None:
        """A copy between a buffer and the arena that is not waited for; None without a stream, or if it can't be so."""
        number = self._number(stream, "mem_write or mem_read")
        place = None if number == DEFAULT or self.arena is None else self.arena.offset_of(view)
        if place is None:
            return None
        return self._begin(op, number, ARENA_COPY.pack(buffer.handle, offset, place, len(view)), place, view)

    def _begin(self, op: Opcode, number: int, copy: bytes, place: int, view: memoryview) -> Generator[Step, Any, None]:
        # Before it is sent: an interrupted send may have done it.
        self.held.setdefault(number, {})[place, len(view)] = view
        yield from self._send_quiet(self._quiet(op, copy))

    def _send_quiet(self, frame: bytes) -> Procedure[None]:
        if not self.put(frame):
            yield from send(self.channel, (frame,), self.limit)

    def hand_over(
        self, stream: StreamHandle | None, number: int, frame: bytes, doing: str
    ) -> int | Generator[Step, Any, int]:
        """Hand over a quiet request for a stream at once: its number, or what has still to be driven to have it."""
        if stream is not None or self.selected:
            rest = self._put_in(stream, frame, doing)
        else:
            if self.dropped:
                frame += self.frees()
            rest = b"" if self.put(frame) else frame
        return self._go_on(doing, self._send_rest(number, rest)) if rest else number

    def _send_rest(self, number: int, frame: bytes) -> Generator[Step, Any, int]:
        yield from send(self.channel, (frame,), self.limit)
        return number

    def _put_in(self, stream: StreamHandle | None, frame: bytes, doing: str) -> bytes:
        """What is to be sent the long way, if it did not go at once."""
        number = self._number(stream, doing)
        if self.selected != number:
            frame = self._select(number) + frame
            self.selected = _UNKNOWN
        if self.dropped:
            frame += self.frees()
        if not self.put(frame):
            return frame
        self.selected = number
        return b""

    def _check_recording(self, doing: str) -> None:
        # A stream knows the session itself, not what stands in for it.
        if self.recorder is not None:
            raise not_recorded(doing)

    def _number(self, stream: StreamHandle | None, doing: str) -> int:
        if stream is None:
            return DEFAULT
        self._check(stream, StreamHandle, doing)
        return stream.handle

    def _select(self, number: int) -> bytes:
        return self._quiet(Opcode.STREAM_SELECT, HANDLE.pack(number))

    def _quiet(self, op: Opcode, payload: bytes) -> bytes:
        request_id = self.channel.link.connection.next_request_id()
        return build_frame(op, payload, request_id=request_id, session_id=self.session_id, flags=Flag.QUIET)
