"""Parking on the embedded driver: copies allocations and regions to other memory, and returns their pages to the host.

The addresses stay reserved, the shadow table is unchanged, and no kernel runs while memory is parked. The place of each
allocation and region in the copy is recorded by its address, so that a region that ends while it is parked can be
zeroed in the copy.
"""

import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgpack

from gpulease.daemon.drivers.interface import (
    PARK_STEP_BYTES,
    DriverError,
    ImageMismatch,
    PageMove,
    Poll,
    keep_waiting,
)
from gpulease.daemon.host.copy_ring import Batch, CopyRing, RingBroken, RingEnd, batches, run
from gpulease.daemon.ptx.memory import MemoryArena
from gpulease.daemon.ptx.region_pages import EmbeddedRegions


@dataclass(slots=True)
class _CopyAhead:
    """A copy of everything to host memory, while the bytes stay in place.

    Attributes:
        host: The host memory.
        places: The place of each allocation and region in `host`, and its size, by its offset.
        steps: The offset, place and size of each step that is not copied yet.
    """

    host: memoryview
    places: dict[int, tuple[int, int]]
    steps: deque[tuple[int, int, int]]


class ParkedMemory:
    """The bytes of one context while they are parked.

    Args:
        arena: The context's allocations.
        regions: The context's regions.
    """

    def __init__(self, arena: MemoryArena, regions: EmbeddedRegions) -> None:
        self._arena = arena
        self._regions = regions
        self._host: memoryview | None = None
        # By the offset in the arena of each allocation and region: the place of its bytes, and their number.
        self._saved: dict[int, tuple[int, int]] = {}
        self._ahead: _CopyAhead | None = None
        # The ring through which another context lends its bytes, and the offset and size of each range that comes
        # through the ring.
        self._ring: CopyRing | None = None
        self._ring_items: list[tuple[int, int]] = []

    @property
    def is_parked(self) -> bool:
        return self._host is not None

    @property
    def moved_bytes(self) -> int:
        """Bytes that a park moves to host memory: those of allocations and of mapped regions."""
        return self._arena.allocated_bytes + self._regions.taken_bytes

    def park(self, host: memoryview, ready: Callable[[int], None], poll: Poll) -> PageMove:
        """Copy everything to `host`, then release the pages. If the poll raises, nothing has changed.

        `ready` is called before bytes of `host` up to its argument are used.
        """
        began_ns = time.monotonic_ns()
        if len(host) < self.moved_bytes:
            raise DriverError(f"{self.moved_bytes} bytes must fit the host memory, which has {len(host)}")
        # Step 1: copy all steps that were not copied ahead to this memory.
        ahead, self._ahead = self._copy_ahead_to(host), None
        moved_bytes, saved = self.moved_bytes, ahead.places
        for step in ahead.steps:
            self._save_step(host, step, ready, poll)
        # Step 2: release the pages.
        copied_ns = time.monotonic_ns()
        self._host, self._saved = host, saved
        self._arena.discard_all()
        for address, size in self._regions.active():
            self._arena.memory.discard(address - self._arena.memory.address, size)
        return PageMove(moved_bytes, copied_ns - began_ns, time.monotonic_ns() - copied_ns)

    def copy_ahead(self, host: memoryview, end: int) -> bool:
        """Copy one step before `end`, as `park` would. Returns whether everything is copied."""
        ahead = self._copy_ahead_to(host)
        if ahead.steps and sum(ahead.steps[0][1:]) <= end:
            self._save_step(host, ahead.steps.popleft(), _ignore_end, keep_waiting)
        return not ahead.steps

    def _copy_ahead_to(self, host: memoryview) -> _CopyAhead:
        """Return the copy to this memory; a new one if there is none, or if the bytes now have other places."""
        places = self._places()
        if self._ahead is None or self._ahead.host is not host or self._ahead.places != places:
            self._ahead = _CopyAhead(host, places, deque(_steps_of(places)))
        return self._ahead

    @property
    def ahead_bytes(self) -> int:
        """Bytes that are copied ahead; 0 if the allocations or regions have changed since."""
        if self._ahead is None or self._ahead.places != self._places():
            return 0
        return self.moved_bytes - sum(size for _, _, size in self._ahead.steps)

    def forget_ahead(self) -> None:
        self._ahead = None

    def _save(self, host: memoryview, poll: Poll) -> dict[int, tuple[int, int]]:
        """Copy everything to `host`.

        Returns the place of each allocation and region in `host`, and its size, by its offset.
        """
        saved = self._places()
        for step in _steps_of(saved):
            self._save_step(host, step, _ignore_end, poll)
        return saved

    def _save_step(
        self, host: memoryview, step: tuple[int, int, int], ready: Callable[[int], None], poll: Poll
    ) -> None:
        offset, at, size = step
        poll()
        ready(at + size)
        host[at : at + size] = self._arena.memory.view[offset : offset + size]

    def _places(self) -> dict[int, tuple[int, int]]:
        """Return the place of each allocation and region in a copy of everything, and its size, by its offset."""
        saved, at = dict[int, tuple[int, int]](), 0
        regions = ((address - self._arena.memory.address, size) for address, size in self._regions.active())
        for offset, size in (*self._arena.allocations(), *regions):
            saved[offset], at = (at, size), at + size
        return saved

    def lend(self, poll: Poll) -> list[int]:
        """Return a descriptor of a copy of everything, as `park` would copy it. The caller closes it."""
        size_bytes, self._saved = self.moved_bytes, {}
        if not size_bytes:
            return []
        fd = os.memfd_create("gpulease-lent", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            with mmap.mmap(fd, size_bytes) as memory, memoryview(memory) as target:
                self._saved = self._save(target, poll)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise DriverError(f"the host has no memory for it: {error}") from None
            raise
        return [fd]

    def lend_ring(self, ring: CopyRing) -> RingEnd:
        """Lend everything through a ring. Returns the side that fills it."""
        self._saved = self._places()
        return self._end(ring, [(offset, size) for offset, (_, size) in self._saved.items()], fills=True)

    def _end(self, ring: CopyRing, items: Sequence[tuple[int, int]], *, fills: bool) -> RingEnd:
        """Return a side that copies the bytes at these offsets, of these sizes, into a ring or out of it."""

        def copy(batch: Batch, buffer: int) -> None:
            for part in batch:
                offset, _ = items[part.item]
                # For a region that has ended meanwhile, copy nothing, because its bytes are zeros.
                if offset in self._saved:
                    address, place = self._arena.memory.address + offset + part.start, buffer + part.at
                    target, source = (place, address) if fills else (address, place)
                    ctypes.memmove(target, source, part.size_bytes)

        return RingEnd(ring, batches(size for _, size in items), copy, _is_done, fills=fills)

    def state(self, without: int = 0) -> bytes:
        """Return the parked state, for `adopt` in another process, without the allocation at the address `without`."""
        address = self._arena.memory.address
        saved = {offset: place for offset, place in self._saved.items() if address + offset != without}
        # A context of an earlier version adopts memory without regions.
        regions = self._regions.state()
        fields = (address, saved, self._arena.used_bytes(), *([] if regions is None else [regions]))
        packed: bytes = msgpack.packb(fields)
        return packed

    def regions(self) -> dict[int, tuple[int, int]]:
        """Return the place and the number of the bytes of each active region, by address."""
        start = self._arena.memory.address
        return {address: self._saved[address - start] for address, _ in self._regions.active()}

    def adopt(self, state: bytes, host: memoryview, lent_fds: Sequence[int] = (), ring: CopyRing | None = None) -> None:
        """Enter another context's parked state, with its bytes in `host` or in the memory that it has lent.

        Raises ImageMismatch.

        Args:
            state: The state.
            host: The host memory.
            lent_fds: The descriptors that `lend` returned in that context. This function closes them.
            ring: The ring that was given to `lend_ring` in that context.
        """
        if lent_fds:
            host = _mapped(lent_fds)
        try:
            address, saved, used_bytes, *regions = msgpack.unpackb(state, use_list=False, strict_map_key=False)
            if address != self._arena.memory.address:
                raise DriverError(f"its memory would begin at {self._arena.memory.address:#x}, not {address:#x}")
            if ring is None and any(at + size > len(host) for at, size in saved.values()):
                raise DriverError("its host memory is too small")
            sizes = {offset: size for offset, (_, size) in saved.items()}
            if regions:
                self._regions.restore(regions[0])
            # An address outside the range of regions belongs to an allocation.
            allocations = {at: size for at, size in sizes.items() if not self._regions.covers(address + at)}
            self._arena.restore(allocations, used_bytes)
            if sizes.keys() - allocations.keys() != {at - address for at, _ in self._regions.active()}:
                raise DriverError("the regions' bytes are not those of its regions")
        except (DriverError, ValueError, TypeError, msgpack.UnpackException) as error:
            raise ImageMismatch(str(error)) from None
        self._host, self._saved, self._ring = host, saved, ring
        self._ring_items = list(sizes.items())

    def unpark(self, poll: Poll) -> PageMove:
        """Copy everything back. A poll that raises leaves it parked."""
        host, began_ns = self._host, time.monotonic_ns()
        if host is None:
            raise DriverError("the session is not parked")
        if self._ring is not None:
            try:
                run([self._end(self._ring, self._ring_items, fills=False)], poll)
            except RingBroken as error:
                raise DriverError(f"the former worker does not send its memory: {error}") from None
            self._ring, self._ring_items = None, []
        else:
            self._copy_back(host, poll)
        self._host, self._saved = None, {}
        return PageMove(self.moved_bytes, time.monotonic_ns() - began_ns, 0)

    def _copy_back(self, host: memoryview, poll: Poll) -> None:
        for offset, (at, size) in self._saved.items():
            target = self._arena.memory.view[offset : offset + size]
            for start, end in _steps(size):
                poll()
                target[start:end] = host[at + start : at + end]

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return bytes of an allocation while it is parked. Raises DriverError."""
        offset = address - self._arena.memory.address
        for start, (at, size) in self._saved.items():
            if self._host is not None and start <= offset and offset + size_bytes <= start + size:
                return bytes(self._host[at + offset - start : at + offset - start + size_bytes])
        raise DriverError(f"nothing is parked that was at {address:#x}")

    def drop_region(self, address: int) -> None:
        """Zero the copy of a region that ends while it is parked."""
        at, size = self._saved.pop(address - self._arena.memory.address, (0, 0))
        if self._host is not None and self._ring is None:
            self._host[at : at + size] = bytes(size)


def _mapped(lent_fds: Sequence[int]) -> memoryview:
    """Map the memory that another context has lent, read-only, and close the descriptors. Raises ImageMismatch."""
    try:
        if len(lent_fds) != 1:
            raise ImageMismatch(f"it has lent {len(lent_fds)} pieces of memory, not one")
        return memoryview(mmap.mmap(lent_fds[0], 0, flags=mmap.MAP_PRIVATE))
    except (OSError, ValueError) as error:
        raise ImageMismatch(f"the memory that it has lent can't be mapped: {error}") from None
    finally:
        for fd in lent_fds:
            os.close(fd)


def _ignore_end(end: int) -> None: ...


def _is_done(copied: None) -> bool:
    return True


def _steps_of(places: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield offset, place in the copy and size of each step that copies everything."""
    for offset, (at, size) in places.items():
        for start, end in _steps(size):
            yield offset + start, at + start, end - start


def _steps(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each step of a copy."""
    for start in range(0, size_bytes, PARK_STEP_BYTES):
        yield start, min(size_bytes, start + PARK_STEP_BYTES)
