"""Membership as of now, and questions to etcd: shared by all rules of one member."""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from gpulease.daemon.fleet.etcd.transactions import (
    Answer,
    Compare,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Transaction,
    Unknown,
)
from gpulease.daemon.fleet.records.fleet_records import EPOCHS, GENERATION, inventory_key, node_key
from gpulease.daemon.fleet.records.record_reader import Unreadable
from gpulease.daemon.fleet.records.unreadable_records import UnreadableRecords
from gpulease.daemon.fleet.rules.fleet_events import Ask, Effect, FleetTerms, RecordsUnreadable, Why
from gpulease.daemon.fleet.rules.revision_dates import RevisionDates
from gpulease.protocol.time_units import NS_PER_S

SILENT_PART: Final = 0.5
"""Part of the horizon after which a record that did not change is nobody's that is sure to live."""

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


def node_removal(node_id: str) -> tuple[Delete, ...]:
    """Return the writes by which a node is in the fleet no more."""
    return Delete(node_key(node_id)), Delete(inventory_key(node_id))


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
        mod_revision: Mod revision of the node's record, as its last beat wrote it.
        horizon_ns: Until when claimed leases may live.
        beating_since_ns: Since when every beat was acknowledged; None: the last was not.
        revision: A revision that the store has reached.
        generation_revision: Mod revision of the generation key.
        epochs_revision: Mod revision of the key that says that names are given out.
        epoch_base: A claim's epoch is the sum of this and its revision.
        is_settled: Names are given out: all leases of before the store's generation are over.
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
        self.mod_revision = 0
        self.horizon_ns = 0
        self.beating_since_ns: int | None = None
        self.revision = 0
        self.generation_revision = 0
        self.epochs_revision = 0
        self.epoch_base = 0
        self.is_settled = False
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
        """A daemon may take over a record under its own id that did not change for so long."""
        self.beat_ns = horizon_ns // 6
        self.poll_ns = horizon_ns // 30
        """Between two attempts for a name that is taken."""
        self.retry_ns = horizon_ns // 60
        """Between an answer that was lost and the next attempt. Keeps a node from flooding an etcd without a leader."""
        self.rho = terms.rho
        self.dates = RevisionDates(self.poll_ns)
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
        return self.incarnation > 0 and now_ns < self.horizon_ns and self.is_settled

    def as_member(self) -> tuple[Compare, ...]:
        """Return the comparisons that this node was not fenced, and that the store is the one it joined.

        They fail while it is no member.
        """
        return (
            CreateRevisionIs(node_key(self.node_id), self.incarnation or NO_REVISION),
            ModRevisionIs(GENERATION, self.generation_revision),
            ModRevisionIs(EPOCHS, self.epochs_revision),
        )

    def ask_as_member(self, now_ns: int, transaction: Transaction, on_outcome: OnOutcome) -> None:
        """Send a transaction that claims, with the comparisons of `as_member`, and with reads of what they compare.

        A store that was restored to before this node's last beat passes the comparisons. Its answer counts as none.
        """
        floor = self.mod_revision
        compares = (*transaction.compares, *self.as_member())
        reads = (*transaction.reads, Get(node_key(self.node_id)), Get(GENERATION), Get(EPOCHS))

        def on_answer(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            if isinstance(outcome, Answer) and any(record.mod_revision < floor for record in outcome.found[-3]):
                self.is_suspect = True
                outcome = Unknown("etcd has an earlier state of this node's record")
            on_outcome(outcome, asked_ns, now_ns)

        self.ask(now_ns, Transaction(compares, transaction.writes, reads), on_answer)

    def is_standing(self, incarnation: int, answer: Answer) -> bool:
        """Return whether the comparisons hold for what the reads of `ask_as_member` found."""
        record, generation, epochs = (items[0] if items else None for items in answer.found[-3:])
        return (
            record is not None
            and record.create_revision == incarnation
            and (generation.mod_revision if generation else 0) == self.generation_revision
            and (epochs.mod_revision if epochs else 0) == self.epochs_revision
        )

    def is_own_nonce(self, nonce: str) -> bool:
        """Return whether this run of the process made a nonce."""
        return nonce.startswith(f"{self.instance}-")

    def is_over(self, now_ns: int) -> bool:
        """Return whether what was written under this node's id, and not by this run, is no living lease's any more.

        While this node is no member, another daemon may be it. A daemon that goes on as a member does not know what
        its journal has lost.
        """
        return self.incarnation > 0 and now_ns >= self.earlier_over_ns

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
