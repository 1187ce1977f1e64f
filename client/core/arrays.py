"""Device arrays: making, reading, writing, copying and filling them, through calls to the session's own API.

Each operation is a generator that yields the API's calls (`Call`): the API executes them one by one and sends back
their results. So every rule is written once, and these calls are recorded, ordered and locked like a program's own.
"""

import struct
from collections.abc import Generator, Iterator, Mapping
from dataclasses import field
from importlib.resources import files
from typing import Any, Final, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpulease.client.array_layout import (
    MAX_DIMENSIONS,
    MAX_UNIT_BYTES,
    ArrayLayout,
    ArrayView,
    checked_shape,
    strided_copy_of,
)
from gpulease.client.core.resources import ModuleBase
from gpulease.client.core.session import SessionView
from gpulease.client.core.streams import StreamHandle
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import InvalidRequest
from gpulease.client.handles import Buffer
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.kernels.toolchain import missing
from gpulease.client.texts import quoted
from gpulease.protocol.fast_dataclass import dataclass

T = TypeVar("T")
A = TypeVar("A", bound="SessionArray")

BLOCK_THREADS: Final = 256
"""Threads per block of the kernel that copies and fills."""

MAX_BLOCKS: Final = 4096
"""Maximum number of blocks of one launch, several for each multiprocessor of any card. Beyond that, each thread copies
several units."""

_LAYOUT: Final = struct.Struct(f"<3Q{MAX_UNIT_BYTES}s{MAX_DIMENSIONS}Q{2 * MAX_DIMENSIONS}q")
"""`Layout` of the kernel's source: count, last, unit_bytes, pattern, lengths, to_strides, from_strides."""

PLAIN_TYPES: Final = frozenset(
    {"bool", "complex64", "complex128", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""numpy dtypes that kernels support, too: little-endian numbers of 1, 2, 4, 8 or 16 bytes."""

NARROW_TYPES: Final = frozenset(
    {"bfloat16", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
)
"""Dtypes of the package ml_dtypes, which numpy lacks."""

_RANKS: Final = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
"""Rank of each kind of numbers: a kind can represent the numbers of the kinds with a lower rank."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of the session's API; the generator receives its result."""

    method: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)


Calls: TypeAlias = Generator[Call | Procedure[Any], Any, T]
"""An operation. Yields calls, or procedures where the API has no method; returns its result."""


class SessionArray(ArrayView):
    """An array with a reference to its session; the base of both APIs' arrays.

    Attributes:
        session: Its session, which exists as long as the array.
    """

    __slots__ = ("session",)

    def __init__(self, session: SessionView, buffer: Buffer, layout: ArrayLayout, dtype: Any) -> None:
        super().__init__(buffer, layout, dtype)
        self.session = session

    def __getitem__(self, key: Any) -> Self:
        return _viewed(self, self.layout.at(key))

    def __iter__(self) -> Iterator[Self]:
        return (self[place] for place in range(len(self)))


# --- operations ---


def new(session: SessionView, kind: type[A], shape: Any, dtype: Any, operation: str) -> Calls[A]:
    """Make an array of zeros.

    Args:
        session: The session.
        kind: The array class of the API.
        shape: One length or several.
        dtype: The elements' dtype.
        operation: The operation, for messages.

    Raises InvalidRequest, Unsupported or AllocFailed.
    """
    checked = checked_dtype(dtype, operation)
    layout = ArrayLayout.contiguous(checked_shape(shape, checked.itemsize, operation), checked.itemsize)
    # Allocate at least one byte, because even an array without elements needs an address.
    buffer = yield Call("mem_alloc", (max(layout.size_bytes, 1),))
    return kind(session, buffer, layout, checked)


def upload(session: SessionView, kind: type[A], values: Any, dtype: Any) -> Calls[A]:
    """Make a device array from anything that numpy converts to an array.

    Raises InvalidRequest, Unsupported or AllocFailed.
    """
    data = host_array(values, dtype)
    array = yield from new(session, kind, data.shape, data.dtype, "array")
    yield from _write(array, data, None)
    return array


def read(array: SessionArray, stream: StreamHandle | None) -> Calls[NDArray[Any]]:
    """Copy an array into a new numpy array. An array with gaps is packed on the card first."""
    values = np.empty(array.shape, array.dtype)
    if array.size:
        source = array if array.is_contiguous else (yield from copy(array, stream))
        # The elements are contiguous from `offset` on, so one copy is enough.
        args = (source.buffer, source.layout.offset, array.size_bytes, _bytes_of(values), stream)
        yield Call("mem_read", args)
    return values


def copy(array: A, stream: StreamHandle | None) -> Calls[A]:
    """Copy an array into a new, contiguous one on the card."""
    target = yield from new(array.session, type(array), array.shape, array.dtype, "copy")
    yield from _transfer(target, array, stream)
    return target


def fill(array: SessionArray, value: Any, stream: StreamHandle | None) -> Calls[None]:
    """Write one number to every element. Raises InvalidRequest if the value is not one number, or does not fit."""
    number = host_value(value, array.dtype, "fill")
    if number.ndim:
        raise InvalidRequest(
            f"fill: the value must be one number, not {quoted(value)}", "a[...] = values takes several"
        )
    if array.size:
        # The kernel writes whole units: repeat the element's bytes up to the widest unit.
        pattern = number.tobytes() * (MAX_UNIT_BYTES // number.itemsize)
        yield from _launch(array, None, pattern, stream)


def assign(array: SessionArray, value: Any, stream: StreamHandle | None) -> Calls[None]:
    """Write numbers, a host array or a device array to this one, broadcast to its shape.

    Raises InvalidRequest if shape or dtype do not fit.
    """
    # The source is a device array, one number, or host values.
    if isinstance(value, SessionArray):
        yield from _assign_from_card(array, value, stream)
        return
    data = host_value(value, array.dtype, "assign")
    if not data.ndim:
        yield from fill(array, data, stream)
        return
    layout = ArrayLayout.contiguous(data.shape, data.itemsize).broadcast(array.shape, "assign")
    if not array.size:
        return
    # If both sides are contiguous, copy the bytes directly. Otherwise upload the values, and let the kernel on the card
    # distribute them.
    if array.is_contiguous and layout.is_contiguous:
        yield from _write(array, data, stream)
        return
    packed = yield from new(array.session, type(array), data.shape, data.dtype, "assign")
    yield from _write(packed, data, stream)
    yield from _transfer(array, _viewed(packed, layout), stream)


def _assign_from_card(array: SessionArray, source: SessionArray, stream: StreamHandle | None) -> Calls[None]:
    if source.dtype != array.dtype:
        raise InvalidRequest(
            f"assign: an array of {array.dtype} can't be assigned elements of {source.dtype}",
            "Arrays are not converted on the card: write a kernel that does so, or convert with .numpy().astype(...)",
        )
    layout = source.layout.broadcast(array.shape, "assign")
    # If both are in the same buffer, identical elements need no work, and overlapping ones need an extra copy.
    if source.buffer.handle == array.buffer.handle:
        if layout == array.layout:
            return
        (first, end), (other_first, other_end) = layout.span, array.layout.span
        if first < other_end and other_first < end:
            # The two overlap, and the kernel's threads run in any order: without a copy some would read elements that
            # others have written.
            source = yield from copy(source, stream)
            layout = source.layout.broadcast(array.shape, "assign")
    yield from _transfer(array, _viewed(source, layout), stream)


# --- parts of these operations ---


def _viewed(array: A, layout: ArrayLayout) -> A:
    return type(array)(array.session, array.buffer, layout, array.dtype)


def _write(array: SessionArray, data: NDArray[Any], stream: StreamHandle | None) -> Calls[None]:
    if data.size:
        yield Call("mem_write", (array.buffer, array.layout.offset, _bytes_of(data), stream))


def _transfer(to: SessionArray, source: SessionArray, stream: StreamHandle | None) -> Calls[None]:
    if to.size:
        yield from _launch(to, source, bytes(MAX_UNIT_BYTES), stream)


def _launch(to: SessionArray, source: SessionArray | None, pattern: bytes, stream: StreamHandle | None) -> Calls[None]:
    # Step 1: describe the copy as loops, and pad the lists to the kernel's fixed number of dimensions.
    work = strided_copy_of(to.layout, None if source is None else source.layout)
    unused = (0,) * (MAX_DIMENSIONS - len(work.lengths))
    lists = (*work.lengths, *unused, *work.to_strides, *unused, *work.from_strides, *unused)
    packed = _LAYOUT.pack(work.count, len(work.lengths) - 1, work.unit_bytes, pattern, *lists)
    # Step 2: the arguments: target, source (0 to fill with the pattern instead), and the packed loops.
    args = KernelArgs().push_buffer(to.buffer, to.layout.offset)
    if source is None:
        args.push_u64(0)
    else:
        args.push_buffer(source.buffer, source.layout.offset)
    # Load the kernel on first use. A recording in progress does not include this: a graph can't load a module.
    module = to.session._array_kernels
    if module is None or not module.is_alive:
        module = to.session._array_kernels = yield to.session._session.resources.load_unrecorded(_ptx(), ModuleBase)
    # Step 3: a thread for each unit; beyond MAX_BLOCKS each thread takes several.
    blocks = min(-(-work.count // BLOCK_THREADS), MAX_BLOCKS)
    launch = (module, "transfer", (blocks,), (BLOCK_THREADS,), args.push_raw(packed), None, 0, stream)
    yield Call("launch", launch)


def _ptx() -> bytes:
    return files("gpulease.client.core").joinpath("array_kernels.ptx").read_bytes()


def _bytes_of(data: NDArray[Any]) -> NDArray[Any]:
    """View an array as bytes, or a copy if it is not contiguous: some dtypes don't have the buffer protocol."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


# --- types and values of the host ---


def checked_dtype(dtype: Any, operation: str) -> np.dtype[Any]:
    """Return the numpy dtype of elements that kernels support.

    Args:
        dtype: The program's value: a dtype, or the name of one.
        operation: The operation, for messages.

    Raises:
        InvalidRequest: Kernels don't support such elements.
        Unsupported: The dtype's package is not installed.
    """
    # numpy accepts these names only after ml_dtypes was imported.
    if isinstance(dtype, str) and dtype in NARROW_TYPES:
        try:
            import ml_dtypes
        except ImportError:
            raise missing("ml_dtypes", "ml-dtypes") from None
        narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
        return narrow
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    # numpy reads some texts as Python's literals.
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidRequest(
            f"{operation}: the dtype must be a numpy dtype, not {quoted(dtype)}: {quoted(str(error))}"
        ) from None
    # numpy reads None as float64, so refuse None explicitly.
    if dtype is None or checked.name not in PLAIN_TYPES | NARROW_TYPES or not checked.isnative:
        raise InvalidRequest(
            f"{operation}: arrays on the card don't support elements of {quoted(dtype)}",
            f"The types are {', '.join(sorted(PLAIN_TYPES | NARROW_TYPES))}",
        )
    return checked


def host_array(values: Any, dtype: Any) -> NDArray[Any]:
    """Return a numpy array of the given values, converted if a dtype is given. Raises InvalidRequest."""
    if isinstance(values, ArrayView):
        raise InvalidRequest(f"array: {values!r} is already on the card", "Copy it there with its copy() method")
    wanted_dtype = None if dtype is None else checked_dtype(dtype, "array")
    try:
        data = np.asarray(values)
        # If no dtype is given, numpy chooses one from the values. The card must support that dtype.
        if wanted_dtype is None:
            checked_dtype(data.dtype, "array")
        return data if wanted_dtype is None else data.astype(wanted_dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"array: the value must be an array of numbers, not {quoted(values)}: {quoted(str(error))}"
        ) from None


def host_value(value: Any, dtype: np.dtype[Any], operation: str) -> NDArray[Any]:
    """Return a numpy array of `dtype` from numbers, nested lists of numbers, or an array of that dtype.

    Numbers are converted if they fit; arrays never are. Raises InvalidRequest.
    """
    if isinstance(value, ArrayView):
        raise InvalidRequest(
            f"{operation}: the value must be a number, not the array {value!r}", "Assign it instead: a[...] = b"
        )
    # Never convert an array implicitly: that could silently lose a whole buffer's data.
    if isinstance(value, np.ndarray) and value.ndim:
        if value.dtype != dtype:
            raise InvalidRequest(
                f"{operation}: an array of {dtype} can't take elements of {value.dtype}",
                f"Convert them: .astype({str(dtype)!r})",
            )
        return np.asarray(value)
    try:
        # Numbers convert only to a kind that can hold them: an int to a float, but not a float to an int.
        scalar = np.asarray(value)
        rank = _RANKS[scalar.dtype.kind] if scalar.dtype != dtype else 0
        if rank > _RANKS.get(dtype.kind, _RANKS["f"]):
            raise ValueError(f"elements are {dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            converted = scalar.astype(dtype)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"{operation}: the value must be a number that fits an array of {dtype}, not {quoted(value)}: {error}"
        ) from None
    # Conversion must not change integers. For floats only overflow to infinity counts: rounding is expected.
    is_whole = dtype.kind in "iu" and scalar.dtype.kind in "iu"
    fits = (
        np.array_equal(converted, scalar) if is_whole else bool((np.isfinite(converted) == np.isfinite(scalar)).all())
    )
    if not fits:
        raise InvalidRequest(f"{operation}: {quoted(value)} does not fit elements of type {dtype}")
    return converted
