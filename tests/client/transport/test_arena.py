"""The client's arena: who gets which bytes, and when they are free again."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.errors import InvalidRequest
from gpulease.client.transport.arena import ALIGNMENT_BYTES, Arena, empty

SIZE = 1 << 16


def make() -> Arena:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, SIZE)
        return Arena(fd, SIZE)
    finally:
        os.close(fd)


@given(st.lists(st.tuples(st.integers(1, SIZE // 3), st.integers(0, 9)), max_size=30))
def test_blocks_never_meet_and_all_comes_back(moves: list[tuple[int, int]]) -> None:
    arena = make()
    blocks: list[Any] = []
    for size, victim in moves:
        if victim < len(blocks):
            del blocks[victim]
        block = arena.allocate(size)
        if block is not None:
            assert len(block) == size
            blocks.append(block)
        spans = sorted((arena.offset_of(memoryview(held).cast("B")), len(held)) for held in blocks)
        ends = 0
        for start, length in spans:
            assert start is not None
            assert start % ALIGNMENT_BYTES == 0
            assert start >= ends
            ends = start + length
        assert ends <= SIZE
    block = None
    blocks.clear()
    assert arena.allocate(SIZE) is not None


SHAPES: list[tuple[Any, Any]] = [(5, "u1"), ((3, 4), "f4"), ((2, 3, 4), ">i2"), ([7], np.complex128), ((), "f8")]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_arrays_are_what_numpy_would_make(shape: Any, dtype: Any) -> None:
    arena = make()
    array, model = empty(arena, shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (model.shape, model.dtype, model.strides)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert arena.offset_of(array.data) == 0


@pytest.mark.parametrize(("shape", "dtype"), [(0, "f4"), ((4, 0), "u1"), (3, object), (SIZE + 1, "u1")])
def test_what_has_no_place_there_is_an_ordinary_array(shape: Any, dtype: Any) -> None:
    arena = make()
    array = empty(arena, shape, dtype)
    assert array.shape == np.empty(shape, dtype).shape
    assert array.dtype == np.dtype(dtype)
    assert arena.allocate(SIZE) is not None, "nothing of the arena was used"


@pytest.mark.parametrize("shape", [-1, (2, -2), "x", 1.5])
def test_shapes_that_are_none(shape: Any) -> None:
    arena = make()
    with pytest.raises(InvalidRequest):
        empty(arena, shape, "f4")


def test_a_view_keeps_its_array() -> None:
    arena = make()
    part = empty(arena, SIZE, "u1").reshape(256, -1)[3:5]
    assert arena.offset_of(part.data) == 3 * 256
    assert arena.allocate(1) is None
    del part
    assert arena.allocate(SIZE) is not None


def test_where_other_bytes_lie() -> None:
    arena = make()
    array = empty(arena, 100, "u1")
    assert arena.offset_of(memoryview(bytearray(9))) is None
    array.flags.writeable = False
    assert arena.offset_of(array.data) is None
    with pytest.raises(TypeError):
        arena.offset_of(empty(arena, 8, "u1").data[::2])
