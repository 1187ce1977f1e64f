"""The state of a node's membership, and its requests to etcd. All rules of one member share this state."""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from gpulease.daemon.fleet.etcd.transactions import (
    Compare,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Transaction,
    TransactionAnswer,
    Unknown,
)
from gpulease.daemon.fleet.records.fleet_records import EPOCHS, GENERATION, inventory_key, node_key
from gpulease.daemon.fleet.records.record_reader import Unreadable
from gpulease.daemon.fleet.records.unreadable_records import UnreadableRecords
from gpulease.daemon.fleet.rules.fleet_events import Ask, ClaimRefusal, Effect, FleetTerms, RecordsUnreadable
from gpulease.daemon.fleet.rules.revision_dates import RevisionDates
from gpulease.protocol.time_units import NS_PER_S

SILENT_PART: Final = 0.5
"""Fraction of the horizon after which a node with an unchanged record counts as silent."""

ISOLATED_TROUBLE: Final = ClaimRefusal.ISOLATED, "this node is cut off from its fleet: use another node, or wait"
"""The refusal of claims while this node is not a member and no operator must act."""

UNREADABLE_NS: Final = 60 * NS_PER_S
"""Nanoseconds for which an unreadable value is reported after it was last read. A member does not notice that a value
was deleted."""

MAX_CLOCK_ERROR: Final = 1.25
"""Maximum ratio of two clocks' rates that is compensated for. adjtimex(2) changes a rate by at most a tenth. Forged
clock records can make deadlines at most a fifth earlier, and waits at most a quarter longer."""

NO_REVISION: Final = -1
"""A revision that no key has. An absent key has revision 0."""

OnOutcome = Callable[[Outcome, int, int], None]
"""A handler of a transaction's outcome. Its other arguments are the time when it was sent, and the time now."""


R = TypeVar("R")


def node_removal(node_id: str) -> tuple[Delete, ...]:
    """Return the writes that remove a node from the fleet."""
    return Delete(node_key(node_id)), Delete(inventory_key(node_id))


class PendingQuestion(NamedTuple):
    """A request to etcd that waits for its answer.

    Attributes:
        floor: A revision that the store had reached when the request was sent.
    """

    sent_ns: int
    floor: int
    on_outcome: OnOutcome


class Membership:
    """The state of the membership, and the effects of the event that is being handled.

    Attributes:
        instance: A random text of this run of the process, with which its nonces begin.
        incarnation: Create revision of the node's record; 0 if the node is not a member.
        mod_revision: Mod revision of the node's record after its last heartbeat.
        horizon_ns: The deadline of claimed leases.
        member_since_ns: Since when every heartbeat was acknowledged; None if the last one was not.
        revision: A revision that the store has reached.
        generation_revision: Mod revision of the generation key.
        epochs_revision: Mod revision of the `epochs` key.
        epoch_base: A claim's epoch is this plus its revision.
        is_settled: Whether nodes may claim names: all leases from before the store's generation have ended.
        earlier_leases_end_ns: When the leases of all earlier memberships with this node's id have ended, of any daemon.
        is_suspect: Whether an answer suggested that the membership is lost. Then a heartbeat is sent at once.
        trouble: The refusal of claims while this node is not a member.
        effects: Effects of the event that is being handled, in order.
        now_ns: The time of that event.
    """

    def __init__(self, node_id: str, terms: FleetTerms, incarnation: int, instance: str) -> None:
        self.node_id = node_id
        self.instance = instance
        self.incarnation = incarnation
        self.mod_revision = 0
        self.horizon_ns = 0
        self.member_since_ns: int | None = None
        self.revision = 0
        self.generation_revision = 0
        self.epochs_revision = 0
        self.epoch_base = 0
        self.is_settled = False
        self.earlier_leases_end_ns = 0
        self.is_suspect = False
        self.trouble = ISOLATED_TROUBLE
        self.effects: list[Effect] = []
        self.now_ns = 0
        horizon_ns = int(terms.horizon_s * NS_PER_S)
        self.cap_ns = self._honest_cap_ns = int(horizon_ns * (1 - terms.rho))
        """The time from the sending of a heartbeat to the deadline that it sets."""
        self.wait_ns = self._honest_wait_ns = int(horizon_ns * (1 + terms.rho))
        """The time on this node's clock after which a deadline that another node's heartbeat has set has passed."""
        self.silence_ns = int(horizon_ns * SILENT_PART)
        """The time for which a foreign record with this node's id must be unchanged before this node deletes it."""
        self.beat_ns = horizon_ns // 6
        self.poll_ns = horizon_ns // 30
        """The pause between two attempts to claim a name that is taken."""
        self.retry_ns = horizon_ns // 60
        """The pause after a lost answer, before the next attempt."""
        self.rho = terms.rho
        self.dates = RevisionDates(self.poll_ns)
        self._unreadable = UnreadableRecords()
        self._reported = RecordsUnreadable(0, "")
        self._pending: dict[int, PendingQuestion] = {}
        self._numbers = 0
        self._nonces = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no request to etcd is unanswered."""
        return not self._pending

    def is_member(self, now_ns: int) -> bool:
        """Whether this node may grant claimed leases now."""
        return self.incarnation > 0 and now_ns < self.horizon_ns and self.is_settled

    def as_member(self) -> tuple[Compare, ...]:
        """Return comparisons that hold only while this node is a member of the store that it joined."""
        return (
            CreateRevisionIs(node_key(self.node_id), self.incarnation or NO_REVISION),
            ModRevisionIs(GENERATION, self.generation_revision),
            ModRevisionIs(EPOCHS, self.epochs_revision),
        )

    def ask_as_member(self, now_ns: int, transaction: Transaction, on_outcome: OnOutcome) -> None:
        """Send a transaction with the comparisons of `as_member`, and with reads of the compared keys.

        A store in a state from before this node's last heartbeat may pass the comparisons. Its answer counts as lost.
        """
        # `is_standing` uses the last three reads, in this order.
        floor = self.mod_revision
        compares = (*transaction.compares, *self.as_member())
        reads = (*transaction.reads, Get(node_key(self.node_id)), Get(GENERATION), Get(EPOCHS))

        def on_answer(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            # The record is from before this node's last heartbeat, so the store is in an earlier state.
            if isinstance(outcome, TransactionAnswer) and any(
                record.mod_revision < floor for record in outcome.found[-3]
            ):
                self.is_suspect = True
                outcome = Unknown("etcd has an earlier state of this node's record")
            on_outcome(outcome, sent_ns, now_ns)

        self.ask(now_ns, Transaction(compares, transaction.writes, reads), on_answer)

    def is_standing(self, incarnation: int, answer: TransactionAnswer) -> bool:
        """Return whether the comparisons of `as_member` hold for the last three reads of an answer."""
        # An absent key has revision 0, as in the comparisons.
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
        """Return whether all leases have ended that depend on records of other runs under this node's id.

        Other runs may be another daemon's with the same id, or this daemon's, whose writes a restored journal does not
        have.
        """
        # This is certain only for a member that has waited one more horizon after it joined.
        return self.incarnation > 0 and now_ns >= self.earlier_leases_end_ns

    def make_up_for(self, rate: float) -> None:
        """Compensate for this node's clock, if the other nodes' clocks run `rate` times as fast.

        This only makes deadlines earlier and waits longer, each by at most the factor MAX_CLOCK_ERROR.
        """
        # A slow clock counts too few seconds, so the deadline must be earlier.
        self.cap_ns = int(self._honest_cap_ns / min(max(rate, 1.0), MAX_CLOCK_ERROR))
        # A fast clock counts too many seconds, so waits must be longer.
        self.wait_ns = int(self._honest_wait_ns / max(min(rate, 1.0), 1 / MAX_CLOCK_ERROR))

    def read(self, reader: Callable[[bytes], R | Unreadable], item: KeyValue) -> R | None:
        """Return a reader's result for a key's value. An unreadable value is counted and reported, and returns None."""
        record = reader(item.value)
        if isinstance(record, Unreadable):
            self.distrust(item, record.reason)
            return None
        # The key may have been unreadable before.
        self._unreadable.forget(item.key)
        return record

    def distrust(self, item: KeyValue, reason: str) -> None:
        """Count and report an unreadable key or value."""
        self._unreadable.add(item, reason, self.now_ns)

    def report_unreadable(self) -> None:
        """Report unreadable values, if they have changed since the last report."""
        self._unreadable.forget_older(self.now_ns - UNREADABLE_NS)
        now = RecordsUnreadable(self._unreadable.count, self._unreadable.sentence())
        # This is called with every event, so report only a change.
        if now != self._reported:
            self._reported = now
            self.effects.append(now)

    def nonce(self) -> str:
        """Return a text that is unique in the store."""
        self._nonces += 1
        return f"{self.instance}-{self._nonces}"

    def ask(self, now_ns: int, transaction: Transaction, on_outcome: OnOutcome) -> None:
        # An answer with a lower revision than the store has now is from an earlier state of the store.
        self._numbers += 1
        self._pending[self._numbers] = PendingQuestion(now_ns, self.revision, on_outcome)
        self.effects.append(Ask(self._numbers, transaction))

    def take(self, number: int) -> PendingQuestion | None:
        """Return the request that an answer belongs to; None if it was answered before."""
        return self._pending.pop(number, None)
