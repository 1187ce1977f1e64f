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

from enum import IntEnum
from typing import Final

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
