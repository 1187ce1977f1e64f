"""Device memory and the memory of running blocks, in mappings whose pages exist only after they are touched.

Device memory is one reservation of address space per context. An allocation gets a block: its bytes and at least one
granule that no kernel may touch, rounded up to a power of two. So an access just before or after an allocation faults,
and never reaches another allocation.

Blocks of each size have a range of their own, the size class, with room for more blocks than a slice can hold. So an
allocation that fits into the slice always finds a place. Unused addresses take no memory. After the classes come the
addresses of regions (region_pages.py).

A running thread block has its shared memory, local windows and frames in a separate area.
"""

import contextlib
import ctypes
import mmap
import os
from bisect import bisect_right

from gpulease.daemon.drivers.interface import DriverError, OutOfMemory
from gpulease.daemon.host.memory_mapping import (
    MAP_FIXED_NOREPLACE,
    MAP_NORESERVE,
    advise_memory,
    map_memory,
    unmap_memory,
)
from gpulease.daemon.ptx.limits import (
    CHUNKS_PER_THREAD,
    MAX_CHUNK_BLOCKS,
    MAX_RESIDENT_BLOCKS,
    RESIDENT_FRAME_BYTES,
    RESIDENT_LOCAL_BYTES,
    RESIDENT_SHARED_BYTES,
)
from gpulease.daemon.ptx.native.structures import REGION_GRANULE_BYTES, BlockEnvironment, Fault
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.translate.access import GRANULE_BYTES, GRANULE_SHIFT
from gpulease.protocol.fast_dataclass import dataclass

PARKABLE_ADDRESS = 0x1000_0000_0000
"""The address of a parkable session's memory, if it is free. It is the same in every worker, so that the session's
pointers stay valid. It is far from addresses that a process maps by itself, and from a CUDA session's pages."""


class Mapping:
    """Anonymous pages of zeros, which never move. The host provides each page when it is first touched.

    Raises:
        DriverError: The host denies this process the address space.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise DriverError(
                f"the host can't reserve {size_bytes} bytes of address space: {error}",
                hint="Raise the process's address space limit, or ask for a smaller slice.",
            ) from None
        self.size_bytes = size_bytes
        self.view = memoryview(self._map)
        # Get the buffer's address. A pointer that is kept would prevent `close`.
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def discard(self, offset: int, size: int) -> None:
        """Return pages to the host, after which they read as zeros. Both numbers are multiples of the page size."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def close(self) -> None:
        """Unmap the pages. The memory must not be touched afterwards."""
        self.view.release()
        self._map.close()


class PlacedMapping:
    """A `Mapping` at a given address.

    Raises:
        DriverError: Something is mapped there already, or the host denies the address space.
    """

    def __init__(self, size_bytes: int, address: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
        try:
            map_memory(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags)
        except OSError as error:
            raise DriverError(f"{size_bytes} bytes can't be mapped at {address:#x}: {error.strerror}") from None
        self.size_bytes, self.address = size_bytes, address
        self.view = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")

    def discard(self, offset: int, size: int) -> None:
        if error := advise_memory(self.address + offset, size, mmap.MADV_DONTNEED):
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        self.view.release()
        unmap_memory(self.address, self.size_bytes)


# Areas of different blocks begin at different pages, so that no two threads write to the same cache line.
_STRIDE_STEP = 4096

# How a launch's blocks are distributed: blocks per chunk, number of environments, and the strides in bytes of shared
# memory, local windows and frames. They are the last numbers of a launch's head (native/structures.py).
Spread = tuple[int, int, int, int, int]

# All blocks run one after another in the first environment.
IN_ORDER: Spread = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """The memory of a kernel's block besides shared memory, and whether its blocks may wait.

    Attributes:
        local_bytes: Bytes of local windows that do not depend on the number of threads.
        local_bytes_per_thread: Further bytes of local windows for each thread.
        frame_bytes: Bytes of frames that do not depend on the number of threads.
        frame_bytes_per_thread: Further bytes of frames for each thread.
        parks: Whether a block may be set aside while it waits for another block.
    """

    local_bytes: int
    local_bytes_per_thread: int
    frame_bytes: int
    frame_bytes_per_thread: int
    parks: bool

    def areas(self, threads: int) -> tuple[int, int]:
        """Return the bytes of local windows and of frames for a block of `threads`, each rounded up to _STRIDE_STEP."""
        local = self.local_bytes + threads * self.local_bytes_per_thread
        frames = self.frame_bytes + threads * self.frame_bytes_per_thread
        return round_up(local, _STRIDE_STEP), round_up(frames, _STRIDE_STEP)

    def fit(self, threads: int) -> bool:
        """Return whether an area has room for a block of `threads`."""
        local, frames = self.areas(threads)
        return local <= RESIDENT_LOCAL_BYTES and frames <= RESIDENT_FRAME_BYTES


class Areas:
    """The environments in which a context's blocks run, and the memory of those environments.

    Args:
        first: An environment with the values that all environments share. This class sets its areas.
    """

    def __init__(self, first: BlockEnvironment) -> None:
        self._memory = Mapping(RESIDENT_SHARED_BYTES + RESIDENT_LOCAL_BYTES + RESIDENT_FRAME_BYTES)
        self._environments = (BlockEnvironment * MAX_RESIDENT_BLOCKS)()
        self._faults = (Fault * MAX_RESIDENT_BLOCKS)()
        # Native code computes the other environments from the first. Each one's areas are one stride after the previous
        # one's.
        first.shared = self._memory.address
        first.local = first.shared + RESIDENT_SHARED_BYTES
        first.frames = first.local + RESIDENT_LOCAL_BYTES
        first.fault = ctypes.addressof(self._faults)
        self._environments[0] = first
        self.address = ctypes.addressof(self._environments)

    def spread(self, needs: KernelNeeds, blocks: int, threads: int, shared_bytes: int, hosts: int) -> Spread:
        """Choose how a launch's blocks are divided among `hosts` threads. A block must fit into an area."""
        # With one thread or one block, run blocks that never wait for each other in order.
        if not needs.parks and (hosts == 1 or blocks == 1):
            return IN_ORDER
        # Threads take blocks that may be set aside one at a time, and other blocks in chunks, so that they seldom use
        # the counter at the same time.
        chunk = 1 if needs.parks else max(1, min(MAX_CHUNK_BLOCKS, blocks // (CHUNKS_PER_THREAD * hosts)))
        shared = round_up(shared_bytes, _STRIDE_STEP)
        local, frames = needs.areas(threads)
        # Use as many environments as each kind of memory has room for.
        environment_count = min(
            MAX_RESIDENT_BLOCKS,
            RESIDENT_SHARED_BYTES // (shared or 1),
            RESIDENT_LOCAL_BYTES // (local or 1),
            RESIDENT_FRAME_BYTES // (frames or 1),
        )
        return chunk, environment_count, shared, local, frames

    def close(self) -> None:
        """Unmap the areas. No block may run afterwards."""
        self._memory.close()


# Minimum bytes of a block after its allocation, which no kernel may touch.
_RED_ZONE_BYTES = GRANULE_BYTES

# Each class has enough blocks for this many full slices: one for the lease's allocations, and one for modules'
# variables.
_SLICES_PER_CLASS = 2

# Minimum bytes that an allocation counts. It limits the number of allocations of a slice.
_LEAST_COUNTED_BYTES = 128

# Blocks of at least this size have whole pages, which are returned to the host when freed. Smaller blocks are zeroed.
_DISCARD_BYTES = 64 * 1024

# Maximum size of a slice, larger than any card's memory. With it, all addresses fit into the 47 bits of a process's
# addresses.
MAX_SLICE_BYTES = 1 << 39

# Number of times that a session can open a region as large as its slice. Addresses of regions are not reused.
_REGION_TURNS = 1024

# Maximum bytes of addresses for regions, which is the limit for the largest slices.
_MAX_REGIONS_BYTES = 1 << 44

_SHADOW_ENTRY_BYTES = 2
_FULL_ENTRY = GRANULE_BYTES.to_bytes(_SHADOW_ENTRY_BYTES, "little")
# Number of the shadow's entries that are written at a time, so that a large allocation needs no large temporary object.
_SHADOW_PIECE = 1 << 16
_FULL_ENTRIES = _FULL_ENTRY * _SHADOW_PIECE
_NO_ENTRIES = bytes(len(_FULL_ENTRIES))


class _SizeClass:
    """The blocks of one size. Offsets are in bytes from the arena's start."""

    def __init__(self, start: int, block_bytes: int, blocks: int) -> None:
        self.start = start
        self.block_bytes = block_bytes
        self.end = start + blocks * block_bytes
        self._fresh = start
        self._freed: list[int] = []

    def take(self) -> int | None:
        # Prefer a freed block, because its pages may still exist.
        if self._freed:
            return self._freed.pop()
        if self._fresh == self.end:
            return None
        self._fresh += self.block_bytes
        return self._fresh - self.block_bytes

    def give(self, offset: int) -> None:
        self._freed.append(offset)

    @property
    def used_bytes(self) -> int:
        """Bytes of the range, from its start, in which blocks were ever used."""
        return self._fresh - self.start

    def restore(self, used: "set[int]", used_bytes: int) -> None:
        """Take over another arena's state: the offsets of used blocks, and its `used_bytes`."""
        self._fresh = self.start + used_bytes
        self._freed = [at for at in range(self.start, self._fresh, self.block_bytes) if at not in used]


def _shift_of(size_bytes: int) -> int:
    """Return log2 of the size of an allocation's block: its bytes and the red zone, rounded up to a power of two."""
    return (size_bytes + _RED_ZONE_BYTES - 1).bit_length()


_FIRST_SHIFT = _shift_of(1)


def _mapped(size_bytes: int, at: int) -> "Mapping | PlacedMapping":
    if at:
        # If the address is in use, the session can be parked, but can't leave its process.
        with contextlib.suppress(DriverError):
            return PlacedMapping(size_bytes, at)
    return Mapping(size_bytes)


class MemoryArena:
    """The allocator, and its shadow table, which generated code reads (translate/access.py).

    Attributes:
        regions_start: The first address of regions.
        regions_bytes: Bytes of addresses for all regions of the context together.
        allocated_bytes: The sum of all allocations' sizes.

    Args:
        slice_bytes: Room for allocations.
        at: The address at which the memory should begin; 0 for any. If it is in use, the host chooses another.

    Raises:
        DriverError: `slice_bytes` is out of range, or the host has no address space for it.
    """

    def __init__(self, slice_bytes: int, at: int = 0) -> None:
        if not 0 < slice_bytes <= MAX_SLICE_BYTES:
            raise DriverError(f"a slice must have 1 to {MAX_SLICE_BYTES} bytes, not {slice_bytes}")
        self._slice_bytes = slice_bytes
        # Step 1: lay out the size classes, from the smallest to the one for the whole slice.
        self._classes: list[_SizeClass] = []
        end = 0
        for shift in range(_FIRST_SHIFT, _shift_of(slice_bytes) + 1):
            least = (1 << shift - 1) - _RED_ZONE_BYTES + 1
            blocks = _SLICES_PER_CLASS * slice_bytes // max(least, _LEAST_COUNTED_BYTES) + 1
            self._classes.append(_SizeClass(end, 1 << shift, blocks))
            # Blocks that are returned to the host must begin at a page.
            end = round_up(self._classes[-1].end, mmap.PAGESIZE)
        self._starts = [size_class.start for size_class in self._classes]
        self._sizes: dict[int, int] = {}
        self.allocated_bytes = 0
        self.regions_bytes = min(_REGION_TURNS * round_up(slice_bytes, REGION_GRANULE_BYTES), _MAX_REGIONS_BYTES)
        # Step 2: reserve the addresses, with those of regions after the classes. One more granule at the end is never
        # allocated. Lookups of addresses outside the arena use its entry.
        self.memory = _mapped(end + REGION_GRANULE_BYTES + self.regions_bytes + GRANULE_BYTES, at)
        self.regions_start = round_up(self.memory.address + end, REGION_GRANULE_BYTES)
        self.last_granule = (self.regions_start + self.regions_bytes - self.memory.address) >> GRANULE_SHIFT
        # Step 3: create the shadow, with an entry for each granule. All are 0, so no byte may be touched yet.
        self.shadow = Mapping((self.last_granule + 1) * _SHADOW_ENTRY_BYTES)

    def allocate(self, size_bytes: int) -> int:
        """Allocate zeroed bytes and return their address. Raises OutOfMemory, or DriverError for no bytes."""
        if size_bytes <= 0:
            raise DriverError(f"an allocation must have at least 1 byte, not {size_bytes}")
        if size_bytes > self._slice_bytes:
            raise OutOfMemory(f"{size_bytes} bytes are more than the slice's {self._slice_bytes}")
        offset = self._classes[_shift_of(size_bytes) - _FIRST_SHIFT].take()
        if offset is None:
            raise OutOfMemory(f"no address space is left for {size_bytes} bytes")
        self._sizes[offset] = size_bytes
        self.allocated_bytes += size_bytes
        # Allow kernels to touch the bytes.
        self._mark(offset, size_bytes)
        return self.memory.address + offset

    def free(self, address: int) -> None:
        """Free an allocation: zero its bytes, and forbid access to them. Raises DriverError for any other address."""
        offset = address - self.memory.address
        size = self._sizes.pop(offset, None)
        if size is None:
            raise DriverError(f"{address:#x} is not the address of an allocation")
        self.allocated_bytes -= size
        # Forbid access to the bytes, then zero them for the next allocation.
        self._unmark(offset, size)
        size_class = self._class_of(offset)
        if size_class.block_bytes >= _DISCARD_BYTES:
            self.memory.discard(offset, size_class.block_bytes)
        else:
            self.memory.view[offset : offset + size] = bytes(size)
        size_class.give(offset)

    def bytes_at(self, address: int, size: int) -> memoryview:
        """Return `size` bytes of one allocation. Raises DriverError if they are not all in one."""
        offset = address - self.memory.address
        if 0 <= offset < self._classes[-1].end:
            # Find the block of the address, and check that its allocation has all bytes.
            size_class = self._class_of(offset)
            start = offset - (offset - size_class.start) % size_class.block_bytes
            if offset + size <= start + self._sizes.get(start, -1):
                return self.memory.view[offset : offset + size]
        raise DriverError(f"{size} bytes at {address:#x} are not within one allocation")

    def miss_text(self, address: int, size: int) -> str:
        """Describe the allocation that is closest to a failed access; "" if there is none on either side."""
        offset = address - self.memory.address
        if not 0 <= offset < self._classes[-1].end:
            return ""
        size_class = self._class_of(offset)
        # The access is after this block's allocation, or just before the next block's.
        start = offset - (offset - size_class.start) % size_class.block_bytes
        end_address = start + size_class.block_bytes
        misses = []
        if start in self._sizes:
            misses.append((offset + size - start - self._sizes[start], "past the end", start))
        if end_address in self._sizes:
            misses.append((end_address - offset, "before the start", end_address))
        if not misses:
            return ""
        # Choose the closer of two candidates.
        distance, where, owner = min(misses)
        return f"{distance} bytes {where} of the {self._sizes[owner]} allocated at {self.memory.address + owner:#x}"

    def allow(self, address: int, size_bytes: int) -> None:
        """Let kernels touch a region's memory. Both numbers are multiples of REGION_GRANULE_BYTES."""
        self._mark(address - self.memory.address, size_bytes)

    def take_back(self, address: int, size_bytes: int) -> None:
        """Forbid access to a region's memory, and return the pages of the memory and of its shadow to the host."""
        # Step 1: return the shadow's pages that have only entries of this region, which zeroes the entries.
        offset = address - self.memory.address
        first, end = (at // GRANULE_BYTES * _SHADOW_ENTRY_BYTES for at in (offset, offset + size_bytes))
        inner = min(end, round_up(first, mmap.PAGESIZE))
        inner_end = max(inner, end // mmap.PAGESIZE * mmap.PAGESIZE)
        if inner < inner_end:
            self.shadow.discard(inner, inner_end - inner)
        # Step 2: zero the entries at both ends, in pages that also have other regions' entries.
        self.shadow.view[first:inner] = bytes(inner - first)
        self.shadow.view[inner_end:end] = bytes(end - inner_end)
        for page in {at // mmap.PAGESIZE * mmap.PAGESIZE for at in (first, end)}:
            # Step 3: return a shared page if all of its entries are 0 now.
            entries = bytes(self.shadow.view[page : page + mmap.PAGESIZE])
            if entries == bytes(len(entries)):
                self.shadow.discard(page, len(entries))
        # Step 4: return the region's own pages.
        self.memory.discard(offset, size_bytes)

    def allocations(self) -> list[tuple[int, int]]:
        """Return offset and size of each allocation, sorted by offset."""
        return sorted(self._sizes.items())

    def used_bytes(self) -> list[int]:
        """Return each size class's `used_bytes`."""
        return [size_class.used_bytes for size_class in self._classes]

    def restore(self, allocations: "dict[int, int]", used_bytes: "tuple[int, ...]") -> None:
        """Take over the state of another arena of the same slice size: allocations' sizes by offset, and `used_bytes`.

        Raises DriverError if this can't be the state of such an arena.
        """
        if len(used_bytes) != len(self._classes) or self._sizes:
            raise DriverError("the allocations are not those of such a slice")
        blocks: list[set[int]] = [set() for _ in self._classes]
        for offset, size in allocations.items():
            number = _shift_of(size) - _FIRST_SHIFT
            size_class = self._classes[number] if 0 < size <= self._slice_bytes else None
            if size_class is None or not size_class.start <= offset < size_class.start + used_bytes[number]:
                raise DriverError(f"an allocation of {size} bytes can't be at {offset:#x}")
            blocks[number].add(offset)
        for class_, used, bytes_ in zip(self._classes, blocks, used_bytes, strict=True):
            class_.restore(used, min(bytes_, class_.end - class_.start))
        for offset, size in allocations.items():
            self._sizes[offset] = size
            self.allocated_bytes += size
            self._mark(offset, size)

    def discard_all(self) -> None:
        """Return the pages of all allocations to the host. The allocations remain and read as zeros."""
        for size_class in self._classes:
            if (used := round_up(size_class.used_bytes, mmap.PAGESIZE)) > 0:
                self.memory.discard(size_class.start, used)

    def close(self) -> None:
        self.memory.close()
        self.shadow.close()

    def _class_of(self, offset: int) -> _SizeClass:
        return self._classes[bisect_right(self._starts, offset) - 1]

    def _mark(self, offset: int, size: int) -> None:
        """Write into the shadow how many bytes of each granule may be touched. The last granule may be partial."""
        first, rest_bytes = offset >> GRANULE_SHIFT, size % GRANULE_BYTES
        granules = size >> GRANULE_SHIFT
        self._fill(first, granules, _FULL_ENTRIES)
        if rest_bytes:
            self._fill(first + granules, 1, rest_bytes.to_bytes(_SHADOW_ENTRY_BYTES, "little"))

    def _unmark(self, offset: int, size: int) -> None:
        self._fill(offset >> GRANULE_SHIFT, -(-size >> GRANULE_SHIFT), _NO_ENTRIES)

    def _fill(self, first: int, count: int, entries: bytes) -> None:
        for start in range(first, first + count, _SHADOW_PIECE):
            piece_bytes = min(_SHADOW_PIECE, first + count - start) * _SHADOW_ENTRY_BYTES
            place = start * _SHADOW_ENTRY_BYTES
            self.shadow.view[place : place + piece_bytes] = entries[:piece_bytes]
