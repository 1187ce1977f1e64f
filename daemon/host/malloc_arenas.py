"""Keeps all threads of a process in malloc's first arena, so that no thread reserves addresses for a separate arena.

By default the first malloc of a further thread reserves 64 MiB of addresses (glibc manual, "Tunables":
glibc.malloc.arena_max). When that happens depends on the scheduler.
"""

import contextlib
import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8
"""The number of the parameter (mallopt(3), malloc.h of glibc)."""


def use_one_arena() -> None:
    """From now on, make threads that have no arena yet share the first one. Has no effect without glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.PyDLL(None).mallopt(_M_ARENA_MAX, 1)
