"""The regions page of a session: the broker writes which regions go on, the worker reads it before each launch.

The broker makes the page (a sealed memfd) when a session opens its first region and sends the worker a read-only
descriptor. Each field is an aligned, native u64; both sides read and write one field at a time (x86-64: such a store
is seen whole, and stores are seen in their order).

    byte                                        field
       0  epoch: raised behind every change     an unchanged epoch says that no word and no deadline has changed
      64  256 words, by slot                    number << 32 | state
    4096  256 times of the last change          monotonic ns
    8192  256 deadlines                         monotonic ns; the worker refuses launches from then on by itself

A word's number is raised whenever its slot gets another region, so a region set that names an earlier one is refused.
No state leads back to ACTIVE but CANCELLED, and none leads from an end to another.
"""

import mmap
import os
import time
from enum import IntEnum
from typing import Final, NamedTuple

from gpulease.daemon.contract.control_page import for_reading, sealed_memory
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Status

REGIONS_PAGE_BYTES: Final = 3 * 4096
EPOCH_AT: Final = 0
WORDS_AT: Final = 64
FLIPPED_AT: Final = 4096
DEADLINES_AT: Final = 8192
MAX_NUMBER: Final = (1 << 32) - 1

REGION_GRANULE_BYTES: Final = 2 << 20
"""Regions begin and end at multiples of so many bytes: a card's page tables map no less at a time (CUDA Driver API,
cuMemGetAllocationGranularity)."""


class RegionWord(IntEnum):
    """States of a region's word. ACTIVE alone lets launches begin."""

    NONE = 0
    ACTIVE = 1
    CANCELLED = 2
    REVOKED = 3
    EXPIRED = 4
    FREED = 5


STATUS_OF_WORD: Final = {
    RegionWord.CANCELLED: Status.CANCELLED,
    RegionWord.REVOKED: Status.REVOKED,
    RegionWord.EXPIRED: Status.LEASE_EXPIRED,
    RegionWord.FREED: Status.LEASE_FREED,
}
"""The status of the first launch that is refused because of a word; every later one gets FENCED."""


class BrokerRegionsPage:
    """The broker's view of a session's regions page, which it writes.

    Its epochs are above those of every earlier page of the host: a set that was checked by another page is checked
    again.

    Attributes:
        reading_fd: A read-only descriptor for the worker, see `control_page.for_worker`; closed by `close`.
    """

    def __init__(self) -> None:
        fd = sealed_memory("gpulease-regions", REGIONS_PAGE_BYTES)
        try:
            self._map = mmap.mmap(fd, REGIONS_PAGE_BYTES)
            self.reading_fd = for_reading(fd)
        finally:
            os.close(fd)
        words = memoryview(self._map).cast("Q")
        self._all = words
        self._words = words[WORDS_AT // 8 : WORDS_AT // 8 + MAX_REGIONS]
        self._flipped = words[FLIPPED_AT // 8 : FLIPPED_AT // 8 + MAX_REGIONS]
        self._deadlines = words[DEADLINES_AT // 8 : DEADLINES_AT // 8 + MAX_REGIONS]
        words[EPOCH_AT // 8] = time.monotonic_ns()

    def set(self, slot: int, number: int, word: RegionWord, deadline_ns: int, now_ns: int) -> None:
        """Write a region's state and deadline, then raise the epoch.

        Args:
            slot: The region's place.
            number: Its number, from 1 to MAX_NUMBER, so that no word of a region is 0.
            word: Its state.
            deadline_ns: When launches are refused without a further word, on the monotonic clock.
            now_ns: The present time, which is told with a change of the word.

        Raises:
            ValueError: The slot or the number is out of bounds.
        """
        if not (0 <= slot < MAX_REGIONS and 0 < number <= MAX_NUMBER):
            raise ValueError(f"there is no place {slot} for a region's number {number}")
        value = word_of(number, word)
        if self._words[slot] != value:
            self._flipped[slot] = now_ns
        self._deadlines[slot] = deadline_ns
        self._words[slot] = value
        self._all[EPOCH_AT // 8] += 1

    def close(self) -> None:
        """Unmap the page and close the descriptor. The worker has its own."""
        for view in (self._words, self._flipped, self._deadlines, self._all):
            view.release()
        self._map.close()
        if self.reading_fd >= 0:
            os.close(self.reading_fd)
            self.reading_fd = -1


_NUMBER_SHIFT: Final = 32
_STATE_MASK: Final = (1 << _NUMBER_SHIFT) - 1


def word_of(number: int, state: RegionWord) -> int:
    """Return the word of a region with that number in that state."""
    return number << _NUMBER_SHIFT | state


class SeenWord(NamedTuple):
    """A word as the worker reads it. `state` is REVOKED for a state that no broker writes: fail closed."""

    number: int
    state: RegionWord


class WorkerRegions:
    """The worker's view of its session's regions page, which nobody can write through.

    Args:
        fd: The page's read-only descriptor; the view needs it no longer.

    Attributes:
        epoch_word: The epoch alone, for native code.
        words: The words, by slot.
        flipped_ns: When each slot's word was changed last, on the monotonic clock.
        deadlines: When each slot's region ends, on the monotonic clock.

    Raises:
        OSError, ValueError: The descriptor is no such page.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, REGIONS_PAGE_BYTES, prot=mmap.PROT_READ)
        with memoryview(self._map) as page, page.cast("Q") as fields:
            self.epoch_word = fields[EPOCH_AT // 8 : EPOCH_AT // 8 + 1]
            self.words = fields[WORDS_AT // 8 : WORDS_AT // 8 + MAX_REGIONS]
            self.flipped_ns = fields[FLIPPED_AT // 8 : FLIPPED_AT // 8 + MAX_REGIONS]
            self.deadlines = fields[DEADLINES_AT // 8 : DEADLINES_AT // 8 + MAX_REGIONS]

    @property
    def epoch(self) -> int:
        """The epoch. Whoever caches what the page says reads it first: the broker raises it last."""
        return self.epoch_word[0]

    def word(self, slot: int) -> SeenWord:
        """Return a slot's word."""
        word = self.words[slot]
        state = word & _STATE_MASK
        return SeenWord(word >> _NUMBER_SHIFT, RegionWord(state) if state in _STATES else RegionWord.REVOKED)

    def close(self) -> None:
        """Unmap the page."""
        for view in (self.epoch_word, self.words, self.flipped_ns, self.deadlines):
            view.release()
        self._map.close()


_STATES: Final = frozenset(map(int, RegionWord))
