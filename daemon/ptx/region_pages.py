"""Regions on the embedded driver: addresses of their own in the arena, given out one behind the other and never again.

The end of a region takes it out of the shadow table, and its pages go back to the host. Generated code that finds
nothing in the shadow table looks here (translate/access.py): in an ended region a load gives zeros, a store goes
nowhere, an atomic operation gives zero, and each is counted.
"""

import ctypes
from array import array

from gpulease.daemon.drivers.interface import DriverError, OutOfMemory, RegionReturn
from gpulease.daemon.ptx.memory import Arena, Mapping
from gpulease.daemon.ptx.native.structures import REGION_GRANULE_BYTES, Returned

_WORD_BYTES = 8


class Regions:
    """The regions of one context, whose methods these are (drivers/interface.py).

    Attributes:
        address: Where generated code finds the `Returned`.
        taken_bytes: Bytes of the regions that have not ended.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        granules = arena.regions_bytes // REGION_GRANULE_BYTES
        head_bytes = ctypes.sizeof(Returned)
        # Behind the head: each granule's counter, and the counters, a region's at the place of its first granule.
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
        # Accesses that were seen when last asked, and the regions that were named.
        self._seen = 0
        self._named: set[int] = set()

    def open(self, size_bytes: int) -> int:
        """Give the next addresses out. Raises OutOfMemory where none are left."""
        if size_bytes <= 0 or size_bytes % REGION_GRANULE_BYTES:
            raise DriverError(f"a region's size must be a multiple of {REGION_GRANULE_BYTES} bytes, not {size_bytes}")
        if size_bytes > self._end - self._next:
            raise OutOfMemory(
                f"this session's regions have used {self._next - self._arena.regions_start} of"
                f" {self._arena.regions_bytes} bytes of addresses, which are never used again",
                hint="Free the lease and acquire another.",
            )
        address = self._next
        self._arena.allow(address, size_bytes)
        self._next += size_bytes
        self._active[address] = size_bytes
        self.taken_bytes += size_bytes
        return address

    def end(self, address: int) -> RegionReturn:
        """Have accesses counted from now on, and then give the memory back."""
        size_bytes = self._active.pop(address, None)
        if size_bytes is None:
            raise DriverError(f"{address:#x} is not the address of a region that can be ended")
        self._ended[address] = size_bytes
        counter = self.address + self._counter_of(address) * _WORD_BYTES
        self._fill_table(address, size_bytes, counter)
        self._arena.take_back(address, size_bytes)
        self.taken_bytes -= size_bytes
        return RegionReturn(size_bytes, 0)

    def release(self, address: int) -> None:
        """Let accesses fault."""
        size_bytes = self._ended.pop(address, None)
        if size_bytes is None:
            raise DriverError(f"{address:#x} is not the address of an ended region")
        self._fill_table(address, size_bytes, 0)

    def covers(self, address: int) -> bool:
        """Say whether an address is one of regions, given out or not."""
        return self._arena.regions_start <= address < self._end

    def bytes_at(self, address: int, size_bytes: int) -> memoryview:
        """Return so many bytes of one active region. Raises DriverError if they are not all in one."""
        for start, held in self._active.items():
            if start <= address and address + size_bytes <= start + held:
                offset = address - self._arena.memory.address
                return self._arena.memory.view[offset : offset + size_bytes]
        raise DriverError(f"{size_bytes} bytes at {address:#x} are not within one active region")

    def stray_accesses(self, address: int) -> int:
        """Return how many accesses there were in a region, by its first address, since it ended."""
        return self._words[self._counter_of(address)]

    def new_strays(self) -> list[tuple[int, int]]:
        """Return address and size of the ended regions in which something was accessed, each of them once."""
        if self._head.strays == self._seen:
            return []
        self._seen = self._head.strays
        found = [
            (address, size)
            for address, size in self._ended.items()
            if address not in self._named and self.stray_accesses(address)
        ]
        self._named.update(address for address, _ in found)
        return found

    def close(self) -> None:
        """Give the tables back; nothing may run any more."""
        self._words.release()
        self._memory.close()

    def _counter_of(self, address: int) -> int:
        return self._counters + (address - self._arena.regions_start) // REGION_GRANULE_BYTES

    def _fill_table(self, address: int, size_bytes: int, word: int) -> None:
        first = self._table + (address - self._arena.regions_start) // REGION_GRANULE_BYTES
        count = size_bytes // REGION_GRANULE_BYTES
        self._words[first : first + count] = memoryview(array("Q", [word]) * count)
