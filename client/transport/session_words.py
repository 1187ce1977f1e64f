"""The session's words, mapped read-only: one load, without a system call, shows whether lease and regions are alive."""

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
"""A lease word that never changes, for a session without a page of words."""


class SessionWords:
    """A session's words. The mapping is never closed explicitly: another thread may be reading a word.

    Args:
        fd: The page's descriptor; it is not needed afterwards.

    Attributes:
        lease: The lease's word alone; not 0 once the lease has ended.

    Raises:
        OSError, ValueError: The descriptor is not such a page.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SESSION_WORDS_BYTES, prot=mmap.PROT_READ)
        words = memoryview(self._page).cast("Q")
        self.lease = words[LEASE_WORD_AT // 8 : LEASE_WORD_AT // 8 + 1]
        self._regions = words[WORDS_AT // 8 : WORDS_AT // 8 + MAX_REGIONS]

    def is_refused(self, slot: int, number: int) -> bool:
        """Return whether launches that name this region are refused, according to this page.

        A broker that took over the worker writes another page: this one never shows a region of that broker as refused.
        """
        return 0 <= slot < MAX_REGIONS and self._regions[slot] > word_of(number, RegionWord.ACTIVE)

    def lease_end(self) -> dict[str, object] | None:
        """The end of the lease, as a LEASE_QUERY reports it; None while it has not ended."""
        if not self.lease[0]:
            return None
        page = bytes(self._page)
        return {"cause": cause_of(page), "reason": reason_of(page)}
