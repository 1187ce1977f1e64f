"""The regions page of a session, which holds all of the session's words (`protocol.session_words`).

For a lease that a warm worker takes, the broker makes the page at once. Otherwise it makes the page when it passes a
client that asks for the words to the worker, or when the session opens its first region. The broker sends the worker a
read-only descriptor, which the worker passes on to clients that ask for the words.
"""

import mmap
import os
import time
from typing import Final, NamedTuple

from gpulease.daemon.contract.control_page import published_memory
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Status
from gpulease.protocol.session_words import (
    CAUSE_AT,
    CAUSE_BYTES,
    MAX_SHOWN_REASON_BYTES,
    REASON_AT,
    SESSION_WORDS_BYTES,
    RegionWord,
    split_word,
    views_of,
    word_of,
)

MAX_NUMBER: Final = (1 << 32) - 1

REGION_GRANULE_BYTES: Final = 2 << 20
"""Regions begin and end at multiples of this many bytes, because a card's page tables map no smaller units (CUDA Driver
API, cuMemGetAllocationGranularity)."""


class BrokerRegionsPage:
    """The broker's view of a session's regions page, which it writes.

    Readers cache what they have read together with the page's epoch. Every epoch of a new page is greater than all
    epochs of the host's earlier pages, so a reader never mistakes cached contents of an earlier page for this page's
    contents.

    Attributes:
        reading_fd: A read-only descriptor for the worker, see `control_page.published_memory`; closed by `close`.
    """

    def __init__(self) -> None:
        self._map, self.reading_fd = published_memory("gpulease-regions", SESSION_WORDS_BYTES)
        self._views = views_of(memoryview(self._map))
        # An epoch counts changes, of which there is at most one per nanosecond, so a later page starts above all
        # earlier ones.
        self._views.epoch[0] = time.monotonic_ns()

    def set(self, slot: int, number: int, word: RegionWord, deadline_ns: int, now_ns: int) -> None:
        """Write a region's state and deadline, then raise the epoch.

        Args:
            slot: The region's slot in the page.
            number: Its number, from 1 to MAX_NUMBER, so that no word of a region is 0.
            word: Its state.
            deadline_ns: When launches are refused even if the word does not change, on the monotonic clock.
            now_ns: The current time, which is written if the word changes.

        Raises:
            ValueError: The slot or the number is out of bounds.
        """
        # Check the bounds, because a negative index would count from the end of the page.
        if not (0 <= slot < MAX_REGIONS and 0 < number <= MAX_NUMBER):
            raise ValueError(
                f"a region's slot must be below {MAX_REGIONS} and its number positive, not {slot}, {number}"
            )
        # A reader that caches the page checks the epoch first, so raise the epoch after everything else is written.
        value, views = word_of(number, word), self._views
        if views.words[slot] != value:
            views.flipped_ns[slot] = now_ns
        views.deadlines[slot] = deadline_ns
        views.words[slot] = value
        views.epoch[0] += 1

    def set_generation(self, generation: int) -> None:
        """Write the number of the lease's last grant or renewal."""
        self._views.generation[0] = generation

    def end_lease(self, status: Status, cause: str, reason: str = "") -> None:
        """Write that the lease is over: clients refuse launches from their next check on. The word is written last."""
        # Keep the reason of the first end: a worker that dies after the lease was revoked does not change it.
        if self._views.lease[0]:
            return
        self._map[CAUSE_AT : CAUSE_AT + CAUSE_BYTES] = cause.encode()[:CAUSE_BYTES].ljust(CAUSE_BYTES, b"\0")
        text = reason.encode(errors="replace")[:MAX_SHOWN_REASON_BYTES]
        self._map[REASON_AT : REASON_AT + len(text)] = text
        self._views.reason_length[0] = len(text)
        self._views.lease[0] = -status

    def close(self) -> None:
        """Unmap the page and close the descriptor. The worker has a separate descriptor."""
        self._views.release()
        self._map.close()
        if self.reading_fd >= 0:
            os.close(self.reading_fd)
            self.reading_fd = -1


class SeenWord(NamedTuple):
    """A word as the worker read it. `state` is REVOKED for a state that no broker writes, to fail closed."""

    number: int
    state: RegionWord


class WorkerRegions:
    """The worker's view of its session's regions page, which can't be used to write.

    Args:
        fd: The page's read-only descriptor. The view does not need it after the constructor returns.

    Attributes:
        epoch_word: A view of the epoch, for native code.
        words: The words, by slot.
        flipped_ns: When each slot's word last changed, on the monotonic clock.
        deadlines: When each slot's region ends, on the monotonic clock.

    Raises:
        OSError, ValueError: The descriptor is not such a page.
    """

    def __init__(self, fd: int) -> None:
        # Map the page read-only: the descriptor allows nothing else.
        self._map = mmap.mmap(fd, SESSION_WORDS_BYTES, prot=mmap.PROT_READ)
        self._views = views = views_of(memoryview(self._map))
        self.epoch_word, self.words = views.epoch, views.words
        self.flipped_ns, self.deadlines = views.flipped_ns, views.deadlines

    @property
    def epoch(self) -> int:
        """The epoch. A reader that caches the page's contents reads it first, because the broker raises it last."""
        return self.epoch_word[0]

    def word(self, slot: int) -> SeenWord:
        number, state = split_word(self.words[slot])
        return SeenWord(number, RegionWord.REVOKED if state is None else state)

    def close(self) -> None:
        self._views.release()
        self._map.close()
