"""Regions on CUDA: memory that the page tables map and unmap (CUDA driver API, "Virtual Memory Management").

A region is a range of addresses of its own, reserved once and never released: a stale pointer can't meet a later
region. Its memory is two pieces: a small first one, the scratch, and the rest. At its end the scratch is zeroed, the
rest goes back to the card, and the scratch is mapped repeatedly in the rest's place. So a kernel that still has a
pointer meets its own region's zeros, or what such kernels wrote there, and the context lives.

Mapping costs time for each piece, so the scratch grows with the region: 2 MiB under 64 MiB took 1 ms, under 8 GiB 111
ms (H200, driver 580.159). Mapped memory takes exactly its size, in pages of 2 MiB, and no kernel on other memory waits
for any of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gpulease.daemon.drivers.cuda.memory import PAGE_BYTES, whole_pages
from gpulease.daemon.drivers.cuda.refused_memory import MemoryRefused
from gpulease.daemon.drivers.interface import DriverError, OutOfMemory, Poll, RegionReturn

MAX_RESERVED_BYTES: Final = 32 << 40
"""Most addresses that all regions of a context take, ended ones included, in bytes. Stops a session that opens
regions for ever from using up the addresses that the driver needs itself: 64 TiB could be reserved."""

SCRATCH_PARTS: Final = 16
"""The scratch is the region's size divided by this, rounded up to whole pages; it is mapped at most so often."""

_OWN_STREAM: Final = 0
"""The driver's default stream. Only regions use it, and the context's streams do not synchronise with it
(streams.py). It exists anyway: another stream would take memory of the card."""


@dataclass(slots=True, eq=False)
class _Region:
    """A region's memory, and how far its end has come.

    Attributes:
        mapped: Address and size of each mapping.
        handles: The memory's handles: the scratch's, then the rest's.
        is_wiped: The scratch is being zeroed, or is zero.
    """

    size_bytes: int
    address: int = 0
    mapped: list[tuple[int, int]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    is_wiped: bool = False
    is_ending: bool = False
    is_ended: bool = False


class CudaRegions:
    """The regions of one context, which has the same methods (drivers/interface.py).

    Args:
        api: The driver API of cuda-bindings.
        failure: Makes the error of a failed call.
        wait: Waits until its first argument returns true, and polls.
    """

    def __init__(
        self, api: Any, failure: Callable[[Any], DriverError], wait: Callable[[Callable[[], bool], Poll], None]
    ) -> None:
        self._api = api
        self._failure = failure
        self._wait = wait
        self._granule_bytes: int | None = None
        self._regions: dict[int, _Region] = {}
        self.reserved_bytes = 0

    @property
    def granule_bytes(self) -> int:
        """The card's page size, if the driver can map pages; otherwise 0."""
        # Queried once. Pages of another size than PAGE_BYTES would not fit the bookkeeping: no regions then.
        if self._granule_bytes is None:
            option = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            error, least_bytes = self._api.cuMemGetAllocationGranularity(self._memory(), option)
            self._granule_bytes = 0 if error or PAGE_BYTES % int(least_bytes) else PAGE_BYTES
        return self._granule_bytes

    @staticmethod
    def kept_bytes(size_bytes: int) -> int:
        return whole_pages(-(-size_bytes // SCRATCH_PARTS))

    def open(self, size_bytes: int) -> int:
        """Map new memory and begin to zero it.

        It is not documented how the driver reuses a process's own memory. Raises MemoryRefused, and OutOfMemory where
        no addresses are left. A call that fails undoes what the calls before it did, except for the addresses.
        """
        # Step 1: what can be refused without the driver.
        if not self.granule_bytes:
            raise DriverError("this card's driver can't map memory, so there are no regions")
        if size_bytes <= 0 or size_bytes % self.granule_bytes:
            raise DriverError(f"a region's size must be a multiple of {self.granule_bytes} bytes, not {size_bytes}")
        if self.reserved_bytes + size_bytes > MAX_RESERVED_BYTES:
            raise OutOfMemory(
                f"this session's regions have used {self.reserved_bytes} of {MAX_RESERVED_BYTES} bytes of addresses,"
                " which are never used again",
                hint="Free the lease and acquire another.",
            )
        # Step 2: memory, addresses, mappings, access; then a memset in a stream that nothing else uses.
        region = _Region(size_bytes)
        try:
            self._map(region)
            self._begin_zeroing(region.address, size_bytes)
        except BaseException:
            self._drop(region)
            raise
        self._regions[region.address] = region
        return region.address

    def wipe(self, address: int) -> None:
        region = self._regions.get(address)
        if region is None or region.is_ending:
            raise DriverError(f"{address:#x} is not the address of a region that can be ended")
        if not region.is_wiped:
            self._begin_zeroing(address, self.kept_bytes(region.size_bytes))
            region.is_wiped = True

    def end(self, address: int, poll: Poll) -> RegionReturn:
        """Zero the scratch, unmap the rest, map the scratch in its place, release the rest.

        A poll that raises leaves the region mapped, and its scratch zeroed. If a call of the driver fails, the memory
        belongs to this process until `release`.
        """
        # Step 1: the scratch is zeroed, which may have begun long before. Only this wait can be ended.
        self.wipe(address)
        self._wait(self.is_zeroed, poll)
        region = self._regions[address]
        kept_bytes = self.kept_bytes(region.size_bytes)
        freed_bytes = region.size_bytes - kept_bytes
        # Step 2: from here on the region can't be used again, whatever fails.
        region.is_ending = True
        if freed_bytes:
            # Unmap the rest, and map the scratch over its range, piece by piece. An access in between would fault.
            self._unmap_last(region)
            for offset in range(kept_bytes, region.size_bytes, kept_bytes):
                self._map_at(region, offset, min(kept_bytes, region.size_bytes - offset), region.handles[0])
            # Access must be allowed for a mapping before its first use (cuMemSetAccess).
            self._allow(address + kept_bytes, freed_bytes)
            # Only now does the rest go back to the card: no address leads to it any more.
            self._release_last(region)
        region.is_ended = True
        return RegionReturn(freed_bytes, kept_bytes)

    def release(self, address: int) -> None:
        """Unmap and release what an ended region still has, even if its end failed. The addresses stay reserved."""
        region = self._regions.get(address)
        if region is None or not region.is_ending:
            raise DriverError(f"{address:#x} is not the address of an ended region")
        # Mappings first, then handles: memory is released when neither is left.
        self._drop(region)
        del self._regions[address]

    def free_bytes(self) -> int:
        """Return the card's free bytes (CUDA driver API, cuMemGetInfo)."""
        return int(self._check(self._api.cuMemGetInfo()))

    # --- one step each ---

    def _memory(self) -> Any:
        # Memory of the one card that this process sees, as cuMemAlloc would give it.
        api = self._api
        memory = api.CUmemAllocationProp()
        memory.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        memory.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        memory.location.id = 0
        return memory

    def _map(self, region: _Region) -> None:
        """Take the memory, and only then addresses, which are used up."""
        # Step 1: memory for the scratch and for the rest, separately, because the rest goes back alone.
        kept_bytes = self.kept_bytes(region.size_bytes)
        sizes = [size for size in (kept_bytes, region.size_bytes - kept_bytes) if size]
        for size_bytes in sizes:
            region.handles.append(self._check(self._api.cuMemCreate(size_bytes, self._memory(), 0)))
        # Step 2: addresses. They stay reserved for ever, so they are counted even if a later step fails.
        region.address = int(self._check(self._api.cuMemAddressReserve(region.size_bytes, self.granule_bytes, 0, 0)))
        self.reserved_bytes += region.size_bytes
        # Step 3: map both pieces one after another, and allow access to the whole.
        offset = 0
        for size_bytes, handle in zip(sizes, region.handles, strict=True):
            self._map_at(region, offset, size_bytes, handle)
            offset += size_bytes
        self._allow(region.address, region.size_bytes)

    def _map_at(self, region: _Region, offset: int, size_bytes: int, handle: Any) -> None:
        """Map the beginning of a handle's memory into a region."""
        self._check(self._api.cuMemMap(region.address + offset, size_bytes, 0, handle, 0))
        region.mapped.append((region.address + offset, size_bytes))

    def _allow(self, address: int, size_bytes: int) -> None:
        """Let kernels read and write what is mapped there."""
        api = self._api
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._check(api.cuMemSetAccess(address, size_bytes, [access], 1))

    def _begin_zeroing(self, address: int, size_bytes: int) -> None:
        self._check(self._api.cuMemsetD8Async(address, 0, size_bytes, _OWN_STREAM))

    def is_zeroed(self) -> bool:
        """Return whether all memsets have ended. Raises the error that ended the context."""
        (error,) = self._api.cuStreamQuery(_OWN_STREAM)
        if error == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((error,))
        return True

    def _drop(self, region: _Region) -> None:
        while region.mapped:
            self._unmap_last(region)
        while region.handles:
            self._release_last(region)

    def _unmap_last(self, region: _Region) -> None:
        """Undo the last mapping: cuMemUnmap takes whole mappings."""
        self._check(self._api.cuMemUnmap(*region.mapped[-1]))
        region.mapped.pop()

    def _release_last(self, region: _Region) -> None:
        self._check(self._api.cuMemRelease(region.handles[-1]))
        region.handles.pop()

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """Return the first value of a call of the driver. Raises the call's error."""
        # Out of memory may pass (refused_memory.py); every other error is the context's.
        error = answer[0]
        if error == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryRefused("the card can't give a region's memory now", hint="Free something or ask for less.")
        if error:
            raise self._failure(error)
        return answer[1] if len(answer) > 1 else None
