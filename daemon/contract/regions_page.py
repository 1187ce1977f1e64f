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
from enum import IntEnum
from typing import Final, NamedTuple

from gpulease.protocol.opcodes import Status

REGIONS_PAGE_BYTES: Final = 3 * 4096
EPOCH_AT: Final = 0
WORDS_AT: Final = 64
FLIPPED_AT: Final = 4096
DEADLINES_AT: Final = 8192
MAX_NUMBER: Final = (1 << 32) - 1


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


_SLOTS: Final = 256
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
            self.words = fields[WORDS_AT // 8 : WORDS_AT // 8 + _SLOTS]
            self.flipped_ns = fields[FLIPPED_AT // 8 : FLIPPED_AT // 8 + _SLOTS]
            self.deadlines = fields[DEADLINES_AT // 8 : DEADLINES_AT // 8 + _SLOTS]

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
