"""A session's allocations, and copies between them and the host, which use the wire or the session's arena.

The arena is host memory that the client maps too, so that copies through it need no bytes on the wire. It is one sealed
memfd of a fixed size, made for the first client that asks, and it lives until the worker ends. The kernel allocates its
pages at first use, and the seal keeps any process from shortening it while it is mapped. Before a copy, the arena pins
the copied range, in extents as large as the copies: a pinned copy runs at the bus's speed, and pinning costs as much as
copying once. Pinned pages stay until the worker ends, so the arena's size bounds the host memory that a session can
hold.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session.connection import PinnedBuffers
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.replies import empty, handle_reply
from gpulease.protocol.errors import BodyError
from gpulease.protocol.fastpath import (
    ARENA_COPY,
    HANDLE,
    MEM_ALLOC,
    MEM_READ,
    data_prefix,
    parse_fixed,
    parse_mem_write,
)
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_DATA_BYTES
from gpulease.protocol.messages import ArenaCopy, Handle, MemAlloc, MemRead
from gpulease.protocol.opcodes import Opcode, Status

MIN_PINNED_READ_BYTES: Final = 64 << 10
"""Minimum size of a read for which the card copies directly into the pinned memory from which the reply is sent."""

PINNED_REPLY_BYTES: Final = DATA_CHUNK_BYTES + 4096
"""Size of that pinned memory: room for a reply that carries DATA_CHUNK_BYTES. The memory stays pinned, so larger
replies use ordinary memory."""


class MemoryOperations(OperationHandler):
    """Serves the MEM operations.

    Attributes:
        pinned_buffers: Pinned memory that connections may receive large writes into.
        on_first_read: Called before the session's first read.
    """

    def __init__(self, resources: SessionResources) -> None:
        super().__init__(resources)
        self.pinned_buffers = PinnedBuffers(resources.context)
        self.on_first_read: Callable[[], None] = lambda: None
        self._has_read = False
        self._reply = bytearray()
        self._pinned_reply: memoryview | None = None

    @serves(Opcode.MEM_ALLOC)
    def alloc(self, frame: Frame) -> bytes:
        (size_bytes,) = parse_fixed(MEM_ALLOC, MemAlloc, memoryview(frame.payload))
        ledger = self._ledger
        # Check the slice, then allocate: the driver may first have to release cached blocks.
        ledger.check_alloc(size_bytes)
        address = self._context.mem_alloc(size_bytes, ledger.cacheable_bytes(size_bytes), self._check_lease)
        ledger.add_allocation(address, size_bytes)
        self._record_usage()
        return handle_reply(frame, address)

    @serves(Opcode.MEM_FREE)
    def free(self, frame: Frame) -> bytes:
        (handle,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        # Refuse the handle of anything but an allocation before the driver is called.
        self._ledger.check_free(handle)
        self._context.mem_free(handle, self._check_lease)
        self._ledger.remove_allocation(handle)
        self._record_usage()
        return empty(frame)

    @serves(Opcode.MEM_REUSE)
    def reuse(self, frame: Frame) -> bytes:
        (handle,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.check_free(handle)
        # `reuse_allocation` notifies the dependents before the memory changes: they must not use the new allocation.
        self._context.mem_reuse(handle, self._ledger.reuse_allocation(handle), self._check_lease)
        self._ledger.show(handle)
        return empty(frame)

    @serves(Opcode.MEM_WRITE)
    def write(self, frame: Frame) -> bytes:
        handle, offset, data = parse_mem_write(memoryview(frame.payload))
        address = self._ledger.locate(handle, offset, len(data))
        # There are three ways: from ordinary memory, from pinned memory without a wait, and from pinned memory with a
        # wait.
        if data:
            pinned = self.pinned_buffers.buffer_of(data)
            if pinned is None:
                self._context.mem_write(address, data, self._check_lease)
            elif frame.flags:
                pinned.ticket = self._context.begin_write(address, data, self._check_lease)
            else:
                # The reply confirms this write and all earlier ones, so wait for the copy.
                self._context.write_pinned(address, data, self._check_lease)
        self._count_copy(len(data))
        self._ledger.show(handle)
        return empty(frame)

    @serves(Opcode.MEM_READ)
    def read(self, frame: Frame) -> bytes | memoryview:
        """Serve MEM_READ. The reply is in this object's own memory, and invalid from the next read on."""
        handle, offset, length = parse_fixed(MEM_READ, MemRead, memoryview(frame.payload))
        if length > MAX_DATA_BYTES:
            raise BodyError(f"one MEM_READ can read at most {MAX_DATA_BYTES} bytes, not {length}")
        address = self._ledger.locate(handle, offset, length)
        # Native code serves small reads from now on.
        if not self._has_read:
            self._has_read = True
            self.on_first_read()
        # Build the reply in place: the card copies the data directly into the memory from which the reply is sent.
        prefix = data_prefix(length, request_id=frame.request_id, session_id=frame.session_id)
        is_pinned = MIN_PINNED_READ_BYTES <= length <= DATA_CHUNK_BYTES
        reply = self._reply_memory(len(prefix) + length, is_pinned=is_pinned)
        reply[: len(prefix)] = prefix
        if is_pinned:
            self._context.read_pinned(address, reply[len(prefix) :], self._check_lease)
        elif length:
            self._context.mem_read(address, reply[len(prefix) :], self._check_lease)
        self._count_copy(length)
        self._ledger.show(handle)
        return reply

    def close(self) -> None:
        """Return all pinned memory to the host. The driver must have unpinned it before."""
        self.pinned_buffers.close()
        if self._pinned_reply is not None:
            self._pinned_reply.release()
            self._pinned_map.close()
            self._pinned_reply = None

    def _reply_memory(self, size_bytes: int, *, is_pinned: bool) -> memoryview:
        # Pinned memory is allocated once, with PINNED_REPLY_BYTES, and reused.
        if is_pinned:
            if self._pinned_reply is None:
                self._pinned_map = mmap.mmap(-1, PINNED_REPLY_BYTES)
                self._pinned_reply = memoryview(self._pinned_map)
                self._context.pin(self._pinned_reply)
            return self._pinned_reply[:size_bytes]
        # Ordinary memory grows to the largest reply so far.
        if len(self._reply) < size_bytes:
            self._reply = bytearray(size_bytes)
        return memoryview(self._reply)[:size_bytes]


MAX_ARENA_BYTES: Final = 1 << 30
"""Maximum size of a session's arena, whatever its client asks for. Otherwise a lease of one byte of VRAM could pin all
of the host's memory, and pinned pages can't be swapped out."""

GRANULE_BYTES: Final = 4 << 20
"""Minimum memory that is pinned by one call. Otherwise a tenant could make the driver keep a record per page.
native/serve.ll repeats this number."""

MAX_EXTENT_BYTES: Final = 256 << 20
"""Maximum memory that is pinned by one call. Pinning this much takes 12 ms, and the worker checks the lease between two
calls."""

Pin = Callable[[memoryview], None]


class SessionArena:
    """The worker's side of a session's arena.

    Attributes:
        fd: The memfd, to be sent to clients.
        size_bytes: Size of the arena, a multiple of GRANULE_BYTES.
    """

    def __init__(self, wanted_bytes: int, pin: Pin, fd: int = -1) -> None:
        """Make the arena. Raises OSError if the host has no memory for it, or if less than a granule is wanted.

        `fd`: The memfd of an arena that the session had in another process; it belongs to this object.
        """
        self.size_bytes = min(wanted_bytes, MAX_ARENA_BYTES) // GRANULE_BYTES * GRANULE_BYTES
        if not self.size_bytes:
            raise OSError(f"an arena must have at least {GRANULE_BYTES} bytes, not {wanted_bytes}")
        self._pin_memory = pin
        # By granule: the end of the pinned extent that contains it; 0 if the granule is not pinned. Native code reads
        # this as well.
        self._extent_ends = (ctypes.c_uint64 * (self.size_bytes // GRANULE_BYTES))()
        self.fd = sealed_memory("gpulease-arena", self.size_bytes) if fd < 0 else fd
        try:
            self._map = mmap.mmap(self.fd, self.size_bytes)
            self._view = memoryview(self._map)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def address(self) -> int:
        """The address at which this process maps it."""
        return address_of(self._map)

    @property
    def extents_address(self) -> int:
        """The address of `_extent_ends`, eight bytes for each granule."""
        return ctypes.addressof(self._extent_ends)

    def close(self) -> None:
        """Unmap and close the arena. The driver must have unpinned all of it before."""
        self._view.release()
        self._map.close()
        os.close(self.fd)

    def pieces(self, offset: int, length: int, check_lease: Callable[[], None]) -> Iterable[memoryview]:
        """Pin a range of the arena and return its bytes, cut at the ends of pinned extents.

        Raises BodyError if the range is not inside the arena, and the errors of `check_lease` between two extents.
        """
        # The range comes from the client, so check it before it is pinned.
        end = offset + length
        if end > self.size_bytes:
            raise BodyError(f"bytes {offset} to {end} are outside the arena of {self.size_bytes} bytes")
        self._pin(offset // GRANULE_BYTES, -(-end // GRANULE_BYTES), check_lease)
        # Most copies lie within one extent.
        if length and end <= self._extent_ends[offset // GRANULE_BYTES]:
            return (self._view[offset:end],)
        return self._cut(offset, end)

    def _cut(self, at: int, end: int) -> Iterator[memoryview]:
        # Split a copy that spans several extents, because each extent was pinned by itself.
        while at < end:
            extent_end = min(end, self._extent_ends[at // GRANULE_BYTES])
            yield self._view[at:extent_end]
            at = extent_end

    def _pin(self, first: int, last: int, check_lease: Callable[[], None]) -> None:
        """Pin each run of granules that is not pinned, from `first` to before `last`."""
        ends = self._extent_ends
        while first < last:
            # If the granule is pinned, skip to that extent's end. Otherwise gather granules up to the next pinned one.
            if ends[first]:
                first = ends[first] // GRANULE_BYTES
                continue
            after = first
            while after < min(last, first + MAX_EXTENT_BYTES // GRANULE_BYTES) and not ends[after]:
                after += 1
            # Pinning an extent takes milliseconds, so check the lease before each.
            check_lease()
            self._pin_memory(self._view[first * GRANULE_BYTES : after * GRANULE_BYTES])
            ends[first:after] = [after * GRANULE_BYTES] * (after - first)
            first = after


class ArenaOperations(OperationHandler):
    """The ARENA operations: copies between a session's allocations and its arena.

    Attributes:
        on_open: Called with the arena once it is made.
    """

    def __init__(self, resources: SessionResources) -> None:
        super().__init__(resources)
        self._arena: SessionArena | None = None
        self.on_open: Callable[[SessionArena], None] = lambda _arena: None

    def open(self, wanted_bytes: int) -> SessionArena:
        """Return the session's arena, made at the first call. Raises OSError."""
        if self._arena is None:
            self._arena = SessionArena(wanted_bytes, self._context.pin)
            self.on_open(self._arena)
        return self._arena

    @property
    def opened(self) -> SessionArena | None:
        return self._arena

    def adopt(self, fd: int, size_bytes: int) -> None:
        """Open the arena that the session had in another process. Raises OSError or ValueError."""
        self._arena = SessionArena(size_bytes, self._context.pin, fd)
        self.on_open(self._arena)

    def close(self) -> None:
        """Close the arena. The driver must have unpinned all of it before."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @serves(Opcode.ARENA_WRITE)
    def write(self, frame: Frame) -> bytes:
        """Serve ARENA_WRITE.

        A quiet request (one without a reply) only starts the copy. A later copy in its stream that has a reply, or a
        wait for the stream, waits for this copy as well.
        """
        self._copy(frame, self._context.begin_write if frame.flags else self._context.write_pinned)
        return empty(frame)

    @serves(Opcode.ARENA_READ)
    def read(self, frame: Frame) -> bytes:
        """Serve ARENA_READ; a quiet request only starts the copy, as in `write`."""
        self._copy(frame, self._context.begin_read if frame.flags else self._context.read_pinned)
        return empty(frame)

    def _copy(self, frame: Frame, copy: Callable[[int, memoryview, Callable[[], None]], object]) -> None:
        copied_bytes = 0
        for address, piece in self.pieces(memoryview(frame.payload)):
            copy(address, piece, self._check_lease)
            copied_bytes += len(piece)
        self._count_copy(copied_bytes)
        # The memory is pinned now, so native code may do the next such copy that has a reply.
        if not frame.flags:
            self._ledger.show(*HANDLE.unpack_from(frame.payload))

    def pieces(self, payload: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield the device address and the pinned host memory of each piece of a copy; `payload` is an ArenaCopy.

        Raises BodyError, Refused or LeaseOver, at the first piece or between two.
        """
        handle, offset, at, length = parse_fixed(ARENA_COPY, ArenaCopy, payload)
        if self._arena is None:
            raise BodyError("the session has no arena; request one in ATTACH", Status.UNSUPPORTED)
        # Check the whole range on the device before the first piece is copied.
        address = self._ledger.locate(handle, offset, length)
        for piece in self._arena.pieces(at, length, self._check_lease):
            yield address, piece
            address += len(piece)
