"""A node's membership in its fleet: it joins, sends heartbeats, is fenced, and rejoins.

A member rewrites its record with each heartbeat, on condition that the record is still at the revision that it wrote
last. An acknowledged heartbeat moves the deadline of claimed leases (`horizon`) to T (1 - rho) after the sending of the
heartbeat. If the answer is lost, the member repeats the heartbeat: if the first one was executed, the repetition fails
and reads its nonce back. A member that finds another record than its own, or none, was fenced: it ends all claimed
leases, and rejoins once their memory is proved free. The node's inventory has its own key. A heartbeat also writes the
inventory if it has changed.

A record with this node's id that this daemon did not write belongs to another daemon: on a host with the same name, on
a host with a copy of this one's journal, or on this host before its journal was lost or restored. The mark, which the
journal stores before each heartbeat, distinguishes them. The other daemon's leases may still live. So the record is
deleted only after it was unchanged for half a horizon, and its claims are abandoned one more horizon later. While the
other daemon sends heartbeats, this node stays out.

The store may be another one: restored from a backup, or created from scratch. A node notices this if it remembers a
higher revision or another cluster, or if it finds an earlier record of its own or of the last join. It then stays out
until an operator renews the generation key. The store lacks the claims that were made after the backup, and their
leases may live. So for T (1 + rho) after a node first saw a new generation, it claims nothing. Then one node settles
the generation: it writes a record that all claims compare. The record also contains the base of epochs, which is above
every epoch that the node knows, because revisions may have fallen.

All nodes must have the same horizon: a node that takes a silent node's names waits for its own horizon. The
first node that joins writes its horizon to the store, and nodes with another horizon stay out.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from traceback import extract_tb
from typing import Final, NamedTuple

from gpulease.daemon.fleet.etcd.transactions import (
    CreateRevisionIs,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
    TransactionAnswer,
    TransactionRejected,
    Unknown,
)
from gpulease.daemon.fleet.records.fleet_records import (
    EPOCHS,
    GENERATION,
    HORIZON,
    JOINED,
    EpochsRecord,
    InventoryRecord,
    NodeRecord,
    held_key,
    inventory_key,
    node_key,
    read_generation,
    read_horizon_s,
    read_node,
)
from gpulease.daemon.fleet.records.fleet_settings import HISTORY_S
from gpulease.daemon.fleet.rules.clock_rates import ClockRates
from gpulease.daemon.fleet.rules.fleet_events import (
    DEFAULT_TERMS,
    NO_IDENTITY,
    NO_MARK,
    Answered,
    ArmFleetTimer,
    ClaimDropped,
    ClaimEnded,
    ClaimRefusal,
    ClaimWanted,
    DaemonMark,
    Effect,
    EndClaimed,
    Event,
    FleetIdentity,
    FleetTerms,
    FleetTimerFired,
    Joined,
    KeepMark,
    LiveClaims,
    MarkKept,
    MoveHorizon,
    Note,
    Noted,
    Paused,
    QuotaDropped,
    QuotaEnded,
    QuotaWanted,
    Reason,
    RecordChanged,
    Remembered,
    Started,
    Stopped,
    Stopping,
)
from gpulease.daemon.fleet.rules.membership import ISOLATED_TROUBLE, Membership, node_removal
from gpulease.daemon.fleet.rules.node_claims import NodeClaims
from gpulease.daemon.fleet.rules.node_fences import NodeFences
from gpulease.daemon.fleet.rules.quota_shards import QuotaShards
from gpulease.daemon.fleet.rules.store_history import StoreHistory
from gpulease.protocol.time_units import NS_PER_S

_OPERATOR_STEP: Final = "an operator must wait until no named lease from before runs anywhere, and then"

RENEW: Final = f"{_OPERATOR_STEP} write a new text: `etcdctl put {GENERATION.decode()} TEXT`"
"""The step that lets nodes join a store other than the one they knew."""

NEW_HORIZON: Final = (
    f"use the fleet's value; to change it for all nodes, {_OPERATOR_STEP} run `etcdctl del {HORIZON.decode()}`"
)
"""The step that lets a node join with a horizon other than the fleet's."""

CLOCK: Final = (
    "until they agree, this node's named leases end earlier or its waits last longer; check the clocks of all nodes"
)

DUPLICATE_NODE_ID: Final = (
    "another daemon uses this node's id: an operator must give each node a different `node` in [fleet]"
)

FOREIGN_DAEMON: Final = (
    "a daemon with this node's id was not stopped and may still run: this daemon joins once the other "
    "has been silent for"
)

REMEMBER_NS: Final = 60 * NS_PER_S
"""Nanoseconds after which the broker stores the store's revision again. An older backup is noticed."""

MAX_FAULT_CHARS: Final = 300
"""Maximum length of a text about a fault. It may quote values from etcd."""

RENEWED: Final = "an operator renewed the fleet's generation key or its horizon"

RESTORED: Final = "etcd was restored from a backup"

UNSETTLED: Final = "the fleet's generation was renewed, and leases from before may still be active"

FOREIGN: Final = "etcd's record of this node comes from another daemon, or from a later state of this daemon's journal"

EPOCH_GAP: Final = 10**9
"""Number of epochs that a new generation skips, which include the epochs of claims that no living node knows. It is
more than the number of revisions that etcd makes in days."""

_FORGETS: Final = frozenset({Reason.FORGOTTEN, Reason.RESTORED, Reason.RENEWED, Reason.PAUSED})
"""Reasons for the end of a membership after which this daemon must forget its claims, because they may belong to
another daemon or another store.
"""

OnAnswer = Callable[[TransactionAnswer, int, int], None]
"""Processes an answer; also receives its sending time and the time now."""


class _Phase(Enum):
    STARTING = auto()
    """The broker has not yet sent its claimed leases."""
    ENDING = auto()
    """Claimed leases end; then the node rejoins."""
    JOINING = auto()
    MEMBER = auto()


class _ForeignRecord(NamedTuple):
    """Another daemon's record with this node's id; unchanged since `since_ns`."""

    mod_revision: int
    since_ns: int
    is_alive: bool


class Member:
    def __init__(
        self,
        node_id: str,
        terms: FleetTerms = DEFAULT_TERMS,
        incarnation: int = 0,
        identity: FleetIdentity = NO_IDENTITY,
        mark: DaemonMark = NO_MARK,
        *,
        instance: str,
        history_s: int = HISTORY_S,
    ) -> None:
        """Continue from the incarnation, identity and mark that the last process stored, if there was one.

        `instance` is a random text, unique to this run of the process on this node. `history_s` is StoreHistory's
        argument.
        """
        self._membership = Membership(node_id, terms, incarnation, instance)
        self._fences = NodeFences(self._membership)
        self._clocks = ClockRates(self._membership)
        self._history = StoreHistory(self._membership, history_s)
        self._claims = NodeClaims(self._membership, self._fences)
        self._quotas = QuotaShards(self._membership, self._fences)
        self._identity = identity
        self._membership.revision = max(identity.revision, incarnation)
        self._membership.epoch_base = identity.epoch_base
        self._mark = mark
        self._awaits_mark = False
        self._highest_epoch = 0
        """An upper bound of all epochs before a renewed generation, as far as this node knows."""
        self._unsettled_ns: int | None = None
        """Time since which this node knows the present generation, under which earlier leases may live; None if it
        knows none.
        """
        self._is_settling = False
        self._joined_revision = 0
        """The revision of the last join that this node saw."""
        self._foreign: _ForeignRecord | None = None
        self._remembered_ns = 0
        self._horizon_s = terms.horizon_s
        self._record = RecordChanged()
        self._written: RecordChanged | None = None
        """The inventory that etcd has for this membership; None if unknown."""
        self._phase = _Phase.STARTING
        self._has_started = False
        self._key = node_key(node_id)
        self._removal = node_removal(node_id)
        self._reads = Get(self._key), Get(GENERATION), Get(HORIZON)
        self._attempts: dict[str, int] = {}
        """Sending time of each write of the record with an unknown outcome, by nonce."""
        self._is_asking = False
        self._due_ns = 0
        self._no_generation_ns: int | None = None
        self._is_isolated = False
        self._rate: float | None = None
        """The rate of the other nodes' clocks, according to their readings; None if it is the same as this node's."""
        self._is_stopping = False
        self._has_left = False
        self._armed_ns: int | None = None

    @property
    def horizon_ns(self) -> int:
        return self._membership.horizon_ns

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event. Returns its effects in the order of execution."""
        self._membership.effects, self._membership.now_ns = [], now_ns
        match event:
            case Started():
                self._has_started = True
            case FleetTimerFired():
                self._armed_ns = None
            case Answered():
                self._answered(event, now_ns)
            case LiveClaims():
                self._restore_claims(event, now_ns)
            case MarkKept():
                self._send_heartbeat(event.beat, now_ns)
            case ClaimWanted():
                self._claims.add_request(event, now_ns)
            case ClaimDropped():
                self._claims.drop(event.request)
            case ClaimEnded():
                self._claims.end(event.name, event.epoch, now_ns)
            case RecordChanged():
                self._record = event
            case QuotaWanted():
                self._quotas.add_request(event, now_ns)
            case QuotaDropped():
                self._quotas.drop(event.request, now_ns)
            case QuotaEnded():
                self._quotas.ended(event.tenant, event.lease_id, now_ns)
            case Paused():
                self._pause(event)
            case Stopping():
                self._is_stopping = True
        # After every event, do whatever is due now: the event may have made it possible.
        self._advance(now_ns)
        self._membership.report_unreadable()
        return self._membership.effects

    # --- time ---

    def _advance(self, now_ns: int) -> None:
        # An answer suggested that the membership is lost. Send a heartbeat at once to find out.
        if self._membership.is_suspect and self._phase is _Phase.MEMBER and not self._awaits_mark:
            self._due_ns = now_ns
        self._membership.is_suspect = False
        # Ask only one question about this node's record at a time, and none while the daemon stops.
        if self._is_running and not self._is_asking and now_ns >= self._due_ns:
            if self._phase is _Phase.JOINING:
                self._read_store(now_ns)
            elif self._phase is _Phase.MEMBER:
                self._beat(now_ns)
        # The deadline has passed, so claimed leases have ended by themselves. The node stays a member until another
        # node fences it.
        if self._phase is _Phase.MEMBER and self._membership.horizon_ns <= now_ns and not self._is_isolated:
            self._is_isolated = True
            self._membership.member_since_ns = None
            self._note(Note.ISOLATED)
        self._claims.advance(now_ns)
        self._quotas.advance(now_ns)
        # Leave last, when nothing that could still write is in progress.
        if self._is_stopping and not self._has_left and self._membership.is_quiet:
            self._leave(now_ns)
        self._arm(now_ns)

    def _arm(self, now_ns: int) -> None:
        """Arm the timer for the earliest time at which something is due, unless it is already armed for then."""
        dues = []
        if self._is_running and not self._is_asking and self._phase in (_Phase.JOINING, _Phase.MEMBER):
            dues.append(self._due_ns)
        if self._phase is _Phase.MEMBER and not self._is_isolated:
            dues.append(self._membership.horizon_ns)
        dues += [due for due in (self._claims.due_ns(now_ns), self._quotas.due_ns(now_ns)) if due is not None]
        if dues and min(dues) != self._armed_ns:
            self._armed_ns = min(dues)
            self._membership.effects.append(ArmFleetTimer(self._armed_ns))

    # --- the store ---

    def _answered(self, answered: Answered, now_ns: int) -> None:
        """Pass an outcome to the rule that asked. For a member, an answer from another store counts as lost."""
        question = self._membership.take(answered.number)
        # The question has been answered before, or an earlier membership asked it.
        if question is None:
            return
        outcome = answered.outcome
        if isinstance(outcome, TransactionAnswer) and self._phase is _Phase.MEMBER:
            if text := self._difference(outcome, question.floor):
                self._lose_store(text, outcome)
                outcome = Unknown(text)
            else:
                self._membership.revision = max(self._membership.revision, outcome.revision)
                self._membership.dates.observe(outcome.revision, now_ns)
        try:
            question.on_outcome(outcome, question.sent_ns, now_ns)
        except Exception as error:
            # The rule that waits for this answer must get one, so pass the answer on as lost; the rule then asks again.
            frame = extract_tb(error.__traceback__)[-1]
            text = f"handling an answer of etcd's, in {frame.name}, line {frame.lineno}: {error!r}"[:MAX_FAULT_CHARS]
            self._note(Note.FAULT, text)
            question.on_outcome(Unknown(text), question.sent_ns, now_ns)

    def _difference(self, answer: TransactionAnswer, floor: int) -> str:
        """Return why an answer came from a store other than the joined one; "" if it did not."""
        if self._identity.cluster_id not in (0, answer.cluster_id):
            return f"etcd's cluster id is {answer.cluster_id:x}, but was {self._identity.cluster_id:x}"
        return f"etcd is at revision {answer.revision}, but was at {floor}" if answer.revision < floor else ""

    def _lose_store(self, text: str, answer: TransactionAnswer, due_ns: int = 0) -> None:
        """Lose the membership because the store is not the joined one, or an earlier state of it.

        An earlier state of the store can't be distinguished from the joined store once its revisions have risen again.
        So the identity remembers that the store was restored. Another cluster can be recognised by its number at any
        time.
        """
        if self._identity.cluster_id in (0, answer.cluster_id):
            self._identity = replace(self._identity, is_restored=True)
            self._membership.effects.append(Remembered(self._identity))
        self._lose(Reason.RESTORED, text, due_ns)

    def _is_accepted(
        self, answer: TransactionAnswer, generation: KeyValue | None, horizon: KeyValue | None, now_ns: int
    ) -> bool:
        """Return whether this node may join the store. If the store is new to this node, remember it."""
        known_generation = self._identity.generation
        # The store is new, or it was lost. Create the key only after all leases of a lost store have ended.
        if generation is None and not known_generation:
            self._make_generation(now_ns)
            return False
        # With a new generation, the operator confirms that the store is the right one, whatever its revisions are.
        # Otherwise the store must have reached the revision that this node remembers.
        value = read_generation(generation.value) if generation else ""
        is_renewed = bool(value) and bool(known_generation) and value != known_generation
        text = "" if is_renewed else self._difference(answer, self._membership.revision)
        if self._identity.is_restored and not is_renewed:
            text = RESTORED
        if not value:
            text = "etcd has lost the fleet's generation key"
        act = RENEW
        # Nodes rely on each other's horizon, so a node with a different one must not join.
        if not text and horizon and (stored_s := self._membership.read(read_horizon_s, horizon)) != self._horizon_s:
            difference = (
                "a value that can't be read as its horizon_s" if stored_s is None else f"horizon_s = {stored_s:g}"
            )
            text = f"the fleet has {difference}, but this node has {self._horizon_s:g}"
            act = NEW_HORIZON
        # Stay out, log the reason once for the operator, and check again after the time of a heartbeat.
        if text:
            refusal = f"{text}: {act}"
            if self._membership.trouble is ISOLATED_TROUBLE:
                self._note(Note.REFUSED, refusal)
            self._membership.trouble = ClaimRefusal.STALE, refusal
            self._due_ns = now_ns + self._membership.beat_ns
            if self._membership.incarnation:
                self._lose_store(text, answer, self._due_ns)
            return False
        self._membership.trouble = ISOLATED_TROUBLE
        # Leases from before the renewal may live under epochs up to this one. So new epochs must begin above it, and
        # only after these leases have ended.
        if is_renewed:
            self._highest_epoch = max(self._highest_epoch, self._membership.epoch_base + self._membership.revision)
            self._unsettled_ns = now_ns
        self._membership.revision = answer.revision
        self._membership.generation_revision = _revision(generation)
        self._identity = FleetIdentity(answer.cluster_id, value, answer.revision, self._membership.epoch_base)
        # A member rejoins under a new generation, or after its horizon key was deleted, so that all nodes settle on the
        # same values.
        if self._membership.incarnation and (is_renewed or horizon is None):
            self._lose(Reason.RENEWED, RENEWED)
            return False
        return True

    def _make_generation(self, now_ns: int) -> None:
        """Create the generation key if it has been absent for so long that all leases of a lost store have ended."""
        # The wait begins at the first read that finds no key.
        if self._no_generation_ns is None:
            self._no_generation_ns = now_ns
        self._due_ns = self._no_generation_ns + self._membership.wait_ns
        if now_ns >= self._due_ns:
            self._no_generation_ns = None
            writes = (Put(GENERATION, self._membership.nonce().encode()),)
            self._ask(now_ns, Transaction((CreateRevisionIs(GENERATION, 0),), writes), self._read_again)

    # --- joining ---

    def _restore_claims(self, claims: LiveClaims, now_ns: int) -> None:
        """Process the broker's claims. The node joins if there are none, or if it knows their incarnation."""
        if self._phase is _Phase.STARTING:
            # Leases live, and nothing shows which membership claimed their names. End them.
            if (claims.epochs or claims.quotas) and not self._membership.incarnation:
                self._lose(Reason.FORGOTTEN, "the daemon no longer knows under which membership it claimed names")
                return
            self._claims.restore(claims.epochs)
            self._quotas.restore(claims.quotas)
            # The epochs of living leases are revisions of the store that this node joined. If the store's revision is
            # now lower, the store was restored from a backup.
            self._membership.revision = max(self._membership.revision, *self._claims.live.values(), 0)
        # After the start, a report matters only if a lost membership is ending and no claim is left.
        elif self._phase is not _Phase.ENDING or claims.epochs or claims.quotas:
            return
        self._phase = _Phase.JOINING
        self._due_ns = max(self._due_ns, now_ns)

    def _read_store(self, now_ns: int) -> None:
        self._ask(now_ns, Transaction(reads=(*self._reads, Get(EPOCHS))), self._store_read)

    def _store_read(self, answer: TransactionAnswer, sent_ns: int, now_ns: int) -> None:
        """Continue the earlier membership, or delete its record, or join."""
        # The answer has the record, the generation and the horizon at one revision. The join compares all three.
        record, generation, horizon = _own_and_fleet(answer)
        *_, epochs = answer.found
        self._due_ns = now_ns
        if not self._is_accepted(answer, generation, horizon, now_ns):
            return
        if not self._take_epochs(epochs, answer.revision):
            return
        # An earlier process of this daemon was a member, and its claimed leases may live. Continue only if the record
        # proves to be that membership's; otherwise end them.
        if self._membership.incarnation:
            is_same = record is not None and record.create_revision == self._membership.incarnation
            if record and is_same and not self._is_own(record) and not self._has_no_beats(record):
                self._lose(Reason.FORGOTTEN, FOREIGN)
            elif record and is_same:
                self._membership.mod_revision = record.mod_revision
                self._membership.earlier_leases_end_ns = now_ns + self._membership.wait_ns
                self._enter(now_ns, record_nonce=self._nonce(record))
            else:
                self._lose(Reason.FENCED, "another node fenced this one while its daemon was not running")
        # An earlier join of this run was executed, but its answer was lost.
        elif record and (attempt_ns := self._attempts.get(self._nonce(record))) is not None:
            self._join(record.create_revision, record.mod_revision, attempt_ns, now_ns)
        # The record is another daemon's, which may run. Wait until the record was unchanged for half a horizon.
        elif record and not self._is_own(record) and not self._is_silent(record, now_ns):
            self._due_ns = now_ns + self._membership.poll_ns
        elif record:
            # According to the broker, no claimed lease of the record's membership lives here. Delete the record, then
            # join.
            compare = ModRevisionIs(self._key, record.mod_revision)
            self._ask(now_ns, Transaction((compare,), self._removal), self._read_again)
        else:
            # Join, on condition that the record is still absent, and that the generation, the horizon and the epochs
            # are still as just read.
            self._membership.earlier_leases_end_ns = now_ns + self._membership.wait_ns
            compares = (
                CreateRevisionIs(self._key, 0),
                ModRevisionIs(GENERATION, _revision(generation)),
                ModRevisionIs(HORIZON, _revision(horizon)),
                ModRevisionIs(EPOCHS, self._membership.epochs_revision),
            )
            self._mark = DaemonMark(self._mark.beat + 1, self._membership.instance)
            # The join also writes one key of the fleet, with which every node can notice a restored backup.
            joined = Put(JOINED, self._membership.node_id.encode())
            writes: tuple[Put, ...] = (self._write(now_ns), self._inventory(), joined)
            writes += () if horizon else (Put(HORIZON, f"{self._horizon_s:g}".encode()),)
            if not self._membership.is_settled:
                due_ns, write = self._missing_epochs(epochs, answer.revision, now_ns)
                writes += (write,) if now_ns >= due_ns else ()
            self._ask(now_ns, Transaction(compares, writes, (Get(EPOCHS),)), self._created)

    def _created(self, answer: TransactionAnswer, sent_ns: int, now_ns: int) -> None:
        is_joined = answer.succeeded and not self._difference(answer, self._membership.revision)
        if is_joined and self._take_epochs(answer.found[0], answer.revision):
            self._join(answer.revision, answer.revision, sent_ns, now_ns)
        else:
            self._due_ns = now_ns + self._membership.retry_ns

    def _is_own(self, record: KeyValue) -> bool:
        """Return whether this daemon wrote the record. An unreadable record counts as another daemon's."""
        node = self._membership.read(read_node, record)
        return node is not None and self._mark.covers(node)

    def _has_no_beats(self, record: KeyValue) -> bool:
        """Return whether both the record and this daemon's journal are from a version without heartbeat numbers."""
        node = self._membership.read(read_node, record)
        return node is not None and not self._mark.run and not node.beat

    def _is_silent(self, record: KeyValue, now_ns: int) -> bool:
        """Return whether another daemon's record was unchanged for half a horizon. Otherwise report the wait."""
        membership, foreign_record = self._membership, self._foreign
        if foreign_record is None or foreign_record.mod_revision != record.mod_revision:
            self._foreign = _ForeignRecord(record.mod_revision, now_ns, is_alive=foreign_record is not None)
        foreign = self._foreign
        assert foreign is not None
        text = DUPLICATE_NODE_ID if foreign.is_alive else f"{FOREIGN_DAEMON} {membership.silence_ns / NS_PER_S:g} s"
        membership.trouble = ClaimRefusal.ISOLATED, text
        if foreign_record is None or foreign_record.is_alive != foreign.is_alive:
            self._note(Note.REFUSED, text)
        return now_ns >= foreign.since_ns + membership.silence_ns

    def _read_again(self, answer: TransactionAnswer, sent_ns: int, now_ns: int) -> None:
        self._due_ns = now_ns

    def _join(self, incarnation: int, mod_revision: int, sent_ns: int, now_ns: int) -> None:
        self._membership.incarnation = incarnation
        self._membership.mod_revision = mod_revision
        self._enter(now_ns)
        # One transaction wrote this node's record and the key of the last join.
        self._joined_revision = incarnation
        self._acknowledge(sent_ns)

    def _enter(self, now_ns: int, record_nonce: str = "") -> None:
        """Become a member, and send a heartbeat at once, which also finds the claims of earlier incarnations.

        `record_nonce` is the nonce of the record, if an earlier process wrote it.
        """
        self._phase = _Phase.MEMBER
        self._is_isolated = False
        self._written = None
        self._attempts.clear()
        self._foreign = None
        self._mark = DaemonMark(self._mark.beat, self._membership.instance, record_nonce)
        self._awaits_mark = False
        self._joined_revision = 0
        self._remembered_ns = now_ns
        self._membership.effects.append(Joined(self._identity, self._membership.incarnation, self._mark))
        self._note(Note.JOINED)

    # --- beats ---

    def _beat(self, now_ns: int) -> None:
        """Have the heartbeat's mark stored before the heartbeat is sent.

        If the journal does not answer, ask again with the next mark.
        """
        self._mark = replace(self._mark, beat=self._mark.beat + 1)
        self._awaits_mark = True
        self._due_ns = now_ns + self._membership.beat_ns
        self._membership.effects.append(KeepMark(self._mark))

    def _send_heartbeat(self, beat: int, now_ns: int) -> None:
        is_awaited = self._awaits_mark and beat == self._mark.beat
        if not is_awaited or self._is_asking or not self._is_running or self._phase is not _Phase.MEMBER:
            return
        self._awaits_mark = False
        record = self._record
        inventory = () if record == self._written else (self._inventory(),)
        writes = (self._write(now_ns), *inventory, *self._clocks.write())
        held_records = Get(held_key(self._membership.node_id), is_prefix=True)
        reads = (*self._reads, held_records, self._clocks.read(), Get(EPOCHS), Get(JOINED), self._history.read())
        compare = ModRevisionIs(self._key, self._membership.mod_revision)

        def on_answer(answer: TransactionAnswer, sent_ns: int, now_ns: int) -> None:
            if answer.succeeded:
                self._written = record
            self._beaten(answer, sent_ns, now_ns)

        self._ask(now_ns, Transaction((compare,), writes, reads), on_answer)

    def _beaten(self, answer: TransactionAnswer, sent_ns: int, now_ns: int) -> None:
        """Process the answer to a heartbeat: this or an earlier attempt was executed, or the node was fenced."""
        record, generation, horizon = _own_and_fleet(answer)
        *_, held_records, clocks, epochs, joins, history = answer.found
        joined = joins[0] if joins else None
        # First check that this is still the joined store: a restored backup has an older join, or an older record of
        # this node. Then nothing else in the answer can be trusted.
        if joined and joined.mod_revision < self._joined_revision:
            self._lose_store("etcd has forgotten the last join", answer)
            return
        if record and record.mod_revision < self._membership.mod_revision:
            self._lose_store("etcd has an earlier state of this node's record", answer)
            return
        # No daemon writes an unreadable record. If this membership's record is unreadable, the next heartbeat rewrites
        # it.
        is_spoiled = record and record.create_revision == self._membership.incarnation and not self._nonce(record)
        # If another daemon wrote a readable record, it has the same node id and owns the record, so this daemon must
        # leave.
        if record and not is_spoiled and not self._is_own(record):
            self._note(Note.DUPLICATE_NODE_ID, DUPLICATE_NODE_ID)
            self._lose(Reason.FENCED, DUPLICATE_NODE_ID)
            return
        # Without the record of this incarnation, the node was fenced.
        if record is None or record.create_revision != self._membership.incarnation:
            self._lose(Reason.FENCED, "another node fenced this one: it was silent too long")
            return
        # The node is still a member. If the heartbeat failed, the record shows which earlier attempt succeeded, and
        # when it was sent.
        self._joined_revision = _revision(joined)
        self._membership.mod_revision = record.mod_revision
        written_ns = sent_ns if answer.succeeded else self._attempts.get(self._nonce(record))
        self._due_ns = sent_ns + self._membership.beat_ns if answer.succeeded else now_ns
        self._attempts.clear()
        # An operator has renewed the generation. Leave before anything is claimed under the old one.
        if self._is_renewed(generation, horizon):
            self._lose(Reason.RENEWED, RENEWED)
            return
        self._membership.generation_revision = _revision(generation)
        # Read whether nodes may claim names. If that is not settled yet, help to settle it.
        if not self._take_epochs(epochs, answer.revision):
            return
        if not self._membership.is_settled or self._epochs(epochs) is None:
            self._settle(epochs, answer.revision, now_ns)
        # Compare the claims in etcd with the active leases. Another node may already have a lost claim, so this node
        # must end all claimed leases.
        if lost := self._claims.sweep(held_records, answer.revision, now_ns):
            self._lose(Reason.LOST, f"the claim of {lost} is missing in etcd, although its lease is active")
            return
        self._quotas.sweep(held_records, now_ns)
        self._history.observe(history, now_ns)
        if now_ns >= self._remembered_ns + REMEMBER_NS:
            self._remembered_ns = now_ns
            self._identity = replace(self._identity, revision=answer.revision)
            self._membership.effects.append(Remembered(self._identity))
        # Move the deadline last, after every check that could end the membership. Count from the sending time, because
        # etcd may have written the record at any moment after it.
        if written_ns is not None:
            self._acknowledge(written_ns)
            if self._membership.member_since_ns is None:
                self._membership.member_since_ns = now_ns
        if answer.succeeded:
            self._take_rate(self._clocks.observe(clocks, answer.revision, sent_ns, now_ns))

    def _is_renewed(self, generation: KeyValue | None, horizon: KeyValue | None) -> bool:
        """Return whether an operator renewed or deleted either key.

        An unreadable horizon does not mean that an operator set another one, so members keep the one that they know.
        """
        previous = "" if generation is None else read_generation(generation.value)
        if previous != self._identity.generation or horizon is None:
            return True
        return self._membership.read(read_horizon_s, horizon) not in (None, self._horizon_s)

    def _take_rate(self, rate: float | None) -> None:
        """Use the rate of the other nodes' clocks, according to their readings."""
        # Compensate for the rate first. Then log a change between a known and an unknown rate.
        self._membership.make_up_for(1.0 if rate is None else rate)
        if rate is None and self._rate is not None:
            self._note(Note.CLOCK)
        elif rate is not None and self._rate is None:
            self._note(Note.CLOCK, f"the other nodes' clocks run {rate:.4f} times as fast as this node's: {CLOCK}")
        self._rate = rate

    def _take_epochs(self, items: tuple[KeyValue, ...], revision: int) -> bool:
        """Process the record that lets nodes claim names, which contains the epoch base.

        Returns whether the membership may continue.
        """
        membership, epochs = self._membership, self._epochs(items)
        membership.epochs_revision = _revision(items[0] if items else None)
        if items and epochs is None and membership.is_settled:
            # An unreadable value does not change the base: this node keeps the base that it knows, and writes it.
            return True
        is_of_now = epochs is not None and epochs.generation == self._identity.generation
        if epochs is None or not is_of_now or epochs.base + revision <= self._highest_epoch:
            membership.is_settled = False
            return True
        if epochs.base != membership.epoch_base:
            if membership.is_settled or self._claims.live:
                self._lose(Reason.RENEWED, "another node has raised the fleet's epochs")
                return False
            membership.epoch_base = epochs.base
            self._identity = replace(self._identity, epoch_base=epochs.base)
            membership.effects.append(Remembered(self._identity))
        membership.is_settled, membership.trouble, self._unsettled_ns = True, ISOLATED_TROUBLE, None
        return True

    def _missing_epochs(self, items: tuple[KeyValue, ...], revision: int, now_ns: int) -> tuple[int, Put]:
        """Return the write of the record that lets nodes claim names, and the earliest time for it."""
        epochs, own_base = self._epochs(items), self._membership.epoch_base
        if self._membership.is_settled or (not items and self._unsettled_ns is None):
            # No wait is needed: the generation was never renewed, or the record was deleted or made unreadable.
            base, due_ns = own_base, now_ns
        else:
            # The generation is new, or the base is not above all epochs that this node knows, or only earlier members
            # know the base.
            self._unsettled_ns = now_ns if self._unsettled_ns is None else self._unsettled_ns
            is_low = epochs is not None and epochs.generation == self._identity.generation
            due_ns = now_ns if is_low else self._unsettled_ns + self._membership.wait_ns
            base = max(self._highest_epoch, own_base + revision, (epochs.base if epochs else 0) + revision) + EPOCH_GAP
        return due_ns, Put(EPOCHS, EpochsRecord(self._identity.generation, base).encode())

    def _settle(self, items: tuple[KeyValue, ...], revision: int, now_ns: int) -> None:
        """Let nodes claim names once all leases from before the generation have ended."""
        due_ns, write = self._missing_epochs(items, revision, now_ns)
        # It is too early: some lease from before the generation may live. Clients that ask for a name get this as the
        # reason.
        if now_ns < due_ns:
            self._due_ns = min(self._due_ns, due_ns)
            left_s = (due_ns - now_ns) / NS_PER_S
            self._membership.trouble = (
                ClaimRefusal.ISOLATED,
                f"{UNSETTLED}: no name can be claimed for another {left_s:.0f} s",
            )
        # Several nodes may write at the same time. The next heartbeat reads which record was written.
        elif not self._is_settling:
            self._is_settling = True
            self._membership.ask(now_ns, Transaction(self._membership.as_member(), (write,)), self._settled)

    def _settled(self, outcome: Outcome, sent_ns: int, now_ns: int) -> None:
        """Send a heartbeat at once, to read which node's record was written."""
        self._is_settling = False
        self._membership.is_suspect |= isinstance(outcome, TransactionAnswer)

    def _acknowledge(self, written_ns: int) -> None:
        """Move the deadline: etcd has executed the write of this node's record that was sent at `written_ns`."""
        horizon_ns = written_ns + self._membership.cap_ns
        self._note(Note.BEAT)
        # The deadline never moves back, although answers may arrive in another order.
        if horizon_ns > self._membership.horizon_ns:
            self._membership.horizon_ns = horizon_ns
            self._is_isolated = False
            self._membership.effects.append(MoveHorizon(horizon_ns, self._membership.incarnation))

    def _lose(self, reason: Reason, text: str, due_ns: int = 0) -> None:
        """Lose the membership: end all claimed leases, and rejoin after that, but not before `due_ns`."""
        # From here on this membership is void, including its record and everything that it knew of the store.
        self._due_ns = due_ns
        self._phase = _Phase.ENDING
        self._membership.incarnation = 0
        self._membership.horizon_ns = 0
        self._membership.member_since_ns = None
        self._membership.dates.forget()
        self._membership.is_settled = False
        self._attempts.clear()
        self._clocks.lose_slot()
        self._history.forget()
        self._claims.lose(forgets=reason in _FORGETS)
        self._quotas.lose(forgets=reason in _FORGETS)
        # The store or the machine may be another one, so earlier observations of the store are void too.
        if reason in _FORGETS:
            self._fences.forget()
            self._clocks.forget()
        # The broker ends the leases, and answers with LiveClaims once their memory is proved free.
        self._membership.effects.append(EndClaimed(reason, text))
        self._note(Note.FENCED, text)

    # --- pauses of the machine ---

    def _pause(self, paused: Paused) -> None:
        """End claimed leases if the deadline may have passed while this machine's clocks stopped.

        Otherwise send a heartbeat.
        """
        missed_ns = paused.missed_ns
        # Earlier measurements are void: the other nodes' measurements of this clock, and this node's of theirs.
        self._clocks.forget(paused.instance)
        if missed_ns is None:
            # The other copy may continue with this node's record and nonces. From now on these count as another
            # daemon's.
            self._membership.instance = paused.instance
            self._mark = DaemonMark(self._mark.beat + 1, paused.instance)
        elif missed_ns <= self._membership.cap_ns * self._membership.rho:
            self._membership.is_suspect = True
            return
        if self._membership.incarnation and self._phase in (_Phase.JOINING, _Phase.MEMBER):
            description = "restored or copied" if missed_ns is None else f"paused for {missed_ns / NS_PER_S:.1f} s"
            self._lose(Reason.PAUSED, f"this machine was {description}, and its clock with it")

    # --- the end ---

    @property
    def _is_running(self) -> bool:
        return self._has_started and not self._is_stopping

    def _leave(self, now_ns: int) -> None:
        """Delete this node's record if no claims remain, so that others need not wait for this node."""
        self._has_left = True
        # If a claim remains, the record must also remain: from it, other nodes know how long to wait for the claim.
        if self._phase is not _Phase.MEMBER or self._claims.live or self._quotas.has_entries:
            self._membership.effects.append(Stopped(has_left=False))
            return

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            is_gone = isinstance(outcome, TransactionAnswer) and outcome.succeeded
            self._membership.effects.append(Stopped(has_left=is_gone))

        transaction = Transaction((ModRevisionIs(self._key, self._membership.mod_revision),), self._removal)
        self._membership.ask(now_ns, transaction, on_outcome)

    # --- questions ---

    def _write(self, now_ns: int) -> Put:
        """Return the write of this node's record, and remember its sending time."""
        nonce = self._membership.nonce()
        self._attempts[nonce] = now_ns
        return Put(self._key, NodeRecord(nonce, now_ns // 1_000_000, self._mark.beat).encode())

    def _inventory(self) -> Put:
        current_record = self._record
        record = InventoryRecord(
            current_record.addresses,
            dict(current_record.labels),
            current_record.cards,
            current_record.is_draining,
            current_record.version,
        )
        return Put(inventory_key(self._membership.node_id), record.encode())

    def _ask(self, now_ns: int, transaction: Transaction, on_answer: OnAnswer) -> None:
        """Ask about this node's own record, one question at a time. If the answer is lost, ask again later."""
        self._is_asking = True
        phase = self._phase

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            self._is_asking = False
            # The membership has ended since, so the answer no longer matters.
            if self._phase is not phase:
                return
            if isinstance(outcome, TransactionAnswer):
                on_answer(outcome, sent_ns, now_ns)
                return
            # There was no answer. Forget everything that only an unbroken series of answers proves.
            self._membership.member_since_ns = None
            self._foreign = None
            self._clocks.lose_slot()
            is_rejected = isinstance(outcome, TransactionRejected)
            self._note(Note.REJECTED if is_rejected else Note.BEAT_UNKNOWN, outcome.reason)
            self._due_ns = now_ns + (self._membership.beat_ns if is_rejected else self._membership.retry_ns)

        self._membership.ask(now_ns, transaction, on_outcome)

    def _nonce(self, record: KeyValue) -> str:
        """Return the nonce of a node's record; "" if it is unreadable."""
        node = self._membership.read(read_node, record)
        return "" if node is None else node.nonce

    def _epochs(self, items: tuple[KeyValue, ...]) -> EpochsRecord | None:
        """Return the record that lets nodes claim names; None if absent or unreadable."""
        return self._membership.read(EpochsRecord.read, items[0]) if items else None

    def _note(self, note: Note, text: str = "") -> None:
        self._membership.effects.append(Noted(note, text))


def _own_and_fleet(answer: TransactionAnswer) -> tuple[KeyValue | None, ...]:
    return tuple(items[0] if items else None for items in answer.found[:3])


def _revision(item: KeyValue | None) -> int:
    return item.mod_revision if item else 0
