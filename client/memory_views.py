"""Flat views of memory that a program passes for copying: of bytes, arrays, or any buffer."""

import ctypes
from typing import Any

from gpulease.client.errors import InvalidRequest


def readable_bytes(data: Any, operation: str) -> memoryview:
    """Return a flat view of a buffer's bytes. Copies a buffer that is not contiguous, in C order like numpy's tobytes.

    Args:
        data: Any object with Python's buffer protocol.
        operation: The operation, for messages.

    Raises InvalidRequest.
    """
    try:
        view = memoryview(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{operation}: the data must be a buffer of bytes: {error}") from None
    # Copying a buffer that is not contiguous is allowed, because it will only be read.
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
        view = memoryview(into)
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
        pass  # no bytes at all, or a format that struct does not know, such as complex numbers or records
    # ctypes makes a view of any writable memory, whatever its format.
    if view.readonly or not view.nbytes:
        return None
    return memoryview((ctypes.c_ubyte * view.nbytes).from_buffer(view)).cast("B")
