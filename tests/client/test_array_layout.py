"""Layouts of arrays on the card follow numpy's rules for shapes, strides and slices."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices, mutually_broadcastable_shapes
from numpy.lib.array_utils import byte_bounds

from gpulease.client import InvalidRequest
from gpulease.client.array_layout import (
    MAX_ARRAY_BYTES,
    MAX_DIMENSIONS,
    ArrayLayout,
    StridedCopy,
    checked_shape,
    strided_copy_of,
)

TYPES = ("u1", "u2", "f4", "f8", "c16")


def layout_of(array: Any) -> ArrayLayout:
    return ArrayLayout.contiguous(array.shape, array.itemsize)


def start_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@st.composite
def slices(draw: Any) -> tuple[Any, Any, ArrayLayout]:
    """An array of distinct bytes, a slice of a slice of it, and that slice's layout."""
    whole = np.zeros(draw(array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)), draw(st.sampled_from(TYPES)))
    whole.reshape(-1).view(np.uint8)[:] = np.arange(whole.nbytes) % 251
    part, layout = whole, layout_of(whole)
    for _ in range(2):
        # A place alone would give numpy's scalar: with `...` it is an array.
        key = draw(basic_indices(part.shape, max_dims=6, allow_newaxis=True, allow_ellipsis=False))
        key = (*(key if isinstance(key, tuple) else (key,)), ...)
        part, layout = part[key], layout.at(key)
    return whole, part, layout


@given(slices())
def test_a_slice_is_numpy_s(found: tuple[Any, Any, ArrayLayout]) -> None:
    whole, part, layout = found
    assert layout.shape == part.shape
    if part.size:
        assert layout.strides == part.strides
        assert layout.offset == start_of(part) - start_of(whole)
    assert 0 <= layout.offset <= whole.nbytes
    assert layout.is_contiguous == part.flags.c_contiguous
    assert (layout.size, layout.size_bytes) == (part.size, part.nbytes)


@given(slices())
def test_a_span_holds_every_element_and_no_more(found: tuple[Any, Any, ArrayLayout]) -> None:
    whole, part, layout = found
    if part.size:
        assert layout.span == tuple(place - start_of(whole) for place in byte_bounds(part))


def moved(work: StridedCopy, to: Any, to_offset: int, source: Any, from_offset: int) -> None:
    """What the kernel does: thread by thread, to the bytes of two buffers."""
    for unit in range(work.count):
        rest, t, f = unit, to_offset, from_offset
        for length, to_stride, from_stride in zip(work.lengths, work.to_strides, work.from_strides, strict=True):
            rest, at = divmod(rest, length)
            t, f = t + at * to_stride, f + at * from_stride
        assert t % work.unit_bytes == f % work.unit_bytes == 0
        to[t : t + work.unit_bytes] = source[f : f + work.unit_bytes]


@given(slices())
def test_a_transfer_moves_every_element_and_nothing_else(found: tuple[Any, Any, ArrayLayout]) -> None:
    whole, part, layout = found
    packed = np.zeros(part.shape, part.dtype)
    work = strided_copy_of(layout_of(packed), layout)
    assert len(work.lengths) <= MAX_DIMENSIONS
    if not part.size:
        assert work.count == 0
        return
    moved(work, packed.reshape(-1).view("u1"), 0, whole.reshape(-1).view("u1"), layout.offset)
    assert packed.tobytes() == part.tobytes()
    back = np.full_like(whole, 7)
    moved(
        strided_copy_of(layout, layout_of(packed)),
        back.reshape(-1).view("u1"),
        layout.offset,
        packed.reshape(-1).view("u1"),
        0,
    )
    again = np.zeros_like(packed)
    moved(work, again.reshape(-1).view("u1"), 0, back.reshape(-1).view("u1"), layout.offset)
    assert again.tobytes() == part.tobytes()


@given(mutually_broadcastable_shapes(num_shapes=2, max_dims=3))
def test_a_shape_is_repeated_as_numpy_does(shapes: Any) -> None:
    small, result = shapes.input_shapes[0], shapes.result_shape
    array = np.zeros(small, "f4")
    assert layout_of(array).broadcast(result, "assign").shape == result
    if array.size and np.prod(result, dtype=int) > 0:
        wanted = np.broadcast_to(array, result).strides
        found = layout_of(array).broadcast(result, "assign").strides
        assert [s for s, n in zip(found, result, strict=True) if n > 1] == [
            s for s, n in zip(wanted, result, strict=True) if n > 1
        ]


def test_elements_without_gaps_are_moved_sixteen_bytes_at_once() -> None:
    layout = ArrayLayout.contiguous((64, 64), 4)
    assert strided_copy_of(layout, layout) == StridedCopy(16, (1024,), (16,), (16,))
    assert strided_copy_of(layout.at((slice(None), 0)), None).lengths == (64,)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (4, "outside a dimension of length 4"),
        ((0, 0, 0), "3 indices for an array of 2"),
        ((..., ...), "more than one"),
        ([0, 1], "must be an integer, a slice"),
        (True, "must be an integer, a slice"),
        (1.5, "must be an integer, a slice"),
        (slice(None, None, 0), "zero"),
        (slice("a"), "index 0"),
        ((None,) * 7, "at most 8"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(key: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ArrayLayout.contiguous((4, 4), 4).at(key)


@pytest.mark.parametrize("shape", [(-1,), 1.5, "ab", (2,) * 9, (1 << 40, 1 << 40), (0, MAX_ARRAY_BYTES), None])
def test_a_shape_that_makes_no_sense_is_refused(shape: Any) -> None:
    with pytest.raises(InvalidRequest):
        checked_shape(shape, 4, "zeros")


def test_a_shape_that_does_not_fit_is_refused() -> None:
    for small in ((3,), (2, 4), (4, 1, 4)):
        with pytest.raises(InvalidRequest, match="does not fit"):
            ArrayLayout.contiguous(small, 4).broadcast((4,), "assign")
