"""The session's words, mapped read-only: whether the lease and its regions go on, by one load and no system call."""

import mmap
from typing import Final

from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.session_words import (
    LEASE_WORD_AT,
    SESSION_WORDS_BYTES,
    WORDS_AT,
    RegionWord,
    cause_of,
    reason_of,
    word_of,
)

NO_WORD: Final = memoryview(bytes(8)).cast("Q")
"""A lease's word that never changes, for a session without a page."""


class SessionWords:
    """A session's words. Nothing closes it: whoever looks at a word meanwhile may be another thread.

    Args:
        fd: The page's descriptor; it is needed no longer.

    Attributes:
        lease: The lease's word alone; not 0 once the lease is over.

    Raises:
        OSError, ValueError: The descriptor is no such page.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SESSION_WORDS_BYTES, prot=mmap.PROT_READ)
        words = memoryview(self._page).cast("Q")
        self.lease = words[LEASE_WORD_AT // 8 : LEASE_WORD_AT // 8 + 1]
        self._regions = words[WORDS_AT // 8 : WORDS_AT // 8 + MAX_REGIONS]

    def is_refused(self, slot: int, number: int) -> bool:
        """Return whether launches that name a region are refused, as far as this page says.

        A broker that took the worker over writes another page: a region that it opened is never refused by this one.
        """
        return 0 <= slot < MAX_REGIONS and self._regions[slot] > word_of(number, RegionWord.ACTIVE)

    def lease_end(self) -> dict[str, object] | None:
        """The end of the lease, as a LEASE_QUERY reports it; None while it lives."""
        if not self.lease[0]:
            return None
        page = bytes(self._page)
        return {"cause": cause_of(page), "reason": reason_of(page)}
