"""The arenas of malloc in a process's memory map."""

from itertools import pairwise
from pathlib import Path
from typing import Final

ARENA_BYTES: Final = 64 << 20
"""Bytes of addresses that glibc reserves for a thread's arena, which begins at a multiple of this number
(HEAP_MAX_SIZE)."""


def arenas_of(pid: int) -> list[int]:
    """Return the addresses of the arenas that the process's threads have, apart from the first arena."""
    parts: list[tuple[int, int, str]] = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        places, access, _, _, inode, *_ = line.split()
        start, _, end = places.partition("-")
        if inode == "0":
            parts.append((int(start, 16), int(end, 16), access))
    # The used part of an arena is followed by the rest of its addresses, which can't be accessed.
    return [
        start
        for (start, end, access), (rest, rest_end, rest_access) in pairwise(parts)
        if start % ARENA_BYTES == 0
        and (access, rest_access) == ("rw-p", "---p")
        and (rest, rest_end) == (end, start + ARENA_BYTES)
    ]
