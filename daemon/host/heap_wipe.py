"""Makes a process overwrite memory that it frees, so that no bytes of one lease remain for the next.

Python's own allocator leaves freed blocks unchanged, and so do glibc's caches for blocks and for threads' stacks. So
Python uses malloc for everything (Python/C API, "Memory Management", PYTHONMALLOC). Tunables make malloc overwrite
freed blocks, turn off those caches, and unmap large blocks (glibc manual, "Tunables": glibc.malloc.perturb and others).
"""

import contextlib
import ctypes
import os
import sys
from functools import cache
from typing import Final

WIPING_HEAP: Final = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.perturb=165",
            "glibc.malloc.tcache_count=0",
            "glibc.malloc.mmap_threshold=131072",
            "glibc.pthread.stack_cache_size=0",
        )
    ),
}
"""Variables with which the process must be started, because they are read only at its start."""

_M_PERTURB: Final = -6
"""The number of the parameter (mallopt(3), malloc.h of glibc)."""

_TRIED_BYTES: Final = (200, 1000, 5000, 60_000, 130_000)
"""Sizes of each kind of block that malloc keeps: small, large, and almost as large as those that it unmaps."""

_HEAD_BYTES: Final = 32
"""Size of the beginning of a freed block, where malloc stores links to other blocks."""

_MARK: Final = b"\x11" * 16
"""Bytes that malloc never writes itself: neither into freed blocks nor, as their complement, into new ones."""


def wipes_heap_by_environment() -> bool:
    """Return whether this process was started with `WIPING_HEAP`."""
    return all(os.environ.get(name) == value for name, value in WIPING_HEAP.items())


@cache
def is_heap_wiped() -> bool:
    """Return whether this process overwrites memory that it frees, as started to and as a test confirms.

    Other C libraries do not, nor does glibc in a process that must ignore the environment.
    """
    # Python counts only the blocks of its own allocator, not those of malloc (sys.getallocatedblocks).
    return wipes_heap_by_environment() and not sys.getallocatedblocks() and not any(map(_is_left, _TRIED_BYTES))


def _is_left(size_bytes: int) -> bool:
    """Return whether a block of this size keeps its content after it was freed."""
    # PyDLL keeps the interpreter's lock, so no other Python code is given the block during the call.
    libc = ctypes.PyDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    block = libc.malloc(size_bytes)
    # A second block, after the first, keeps malloc from returning the first to the host.
    guard = libc.malloc(size_bytes)
    if not block or not guard:
        return True
    ctypes.memset(block, _MARK[0], size_bytes)
    libc.free(block)
    # Read after free(3): the test is whether malloc overwrote the block, and nothing else could have reused it.
    is_left = _MARK in ctypes.string_at(block + _HEAD_BYTES, size_bytes - _HEAD_BYTES)
    libc.free(guard)
    return is_left


def stop_wiping() -> None:
    """Make this process leave freed memory unchanged from now on. Memory that was freed before stays overwritten.

    For a process that has already freed its secrets and holds no bytes of another lease. Has no effect without glibc.
    """
    with contextlib.suppress(AttributeError):
        ctypes.PyDLL(None).mallopt(_M_PERTURB, 0)
