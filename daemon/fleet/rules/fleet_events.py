"""Events that a fleet's member handles, and effects that it returns.

The process around the member turns what happens into events and carries the effects out in their order; it never
decides. All times are nanoseconds of CLOCK_BOOTTIME, which goes on while the host sleeps. The time given with an event
is read before it is handled, and an `Ask` is sent afterwards: so a request's time is never later
than its sending, and an answer's never earlier than its receipt.

Every `ClaimWanted` gets exactly one of `Claimed` and `ClaimRefused`, unless `ClaimDropped` came first. Every `Ask` gets
exactly one `Answered`; the process bounds the wait and answers Unknown. Every `EndClaimed` gets exactly one
`LiveClaims`, once the last claimed lease has ended and its memory is proved free; until then nothing is claimed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpulease.daemon.fleet.etcd.transactions import Outcome, Transaction

if TYPE_CHECKING:
    # The broker has these events too, and needs nothing of the extra `fleet` where it is in none.
    from gpulease.daemon.fleet.records.fleet_records import CardRecord, NodeRecord


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """Times that all nodes of a fleet agree on.

    Attributes:
        horizon_s: T: seconds that a claimed lease outlives its node's last beat, at most.
        rho: Largest error of a clock's rate: a clock's second lasts between 1/(1 + rho) and 1/(1 - rho) seconds.
    """

    horizon_s: float = 30.0
    rho: float = 0.01


@dataclass(frozen=True, slots=True)
class FleetIdentity:
    """The store that a node joined, remembered over restarts so that another in its place is noticed.

    Attributes:
        cluster_id: etcd's number of the cluster; 0: none was joined yet.
        generation: Text of the store's generation key; an operator renews it after etcd was restored from a backup.
        revision: A revision that the store had reached. Revisions never fall, unless a backup was restored.
        epoch_base: A claim's epoch is the sum of this and its revision.
        is_restored: The store was found to be an earlier state of itself: it is joined once its generation is another.
    """

    cluster_id: int = 0
    generation: str = ""
    revision: int = 0
    epoch_base: int = 0
    is_restored: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What tells the records that a daemon wrote under its node's id from those of every other daemon.

    The daemon's journal has the mark before a beat is asked. So who finds a record that its mark does not cover has a
    copy of that journal, or an earlier state of it.

    Attributes:
        beat: Number of the last beat that was asked.
        run: Instance of the process that asked it.
        entered: Nonce of the record with which that process went on; "": it wrote the record itself.
    """

    beat: int = 0
    run: str = ""
    entered: str = ""

    def covers(self, record: "NodeRecord") -> bool:
        """Return whether the daemon with this mark wrote a record, as far as records tell that."""
        if not self.run:
            return False
        if record.nonce == self.entered:
            return True
        return record.nonce.rpartition("-")[0] == self.run and record.beat <= self.beat


DEFAULT_TERMS: Final = FleetTerms()
NO_IDENTITY: Final = FleetIdentity()
"""The identity of no store: this node has never joined one."""
NO_MARK: Final = Mark()
"""The mark of a daemon that has never beaten."""


class Why(Enum):
    """Reasons for which a claim is refused."""

    TAKEN = "taken"
    """Other leases, here or at other nodes, have the name or the quota's bytes."""
    ISOLATED = "isolated"
    """This node is not a member now, or etcd has not acknowledged a beat within the horizon."""
    UNKNOWN = "unknown"
    """etcd's answer was lost. The claim, if it was made, is deleted once it is seen."""
    REJECTED = "rejected"
    """etcd refused to write: it has no space, or this node may not write there."""
    STALE = "stale"
    """etcd is another store than the one that was joined; an operator must act."""
    BUSY = "busy"
    """Too many claims wait at this node."""
    NO_QUOTA = "no_quota"
    """An operator has to set the tenant's quota in the fleet."""
    TOO_LARGE = "too_large"
    """More bytes are wanted than the tenant's quota in the fleet has."""


class Reason(Enum):
    """Reasons for which all claimed leases of a node end."""

    FENCED = "fenced"
    """Another node removed this one from the fleet, because it was silent for more than a horizon."""
    FORGOTTEN = "forgotten"
    """The daemon has claimed leases, but does not know, or can't show, under which incarnation it claimed them."""
    LOST = "lost"
    """A claim of a living lease is no longer in etcd: somebody deleted it."""
    RESTORED = "restored"
    """etcd is another store than the one that was joined, or an earlier state of it."""
    PAUSED = "paused"
    """The machine was paused, and its clocks with it: they don't show that the horizon has passed."""
    RENEWED = "renewed"
    """An operator renewed the store's generation; the node joins anew."""


# --- events ---


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs. Nothing is asked before `LiveClaims` has come too."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The timer that was armed last is due; an early, late or second one does no harm."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A transaction has its outcome."""

    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LiveClaims:
    """The claimed leases that the broker has: told at the start, and in answer to each EndClaimed, then empty.

    A lease counts until its memory is proved free.

    Attributes:
        epochs: Epoch by name.
        quotas: Tenants of the leases that have bytes of a quota, by lease, in 32 hexadecimal digits.
    """

    epochs: Mapping[str, int] = field(default_factory=dict)
    quotas: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MarkKept:
    """The journal has the mark of that beat: it may be asked now."""

    beat: int


@dataclass(frozen=True, slots=True)
class ClaimWanted:
    """The broker asks for a name before it admits a lease.

    Attributes:
        request: Number of this request; no other open one has it.
        lease_id: The lease, in 32 hexadecimal digits.
        wait_until_ns: Until when to wait for a name that is taken; a time that has passed: one attempt.
    """

    request: int
    name: str
    lease_id: str
    tenant: str
    wait_until_ns: int = 0


@dataclass(frozen=True, slots=True)
class ClaimDropped:
    """Nobody waits for a claim any more. If it was made all the same, it is deleted."""

    request: int


@dataclass(frozen=True, slots=True)
class ClaimEnded:
    """A claimed lease has ended and its memory is proved free, or a claim that was given is not used."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """The node's record has other contents from the next beat on."""

    addresses: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    cards: "tuple[CardRecord, ...]" = ()
    is_draining: bool = False
    version: str = ""


@dataclass(frozen=True, slots=True)
class QuotaWanted:
    """The broker asks for bytes of a tenant's quota in the fleet before it admits a lease.

    It is answered by one QuotaGiven or QuotaRefused, unless QuotaDropped comes first.

    Attributes:
        lease_id: The lease, in 32 hexadecimal digits, never used before.
    """

    request: int
    tenant: str
    size_bytes: int
    lease_id: str
    wait_until_ns: int = 0


@dataclass(frozen=True, slots=True)
class QuotaDropped:
    """Nobody waits for a quota's bytes any more. If they were given all the same, they are given back."""

    request: int


@dataclass(frozen=True, slots=True)
class QuotaEnded:
    """A lease that had bytes of a quota has ended, and its memory is proved free."""

    tenant: str
    lease_id: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The machine was paused, and its clocks with it; it runs again.

    Attributes:
        missed_ns: For how long at least its clocks stood still; None: it was restored from a snapshot, or copied, so
            that another one may run with all that this process knows.
        instance: Another random text in place of the one that the process began with.
    """

    missed_ns: int | None
    instance: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """The daemon stops: beat no more, finish what is being deleted, and leave the fleet if nothing claimed is left."""


Event = (
    Started
    | TimerFired
    | Answered
    | LiveClaims
    | MarkKept
    | ClaimWanted
    | ClaimDropped
    | ClaimEnded
    | RecordChanged
    | QuotaWanted
    | QuotaDropped
    | QuotaEnded
    | Paused
    | Stopping
)


# --- effects ---


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a transaction, and answer with its number."""

    number: int
    transaction: Transaction


@dataclass(frozen=True, slots=True)
class Compact:
    """Take etcd's history before that revision away. Whatever becomes of it, a later one takes more."""

    revision: int


@dataclass(frozen=True, slots=True)
class ArmTimer:
    """Send TimerFired at this time. There is one timer: the last order counts."""

    due_ns: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The node is a member. Keep all for the next process: it goes on without ending claimed leases."""

    identity: FleetIdentity
    incarnation: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class Remembered:
    """Keep the store's identity as of now, for the next process."""

    identity: FleetIdentity


@dataclass(frozen=True, slots=True)
class KeepMark:
    """Keep the mark for the next process, and send MarkKept once it is durable."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class MoveHorizon:
    """Claimed leases may live until then, and no longer; a horizon never moves back.

    Attributes:
        incarnation: The create revision of the node's record.
    """

    horizon_ns: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class EndClaimed:
    """End all claimed leases at once, and send LiveClaims when the memory of all is proved free.

    Claims that were granted before this effect count, also those that the broker has not admitted yet.
    """

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """The name is this node's under that epoch, which is above all earlier epochs of the name."""

    request: int
    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The name was not given.

    Attributes:
        text: Whose fault it is and what to do, for the tenant.
        retry_after_ms: When to ask again.
    """

    request: int
    why: Why
    text: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class QuotaGiven:
    """The bytes are the lease's until QuotaEnded. The lease is a claimed one: it ends at the horizon."""

    request: int
    tenant: str
    lease_id: str


@dataclass(frozen=True, slots=True)
class QuotaRefused:
    """No bytes were given; the members are those of ClaimRefused."""

    request: int
    why: Why
    text: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer to Stopping: nothing is under way any more.

    Attributes:
        has_left: The node's record is gone, and no claim is left. The next process joins as a new member.
    """

    has_left: bool


class Note(Enum):
    """Kinds of facts for the log and the metrics."""

    JOINED = "joined"
    BEAT = "beat"
    BEAT_UNKNOWN = "beat_unknown"
    REJECTED = "rejected"
    ISOLATED = "isolated"
    FENCED = "fenced"
    """This node was fenced."""
    FENCED_OTHER = "fenced_other"
    """This node fenced another; `node_id` names it."""
    ORPHAN_DELETED = "orphan_deleted"
    CLOCK = "clock"
    """This node's clock runs faster or slower than the others', by what they say; without text it does not any more."""
    FAULT = "fault"
    """An answer could not be handled, by a fault of the daemon's own; it counts as lost."""
    TWIN = "twin"
    """Another daemon joined under this node's id."""
    NOT_COMPACTED = "not_compacted"
    """etcd did not let this node take its history away."""
    REFUSED = "refused"
    """This node stays out of the fleet until an operator acts; `text` says why."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A fact for the log and the metrics."""

    note: Note
    text: str = ""
    node_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class RecordsUnreadable:
    """Values in etcd could not be read.

    Attributes:
        count: Those that were met since the member began.
        text: What an operator should know of those that are there now; "" if none is.
    """

    count: int
    text: str


Effect = (
    Ask
    | Compact
    | ArmTimer
    | Joined
    | Remembered
    | KeepMark
    | MoveHorizon
    | EndClaimed
    | Claimed
    | ClaimRefused
    | QuotaGiven
    | QuotaRefused
    | Stopped
    | Noted
    | RecordsUnreadable
)
