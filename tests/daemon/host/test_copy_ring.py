"""A ring of buffers: what passes through it, who may stop it, and what a hostile other end can't do."""

import ctypes
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.host import copy_ring
from gpulease.daemon.host.copy_ring import Batch, CopyRing, RingBroken, RingEnd, batches, run

BUFFER, COUNT = 4096, 3


@pytest.fixture(autouse=True, scope="module")
def _small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BUFFER_BYTES", BUFFER), ("BUFFERS", COUNT)):
            patch.setattr(copy_ring, name, value)
        patch.setattr(copy_ring, "_SIZE_BYTES", copy_ring._HEAD_BYTES + COUNT * BUFFER)
        yield


@contextmanager
def shared() -> Iterator[tuple[CopyRing, CopyRing]]:
    ring = CopyRing()
    other = CopyRing(ring.fd)
    try:
        yield ring, other
    finally:
        ring.close()
        other.close()


def drive(end: RingEnd) -> None:
    end.advance()


class Memory:
    """Items in ordinary memory; a copy is done when `is_done` was called a number of times."""

    def __init__(self, items: Sequence[bytes], slowness: int = 0) -> None:
        self.items = [bytearray(item) for item in items]
        self.slowness = slowness
        self.in_flight = 0

    def end(self, ring: CopyRing, *, fills: bool) -> RingEnd:
        def begin(batch: Batch, buffer: int) -> list[int]:
            for item, start, size, at in batch:
                if fills:
                    ctypes.memmove(buffer + at, bytes(self.items[item][start : start + size]), size)
                else:
                    self.items[item][start : start + size] = ctypes.string_at(buffer + at, size)
            self.in_flight += 1
            return [self.slowness]

        def is_done(left: list[int]) -> bool:
            left[0] -= 1
            self.in_flight -= left[0] < 0
            return left[0] < 0

        return RingEnd(ring, batches(map(len, self.items)), begin, is_done, fills=fills)


@given(st.lists(st.integers(0, 3 * BUFFER), max_size=12))
def test_batches_have_every_byte_once_and_share_buffers(sizes: list[int]) -> None:
    made = list(batches(sizes))
    covered = [(part.item, part.start + n) for batch in made for part in batch for n in range(0, part.size_bytes, 1)]
    assert covered == [(item, n) for item, size in enumerate(sizes) for n in range(size)]
    for batch in made:
        places = [(part.at, part.size_bytes) for part in batch]
        assert all(at + size == after for (at, size), (after, _) in itertools.pairwise(places))
        assert places[0][0] == 0
    # Every buffer but the last is full.
    assert all(sum(part.size_bytes for part in batch) == BUFFER for batch in made[:-1])


@pytest.mark.parametrize("slowness", [(0, 0), (3, 0), (0, 3), (2, 2)])
def test_all_bytes_pass_in_one_process_or_between_two(slowness: tuple[int, int]) -> None:
    rng = random.Random(1)
    items = [rng.randbytes(size) for size in (5, 3 * BUFFER, 1, 0, BUFFER + 7, 9 * BUFFER)]
    source, target = Memory(items, slowness[0]), Memory([bytes(len(item)) for item in items], slowness[1])
    with shared() as (ring, other):
        # Between two processes: each drives its own end.
        filling = source.end(ring, fills=True)
        run([target.end(other, fills=False)], lambda: drive(filling))
        assert filling.is_over
        assert [bytes(item) for item in target.items] == items
    again = Memory([bytes(len(item)) for item in items], slowness[1])
    with shared() as (ring, _):
        run([source.end(ring, fills=True), again.end(ring, fills=False)], lambda: None)
    assert [bytes(item) for item in again.items] == items


def test_no_more_is_filled_than_the_ring_has_buffers() -> None:
    source = Memory([bytes(10 * BUFFER)])
    with shared() as (ring, other):
        end = source.end(ring, fills=True)
        while end.advance():
            pass
        assert (ring.filled, end.is_over) == (COUNT, False)
        other.emptied = 1
        assert end.advance()
        assert other.filled == COUNT + 1


@pytest.mark.parametrize("emptied", [COUNT + 1, 1 << 63, (1 << 64) - 1])
def test_a_hostile_end_that_empties_more_than_was_filled_stops_the_copy(emptied: int) -> None:
    source = Memory([bytes(10 * BUFFER)])
    with shared() as (ring, other):
        end = source.end(ring, fills=True)
        end.advance()
        other.emptied = emptied
        with pytest.raises(RingBroken):
            end.advance()
        end.settle()
        assert end.is_over
    assert source.in_flight == 0


@pytest.mark.parametrize("filled", [COUNT + 1, 1 << 63, (1 << 64) - 1])
def test_a_hostile_end_that_fills_more_than_the_ring_has_stops_the_copy(filled: int) -> None:
    target = Memory([bytes(10 * BUFFER)])
    with shared() as (ring, other):
        ring.filled = filled
        with pytest.raises(RingBroken):
            run([target.end(other, fills=False)], lambda: None)
    assert target.in_flight == 0


def test_numbers_that_go_back_stop_the_copy() -> None:
    target = Memory([bytes(10 * BUFFER)])
    with shared() as (ring, other):
        end = target.end(other, fills=False)
        ring.filled = 2
        while end.advance():
            pass
        ring.filled = 1
        with pytest.raises(RingBroken):
            end.advance()


def test_an_end_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_ring, "STALL_S", 0.0)
    with shared() as (_, other), pytest.raises(RingBroken, match="has done nothing"):
        run([Memory([b"abc"]).end(other, fills=False)], lambda: None)


def test_a_copy_that_is_given_up_leaves_nothing_in_flight() -> None:
    source, target = Memory([bytes(10 * BUFFER)], slowness=2), Memory([bytes(10 * BUFFER)], slowness=5)

    def give_up() -> None:
        raise TimeoutError

    with shared() as (ring, _), pytest.raises(TimeoutError):
        run([source.end(ring, fills=True), target.end(ring, fills=False)], give_up)
    assert (source.in_flight, target.in_flight) == (0, 0)


def test_other_memory_is_no_ring() -> None:
    small = os.memfd_create("small")
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, copy_ring._SIZE_BYTES)
    try:
        for fd in (small, unsealed):
            with pytest.raises((RingBroken, OSError)):
                CopyRing(fd)
    finally:
        os.close(small)
        os.close(unsealed)
