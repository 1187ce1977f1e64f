"""What regions ask of the driver, and what a call that fails leaves; on a driver that checks its rules, without a card.

The rules are the CUDA driver API's, "Virtual Memory Management".
"""

import pytest

from gpulease.daemon.drivers.cuda.region_pages import AHEAD_BYTES, MAX_CUT_BYTES, CudaRegions
from gpulease.daemon.drivers.interface import DriverError, OutOfMemory, RegionReturn, keep_waiting
from helpers.mapping_card import CARD_BYTES, GIB, MIB, PAGE, Card, pages_on, wait


def make(card: Card) -> CudaRegions:
    return CudaRegions(pages_on(card), wait)


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def regions(card: Card) -> CudaRegions:
    return make(card)


SIZES = [PAGE, 2 * PAGE, 15 * PAGE, 16 * PAGE, 17 * PAGE, 33 * PAGE, 63 * PAGE, 64 * MIB, GIB, GIB + 3 * PAGE]


@pytest.mark.parametrize("size", SIZES)
def test_a_region_takes_its_size_until_it_ends_and_then_its_scratch(
    card: Card, regions: CudaRegions, size: int
) -> None:
    address = regions.open(size)
    assert card.taken == size
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
    opened, *kept = card.zeroed
    assert opened == (address, size)
    # The kept pieces, one behind the other.
    ends = [at + span for at, span in kept]
    assert [at for at, _ in kept] == [address, *ends[:-1]]
    assert ends[-1] == address + regions.kept_bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_an_ended_region_is_its_own_scratch_from_end_to_end(card: Card, regions: CudaRegions, size: int) -> None:
    other = regions.open(size)
    address = regions.open(size)
    regions.end(address, keep_waiting)
    handles = card.covered(address, size)
    # The scratch; and what remains of sizes that are not a multiple of it, once.
    assert len(set(handles)) == 1 + (size % card.sizes[handles[0]] > 0)
    assert len(handles) <= 16
    assert len(set(handles)) == 1 or handles.count(handles[1]) == 1
    assert regions.kept_bytes(size) < size // 8 + 2 * PAGE
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


def test_addresses_are_reserved_for_many_regions_at_a_time(card: Card, regions: CudaRegions) -> None:
    sizes = [PAGE, 64 * MIB, MAX_CUT_BYTES, MAX_CUT_BYTES, MAX_CUT_BYTES, MAX_CUT_BYTES, PAGE]
    places = [(regions.open(size), size) for size in sizes]
    # The sixth had no room in the first reservation, and the seventh is in the second.
    assert list(card.reserved.values()) == [AHEAD_BYTES, AHEAD_BYTES]
    # A page without memory follows each.
    ends = [address + size for address, size in sorted(places)]
    assert all(end + PAGE <= start for end, (start, _) in zip(ends, sorted(places)[1:], strict=False))
    assert not set(ends) & card.mapped.keys()


def test_a_large_region_has_a_reservation_of_its_own(card: Card, regions: CudaRegions) -> None:
    small = regions.open(PAGE)
    large = regions.open(MAX_CUT_BYTES + PAGE)
    assert card.reserved[large] == MAX_CUT_BYTES + PAGE
    assert regions.open(PAGE) == small + 2 * PAGE


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
        with pytest.raises(DriverError, match="regions are not supported"):
            regions.open(PAGE)
