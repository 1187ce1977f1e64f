"""A file's memory in huge pages, for the bytes of parked sessions.

Where the host has huge pages, they make parking faster: there are fewer pages to populate, to pin, and to return when
the process ends. The kernel gives a memfd huge pages only on request, whatever its settings for shared memory are.
"""

import ctypes
import errno
import mmap
import os
from typing import Final

from gpulease.daemon.host.memory_mapping import MAP_FIXED, MAP_NORESERVE, advise_memory, map_memory, unmap_memory

_HUGEPAGE: Final = 14
"""MADV_HUGEPAGE (madvise(2)): the kernel may use huge pages for the range."""

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE (madvise(2), Linux 5.14): allocate and map the range's pages, without changing their contents."""

_COLLAPSE: Final = 25
"""MADV_COLLAPSE (madvise(2), Linux 6.1): replace the range's pages by huge ones now, with the same contents. Each huge
page needs at least one page that is allocated already."""

_REMOVE: Final = 9
"""MADV_REMOVE (madvise(2)): give the range's memory back to the host; the file has zeros there."""

_HUGE_BYTES: Final = 2 << 20
"""Size of a huge page where pages have 4 KiB."""

_PROT_NONE: Final = 0

_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of.restype = ctypes.py_object

_PyBUF_WRITE: Final = 0x200


class HugeMapping:
    """A file, mapped whole for writing at a multiple of the huge pages' size, so that it can have huge pages.

    Args:
        fd: The file; not needed afterwards.
        size_bytes: Its size.

    Attributes:
        address: Where it is mapped.
        view: All of it.

    Raises:
        OSError: It can't be mapped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        # A mapping beyond the file's end would kill its reader with SIGBUS.
        if os.fstat(fd).st_size < size_bytes:
            raise OSError(errno.EINVAL, f"the file has fewer than {size_bytes} bytes")
        # Step 1: reserve addresses for one more huge page. Step 2: map the file at the first aligned address in them.
        self._reserved = size_bytes + _HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._start = map_memory(None, self._reserved, _PROT_NONE, flags, -1)
        self.address = -(-self._start // _HUGE_BYTES) * _HUGE_BYTES
        try:
            read_write = mmap.PROT_READ | mmap.PROT_WRITE
            map_memory(self.address, size_bytes, read_write, mmap.MAP_SHARED | MAP_FIXED, fd)
        except BaseException:
            unmap_memory(self._start, self._reserved)
            raise
        advise_memory(self.address, size_bytes, _HUGEPAGE)
        self.view: memoryview = _view_of(self.address, size_bytes, _PyBUF_WRITE)

    def populate(self, start: int, size_bytes: int) -> str:
        """Allocate a part's host memory now, in huge pages if possible. Returns the reason if it fails, else ""."""
        # Allocate one page of each huge page, then replace it by the huge page. A kernel that lacks one of these calls
        # allocates the memory at first use.
        for at in range(start, start + size_bytes, _HUGE_BYTES):
            advise_memory(self.address + at, mmap.PAGESIZE, _POPULATE_WRITE)
        advise_memory(self.address + start, size_bytes, _COLLAPSE)
        error = advise_memory(self.address + start, size_bytes, _POPULATE_WRITE)
        return "" if error in (0, errno.EINVAL) else os.strerror(error)

    def give_back(self, start: int, size_bytes: int) -> None:
        """Give a part's memory back to the host now or, where the kernel can't, when the file is closed."""
        advise_memory(self.address + start, size_bytes, _REMOVE)

    def close(self) -> None:
        """Unmap it. Raises BufferError if its view is used."""
        self.view.release()
        unmap_memory(self._start, self._reserved)
