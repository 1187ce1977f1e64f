"""What of the lease table's life goes into the journal: events and effects in, changes of rows out. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpulease.daemon.core import (
    Cause,
    DrainSet,
    Effect,
    Event,
    FenceCleared,
    Granted,
    KeptLease,
    LeaseEnded,
    LeaseRestored,
    LeaseSnapshot,
    LeaseState,
    LeaseTable,
    RefuseWork,
    Renewed,
    SessionFaulted,
    WarmEnded,
)
from gpulease.daemon.core.revoked import mark_of
from gpulease.daemon.journal.rows import DRAIN_KEY, Change, RowKind, lease_key, number_key, warm_key

KEPT_TOMBSTONES: Final = 8192
"""The last leases that ended: their tenants are told why after a restart too. Bounds the file, and how long it is read
at the start; the table itself remembers more."""

_KEPT: Final = frozenset({Granted, Renewed, RefuseWork, LeaseEnded, FenceCleared, WarmEnded, DrainSet})
"""Effects that may change rows: most are passed over by their kind."""


class Follower:
    """Knows which leases have rows.

    Args:
        kept: Those that have one already.
        next_tombstone: The place of the tombstone that comes next.
    """

    def __init__(self, kept: Iterable[KeptLease] = (), next_tombstone: int = 0) -> None:
        self._pids = {lease.lease_id: lease.worker_pid for lease in kept}
        self._next_tombstone = next_tombstone

    def changes(
        self, event: Event, effects: Sequence[Effect], table: LeaseTable, pid_of: Callable[[int], int]
    ) -> list[Change]:
        """What one event, which `table` has handled, changes in the rows."""
        out: list[Change] = []
        if isinstance(event, SessionFaulted | LeaseRestored):
            lease_id = event.lease_id if isinstance(event, SessionFaulted) else event.kept.lease_id
            self._update(lease_id, table, out)
        for effect in effects:
            if type(effect) not in _KEPT:
                continue
            match effect:
                case Granted(lease=lease):
                    self._pids[lease.lease_id] = pid_of(lease.lease_id)
                    self._update(lease.lease_id, table, out)
                case Renewed(lease=lease):
                    self._update(lease.lease_id, table, out)
                case RefuseWork(lease_id, cause):
                    self._update(lease_id, table, out)
                    if cause is Cause.REVOKED:
                        out.append(Change(RowKind.REVOKED, number_key(mark_of(lease_id)), 1))
                case LeaseEnded(lease=lease) if lease.state is LeaseState.FENCED:
                    self._pids.setdefault(lease.lease_id, 0)
                    self._update(lease.lease_id, table, out)
                case LeaseEnded(lease=lease):
                    self._bury(lease.lease_id, lease, out)
                case FenceCleared(lease_ids=lease_ids, warm_ids=warm_ids):
                    for lease_id in lease_ids:
                        self._bury(lease_id, table.get(lease_id), out)
                        out.append(Change(RowKind.CLEARED, number_key(mark_of(lease_id)), 1))
                    out += [Change(RowKind.WARM, warm_key(warm_id), None) for warm_id in warm_ids]
                case WarmEnded(warm_id=warm_id, is_fenced=True):
                    out.append(Change(RowKind.WARM, warm_key(warm_id), table.keep_warm(warm_id)))
                case DrainSet(deadline_ns=deadline_ns):
                    out.append(Change(RowKind.DRAIN, DRAIN_KEY, deadline_ns))
        return out

    def _update(self, lease_id: int, table: LeaseTable, out: list[Change]) -> None:
        """Write a lease that has a row, as it is now."""
        worker_pid = self._pids.get(lease_id)
        if worker_pid is not None and (kept := table.keep(lease_id, worker_pid)) is not None:
            out.append(Change(RowKind.LEASE, lease_key(lease_id), kept))

    def _bury(self, lease_id: int, lease: LeaseSnapshot | None, out: list[Change]) -> None:
        """A lease is torn down: of one that had a row and was a tenant's, a tombstone stays."""
        if self._pids.pop(lease_id, None) is None:
            return
        out.append(Change(RowKind.LEASE, lease_key(lease_id), None))
        if lease is None or not lease.tenant:
            return
        out.append(Change(RowKind.TOMBSTONE, number_key(self._next_tombstone), lease))
        if self._next_tombstone >= KEPT_TOMBSTONES:
            out.append(Change(RowKind.TOMBSTONE, number_key(self._next_tombstone - KEPT_TOMBSTONES), None))
        self._next_tombstone += 1
