"""Rows that a journal would have on its disk, and the rows that the last events changed."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from gpulease.daemon.leases.events import Effect, Event
from gpulease.daemon.leases.model import LeaseState
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.journal.journal import JournalProjector
from gpulease.daemon.record.journal.rows import Contents, RowKind, read_tombstone

Place = tuple[RowKind, bytes]

LONGEST_TAIL: Final = 12
"""Number of events whose rows may be on their way to the disk when the broker is killed."""


class Disk:
    """Rows as the journal's own projector writes them."""

    def __init__(self) -> None:
        self.is_being_read = False
        self._follower = JournalProjector()
        self._rows: dict[Place, bytes] = {}
        # What the rows were before each of the last events.
        self._before: deque[dict[Place, bytes | None]] = deque(maxlen=LONGEST_TAIL)

    def saw(self, event: Event, effects: Sequence[Effect], table: LeaseTable) -> None:
        before: dict[Place, bytes | None] = {}
        self._before.append(before)
        for change in self._follower.changes(event, effects, table, lambda number: number + 1):
            place = (change.kind, change.key)
            before.setdefault(place, self._rows.get(place))
            self._write(place, change.value())

    def lose_tail(self, events: int = 1) -> None:
        """Undo the rows that the last events changed, as if they had not reached the disk."""
        for _ in range(min(events, len(self._before))):
            for place, value in self._before.pop().items():
                self._write(place, value)

    def read(self) -> Contents:
        """Return the contents for a daemon that comes back, and continue from them."""
        contents = Contents()
        for (kind, key), value in sorted(self._rows.items()):
            contents.take(kind, key, value)
        self._follower = JournalProjector(
            contents.leases,
            contents.next_tombstone,
            contents.regions,
            contents.next_region_tombstone,
            contents.epochs,
        )
        self.is_being_read = True
        return contents

    def buried(self) -> list[int]:
        """Return the leases and regions that have tombstones."""
        kinds = (RowKind.TOMBSTONE, RowKind.REGION_TOMBSTONE)
        return [read_tombstone(value).lease_id for (kind, _), value in self._rows.items() if kind in kinds]

    def _write(self, place: Place, value: bytes | None) -> None:
        if value is None:
            self._rows.pop(place, None)
        else:
            self._rows[place] = value


def check_answers(before: LeaseTable, after: LeaseTable, lease_ids: set[int], now_ns: int) -> None:
    """Check that a restart changed no answer about a lease.

    A lease with a late timer is refused already, and may have ended: at its deadline or its node's isolation. A drain
    may have ended one, too.
    """
    for lease_id in lease_ids:
        then, now = before.get(lease_id), after.get(lease_id)
        if then is None:
            continue
        drain_ns = before.drain_ns_of(then.card_uuid)
        if drain_ns is not None and drain_ns <= now_ns and then.state is LeaseState.ACTIVE:
            continue
        denials = [table.denial_for(lease_id, now_ns) for table in (before, after)]
        reasons = [denial and denial.reason for denial in denials]
        assert reasons[0] == reasons[1], "a restart changed an answer"
        is_over = then.state is LeaseState.ACTIVE and denials[0] is not None
        assert then == now or is_over, f"a restart changed a lease: {then} is now {now}"
