"""The regions page of a session, which holds all of the session's words (`protocol.session_words`).

The broker makes the page when it passes on a client that asks for the words, or when the session opens its first
region, whichever comes first. It sends the worker a read-only descriptor, which the worker passes on to such clients.
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
    DEADLINES_AT,
    EPOCH_AT,
    FLIPPED_AT,
    GENERATION_AT,
    LEASE_WORD_AT,
    MAX_SHOWN_REASON_BYTES,
    REASON_AT,
    REASON_LENGTH_AT,
    SESSION_WORDS_BYTES,
    WORDS_AT,
    RegionWord,
    split_word,
    word_of,
)

MAX_NUMBER: Final = (1 << 32) - 1

REGION_GRANULE_BYTES: Final = 2 << 20
"""Regions begin and end at multiples of so many bytes: a card's page tables map no smaller units (CUDA Driver API,
cuMemGetAllocationGranularity)."""


class BrokerRegionsPage:
    """The broker's view of a session's regions page, which it writes.

    Readers cache what they have read together with the page's epoch. Epochs of a new page are above those of every
    earlier page of the host, so nothing that was cached with an earlier page counts for this one.

    Attributes:
        reading_fd: A read-only descriptor for the worker, see `control_page.published_memory`; closed by `close`.
    """

    def __init__(self) -> None:
        self._map, self.reading_fd = published_memory("gpulease-regions", SESSION_WORDS_BYTES)
        # Views of the four columns, by slot, so that a change of a word is one store.
        words = memoryview(self._map).cast("Q")
        self._all = words
        self._words = words[WORDS_AT // 8 : WORDS_AT // 8 + MAX_REGIONS]
        self._flipped = words[FLIPPED_AT // 8 : FLIPPED_AT // 8 + MAX_REGIONS]
        self._deadlines = words[DEADLINES_AT // 8 : DEADLINES_AT // 8 + MAX_REGIONS]
        # Epochs count changes, at most one each nanosecond, so a page that is made later starts above all earlier ones.
        words[EPOCH_AT // 8] = time.monotonic_ns()

    def set(self, slot: int, number: int, word: RegionWord, deadline_ns: int, now_ns: int) -> None:
        """Write a region's state and deadline, then raise the epoch.

        Args:
            slot: The region's place.
            number: Its number, from 1 to MAX_NUMBER, so that no word of a region is 0.
            word: Its state.
            deadline_ns: When launches are refused without a further word, on the monotonic clock.
            now_ns: The present time, which is written with a change of the word.

        Raises:
            ValueError: The slot or the number is out of bounds.
        """
        # Checked here, because an index below zero would write from the end of the page.
        if not (0 <= slot < MAX_REGIONS and 0 < number <= MAX_NUMBER):
            raise ValueError(
                f"a region's slot must be below {MAX_REGIONS} and its number positive, not {slot}, {number}"
            )
        # A reader that caches the page checks the epoch first, so the epoch is raised after everything else is written.
        value = word_of(number, word)
        if self._words[slot] != value:
            self._flipped[slot] = now_ns
        self._deadlines[slot] = deadline_ns
        self._words[slot] = value
        self._all[EPOCH_AT // 8] += 1

    def set_generation(self, generation: int) -> None:
        """Write the number of the lease's last grant or renewal."""
        self._all[GENERATION_AT // 8] = generation

    def end_lease(self, status: Status, cause: str, reason: str = "") -> None:
        """Write that the lease is over: clients refuse launches from their next check on. The word is written last."""
        # The first end counts: a worker that dies after the lease was revoked does not change the reason.
        if self._all[LEASE_WORD_AT // 8]:
            return
        self._map[CAUSE_AT : CAUSE_AT + CAUSE_BYTES] = cause.encode()[:CAUSE_BYTES].ljust(CAUSE_BYTES, b"\0")
        text = reason.encode(errors="replace")[:MAX_SHOWN_REASON_BYTES]
        self._map[REASON_AT : REASON_AT + len(text)] = text
        self._all[REASON_LENGTH_AT // 8] = len(text)
        self._all[LEASE_WORD_AT // 8] = -status

    def close(self) -> None:
        """Unmap the page and close the descriptor. The worker has its own."""
        for view in (self._words, self._flipped, self._deadlines, self._all):
            view.release()
        self._map.close()
        if self.reading_fd >= 0:
            os.close(self.reading_fd)
            self.reading_fd = -1


class SeenWord(NamedTuple):
    """A word as read by the worker. `state` is REVOKED for a state that no broker writes: fail closed."""

    number: int
    state: RegionWord


class WorkerRegions:
    """The worker's view of its session's regions page, which can't be used to write.

    Args:
        fd: The page's read-only descriptor; the view needs it no longer.

    Attributes:
        epoch_word: The epoch alone, for native code.
        words: The words, by slot.
        flipped_ns: When each slot's word was changed last, on the monotonic clock.
        deadlines: When each slot's region ends, on the monotonic clock.

    Raises:
        OSError, ValueError: The descriptor is not such a page.
    """

    def __init__(self, fd: int) -> None:
        # For reading only: the descriptor allows no other mapping.
        self._map = mmap.mmap(fd, SESSION_WORDS_BYTES, prot=mmap.PROT_READ)
        # Only the columns are kept as views; the whole-page views must be released before `close` can unmap.
        with memoryview(self._map) as page, page.cast("Q") as fields:
            self.epoch_word = fields[EPOCH_AT // 8 : EPOCH_AT // 8 + 1]
            self.words = fields[WORDS_AT // 8 : WORDS_AT // 8 + MAX_REGIONS]
            self.flipped_ns = fields[FLIPPED_AT // 8 : FLIPPED_AT // 8 + MAX_REGIONS]
            self.deadlines = fields[DEADLINES_AT // 8 : DEADLINES_AT // 8 + MAX_REGIONS]

    @property
    def epoch(self) -> int:
        """The epoch. A reader that caches the page's contents reads it first, because the broker raises it last."""
        return self.epoch_word[0]

    def word(self, slot: int) -> SeenWord:
        number, state = split_word(self.words[slot])
        return SeenWord(number, RegionWord.REVOKED if state is None else state)

    def close(self) -> None:
        for view in (self.epoch_word, self.words, self.flipped_ns, self.deadlines):
            view.release()
        self._map.close()
