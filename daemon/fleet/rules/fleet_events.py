"""The events that `Member` handles, and the effects that it returns.

The fleet process passes events to the member and executes its effects in order. Events from the broker and effects for
the broker are also the messages between the two processes (`fleet/fleet_messages.py`).

All times are nanoseconds of CLOCK_BOOTTIME, which continues while the host sleeps. The time of a request is at or
before its sending, and the time of an answer is at or after its receipt.

Every `ClaimWanted` gets exactly one `ClaimGiven` or `ClaimRefused`, unless `ClaimDropped` comes first. Every `Ask` gets
exactly one `Answered`, with the outcome Unknown if etcd does not answer in time. Every `EndClaimed` gets exactly one
`LiveClaims`, when the last claimed lease has ended and its memory is proved free. Until then the member claims nothing.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Annotated, ClassVar, Final

from gpulease.daemon.contract.message_fields import (
    FLAG,
    TEXT,
    U64,
    Flag,
    LeaseText,
    Message,
    Request,
    Text,
    listed,
    mapped,
    nested,
    one_of,
    row,
)
from gpulease.daemon.fleet.etcd.transactions import Outcome, Transaction
from gpulease.daemon.fleet.records.fleet_records import CardRecord, NodeRecord
from gpulease.protocol.fast_dataclass import dataclass

MAX_ADDRESSES: Final = 256
"""Maximum number of addresses of one node in a message. A daemon listens on only a few."""

MAX_LABELS: Final = 1_024
"""Maximum number of labels of one node in a message."""

MAX_CARDS: Final = 1_024
"""Maximum number of cards of one node in a message, far more than 16 cards with 7 partitions each."""

Number = Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """Times that all nodes of a fleet agree on.

    Attributes:
        horizon_s: The horizon T: maximum seconds for which a claimed lease lives after its node's last heartbeat.
        rho: Maximum error of a clock's rate. A clock's second lasts between 1/(1 + rho) and 1/(1 - rho) seconds.
    """

    horizon_s: float = 30.0
    rho: float = 0.01


@dataclass(frozen=True, slots=True)
class FleetIdentity(Message):
    """The store that a node joined. The journal keeps it, so that the node notices if another store replaces it.

    Attributes:
        cluster_id: etcd's number for the cluster; 0 if the node has not joined a store yet.
        generation: Text of the store's generation key. An operator renews it after restoring etcd from a backup.
        revision: A revision that the store had reached. Revisions never fall, unless a backup was restored.
        epoch_base: A claim's epoch is this number plus the claim's revision.
        is_restored: Whether the store was found to be in an earlier state. The node joins it only after its generation
            has changed.
    """

    cluster_id: Number = 0
    generation: Text = ""
    revision: Number = 0
    epoch_base: Number = 0
    is_restored: Flag = False


@dataclass(frozen=True, slots=True)
class DaemonMark(Message):
    """Distinguishes this daemon's records under its node's id from those of other daemons with the same id.

    The journal has the mark before the join or heartbeat with its number is sent. So if a daemon finds a record with a
    higher number than its mark, its journal is a copy or an earlier state.

    Attributes:
        beat: Number of the last join or heartbeat that was sent; both count.
        run: Instance of the process that sent it.
        entered: Nonce of the record with which that process continued a membership; "" if it wrote the record itself.
    """

    beat: Number = 0
    run: Text = ""
    entered: Text = ""

    def covers(self, record: NodeRecord) -> bool:
        """Return whether the daemon with this mark wrote the record."""
        if not self.run:
            return False
        if record.nonce == self.entered:
            return True
        return record.nonce.rpartition("-")[0] == self.run and record.beat <= self.beat


DEFAULT_TERMS: Final = FleetTerms()
NO_IDENTITY: Final = FleetIdentity()
"""A node that has never joined a store."""
NO_MARK: Final = DaemonMark()
"""A daemon that has never sent a join."""


class ClaimRefusal(Enum):
    TAKEN = "taken"
    """Other leases, on this node or another, have the name or the quota's bytes."""
    ISOLATED = "isolated"
    """This node is not a member now, or etcd has not acknowledged a heartbeat within the horizon."""
    UNKNOWN = "unknown"
    """etcd's answer was lost. If the claim was made, the node deletes it when it finds it in etcd."""
    REJECTED = "rejected"
    """etcd refused to write: it is out of space, or this node may not write there."""
    STALE = "stale"
    """etcd is another store than the joined one. An operator must act."""
    BUSY = "busy"
    """Too many claims wait at this node."""
    NO_QUOTA = "no_quota"
    """An operator has to set the tenant's quota in the fleet."""
    TOO_LARGE = "too_large"
    """The request exceeds the tenant's quota in the fleet."""


class Reason(Enum):
    """Reasons why all claimed leases of a node end."""

    FENCED = "fenced"
    """Another node removed this one from the fleet, because it was silent for longer than a horizon."""
    FORGOTTEN = "forgotten"
    """The daemon has claimed leases, but can't show in which incarnation they were claimed."""
    LOST = "lost"
    """A living lease's claim was deleted from etcd."""
    RESTORED = "restored"
    """etcd is another store than the joined one, or an earlier state of it."""
    PAUSED = "paused"
    """The machine's clocks were paused, so the deadline may have passed."""
    RENEWED = "renewed"
    """An operator renewed the store's generation. The node rejoins."""


_CARD: Final = row(
    CardRecord, uuid=TEXT, name=TEXT, capacity_bytes=U64, largest_bytes=U64, leases=U64, is_partition=FLAG
)


# --- events ---


@dataclass(frozen=True, slots=True)
class Started:
    """The process has started. The member sends nothing until it has also received `LiveClaims`."""


@dataclass(frozen=True, slots=True)
class FleetTimerFired:
    """The last timer is due. The member checks the time, so this event may come early, late or repeatedly."""


@dataclass(frozen=True, slots=True)
class Answered:
    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LiveClaims:
    """The broker's claimed leases. Sent at the start with all of them, and empty as the answer to EndClaimed.

    A lease is included until its memory is proved free.

    Attributes:
        epochs: Epochs by name.
        quotas: Tenants of the leases that use quota bytes, by lease, in 32 hexadecimal digits.
    """

    epochs: Mapping[str, int] = field(default_factory=dict)
    quotas: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MarkKept(Message):
    """The journal has the mark of this join or heartbeat, so the member may send it."""

    OP: ClassVar[str] = "mark_kept"
    beat: Number


@dataclass(frozen=True, slots=True)
class ClaimWanted(Message):
    """The broker asks for a name before it admits a lease.

    Attributes:
        request: Number of this request, unique among open ones.
        lease_id: The lease, in 32 hexadecimal digits.
        wait_until_ns: Until when to wait if the name is taken. If this is in the past, one attempt is made.
    """

    OP: ClassVar[str] = "claim"
    request: Request
    name: Text
    lease_id: LeaseText
    tenant: Text
    wait_until_ns: Number = 0


@dataclass(frozen=True, slots=True)
class ClaimDropped(Message):
    """The broker no longer waits for a claim. If the claim succeeds anyway, the member deletes it."""

    OP: ClassVar[str] = "drop"
    request: Request


@dataclass(frozen=True, slots=True)
class ClaimEnded(Message):
    """A claimed lease has ended and its memory is proved free, or the broker does not use the claim."""

    OP: ClassVar[str] = "ended"
    name: Text
    epoch: Number


@dataclass(frozen=True, slots=True)
class RecordChanged(Message):
    """The node's record has new contents from the next heartbeat on."""

    OP: ClassVar[str] = "record"
    addresses: Annotated[tuple[str, ...], listed(TEXT, MAX_ADDRESSES)] = ()
    labels: Annotated[Mapping[str, str], mapped(TEXT, TEXT, MAX_LABELS)] = field(default_factory=dict)
    cards: Annotated[tuple[CardRecord, ...], listed(_CARD, MAX_CARDS)] = ()
    is_draining: Flag = False
    version: Text = ""


@dataclass(frozen=True, slots=True)
class QuotaWanted(Message):
    """The broker asks for bytes of a tenant's quota in the fleet before it admits a lease.

    The broker gets one QuotaGiven or QuotaRefused, unless QuotaDropped comes first.

    Attributes:
        lease_id: The lease, in 32 hexadecimal digits, never used before.
    """

    OP: ClassVar[str] = "count"
    request: Request
    tenant: Text
    size_bytes: Number
    lease_id: LeaseText
    wait_until_ns: Number = 0


@dataclass(frozen=True, slots=True)
class QuotaDropped(Message):
    """The broker no longer waits for quota bytes. If the member gets them anyway, it returns them."""

    OP: ClassVar[str] = "drop_count"
    request: Request


@dataclass(frozen=True, slots=True)
class QuotaEnded(Message):
    """A lease with quota bytes has ended, and its memory is proved free."""

    OP: ClassVar[str] = "give_back"
    tenant: Text
    lease_id: LeaseText


@dataclass(frozen=True, slots=True)
class Paused:
    """The machine and its clocks were paused, and now run again.

    Attributes:
        missed_ns: The minimum time for which the clocks stopped; None if the machine was restored from a snapshot or
            copied. Then another machine may run with the same state.
        instance: A new random text that replaces the one from the process's start.
    """

    missed_ns: int | None
    instance: str


@dataclass(frozen=True, slots=True)
class Stopping(Message):
    """The daemon stops. Send no more heartbeats, finish deletions, and leave the fleet if no claims remain."""

    OP: ClassVar[str] = "stop"


Event = (
    Started
    | FleetTimerFired
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
    """Send a transaction, and send Answered with its number."""

    number: int
    transaction: Transaction


@dataclass(frozen=True, slots=True)
class Compact:
    """Remove etcd's history before this revision. If this fails, a later Compact does it."""

    revision: int


@dataclass(frozen=True, slots=True)
class ArmFleetTimer:
    """Send FleetTimerFired at this time. A new ArmFleetTimer replaces an earlier one."""

    due_ns: int


@dataclass(frozen=True, slots=True)
class Joined(Message):
    """The node is a member.

    The broker stores all fields for the next process, which then continues without ending claimed leases.
    """

    OP: ClassVar[str] = "joined"
    identity: Annotated[FleetIdentity, nested(FleetIdentity)]
    incarnation: Number
    mark: Annotated[DaemonMark, nested(DaemonMark)]


@dataclass(frozen=True, slots=True)
class Remembered(Message):
    """Store the present identity of etcd's store for the next process."""

    OP: ClassVar[str] = "remembered"
    identity: Annotated[FleetIdentity, nested(FleetIdentity)]


@dataclass(frozen=True, slots=True)
class KeepMark(Message):
    """Store the mark for the next process, and send MarkKept when it is durable."""

    OP: ClassVar[str] = "mark"
    mark: Annotated[DaemonMark, nested(DaemonMark)]


@dataclass(frozen=True, slots=True)
class MoveHorizon(Message):
    """Set the deadline of all claimed leases. The deadline never becomes earlier.

    Attributes:
        incarnation: The create revision of the node's record.
    """

    OP: ClassVar[str] = "horizon"
    horizon_ns: Number
    incarnation: Number


@dataclass(frozen=True, slots=True)
class EndClaimed(Message):
    """End all claimed leases at once, and send LiveClaims when the memory of all of them is proved free.

    This includes claims that were given before this effect, even if the broker has not admitted their leases yet.
    """

    OP: ClassVar[str] = "lost"
    reason: Annotated[Reason, one_of(Reason)]
    text: Text


@dataclass(frozen=True, slots=True)
class ClaimGiven(Message):
    """This node has the name, under an epoch that is above all earlier epochs of the name."""

    OP: ClassVar[str] = "claimed"
    request: Request
    name: Text
    epoch: Number


@dataclass(frozen=True, slots=True)
class ClaimRefused(Message):
    """The claim failed.

    Attributes:
        text: The cause and what to do, for the tenant.
        retry_after_ms: When to ask again.
    """

    OP: ClassVar[str] = "refused"
    request: Request
    why: Annotated[ClaimRefusal, one_of(ClaimRefusal)]
    text: Text
    retry_after_ms: Number


@dataclass(frozen=True, slots=True)
class QuotaGiven(Message):
    """The bytes belong to the lease until QuotaEnded. Like a claimed lease, it ends at the deadline."""

    OP: ClassVar[str] = "counted"
    request: Request
    tenant: Text
    lease_id: LeaseText


@dataclass(frozen=True, slots=True)
class QuotaRefused(Message):
    """The lease gets no bytes. The fields are those of ClaimRefused."""

    OP: ClassVar[str] = "not_counted"
    request: Request
    why: Annotated[ClaimRefusal, one_of(ClaimRefusal)]
    text: Text
    retry_after_ms: Number


@dataclass(frozen=True, slots=True)
class Stopped(Message):
    """The answer to Stopping: no request to etcd is in progress.

    Attributes:
        has_left: Whether the node's record was deleted and no claim remains. Then the next process joins as a new
          member.
    """

    OP: ClassVar[str] = "stopped"
    has_left: Flag


class Note(Enum):
    """Kinds of facts for the log and the metrics."""

    JOINED = "joined"
    BEAT = "beat"
    BEAT_UNKNOWN = "beat_unknown"
    REJECTED = "rejected"
    ISOLATED = "isolated"
    FENCED = "fenced"
    FENCED_OTHER = "fenced_other"
    """This node fenced another, named by `node_id`."""
    ORPHAN_DELETED = "orphan_deleted"
    CLOCK = "clock"
    """This node's clock is faster or slower than the other nodes' clocks; without text, it is right again."""
    FAULT = "fault"
    """A bug prevented the daemon from handling an answer. The answer counts as lost."""
    DUPLICATE_NODE_ID = "twin"
    """Another daemon joined with this node's id."""
    NOT_COMPACTED = "not_compacted"
    """etcd did not let this node remove its history."""
    REFUSED = "refused"
    """This node stays out of the fleet until an operator acts; `text` says why."""


@dataclass(frozen=True, slots=True)
class Noted(Message):
    OP: ClassVar[str] = "noted"
    note: Annotated[Note, one_of(Note)]
    text: Text = ""
    node_id: Text = ""
    name: Text = ""


@dataclass(frozen=True, slots=True)
class RecordsUnreadable(Message):
    """Values in etcd could not be read.

    Attributes:
        count: Number of unreadable values since the member began.
        text: A text for operators about the values that are unreadable now; "" if there are none.
    """

    OP: ClassVar[str] = "unreadable"
    count: Number
    text: Text


Effect = (
    Ask
    | Compact
    | ArmFleetTimer
    | Joined
    | Remembered
    | KeepMark
    | MoveHorizon
    | EndClaimed
    | ClaimGiven
    | ClaimRefused
    | QuotaGiven
    | QuotaRefused
    | Stopped
    | Noted
    | RecordsUnreadable
)
