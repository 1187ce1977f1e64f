"""Limits etcd's history, because etcd keeps every write until a client compacts it, and heartbeats never end.

One key is the mark. If a member finds the mark unchanged for `history_s`, it rewrites the mark, on condition that the
mark is still at that revision, and then removes the history before the old mark. So only one of the members does this,
and newer history is kept. Each heartbeat reads the mark before the mark's age is checked, so other members seldom try
after one has rewritten it.
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
        """Forget earlier observations, because the store may be another one, whose history they must not remove."""
        self._mark = None

    def observe(self, items: tuple[KeyValue, ...], now_ns: int) -> None:
        """Process the mark that a heartbeat has read; if it is old, remove the history before it."""
        revision = items[0].mod_revision if items else 0
        # The mark was rewritten, by this node or another, so its age starts again.
        if self._mark is None or self._mark[0] != revision:
            self._mark = revision, now_ns
        if not self._history_ns or self._is_asking or now_ns - self._mark[1] < self._history_ns:
            return
        self._is_asking = True

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            self._is_asking = False
            # This node rewrote the mark, so only this node removes the history before the old mark.
            if isinstance(outcome, TransactionAnswer) and outcome.succeeded and revision:
                self._membership.effects.append(Compact(revision))

        compares = (ModRevisionIs(COMPACTION, revision), *self._membership.as_member())
        self._membership.ask(now_ns, Transaction(compares, (Put(COMPACTION, b""),)), on_outcome)
