"""The rules of a node's membership in its fleet: it joins, sends heartbeats, is fenced, and joins again.

**Heartbeats.** A heartbeat rewrites the node's record if the record is still at the revision of the last heartbeat. An
acknowledged heartbeat moves the deadline of claimed leases to T (1 - rho) after its sending. If the answer is lost, the
member repeats the heartbeat. If the first one was executed, the repetition fails, and reads the first one's nonce. A
member that finds no record or another daemon's was fenced. It ends all claimed leases, and joins again when their
memory is proved free.

**Foreign records.** Another daemon may have the same node id: on a host with the same name, on a host with a copy of
this journal, or on this host before its journal was lost or restored. The mark, which the journal has before each join
and heartbeat, distinguishes the daemons' records. The other daemon's leases may still run. So its record is deleted
only after it was unchanged for half a horizon, and its claims one more horizon later. While the other daemon sends
heartbeats, this node does not join.

**Another store.** The store may have been restored from a backup or created again. A node notices this by a lower
revision, another cluster, or an earlier record of its own or of the last join. It then does not join until an operator
renews the generation key. Leases without a claim in the backup may still run, so a node claims nothing for T (1 + rho)
after it first saw the new generation. Then one node settles the generation: it writes the `epochs` record, which every
claim compares. The record has a base of epochs above every epoch in the node's records, because revisions may be lower
than before.

**The horizon.** A node that takes a silent node's names waits for its own horizon, so all nodes must have the same. The
first node that joins writes its horizon to the store. A node with another horizon does not join.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
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
"""The operator's step after which nodes join another store than before."""

NEW_HORIZON: Final = (
    f"use the fleet's value; to change it for all nodes, {_OPERATOR_STEP} run `etcdctl del {HORIZON.decode()}`"
)
"""The operator's step after which nodes join with another horizon than before."""

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
"""Nanoseconds after which the journal gets the store's revision again. A backup from before that revision is noticed.
"""

MAX_FAULT_CHARS: Final = 300
"""Maximum characters of a text about a fault, which may quote values from etcd."""

RENEWED: Final = "an operator renewed the fleet's generation key or its horizon"

RESTORED: Final = "etcd was restored from a backup"

UNSETTLED: Final = "the fleet's generation was renewed, and leases from before may still be active"

FOREIGN: Final = "etcd's record of this node comes from another daemon, or from a later state of this daemon's journal"

EPOCH_GAP: Final = 10**9
"""Number of epochs that a new generation skips, to be above claims of which no running node has a record. etcd takes
days for this many revisions."""

_FORGETS: Final = frozenset({Reason.FORGOTTEN, Reason.RESTORED, Reason.RENEWED, Reason.PAUSED})
"""Reasons for the end of a membership after which this daemon forgets its claims, because they may be another daemon's
or another store's.
"""

OnAnswer = Callable[[TransactionAnswer, int, int], None]
"""A handler of an answer. Its other arguments are the time when the question was sent, and the time now."""


class _Phase(Enum):
    STARTING = auto()
    """The broker has not yet sent its claimed leases."""
    ENDING = auto()
    """Claimed leases are ending. Then the node joins again."""
    JOINING = auto()
    MEMBER = auto()


class _ForeignRecord(NamedTuple):
    """Another daemon's record with this node's id, unchanged since `since_ns`."""

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

        `instance` is a random text for this run of the process. `history_s` is as in StoreHistory.
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
        self._unsent: Callable[[int], None] | None = None
        """Sends the join or heartbeat that waits until the journal has its mark; None if none waits."""
        self._highest_epoch = 0
        """The highest epoch from before a renewed generation in this node's records."""
        self._unsettled_ns: int | None = None
        """Since when this node has had the present generation while it is not settled; None if it is settled."""
        self._is_settling = False
        self._joined_revision = 0
        """The revision of the last join that this node has read."""
        self._foreign: _ForeignRecord | None = None
        self._remembered_ns = 0
        self._horizon_s = terms.horizon_s
        self._record = RecordChanged()
        self._written: RecordChanged | None = None
        """The inventory that this membership has written to etcd; None if unknown."""
        self._phase = _Phase.STARTING
        self._has_started = False
        self._key = node_key(node_id)
        self._removal = node_removal(node_id)
        self._reads = Get(self._key), Get(GENERATION), Get(HORIZON)
        self._attempts: dict[str, int] = {}
        """The sending time of each write of the record whose outcome is unknown, by nonce."""
        self._is_asking = False
        self._due_ns = 0
        self._no_generation_ns: int | None = None
        self._is_isolated = False
        self._rate: float | None = None
        """The rate of the other nodes' clocks relative to this node's; None if it is within the tolerance."""
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
                self._mark_kept(event.beat, now_ns)
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
        # Do what is due now, which the event may have changed.
        self._advance(now_ns)
        self._membership.report_unreadable()
        return self._membership.effects

    # --- time ---

    def _advance(self, now_ns: int) -> None:
        # An answer suggests that the membership is lost. A heartbeat will show it.
        if self._membership.is_suspect and self._phase is _Phase.MEMBER and self._unsent is None:
            self._due_ns = now_ns
        self._membership.is_suspect = False
        # Have at most one request about this node's record in progress, and none while the daemon stops.
        if self._is_running and not self._is_asking and now_ns >= self._due_ns:
            if self._phase is _Phase.JOINING:
                self._read_store(now_ns)
            elif self._phase is _Phase.MEMBER:
                self._beat(now_ns)
        # The deadline has passed, so claimed leases have ended. The node is still a member until another node fences
        # it.
        if self._phase is _Phase.MEMBER and self._membership.horizon_ns <= now_ns and not self._is_isolated:
            self._is_isolated = True
            self._membership.member_since_ns = None
            self._note(Note.ISOLATED)
        self._claims.advance(now_ns)
        self._quotas.advance(now_ns)
        # Leave when no other write is in progress.
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
        """Pass an outcome to the rule that asked. If it is from another store, a member treats it as lost."""
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
            # The rule that asked needs an answer, so pass Unknown to it. The rule then asks again.
            frame = extract_tb(error.__traceback__)[-1]
            text = f"handling an answer of etcd's, in {frame.name}, line {frame.lineno}: {error!r}"[:MAX_FAULT_CHARS]
            self._note(Note.FAULT, text)
            question.on_outcome(Unknown(text), question.sent_ns, now_ns)

    def _difference(self, answer: TransactionAnswer, floor: int) -> str:
        """Return how an answer's store differs from the joined one; "" if it does not."""
        if self._identity.cluster_id not in (0, answer.cluster_id):
            return f"etcd's cluster id is {answer.cluster_id:x}, but was {self._identity.cluster_id:x}"
        return f"etcd is at revision {answer.revision}, but was at {floor}" if answer.revision < floor else ""

    def _lose_store(self, text: str, answer: TransactionAnswer, due_ns: int = 0) -> None:
        """Lose the membership because the store is not the joined one, or an earlier state of it.

        When the revisions of a restored store have risen again, it looks like the joined store. So the identity notes
        that the store was restored. Another cluster always differs by its number.
        """
        if self._identity.cluster_id in (0, answer.cluster_id):
            self._identity = replace(self._identity, is_restored=True)
            self._membership.effects.append(Remembered(self._identity))
        self._lose(Reason.RESTORED, text, due_ns)

    def _is_accepted(
        self, answer: TransactionAnswer, generation: KeyValue | None, horizon: KeyValue | None, now_ns: int
    ) -> bool:
        """Return whether this node may join the store. Remembers the identity of a store that is new to this node."""
        known_generation = self._identity.generation
        # The store is new, or its contents were lost. In the second case leases may still run, so create the key later.
        if generation is None and not known_generation:
            self._make_generation(now_ns)
            return False
        # By a new generation the operator confirms the store, whatever its revisions are. Without one, the store must
        # have reached the revision that this node remembers.
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
        # Do not join. Log the reason once for the operator, and check again after the time of a heartbeat.
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
        # Leases from before the renewal may run under epochs up to this one. So new epochs begin above it, after these
        # leases have ended.
        if is_renewed:
            self._highest_epoch = max(self._highest_epoch, self._membership.epoch_base + self._membership.revision)
            self._unsettled_ns = now_ns
        self._membership.revision = answer.revision
        self._membership.generation_revision = _revision(generation)
        self._identity = FleetIdentity(answer.cluster_id, value, answer.revision, self._membership.epoch_base)
        # After a new generation or a deleted horizon key, a member joins again, so that all nodes have the same values.
        if self._membership.incarnation and (is_renewed or horizon is None):
            self._lose(Reason.RENEWED, RENEWED)
            return False
        return True

    def _make_generation(self, now_ns: int) -> None:
        """Create the generation key once it has been absent for so long that all leases of a lost store have ended."""
        # The wait begins with the first read without the key.
        if self._no_generation_ns is None:
            self._no_generation_ns = now_ns
        self._due_ns = self._no_generation_ns + self._membership.wait_ns
        if now_ns >= self._due_ns:
            self._no_generation_ns = None
            writes = (Put(GENERATION, self._membership.nonce().encode()),)
            self._ask(now_ns, Transaction((CreateRevisionIs(GENERATION, 0),), writes), self._read_again)

    # --- joining ---

    def _restore_claims(self, claims: LiveClaims, now_ns: int) -> None:
        """Process the broker's claims. The node joins if there are none, or if it has a record of their incarnation."""
        if self._phase is _Phase.STARTING:
            # There are claimed leases, and no stored membership. End them.
            if (claims.epochs or claims.quotas) and not self._membership.incarnation:
                self._lose(
                    Reason.FORGOTTEN, "the daemon has lost the record of the membership under which it claimed names"
                )
                return
            self._claims.restore(claims.epochs)
            self._quotas.restore(claims.quotas)
            # The joined store has reached the revisions of the leases' claims. If its revision is now lower, it was
            # restored from a backup.
            self._membership.revision = max(self._membership.revision, *self._claims.live.values(), 0)
        # Later reports only matter when the claims of a lost membership have ended.
        elif self._phase is not _Phase.ENDING or claims.epochs or claims.quotas:
            return
        self._phase = _Phase.JOINING
        self._due_ns = max(self._due_ns, now_ns)

    def _read_store(self, now_ns: int) -> None:
        # A join that still waits for its mark rests on an earlier read.
        self._unsent = None
        self._ask(now_ns, Transaction(reads=(*self._reads, Get(EPOCHS))), self._store_read)

    def _store_read(self, answer: TransactionAnswer, sent_ns: int, now_ns: int) -> None:
        """Continue the earlier membership, delete a record with this node's id, or join."""
        # The answer has the record, the generation and the horizon at one revision.
        record, generation, horizon = _own_and_fleet(answer)
        *_, epochs = answer.found
        if not self._is_accepted(answer, generation, horizon, now_ns):
            return
        if not self._take_epochs(epochs, answer.revision):
            return
        # An earlier process was a member, and its claimed leases may run. Continue if the record is that membership's;
        # otherwise end them.
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
        # A join by this process was executed, but its answer was lost.
        elif record and (attempt_ns := self._attempts.get(self._nonce(record))) is not None:
            self._join(record.create_revision, record.mod_revision, attempt_ns, now_ns)
        # The record is another daemon's, which may be running. Wait until the record was unchanged for half a horizon.
        elif record and not self._is_own(record) and not self._is_silent(record, now_ns):
            self._due_ns = now_ns + self._membership.poll_ns
        elif record:
            # The record's membership has no claimed leases here. Delete the record, then read again and join.
            compare = ModRevisionIs(self._key, record.mod_revision)
            self._ask(now_ns, Transaction((compare,), self._removal), self._read_again)
        else:
            mark = DaemonMark(self._mark.beat + 1, self._membership.instance)
            self._keep_mark(mark, partial(self._create, answer), now_ns)

    def _create(self, answer: TransactionAnswer, now_ns: int) -> None:
        """Join, if since the answer no record has been written, and no generation, horizon or epochs have changed."""
        _, generation, horizon = _own_and_fleet(answer)
        *_, epochs = answer.found
        self._membership.earlier_leases_end_ns = now_ns + self._membership.wait_ns
        compares = (
            CreateRevisionIs(self._key, 0),
            ModRevisionIs(GENERATION, _revision(generation)),
            ModRevisionIs(HORIZON, _revision(horizon)),
            ModRevisionIs(EPOCHS, self._membership.epochs_revision),
        )
        # The join also writes a common key, by which every node can notice a restored backup.
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
        """Return whether this daemon wrote the record. An unreadable record is treated as another daemon's."""
        node = self._membership.read(read_node, record)
        return node is not None and self._mark.covers(node)

    def _has_no_beats(self, record: KeyValue) -> bool:
        """Return whether neither the record nor this daemon's journal has a heartbeat number, as in older versions."""
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
        # The join wrote this node's record and the key of the last join at one revision.
        self._joined_revision = incarnation
        self._acknowledge(sent_ns)

    def _enter(self, now_ns: int, record_nonce: str = "") -> None:
        """Become a member, and send a heartbeat at once, which also finds claims of earlier incarnations.

        `record_nonce` is the record's nonce if an earlier process wrote the record.
        """
        self._phase = _Phase.MEMBER
        self._due_ns = now_ns
        self._is_isolated = False
        self._written = None
        self._attempts.clear()
        self._foreign = None
        self._mark = DaemonMark(self._mark.beat, self._membership.instance, record_nonce)
        self._joined_revision = 0
        self._remembered_ns = now_ns
        self._membership.effects.append(Joined(self._identity, self._membership.incarnation, self._mark))
        self._note(Note.JOINED)

    # --- beats ---

    def _beat(self, now_ns: int) -> None:
        self._keep_mark(replace(self._mark, beat=self._mark.beat + 1), self._send_heartbeat, now_ns)

    def _send_heartbeat(self, now_ns: int) -> None:
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
        """Process the answer to a heartbeat. Either this or an earlier attempt was executed, or the node was fenced."""
        record, generation, horizon = _own_and_fleet(answer)
        *_, held_records, clocks, epochs, joins, history = answer.found
        joined = joins[0] if joins else None
        # Check that the store is still the joined one. A restored backup has an earlier join, or an earlier record of
        # this node.
        if joined and joined.mod_revision < self._joined_revision:
            self._lose_store("etcd has forgotten the last join", answer)
            return
        if record and record.mod_revision < self._membership.mod_revision:
            self._lose_store("etcd has an earlier state of this node's record", answer)
            return
        # If this membership's record is unreadable, no daemon wrote it, and the next heartbeat rewrites it.
        is_spoiled = record and record.create_revision == self._membership.incarnation and not self._nonce(record)
        # If another daemon wrote the record, it has the same node id, and this daemon must leave.
        if record and not is_spoiled and not self._is_own(record):
            self._note(Note.DUPLICATE_NODE_ID, DUPLICATE_NODE_ID)
            self._lose(Reason.FENCED, DUPLICATE_NODE_ID)
            return
        # The record of this incarnation is gone, so the node was fenced.
        if record is None or record.create_revision != self._membership.incarnation:
            self._lose(Reason.FENCED, "another node fenced this one: it was silent too long")
            return
        # The node is still a member. By the record's nonce, find out which attempt succeeded and when it was sent.
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
        # Read whether nodes may claim names.
        if not self._take_epochs(epochs, answer.revision):
            return
        if not self._membership.is_settled or self._epochs(epochs) is None:
            self._settle(epochs, answer.revision, now_ns)
        # Compare the claims in etcd with the leases. If a lease's claim is gone, another node may have the name. Then
        # end all claimed leases.
        if lost := self._claims.sweep(held_records, answer.revision, now_ns):
            self._lose(Reason.LOST, f"the claim of {lost} is missing in etcd, although its lease is active")
            return
        self._quotas.sweep(held_records, now_ns)
        self._history.observe(history, now_ns)
        if now_ns >= self._remembered_ns + REMEMBER_NS:
            self._remembered_ns = now_ns
            self._identity = replace(self._identity, revision=answer.revision)
            self._membership.effects.append(Remembered(self._identity))
        # Move the deadline after all checks. It counts from the sending time, because etcd may have written the record
        # at any time after that.
        if written_ns is not None:
            self._acknowledge(written_ns)
            if self._membership.member_since_ns is None:
                self._membership.member_since_ns = now_ns
        if answer.succeeded:
            self._take_rate(self._clocks.observe(clocks, answer.revision, sent_ns, now_ns))

    def _is_renewed(self, generation: KeyValue | None, horizon: KeyValue | None) -> bool:
        """Return whether an operator renewed or deleted either key.

        If the horizon is unreadable, members keep the one that they read last.
        """
        previous = "" if generation is None else read_generation(generation.value)
        if previous != self._identity.generation or horizon is None:
            return True
        return self._membership.read(read_horizon_s, horizon) not in (None, self._horizon_s)

    def _take_rate(self, rate: float | None) -> None:
        """Compensate for the rate of the other nodes' clocks; None for a rate within the tolerance."""
        # Log only a change between a rate and None.
        self._membership.make_up_for(1.0 if rate is None else rate)
        if rate is None and self._rate is not None:
            self._note(Note.CLOCK)
        elif rate is not None and self._rate is None:
            self._note(Note.CLOCK, f"the other nodes' clocks run {rate:.4f} times as fast as this node's: {CLOCK}")
        self._rate = rate

    def _take_epochs(self, items: tuple[KeyValue, ...], revision: int) -> bool:
        """Process the `epochs` record, with which nodes may claim names, and its epoch base.

        Returns whether the membership may continue.
        """
        membership, epochs = self._membership, self._epochs(items)
        membership.epochs_revision = _revision(items[0] if items else None)
        if items and epochs is None and membership.is_settled:
            # If the value is unreadable, keep the base, and write the record again.
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
        """Return the earliest time for writing the `epochs` record, and the write."""
        epochs, own_base = self._epochs(items), self._membership.epoch_base
        if self._membership.is_settled or (not items and self._unsettled_ns is None):
            # The generation was never renewed, or the record was deleted or made unreadable. There is nothing to wait
            # for.
            base, due_ns = own_base, now_ns
        else:
            # The generation is new, or the base is not above all epochs that this node has read, or this node has not
            # read the base.
            self._unsettled_ns = now_ns if self._unsettled_ns is None else self._unsettled_ns
            is_low = epochs is not None and epochs.generation == self._identity.generation
            due_ns = now_ns if is_low else self._unsettled_ns + self._membership.wait_ns
            base = max(self._highest_epoch, own_base + revision, (epochs.base if epochs else 0) + revision) + EPOCH_GAP
        return due_ns, Put(EPOCHS, EpochsRecord(self._identity.generation, base).encode())

    def _settle(self, items: tuple[KeyValue, ...], revision: int, now_ns: int) -> None:
        """Write the `epochs` record once all leases from before the generation have ended."""
        due_ns, write = self._missing_epochs(items, revision, now_ns)
        # A lease from before the generation may still run. Clients that request a name get this as the reason.
        if now_ns < due_ns:
            self._due_ns = min(self._due_ns, due_ns)
            left_s = (due_ns - now_ns) / NS_PER_S
            self._membership.trouble = (
                ClaimRefusal.ISOLATED,
                f"{UNSETTLED}: no name can be claimed for another {left_s:.0f} s",
            )
        # Several nodes may try to write the record. The next heartbeat reads which one succeeded.
        elif not self._is_settling:
            self._is_settling = True
            self._membership.ask(now_ns, Transaction(self._membership.as_member(), (write,)), self._settled)

    def _settled(self, outcome: Outcome, sent_ns: int, now_ns: int) -> None:
        """Send a heartbeat at once, which reads the record."""
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
        """End the membership and all claimed leases. The node joins again after that, but not before `due_ns`."""
        # The membership is over, so its record and its observations of the store are void.
        self._due_ns = due_ns
        self._phase = _Phase.ENDING
        self._unsent = None
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
        # The store or the machine may be another one, so forget observations of the store.
        if reason in _FORGETS:
            self._fences.forget()
            self._clocks.forget()
        # The broker ends the leases, and answers with LiveClaims once their memory is proved free.
        self._membership.effects.append(EndClaimed(reason, text))
        self._note(Note.FENCED, text)

    # --- pauses of the machine ---

    def _pause(self, paused: Paused) -> None:
        """End claimed leases if the deadline may have passed while the clocks stopped; else send a heartbeat."""
        missed_ns = paused.missed_ns
        # Restart the measurements of clocks, this node's and the other nodes'.
        self._clocks.forget(paused.instance)
        if missed_ns is None:
            # A copy of this machine may continue with this node's record and nonces. From now on they count as another
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
        # If a claim remains, the record must remain too. Other nodes need it to know how long to wait for the claim.
        if self._phase is not _Phase.MEMBER or self._claims.live or self._quotas.has_entries:
            self._membership.effects.append(Stopped(has_left=False))
            return

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            is_gone = isinstance(outcome, TransactionAnswer) and outcome.succeeded
            self._membership.effects.append(Stopped(has_left=is_gone))

        transaction = Transaction((ModRevisionIs(self._key, self._membership.mod_revision),), self._removal)
        self._membership.ask(now_ns, transaction, on_outcome)

    # --- the mark ---

    def _keep_mark(self, mark: DaemonMark, send: Callable[[int], None], now_ns: int) -> None:
        """Have the mark of a join or heartbeat stored. Then `send` sends it.

        If the journal does not answer within the time of a heartbeat, the next mark is stored.
        """
        self._mark = mark
        self._unsent = send
        self._due_ns = now_ns + self._membership.beat_ns
        self._membership.effects.append(KeepMark(mark))

    def _mark_kept(self, beat: int, now_ns: int) -> None:
        # The answer may be late: the write may have another mark by now, or the membership may be over.
        if self._unsent is None or beat != self._mark.beat or not self._is_running:
            return
        send, self._unsent = self._unsent, None
        send(now_ns)

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
        """Send a request about this node's own record, one at a time. If the answer is lost, try again later."""
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
            # There was no answer. Reset what only an unbroken series of answers shows.
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
        """Return the `epochs` record; None if it is absent or unreadable."""
        return self._membership.read(EpochsRecord.read, items[0]) if items else None

    def _note(self, note: Note, text: str = "") -> None:
        self._membership.effects.append(Noted(note, text))


def _own_and_fleet(answer: TransactionAnswer) -> tuple[KeyValue | None, ...]:
    return tuple(items[0] if items else None for items in answer.found[:3])


def _revision(item: KeyValue | None) -> int:
    return item.mod_revision if item else 0
