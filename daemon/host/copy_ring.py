"""A ring of buffers in host memory through which bytes are copied, with both ends copying at the same time.

One side fills the buffers in order, and the other side empties them in order. At each end is a card, whose bytes the
driver copies, or host memory, whose bytes threads copy. Both ends may be in one process. Or two processes share the
ring, and the bytes pass from a card in one process to a card in the other. A single thread drives an end: `advance`
never waits.

The numbers of filled and of emptied buffers are in the ring's memory. A process that shares it may be compromised, so
each end checks the other's number before using it. The bytes belong to one session, and so do both processes.
"""

import ctypes
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from gpulease.daemon.contract.control_page import SEALS, sealed_memory

BUFFER_BYTES: Final = 16 << 20
"""A buffer's size in bytes. Buffers of 8 to 64 MiB were equally fast between two cards (H200)."""

BUFFERS: Final = 8
"""Number of buffers. They take 128 MiB of pinned memory, and keep a card busy for 2 ms. Within that time, the host must
notice that a buffer was filled or emptied.
"""

STALL_S: Final = 10.0
"""Longest time without progress, in seconds, after which a copy is given up, because the process at the other end may
have ended. A card copies a buffer within a millisecond."""

PAUSE_S: Final = 0.0001
"""Pause in seconds between two checks of a ring when nothing can be done."""

_HEAD_BYTES: Final = mmap.PAGESIZE
_SIZE_BYTES: Final = _HEAD_BYTES + BUFFERS * BUFFER_BYTES

# Places of the words.
_FILLED: Final = 0
_EMPTIED: Final = 1
_WORDS: Final = 2

_NEVER: Final = (1 << 64) - 1
"""A number of filled buffers that no copy reaches."""


class RingBroken(Exception):
    """The other end of a ring has stopped, or its number is impossible."""


class Part(NamedTuple):
    """A range of the bytes to copy.

    Attributes:
        item: The number of its item in the caller's list.
        start: Where the part begins in the item.
        size_bytes: Its size.
        at: Where the part begins in the buffer.
    """

    item: int
    start: int
    size_bytes: int
    at: int


Batch = list[Part]
"""The parts that share a buffer."""


def batches(sizes: Iterable[int]) -> Iterator[Batch]:
    """Divide items of these sizes, in order, into batches that each fill a buffer. Both ends must agree on them."""
    batch, used_bytes = Batch(), 0
    for item, size_bytes in enumerate(sizes):
        start = 0
        while start < size_bytes:
            part_bytes = min(size_bytes - start, BUFFER_BYTES - used_bytes)
            batch.append(Part(item, start, part_bytes, used_bytes))
            start, used_bytes = start + part_bytes, used_bytes + part_bytes
            if used_bytes == BUFFER_BYTES:
                yield batch
                batch, used_bytes = [], 0
    if batch:
        yield batch


class CopyRing:
    """The memory of a ring. `close` unmaps it.

    Args:
        fd: A descriptor of another process's ring, which stays open; None for a new ring.
        is_shared: Whether another process may map a new ring. If not, its memory is private, which the kernel allocates
            faster.

    Attributes:
        fd: A descriptor of the ring, until `close`; -1 for a ring that is not shared.
        buffers: The memory of all buffers.

    Raises:
        OSError: The host has no memory for it.
        RingBroken: It is not a ring.
    """

    def __init__(self, fd: int | None = None, *, is_shared: bool = True) -> None:
        if fd is not None:
            self.fd = os.dup(fd)
        else:
            self.fd = sealed_memory("gpulease-ring", _SIZE_BYTES) if is_shared else -1
        try:
            if self.fd >= 0:
                _check_memory(self.fd)
            self._map = mmap.mmap(self.fd, _SIZE_BYTES)
        except BaseException:
            self._close_fd()
            raise
        self._words = (ctypes.c_uint64 * _WORDS).from_buffer(self._map)
        self.buffers = memoryview(self._map)[_HEAD_BYTES:]
        self._start = ctypes.addressof(self._words) + _HEAD_BYTES

    @property
    def filled(self) -> int:
        """Number of buffers filled so far, as reported by the side that fills them."""
        return int(self._words[_FILLED])

    @filled.setter
    def filled(self, count: int) -> None:
        self._words[_FILLED] = count

    @property
    def emptied(self) -> int:
        """Number of buffers emptied so far, as reported by the side that empties them."""
        return int(self._words[_EMPTIED])

    @emptied.setter
    def emptied(self, count: int) -> None:
        self._words[_EMPTIED] = count

    def address(self, number: int) -> int:
        """Return the address of the buffer that is used for a batch, by the batch's number."""
        return self._start + number % BUFFERS * BUFFER_BYTES

    def break_off(self) -> None:
        """Make the end that empties the ring stop, because its bytes will not come."""
        self.filled = _NEVER

    def close(self) -> None:
        self.buffers.release()
        del self._words
        self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class RingEnd:
    """One end of a ring, which fills or empties the buffers.

    Args:
        ring: The ring.
        left: The batches.
        begin: Begins to copy a batch from or to a buffer at an address. Returns an object that represents the copy.
        is_done: Returns whether such a copy has ended. Raises the error that ended it.
        fills: Whether this end fills the buffers, rather than empties them.
    """

    def __init__(
        self,
        ring: CopyRing,
        left: Iterator[Batch],
        begin: Callable[[Batch, int], Any],
        is_done: Callable[[Any], bool],
        *,
        fills: bool,
    ) -> None:
        self._ring = ring
        self._left = left
        self._begin = begin
        self._is_done = is_done
        self._fills = fills
        self._next = next(left, None)
        self._begun = self._ended = 0
        self._in_flight: deque[Any] = deque()

    @property
    def is_over(self) -> bool:
        """Whether every batch is copied."""
        return self._next is None and not self._in_flight

    def advance(self) -> bool:
        """Begin all copies that are possible now, and publish copies that have ended. Returns whether there were any.

        Raises RingBroken, and the errors of the copies.
        """
        before = self._begun + self._ended
        most = self._most()
        while self._next is not None and self._begun < most:
            self._in_flight.append(self._begin(self._next, self._ring.address(self._begun)))
            self._begun, self._next = self._begun + 1, next(self._left, None)
        while self._in_flight and self._is_done(self._in_flight[0]):
            self._in_flight.popleft()
            self._ended += 1
            # Write the word after the bytes, because the other end reads the bytes as soon as it sees the word.
            if self._fills:
                self._ring.filled = self._ended
            else:
                self._ring.emptied = self._ended
        return self._begun + self._ended > before

    def _most(self) -> int:
        """Return how many batches may have begun by now."""
        if self._fills:
            emptied = self._ring.emptied
            if not self._ended - BUFFERS <= emptied <= self._ended:
                raise RingBroken("more buffers were emptied than filled")
            return emptied + BUFFERS
        filled = self._ring.filled
        if not self._ended <= filled <= self._ended + BUFFERS:
            raise RingBroken("more buffers were filled than the ring has")
        return filled

    def settle(self) -> None:
        """Begin no more copies, and wait until no copy uses the ring. Raises the errors of the copies."""
        self._next = None
        while self._in_flight:
            if self._is_done(self._in_flight[0]):
                self._in_flight.popleft()
            else:
                time.sleep(PAUSE_S)


def run(ends: Iterable[RingEnd], poll: Callable[[], None]) -> None:
    """Drive the ends of this process until all batches are copied.

    Args:
        ends: The ends. After an error, nothing uses the ring.
        poll: Called repeatedly. It may raise an exception, to give up.

    Raises:
        RingBroken: Nothing was copied for STALL_S, or the other process's number is impossible.
    """
    ends = list(ends)
    stalls_at_s = time.monotonic() + STALL_S
    try:
        while not all(end.is_over for end in ends):
            poll()
            has_advanced = [end.advance() for end in ends]
            if any(has_advanced):
                stalls_at_s = time.monotonic() + STALL_S
                continue
            if time.monotonic() > stalls_at_s:
                raise RingBroken(f"the other end of the copy has done nothing for {STALL_S:g} s")
            time.sleep(PAUSE_S)
    finally:
        for end in ends:
            end.settle()


def _check_memory(fd: int) -> None:
    # If the memory could shrink, an access beyond its end would kill this process (SIGBUS).
    if os.fstat(fd).st_size != _SIZE_BYTES or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise RingBroken("its memory is not that of a ring")
