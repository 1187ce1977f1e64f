"""A session's allocations, and copies to and from them whose bytes are on the wire.

The arena: host memory of a session's that its client maps too, so that copies need no bytes on the wire.

One sealed memfd of a fixed size, made for the first client that asks and kept until the worker ends: its pages are
made when they are first touched, and none can be cut off under a mapping. What is copied is pinned first, in extents as
large as the copies that come: a pinned copy runs at the bus's speed, and pinning costs as much as copying once. Pinned
pages are not given back before the worker ends, which is why the size is the bound of what a session can hold.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.session.connection import PinnedBuffers
from gpulease.daemon.session.ledger import Operations, SessionResources
from gpulease.daemon.session.replies import empty, number
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
from gpulease.protocol.opcodes import Status

PINNED_FROM_BYTES: Final = 64 << 10
"""Replies with so much data or more are copied by the card where they are sent from."""

PINNED_BYTES: Final = DATA_CHUNK_BYTES + 4096
"""Of the memory for that: a reply of the advised size. Pinned memory stays, so what is larger goes another way."""


class MemoryOperations(Operations):
    """See Operations.

    Attributes:
        slots: Pinned memory that large writes may be received into.
    """

    def __init__(self, holdings: SessionResources) -> None:
        super().__init__(holdings)
        self._staging = bytearray()
        self._pinned: memoryview | None = None
        self.slots = PinnedBuffers(holdings.context)

    def alloc(self, frame: Frame) -> bytes:
        """MEM_ALLOC."""
        (size_bytes,) = parse_fixed(MEM_ALLOC, MemAlloc, memoryview(frame.payload))
        ledger = self._ledger
        ledger.check_alloc(size_bytes)
        address = self._context.mem_alloc(size_bytes, ledger.spare_bytes_beside(size_bytes), self._check_lease)
        ledger.add_allocation(address, size_bytes)
        self._count()
        return number(frame, address)

    def free(self, frame: Frame) -> bytes:
        """MEM_FREE."""
        (handle,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.check_allocation(handle)
        self._context.mem_free(handle, self._check_lease)
        self._ledger.remove_allocation(handle)
        self._count()
        return empty(frame)

    def write(self, frame: Frame) -> bytes:
        """MEM_WRITE."""
        handle, offset, data = parse_mem_write(memoryview(frame.payload))
        address = self._ledger.locate(handle, offset, len(data))
        if data:
            slot = self.slots.holding(data)
            if slot is None:
                self._context.mem_write(address, data, self._check_lease)
            elif frame.flags:
                slot.ticket = self._context.begin_write(address, data, self._check_lease)
            else:
                # Its answer is for all before it.
                self._context.write_pinned(address, data, self._check_lease)
        self._count_copy(len(data))
        return empty(frame)

    def read(self, frame: Frame) -> bytes | memoryview:
        """MEM_READ. The reply is this desk's own memory, void at the next read."""
        handle, offset, length = parse_fixed(MEM_READ, MemRead, memoryview(frame.payload))
        if length > MAX_DATA_BYTES:
            raise BodyError(f"{length} bytes in one MEM_READ; at most {MAX_DATA_BYTES} are allowed")
        address = self._ledger.locate(handle, offset, length)
        prefix = data_prefix(length, request_id=frame.request_id, session_id=frame.session_id)
        is_pinned = PINNED_FROM_BYTES <= length <= DATA_CHUNK_BYTES
        reply = self._room(len(prefix) + length, is_pinned=is_pinned)
        reply[: len(prefix)] = prefix
        if is_pinned:
            self._context.read_pinned(address, reply[len(prefix) :], self._check_lease)
        elif length:
            self._context.mem_read(address, reply[len(prefix) :], self._check_lease)
        self._count_copy(length)
        return reply

    def close(self) -> None:
        """Give the host back what was pinned; it is not any more."""
        self.slots.close()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned_map.close()
            self._pinned = None

    def _room(self, nbytes: int, *, is_pinned: bool) -> memoryview:
        """This desk's memory for a reply."""
        if is_pinned:
            if self._pinned is None:
                self._pinned_map = mmap.mmap(-1, PINNED_BYTES)
                self._pinned = memoryview(self._pinned_map)
                self._context.pin(self._pinned)
            return self._pinned[:nbytes]
        if len(self._staging) < nbytes:
            self._staging = bytearray(nbytes)
        return memoryview(self._staging)[:nbytes]


MAX_ARENA_BYTES: Final = 1 << 30
"""Most host memory of a session's arena, whatever its client asks for. Stops a lease of one byte of VRAM from pinning
the host's memory; pinned pages can't be swapped out."""

GRANULE_BYTES: Final = 4 << 20
"""What is pinned at a time at least. Stops a tenant from making the driver keep books on single pages."""


MAX_EXTENT_BYTES: Final = 256 << 20
"""What is pinned at a time at most: it takes 12 ms, between which the lease is looked at."""


Pins = Callable[[memoryview], None]
"""What pins memory: a context's `pin`."""


class Arena:
    """The worker's side of it.

    Attributes:
        fd: Its descriptor, to be given to clients.
        size_bytes: Its size.
    """

    def __init__(self, wanted_bytes: int, pins: Pins) -> None:
        """Raises OSError if the memory can't be had, or less than a granule is wanted."""
        self.size_bytes = min(wanted_bytes, MAX_ARENA_BYTES) // GRANULE_BYTES * GRANULE_BYTES
        if not self.size_bytes:
            raise OSError(f"an arena of {wanted_bytes} bytes; the smallest has {GRANULE_BYTES}")
        self._pin_memory = pins
        self._extent_ends = [0] * (self.size_bytes // GRANULE_BYTES)
        self.fd = sealed_memory("gpulease-arena", self.size_bytes)
        try:
            self._map = mmap.mmap(self.fd, self.size_bytes)
            self._view = memoryview(self._map)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Let go of it; only for one whose memory is not pinned."""
        self._view.release()
        self._map.close()
        os.close(self.fd)

    def pieces(self, offset: int, length: int, check_lease: Callable[[], None]) -> Iterable[memoryview]:
        """Bytes of the arena, cut where the pinning is.

        Raises BodyError if they are not all inside, and what `check_lease` raises while they are pinned.
        """
        end = offset + length
        if end > self.size_bytes:
            raise BodyError(f"bytes {offset} to {end} are outside the arena of {self.size_bytes} bytes")
        self._pin(offset // GRANULE_BYTES, -(-end // GRANULE_BYTES), check_lease)
        if length and end <= self._extent_ends[offset // GRANULE_BYTES]:
            return (self._view[offset:end],)
        return self._cut(offset, end)

    def _cut(self, at: int, end: int) -> Iterator[memoryview]:
        while at < end:
            until = min(end, self._extent_ends[at // GRANULE_BYTES])
            yield self._view[at:until]
            at = until

    def _pin(self, first: int, last: int, check_lease: Callable[[], None]) -> None:
        """Pin each run of granules that is not, from `first` to before `last`."""
        ends = self._extent_ends
        while first < last:
            if ends[first]:
                first = ends[first] // GRANULE_BYTES
                continue
            after = first
            while after < min(last, first + MAX_EXTENT_BYTES // GRANULE_BYTES) and not ends[after]:
                after += 1
            check_lease()
            self._pin_memory(self._view[first * GRANULE_BYTES : after * GRANULE_BYTES])
            ends[first:after] = [after * GRANULE_BYTES] * (after - first)
            first = after


class ArenaOperations(Operations):
    """A session's copies between its allocations and its arena, once it has one; see Operations."""

    def __init__(self, holdings: SessionResources) -> None:
        super().__init__(holdings)
        self._arena: Arena | None = None

    def open(self, wanted_bytes: int) -> Arena:
        """The arena, made for the first who asks. Raises OSError."""
        if self._arena is None:
            self._arena = Arena(wanted_bytes, self._context.pin)
        return self._arena

    def close(self) -> None:
        """Let go of the arena; only if nothing was copied with it or it is not pinned any more."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def write(self, frame: Frame) -> bytes:
        """ARENA_WRITE.

        A quiet one is only begun: a later copy in its stream with a reply, or a wait for the stream, waits for it too.
        """
        self._copy(frame, self._context.begin_write if frame.flags else self._context.write_pinned)
        return empty(frame)

    def read(self, frame: Frame) -> bytes:
        """ARENA_READ; see `write`."""
        self._copy(frame, self._context.begin_read if frame.flags else self._context.read_pinned)
        return empty(frame)

    def _copy(self, frame: Frame, copy: Callable[[int, memoryview, Callable[[], None]], object]) -> None:
        copied_bytes = 0
        for address, piece in self.pieces(memoryview(frame.payload)):
            copy(address, piece, self._check_lease)
            copied_bytes += len(piece)
        self._count_copy(copied_bytes)

    def pieces(self, payload: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The device addresses and the pinned memory of a copy; raises as `write` does, if need be at the first."""
        handle, offset, at, length = parse_fixed(ARENA_COPY, ArenaCopy, payload)
        if self._arena is None:
            raise BodyError("the session has no arena: ask for one in ATTACH", Status.UNSUPPORTED)
        address = self._ledger.locate(handle, offset, length)
        for piece in self._arena.pieces(at, length, self._check_lease):
            yield address, piece
            address += len(piece)
