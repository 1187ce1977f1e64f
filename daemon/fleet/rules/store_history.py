"""Limits etcd's history. etcd keeps every write, heartbeats included, until a client compacts the history.

One key is the mark. A member that finds the mark unchanged for `history_s` rewrites it, if it is still at that
revision, and then removes the history before the old mark. So only one member removes it, and newer history is kept.
"""

from gpulease.daemon.fleet.etcd.transactions import (
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
    TransactionAnswer,
)
from gpulease.daemon.fleet.records.fleet_records import COMPACTION
from gpulease.daemon.fleet.rules.fleet_events import Compact
from gpulease.daemon.fleet.rules.membership import Membership
from gpulease.protocol.time_units import NS_PER_S


class StoreHistory:
    """The mark, as this node last read it.

    Args:
        history_s: Seconds of history that are kept; up to twice as many may remain. With 0, this node compacts nothing.
    """

    def __init__(self, membership: Membership, history_s: int) -> None:
        self._membership = membership
        self._history_ns = history_s * NS_PER_S
        self._mark: tuple[int, int] | None = None
        """The mark's revision, and the time since which the mark is unchanged."""
        self._is_asking = False

    def read(self) -> Get:
        return Get(COMPACTION)

    def forget(self) -> None:
        """Forget the mark, because the store may be another one."""
        self._mark = None

    def observe(self, items: tuple[KeyValue, ...], now_ns: int) -> None:
        """Process the mark that a heartbeat has read. If the mark is old, remove the history before it."""
        revision = items[0].mod_revision if items else 0
        # A node has rewritten the mark, so its age starts again.
        if self._mark is None or self._mark[0] != revision:
            self._mark = revision, now_ns
        if not self._history_ns or self._is_asking or now_ns - self._mark[1] < self._history_ns:
            return
        self._is_asking = True

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            self._is_asking = False
            # This node rewrote the mark, so it removes the history before the old mark.
            if isinstance(outcome, TransactionAnswer) and outcome.succeeded and revision:
                self._membership.effects.append(Compact(revision))

        compares = (ModRevisionIs(COMPACTION, revision), *self._membership.as_member())
        self._membership.ask(now_ns, Transaction(compares, (Put(COMPACTION, b""),)), on_outcome)
