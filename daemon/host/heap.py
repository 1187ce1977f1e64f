"""Memory of a process of ours that is overwritten as it is freed, so that nothing of one lease is left for the next.

Python's own allocator keeps freed blocks as they were, and so do the caches of glibc for blocks and for threads'
stacks. So all goes to malloc (Python/C API, "Memory Management", PYTHONMALLOC), which overwrites what is freed, keeps
no cache that it leaves as it is, and unmaps large blocks (glibc manual, "Tunables": glibc.malloc.perturb and others).
"""

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
"""The environment that a process must be started with: both are read once, at the start."""

_TRIED_BYTES: Final = (200, 1000, 5000, 60_000, 130_000)
"""Blocks of each kind that malloc keeps: small ones, large ones, and almost as large as those that it unmaps."""

_HEAD_BYTES: Final = 32
"""Of a freed block, where malloc links it with others."""

_MARK: Final = b"\x11" * 16
"""Neither what is freed is overwritten with, nor its complement, which fills what is handed out."""


def is_told_to_wipe() -> bool:
    """Whether this process was started so that it overwrites what it frees."""
    return all(os.environ.get(name) == value for name, value in WIPING_HEAP.items())


@cache
def is_heap_wiped() -> bool:
    """Whether this process overwrites what it frees: it was started so, and it was tried.

    Another C library, or one that was told to heed no environment, leaves everything as it was.
    """
    # Python's own allocator counts its blocks; malloc's are not counted (sys.getallocatedblocks).
    return is_told_to_wipe() and not sys.getallocatedblocks() and not any(map(_is_left, _TRIED_BYTES))


def _is_left(size_bytes: int) -> bool:
    """Whether what was in a block is there after it was freed."""
    # It holds the interpreter's lock: nobody else in Python is given the block meanwhile.
    libc = ctypes.PyDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    block = libc.malloc(size_bytes)
    # Behind it, so that it is not given back to the host.
    guard = libc.malloc(size_bytes)
    if not block or not guard:
        return True
    ctypes.memset(block, _MARK[0], size_bytes)
    libc.free(block)
    is_left = _MARK in ctypes.string_at(block + _HEAD_BYTES, size_bytes - _HEAD_BYTES)
    libc.free(guard)
    return is_left
