"""Flat views of memory that a program passes for copying: of bytes, arrays, or any buffer."""

import ctypes
import re
from typing import Any, Final

from gpulease.client.errors import InvalidRequest

# A field's name in the format of a record (PEP 3118): `T{i:a:f:b:}` has the fields a and b.
_FIELD_NAME: Final = re.compile(":[^:]*:")


def view_of(data: Any) -> memoryview:
    """Return a view of any buffer, and of numpy arrays of every type except objects.

    Python's buffers can't describe elements such as bfloat16 and datetime64: they are viewed as raw bytes of their
    size.

    Raises TypeError or ValueError if `data` is no such buffer. A buffer of Python objects is refused, because its bytes
    are addresses in this process, and a copy into it would make the process use addresses that the card chose.
    """
    try:
        view = memoryview(data)
    except (TypeError, ValueError):
        size = getattr(getattr(data, "dtype", None), "itemsize", None)
        if not isinstance(size, int) or not callable(getattr(data, "view", None)):
            raise
        return memoryview(data.view(f"V{size}"))
    # Almost every format is one letter. Only a record's names may contain others.
    if "O" in view.format and "O" in _FIELD_NAME.sub("", view.format):
        raise TypeError("Python objects can't be copied to or from the card")
    return view


def flat_view(data: Any) -> memoryview:
    """Return a C-contiguous buffer's bytes in place. Raises TypeError or ValueError for anything else.

    It costs little, so that the copies of common buffers can try it first. `readable_bytes` and `writable_bytes` accept
    more, and report mistakes.
    """
    view = memoryview(data)
    if "O" in view.format:
        raise TypeError("this may be a buffer of Python objects")
    return view.cast("B")


def readable_bytes(data: Any, operation: str) -> memoryview:
    """Return `flattened(readable_view(data, operation))`. Raises InvalidRequest."""
    return flattened(readable_view(data, operation))


def readable_view(data: Any, operation: str) -> memoryview:
    """Return a view of a buffer, whose size can be checked before `flattened` copies it.

    Args:
        data: Any object with Python's buffer protocol.
        operation: The operation, for messages.

    Raises InvalidRequest.
    """
    try:
        return view_of(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{operation}: the data must be a buffer of bytes: {error}") from None


def flattened(view: memoryview) -> memoryview:
    """Return a flat view of a view's bytes. Copies a view that is not contiguous, in C order like numpy's tobytes.

    Such a view may have far more bytes than its memory, for example one of np.broadcast_to.
    """
    return _flat(view) or memoryview(view.tobytes())


def writable_bytes(into: Any, nbytes: int, operation: str) -> memoryview:
    """Return a flat view of the first `nbytes` of a buffer that can be written in place.

    Args:
        into: A writable, C-contiguous object with Python's buffer protocol.
        nbytes: How many bytes will be written to the buffer.
        operation: The operation, for messages.

    Raises InvalidRequest.
    """
    try:
        view = view_of(into)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{operation}: `into` must be a buffer of bytes: {error}") from None
    if view.readonly:
        raise InvalidRequest(f"{operation}: `into` is read-only")
    if view.nbytes < nbytes:
        raise InvalidRequest(f"{operation}: `into` must have {nbytes} bytes, not {view.nbytes}")
    # An empty view can't be cast, and nothing will be written to it.
    if not view.nbytes:
        return memoryview(bytearray())
    # Refuse a buffer that is not contiguous, because bytes written to a copy would not reach the caller's memory.
    flat = _flat(view)
    if flat is None:
        raise InvalidRequest(
            f"{operation}: `into` must be C-contiguous",
            "Read into a C-contiguous array, for example from np.empty, and copy from it",
        )
    return flat[:nbytes]


def _flat(view: memoryview) -> memoryview | None:
    """Return a C-contiguous view's bytes in place; None if it is not contiguous, or can't be viewed in place."""
    if not view.c_contiguous:
        return None
    try:
        return view.cast("B")
    except TypeError:
        pass  # no bytes at all, or a format that struct does not support, such as complex numbers or records
    # ctypes makes a view of any writable memory, whatever its format.
    if view.readonly or not view.nbytes:
        return None
    return memoryview((ctypes.c_ubyte * view.nbytes).from_buffer(view)).cast("B")
