"""Pages that leave the card and return to their addresses, and what a call that fails on the way leaves."""

import contextlib
import itertools
import mmap
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest

from gpulease.daemon.drivers.cuda import mapped_pages
from gpulease.daemon.drivers.cuda.mapped_pages import QUIET_STEPS, STEPS_AHEAD, MappedPages
from gpulease.daemon.drivers.cuda.refused_memory import MemoryRefused
from gpulease.daemon.drivers.cuda.region_pages import CudaRegions
from gpulease.daemon.drivers.cuda.slice_pages import SlicePages
from gpulease.daemon.drivers.interface import DriverError, ImageMismatch, keep_waiting
from gpulease.daemon.host import copy_ring
from gpulease.daemon.host.copy_ring import CopyRing, RingEnd
from helpers.mapping_card import CARD_BYTES, MIB, PAGE, Card, Result, pages_on, wait

HOST_BYTES = 64 * MIB
STEP = 3 * MIB
"""Smaller than a piece, and across their borders."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.drivers.cuda.mapped_pages.PARK_STEP_BYTES", STEP)


@cache
def drawn_bytes(seed: int, sizes: tuple[int, ...]) -> tuple[bytes, ...]:
    """Random bytes of these sizes, drawn once for all scenes."""
    source = random.Random(seed)
    return tuple(map(source.randbytes, sizes))


class Scene:
    """A slice with allocations, and regions, one of them ended, all with bytes of their own."""

    def __init__(self) -> None:
        self.card = Card()
        self.pages: MappedPages = pages_on(self.card)
        self.slice = SlicePages(self.pages, HOST_BYTES)
        self.regions = CudaRegions(self.pages, wait)
        self.regions.use_range(*self.slice.regions_range)
        self.host = memoryview(mmap.mmap(-1, HOST_BYTES))
        self.ready: list[int] = []
        sizes = [512, 4096, MIB, 2 * PAGE]
        self.places = {int(self.slice.take(size)): size for size in sizes}
        self.region = self.regions.open(PAGE)
        self.ended = self.regions.open(3 * PAGE)
        self.regions.end(self.ended, keep_waiting)
        self.places |= {self.region: PAGE, self.ended + 2 * PAGE: PAGE}
        contents = drawn_bytes(3, tuple(self.places.values()))
        self.expected = dict(zip(self.places, contents, strict=True))
        for address, data in self.expected.items():
            self.card.poke(address, data)
        self.mapped = {address: size for address, (size, _, _) in self.card.mapped.items()}
        self.taken = self.card.taken

    def park(self, poll: Callable[[], None] = keep_waiting) -> None:
        moved = self.pages.park(self.host, self.ready.append, poll)
        assert moved.size_bytes == self.taken

    def take(self, size_bytes: int) -> None:
        """Allocate more."""
        address = int(self.slice.take(size_bytes))
        (self.expected[address],) = drawn_bytes(4, (size_bytes,))
        self.card.poke(address, self.expected[address])
        self.mapped = {at: size for at, (size, _, _) in self.card.mapped.items()}
        self.taken = self.card.taken

    def lend(self, most: int = 9) -> list[int]:
        return self.pages.lend(most, self.host, self.ready.append, keep_waiting)

    def move(self, fds: Sequence[int] = (), ring: CopyRing | None = None) -> None:
        """Continue in another process, on another card; `fds`, `ring`: what this one has lent, if it has."""
        saved, state = self.slice.saved(), self.regions.state()
        self.card = Card()
        self.pages = pages_on(self.card)
        self.slice, self.regions = SlicePages(self.pages, HOST_BYTES), CudaRegions(self.pages, wait)
        self.regions.use_range(*self.slice.regions_range)
        self.pages.adopt(self.host, fds, ring)
        self.slice.adopt(saved, {})
        if state is not None:
            self.regions.adopt(state)
        self.pages.assign_lent()
        assert self.pages.held_bytes == self.taken

    def bring_back(self, poll: Callable[[], None] = keep_waiting, *, is_pinned: bool = True) -> None:
        self.pages.take_again()
        self.pages.copy_back(poll, is_pinned=is_pinned)

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


# --- copying ahead ---


def copy_ahead(scene: Scene, calls: int = 1000) -> bool:
    """Copy QUIET_STEPS steps ahead in each call; return whether everything is copied."""
    is_whole = False
    for _ in range(calls):
        is_whole = is_whole or scene.pages.copy_ahead(scene.host, HOST_BYTES)
    return is_whole


def copied_steps(scene: Scene) -> int:
    """Park; return the number of steps that it copies."""
    scene.ready.clear()
    scene.park()
    return len(scene.ready)


def test_a_park_copies_what_was_not_copied_ahead() -> None:
    all_steps = copied_steps(Scene())
    for calls in range(all_steps // QUIET_STEPS + 1):
        scene = Scene()
        assert copy_ahead(scene, calls) is False
        # The pages stay where they are until the park.
        scene.check_here()
        assert bool(calls) == (0 < scene.pages.ahead_bytes <= scene.pages.held_bytes)
        assert copied_steps(scene) == all_steps - QUIET_STEPS * calls
        scene.check_parked()
        scene.bring_back()
        scene.check_here()
    scene = Scene()
    assert copy_ahead(scene)
    assert scene.pages.ahead_bytes == scene.pages.held_bytes
    assert copied_steps(scene) == 0
    scene.bring_back()
    scene.check_here()
    assert scene.pages.ahead_bytes == 0


def test_only_prepared_host_memory_is_copied_to() -> None:
    scene = Scene()
    for _ in range(10):
        assert not scene.pages.copy_ahead(scene.host, 2 * STEP)
    assert not any(scene.host[2 * STEP :])
    assert any(scene.host[: 2 * STEP])


CHANGES: dict[str, Callable[[Scene], object]] = {
    "allocate": lambda scene: scene.take(PAGE),
    "free": lambda scene: free_last(scene),
    "open a region": lambda scene: scene.regions.open(PAGE),
    "end a region": lambda scene: scene.regions.end(scene.region, keep_waiting),
    "lend": lambda scene: close_lent(scene.lend()),
    "forget": lambda scene: scene.pages.forget_ahead(),
}


def free_last(scene: Scene) -> None:
    address = next(reversed([at for at, size in scene.places.items() if size == 2 * PAGE]))
    scene.slice.give(address, 2 * PAGE)
    del scene.expected[address]


def close_lent(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("calls", [1, 1000])
def test_a_change_of_the_pages_makes_a_copy_ahead_void(name: str, calls: int) -> None:
    """The bytes lie elsewhere then, or are others."""
    scene = Scene()
    copy_ahead(scene, calls)
    CHANGES[name](scene)
    # Nothing is in flight any more, and what comes later is copied.
    assert (scene.pages._ahead, scene.pages.ahead_bytes) == (None, 0)
    for address, data in scene.expected.items():
        scene.expected[address] = data[::-1]
        scene.card.poke(address, data[::-1])
    scene.mapped = {address: size for address, (size, _, _) in scene.card.mapped.items()}
    scene.taken = scene.card.taken
    scene.expected = {at: data for at, data in scene.expected.items() if at in scene.mapped or at < scene.region}
    scene.park()
    scene.bring_back()
    scene.check_here()


def test_a_copy_ahead_does_not_count_for_other_host_memory() -> None:
    scene = Scene()
    assert copy_ahead(scene)
    scene.host = memoryview(mmap.mmap(-1, HOST_BYTES))
    scene.park()
    scene.bring_back()
    scene.check_here()


def test_another_process_has_all_pages_at_their_addresses() -> None:
    scene = Scene()
    for _ in range(3):
        scene.park()
        scene.move()
        scene.check_parked()
        scene.bring_back()
        scene.check_here()
    # Regions end, are released and open there as where they came from.
    taken = scene.card.taken
    assert scene.regions.end(scene.region, keep_waiting).freed_bytes == 0
    for address in (scene.region, scene.ended):
        scene.regions.release(address)
    assert scene.card.taken == taken - 2 * PAGE
    other = scene.regions.open(3 * PAGE)
    assert other >= scene.ended + 3 * PAGE
    assert scene.regions.end(other, keep_waiting).freed_bytes == 2 * PAGE


@pytest.fixture
def _small_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "LENT_BYTES", 2 * PAGE)


@pytest.mark.usefixtures("_small_lent", "_small_buffers")
@pytest.mark.parametrize("most", [0, 1, 9])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_lent_pages_are_copied_from_the_card_that_keeps_them(most: int, is_pinned: bool) -> None:
    scene = Scene()
    scene.take(3 * PAGE)
    for _ in range(3):
        former, taken = scene.card, scene.taken
        fds = scene.lend(most)
        assert len(fds) == min(most, 2)
        scene.move(fds)
        scene.check_parked()
        scene.bring_back(is_pinned=is_pinned)
        scene.check_here()
        # Nothing of the other card is held here, and nothing has changed there.
        assert not scene.card.sizes.keys() & scene.card.imported
        assert former.taken == taken
        # The host memory has only what was not lent.
        largest = sorted((piece.size_bytes for piece in scene.pages._pieces), reverse=True)
        assert scene.card.copied_back == taken - sum(largest[: min(most, 2)])


@pytest.mark.usefixtures("_small_lent")
@pytest.mark.parametrize("fails_at", range(1, 60, 8))
def test_a_copy_of_lent_pages_that_fails_leaves_them_to_their_process(fails_at: int) -> None:
    scene = Scene()
    former, before, expected = scene.card, dict(scene.card.mapped), dict(scene.expected)
    fds = scene.lend()
    scene.move(fds)
    scene.card.fail_at = scene.card.calls + fails_at
    with contextlib.suppress(DriverError):
        scene.bring_back()
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        return
    assert former.mapped == before
    assert all(former.peek(address, len(data)) == data for address, data in expected.items())
    scene.card.fail_at = 0
    # Its records can still be dropped, with what was lent to it.
    for piece in list(scene.pages._pieces):
        if not scene.pages.is_broken:
            scene.pages.drop(piece)
        elif piece.lent_fd >= 0:
            os.close(piece.lent_fd)


@pytest.mark.usefixtures("_small_lent")
def test_a_region_that_ends_before_its_lent_pages_are_copied_leaves_zeros() -> None:
    scene = Scene()
    # Its scratch has the size from which pieces are lent.
    ended = scene.regions.open(64 * PAGE)
    scene.card.poke(ended, b"secret")
    scene.taken = scene.card.taken
    scene.mapped = {address: size for address, (size, _, _) in scene.card.mapped.items()}
    scene.move(scene.lend())
    scene.regions.end(ended, keep_waiting)
    scene.bring_back()
    assert (ended, 4 * PAGE) in scene.card.zeroed
    assert all(scene.card.peek(address, len(data)) == data for address, data in scene.expected.items())
    assert not scene.card.sizes.keys() & scene.card.imported


@pytest.mark.usefixtures("_small_lent")
def test_pages_of_another_number_do_not_fit() -> None:
    scene = Scene()
    fds = scene.lend()
    try:
        with pytest.raises(ImageMismatch, match="2 pieces of memory were lent, and it has 1 of that size"):
            scene.move([*fds, fds[0]])
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.usefixtures("_small_lent")
def test_what_is_not_lent_must_be_in_the_host_memory() -> None:
    scene = Scene()
    fds = scene.lend()
    scene.host = scene.host[:PAGE]
    try:
        with pytest.raises(ImageMismatch, match="host memory is too small"):
            scene.move(fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_memory_at_no_address_is_not_lent() -> None:
    scene = Scene()
    assert scene.pages.can_lend()
    scene.pages.take(PAGE)
    assert not scene.pages.can_lend()


def drive(end: RingEnd) -> None:
    end.advance()


@contextlib.contextmanager
def rings() -> Iterator[tuple[CopyRing, CopyRing]]:
    """A ring as two processes map it."""
    ring = CopyRing()
    other = CopyRing(ring.fd)
    try:
        yield ring, other
    finally:
        ring.close()
        other.close()


@pytest.mark.usefixtures("_small_buffers")
def test_pages_pass_from_card_to_card_through_a_ring() -> None:
    scene = Scene()
    scene.take(3 * PAGE)
    for _ in range(3):
        former, taken = scene.card, scene.taken
        with rings() as (ring, other):
            end = scene.pages.fill_ring(ring)
            scene.move(ring=other)
            scene.check_parked()
            # The former process fills the ring whenever this one has emptied it.
            scene.bring_back(partial(drive, end))
            assert end.is_over
        scene.check_here()
        assert not scene.card.pinned
        assert former.taken == taken
        assert scene.card.copied_back == taken


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize("failure", ["breaks off", "stops", "has given up"])
def test_a_ring_that_is_not_filled_leaves_the_pages_to_their_process(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    if failure == "stops":
        monkeypatch.setattr(copy_ring, "STALL_S", 0.05)
    scene = Scene()
    former, before, expected = scene.card, dict(scene.card.mapped), dict(scene.expected)
    with rings() as (ring, other):
        end = scene.pages.fill_ring(ring)
        scene.move(ring=other)
        advances = itertools.count()

        def advance() -> None:
            if next(advances) < 2:
                end.advance()
            elif failure == "breaks off":
                ring.break_off()
            elif failure == "has given up":
                raise TimeoutError

        with pytest.raises(TimeoutError if failure == "has given up" else DriverError):
            scene.bring_back(advance)
        end.settle()
        assert not scene.card.pinned
    scene.check_parked()
    assert former.mapped == before
    assert all(former.peek(address, len(data)) == data for address, data in expected.items())


@pytest.mark.usefixtures("_small_buffers")
def test_a_region_that_ends_before_it_has_passed_the_ring_leaves_zeros() -> None:
    scene = Scene()
    ended, gone = scene.regions.open(64 * PAGE), scene.regions.open(2 * PAGE)
    scene.card.poke(ended, b"secret")
    scene.taken = scene.card.taken
    with rings() as (ring, other):
        end = scene.pages.fill_ring(ring)
        scene.move(ring=other)
        for region in (ended, gone):
            scene.regions.end(region, keep_waiting)
        scene.regions.release(gone)
        scene.bring_back(partial(drive, end))
    assert (ended, 4 * PAGE) in scene.card.zeroed
    assert all(scene.card.peek(address, len(data)) == data for address, data in scene.expected.items())


class LateCard(Card):
    """A card that reads the host's bytes as late as it may: when it is queried whether it has.

    `late`: How many more queries report that its copies have not ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, int, int, int]] = []
        self.late = 0

    def cuMemcpyHtoDAsync(self, address: int, host: int, size: int, stream: int) -> tuple[Any, ...]:
        self.copies.append((address, host, size, stream))
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert not self.copies, "bytes are still being copied there"
        return super().cuMemUnmap(address, size)

    def cuEventQuery(self, event: int) -> tuple[Any, ...]:
        if self.copies and self.late:
            self.late -= 1
            return (Result.CUDA_ERROR_NOT_READY,)
        for copy in self.copies:
            super().cuMemcpyHtoDAsync(*copy)
        self.copies.clear()
        return super().cuEventQuery(event)


@pytest.fixture
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Parts of several pieces share a buffer, and pieces lie across its borders.
    size_bytes, count = 3 * PAGE // 16, 3
    ring_bytes = copy_ring._HEAD_BYTES + count * size_bytes
    for name, value in (("BUFFER_BYTES", size_bytes), ("BUFFERS", count), ("_SIZE_BYTES", ring_bytes)):
        monkeypatch.setattr(copy_ring, name, value)
    monkeypatch.setattr(mapped_pages, "THREADS", 3)


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize("may_pin", [True, False])
def test_memory_that_is_not_pinned_returns_through_buffers(monkeypatch: pytest.MonkeyPatch, may_pin: bool) -> None:
    scene = Scene()
    monkeypatch.setattr(sys.modules[__name__], "Card", LateCard)
    for turn in range(1, 4):
        scene.park()
        scene.move()
        scene.card.may_pin = may_pin
        polls = itertools.count()

        def give_up(polls: Iterator[int] = polls, turn: int = turn) -> None:
            if next(polls) == turn:
                raise TimeoutError

        # One that is given up leaves it parked, and the buffers unused.
        assert isinstance(scene.card, LateCard)
        scene.card.late = 2 * turn
        with pytest.raises(TimeoutError):
            scene.bring_back(give_up, is_pinned=False)
        assert not scene.card.pinned
        scene.check_parked()
        scene.card.late = 0
        scene.bring_back(is_pinned=False)
        assert not scene.card.pinned
        scene.check_here()


def test_regions_that_are_no_multiple_of_their_scratch_have_all_pages_in_another_process() -> None:
    scene = Scene()
    ended = scene.regions.open(17 * PAGE)
    scene.regions.end(ended, keep_waiting)
    active = scene.regions.open(17 * PAGE)
    for region in (ended, active):
        # Behind the scratch lies one page more, which stays.
        scene.expected[region + 2 * PAGE] = data = random.Random(region).randbytes(PAGE)
        scene.card.poke(region + 2 * PAGE, data)
    scene.mapped = {address: size for address, (size, _, _) in scene.card.mapped.items()}
    scene.taken = scene.card.taken
    for _ in range(2):
        scene.park()
        scene.move()
        scene.bring_back()
        scene.check_here()
    assert scene.regions.end(active, keep_waiting).freed_bytes == 14 * PAGE


def test_addresses_of_released_regions_are_never_given_out_again() -> None:
    scene, known = Scene(), set[int]()
    scene.regions.end(scene.region, keep_waiting)
    for address in (scene.region, scene.ended):
        scene.regions.release(address)
        known |= set(range(address, address + 3 * PAGE, PAGE))
    scene.taken = scene.card.taken
    for _ in range(4):
        scene.park()
        scene.move()
        scene.bring_back()
        region = scene.regions.open(3 * PAGE)
        assert region not in known
        known |= set(range(region, region + 3 * PAGE, PAGE))
        scene.regions.end(region, keep_waiting)
        scene.regions.release(region)


def test_a_region_that_ends_before_another_process_has_it_on_its_card() -> None:
    scene = Scene()
    region = scene.regions.open(20 * PAGE)
    scene.taken = scene.card.taken
    scene.park()
    (at, size_bytes), kept = scene.regions.parked()[region], scene.regions.kept_bytes(20 * PAGE)
    assert size_bytes == 20 * PAGE
    scene.host[at : at + size_bytes] = b"\1" * size_bytes
    scene.move()
    assert scene.regions.parked()[region] == (at, size_bytes)
    scene.regions.end(region, keep_waiting)
    assert b"\1" not in bytes(scene.host[at : at + size_bytes])
    scene.taken -= 20 * PAGE - kept
    scene.bring_back()
    assert len(set(scene.card.covered(region, 20 * PAGE))) == 1
    assert scene.card.peek(region, kept) == bytes(kept)


def test_a_session_with_regions_outside_of_the_reserved_range_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.drivers.cuda.slice_pages.REGIONS_BYTES", 9 * PAGE)
    scene = Scene()
    start, size_bytes = scene.slice.regions_range
    inside = range(start, start + size_bytes)
    assert scene.region in inside
    assert scene.regions.open(2 * PAGE) in inside
    assert scene.regions.state() is not None
    outside = scene.regions.open(PAGE)
    assert outside not in inside
    with pytest.raises(DriverError, match="used up the addresses"):
        scene.regions.state()
    # There it is parked and returns as any other.
    scene.taken, scene.mapped = scene.card.taken, {at: size for at, (size, _, _) in scene.card.mapped.items()}
    scene.park()
    scene.bring_back()
    scene.check_here()


def test_a_driver_without_addresses_for_regions_has_them_elsewhere() -> None:
    card = Card()
    card.fail_at = 1
    pages = pages_on(card)
    made, regions = SlicePages(pages, HOST_BYTES), CudaRegions(pages, wait)
    assert made.regions_range[1] == 0
    regions.use_range(*made.regions_range)
    region = regions.open(PAGE)
    assert region not in range(made.range[0], sum(made.range))
    with pytest.raises(DriverError, match="used up the addresses"):
        regions.state()
    allocation = made.take(PAGE)
    allocation.free()
    made.close()


def test_a_session_with_a_region_whose_end_has_failed_stays() -> None:
    scene = Scene()
    region = scene.regions.open(20 * PAGE)
    scene.regions.wipe(region)
    # The poll of the memset, then the first unmapping.
    scene.card.fail_at = scene.card.calls + 2
    with pytest.raises(DriverError):
        scene.regions.end(region, keep_waiting)
    scene.card.fail_at = 0
    with pytest.raises(DriverError, match="could not be ended"):
        scene.regions.state()


@pytest.mark.parametrize("wrong", ["elsewhere", "no room", "outside", "beyond the host memory"])
def test_a_process_that_can_not_have_the_regions_does_not_adopt_them(wrong: str) -> None:
    scene, other = Scene(), Scene()
    scene.park()
    state = scene.regions.state()
    assert state is not None
    start, used_bytes, reserved_bytes, ((address, size_bytes, at, *flags), *_) = state
    card = Card()
    pages = pages_on(card)
    regions = CudaRegions(pages, wait)
    pages.adopt(scene.host)
    regions.use_range(start + (PAGE if wrong == "elsewhere" else 0), PAGE if wrong == "no room" else 64 * PAGE)
    if wrong == "outside":
        state = start, used_bytes, reserved_bytes, [(address + used_bytes, size_bytes, at, *flags)]
    if wrong == "beyond the host memory":
        state = start, used_bytes, reserved_bytes, [(address, size_bytes, HOST_BYTES - PAGE // 2, *flags)]
    with pytest.raises(ImageMismatch):
        regions.adopt(state)
    # Nothing of the card is taken, whatever came.
    assert card.taken == 0
    # A context that has had regions of its own adopts none.
    with pytest.raises(ImageMismatch):
        other.regions.adopt(state)


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
