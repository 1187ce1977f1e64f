"""Layouts of arrays in device memory: shapes, strides, slices, and how bytes move from one layout to another.

Everything here is integer arithmetic and follows numpy's rules.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

from gpulease.client.errors import InvalidRequest
from gpulease.client.handles import Buffer
from gpulease.client.numbers import integer
from gpulease.client.texts import quoted
from gpulease.protocol.fast_dataclass import dataclass

MAX_DIMENSIONS: Final = 8
"""Maximum number of dimensions of an array: the copy kernel has room for no more. It also catches data that was passed
as a shape."""

MAX_ARRAY_BYTES: Final = 1 << 47
"""Largest array in bytes, more than any card has. Prevents overflows in the copy kernel, and catches mistaken
shapes."""

MAX_UNIT_BYTES: Final = 16
"""Maximum number of bytes that one thread copies at once: the widest load and store of a card."""


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Where an array's elements are in a buffer.

    Attributes:
        shape: Number of elements in each dimension.
        strides: Bytes from one element to the next in each dimension; negative where a slice runs backwards.
        offset: The place in the buffer, in bytes, of element [0, 0, ...].
        item_bytes: Size of an element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    item_bytes: int

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], item_bytes: int) -> Self:
        """Return a C-contiguous layout that starts at the buffer's first byte."""
        # Go from the last dimension, the innermost, to the first.
        strides, step = [], item_bytes
        for length in reversed(shape):
            strides.append(step)
            step *= max(length, 1)
        return cls(shape, tuple(reversed(strides)), 0, item_bytes)

    @property
    def size(self) -> int:
        """Number of elements: the product of the shape, 1 for an array without dimensions."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements, not counting gaps between them."""
        return self.size * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in C order without gaps.

        As in numpy, dimensions of length 1 are ignored, and an empty array is contiguous.
        """
        step = self.item_bytes
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            # The stride of a dimension of length 1 is never used.
            if length != 1:
                if stride != step and self.size:
                    return False
                step *= length
        return True

    @property
    def span(self) -> tuple[int, int]:
        """The first byte in the buffer that belongs to an element, and the byte after the last such byte."""
        if not self.size:
            return self.offset, self.offset
        # A negative stride reaches below the offset, a positive one above it.
        reaches = [stride * (length - 1) for length, stride in zip(self.shape, self.strides, strict=True)]
        first = self.offset + sum(reach for reach in reaches if reach < 0)
        return first, self.offset + sum(reach for reach in reaches if reach > 0) + self.item_bytes

    def at(self, key: Any) -> Self:
        """Return a part's layout, by numpy's indexing: integers, slices, `...` and None. Raises InvalidRequest."""
        shape: list[int] = []
        strides: list[int] = []
        offset, remaining = self.offset, iter(zip(self.shape, self.strides, strict=True))
        # None adds a dimension, a slice keeps one, an integer removes one.
        for number, part in enumerate(_full_key(key, self.shape)):
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            length, stride = next(remaining)
            if isinstance(part, slice):
                start, step, count = _range_of(part, length, number)
                shape.append(count)
                strides.append(stride * step)
                offset += stride * start
            else:
                offset += stride * _place(part, length, number)
        if len(shape) > MAX_DIMENSIONS:
            raise InvalidRequest(f"index: an array has at most {MAX_DIMENSIONS} dimensions, not {len(shape)}")
        # If there are no elements, the computed offset may be outside the buffer.
        return type(self)(tuple(shape), tuple(strides), offset if 0 not in shape else self.offset, self.item_bytes)

    def broadcast(self, shape: tuple[int, ...], operation: str) -> Self:
        """Broadcast to another shape by numpy's rules: repeated dimensions get stride 0. Raises InvalidRequest.

        Args:
            shape: The target's shape.
            operation: The operation, for messages.
        """
        # Broadcasting aligns the shapes at their last dimensions.
        more = len(shape) - len(self.shape)
        # As in numpy's assignment, the source may have more dimensions than the target if the leading ones have length
        # 1.
        own = list(zip(self.shape, self.strides, strict=True))[max(0, -more) :]
        own = [(1, 0)] * max(0, more) + own
        # A length of 1 is repeated; any other length must equal the target's.
        fits = all(length in (1, target_length) for (length, _), target_length in zip(own, shape, strict=True))
        if not fits or any(length != 1 for length in self.shape[: max(0, -more)]):
            raise InvalidRequest(f"{operation}: an array of shape {self.shape} does not fit one of shape {shape}")
        strides = tuple(
            stride if length == target_length else 0 for (length, stride), target_length in zip(own, shape, strict=True)
        )
        return type(self)(shape, strides, self.offset, self.item_bytes)


def checked_shape(shape: Any, item_bytes: int, operation: str) -> tuple[int, ...]:
    """Return as a tuple a shape that is given as one length or as a sequence of lengths.

    Args:
        shape: The program's value.
        item_bytes: Size of an element; bounds the product of the lengths to MAX_ARRAY_BYTES.
        operation: The operation, for messages.

    Raises InvalidRequest.
    """
    try:
        lengths = tuple(integer(length) for length in (shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        raise InvalidRequest(
            f"{operation}: the shape must be an integer or a sequence of them, not {quoted(shape)}"
        ) from None
    if len(lengths) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{operation}: an array has at most {MAX_DIMENSIONS} dimensions, not {len(lengths)}")
    if any(length < 0 for length in lengths):
        raise InvalidRequest(f"{operation}: shape {quoted(lengths)} has a negative length")
    # A length of 0 makes the product 0, but strides still multiply the other lengths.
    if math.prod(max(length, 1) for length in lengths) * item_bytes > MAX_ARRAY_BYTES:
        raise InvalidRequest(
            f"{operation}: an array has at most {MAX_ARRAY_BYTES} bytes; the shape {quoted(lengths)} has more"
        )
    return lengths


def _full_key(key: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    """Complete an index to one item per dimension, plus its Nones. Raises InvalidRequest."""
    # Count the dimensions that the index names. It takes all other dimensions whole.
    items = key if isinstance(key, tuple) else (key,)
    taken = sum(item is not None and item is not ... for item in items)
    # `...`, or else the end of the index, stands for all dimensions that were not given.
    missing = len(shape) - taken
    if missing < 0:
        raise InvalidRequest(f"index: {taken} indices for an array of {len(shape)} dimensions")
    ellipses = sum(item is ... for item in items)
    if ellipses > 1:
        raise InvalidRequest("index: it has more than one `...`")
    for item in items:
        if item is ...:
            yield from [slice(None)] * missing
        else:
            yield item
    if not ellipses:
        yield from [slice(None)] * missing


def _range_of(part: slice, length: int, number: int) -> tuple[int, int, int]:
    """Return (start, step, count) of a slice of a dimension of this length. Raises InvalidRequest."""
    try:
        # Use Python's rules for slices: negative numbers count from the end, and parts outside the array are left out.
        start, stop, step = part.indices(length)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"index {number}: {quoted(part)}: {error}") from None
    return start, step, len(range(start, stop, step))


def _place(index: Any, length: int, number: int) -> int:
    try:
        # A bool would be a mask, as in numpy.
        place = integer(index)
    except TypeError:
        raise InvalidRequest(
            f"index {number} must be an integer, a slice, `...` or None, not {quoted(index)}",
            "Lists, masks and arrays as indices need a kernel of their own: write one, or index the array's .numpy()",
        ) from None
    if not -length <= place < length:
        raise InvalidRequest(f"index {number}: {quoted(place)} is outside a dimension of length {length}")
    return place + length if place < 0 else place


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A copy from one layout to another, as nested loops over units of one size. Loop 0 is the innermost.

    Attributes:
        unit_bytes: Size of a unit: 1, 2, 4, 8 or 16. Every address that is read or written is a multiple of it.
        lengths: Number of units in each loop.
        to_strides: Bytes from one unit to the next in the target, per loop.
        from_strides: Bytes from one unit to the next in the source, per loop.
    """

    unit_bytes: int
    lengths: tuple[int, ...]
    to_strides: tuple[int, ...]
    from_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of units of one copy: the product of the loops' lengths."""
        return math.prod(self.lengths)


def strided_copy_of(to: ArrayLayout, source: ArrayLayout | None) -> StridedCopy:
    """Return the fewest loops that copy each element of `source` to its place in `to`, of the same shape.

    Without a source, the target is filled with a pattern as long as an element, repeated to a unit.
    """
    # Begin with the bytes of one element as the innermost loop. Then take the dimensions from the last to the first: a
    # dimension that continues the loop inside it without a gap, in both layouts, extends that loop; any other adds a
    # loop.
    loops = [(to.item_bytes, 1, 1)]
    sources = source.strides if source is not None else (0,) * len(to.shape)
    for length, to_stride, from_stride in reversed(list(zip(to.shape, to.strides, sources, strict=True))):
        inner, inner_to, inner_from = loops[-1]
        if length == 1:
            continue
        if to_stride == inner * inner_to and (source is None or from_stride == inner * inner_from):
            loops[-1] = inner * length, inner_to, inner_from
        else:
            loops.append((length, to_stride, from_stride))
    # The unit is the widest power of two up to MAX_UNIT_BYTES that divides the innermost loop, every offset and every
    # stride, so that all of its addresses are aligned.
    steps = [to.offset, *(stride for _, stride, _ in loops[1:])]
    if source is not None:
        steps += [source.offset, *(stride for _, _, stride in loops[1:])]
    unit = math.gcd(loops[0][0], MAX_UNIT_BYTES, *steps)
    loops[0] = loops[0][0] // unit, unit, unit
    # A single unit per element needs no separate loop.
    if loops[0][0] == 1 and len(loops) > 1:
        del loops[0]
    lengths, to_strides, from_strides = zip(*loops, strict=True)
    return StridedCopy(unit, lengths, to_strides, from_strides)


class ArrayView:
    """An array in a session's device memory; the base of both APIs' arrays.

    Attributes:
        buffer: The memory. It is freed when the last array in it is dropped.
        layout: Where the elements are in the buffer.
        dtype: The elements' numpy dtype.
    """

    __slots__ = ("buffer", "dtype", "layout")

    __array_ufunc__: Final = None
    """Makes numpy refuse to compute with the array: that would copy it from the card implicitly."""

    def __init__(self, buffer: Buffer, layout: ArrayLayout, dtype: Any) -> None:
        self.buffer, self.layout, self.dtype = buffer, layout, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dimension, () for a single element."""
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next in each dimension."""
        return self.layout.strides

    @property
    def ndim(self) -> int:
        """Number of dimensions, at most MAX_DIMENSIONS."""
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        """Number of elements: the product of the shape."""
        return self.layout.size

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements, not counting gaps between them."""
        return self.layout.size_bytes

    @property
    def address(self) -> int:
        """Device address of element [0, 0, ...]. Only kernels of this session can use it."""
        return self.buffer.handle + self.layout.offset

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in C order without gaps, as most kernels expect."""
        return self.layout.is_contiguous

    def __len__(self) -> int:
        if not self.layout.shape:
            raise TypeError("an array without dimensions has no length")
        return self.layout.shape[0]

    def __bool__(self) -> bool:
        raise InvalidRequest("an array on the card is neither true nor false", "Compare its .numpy(), or with None")

    def __repr__(self) -> str:
        state = "" if self.buffer.is_alive else ", gone"
        return f"<{type(self).__name__} {self.dtype} {self.shape} at {self.address:#x}{state}>"
