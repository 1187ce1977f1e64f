"""The end of etcd's history: etcd keeps every write until somebody compacts it, and beats are written for ever.

One key is the mark. A member that has seen it unchanged for as long as history is kept rewrites it, if it is still that
very revision, and takes away what is older than the mark was: of all members one, and no history that is younger.
Each beat reads the mark before it looks at its age, so that others seldom try once one has rewritten it.
"""

from gpulease.daemon.fleet.etcd.transactions import Answer, Get, KeyValue, ModRevisionIs, Outcome, Put, Transaction
from gpulease.daemon.fleet.records.fleet_records import COMPACTION
from gpulease.daemon.fleet.rules.fleet_events import Compact
from gpulease.daemon.fleet.rules.membership import Membership
from gpulease.protocol.time_units import NS_PER_S


class StoreHistory:
    """The mark as this node sees it.

    Args:
        history_s: Seconds of history that are kept at least, twice that at most; 0: this node compacts nothing.
    """

    def __init__(self, membership: Membership, history_s: int) -> None:
        self._membership = membership
        self._history_ns = history_s * NS_PER_S
        self._mark: tuple[int, int] | None = None
        """The mark's revision, and since when it is unchanged."""
        self._is_asking = False

    def read(self) -> Get:
        """Return the read that a beat makes."""
        return Get(COMPACTION)

    def forget(self) -> None:
        """Take nothing away by what was seen until now: the store may be another one."""
        self._mark = None

    def saw(self, found: tuple[KeyValue, ...], now_ns: int) -> None:
        """Take the mark as a beat read it, and end the history before it if it is old."""
        revision = found[0].mod_revision if found else 0
        if self._mark is None or self._mark[0] != revision:
            self._mark = revision, now_ns
        if not self._history_ns or self._is_asking or now_ns - self._mark[1] < self._history_ns:
            return
        self._is_asking = True

        def on_outcome(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            self._is_asking = False
            if isinstance(outcome, Answer) and outcome.succeeded and revision:
                self._membership.effects.append(Compact(revision))

        compares = (ModRevisionIs(COMPACTION, revision), *self._membership.as_member())
        self._membership.ask(now_ns, Transaction(compares, (Put(COMPACTION, b""),)), on_outcome)
