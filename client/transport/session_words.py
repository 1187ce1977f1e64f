"""The session's words, mapped read-only. One load, without a system call, shows whether a lease or region is alive."""

import mmap
from typing import Final

from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.session_words import (
    LEASE_END_BYTES,
    NUMBER_SHIFT,
    SESSION_WORDS_BYTES,
    RegionWord,
    cause_of,
    reason_of,
    split_word,
    views_of,
)

# A plain integer, because an operation on an enum's member costs more than the rest of the check.
_ACTIVE: Final = int(RegionWord.ACTIVE)

NO_WORD: Final = memoryview(bytes(8)).cast("Q")
"""A lease word, or an epoch, that never changes, for a session without a page of words."""


class SessionWords:
    """A session's words. The mapping is never closed explicitly: another thread may be reading a word.

    Args:
        fd: The page's descriptor, which is not needed afterwards.

    Attributes:
        lease: A view of the lease's word, which is not 0 once the lease has ended.
        epoch: A view of the epoch, which is raised after each change of a region's word.

    Raises:
        OSError, ValueError: The descriptor is not for such a page.
    """

    def __init__(self, fd: int) -> None:
        # Map it read-only, so that the client can't change it. Make a view for each field, so that a read is one load.
        self._page = mmap.mmap(fd, SESSION_WORDS_BYTES, prot=mmap.PROT_READ)
        views = views_of(memoryview(self._page))
        self.lease, self.epoch = views.lease, views.epoch
        self._regions, self._flipped_ns = views.words, views.flipped_ns

    def is_refused(self, slot: int, number: int) -> bool:
        """Return whether this page shows that launches that name this region are refused.

        A broker that took over the worker writes another page, so this one never shows a region of that broker as
        refused.
        """
        return self.refusing_word(slot, number) is not None

    def refusing_word(self, slot: int, number: int) -> tuple[RegionWord, int] | None:
        """Return the word because of which launches that name a region are refused, and when it was written.

        The time is the host's monotonic clock in ns. If the slot has another region, the word is NONE and the time 0.
        Returns None if the region is active, or if this page does not show that it has ended (`is_refused`).
        """
        # Load the word only once, because a cancellation may be taken back between two loads.
        word = self._regions[slot] if 0 <= slot < MAX_REGIONS else 0
        # The same as `word_of(number, RegionWord.ACTIVE)`, but faster, because a launch waits for this.
        if word <= number << NUMBER_SHIFT | _ACTIVE:
            return None
        seen_number, state = split_word(word)
        if seen_number != number:
            return RegionWord.NONE, 0
        # An unknown state, which a newer broker may write, means that the region has ended, too.
        return RegionWord.NONE if state is None else state, self._flipped_ns[slot]

    def lease_end(self) -> dict[str, object] | None:
        """Return the end of the lease, as a LEASE_QUERY reports it; None while it has not ended."""
        if not self.lease[0]:
            return None
        # Copy the page after reading the word, because the cause and the reason were written before the word.
        page = self._page[:LEASE_END_BYTES]
        return {"cause": cause_of(page), "reason": reason_of(page)}
