"""What one lease leaves to the next in the host's memory: nothing.

A lease's bytes pass through its worker: frames, the buffer of replies, ring and arena. The worker is searched for them
from outside, as no tenant could: first the one they passed through, so that the search is known to find them, then that
of the next lease.
"""

import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from gpulease.client import GpuSession
from gpulease.client.verify.scene import Breach, Scene, worker_pid

SLICE_BYTES: Final = 16 << 20
COPY_BYTES: Final = 4 << 20
SECRET_BYTES: Final = 32
"""No such run of bytes comes about by chance."""

PAGE_BYTES: Final = mmap.PAGESIZE
CHUNK_PAGES: Final = 4096
PRESENT_SHIFT: Final = np.uint64(62)
"""Of a page's entry: above it, whether it is in memory or swapped out."""

DEVICES: Final = ("/dev/nvidia", "/dev/dri")


def host_buffers(scene: Scene) -> str:
    """One lease sends and fetches a secret by every way there is; the next one's worker has no byte of it."""
    try:
        return _search(scene)
    except PermissionError:
        return "not looked for: workers are closed to all but root"


def _search(scene: Scene) -> str:
    secret = secrets.token_bytes(SECRET_BYTES)
    with scene.wish(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        kept = _pass_through(session, secret)
        if not _count(worker_pid(lease.lease_id), secret):
            raise Breach("the search does not find a secret in the worker it passed through, so it proves nothing")
        del kept
    with scene.wish(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        array = session.empty(COPY_BYTES, np.uint8)
        # One that is nobody's view is this process's own, for want of an arena.
        if array.base is not None and array.any():
            raise Breach("a new arena's bytes are not zero")
        buffer = session.mem_alloc(COPY_BYTES)
        if any(session.mem_read(buffer, 0, COPY_BYTES)):
            raise Breach("new memory is not zero")
        if found := _count(worker_pid(lease.lease_id), secret):
            raise Breach(f"a later lease's worker has {found} copies of an earlier one's secret")
    return "found in the worker it passed through, in no byte of the next"


def _pass_through(session: GpuSession, secret: bytes) -> object:
    """By frames and replies, and by the arena if there is one; what must be kept alive."""
    data = np.frombuffer(secret * (COPY_BYTES // SECRET_BYTES), np.uint8)
    array = session.empty(COPY_BYTES, np.uint8)
    array[:] = data
    buffer = session.mem_alloc(COPY_BYTES)
    for source in (data, array):
        session.mem_write(buffer, 0, source)
        if bytes(session.mem_read(buffer, 0, COPY_BYTES)) != data.tobytes():
            raise Breach("what was written is not what is read")
    session.mem_read(buffer, 0, COPY_BYTES, into=array)
    return array, buffer


def _count(pid: int, secret: bytes) -> int:
    """How often the secret stands in the memory that a process has and may write to, other than devices."""
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory, Path(f"/proc/{pid}/pagemap").open("rb", 0) as pagemap:
        return sum(
            _count_in(memory.fileno(), at, end, secret)
            for start, stop in _writable(pid)
            for at, end in _present(pagemap.fileno(), start, stop)
        )


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    """See proc_pid_maps(5)."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions.startswith("rw") and not (path and path[0].startswith(DEVICES)):
            start, stop = (int(number, 16) for number in span.split("-"))
            yield start, stop


def _present(pagemap: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Runs of pages that are there: reading the others would make them. See proc_pid_pagemap(5)."""
    entries = np.frombuffer(os.pread(pagemap, (stop - start) // PAGE_BYTES * 8, start // PAGE_BYTES * 8), np.uint64)
    is_there = np.concatenate([[False], entries >> PRESENT_SHIFT != 0, [False]])
    edges = np.flatnonzero(is_there[1:] != is_there[:-1]).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        for page in range(first, last, CHUNK_PAGES):
            yield start + page * PAGE_BYTES, start + min(last, page + CHUNK_PAGES) * PAGE_BYTES


def _count_in(memory: int, at: int, end: int, secret: bytes) -> int:
    try:
        return os.pread(memory, end - at, at).count(secret)
    except OSError:
        return 0  # pages of a device, which are no memory of the process
