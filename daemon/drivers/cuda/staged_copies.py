"""Copies ordinary host memory to the card, by threads and through pinned buffers.

The driver copies memory that is not pinned in one thread, at 6 GB/s (H200), and pinning it first takes as long if
another process has touched it. Here several threads copy it into small pinned buffers, from which the card reads.
"""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from typing import Any, Final

from gpulease.daemon.drivers.interface import Poll

BUFFER_BYTES: Final = 8 << 20
"""A buffer's size in bytes. Pinning all buffers takes about 5 ms."""

THREADS: Final = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
BUFFERS: Final = 2 * THREADS
"""While the card reads one half, threads fill the other."""

POLL_S: Final = 0.01
"""Time between two calls of `poll` while a thread fills a buffer, in seconds."""

Part = tuple[int, int, int]
"""Address on the card, address in host memory, and size in bytes: at most BUFFER_BYTES."""


def copy_staged(
    parts: Iterable[Part],
    pin: Callable[[int, int], Callable[[], None] | None],
    begin: Callable[[int, int, int], Any],
    finish: Callable[[Any, Poll], None],
    poll: Poll,
) -> bool:
    """Copy parts of host memory to the card; complete on return. Returns False if no memory can be pinned for it.

    Args:
        parts: The parts; none may change until the return.
        pin: Pins memory by address and size. Returns what unpins it; None if the driver refuses.
        begin: Begins a copy to the card, by target, source and size. Returns an event that is recorded after it.
        finish: Waits for such an event, and polls.
        poll: May raise to give up.
    """
    with _pinned_buffers(pin) as buffers:
        if not buffers:
            return False
        filling: deque[tuple[Future[Any], int, int, int]] = deque()
        reading: deque[tuple[Any, int]] = deque()
        left = iter(parts)
        with ThreadPoolExecutor(THREADS, "gpul-stage") as pool:
            try:
                while True:
                    # Step 1: have threads fill all free buffers.
                    while buffers and (part := next(left, None)) is not None:
                        target, source, size = part
                        buffer = buffers.popleft()
                        filling.append((pool.submit(ctypes.memmove, buffer, source, size), target, buffer, size))
                    if not filling:
                        break
                    # Step 2: copy the oldest full one to the card.
                    future, target, buffer, size = filling.popleft()
                    _await_full(future, poll)
                    reading.append((begin(target, buffer, size), buffer))
                    # Step 3: if no other buffer is free, reuse one that the card has read.
                    while not buffers and reading and (not filling or len(reading) > THREADS):
                        finish(reading[0][0], poll)
                        buffers.append(reading.popleft()[1])
            finally:
                # Also after an error: nothing may read the buffers while they are unpinned.
                for event, _ in reading:
                    finish(event, _ignore)
    return True


def _await_full(future: "Future[Any]", poll: Poll) -> None:
    while True:
        try:
            future.result(POLL_S)
        except NotYet:
            poll()
        else:
            return


def _ignore() -> None: ...


@contextmanager
def _pinned_buffers(pin: Callable[[int, int], Callable[[], None] | None]) -> Iterator[deque[int]]:
    """Yield the addresses of pinned buffers; none if the driver pins no memory."""
    memory = mmap.mmap(-1, BUFFERS * BUFFER_BYTES)
    keeper = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(keeper)
    unpin = pin(start, len(memory))
    try:
        yield deque(range(start, start + len(memory), BUFFER_BYTES) if unpin is not None else ())
    finally:
        if unpin is not None:
            unpin()
        del keeper
        memory.close()
