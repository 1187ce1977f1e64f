"""The session's words: a page that the broker writes, and that the session's worker and its clients map read-only.

It shows whether the lease and each of its regions are still active. A client decides by one load from it whether to
refuse a launch, and the worker reads the regions' words before each launch. There is one page for each session, which
contains no word of another session. Clients are never trusted: another page, which no client has, decides what a worker
does after the lease's end.

Each field is an aligned, native u64, read and written one at a time (on x86-64, such a store becomes visible as a
whole, and stores become visible in their order).

    byte                                        field
       0  epoch: raised after every change      unchanged as long as no region's word or deadline has changed
          of a region
       8  lease's word                          0 while it lives, then the (positive) number of its end's status
      16  lease's generation                    raised by each renewal
      64  256 words of regions, by slot         number << 32 | state
    2112  lease's cause of end                  32 bytes of UTF-8, padded with zeros; written before the word
    2144  length of the reason
    2152  why an operator ended the lease       512 bytes of UTF-8; written before the word
    4096  256 times of the last change          monotonic ns
    8192  256 deadlines                         monotonic ns; the worker refuses launches from then on by itself

A region's number is raised whenever its slot gets another region, so a region set that names an earlier one is
refused. Only CANCELLED can become ACTIVE again. Once a region or the lease has ended, its state never changes.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Status

SESSION_WORDS_VERSION: Final = 1
"""The version of the layout above."""

SESSION_WORDS_BYTES: Final = 3 * 4096
EPOCH_AT: Final = 0
LEASE_WORD_AT: Final = 8
GENERATION_AT: Final = 16
WORDS_AT: Final = 64
CAUSE_AT: Final = 2112
CAUSE_BYTES: Final = 32
REASON_LENGTH_AT: Final = 2144
REASON_AT: Final = 2152
MAX_SHOWN_REASON_BYTES: Final = 512
"""Maximum number of bytes of a reason on the page; a longer one is truncated."""

LEASE_END_BYTES: Final = REASON_AT + MAX_SHOWN_REASON_BYTES
"""Number of bytes at the start of the page that contain the lease's word, its cause and its reason."""

FLIPPED_AT: Final = 4096
DEADLINES_AT: Final = 8192

_U64: Final = struct.Struct("=Q")


class RegionWord(IntEnum):
    """States of a region's word. Launches may begin only in the state ACTIVE."""

    NONE = 0
    ACTIVE = 1
    CANCELLED = 2
    REVOKED = 3
    EXPIRED = 4
    FREED = 5


ENDED_WORDS: Final = frozenset({RegionWord.REVOKED, RegionWord.EXPIRED, RegionWord.FREED})
"""States of a region that has ended."""

STATUS_OF_WORD: Final[Mapping[RegionWord, Status]] = MappingProxyType(
    {
        RegionWord.CANCELLED: Status.CANCELLED,
        RegionWord.REVOKED: Status.REVOKED,
        RegionWord.EXPIRED: Status.LEASE_EXPIRED,
        RegionWord.FREED: Status.LEASE_FREED,
    }
)
"""The status of the first launch that is refused because of a word; every later one gets FENCED."""

NUMBER_SHIFT: Final = 32

_STATE_MASK: Final = (1 << NUMBER_SHIFT) - 1
# Looking up a state here costs a fraction of calling the enum.
_STATES: Final = {int(state): state for state in RegionWord}


def word_of(number: int, state: RegionWord) -> int:
    """Return the word of a region with that number in that state."""
    return number << NUMBER_SHIFT | state


def split_word(word: int) -> tuple[int, RegionWord | None]:
    """Return a word's number and state. The state is None if it is unknown, for example that of a newer broker."""
    # The caller must not allow a launch if the state is unknown.
    return word >> NUMBER_SHIFT, _STATES.get(word & _STATE_MASK)


class WordViews(NamedTuple):
    """The numbers of a mapped page, each field a view of its own, so that reading or writing one is one access.

    Attributes:
        epoch: The epoch alone.
        lease: The lease's word alone.
        generation: The lease's generation alone.
        reason_length: The length of the reason alone.
        words: The regions' words, by slot.
        flipped_ns: When each slot's word last changed, on the monotonic clock.
        deadlines: When each slot's region ends, on the monotonic clock.
    """

    epoch: memoryview
    lease: memoryview
    generation: memoryview
    reason_length: memoryview
    words: memoryview
    flipped_ns: memoryview
    deadlines: memoryview

    def release(self) -> None:
        """Release all views, so that the page can be unmapped."""
        for view in self:
            view.release()


def views_of(page: memoryview) -> WordViews:
    """Return the views of a mapped page, and release `page`. They can be written if the page can be."""
    # The page can be unmapped only when all views are released, so release those of the whole page here.
    with page, page.cast("Q") as fields:
        alone = (EPOCH_AT, LEASE_WORD_AT, GENERATION_AT, REASON_LENGTH_AT)
        columns = (WORDS_AT, FLIPPED_AT, DEADLINES_AT)
        return WordViews(
            *(fields[at // 8 : at // 8 + 1] for at in alone),
            *(fields[at // 8 : at // 8 + MAX_REGIONS] for at in columns),
        )


def cause_of(page: bytes) -> str:
    """Return the name of the cause for which the lease has ended; "" while it lives.

    `page` is a copy of the page, or of its first LEASE_END_BYTES.
    """
    # The broker writes the cause before the word, so it is complete on a page whose lease has ended.
    return page[CAUSE_AT : CAUSE_AT + CAUSE_BYTES].rstrip(b"\0").decode(errors="replace")


def reason_of(page: bytes) -> str:
    """Return an operator's reason for ending the lease; "" if there is none. `page` as for `cause_of`."""
    # The length on a broken page may be any number, so bound it.
    (length,) = _U64.unpack_from(page, REASON_LENGTH_AT)
    return page[REASON_AT : REASON_AT + min(length, MAX_SHOWN_REASON_BYTES)].decode(errors="ignore")
