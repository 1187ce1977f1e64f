"""Pages that leave the card and return to their addresses, and what a call that fails on the way leaves."""

import random
from collections.abc import Callable

import pytest

from gpulease.daemon.drivers.cuda.mapped_pages import STEPS_AHEAD, MappedPages
from gpulease.daemon.drivers.cuda.refused_memory import MemoryRefused
from gpulease.daemon.drivers.cuda.region_pages import CudaRegions
from gpulease.daemon.drivers.cuda.slice_pages import SlicePages
from gpulease.daemon.drivers.interface import DriverError, keep_waiting
from helpers.mapping_card import CARD_BYTES, MIB, PAGE, Card, pages_on, wait

HOST_BYTES = 64 * MIB
STEP = 3 * MIB
"""Smaller than a piece, and across their borders."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.drivers.cuda.mapped_pages.PARK_STEP_BYTES", STEP)


class Scene:
    """A slice with allocations, and regions, one of them ended, all with bytes of their own."""

    def __init__(self) -> None:
        self.card = Card()
        self.pages: MappedPages = pages_on(self.card)
        self.slice = SlicePages(self.pages, HOST_BYTES)
        self.regions = CudaRegions(self.pages, wait)
        self.host = memoryview(bytearray(HOST_BYTES))
        self.ready: list[int] = []
        source = random.Random(3)
        sizes = [512, 4096, MIB, 2 * PAGE]
        self.places = {int(self.slice.take(size)): size for size in sizes}
        self.region = self.regions.open(PAGE)
        self.ended = self.regions.open(3 * PAGE)
        self.regions.end(self.ended, keep_waiting)
        self.places |= {self.region: PAGE, self.ended + 2 * PAGE: PAGE}
        self.expected = {address: source.randbytes(size) for address, size in self.places.items()}
        for address, data in self.expected.items():
            self.card.poke(address, data)
        self.mapped = {address: size for address, (size, _, _) in self.card.mapped.items()}
        self.taken = self.card.taken

    def park(self, poll: Callable[[], None] = keep_waiting) -> None:
        moved = self.pages.park(self.host, self.ready.append, poll)
        assert moved.size_bytes == self.taken

    def bring_back(self, poll: Callable[[], None] = keep_waiting) -> None:
        self.pages.take_again()
        self.pages.copy_back(poll)

    def check_here(self) -> None:
        assert not self.pages.is_parked
        assert self.card.taken == self.taken == self.pages.held_bytes
        assert {address: size for address, (size, _, _) in self.card.mapped.items()} == self.mapped
        for address, data in self.expected.items():
            assert self.card.peek(address, len(data)) == data

    def check_parked(self) -> None:
        assert self.pages.is_parked
        assert (self.card.taken, self.card.mapped) == (0, {})


def test_all_pages_leave_the_card_and_return_to_their_addresses() -> None:
    scene = Scene()
    for _ in range(3):
        scene.park()
        scene.check_parked()
        scene.bring_back()
        scene.check_here()
    # Each step was prepared before the card wrote there.
    assert scene.ready[0] <= STEP
    assert max(scene.ready) == scene.taken


def test_what_a_session_does_afterwards_works_as_before() -> None:
    scene = Scene()
    scene.park()
    scene.bring_back()
    scene.regions.end(scene.region, keep_waiting)
    scene.regions.release(scene.ended)
    other = scene.slice.take(3 * PAGE)
    other.free()
    scene.taken = scene.card.taken
    scene.park()
    scene.check_parked()


class GivenUpError(Exception):
    pass


def test_a_copy_that_is_given_up_changes_nothing() -> None:
    scene = Scene()

    def poll() -> None:
        raise GivenUpError

    scene.card.busy = 1
    with pytest.raises(GivenUpError):
        scene.park(poll)
    scene.check_here()
    scene.park()
    scene.card.busy = 1
    with pytest.raises(GivenUpError):
        scene.bring_back(poll)
    scene.check_parked()
    scene.bring_back()
    scene.check_here()


def test_no_more_steps_than_a_few_are_in_flight() -> None:
    scene = Scene()
    scene.park()
    assert scene.card.events == STEPS_AHEAD


def test_a_park_that_fails_either_changed_nothing_or_is_broken() -> None:
    whole = Scene()
    before = whole.card.calls
    whole.park()
    for number in range(1, whole.card.calls - before + 1):
        scene = Scene()
        scene.card.fail_at = scene.card.calls + number
        with pytest.raises(DriverError):
            scene.park()
        if not scene.pages.is_broken:
            scene.check_here()
            scene.card.fail_at = 0
            scene.park()
            scene.check_parked()


def test_a_return_that_fails_leaves_it_parked_and_the_card_empty() -> None:
    whole = Scene()
    whole.park()
    before = whole.card.calls
    whole.bring_back()
    for number in range(1, whole.card.calls - before + 1):
        scene = Scene()
        scene.park()
        scene.card.fail_at = scene.card.calls + number
        with pytest.raises(DriverError):
            scene.bring_back()
        assert not scene.pages.is_broken
        scene.check_parked()
        scene.card.fail_at = 0
        scene.bring_back()
        scene.check_here()


def test_a_card_that_has_become_full_refuses_the_return() -> None:
    scene = Scene()
    scene.park()
    _, others = scene.card.cuMemCreate(CARD_BYTES - PAGE, None, 0)
    with pytest.raises(MemoryRefused):
        scene.bring_back()
    assert scene.card.taken == CARD_BYTES - PAGE
    scene.card.cuMemRelease(others)
    scene.card.lost.pop(others)
    scene.bring_back()
    scene.check_here()


def test_nothing_is_taken_of_the_card_for_a_parked_session() -> None:
    scene = Scene()
    scene.park()
    for take in (lambda: scene.slice.take(4 * PAGE), lambda: scene.regions.open(PAGE)):
        with pytest.raises(DriverError, match="parked"):
            take()
    scene.check_parked()


def test_a_region_that_ends_while_it_is_parked_is_zeroed_in_the_host() -> None:
    scene = Scene()
    region = scene.regions.open(20 * PAGE)
    scene.card.poke(region, b"\1" * (2 * PAGE))
    scene.card.poke(region + 2 * PAGE, b"\2" * PAGE)
    scene.taken = scene.card.taken
    scene.park()
    assert bytes(scene.host).count(b"\1" * PAGE) == 2
    kept = scene.regions.kept_bytes(20 * PAGE)
    assert scene.regions.end(region, keep_waiting).freed_bytes == 20 * PAGE - kept
    assert b"\1" * 4096 not in bytes(scene.host)
    assert b"\2" * 4096 not in bytes(scene.host)
    scene.taken -= 20 * PAGE - kept
    scene.bring_back()
    assert len(set(scene.card.covered(region, 20 * PAGE))) == 1
    assert scene.card.peek(region, kept) == bytes(kept)
    assert scene.card.peek(region + kept, kept) == bytes(kept)
    scene.regions.release(region)
    scene.taken -= kept
    scene.check_here()


def test_what_is_dropped_while_it_is_parked_is_zeroed_in_the_host() -> None:
    scene = Scene()
    allocation = scene.slice.take(2 * PAGE)
    scene.card.poke(int(allocation), b"\1" * (2 * PAGE))
    scene.taken = scene.card.taken
    scene.park()
    allocation.free()
    assert b"\1" * 4096 not in bytes(scene.host)
    scene.taken -= 2 * PAGE
    scene.bring_back()
    scene.check_here()
