"""mmap(2), munmap(2) and madvise(2) by address, and flags that the mmap module does not define."""

import ctypes
import os
from typing import Final

MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
"""Do not count the address space as used memory."""

MAP_FIXED_NOREPLACE: Final = 0x100000
"""Map at the given address, or fail if something is mapped there."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def map_memory(at: int | None, size_bytes: int, protection: int, flags: int, fd: int = -1) -> int:
    """Map memory, or a file from its beginning. Returns the address. Raises OSError."""
    address: int | None = _LIBC.mmap(at, size_bytes, protection, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


def unmap_memory(address: int, size_bytes: int) -> None:
    _LIBC.munmap(address, size_bytes)


def advise_memory(address: int, size_bytes: int, advice: int) -> int:
    """Call madvise(2). Returns 0, or the errno with which it refused."""
    return ctypes.get_errno() if _LIBC.madvise(address, size_bytes, advice) else 0
