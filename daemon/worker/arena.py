"""The arena: host memory of a session's that its client maps too, so that copies need no bytes on the wire.

One sealed memfd of a fixed size, made for the first client that asks and kept until the worker ends: its pages are
made when they are first touched, and none can be cut off under a mapping. What is copied is pinned first, in extents as
large as the copies that come: a pinned copy runs at the bus's speed, and pinning costs as much as copying once. Pinned
pages are not given back before the worker ends, which is why the size is the bound of what a session can hold.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gpulease.daemon.worker.desks import Desk, Holdings
from gpulease.daemon.worker.replies import empty
from gpulease.daemon.worker.sealed import sealed_memory
from gpulease.protocol.errors import BodyError
from gpulease.protocol.fastpath import ARENA_COPY, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.messages import ArenaCopy
from gpulease.protocol.opcodes import Status

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


class ArenaDesk(Desk):
    """A session's copies between its allocations and its arena, once it has one; see Desk."""

    def __init__(self, holdings: Holdings) -> None:
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
