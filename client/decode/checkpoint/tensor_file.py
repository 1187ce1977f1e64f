"""A file of tensors, which several threads may read at any place.

The file is mapped, because copying from the page cache with vector instructions is faster than read(2) on some hosts.
Page faults load the pages, so a large tensor needs several threads. Before each access the file's length is checked,
because touching a page that the file no longer has ends the process with SIGBUS.
"""

import mmap
import os
import weakref
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.http.settings_file import open_regular

AHEAD_BYTES: Final = 64 << 20
"""How far ahead of a copy the kernel is asked to read, so that the disk is never idle."""


class TensorFile:
    """A mapped file. It stays mapped for as long as any view of it exists.

    Attributes:
        path: Its path, for errors.
        mapped: Its bytes.
    """

    def __init__(self, path: Path) -> None:
        """Map the file. Raises ModelRejected if it is missing or empty."""
        self.path = path
        try:
            with open_regular(path) as file:
                self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise ModelRejected(f"{path}: {error.strerror}") from None
        except ValueError:
            raise ModelRejected(f"{path}: truncated: it is empty") from None
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False

    def close(self) -> None:
        """Close the file, which can no longer be read. Existing views stay valid, and keep it mapped."""
        if self._close.alive:
            self._close()
            # The mapping ends with the last view of it.
            del self.mapped

    def view(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of the file without copying. Raises ModelRejected if the file has become too short."""
        # The file's current length, by fstat. The mapping keeps its original length.
        file_size = self.mapped.size()
        if file_size < offset + size:
            raise ModelRejected(
                f"{self.path}: truncated: it became shorter while it was read,"
                f" {file_size:,} bytes of {len(self.mapped):,}",
                "Write a model to another file and rename it, instead of overwriting a file in use",
            )
        return np.frombuffer(self.mapped, np.uint8, size, offset)

    def fill(self, offset: int, into: NDArray[np.uint8]) -> None:
        """Copy the bytes from `offset` on to `into`. Raises ModelRejected if the file has become too short."""
        # This releases the interpreter's lock only once: with many threads, getting it back takes as long as copying 2
        # MiB.
        np.copyto(into, self.view(offset, into.nbytes))

    def read_ahead(self, offset: int, size: int) -> None:
        """Let the kernel read `size` bytes, beginning AHEAD_BYTES after `offset`, into the page cache."""
        # Do not ask for bytes that are in the page cache: the request would take as long as part of the copy. Both
        # calls release the interpreter's lock, which madvise() of a mapping does not.
        ahead_offset = offset + AHEAD_BYTES
        if ahead_offset < len(self.mapped) and not self._is_cached(ahead_offset):
            os.posix_fadvise(self._descriptor, ahead_offset, size, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, offset: int) -> bool:
        """Return whether a byte of the file is in the page cache; False if the file system does not report it."""
        try:
            # preadv2(2), RWF_NOWAIT: fails with EAGAIN instead of reading from the disk.
            return os.preadv(self._descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False


class FileRows:
    """The rows of a tensor, which are contiguous in a file. Callable as a RowReader."""

    __slots__ = ("_file", "_offset", "_row_bytes")

    def __init__(self, file: TensorFile, offset: int, row_bytes: int) -> None:
        """Args: offset: Where the first row begins in the file, in bytes."""
        self._file = file
        self._offset = offset
        self._row_bytes = row_bytes

    def __call__(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return a view of rows [begin, end) as [end - begin, bytes of a row]. Raises ModelRejected."""
        size = (end - begin) * self._row_bytes
        return self._file.view(self._offset + begin * self._row_bytes, size).reshape(end - begin, -1)

    def fill(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Copy the rows from their byte `begin` on until `into` is full. Raises ModelRejected."""
        self._file.fill(self._offset + begin, into)

    def read_ahead(self, begin: int, size: int) -> None:
        """Have the kernel read ahead of the rows' bytes from `begin` on (`TensorFile.read_ahead`)."""
        self._file.read_ahead(self._offset + begin, size)
