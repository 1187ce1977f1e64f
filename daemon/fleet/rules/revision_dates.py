"""Dates of etcd's revisions on this node's clock: the latest time at which an unchanged record was written.

Revisions number all writes of the store and only rise. So a record with a mod revision up to that of an answer was
written before the answer came. A node that keeps the dates of its own answers knows for every record, even a new one,
the minimum time for which the record has been unchanged.
"""

from typing import Final, NamedTuple

KEPT_PARTS: Final = 42
"""Maximum number of kept dates, to bound memory. They are a thirtieth of the horizon apart and cover more than the
longest wait, five quarters of a horizon and a little (`Membership.make_up_for`), so that a silent node gets a date
however late it is checked."""


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
        # The earliest answer at or above the revision: the write was done before that answer came.
        return next((date.now_ns for date in self._dates if date.revision >= mod_revision), now_ns)

    def forget(self) -> None:
        """Forget all dates: the store may be another one, with the same revision numbers."""
        self._dates.clear()
