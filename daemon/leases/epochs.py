"""The highest epoch of each name that this node has granted, so that no earlier claim of the name is ever served again.

An epoch is the number of a claim in the fleet's store, which numbers all its changes in one row. Of two claims of any
names, the later one has the higher epoch.
"""

from collections.abc import Iterable
from typing import Final

MAX_NAMES: Final = 4096
"""Names whose epoch is kept by name. Stops a tenant that cycles names from filling memory and the journal."""

FLOOR: Final = ""
"""Stands for all names that are not kept. No lease has it as its name."""


class HighestEpochs:
    """The highest epoch of each name. Once too many are kept, the lowest becomes the floor of all that are not.

    Args:
        kept: Names and their epochs; the name `FLOOR` has the floor.
    """

    def __init__(self, kept: Iterable[tuple[str, int]] = ()) -> None:
        self._by_name = dict(kept)
        self._floor = self._by_name.pop(FLOOR, 0)

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, name: str) -> int:
        """Return the highest epoch that a name may have had."""
        return self._by_name.get(name, self._floor)

    def highest(self) -> int:
        """Return the highest epoch of all."""
        return max(self._by_name.values(), default=self._floor)

    def note(self, name: str, epoch: int) -> list[tuple[str, int | None]]:
        """Take in a claim that is served; return each name whose epoch is another now, None if it is not kept."""
        if epoch <= self.of(name):
            return []
        self._by_name[name] = epoch
        changed: list[tuple[str, int | None]] = [(name, epoch)]
        if len(self._by_name) > MAX_NAMES:
            lowest = min(self._by_name, key=self._by_name.__getitem__)
            self._floor = max(self._floor, self._by_name.pop(lowest))
            changed += [(lowest, None), (FLOOR, self._floor)]
        return changed
