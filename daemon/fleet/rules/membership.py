"""Membership as of now, and questions to etcd: shared by all rules of one member."""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from gpulease.daemon.fleet.etcd.transactions import CreateRevisionIs, KeyValue, Outcome, Transaction
from gpulease.daemon.fleet.fleet_records import node_key
from gpulease.daemon.fleet.record_reader import Unreadable
from gpulease.daemon.fleet.rules.fleet_events import Ask, Effect, FleetTerms, RecordsUnreadable, Why
from gpulease.daemon.fleet.unreadable_records import UnreadableRecords

NS_PER_S: Final = 10**9

SILENT_PART: Final = 0.5
"""Part of the horizon after which a node that did not beat may be fenced."""

CUT_OFF: Final = Why.ISOLATED, "this node is cut off from its fleet: ask another node, or wait"
"""A refusal while this node is no member, and nobody need act."""

UNREADABLE_NS: Final = 60 * NS_PER_S
"""A value that could not be read is reported for so long after it was met last. Nobody learns that it was deleted."""

MAX_CLOCK_ERROR: Final = 1.25
"""Largest ratio of clocks' rates that is made up for: adjtimex(2) sets none wrong by more than a tenth. Bounds what
forged records of clocks do: horizons end a fifth earlier, or waits last a quarter longer."""

NO_REVISION: Final = -1
"""A revision that nothing has; 0 is that of a key which is not there."""

OnOutcome = Callable[[Outcome, int, int], None]
"""Takes a transaction's outcome, when it was asked, and the time now."""


R = TypeVar("R")


class Asked(NamedTuple):
    """A question that waits for its answer.

    Attributes:
        floor: A revision that the store had reached when it was asked.
    """

    asked_ns: int
    floor: int
    on_outcome: OnOutcome


class Membership:
    """Membership as of now, and the effects of the event that is being handled.

    Attributes:
        instance: Random text of this run of the process: no two runs write the same nonce.
        incarnation: Create revision of the node's record; 0: the node is no member.
        horizon_ns: Until when claimed leases may live.
        beating_since_ns: Since when every beat was acknowledged; None: the last was not.
        revision: A revision that the store has reached.
        earlier_over_ns: When the leases of all earlier memberships under this node's id are over, whoever had them.
        is_suspect: An answer showed that this node may be no member any more: beat at once.
        trouble: Refusal of claims while this node is no member.
        effects: Effects of the event that is being handled, in their order.
        now_ns: The time of that event.
    """

    def __init__(self, node_id: str, terms: FleetTerms, incarnation: int, instance: str) -> None:
        self.node_id = node_id
        self.instance = instance
        self.incarnation = incarnation
        self.horizon_ns = 0
        self.beating_since_ns: int | None = None
        self.revision = 0
        self.earlier_over_ns = 0
        self.is_suspect = False
        self.trouble = CUT_OFF
        self.effects: list[Effect] = []
        self.now_ns = 0
        horizon_ns = int(terms.horizon_s * NS_PER_S)
        self.cap_ns = self._honest_cap_ns = int(horizon_ns * (1 - terms.rho))
        """A beat's worth: the horizon lies so long after the beat was asked."""
        self.wait_ns = self._honest_wait_ns = int(horizon_ns * (1 + terms.rho))
        """A wait on this node's clock in which the horizon of every other node's last beat passes."""
        self.silence_ns = int(horizon_ns * SILENT_PART)
        """A node that did not beat for so long may be fenced."""
        self.beat_ns = horizon_ns // 6
        self.poll_ns = horizon_ns // 30
        """Between two attempts for a name that is taken."""
        self.retry_ns = horizon_ns // 60
        """Between an answer that was lost and the next attempt. Keeps a node from flooding an etcd without a leader."""
        self.rho = terms.rho
        self._unreadable = UnreadableRecords()
        self._told = RecordsUnreadable(0, "")
        self._asked: dict[int, Asked] = {}
        self._numbers = 0
        self._nonces = 0

    @property
    def is_quiet(self) -> bool:
        """Return whether every question is answered."""
        return not self._asked

    def is_member(self, now_ns: int) -> bool:
        """Return whether this node may grant claimed leases now."""
        return self.incarnation > 0 and now_ns < self.horizon_ns

    def is_mine(self) -> CreateRevisionIs:
        """Return the comparison that this node was not fenced, which fails while it is no member."""
        return CreateRevisionIs(node_key(self.node_id), self.incarnation or NO_REVISION)

    def is_own_nonce(self, nonce: str) -> bool:
        """Return whether this run of the process made a nonce."""
        return nonce.startswith(f"{self.instance}-")

    def is_over(self, revision: int, now_ns: int) -> bool:
        """Return whether what was written under this node's id at that revision is no other daemon's any more.

        While this node is no member, another daemon may be it.
        """
        return self.incarnation > 0 and (revision > self.incarnation or now_ns >= self.earlier_over_ns)

    def make_up_for(self, rate: float) -> None:
        """Be careful as if this node's clock were wrong: the others' run `rate` times as fast as it, or so they say.

        Others' word can only make horizons shorter and waits longer, and neither by more than MAX_CLOCK_ERROR.
        """
        self.cap_ns = int(self._honest_cap_ns / min(max(rate, 1.0), MAX_CLOCK_ERROR))
        self.wait_ns = int(self._honest_wait_ns / max(min(rate, 1.0), 1 / MAX_CLOCK_ERROR))

    def read(self, reader: Callable[[bytes], R | Unreadable], item: KeyValue) -> R | None:
        """Return what a reader makes of a key's value; None: it can't be read, and is counted and reported."""
        record = reader(item.value)
        if isinstance(record, Unreadable):
            self.distrust(item, record.reason)
            return None
        self._unreadable.forget(item.key)
        return record

    def distrust(self, item: KeyValue, reason: str) -> None:
        """Count and report a key or a value that can't be read."""
        self._unreadable.add(item, reason, self.now_ns)

    def report_unreadable(self) -> None:
        """Report values that can't be read, if others are there than at the last report."""
        self._unreadable.forget_before(self.now_ns - UNREADABLE_NS)
        now = RecordsUnreadable(self._unreadable.count, self._unreadable.sentence())
        if now != self._told:
            self._told = now
            self.effects.append(now)

    def nonce(self) -> str:
        """Return a text that nothing else in the store has."""
        self._nonces += 1
        return f"{self.instance}-{self._nonces}"

    def ask(self, now_ns: int, transaction: Transaction, on_outcome: OnOutcome) -> None:
        """Send a transaction; `on_outcome` takes its outcome."""
        self._numbers += 1
        self._asked[self._numbers] = Asked(now_ns, self.revision, on_outcome)
        self.effects.append(Ask(self._numbers, transaction))

    def take(self, number: int) -> Asked | None:
        """Return a question that is answered now; None: it was answered before."""
        return self._asked.pop(number, None)
