"""What regions ask of the driver, and what a call that fails leaves; on a driver that checks its rules, without a card.

The rules are the CUDA driver API's, "Virtual Memory Management".
"""

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease.daemon.drivers.cuda.region_pages import CudaRegions
from gpulease.daemon.drivers.interface import DriverError, OutOfMemory, Poll, RegionReturn, keep_waiting

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
CARD_BYTES = 64 * GIB


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600


class Card:
    """A driver API; the attributes say what it holds.

    Attributes:
        reserved: Size by address.
        mapped: (size, handle, whether accessible) by address.
        sizes: Bytes by handle that was not released.
        zeroed: (address, size) of each memset.
        fail_at: Number of the call that fails.
        busy: How often the stream is not ready yet.
    """

    CUresult = Result
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, granularity: int = PAGE) -> None:
        self.granularity = granularity
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int, bool]] = {}
        self.sizes: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.zeroed: list[tuple[int, int]] = []
        self.calls = 0
        self.fail_at = 0
        self.error = Result.CUDA_ERROR_INVALID_VALUE
        self.busy = 0
        self._next = 1 << 40

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _ok(self) -> Result:
        self.calls += 1
        return self.error if self.calls == self.fail_at else Result.CUDA_SUCCESS

    @property
    def taken(self) -> int:
        """Bytes that some handle or some mapping holds."""
        held = {handle for _, handle, _ in self.mapped.values()} | set(self.sizes)
        return sum((self.sizes | self.lost)[handle] for handle in held)

    def cuMemGetAllocationGranularity(self, memory: Any, option: int) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS, self.granularity)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return (self._ok(), CARD_BYTES - self.taken, CARD_BYTES)

    def cuMemCreate(self, size: int, memory: Any, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error, None)
        assert size > 0
        assert size % PAGE == 0
        if self.taken + size > CARD_BYTES:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
        handle = self.calls
        self.sizes[handle] = size
        return (Result.CUDA_SUCCESS, handle)

    def cuMemAddressReserve(self, size: int, alignment: int, at: int, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error, None)
        address, self._next = self._next, self._next + size
        self.reserved[address] = size
        return (Result.CUDA_SUCCESS, address)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert offset == 0
        assert size <= self.sizes[handle]
        assert any(start <= address and address + size <= start + span for start, span in self.reserved.items())
        assert all(address + size <= start or start + span <= address for start, (span, _, _) in self.mapped.items())
        self.mapped[address] = (size, handle, False)
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert (access[0].flags, access[0].location.type, access[0].location.id, count) == (3, 1, 0, 1)
        at = address
        while at < address + size:
            span, handle, _ = self.mapped[at]
            self.mapped[at] = (span, handle, True)
            at += span
        assert at == address + size
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert not self.busy, "it is being zeroed"
        assert self.mapped.pop(address)[0] == size
        return (Result.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        self.lost[handle] = self.sizes.pop(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        _, _, is_accessible = self.mapped[address]
        assert is_accessible
        assert value == 0
        self.zeroed.append((address, size))
        return (Result.CUDA_SUCCESS,)

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        if self.busy:
            self.busy -= 1
            return (Result.CUDA_ERROR_NOT_READY,)
        return (self._ok(),)

    def covered(self, address: int, size: int) -> list[int]:
        """The handles under a range, all accessible, without a hole."""
        handles, at = [], address
        while at < address + size:
            span, handle, is_accessible = self.mapped[at]
            assert is_accessible
            handles.append(handle)
            at += span
        assert at == address + size
        return handles


def wait(is_done: Callable[[], bool], poll: Poll) -> None:
    while not is_done():
        poll()


def make(card: Card) -> CudaRegions:
    return CudaRegions(card, lambda error: DriverError(f"failed: {error!r}"), wait)


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def regions(card: Card) -> CudaRegions:
    return make(card)


SIZES = [PAGE, 2 * PAGE, 15 * PAGE, 16 * PAGE, 17 * PAGE, 33 * PAGE, 64 * MIB, GIB, GIB + 3 * PAGE]


@pytest.mark.parametrize("size", SIZES)
def test_a_region_takes_its_size_until_it_ends_and_then_its_scratch(
    card: Card, regions: CudaRegions, size: int
) -> None:
    address = regions.open(size)
    assert (card.taken, regions.free_bytes()) == (size, CARD_BYTES - size)
    kept = regions.kept_bytes(size)
    assert regions.end(address, keep_waiting) == RegionReturn(size - kept, kept)
    assert card.taken == kept
    regions.release(address)
    assert (card.taken, card.mapped, card.sizes) == (0, {}, {})


@pytest.mark.parametrize("size", SIZES)
def test_a_region_is_zeroed_whole_when_it_opens_and_its_scratch_when_it_ends(
    card: Card, regions: CudaRegions, size: int
) -> None:
    address = regions.open(size)
    regions.end(address, keep_waiting)
    assert card.zeroed == [(address, size), (address, regions.kept_bytes(size))]


@pytest.mark.parametrize("size", SIZES)
def test_an_ended_region_is_its_own_scratch_from_end_to_end(card: Card, regions: CudaRegions, size: int) -> None:
    other = regions.open(size)
    address = regions.open(size)
    regions.end(address, keep_waiting)
    handles = card.covered(address, size)
    assert len(set(handles)) == 1
    assert len(handles) <= 16
    assert not set(handles) & set(card.covered(other, size))


@pytest.mark.parametrize("size", [PAGE, 40 * PAGE])
def test_an_opening_that_fails_leaves_nothing_but_addresses(size: int) -> None:
    whole = Card()
    make(whole).open(size)
    for fail_at in range(1, whole.calls + 1):
        card = Card()
        card.fail_at = fail_at
        regions = make(card)
        with pytest.raises(DriverError):
            regions.open(size)
        address = regions.open(size)
        assert card.taken == size, fail_at
        card.covered(address, size)


@pytest.mark.parametrize("size", [PAGE, 40 * PAGE])
def test_an_end_that_fails_keeps_its_bytes_until_the_release(size: int) -> None:
    whole = Card()
    regions = make(whole)
    address = regions.open(size)
    opened = whole.calls
    regions.end(address, keep_waiting)
    for fail_at in range(opened + 1, whole.calls + 1):
        card = Card()
        card.fail_at = fail_at
        regions = make(card)
        address = regions.open(size)
        with pytest.raises(DriverError):
            regions.end(address, keep_waiting)
        assert card.taken == size
        try:
            regions.release(address)
        except DriverError:
            # Nothing was changed yet: it can be ended again.
            regions.end(address, keep_waiting)
            regions.release(address)
        assert (card.taken, card.mapped) == (0, {}), fail_at


def test_a_release_that_fails_can_be_done_again(card: Card, regions: CudaRegions) -> None:
    address = regions.open(40 * PAGE)
    regions.end(address, keep_waiting)
    for _ in range(30):
        card.fail_at = card.calls + 2
        try:
            regions.release(address)
        except DriverError:
            continue
        break
    assert (card.taken, card.mapped) == (0, {})


class GivenUpError(Exception):
    pass


def give_up() -> None:
    raise GivenUpError


def test_an_opening_does_not_wait_until_its_memory_is_zero(card: Card, regions: CudaRegions) -> None:
    card.busy = 2
    regions.open(8 * PAGE)
    assert [regions.is_zeroed() for _ in range(3)] == [False, False, True]


def test_a_scratch_is_zeroed_once_before_its_end(card: Card, regions: CudaRegions) -> None:
    address = regions.open(32 * PAGE)
    regions.wipe(address)
    regions.wipe(address)
    assert len(set(card.covered(address, 32 * PAGE))) == 2
    regions.end(address, keep_waiting)
    assert card.zeroed == [(address, 32 * PAGE), (address, 2 * PAGE)]


def test_an_end_given_up_leaves_the_region_mapped(card: Card, regions: CudaRegions) -> None:
    address = regions.open(8 * PAGE)
    card.busy = 2
    with pytest.raises(GivenUpError):
        regions.end(address, give_up)
    assert len(set(card.covered(address, 8 * PAGE))) == 2
    assert regions.end(address, keep_waiting) == RegionReturn(7 * PAGE, PAGE)


def test_a_card_that_is_full_says_so(card: Card, regions: CudaRegions) -> None:
    with pytest.raises(OutOfMemory):
        regions.open(CARD_BYTES + PAGE)
    assert (card.taken, regions.reserved_bytes) == (0, 0)


def test_addresses_are_used_once_and_their_number_is_bounded(
    card: Card, regions: CudaRegions, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, places = 32 * GIB, 20
    monkeypatch.setattr("gpulease.daemon.drivers.cuda.region_pages.MAX_RESERVED_BYTES", places * size)
    seen = set()
    for _ in range(places):
        address = regions.open(size)
        seen.add(address)
        regions.end(address, keep_waiting)
        regions.release(address)
    assert len(seen) == places
    with pytest.raises(OutOfMemory, match="addresses"):
        regions.open(PAGE)


@pytest.mark.parametrize("size", [0, -PAGE, MIB, PAGE + 1])
def test_a_size_that_is_no_number_of_pages_is_refused(card: Card, regions: CudaRegions, size: int) -> None:
    with pytest.raises(DriverError, match="multiple"):
        regions.open(size)
    assert card.calls == 0


def test_a_region_ends_once_and_is_released_behind_its_end(regions: CudaRegions) -> None:
    address = regions.open(PAGE)
    with pytest.raises(DriverError, match="ended region"):
        regions.release(address)
    regions.end(address, keep_waiting)
    with pytest.raises(DriverError, match="can be ended"):
        regions.end(address, keep_waiting)
    regions.release(address)
    with pytest.raises(DriverError, match="ended region"):
        regions.release(address)


@pytest.mark.parametrize(("granularity", "granule"), [(PAGE, PAGE), (64 << 10, PAGE), (4 * PAGE, 0)])
def test_the_granule_is_a_page_where_the_driver_can_map_it(granularity: int, granule: int) -> None:
    regions = make(Card(granularity))
    assert regions.granule_bytes == granule
    if not granule:
        with pytest.raises(DriverError, match="no regions"):
            regions.open(PAGE)
