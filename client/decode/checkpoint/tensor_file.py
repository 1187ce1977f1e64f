"""A file of tensors that is read at any place, by several threads at a time.

The file is mapped: a core copies what the page cache has by vector instructions, in less time than read(2) takes on
some hosts. Pages come by faults, so a large tensor wants several threads. Before each access the file's length is
asked for, because touching what a file does not have any more ends the process by SIGBUS.
"""

import mmap
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.http.settings_file import open_regular

AHEAD_BYTES: Final = 64 << 20
"""How far ahead of a copy the kernel is asked to read: so that a disk has always something to do."""


class TensorFile:
    """A mapped file.

    Attributes:
        path: Its path, for errors.
        mapped: Its bytes, as long as they are looked at.
    """

    def __init__(self, path: Path) -> None:
        """Map it. Raises ModelRejected where there is none, or an empty one."""
        self.path = path
        try:
            with open_regular(path) as file:
                self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelRejected(f"{path}: {error.strerror}") from None
        except ValueError:
            raise ModelRejected(f"{path}: truncated: it is empty") from None

    def view(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Look at bytes of the file. Raises ModelRejected if it does not have them any more."""
        have = self.mapped.size()
        if have < offset + size:
            raise ModelRejected(
                f"{self.path}: truncated: it became shorter while it was read, {have:,} bytes of {len(self.mapped):,}",
                "Write a model to another file and rename it, instead of overwriting a file in use",
            )
        return np.frombuffer(self.mapped, np.uint8, size, offset)

    def fill(self, offset: int, into: NDArray[np.uint8]) -> None:
        """Copy the bytes from `offset` on. Raises ModelRejected if the file does not have them any more."""
        ahead = (offset + AHEAD_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        if ahead < len(self.mapped):
            self.mapped.madvise(mmap.MADV_WILLNEED, ahead, into.nbytes)
        np.copyto(into, self.view(offset, into.nbytes))


class FileRows:
    """Rows of a tensor, one after the other in a file. Callable as a RowReader."""

    __slots__ = ("_file", "_offset", "_row_bytes")

    def __init__(self, file: TensorFile, offset: int, row_bytes: int) -> None:
        """Args: offset: The first row's place in the file."""
        self._file = file
        self._offset = offset
        self._row_bytes = row_bytes

    def __call__(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Look at rows [begin, end) as [end - begin, bytes of a row]. Raises ModelRejected."""
        size = (end - begin) * self._row_bytes
        return self._file.view(self._offset + begin * self._row_bytes, size).reshape(end - begin, -1)

    def fill(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Copy the rows from `begin` on to memory of some rows' size. Raises ModelRejected."""
        self._file.fill(self._offset + begin * self._row_bytes, into)
