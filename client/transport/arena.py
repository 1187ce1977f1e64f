"""The client's side of a session's arena: numpy arrays in memory that the worker maps, too.

Dropping an array's last view frees the array's memory. The arena itself exists as long as the session or any array in
it.
"""

import ctypes
import math
import mmap
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.array_layout import checked_shape
from gpulease.client.errors import InvalidRequest
from gpulease.client.texts import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT_BYTES: Final = 256
"""Alignment of every array in bytes: more than any vector instruction needs, and a whole number of cache lines."""


class Arena:
    """Allocates pieces of one mapping, first fit. Threads may share it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the arena. Raises OSError or ValueError if that fails."""
        self._map = mmap.mmap(fd, size_bytes)
        self._size = size_bytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lock = threading.Lock()
        self._starts = [0]
        self._sizes = [size_bytes]
        # Any thread may append here at any moment, by dropping an array. A deque's append is atomic.
        self._dropped: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> Any:
        """Return a writable buffer of `nbytes`, at least 1; None if it does not fit."""
        with self._lock:
            return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> Any:
        # First take back the pieces of arrays that were dropped since the last call.
        self._take_back()
        # Round up to the alignment, so that every free piece starts aligned.
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # First fit suffices, because there are few pieces, and freed pieces merge with their neighbours.
        for at, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[at]
                self._starts[at] += size
                self._sizes[at] -= size
                if free == size:
                    del self._starts[at], self._sizes[at]
                block = (ctypes.c_ubyte * nbytes).from_buffer(self._map, start)
                # Run no finalizer at exit, because the end of the process frees the mapping.
                weakref.finalize(block, self._dropped.append, (start, size)).atexit = False
                return block
        return None

    def offset_of(self, view: memoryview) -> int | None:
        """Return the offset of a contiguous view's bytes in the arena; None if they are elsewhere or read-only.

        Raises TypeError or ValueError if the bytes are not contiguous.
        """
        if view.readonly:
            return None  # ctypes gives no address for a read-only buffer
        # Addresses outside the mapping are ordinary memory.
        offset = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self._address
        return offset if 0 <= offset <= self._size - view.nbytes else None

    def offset_of_address(self, address: int) -> int:
        """Return the offset in the arena of an address inside it."""
        return address - self._address

    def _take_back(self) -> None:
        while self._dropped:
            # Keep the free pieces sorted by offset, so that adjacent ones can be merged.
            start, size = self._dropped.popleft()
            at = bisect_left(self._starts, start)
            self._starts.insert(at, start)
            self._sizes.insert(at, size)
            # Merge the piece with the free piece after it, then with the free piece before it.
            for neighbour in (at, at - 1):
                if (
                    0 <= neighbour < len(self._starts) - 1
                    and self._starts[neighbour] + self._sizes[neighbour] == self._starts[neighbour + 1]
                ):
                    self._sizes[neighbour] += self._sizes.pop(neighbour + 1)
                    del self._starts[neighbour + 1]


def empty(arena: Arena | None, shape: int | Sequence[int], dtype: Any) -> "NDArray[Any]":
    """Make an array in the arena, or an ordinary one if the arena is missing or full, or if the dtype can't be shared.

    Raises InvalidRequest for a `dtype` that numpy does not support, or for a shape that no array can have.
    """
    import numpy as np

    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidRequest(
            f"empty: the dtype must be a numpy dtype, not {quoted(dtype)}: {quoted(str(error))}"
        ) from None
    sizes = checked_shape(shape, kind.itemsize, "empty")
    nbytes = math.prod(sizes) * kind.itemsize
    # Objects can't be shared between processes, and an array without bytes needs no memory.
    is_plain = arena is not None and not kind.hasobject and nbytes > 0 and min(sizes, default=1) > 0
    block = arena.allocate(nbytes) if arena is not None and is_plain else None
    return np.empty(sizes, kind) if block is None else np.frombuffer(block, kind).reshape(sizes)
