"""The ids of leases that ended by revocation: known for ever, so that one is never "not found"."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

_MARK_MASK: Final = (1 << 64) - 1


def mark_of(lease_id: int) -> int:
    """What is remembered of an id: its low 64 bits.

    Ids are random, so an id that was never revoked is taken for one of a million that were with a chance of 5e-14; it
    could not be given out then.
    """
    return lease_id & _MARK_MASK


class RevokedIds:
    """A set of ids, at 8 bytes each: a sorted array. To add one to a million moves 8 MB, in half a millisecond.

    Args:
        marks: Of those that are in it from the start, in ascending order.

    Raises:
        ValueError: They are not.
    """

    def __init__(self, marks: Iterable[int] = ()) -> None:
        self._marks = array("Q", marks)
        if any(low >= high for low, high in pairwise(self._marks)):
            raise ValueError("The marks of revoked ids are not in ascending order.")

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, lease_id: int) -> bool:
        mark = mark_of(lease_id)
        place = bisect_left(self._marks, mark)
        return place < len(self._marks) and self._marks[place] == mark

    def add(self, lease_id: int) -> None:
        """Remember an id."""
        if lease_id not in self:
            mark = mark_of(lease_id)
            self._marks.insert(bisect_left(self._marks, mark), mark)
