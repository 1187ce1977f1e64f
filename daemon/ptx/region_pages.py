"""Regions on the embedded driver. Their addresses come after the arena's allocations, and no address is used twice.

At its end, a region is removed from the shadow table, and its pages are returned to the host. Generated code that finds
nothing in the shadow table asks the table here (translate/access.py): in an ended region a load gives zeros, a store
has no effect, an atomic operation gives zero, and each access is counted.
"""

import ctypes
from array import array
from typing import Any

from gpulease.daemon.drivers.interface import DriverError, OutOfMemory, RegionReturn
from gpulease.daemon.ptx.memory import Mapping, MemoryArena
from gpulease.daemon.ptx.native.structures import REGION_GRANULE_BYTES, Returned

_WORD_BYTES = 8


class EmbeddedRegions:
    """The regions of one context, with the context's methods for them (drivers/interface.py).

    Attributes:
        address: The address at which generated code finds the `Returned`.
        taken_bytes: Bytes of the regions that have not ended.
    """

    def __init__(self, arena: MemoryArena) -> None:
        self._arena = arena
        granules = arena.regions_bytes // REGION_GRANULE_BYTES
        head_bytes = ctypes.sizeof(Returned)
        # Two words for each granule after the head: the address of its region's counter, and room for a counter. A
        # region uses the counter of its first granule.
        self._memory = Mapping(head_bytes + 2 * granules * _WORD_BYTES)
        self.address = self._memory.address
        self._words = self._memory.view.cast("Q")
        self._table = head_bytes // _WORD_BYTES
        self._counters = self._table + granules
        self._head = Returned.from_address(self.address)
        self._head.start, self._head.granules = arena.regions_start, granules
        self._head.counters = self.address + head_bytes
        self._next = arena.regions_start
        self._end = arena.regions_start + arena.regions_bytes
        # Sizes by address.
        self._active: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self.taken_bytes = 0
        # The sum of stray accesses at the last poll, and the regions that have been reported.
        self._reported_strays = 0
        self._named: set[int] = set()

    def open(self, size_bytes: int) -> int:
        """Hand out the next addresses. Raises OutOfMemory if none are left, DriverError for partial granules."""
        if size_bytes <= 0 or size_bytes % REGION_GRANULE_BYTES:
            raise DriverError(f"a region's size must be a multiple of {REGION_GRANULE_BYTES} bytes, not {size_bytes}")
        if size_bytes > self._end - self._next:
            raise OutOfMemory(
                f"this session's regions have used {self._next - self._arena.regions_start} of"
                f" {self._arena.regions_bytes} bytes of addresses, which are never used again",
                hint="Free the lease and acquire another.",
            )
        address = self._next
        # The pages come into existence when they are touched, so only the shadow must allow them.
        self._arena.allow(address, size_bytes)
        self._next += size_bytes
        self._active[address] = size_bytes
        self.taken_bytes += size_bytes
        return address

    def end(self, address: int) -> RegionReturn:
        """End a region: its memory is returned, and later accesses are counted. Raises DriverError without one."""
        size_bytes = self._active.pop(address, None)
        if size_bytes is None:
            raise DriverError(f"{address:#x} is not the address of a region that can be ended")
        self._ended[address] = size_bytes
        # Fill the table first, because a kernel that finds the shadow empty must already find the counter.
        counter = self.address + self._counter_of(address) * _WORD_BYTES
        self._fill_table(address, size_bytes, counter)
        self._arena.take_back(address, size_bytes)
        self.taken_bytes -= size_bytes
        return RegionReturn(size_bytes, 0)

    def release(self, address: int) -> None:
        """Make accesses to an ended region fault. Raises DriverError if the address is not an ended region's."""
        size_bytes = self._ended.pop(address, None)
        if size_bytes is None:
            raise DriverError(f"{address:#x} is not the address of an ended region")
        # A zero word means that the granule is in no ended region.
        self._fill_table(address, size_bytes, 0)

    def covers(self, address: int) -> bool:
        """Return whether an address is within the regions' range, handed out or not."""
        return self._arena.regions_start <= address < self._end

    def bytes_at(self, address: int, size_bytes: int) -> memoryview:
        """Return `size_bytes` of one active region. Raises DriverError if they are not all in one."""
        for start, region_size in self._active.items():
            if start <= address and address + size_bytes <= start + region_size:
                offset = address - self._arena.memory.address
                return self._arena.memory.view[offset : offset + size_bytes]
        raise DriverError(f"{size_bytes} bytes at {address:#x} are not within one active region")

    def active(self) -> list[tuple[int, int]]:
        """Return address and size of each active region, by address."""
        return sorted(self._active.items())

    def state(self) -> tuple[object, ...] | None:
        """Return all regions, for `restore` in another process; None if there never was one."""
        if self._next == self._arena.regions_start:
            return None
        ended = [(address, size, self.stray_accesses(address)) for address, size in self._ended.items()]
        area = (self._arena.regions_start, self._arena.regions_bytes)
        return area, self._next, self.active(), ended, self._reported_strays, sorted(self._named)

    def restore(self, state: tuple[Any, ...]) -> None:
        """Enter another context's `state`, in a context without regions so far. Raises DriverError or ValueError."""
        place, self._next, active, ended, self._reported_strays, named = state
        if place != (self._arena.regions_start, self._arena.regions_bytes):
            raise DriverError(f"its regions would begin at {self._arena.regions_start:#x}")
        for address, size_bytes in active:
            self._check(address, size_bytes)
            self._arena.allow(address, size_bytes)
            self._active[address] = size_bytes
            self.taken_bytes += size_bytes
        for address, size_bytes, strays in ended:
            self._check(address, size_bytes)
            self._ended[address] = size_bytes
            counter = self._counter_of(address)
            self._words[counter] = strays
            self._head.strays += strays
            self._fill_table(address, size_bytes, self.address + counter * _WORD_BYTES)
        self._named = set(named)

    def _check(self, address: int, size_bytes: int) -> None:
        """Raise DriverError for a region that this context can't have handed out."""
        offset = address - self._arena.regions_start
        if offset < 0 or size_bytes <= 0 or (offset | size_bytes) % REGION_GRANULE_BYTES:
            raise DriverError(f"no region of {size_bytes} bytes can be at {address:#x}")
        if address + size_bytes > self._next or self._next > self._end:
            raise DriverError(f"the region at {address:#x} was never given out")

    def stray_accesses(self, address: int) -> int:
        """Return how many accesses were made to a region, named by its address, since it ended."""
        return self._words[self._counter_of(address)]

    def new_strays(self) -> list[tuple[int, int]]:
        """Return address and size of ended regions that were accessed; each region is returned once."""
        # One counter sums up all regions, so the usual case, no stray access, takes a single comparison.
        if self._head.strays == self._reported_strays:
            return []
        self._reported_strays = self._head.strays
        strays = [
            (address, size)
            for address, size in self._ended.items()
            if address not in self._named and self.stray_accesses(address)
        ]
        self._named.update(address for address, _ in strays)
        return strays

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def _counter_of(self, address: int) -> int:
        return self._counters + (address - self._arena.regions_start) // REGION_GRANULE_BYTES

    def _fill_table(self, address: int, size_bytes: int, word: int) -> None:
        # One word for each granule of the region.
        first = self._table + (address - self._arena.regions_start) // REGION_GRANULE_BYTES
        count = size_bytes // REGION_GRANULE_BYTES
        self._words[first : first + count] = memoryview(array("Q", [word]) * count)
