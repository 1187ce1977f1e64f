"""Dates of etcd's revisions on this node's clock, from which follows how long a record has been unchanged.

Every write of the store increases the revision. So a record with a mod revision of at most an answer's revision was
written before the answer came. A node keeps the dates of its answers, and so can compute for every record the minimum
time for which it has been unchanged.
"""

from typing import Final, NamedTuple

KEPT_PARTS: Final = 42
"""Maximum number of dates. They are a thirtieth of the horizon apart, and so cover more than the longest wait, which is
a little over five quarters of a horizon (`Membership.make_up_for`)."""


class _Date(NamedTuple):
    revision: int
    now_ns: int


class RevisionDates:
    """Revisions that the store had reached, and when.

    Args:
        step_ns: Minimum time from one date to the next.
    """

    def __init__(self, step_ns: int) -> None:
        self._step_ns = step_ns
        self._dates: list[_Date] = []

    def observe(self, revision: int, now_ns: int) -> None:
        """Note that an answer of this revision had come at `now_ns`."""
        if not self._dates or now_ns >= self._dates[-1].now_ns + self._step_ns:
            self._dates = [*self._dates[1 - KEPT_PARTS :], _Date(revision, now_ns)]

    def written_by_ns(self, mod_revision: int, now_ns: int) -> int:
        """Return a time by which the write of that revision, which was just read, was certainly done."""
        # The write was done before the earliest answer with this revision or a higher one.
        return next((date.now_ns for date in self._dates if date.revision >= mod_revision), now_ns)

    def forget(self) -> None:
        """Forget all dates, because another store may have the same revisions."""
        self._dates.clear()
