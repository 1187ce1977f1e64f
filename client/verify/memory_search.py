"""Searches the memory of another process for a sequence of bytes. Only root can do this, not a tenant."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

PAGE_BYTES: Final = mmap.PAGESIZE
CHUNK_PAGES: Final = 4096
PRESENT_SHIFT: Final = np.uint64(62)
"""Shift that leaves a pagemap entry's two upper bits: the page is in memory, or swapped out."""

DEVICES: Final = ("/dev/nvidia", "/dev/dri")


def count_in_process(pid: int, secret: bytes) -> int:
    """Count how often `secret` occurs in a process's writable memory, except in devices' memory."""
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory, Path(f"/proc/{pid}/pagemap").open("rb", 0) as pagemap:
        return sum(
            count_in_span(memory.fileno(), at, end, secret)
            for start, stop in _writable_spans(pid)
            for at, end in present_spans(pagemap.fileno(), start, stop)
        )


def _writable_spans(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of writable memory that proc_pid_maps(5) lists."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        # Skip pages of a device, which belong to its driver. Reading them could hang.
        if permissions.startswith("rw") and not (path and path[0].startswith(DEVICES)):
            start, stop = (int(number, 16) for number in span.split("-"))
            yield start, stop


def present_spans(pagemap: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield spans of pages that are present (proc_pid_pagemap(5)). Reading other pages would create them."""
    entries = np.frombuffer(os.pread(pagemap, (stop - start) // PAGE_BYTES * 8, start // PAGE_BYTES * 8), np.uint64)
    # Find the edges of each run of present pages.
    is_present = np.concatenate([[False], entries >> PRESENT_SHIFT != 0, [False]])
    edges = np.flatnonzero(is_present[1:] != is_present[:-1]).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        for page in range(first, last, CHUNK_PAGES):
            yield start + page * PAGE_BYTES, start + min(last, page + CHUNK_PAGES) * PAGE_BYTES


def count_in_span(memory: int, at: int, end: int, secret: bytes) -> int:
    """Count how often `secret` occurs between two addresses. Returns 0 if they can't be read."""
    try:
        return os.pread(memory, end - at, at).count(secret)
    except OSError:
        return 0  # a device's pages, or pages that the process has unmapped since its map was read
