"""The allocations of a parkable session: which pages they take of the card, and where their addresses lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.cuda.memory import SHARING_BYTES, Blocks, Pages, block_bytes
from gpulease.daemon.drivers.cuda.slice_pages import (
    REGIONS_BYTES,
    SLICE_ADDRESS,
    FreeRanges,
    SliceAllocation,
    SlicePages,
)
from gpulease.daemon.drivers.interface import DriverError, OutOfMemory
from helpers.mapping_card import CARD_BYTES, GIB, MIB, PAGE, Card, pages_on

SLICE = 64 * MIB
SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 5000), st.sampled_from([MIB, MIB + 1, 2 * MIB, 8 * MIB]))
STEPS = st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=60)


def make(card: Card, slice_bytes: int = SLICE) -> SlicePages:
    return SlicePages(pages_on(card), slice_bytes)


@settings(deadline=None)
@given(steps=STEPS)
def test_allocations_take_the_pages_that_the_bookkeeping_says(steps: list[int]) -> None:
    """Never two in one place, and of the card as much as `Pages` counts: it is what the slice is charged for."""
    card, counted = Card(), Pages()
    made = make(card)
    live: list[tuple[SliceAllocation, int]] = []
    for step in steps:
        if step > 0:
            size = block_bytes(step)
            allocation = made.take(size)
            address = int(allocation)
            assert address % 512 == 0
            assert all(address + size <= int(one) or int(one) + held <= address for one, held in live)
            card.covered(address // PAGE * PAGE, -(-(address + size) // PAGE) * PAGE - address // PAGE * PAGE)
            live.append((allocation, size))
            counted.add(address, size)
        elif live:
            allocation, _ = live.pop(step % len(live))
            counted.remove(int(allocation))
            allocation.free()
        assert card.taken == counted.taken_bytes
    for allocation, _ in live:
        allocation.free()
    assert (card.taken, card.mapped) == (0, {})
    made.close()
    assert card.reserved == {}


def test_the_range_is_where_every_worker_can_have_it() -> None:
    card = Card()
    allocation = make(card).take(4 * MIB)
    assert int(allocation) == SLICE_ADDRESS
    assert card.reserved == {SLICE_ADDRESS: 16 * SLICE + REGIONS_BYTES}


def test_what_was_freed_is_given_out_again_without_a_call() -> None:
    card = Card()
    made = make(card)
    kept, freed = made.take(1024), made.take(4096)
    freed.free()
    calls = card.calls
    assert int(made.take(4096)) == int(freed)
    assert card.calls == calls
    assert int(kept) // PAGE == int(freed) // PAGE


@pytest.mark.parametrize("size", [512, SHARING_BYTES, SHARING_BYTES + PAGE])
def test_a_call_that_fails_leaves_nothing(size: int) -> None:
    whole = Card()
    make(whole).take(block_bytes(size))
    card = Card()
    made = make(card)
    reserved = card.calls
    for fail_at in range(reserved + 1, whole.calls + 1):
        card.fail_at = card.calls + fail_at - reserved
        with pytest.raises(DriverError):
            made.take(block_bytes(size))
        assert (card.taken, card.mapped) == (0, {})
    card.fail_at = 0
    assert int(made.take(block_bytes(size))) == SLICE_ADDRESS


def test_a_card_that_is_full_says_so() -> None:
    card = Card()
    made = make(card, CARD_BYTES + 2 * GIB)
    with pytest.raises(OutOfMemory):
        made.take(CARD_BYTES + PAGE)
    assert card.taken == 0


def test_addresses_are_given_back_only_without_allocations() -> None:
    made = make(Card())
    allocation = made.take(512)
    with pytest.raises(DriverError, match="allocations left"):
        made.close()
    allocation.free()
    made.close()


def test_a_driver_that_maps_no_pages_has_no_parkable_sessions() -> None:
    with pytest.raises(DriverError, match="parkable"):
        make(Card(granularity=4 * PAGE))


def test_the_context_caches_freed_blocks_as_it_does_those_of_the_driver() -> None:
    card, blocks = Card(), Blocks()
    made = make(card)
    allocation = made.take(block_bytes(5 * MIB))
    blocks.add(int(allocation), 5 * MIB, allocation)
    blocks.cache(int(allocation))
    assert blocks.cached_bytes == card.taken
    dropped, _ = blocks.drop_oldest()
    dropped.free()
    assert card.taken == blocks.cached_bytes == 0


RANGES = st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60)


@settings(deadline=None)
@given(steps=RANGES, border=st.sampled_from([0, 64]))
def test_free_ranges_are_what_was_not_taken(steps: list[tuple[bool, int]], border: int) -> None:
    free, space = FreeRanges(border), 256
    for start in range(0, space, border or space):
        free.add(start, border or space)
    held: list[tuple[int, int]] = []
    for takes, number in steps:
        if takes:
            found = free.take(number)
            if found is not None:
                assert all(found + number <= at or at + size <= found for at, size in held)
                assert not border or found // border == (found + number - 1) // border
                held.append((found, number))
        elif held:
            free.add(*held.pop(number % len(held)))
    # Everything given back is one range again, or one for each page.
    for one in held:
        free.add(*one)
    for _ in range(space // (border or space)):
        assert free.take(border or space) is not None
    assert free.take(1) is None
