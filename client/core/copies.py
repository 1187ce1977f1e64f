"""A session's copies to and from device memory: in chunks, pipelined, and without an extra copy in the client.

A copy takes one of four ways. A small write is a quiet frame. A small read is a `SmallRead`. An array in the arena
(`GpuSession.empty`) is copied in place by the worker. Larger copies of ordinary memory go through a part of the arena
(`staged_copies`) or, without an arena, are a pipeline of MEM_WRITEs or MEM_READs.
"""

import struct
from collections import deque
from typing import Any, Final, Protocol

from gpulease.client.core.exchange import receive, send
from gpulease.client.core.fast_request import Done, FastRequest, NotSent, Outcome, SmallRead
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.refused_regions import RefusedRegions
from gpulease.client.core.staged_copies import STAGED_FROM_BYTES, Staging
from gpulease.client.core.streams import StreamHandle, Streams
from gpulease.client.core.waits import MaybePending, Procedure
from gpulease.client.errors import InvalidRequest
from gpulease.client.handles import Buffer
from gpulease.client.memory_views import flat_view, flattened, readable_view, writable_bytes
from gpulease.client.numbers import integer
from gpulease.client.texts import quoted
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.fastpath import ARENA_COPY, mem_read_frame, mem_write_prefix, pack_quiet_write
from gpulease.protocol.messages import Body

SMALL_READ_BYTES: Final = 32 << 10
"""Largest read that waits for its reply by spinning; the ring has room for much more."""

READ_WINDOW: Final = 4
"""Number of MEM_READs in flight: enough for the worker to copy a chunk while the client receives the one before."""

COPY_BYTES_PER_NS: Final = 20
"""Rate of a slow bus. When the client waits for the reply to an arena copy, it spins for the time that the copy takes
at this rate, in addition to its usual spin."""

MAX_COPY_SPIN_NS: Final = 1_000_000
"""Longest additional spin for an arena copy, in nanoseconds. A spin keeps the tenant's other threads from running, and
a sleep hardly delays a copy that takes longer than this.
"""


class CopyCommands(Protocol):
    """The copy operations, which both a session and a recording implement."""

    def write(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None = None) -> MaybePending[None]:
        """Copy bytes to the device, under the session's lock."""

    def read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: StreamHandle | None = None
    ) -> Procedure[Any]:
        """Copy bytes from the device into `into`, or into new bytes if that is None; returns them."""

    def read_at_once(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> MaybePending[Any]:
        """Like `read`, under the session's lock, with a fast request if possible.

        Returns None if `into` is filled; else a procedure, whose result is None after a fast request, or that of
        `read`.
        """


class Copies(CopyCommands):
    """The copies of one session, in all four ways."""

    def __init__(self, operations: RequestPipeline, streams: Streams, refused: RefusedRegions) -> None:
        self._operations = operations
        self._refused = refused
        self._attachment = operations.attachment
        self._session_bytes = operations.attachment.session_id.to_bytes(16)
        self._streams = streams
        self._arena_write = FastRequest(operations, Opcode.ARENA_WRITE, ARENA_COPY.size)
        self._arena_read = FastRequest(operations, Opcode.ARENA_READ, ARENA_COPY.size)
        self._small_read = SmallRead(operations)
        self._staging: Staging | None = None
        self._attachment.at_end.append(self._close_staging)

    # --- to the device ---

    def write(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None = None) -> MaybePending[None]:
        """Copy bytes to the device, under the session's lock."""
        attachment = self._attachment
        # The fast path makes all checks here in one expression. Unusual cases take the general path, which also reports
        # errors.
        if (
            type(buffer) is Buffer
            and buffer.owner is attachment
            and type(offset) is int
            and attachment.end is None
            and attachment.lease.end_failure is None
            and not attachment.dropped
            and not self._streams.selected
            and stream is None
        ):
            try:
                view = flat_view(data)
                if 0 < len(view) <= attachment.quiet_bytes and 0 <= offset <= buffer.size_bytes - len(view):
                    # The frame is queued; a worker's failure is reported with a later reply.
                    connection = attachment.connection
                    number = connection.last_request_id = connection.last_request_id + 1
                    prefix = pack_quiet_write(number, self._session_bytes, buffer.handle, offset, len(view))
                    if self._operations.put(prefix, view):
                        return None
                # The write is too large for a quiet frame. A fast request is possible only if the data is in the arena.
                elif attachment.arena is not None:
                    return self._write_from_arena(buffer, offset, data)
            except (TypeError, ValueError, struct.error):
                pass  # not contiguous, or invalid: the general path reports it
        return self._operations.guarded("mem_write", self._write_checked(buffer, offset, data, stream))

    def _write_checked(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None) -> Procedure[None]:
        self._operations.check(buffer, Buffer, "mem_write")
        self._refused.check_copy(buffer, "mem_write")
        source = readable_view(data, "mem_write")
        check_range(buffer, offset, source.nbytes, "mem_write")
        if source.nbytes:
            view = flattened(source)
            pending = self._streams.begin_copy(Opcode.ARENA_WRITE, stream, buffer, offset, view)
            yield from self._streams.run_in(stream, pending or self._write(buffer, offset, view))

    def _write_from_arena(self, buffer: Buffer, offset: int, data: Any) -> MaybePending[None]:
        # A fast request has three outcomes: not sent, done, or waiting for a late reply.
        outcome = self._ask_arena(self._arena_write, buffer, offset, data, None)
        if isinstance(outcome, NotSent):
            return self._operations.guarded("mem_write", self._write_checked(buffer, offset, data, None))
        return None if isinstance(outcome, Done) else self._operations.go_on("mem_write", outcome.rest)

    def _write(self, buffer: Buffer, offset: int, data: memoryview) -> Procedure[None]:
        attachment = self._attachment
        # Choose by place and size: the worker copies straight from the arena, unless a quiet frame has room for the
        # data; large writes go through staging slots in the arena; small ones are one quiet frame; the rest are sent in
        # chunks.
        place = self._arena_offset_of(data) if len(data) > attachment.quiet_bytes else None
        if place is not None:
            copy = ARENA_COPY.pack(buffer.handle, offset, place, len(data))
            yield from self._arena_write.do(copy, spin_ns(len(data)))
        elif len(data) >= STAGED_FROM_BYTES and (staging := self._ready_staging()) is not None:
            yield from staging.write(buffer.handle, offset, data)
        elif len(data) <= attachment.quiet_bytes:
            # The data is small enough to be copied into the ring or the outbox before this returns.
            parts = (self._quiet_prefix(buffer, offset, data), data)
            yield from send(attachment.channel, parts, self._operations.deadline)
        else:
            yield from self._write_chunks(buffer, offset, data)

    def _write_chunks(self, buffer: Buffer, offset: int, data: memoryview) -> Procedure[None]:
        """Send MEM_WRITEs of one chunk each. All but the last are quiet, and the last one's reply answers for all."""
        attachment, operations = self._attachment, self._operations
        link, deadline = attachment.channel.link, operations.deadline
        # Collect the quiet requests of this copy. A failure that names one of them belongs to this copy, not to an
        # earlier operation.
        own_requests: list[int] = []
        first_id = link.connection.last_request_id + 1
        for at in range(0, len(data), attachment.chunk_bytes):
            piece = data[at : at + attachment.chunk_bytes]
            is_last = at + len(piece) == len(data)
            # Only the last request has a reply. If a quiet one fails, this reply reports it.
            if is_last:
                request_id = link.expect(Opcode.MEM_WRITE)
            else:
                request_id = link.connection.next_request_id()
                own_requests.append(request_id)
            numbers = {"request_id": request_id, "session_id": attachment.session_id}
            prefix = mem_write_prefix(buffer.handle, offset + at, len(piece), **numbers, quiet=not is_last)
            yield from send(attachment.channel, (prefix, piece), deadline)
        # The one reply for all chunks reports their first failure.
        operations.settle((yield from receive(attachment.channel, request_id, deadline)), "mem_write", own_requests)
        operations.acknowledge(Opcode.MEM_WRITE, request_id, first_id)

    def _quiet_prefix(self, buffer: Buffer, offset: int, data: memoryview) -> bytes:
        """Return the part of a quiet write's frame that precedes the data."""
        attachment = self._attachment
        number = attachment.connection.next_request_id()
        return mem_write_prefix(
            buffer.handle, offset, len(data), request_id=number, session_id=attachment.session_id, quiet=True
        )

    # --- from the device ---

    def read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: StreamHandle | None = None
    ) -> Procedure[Any]:
        """Copy bytes from the device into `into`, or into new bytes if that is None; returns them."""
        self._operations.check(buffer, Buffer, "mem_read")
        self._refused.check_copy(buffer, "mem_read")
        check_range(buffer, offset, nbytes, "mem_read")
        # Without `into`, read into a new bytearray, and return its bytes at the end.
        owned = bytearray(nbytes) if into is None else None
        target = writable_bytes(into if owned is None else owned, nbytes, "mem_read")
        if nbytes:
            pending = self._streams.begin_copy(Opcode.ARENA_READ, stream, buffer, offset, target)
            copy = pending or self._read(buffer, offset, target)
            yield from self._operations.do("mem_read", self._streams.run_in(stream, copy))
        return into if owned is None else bytes(owned)

    def read_at_once(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> MaybePending[Any]:
        """Like `read`, under the session's lock, with a fast request if possible.

        Returns None if `into` is filled; else a procedure, whose result is None after a fast request, or that of
        `read`.
        """
        outcome: Outcome[None]
        # A successful reply to either request begins with, or consists of, bytes known in advance. So try a fast
        # request first: it only compares them.
        if type(nbytes) is int and 0 < nbytes <= SMALL_READ_BYTES:
            outcome = self._ask_small(buffer, offset, nbytes, into)
        else:
            outcome = self._ask_arena(self._arena_read, buffer, offset, into, nbytes)
        # `into` is filled; nothing else to return.
        if isinstance(outcome, Done):
            return None
        if isinstance(outcome, NotSent):
            return self.read(buffer, offset, nbytes, into)
        return self._operations.go_on("mem_read", self._fill_late(outcome.rest))

    def _fill_late(self, remaining: Procedure[Any]) -> Procedure[None]:
        yield from remaining

    def _ask_small(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> Outcome[None]:
        if (
            type(buffer) is Buffer
            and buffer.owner is self._attachment
            and type(offset) is int
            and 0 <= offset <= buffer.size_bytes - nbytes
            and not self._streams.selected
        ):
            try:
                view = flat_view(into)
                if not view.readonly and len(view) >= nbytes:
                    return self._small_read.ask(buffer.handle, offset, view[:nbytes])
            except (TypeError, ValueError, struct.error):
                pass  # `read` reports the mistake
        return NotSent()

    def _read(self, buffer: Buffer, offset: int, target: memoryview) -> Procedure[None]:
        # Choose by place and size: the worker copies straight into the arena; large reads go through staging slots in
        # the arena; the rest are read in chunks through the socket or ring.
        place = self._arena_offset_of(target)
        if place is not None:
            copy = ARENA_COPY.pack(buffer.handle, offset, place, len(target))
            yield from self._arena_read.do(copy, spin_ns(len(target)))
        elif len(target) >= STAGED_FROM_BYTES and (staging := self._ready_staging()) is not None:
            yield from staging.read(buffer.handle, offset, target)
        else:
            yield from self._read_chunks(buffer, offset, target)

    def _read_chunks(self, buffer: Buffer, offset: int, target: memoryview) -> Procedure[None]:
        """Send MEM_READs of one chunk each, a few in flight at a time, and receive the data in place."""
        attachment, operations = self._attachment, self._operations
        # Requests in flight, the oldest first, and the failures of those that were answered.
        in_flight: deque[int] = deque()
        failures: list[Failure] = []
        for at in range(0, len(target), attachment.chunk_bytes):
            # Keep the window full, but take replies in order: the link receives data for the oldest one first.
            if len(in_flight) == READ_WINDOW:
                yield from self._take(in_flight.popleft(), failures)
            # After a failure send no further requests, but receive the replies to those in flight.
            if failures:
                break
            piece = target[at : at + attachment.chunk_bytes]
            request_id = attachment.channel.link.expect(Opcode.MEM_READ, piece)
            numbers = {"request_id": request_id, "session_id": attachment.session_id}
            frame = mem_read_frame(buffer.handle, offset + at, len(piece), **numbers)
            yield from send(attachment.channel, (frame,), operations.deadline)
            in_flight.append(request_id)
        while in_flight:
            yield from self._take(in_flight.popleft(), failures)
        # Report the first failure. It may belong to an earlier launch, although the later reads have succeeded.
        operations.settle(failures[0] if failures else None, "mem_read")
        operations.acknowledge(Opcode.MEM_READ, attachment.connection.last_request_id)

    def _take(self, request_id: int, failures: list[Failure]) -> Procedure[None]:
        result: Body | Failure = yield from receive(self._attachment.channel, request_id, self._operations.deadline)
        if isinstance(result, Failure):
            failures.append(result)

    # --- through the arena ---

    def _ask_arena(
        self, request: FastRequest, buffer: Buffer, offset: int, data: Any, nbytes: int | None
    ) -> Outcome[None]:
        """Ask for a copy from or to an array of the arena; NotSent if the array is elsewhere or anything is wrong."""
        arena = self._attachment.arena
        if (
            arena is None
            or data is None
            or self._streams.selected
            or type(buffer) is not Buffer
            or buffer.owner is not self._attachment
        ):
            return NotSent()
        try:
            # Leave the caller's mistakes to the general path, which reports them.
            view = memoryview(data)
            place = arena.offset_of(view)
            size = view.nbytes if nbytes is None else nbytes
            if place is None or not 0 < size <= view.nbytes or not 0 <= offset <= buffer.size_bytes - size:
                return NotSent()
            copy = ARENA_COPY.pack(buffer.handle, offset, place, size)
        except (TypeError, ValueError, struct.error):
            return NotSent()
        return request.ask(copy, spin_ns(size))

    def _arena_offset_of(self, view: memoryview) -> int | None:
        """Return the offset of a view's bytes in the arena; None if they are elsewhere."""
        arena = self._attachment.arena
        return None if arena is None else arena.offset_of(view)

    def _ready_staging(self) -> Staging | None:
        """Return the slots in the arena; None without an arena, or if they do not fit into it."""
        arena = self._attachment.arena
        if arena is None:
            return None
        if self._staging is None:
            self._staging = Staging(arena, self._operations, self._arena_write, self._arena_read)
        return self._staging if self._staging.is_ready else None

    def _close_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()


def spin_ns(nbytes: int) -> int:
    """Return how long to spin for an arena copy of `nbytes`, in nanoseconds: at most `MAX_COPY_SPIN_NS`."""
    return min(nbytes // COPY_BYTES_PER_NS, MAX_COPY_SPIN_NS)


def check_range(buffer: Buffer, offset: int, nbytes: int, operation: str) -> None:
    """Raise InvalidHandle or InvalidRequest unless the bytes are all inside the buffer."""
    # Usually both are plain ints, which is the fastest check.
    if type(offset) is not int or type(nbytes) is not int or nbytes < 0:
        try:
            offset, nbytes = integer(offset), integer(nbytes)
            if nbytes < 0:
                raise TypeError
        except TypeError:
            raise InvalidRequest(
                f"{operation}: offset and length must be numbers of bytes, not {quoted(offset)} and {quoted(nbytes)}"
            ) from None
    buffer.check_range(offset, nbytes, operation)
