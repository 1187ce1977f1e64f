"""Regions on CUDA: memory that the page tables map and unmap (CUDA driver API, "Virtual Memory Management").

A region is a range of addresses of its own, reserved once and never released: a stale pointer can't point into a later
region. Addresses take no memory, so they are reserved for many regions at a time.

A region's memory is a small first piece, the scratch, and the rest. When the region ends, the scratch is zeroed, the
rest goes back to the card, and the scratch is mapped repeatedly in the rest's place. So a kernel that still has a
pointer finds zeros, or what such kernels wrote there, and the context survives.

Only a complete piece can be mapped (the driver answers CUDA_ERROR_NOT_SUPPORTED otherwise), so the rest is a multiple
of the scratch. If the region's size is not such a multiple, a third piece lies between the two, the remainder. It is
zeroed together with the scratch, and stays mapped.

The regions of a parkable session lie one after another in the range that its slice has reserved (slice_pages.py).
Another process that adopts the session reserves the same range. Once the range is used up, further regions get
addresses that the driver chooses. From then on the session can't leave its process.

Mapping costs time for each piece, so the scratch grows with the region: 2 MiB under 64 MiB took 1 ms, under 8 GiB 111
ms (H200, driver 580.159). Mapped memory takes exactly its size, in pages of 2 MiB. None of this delays kernels
that use other memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gpulease.daemon.drivers.cuda.mapped_pages import MappedPages, Piece
from gpulease.daemon.drivers.cuda.memory import whole_pages
from gpulease.daemon.drivers.interface import DriverError, ImageMismatch, OutOfMemory, Poll, RegionReturn

MAX_RESERVED_BYTES: Final = 32 << 40
"""Maximum range of addresses that all regions of a context take, ended ones included, in bytes. Stops a session that
keeps opening regions from using up the addresses that the driver needs itself: 64 TiB could be reserved."""

AHEAD_BYTES: Final = 16 << 30
"""Size of the range of addresses that is reserved at a time, in bytes. Reserving a range takes the driver 20 us,
whatever its size."""

MAX_CUT_BYTES: Final = AHEAD_BYTES // 4
"""Maximum size of a region that gets its addresses from such a range, in bytes; a larger region reserves its own. So
what is lost at the ends of ranges is at most a third of what the regions take."""

SCRATCH_PARTS: Final = 16
"""The scratch's size is the region's size divided by this, rounded up to whole pages. So the scratch is mapped at most
this many times."""


@dataclass(slots=True, eq=False)
class _Region:
    """A region's memory, and the progress of its end.

    Attributes:
        pieces: The scratch, the remainder and the rest, in the order of their addresses, as far as they exist.
        is_wiped: Whether the scratch is being zeroed, or is zero.
    """

    size_bytes: int
    address: int = 0
    pieces: list[Piece] = field(default_factory=list)
    is_wiped: bool = False
    is_ending: bool = False
    is_ended: bool = False


class CudaRegions:
    """The regions of one context, which has the same methods (drivers/interface.py).

    Args:
        pages: The context's mapped pages.
        wait: Waits until its first argument returns true, and polls.

    Attributes:
        reserved_bytes: Size of all addresses that regions have taken, in bytes.
    """

    def __init__(self, pages: MappedPages, wait: Callable[[Callable[[], bool], Poll], None]) -> None:
        self._pages = pages
        self._wait = wait
        self._regions: dict[int, _Region] = {}
        # Reserved addresses that no region has had yet.
        self._next_address = self._ahead_bytes = 0
        self.reserved_bytes = 0
        # The first address of the range that the slice has reserved, and whether all regions are there.
        self._start = 0
        self._is_in_range = False

    @property
    def granule_bytes(self) -> int:
        """The card's page size, if the driver can map pages; otherwise 0."""
        return self._pages.granule_bytes

    @staticmethod
    def kept_bytes(size_bytes: int) -> int:
        scratch_bytes = _scratch_bytes(size_bytes)
        return scratch_bytes + size_bytes % scratch_bytes

    def open(self, size_bytes: int) -> int:
        """Map new memory and begin to zero it.

        New memory is zeroed because it is not documented how the driver reuses a process's own memory. Raises
        MemoryRefused, and OutOfMemory if no addresses are left. If a call fails, the effects of the calls before it are
        undone, except that the addresses stay reserved.
        """
        # Step 1: refuse what can be refused without the driver.
        if not self.granule_bytes:
            raise DriverError("this card's driver can't map memory, so regions are not supported")
        if size_bytes <= 0 or size_bytes % self.granule_bytes:
            raise DriverError(f"a region's size must be a multiple of {self.granule_bytes} bytes, not {size_bytes}")
        if self.reserved_bytes + size_bytes > MAX_RESERVED_BYTES:
            raise OutOfMemory(
                f"this session's regions have used {self.reserved_bytes} of {MAX_RESERVED_BYTES} bytes of "
                "addresses, which can't be used again",
                hint="Free the lease and acquire another.",
            )
        # Step 2: take memory and addresses, map them and allow access; then queue a memset in a stream that nothing
        # else uses.
        region = _Region(size_bytes)
        try:
            self._map(region)
            self._pages.begin_zeroing(region.pieces[0], region.address, size_bytes)
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
            kept_bytes, offset = self.kept_bytes(region.size_bytes), 0
            for piece in region.pieces:
                if offset < kept_bytes:
                    self._pages.begin_zeroing(piece, address + offset, piece.size_bytes)
                offset += piece.size_bytes
            region.is_wiped = True

    def end(self, address: int, poll: Poll) -> RegionReturn:
        """Zero the scratch, unmap the rest, map the scratch in its place, release the rest.

        A poll that raises leaves the region mapped, and its scratch zeroed. If a driver call fails, the memory
        belongs to this process until `release`.
        """
        # Step 1: wait until the scratch is zeroed, which may have begun long before. Only `poll` can end this wait.
        self.wipe(address)
        self._wait(self._pages.is_zeroed, poll)
        region = self._regions[address]
        kept_bytes = self.kept_bytes(region.size_bytes)
        freed_bytes = region.size_bytes - kept_bytes
        # Step 2: from here on the region can't be used again, whatever fails.
        region.is_ending = True
        if freed_bytes:
            # Unmap the rest, and map the scratch over its range, piece by piece. An access in between would fault.
            kept_piece = region.pieces[-1]
            self._pages.unmap(kept_piece)
            self._map_over_rest(region)
            self._pages.allow(address + kept_bytes, freed_bytes)
            # Give the rest back to the card only now, when no address leads to it.
            self._pages.release(kept_piece)
            region.pieces.pop()
        region.is_ended = True
        return RegionReturn(freed_bytes, kept_bytes)

    def release(self, address: int) -> None:
        """Unmap and release an ended region's remaining memory, even if its end failed. The addresses stay reserved."""
        region = self._regions.get(address)
        if region is None or not region.is_ending:
            raise DriverError(f"{address:#x} is not the address of an ended region")
        self._drop(region)
        del self._regions[address]

    def is_zeroed(self) -> bool:
        """Return whether all memsets have ended. Raises the error that ended the context."""
        return self._pages.is_zeroed()

    # --- leaving the process ---

    def use_range(self, address: int, size_bytes: int) -> None:
        """Put regions into this reserved range. Called before the first region is opened."""
        self._start, self._is_in_range = address, True
        self._next_address, self._ahead_bytes = address, size_bytes

    def parked(self) -> dict[int, tuple[int, int]]:
        """Return, by address, where each parked region that has not ended lies in the host memory, and its size."""
        return {
            address: (region.pieces[0].saved_at, region.size_bytes)
            for address, region in self._regions.items()
            if not region.is_ending
        }

    def why_stays(self) -> str:
        """Return why another process could not give regions the same addresses; "" if it could."""
        if self.reserved_bytes and not self._is_in_range:
            return "its regions have used up the addresses that another process could give them"
        return ""

    def state(self) -> tuple[Any, ...] | None:
        """Return all parked regions, for `adopt` in another process; None if no region was ever opened.

        Raises DriverError if another process could not create a region again.
        """
        if not self.reserved_bytes:
            return None
        if why := self.why_stays():
            raise DriverError(why)
        if any(region.is_ending != region.is_ended for region in self._regions.values()):
            raise DriverError("one of its regions could not be ended")
        # A region's pieces lie one after another in the host memory, because they were taken one after another.
        regions = [
            (address, region.size_bytes, region.pieces[0].saved_at, region.is_wiped, region.is_ended)
            for address, region in self._regions.items()
        ]
        return self._start, self._next_address - self._start, self.reserved_bytes, regions

    def adopt(self, state: tuple[Any, ...]) -> None:
        """Take over the regions of another context's `state`. Raises ImageMismatch.

        The pages must be parked, and no region may have been opened here.
        """
        start, used_bytes, reserved_bytes, regions = state
        if start != self._start:
            raise ImageMismatch(f"its regions would begin at {self._start:#x}, not {start:#x}")
        if self.reserved_bytes or not 0 < reserved_bytes <= used_bytes <= self._ahead_bytes:
            raise ImageMismatch("its regions have no room in this context")
        # Addresses that were ever used are not used again.
        self.reserved_bytes = reserved_bytes
        self._next_address += used_bytes
        self._ahead_bytes -= used_bytes
        # Make the regions in their order in the host memory, with the mappings that they had.
        for address, size_bytes, saved_at, is_wiped, is_ended in regions:
            if not start <= address < address + size_bytes <= self._next_address:
                raise ImageMismatch(f"no region of {size_bytes} bytes can be at {address:#x}")
            region = _Region(size_bytes, address, [], is_wiped, is_ending=is_ended, is_ended=is_ended)
            at, kept_bytes = 0, self.kept_bytes(size_bytes)
            for piece_bytes in _piece_sizes(size_bytes):
                # The rest of an ended region went back to the card.
                if is_ended and at >= kept_bytes:
                    break
                piece = self._pages.adopt_piece(piece_bytes, saved_at + at)
                region.pieces.append(piece)
                self._pages.map(piece, address + at, piece_bytes)
                at += piece_bytes
            if is_ended:
                self._map_over_rest(region)
            self._regions[address] = region

    # --- one step each ---

    def _map_over_rest(self, region: _Region) -> None:
        """Map the scratch repeatedly, until it covers the addresses of the rest."""
        scratch = region.pieces[0]
        for offset in range(self.kept_bytes(region.size_bytes), region.size_bytes, scratch.size_bytes):
            self._pages.map(scratch, region.address + offset, scratch.size_bytes)

    def _map(self, region: _Region) -> None:
        """Take the memory first, and then the addresses, because these can't be used again."""
        pages = self._pages
        # Step 1: take memory for the scratch, the remainder and the rest, separately, because only the rest goes back.
        for size_bytes in _piece_sizes(region.size_bytes):
            region.pieces.append(pages.take(size_bytes))
        # Step 2: take addresses. They stay reserved forever, so they are counted even if a later step fails.
        region.address = self._take_addresses(region.size_bytes)
        self.reserved_bytes += region.size_bytes
        # Step 3: map the pieces one after another, and allow access to the whole.
        offset = 0
        for piece in region.pieces:
            pages.map(piece, region.address + offset, piece.size_bytes)
            offset += piece.size_bytes
        pages.allow(region.address, region.size_bytes)

    def _take_addresses(self, size_bytes: int) -> int:
        """Return the first address of a reserved range that no region has had."""
        # A page without memory follows each region: a kernel that writes past its end does not reach the next one.
        cut_bytes = size_bytes + self.granule_bytes
        self._is_in_range = self._is_in_range and cut_bytes <= self._ahead_bytes
        if size_bytes > MAX_CUT_BYTES and not self._is_in_range:
            return self._pages.reserve(size_bytes)
        if cut_bytes > self._ahead_bytes:
            self._next_address, self._ahead_bytes = self._pages.reserve(AHEAD_BYTES), AHEAD_BYTES
        address = self._next_address
        self._next_address += cut_bytes
        self._ahead_bytes -= cut_bytes
        return address

    def _drop(self, region: _Region) -> None:
        # Remove the mappings first, then the handles: memory is released when neither is left.
        for piece in reversed(region.pieces):
            self._pages.unmap(piece)
        while region.pieces:
            self._pages.release(region.pieces[-1])
            region.pieces.pop()


def _scratch_bytes(size_bytes: int) -> int:
    return whole_pages(-(-size_bytes // SCRATCH_PARTS))


def _piece_sizes(size_bytes: int) -> list[int]:
    """Return the sizes of a region's pieces, in the order of their addresses."""
    scratch_bytes, kept_bytes = _scratch_bytes(size_bytes), CudaRegions.kept_bytes(size_bytes)
    return [
        piece_bytes
        for piece_bytes in (scratch_bytes, kept_bytes - scratch_bytes, size_bytes - kept_bytes)
        if piece_bytes
    ]
