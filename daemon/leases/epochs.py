"""The highest epoch of each name that this node has granted, so that it never serves an earlier claim of that name.

An epoch is the number of a claim in the fleet's store. The store numbers all its changes in one sequence, so of any two
claims, of whatever names, the later one has the higher epoch.
"""

from collections.abc import Iterable
from typing import Final

MAX_NAMES: Final = 4096
"""Maximum number of names with an epoch of their own. Stops a tenant that keeps using new names from filling memory and
the journal."""

FLOOR: Final = ""
"""Stands for all names without an epoch of their own. No lease has it as its name."""


class HighestEpochs:
    """The highest epoch of each name. When there are too many names, the lowest epoch becomes the floor of all others.

    Args:
        rows: Names and their epochs; the entry of `FLOOR` is the floor.
    """

    def __init__(self, rows: Iterable[tuple[str, int]] = ()) -> None:
        self._by_name = dict(rows)
        self._floor = self._by_name.pop(FLOOR, 0)

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, name: str) -> int:
        """Return the highest epoch that a name may have had."""
        return self._by_name.get(name, self._floor)

    def highest(self) -> int:
        return max(self._by_name.values(), default=self._floor)

    def note(self, name: str, epoch: int) -> list[tuple[str, int | None]]:
        """Record a claim that this node serves.

        Returns each changed name with its epoch, for the journal; None in place of an epoch means that the name was
        dropped.
        """
        if epoch <= self.of(name):
            return []
        self._by_name[name] = epoch
        changed: list[tuple[str, int | None]] = [(name, epoch)]
        if len(self._by_name) > MAX_NAMES:
            # Drop the name with the lowest epoch. From now on, refuse any claim of an unlisted name up to that epoch.
            # This may refuse a valid claim of a rarely used name (the client then acquires again), but never admits an
            # old claim.
            lowest = min(self._by_name, key=self._by_name.__getitem__)
            self._floor = max(self._floor, self._by_name.pop(lowest))
            changed += [(lowest, None), (FLOOR, self._floor)]
        return changed
