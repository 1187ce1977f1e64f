"""The allocations of a parkable session, in pages that it maps itself, at addresses that stay while they are parked.

The slice is one reserved range of addresses. The range of the session's regions follows it (region_pages.py), and one
call reserves both. The slice replaces cuMemAlloc and takes the same pages of the card (memory.py): an allocation of
more than 1 MiB has pages of its own, smaller allocations share pages of 2 MiB, and a shared page is released with the
last allocation in it. The context caches freed blocks above this module, as it does above cuMemAlloc.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gpulease.daemon.drivers.cuda.mapped_pages import MappedPages, Piece
from gpulease.daemon.drivers.cuda.memory import PAGE_BYTES, SHARING_BYTES, whole_pages
from gpulease.daemon.drivers.interface import DriverError, OutOfMemory

SLICE_ADDRESS: Final = 0x3000_0000_0000
"""Where the range of every parkable session begins, if the driver agrees: sessions never share a process, and at the
same address a session's pointers stay valid in any worker. It is far from all other addresses that a process maps."""

ROOM: Final = 16
"""The range's size in slices. A first fit among sizes of up to n pages needs at most the slice times the binary
logarithm of n (Robson, "Worst case fragmentation of first fit and best fit storage allocation strategies", 1977): some
16 for a slice of 128 GiB. Addresses cost nothing."""

MAX_RANGE_BYTES: Final = 4 << 40

REGIONS_BYTES: Final = 4 << 40
"""Addresses for the regions of a parkable session, in bytes. No region gets those of an earlier one, so a session that
opens regions forever uses them up; from then on it can't leave its process. 4 TiB are 4,096 regions of 1 GiB. A
separate reservation would begin at a multiple of 32 MiB (H200, driver 580)."""

MAX_LOOKS: Final = 16
"""Maximum number of ranges of about the right size that are examined before a larger range is cut."""

_SIZES: Final = 64


class FreeRanges:
    """Free ranges of bytes, each joined with its free neighbours, by the binary logarithm of their sizes.

    Args:
        border_bytes: No range is joined across a multiple of this; 0 for no such border.
    """

    def __init__(self, border_bytes: int = 0) -> None:
        self._border_bytes = border_bytes
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(_SIZES)]

    def add(self, start: int, size_bytes: int) -> tuple[int, int]:
        """Add a range; return the start and the size of the free range of which it is now part."""
        end = start + size_bytes
        if not self._is_border(start) and (before := self._starts.get(start)) is not None:
            self._remove(before)
            start = before
        if not self._is_border(end) and end in self._sizes:
            end += self._remove(end)
        self._insert(start, end - start)
        return start, end - start

    def take(self, size_bytes: int) -> int | None:
        """Take bytes from a free range, and return the first; None if no range has so many."""
        start = self._find(size_bytes)
        if start is None:
            return None
        rest_bytes = self._remove(start) - size_bytes
        if rest_bytes:
            self._insert(start + size_bytes, rest_bytes)
        return start

    def remove(self, start: int) -> None:
        self._remove(start)

    def _find(self, size_bytes: int) -> int | None:
        first = _bin_of(size_bytes)
        # In its own bin a range may be too small; in every bin after it, all are large enough.
        for _, start in zip(range(MAX_LOOKS), self._bins[first], strict=False):
            if self._sizes[start] >= size_bytes:
                return start
        for ranges in self._bins[first + 1 :]:
            if ranges:
                return next(iter(ranges))
        return next((start for start in self._bins[first] if self._sizes[start] >= size_bytes), None)

    def _is_border(self, at: int) -> bool:
        return bool(self._border_bytes) and at % self._border_bytes == 0

    def _insert(self, start: int, size_bytes: int) -> None:
        self._sizes[start] = size_bytes
        self._starts[start + size_bytes] = start
        self._bins[_bin_of(size_bytes)][start] = None

    def _remove(self, start: int) -> int:
        size_bytes = self._sizes.pop(start)
        del self._starts[start + size_bytes]
        del self._bins[_bin_of(size_bytes)][start]
        return size_bytes


def _bin_of(size_bytes: int) -> int:
    return size_bytes.bit_length() - 1


def _sizes_of(pieces: Mapping[int, Piece]) -> dict[int, int]:
    return {address: piece.size_bytes for address, piece in pieces.items()}


def _gaps(start: int, size_bytes: int, taken: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield start and size of each gap in a range that contains taken ranges, which are given by their starts."""
    at = start
    for address, taken_bytes in sorted(taken.items()):
        if address > at:
            yield at, address - at
        at = address + taken_bytes
    if at < start + size_bytes:
        yield at, start + size_bytes - at


class SliceAllocation:
    """An allocation; like pycuda's, its number is its address."""

    __slots__ = ("_address", "_size_bytes", "_slice")

    def __init__(self, pages: "SlicePages", address: int, size_bytes: int) -> None:
        self._slice = pages
        self._address = address
        self._size_bytes = size_bytes

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        """Free it; nothing that uses it may be in progress. Raises DriverError."""
        self._slice.give(self._address, self._size_bytes)


class SlicePages:
    """A parkable session's allocations.

    Args:
        pages: The context's mapped pages.
        slice_bytes: The lease's bytes.

    Raises:
        DriverError: The driver can't map pages, or has no addresses.
    """

    def __init__(self, pages: MappedPages, slice_bytes: int) -> None:
        if not pages.granule_bytes:
            raise DriverError("this card's driver can't map memory, so a session can't be parkable")
        self._pages = pages
        self._range_bytes = min(ROOM * whole_pages(slice_bytes), MAX_RANGE_BYTES)
        self._regions_bytes = REGIONS_BYTES
        try:
            self._address = pages.reserve(self._range_bytes + self._regions_bytes, SLICE_ADDRESS)
        except DriverError:
            # The driver then chooses the addresses of the session's regions.
            self._regions_bytes = 0
            self._address = pages.reserve(self._range_bytes, SLICE_ADDRESS)
        self._addresses = FreeRanges()
        self._addresses.add(self._address, self._range_bytes)
        # Free bytes of shared pages, and every piece by its address.
        self._shared = FreeRanges(PAGE_BYTES)
        self._pieces: dict[int, Piece] = {}

    def take(self, size_bytes: int) -> SliceAllocation:
        """Take a block of `block_bytes` (memory.py), which is not zeroed. Raises MemoryRefused or OutOfMemory."""
        if size_bytes > SHARING_BYTES:
            return SliceAllocation(self, self._take_pages(whole_pages(size_bytes)), size_bytes)
        address = self._shared.take(size_bytes)
        if address is None:
            self._shared.add(self._take_pages(PAGE_BYTES), PAGE_BYTES)
            address = self._shared.take(size_bytes)
        if address is None:
            raise OutOfMemory(f"a shared page has no room for {size_bytes} bytes")
        return SliceAllocation(self, address, size_bytes)

    def give(self, address: int, size_bytes: int) -> None:
        """Give a block back: its pages, or a shared page of which it was the last block, go back to the card."""
        if size_bytes <= SHARING_BYTES:
            address, free_bytes = self._shared.add(address, size_bytes)
            if free_bytes < PAGE_BYTES:
                return
            self._shared.remove(address)
        piece = self._pieces.pop(address)
        self._pages.drop(piece)
        self._addresses.add(address, piece.size_bytes)

    @property
    def range(self) -> tuple[int, int]:
        """The first address of the slice's range, and its size in bytes."""
        return self._address, self._range_bytes

    @property
    def regions_range(self) -> tuple[int, int]:
        """The first address of the range for regions, and its size in bytes: 0 without one."""
        return self._address + self._range_bytes, self._regions_bytes

    def saved(self) -> list[tuple[int, int, int]]:
        """Return address, size and place in the host memory of each parked piece, for `adopt`."""
        return [(address, piece.size_bytes, piece.saved_at) for address, piece in self._pieces.items()]

    def adopt(self, saved: Iterable[tuple[int, int, int]], blocks: Mapping[int, int]) -> dict[int, SliceAllocation]:
        """Enter the pieces of another process's slice with the same range, and the sizes of its blocks by address.

        Returns an allocation for each block. Raises ImageMismatch if bytes of a piece are missing.
        """
        for address, size_bytes, saved_at in saved:
            self._pieces[address] = piece = self._pages.adopt_piece(size_bytes, saved_at)
            self._pages.map(piece, address, size_bytes)
        self._addresses = FreeRanges()
        for start, size_bytes in _gaps(self._address, self._range_bytes, _sizes_of(self._pieces)):
            self._addresses.add(start, size_bytes)
        # Blocks of shared pages, by page.
        shared: dict[int, dict[int, int]] = {}
        for address, size_bytes in blocks.items():
            if size_bytes <= SHARING_BYTES:
                shared.setdefault(address - address % PAGE_BYTES, {})[address] = size_bytes
        for page, within in shared.items():
            for start, size_bytes in _gaps(page, PAGE_BYTES, within):
                self._shared.add(start, size_bytes)
        return {address: SliceAllocation(self, address, size_bytes) for address, size_bytes in blocks.items()}

    def close(self) -> None:
        """Give the addresses back; every block must have been given back."""
        if self._pieces:
            raise DriverError("the session has allocations left")
        self._pages.free_addresses(self._address, self._range_bytes + self._regions_bytes)

    def _take_pages(self, size_bytes: int) -> int:
        """Map new pages, and return their address. If a call fails, the effects of the earlier calls are undone."""
        address = self._addresses.take(size_bytes)
        if address is None:
            raise OutOfMemory(
                f"the session's addresses have no gap of {size_bytes} bytes", hint="Free something, or ask for less."
            )
        piece = None
        try:
            piece = self._pages.take(size_bytes)
            self._pages.map(piece, address, size_bytes)
            self._pages.allow(address, size_bytes)
        except BaseException:
            if piece is not None:
                self._pages.drop(piece)
            self._addresses.add(address, size_bytes)
            raise
        self._pieces[address] = piece
        return address
