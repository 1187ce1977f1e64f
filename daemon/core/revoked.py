"""The ids of leases that ended by revocation: known for ever, so that one is never "not found"."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

MAX_RECENT: Final = 4096
"""Marks outside the sorted array: each merge copies all of it, 8 MB for a million, so merges must be rare."""

_MARK_MASK: Final = (1 << 64) - 1


def mark_of(lease_id: int) -> int:
    """What is remembered of an id: its low 64 bits.

    Ids are random, so an id that was never revoked is taken for one of a million that were with a chance of 5e-14; it
    could not be given out then.
    """
    return lease_id & _MARK_MASK


class RevokedIds:
    """A set of ids, at 8 bytes each."""

    def __init__(self, marks: Iterable[int] = ()) -> None:
        self._sorted = array("Q", sorted(set(marks)))
        self._recent: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, lease_id: int) -> bool:
        mark = mark_of(lease_id)
        return mark in self._recent or self._has_sorted(mark)

    def add(self, lease_id: int) -> None:
        """Remember an id."""
        mark = mark_of(lease_id)
        if self._has_sorted(mark):
            return
        self._recent.add(mark)
        if len(self._recent) >= MAX_RECENT:
            # Two sorted runs: Python's sort merges them in linear time.
            self._sorted = array("Q", sorted([*self._sorted, *sorted(self._recent)]))
            self._recent.clear()

    def _has_sorted(self, mark: int) -> bool:
        place = bisect_left(self._sorted, mark)
        return place < len(self._sorted) and self._sorted[place] == mark
