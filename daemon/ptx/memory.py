"""Memory: the context's allocations, the places where blocks run, mappings that cost nothing until touched.

Device memory is one reservation of address space per context. Sizes are rounded up to powers of two, with at least a
granule behind each allocation that no kernel may touch: an access just before or behind one is a fault, never a
neighbour's. Each size class has a range of its own with room for more blocks than a slice can hold, so an allocation
that fits the slice always finds a place: there is no fragmentation, only address space, which is free. Pages exist only
where touched, and go back when freed. Behind the classes lie the addresses of regions (region_pages.py). A running
block has its shared memory, local windows and frames in an area of its own.
"""

import ctypes
import mmap
from bisect import bisect_right
from dataclasses import dataclass

from gpulease.daemon.drivers.interface import DriverError, OutOfMemory
from gpulease.daemon.ptx.limits import (
    CHUNKS_PER_THREAD,
    MAX_CHUNK_BLOCKS,
    MAX_RESIDENT_BLOCKS,
    RESIDENT_FRAME_BYTES,
    RESIDENT_LOCAL_BYTES,
    RESIDENT_SHARED_BYTES,
)
from gpulease.daemon.ptx.native.structures import REGION_GRANULE_BYTES, Environment, Fault
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.translate.access import GRANULE_BYTES, GRANULE_SHIFT

# Linux's flag; Python 3.11 has no name for it. Without it the kernel would count address space as used memory.
_MAP_NORESERVE = 0x4000


class Mapping:
    """Anonymous, zeroed pages at a fixed address, made real one by one on first touch.

    Raises:
        DriverError: The host gives this process no such address space.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise DriverError(
                f"the host can't reserve {size_bytes} bytes of address space: {error}",
                hint="Raise the process's address space limit, or ask for a smaller slice.",
            ) from None
        self.size_bytes = size_bytes
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def discard(self, offset: int, size: int) -> None:
        """Give whole pages back to the host: they read as zeros. Both numbers are multiples of the page size."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def close(self) -> None:
        """Give all back; nothing may touch the memory any more."""
        self.view.release()
        self._map.close()


# Areas of different blocks are in different pages, so no two threads write to one cache line.
_STRIDE_STEP = 4096

# A launch's last five numbers: chunk, places, and the strides of shared memory, local windows and frames.
Spread = tuple[int, int, int, int, int]

# All blocks one after another in the first place.
IN_ORDER: Spread = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a kernel's block takes beside shared memory, and how its blocks may be handed out.

    Attributes:
        local_bytes: Local windows, whatever the block's size.
        local_bytes_per_thread: Local windows, for each thread on top.
        frame_bytes: Frames, whatever the block's size.
        frame_bytes_per_thread: Frames, for each thread on top.
        parks: Whether a block may come back because it waits for another.
    """

    local_bytes: int
    local_bytes_per_thread: int
    frame_bytes: int
    frame_bytes_per_thread: int
    parks: bool

    def areas(self, threads: int) -> tuple[int, int]:
        """Bytes of local windows and of frames of a block of so many threads, in whole steps."""
        local = self.local_bytes + threads * self.local_bytes_per_thread
        frames = self.frame_bytes + threads * self.frame_bytes_per_thread
        return round_up(local, _STRIDE_STEP), round_up(frames, _STRIDE_STEP)

    def fit(self, threads: int) -> bool:
        """Say whether there is room for one such block."""
        local, frames = self.areas(threads)
        return local <= RESIDENT_LOCAL_BYTES and frames <= RESIDENT_FRAME_BYTES


class Areas:
    """The environments of a context's blocks, and what theirs is.

    Args:
        first: What is the same in all; the areas are filled in.
    """

    def __init__(self, first: Environment) -> None:
        self._memory = Mapping(RESIDENT_SHARED_BYTES + RESIDENT_LOCAL_BYTES + RESIDENT_FRAME_BYTES)
        self._places = (Environment * MAX_RESIDENT_BLOCKS)()
        self._faults = (Fault * MAX_RESIDENT_BLOCKS)()
        first.shared = self._memory.address
        first.local = first.shared + RESIDENT_SHARED_BYTES
        first.frames = first.local + RESIDENT_LOCAL_BYTES
        first.fault = ctypes.addressof(self._faults)
        self._places[0] = first
        self.address = ctypes.addressof(self._places)

    def spread(self, needs: Needs, blocks: int, threads: int, shared_bytes: int, hosts: int) -> Spread:
        """Divide a launch of such blocks, of which one fits, among so many host threads."""
        if not needs.parks and (hosts == 1 or blocks == 1):
            return IN_ORDER
        chunk = 1 if needs.parks else max(1, min(MAX_CHUNK_BLOCKS, blocks // (CHUNKS_PER_THREAD * hosts)))
        shared = round_up(shared_bytes, _STRIDE_STEP)
        local, frames = needs.areas(threads)
        places = min(
            MAX_RESIDENT_BLOCKS,
            RESIDENT_SHARED_BYTES // (shared or 1),
            RESIDENT_LOCAL_BYTES // (local or 1),
            RESIDENT_FRAME_BYTES // (frames or 1),
        )
        return chunk, places, shared, local, frames

    def close(self) -> None:
        """Give the memory back; nothing may run any more."""
        self._memory.close()


# Behind each allocation, in its block. A class's least allocation leaves one byte too few for a block of half the size.
_RED_ZONE_BYTES = GRANULE_BYTES

# Allocations' bytes that each class has blocks for, in slices: modules' variables are bounded by one slice more.
_SLICES_PER_CLASS = 2

# An allocation counts for as many bytes at least; of smaller ones there can be fewer than a slice's worth.
_LEAST_COUNTED_BYTES = 128

# From here on freed blocks are whole pages and go back to the host; smaller ones are zeroed in place.
_DISCARD_BYTES = 64 * 1024

# Larger slices than any card has; keeps all of it within a process's 47 bits of addresses.
MAX_SLICE_BYTES = 1 << 39

# A session that opens a region as large as its slice, again and again, comes to an end after so many. Stops it from
# using up the process's addresses, because none is used twice.
_REGION_TURNS = 1024

# The same for the largest slices.
_MAX_REGIONS_BYTES = 1 << 44

_SHADOW_ENTRY_BYTES = 2
_FULL_ENTRY = GRANULE_BYTES.to_bytes(_SHADOW_ENTRY_BYTES, "little")
# The shadow is written in pieces, so that a large allocation needs no large temporary.
_SHADOW_PIECE = 1 << 16
_FULL_ENTRIES = _FULL_ENTRY * _SHADOW_PIECE
_NO_ENTRIES = bytes(len(_FULL_ENTRIES))


class _SizeClass:
    """The blocks of one size; offsets are bytes from the arena's start."""

    def __init__(self, start: int, block_bytes: int, blocks: int) -> None:
        self.start = start
        self.block_bytes = block_bytes
        self.end = start + blocks * block_bytes
        self._fresh = start
        self._freed: list[int] = []

    def take(self) -> int | None:
        """A free block's offset, or None."""
        if self._freed:
            return self._freed.pop()
        if self._fresh == self.end:
            return None
        self._fresh += self.block_bytes
        return self._fresh - self.block_bytes

    def give(self, offset: int) -> None:
        """Make a block free again."""
        self._freed.append(offset)


def _shift_of(size_bytes: int) -> int:
    """The power of two that an allocation and what lies behind it take."""
    return (size_bytes + _RED_ZONE_BYTES - 1).bit_length()


_FIRST_SHIFT = _shift_of(1)


class Arena:
    """The allocator and its shadow table, which generated code reads (translate/access.py).

    Attributes:
        regions_start: The first address of regions.
        regions_bytes: Addresses that all regions of the context together can take.
        allocated_bytes: The sum of all allocations' sizes.

    Raises:
        DriverError: The host has no address space for a slice of that size.
    """

    def __init__(self, slice_bytes: int) -> None:
        if not 0 < slice_bytes <= MAX_SLICE_BYTES:
            raise DriverError(f"a slice has 1 to {MAX_SLICE_BYTES} bytes, not {slice_bytes}")
        self._slice_bytes = slice_bytes
        self._classes: list[_SizeClass] = []
        end = 0
        for shift in range(_FIRST_SHIFT, _shift_of(slice_bytes) + 1):
            least = (1 << shift - 1) - _RED_ZONE_BYTES + 1
            blocks = _SLICES_PER_CLASS * slice_bytes // max(least, _LEAST_COUNTED_BYTES) + 1
            self._classes.append(_SizeClass(end, 1 << shift, blocks))
            # Blocks that are given back to the host must begin at a page.
            end = round_up(self._classes[-1].end, mmap.PAGESIZE)
        self._starts = [one.start for one in self._classes]
        self._sizes: dict[int, int] = {}
        self.allocated_bytes = 0
        self.regions_bytes = min(_REGION_TURNS * round_up(slice_bytes, REGION_GRANULE_BYTES), _MAX_REGIONS_BYTES)
        # One granule more, never given out: lookups outside of the arena end there.
        self.memory = Mapping(end + REGION_GRANULE_BYTES + self.regions_bytes + GRANULE_BYTES)
        self.regions_start = round_up(self.memory.address + end, REGION_GRANULE_BYTES)
        self.last_granule = (self.regions_start + self.regions_bytes - self.memory.address) >> GRANULE_SHIFT
        self.shadow = Mapping((self.last_granule + 1) * _SHADOW_ENTRY_BYTES)

    def allocate(self, size_bytes: int) -> int:
        """The address of that many zeroed bytes. Raises OutOfMemory."""
        if size_bytes <= 0:
            raise DriverError(f"an allocation has at least 1 byte, not {size_bytes}")
        if size_bytes > self._slice_bytes:
            raise OutOfMemory(f"{size_bytes} bytes are more than the slice's {self._slice_bytes}")
        offset = self._classes[_shift_of(size_bytes) - _FIRST_SHIFT].take()
        if offset is None:
            raise OutOfMemory(f"no address space is left for {size_bytes} bytes")
        self._sizes[offset] = size_bytes
        self.allocated_bytes += size_bytes
        self._mark(offset, size_bytes)
        return self.memory.address + offset

    def free(self, address: int) -> None:
        """Take back what `allocate` gave; its bytes are zero again and may not be touched."""
        offset = address - self.memory.address
        size = self._sizes.pop(offset, None)
        if size is None:
            raise DriverError(f"{address:#x} is not the address of an allocation")
        self.allocated_bytes -= size
        self._unmark(offset, size)
        held_in = self._class_of(offset)
        if held_in.block_bytes >= _DISCARD_BYTES:
            self.memory.discard(offset, held_in.block_bytes)
        else:
            self.memory.view[offset : offset + size] = bytes(size)
        held_in.give(offset)

    def bytes_at(self, address: int, size: int) -> memoryview:
        """Return so many bytes of one allocation. Raises DriverError if they are not all in one."""
        offset = address - self.memory.address
        if 0 <= offset < self._classes[-1].end:
            held_in = self._class_of(offset)
            start = offset - (offset - held_in.start) % held_in.block_bytes
            if offset + size <= start + self._sizes.get(start, -1):
                return self.memory.view[offset : offset + size]
        raise DriverError(f"{size} bytes at {address:#x} are not within one allocation")

    def beside(self, address: int, size: int) -> str:
        """Name the allocation that an access just misses, in words; "" if there is none on either side."""
        offset = address - self.memory.address
        if not 0 <= offset < self._classes[-1].end:
            return ""
        held_in = self._class_of(offset)
        start = offset - (offset - held_in.start) % held_in.block_bytes
        behind = start + held_in.block_bytes
        misses = []
        if start in self._sizes:
            misses.append((offset + size - start - self._sizes[start], "past the end", start))
        if behind in self._sizes:
            misses.append((behind - offset, "before the start", behind))
        if not misses:
            return ""
        distance, where, of = min(misses)
        return f"{distance} bytes {where} of the {self._sizes[of]} allocated at {self.memory.address + of:#x}"

    def allow(self, address: int, size_bytes: int) -> None:
        """Let kernels touch memory of a region; both numbers are multiples of a region's granule."""
        self._mark(address - self.memory.address, size_bytes)

    def take_back(self, address: int, size_bytes: int) -> None:
        """Forbid a region's memory again, and give its pages, and those of its shadow, back to the host."""
        offset = address - self.memory.address
        first, end = (at // GRANULE_BYTES * _SHADOW_ENTRY_BYTES for at in (offset, offset + size_bytes))
        inner = min(end, round_up(first, mmap.PAGESIZE))
        inner_end = max(inner, end // mmap.PAGESIZE * mmap.PAGESIZE)
        if inner < inner_end:
            self.shadow.discard(inner, inner_end - inner)
        self.shadow.view[first:inner] = bytes(inner - first)
        self.shadow.view[inner_end:end] = bytes(end - inner_end)
        for page in {at // mmap.PAGESIZE * mmap.PAGESIZE for at in (first, end)}:
            # Neighbours' entries may lie there, too; it goes with the last of them.
            entries = bytes(self.shadow.view[page : page + mmap.PAGESIZE])
            if entries == bytes(len(entries)):
                self.shadow.discard(page, len(entries))
        self.memory.discard(offset, size_bytes)

    def close(self) -> None:
        """Give everything back to the host."""
        self.memory.close()
        self.shadow.close()

    def _class_of(self, offset: int) -> _SizeClass:
        return self._classes[bisect_right(self._starts, offset) - 1]

    def _mark(self, offset: int, size: int) -> None:
        """Write into the shadow how much of each granule is there."""
        first, rest = offset >> GRANULE_SHIFT, size % GRANULE_BYTES
        whole = size >> GRANULE_SHIFT
        self._fill(first, whole, _FULL_ENTRIES)
        if rest:
            self._fill(first + whole, 1, rest.to_bytes(_SHADOW_ENTRY_BYTES, "little"))

    def _unmark(self, offset: int, size: int) -> None:
        self._fill(offset >> GRANULE_SHIFT, -(-size >> GRANULE_SHIFT), _NO_ENTRIES)

    def _fill(self, first: int, count: int, entries: bytes) -> None:
        for start in range(first, first + count, _SHADOW_PIECE):
            held = min(_SHADOW_PIECE, first + count - start) * _SHADOW_ENTRY_BYTES
            place = start * _SHADOW_ENTRY_BYTES
            self.shadow.view[place : place + held] = entries[:held]
