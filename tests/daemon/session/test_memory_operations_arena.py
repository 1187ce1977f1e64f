"""The arena without a daemon: what is pinned, how copies are cut, what is refused."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.session.memory_operations import GRANULE_BYTES, MAX_ARENA_BYTES, MAX_EXTENT_BYTES, SessionArena
from gpulease.protocol.errors import BodyError

SIZE = 20 * GRANULE_BYTES


class Book:
    """Records what was pinned, as offsets from the arena's start."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def pin(self, memory: memoryview) -> None:
        self.sizes.append(len(memory))


def no_check() -> None:
    pass


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 3 * GRANULE_BYTES)), max_size=8))
def test_pieces_are_the_range_and_each_granule_is_pinned_once(ranges: list[tuple[int, int]]) -> None:
    book = Book()
    arena = SessionArena(SIZE, book.pin)
    try:
        touched: set[int] = set()
        for offset, length in ranges:
            if offset + length > SIZE:
                with pytest.raises(BodyError, match="outside the arena"):
                    arena.pieces(offset, length, no_check)
                continue
            pieces = list(arena.pieces(offset, length, no_check))
            assert [len(piece) for piece in pieces if not len(piece)] == []
            assert sum(len(piece) for piece in pieces) == length
            touched |= set(range(offset // GRANULE_BYTES, -(-(offset + length) // GRANULE_BYTES)))
            assert sum(book.sizes) == len(touched) * GRANULE_BYTES
    finally:
        os.close(arena.fd)


def test_pieces_lie_where_they_should() -> None:
    arena = SessionArena(SIZE, Book().pin)
    list(arena.pieces(GRANULE_BYTES, GRANULE_BYTES, no_check))
    for number, piece in enumerate(arena.pieces(GRANULE_BYTES - 2, GRANULE_BYTES + 4, no_check)):
        piece[:2] = bytes([number + 1]) * 2
    assert os.pread(arena.fd, 5, GRANULE_BYTES - 3) == b"\0\1\1\2\2"
    assert os.pread(arena.fd, 3, 2 * GRANULE_BYTES - 1) == b"\0\3\3"
    os.close(arena.fd)


def test_one_large_copy_is_one_extent_and_the_lease_is_looked_at_between_larger_ones() -> None:
    book = Book()
    arena = SessionArena(3 * MAX_EXTENT_BYTES, book.pin)
    looks = []
    pieces = arena.pieces(5, 2 * MAX_EXTENT_BYTES, lambda: looks.append(len(book.sizes)))
    assert book.sizes == [MAX_EXTENT_BYTES, MAX_EXTENT_BYTES, GRANULE_BYTES]
    assert looks == [0, 1, 2]
    assert [len(piece) for piece in pieces] == [MAX_EXTENT_BYTES - 5, MAX_EXTENT_BYTES, 5]
    os.close(arena.fd)


def test_the_size_is_bounded_and_sealed() -> None:
    book = Book()
    arena = SessionArena(1 << 63, book.pin)
    assert arena.size_bytes == MAX_ARENA_BYTES
    for size in (0, MAX_ARENA_BYTES - 1, MAX_ARENA_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    os.close(arena.fd)
    with pytest.raises(OSError, match="must have at least"):
        SessionArena(GRANULE_BYTES - 1, book.pin)
