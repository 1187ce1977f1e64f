"""Leases, regions, submits and warm contexts: their ids, states and terms, and the transitions of leases and regions.

1. A lease is PENDING while its worker starts and ACTIVE once the worker is ready. Any end makes it DRAINING. It becomes
   TORNDOWN once its bytes are proved free, or FENCED if they could not be proved free.
2. A lease keeps the first cause that ended it.
3. No transition leads back: no state before DRAINING is entered again, and only an operator releases a FENCED lease.
4. A step that is missing in `TRANSITIONS` or `REGION_TRANSITIONS` raises `InvalidTransition` with the recorded history.

States, causes and triggers are hashed by identity, because Enum's own hash function costs a Python call for each step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from gpulease.daemon.leases.park_state import ParkState
from gpulease.protocol import fast_dataclass
from gpulease.protocol.failures import LEASE_ENDS
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_options import LATENCY, WEIGHT, LeaseOptions
from gpulease.protocol.opcodes import Exclusivity
from gpulease.protocol.session_words import RegionWord
from gpulease.protocol.time_units import NS_PER_MS

# --- ids ---

FIRST_WARM_ID: Final = 1 << 128
"""Ids of warm contexts begin here, above every lease id, which is a u128."""

FIRST_LEFTOVER_ID: Final = FIRST_WARM_ID + (1 << 127)
"""Workers that an earlier daemon's leases left behind are held as warm contexts. Their ids begin here, above the ids
that the earlier daemon's own warm contexts can have."""

FIRST_SUBMIT_ID: Final = 1 << 129
"""Ids of submits begin here, above those of warm contexts."""


class WorkerKind(Enum):
    """Kinds of workers: a lease's session, a warm context of the pool, a lease's submit."""

    __hash__ = object.__hash__

    LEASE = "lease"
    WARM = "warm"
    SUBMIT = "submit"


def kind_of(worker_id: int) -> WorkerKind:
    """Return the kind of the worker with that id. Workers, timers and proofs of all kinds share one range of ids."""
    if worker_id < FIRST_WARM_ID:
        return WorkerKind.LEASE
    return WorkerKind.WARM if worker_id < FIRST_SUBMIT_ID else WorkerKind.SUBMIT


# --- leases ---


class LeaseState(Enum):
    __hash__ = object.__hash__

    PENDING = "pending"
    ACTIVE = "active"
    DRAINING = "draining"
    TORNDOWN = "torndown"
    FENCED = "fenced"


class RegionState(Enum):
    """States of a region.

    A region is OPENING until the worker has mapped it, and ACTIVE until the first cause that ends it. Then it is
    REVOKED, EXPIRED or FREED until no work of the session can reach its memory, FENCED until that memory is proved
    free, and finally RETURNED. So every region that ends is FENCED for a time; `TableRegion.is_given_up` marks a
    lasting fence, like a lease's.
    """

    __hash__ = object.__hash__

    OPENING = "opening"
    ACTIVE = "active"
    REVOKED = "revoked"
    EXPIRED = "expired"
    FREED = "freed"
    FENCED = "fenced"
    RETURNED = "returned"


class CauseRow(NamedTuple):
    """The rules for the end of a lease or region, by its cause.

    Attributes:
        ends_pending: Whether it can end a lease that is not granted yet.
        ends_active: Whether it can end a lease that is granted.
        region: The state that a region enters when it ends for this cause, whether or not its lease ends.
        grace_ms: How long kernels in flight may run after new work is refused, unless a setting says otherwise: 0 if
            the tenant has finished, or nothing is left that could finish. None: always 0, whatever the settings,
            because another node may soon serve the name.
        is_warned: Whether the log reports the end as a warning, because the daemon ended a session that still ran and
            no earlier line has warned of that.
        is_time_limit: Whether a submit that ends for this cause took too much time.
    """

    ends_pending: bool = False
    ends_active: bool = True
    region: RegionState = RegionState.REVOKED
    grace_ms: int | None = 0
    is_warned: bool = False
    is_time_limit: bool = False


_FROM_ACTIVE: Final = CauseRow()


class Cause(Enum):
    """Reasons for which a lease ends.

    The values are in the journal, audit log, settings and labels of metrics, so they never change. `LEASE_ENDS` in
    `protocol/failures.py` has the status and the words of each.
    """

    __hash__ = object.__hash__
    _value_: str
    row: CauseRow

    # The default shows type checkers that `Cause(name)` looks up a member.
    def __new__(cls, name: str, row: CauseRow = _FROM_ACTIVE) -> "Cause":
        member = object.__new__(cls)
        member._value_, member.row = name, row
        return member

    FREED = "freed", CauseRow(ends_pending=True, region=RegionState.FREED)
    EXPIRED = "expired", CauseRow(region=RegionState.EXPIRED, grace_ms=20)
    REVOKED = "revoked", CauseRow(ends_pending=True, grace_ms=20)
    FAULTED = "faulted", _FROM_ACTIVE
    WORKER_DIED = "worker_died", _FROM_ACTIVE
    SPAWN_FAILED = "spawn_failed", CauseRow(ends_pending=True, ends_active=False, region=RegionState.FREED)
    ABANDONED = "abandoned", CauseRow(ends_pending=True, ends_active=False, region=RegionState.FREED)
    SHUTDOWN = "shutdown", CauseRow(ends_pending=True, grace_ms=20)
    OVER_SLICE = "over_slice", _FROM_ACTIVE
    UNMEASURED = "unmeasured", _FROM_ACTIVE
    KERNEL_TIMEOUT = "kernel_timeout", CauseRow(is_warned=True, is_time_limit=True)
    UNRESPONSIVE = "unresponsive", CauseRow(is_warned=True)
    DRAINED = "drained", CauseRow(ends_pending=True, grace_ms=20)
    LOAD_TIMEOUT = "load_timeout", CauseRow(is_warned=True, is_time_limit=True)
    ORPHANED = "orphaned", _FROM_ACTIVE
    ISOLATED = "isolated", CauseRow(ends_pending=True, grace_ms=None)


if mismatched := {cause.value for cause in Cause} ^ LEASE_ENDS.keys():
    raise TypeError(f"LEASE_ENDS must have exactly one row per cause: {sorted(mismatched)} differ")


class Trigger(Enum):
    """Steps of a lease or region other than causes.

    RENEWED is recorded in the history and does not change the state.
    """

    __hash__ = object.__hash__

    WORKER_READY = "worker_ready"
    RECLAIM_PROVED = "reclaim_proved"
    RECLAIM_FAILED = "reclaim_failed"
    FENCE_CLEARED = "fence_cleared"
    RENEWED = "renewed"
    REGION_OPENED = "region_opened"
    REGION_TAKEN = "region_taken"


TRANSITIONS: Final[Mapping[tuple[LeaseState, Trigger | Cause], LeaseState]] = MappingProxyType(
    {
        # PENDING: the grant, or an end before it.
        (LeaseState.PENDING, Trigger.WORKER_READY): LeaseState.ACTIVE,
        **{(LeaseState.PENDING, cause): LeaseState.DRAINING for cause in Cause if cause.row.ends_pending},
        # ACTIVE: a renewal, or any of the ends.
        (LeaseState.ACTIVE, Trigger.RENEWED): LeaseState.ACTIVE,
        **{(LeaseState.ACTIVE, cause): LeaseState.DRAINING for cause in Cause if cause.row.ends_active},
        # DRAINING: its bytes are proved free, or not. Only an operator can release a FENCED lease.
        (LeaseState.DRAINING, Trigger.RECLAIM_PROVED): LeaseState.TORNDOWN,
        (LeaseState.DRAINING, Trigger.RECLAIM_FAILED): LeaseState.FENCED,
        (LeaseState.FENCED, Trigger.FENCE_CLEARED): LeaseState.TORNDOWN,
    }
)


ENDED_REGIONS: Final = frozenset(cause.row.region for cause in Cause)
"""States of regions that have ended while the worker may still have their memory."""

REGION_TRANSITIONS: Final[Mapping[tuple[RegionState, Trigger | Cause], RegionState]] = MappingProxyType(
    {
        # A region that is still opening may end for any cause, an active one only for causes that concern open regions.
        (RegionState.OPENING, Trigger.REGION_OPENED): RegionState.ACTIVE,
        **{(RegionState.OPENING, cause): cause.row.region for cause in Cause},
        (RegionState.ACTIVE, Trigger.RENEWED): RegionState.ACTIVE,
        **{(RegionState.ACTIVE, cause): cause.row.region for cause in Cause if cause.row.ends_active},
        # No work of the session can reach its memory any more; only the card's proof is missing.
        (RegionState.REVOKED, Trigger.REGION_TAKEN): RegionState.FENCED,
        (RegionState.EXPIRED, Trigger.REGION_TAKEN): RegionState.FENCED,
        (RegionState.FREED, Trigger.REGION_TAKEN): RegionState.FENCED,
        (RegionState.FENCED, Trigger.RECLAIM_PROVED): RegionState.RETURNED,
        (RegionState.FENCED, Trigger.FENCE_CLEARED): RegionState.RETURNED,
    }
)


class TransitionRecord(NamedTuple):
    """A recorded transition of a lease or region, at the monotonic time `at_ns`."""

    at_ns: int
    start: LeaseState | RegionState
    trigger: Trigger | Cause
    finish: LeaseState | RegionState
    generation: int

    def __str__(self) -> str:
        return (
            f"{self.at_ns} ns: {self.start.value} -> {self.finish.value}"
            f" by {self.trigger.value} (generation {self.generation})"
        )


class InvalidTransition(Exception):
    """A step that is missing in the transitions, which is a bug in the lease table or in the broker.

    Attributes:
        lease_id: The lease or region.
        state: The state it was in.
        trigger: Trigger or cause of the refused step.
        history: Its recorded transitions, oldest first.
    """

    def __init__(
        self,
        lease_id: int,
        state: LeaseState | RegionState,
        trigger: Trigger | Cause,
        history: tuple[TransitionRecord, ...],
    ) -> None:
        super().__init__(lease_id, state, trigger, history)
        self.lease_id = lease_id
        self.state = state
        self.trigger = trigger
        self.history = history

    def __str__(self) -> str:
        steps = "; ".join(str(entry) for entry in self.history) or "nothing yet"
        return (
            f"Lease {self.lease_id:032x} is {self.state.value} and {self.trigger.value} leads nowhere from there."
            f" Its history: {steps}."
        )


AnyState = TypeVar("AnyState", LeaseState, RegionState)


def _follow(
    transitions: Mapping[tuple[AnyState, Trigger | Cause], AnyState],
    subject: "Lease | TableRegion",
    state: AnyState,
    trigger: Trigger | Cause,
    now_ns: int,
) -> AnyState:
    """Return the state to which `trigger` leads, and record the transition in the history of the lease or region.

    Raises:
        InvalidTransition: The transitions have no such step.
    """
    next_state = transitions.get((state, trigger))
    history = subject.history
    lease_id = subject.lease_id if isinstance(subject, Lease) else subject.region_id
    if next_state is None:
        raise InvalidTransition(lease_id, state, trigger, tuple(history))
    # Bound the history, so that a lease that is renewed every second does not grow without end: drop the oldest entry.
    if len(history) >= subject.max_story_entries:
        del history[0]
    history.append(TransitionRecord(now_ns, state, trigger, next_state, subject.generation))
    return next_state


# The two classes that give a lease a card or a partition to itself.
ALONE: Final = frozenset({Exclusivity.DEVICE_EXCLUSIVE, Exclusivity.PARTITION_EXCLUSIVE})


@fast_dataclass.dataclass(frozen=True, slots=True)
class LeaseTerms(LeaseOptions):
    """The terms of one lease, carried by the request, the lease, the journal's row and the order to start a worker.

    `LeaseOptions` describes the options that the tenant may choose in addition to size and time. Placement fills in the
    node's default for an `orphan_ms` of None.

    Attributes:
        size_bytes: Bytes that the tenant may allocate. Each context's overhead is charged in addition.
        ttl_ms: The last requested time to live. It counts from the moment the worker is ready, or from the renewal.
        epoch: Number of the name's claim; 0 without a name.
        fleet_bytes: Bytes claimed for it from the tenant's quota in the fleet; 0 if it counts against no quota.
    """

    size_bytes: int
    ttl_ms: int
    epoch: int = field(default=0, kw_only=True)
    fleet_bytes: int = field(default=0, kw_only=True)

    @property
    def is_claimed(self) -> bool:
        """Return whether the lease is recorded in the fleet, so that it ends at the membership deadline."""
        return bool(self.name) or self.fleet_bytes > 0

    @property
    def contexts(self) -> int:
        """Number of contexts charged to the lease: 2 if memory is reserved for submits, otherwise 1."""
        return 2 if self.submit_bytes else 1

    @property
    def is_parkable(self) -> bool:
        """Return whether the session's bytes may leave the card while the session is idle."""
        return self.park_idle_ms is not None

    @property
    def session_bytes(self) -> int:
        """Bytes of the session, without those reserved for submits."""
        return self.size_bytes - self.submit_bytes


class LeaseSnapshot(NamedTuple):
    """State of one lease at one moment; all times are monotonic nanoseconds.

    A tuple rather than a dataclass, because each event makes several.

    Attributes:
        cause: Why it ended; None before its end.
        reason: A description of the cause; "" without a cause.
        fault: Message of the worker that lost its context; "" if none did.
        deadline_ns: Time at which it expires; None until the worker is ready.
        ended_ns: Time at which the lease was torn down or fenced.
        ttl_ms: The last requested time to live.
        parent_id: For a region, the lease that contains it; 0 for a lease of a card.
        name: Name that exists once in the fleet; "" without one.
        epoch: Number of the name's claim; 0 without a name.
        fleet_bytes: Bytes claimed for it from the tenant's quota in the fleet; 0: none.
        weight: Its weight when the card's time is shared.
        latency: Whether the card's other sessions hold back for it.
    """

    lease_id: int
    tenant: str
    card_uuid: str
    size_bytes: int
    exclusivity: Exclusivity
    generation: int
    state: LeaseState
    cause: Cause | None
    reason: str
    fault: str
    created_ns: int
    deadline_ns: int | None
    ended_ns: int | None
    ttl_ms: int
    parent_id: int = 0
    name: str = ""
    epoch: int = 0
    fleet_bytes: int = 0
    weight: int = WEIGHT.default
    latency: bool = LATENCY.default


class MembershipDeadline(NamedTuple):
    """The membership deadline, until which a node may serve claimed leases, on two clocks.

    Attributes:
        at_ns: The time on the monotonic clock, which the table's timers use. If the host has slept, this time is too
            late.
        boot_ns: The time on CLOCK_BOOTTIME, which keeps running while the host sleeps.
    """

    at_ns: int
    boot_ns: int


@dataclass(frozen=True, slots=True)
class SubmitRequested:
    """A tenant, or the bearer of its token, asks to run one kernel alongside the session; see `submits`.

    Attributes:
        timeout_ms: Longest run of the submit once it is ready.
    """

    request: int
    lease_id: int
    tenant: str
    timeout_ms: int


@dataclass(slots=True)
class Lease:
    """A live lease in the table; only the core's own modules change it.

    Attributes:
        terms: Terms of the acquire; a renewal changes the time to live.
        charge_bytes: Bytes held on the card: the size plus the overhead of each context.
        request: Number of the acquire that waits for the worker; meaningless once it is answered.
        warm_id: Id of the warm context that the lease took over; 0 if none.
        served: Number of earlier leases of the same tenant that this context served.
        is_in_doubt: Whether a client other than the tenant has used the session, or some of its memory was not proved
            free.
        is_scrubbing: Whether the tenant has freed the lease and the worker may still return to the pool.
        awaited_bytes: The part of the charge that warm contexts must free first; 0 once the worker was ordered to use
          it.
        grace_due_ns: Time at which the worker is killed; None without a grace.
        reclaim_due_ns: Time at which the slice is fenced unless proved free; None before the reclaim.
        is_kill_sent: Whether the kill was ordered; it is not ordered again.
        is_worker_gone: Whether the worker's process was reaped, so that a proof of its bytes is valid.
        free_request: Free request to answer when the teardown is complete.
        revoke_requests: Revoke requests to answer when the teardown is complete.
        is_restored: Whether the lease comes from an earlier table, or holds the bytes of an earlier daemon's worker.
        unconnected_ns: Time since which the lease waits for a connection: the loss of the last one, or a later renewal.
          A daemon that took over the lease may set a later time. None while connected.
        has_session: Whether a client may have attached to the session, so that its memory stays until the lease ends.
        own_submit_bytes: Part of the charge held by a submit that runs in place of the session; 0 without one.
        extra_bytes: Part of the charge for this submit's context, lent by the card while the submit exists.
        submit_id: The submit with bytes that are not yet proved free; 0 if there is none.
        next_submit: The request that waits for that submit's bytes.
        last_submit: The last submit that ended with its bytes proved free, so that its client can ask how it ended.
        is_proved: Whether the bytes of the lease's own worker are proved free, while its submit's are not yet.
        regions: Its regions by id: those not yet returned, and those that still keep bytes in their place.
        slots: The regions that are not yet returned, by slot.
        region_bytes: Bytes of the session's slice that regions hold.
        region_number: Number of the last region opened; a region's number is never reused.
        resize: The change of size in progress; None without one.
        is_reshaped: Whether a region was opened in the lease or its slice was resized, so that its context serves no
            other lease.
        park: The parking state of its session; None if it is not parkable.
        wait_ms: Longest wait of its acquire for room, and of its session for room to return.
        membership_deadline: The time at which a claimed lease ends unless the deadline is moved; None without a
          claim, or before the grant.
    """

    # The acquire's request, and the place of the lease.
    lease_id: int
    tenant: str
    card_uuid: str
    terms: LeaseTerms
    charge_bytes: int
    request: int
    created_ns: int
    spawn_due_ns: int
    max_story_entries: int
    # The context that it runs on, and whether that context may serve another lease.
    warm_id: int = 0
    served: int = 0
    is_in_doubt: bool = False
    is_scrubbing: bool = False
    awaited_bytes: int = 0
    # Its state, and why it ended.
    generation: int = 1
    state: LeaseState = LeaseState.PENDING
    cause: Cause | None = None
    reason: str = ""
    fault: str = ""
    deadline_ns: int | None = None
    # Its teardown: the timers, and the steps that were taken.
    grace_due_ns: int | None = None
    reclaim_due_ns: int | None = None
    ended_ns: int | None = None
    is_kill_sent: bool = False
    is_worker_gone: bool = False
    # Its session and connections.
    is_restored: bool = False
    unconnected_ns: int | None = None
    has_session: bool = False
    # Its submits.
    own_submit_bytes: int = 0
    extra_bytes: int = 0
    submit_id: int = 0
    next_submit: SubmitRequested | None = None
    last_submit: "SubmitSnapshot | None" = None
    is_proved: bool = False
    # Its regions and its size.
    regions: "dict[int, TableRegion]" = field(default_factory=dict)
    slots: "dict[int, TableRegion]" = field(default_factory=dict)
    region_bytes: int = 0
    region_number: int = 0
    resize: "Resize | None" = None
    is_reshaped: bool = False
    # Its parking.
    park: ParkState | None = None
    wait_ms: int = 0
    # Its claim in the fleet, the requests that wait for its end, and its transitions.
    membership_deadline: MembershipDeadline | None = None
    free_request: int | None = None
    revoke_requests: list[int] = field(default_factory=list)
    history: list[TransitionRecord] = field(default_factory=list)

    def move(self, trigger: Trigger | Cause, now_ns: int) -> None:
        """Make the transition for `trigger` and record it.

        Raises:
            InvalidTransition: The table has no such step.
        """
        self.state = _follow(TRANSITIONS, self, self.state, trigger, now_ns)

    @property
    def submit_charge_bytes(self) -> int:
        """Bytes of the card that a submit of this lease may hold, including its context; 0 if none are reserved."""
        if self.own_submit_bytes:
            return self.own_submit_bytes
        # The lease is charged for two contexts of equal cost: the session's and the submit's.
        contexts_bytes = self.charge_bytes - self.terms.size_bytes
        return self.terms.submit_bytes + contexts_bytes // 2 if self.terms.submit_bytes else 0

    @property
    def region_room_bytes(self) -> int:
        """Bytes of the slice that all regions together may hold. During a resize, the smaller slice counts."""
        size_bytes = self.terms.size_bytes if self.resize is None else self.resize.least_bytes
        return size_bytes - self.terms.submit_bytes

    @property
    def orphan_ms(self) -> int:
        """Longest time without a connection before the lease ends; 0: no bound."""
        return self.terms.orphan_ms or 0

    @property
    def orphan_due_ns(self) -> int | None:
        """Time at which the lease ends for lack of a connection; None while connected, or without a bound."""
        if self.unconnected_ns is None or not self.orphan_ms:
            return None
        return self.unconnected_ns + self.orphan_ms * NS_PER_MS

    def is_expired(self, now_ns: int) -> bool:
        """Return whether the lease is ACTIVE past its deadline because its timer is late."""
        return self.state is LeaseState.ACTIVE and self.deadline_ns is not None and now_ns >= self.deadline_ns

    def serves(self, now_ns: int) -> bool:
        """Return whether the lease is ACTIVE, in time, and not isolated."""
        is_in_time = self.deadline_ns is None or now_ns < self.deadline_ns
        return self.state is LeaseState.ACTIVE and is_in_time and not self.is_isolated(now_ns)

    def is_isolated(self, now_ns: int) -> bool:
        """Return whether the lease is ACTIVE, claimed, and past its membership deadline."""
        if self.state is not LeaseState.ACTIVE or not self.terms.is_claimed:
            return False
        # Without a deadline the node is not a member, so another node may serve the name.
        return self.membership_deadline is None or now_ns >= self.membership_deadline.at_ns

    def snapshot(self) -> LeaseSnapshot:
        terms = self.terms
        # Pass the arguments by position: each event makes several snapshots, and arguments by name take twice as long.
        return LeaseSnapshot(
            self.lease_id,
            self.tenant,
            self.card_uuid,
            terms.size_bytes,
            terms.exclusivity,
            self.generation,
            self.state,
            self.cause,
            self.reason,
            self.fault,
            self.created_ns,
            self.deadline_ns,
            self.ended_ns,
            terms.ttl_ms,
            0,
            terms.name,
            terms.epoch,
            terms.fleet_bytes,
            terms.weight,
            terms.latency,
        )


# --- regions ---


@dataclass(slots=True)
class Resize:
    """A change of a lease's size.

    The lease is charged for the larger of both sizes until the card proves the smaller one.

    Attributes:
        request: Request to answer; None once answered.
        size_bytes: The requested size.
        least_bytes: The smaller of both sizes; once the worker has answered, the size that it set.
        due_ns: Time at which the request is answered in any case.
        is_answered: Whether the worker has answered, so that the card is being polled.
        doubt: Why the size is not the requested one; "" if it is.
    """

    request: int | None
    size_bytes: int
    least_bytes: int
    due_ns: int
    is_answered: bool = False
    doubt: str = ""


_REGION_WORDS: Final = {
    RegionState.REVOKED: RegionWord.REVOKED,
    RegionState.EXPIRED: RegionWord.EXPIRED,
    RegionState.FREED: RegionWord.FREED,
}


@dataclass(slots=True)
class TableRegion:
    """A region in the table: a lease inside the session of another lease. Only `Regions` changes it.

    Attributes:
        lease_id: The lease that contains it.
        card_uuid: That lease's card.
        exclusivity: That lease's exclusivity class.
        slot: Index of its word on the regions page.
        number: Distinguishes it from every other region of the lease.
        request: Request that waits for it to open; meaningless once answered.
        open_due_ns: Time at which an OPENING region is abandoned.
        address: Device address; 0 until it is open.
        end_due_ns: Time by which its memory must be removed; otherwise its session is condemned. After the removal, the
            time by which its bytes must be proved free; otherwise its fence becomes lasting. None in any other phase.
        kept_bytes: Bytes that stay mapped in its place after its end; meaningless before.
        is_cancelled: Whether launches that name it are refused until an operator or tenant accepts them again.
        is_given_up: Whether its memory was not proved free in time, so that its fence is lasting.
        free_request: Free request to answer when it is returned.
        revoke_requests: Revoke requests to answer when it is returned.
        is_restored: Whether it comes from an earlier table.
    """

    region_id: int
    lease_id: int
    tenant: str
    card_uuid: str
    exclusivity: Exclusivity
    size_bytes: int
    ttl_ms: int
    slot: int
    number: int
    request: int
    created_ns: int
    open_due_ns: int
    max_story_entries: int
    address: int = 0
    generation: int = 1
    state: RegionState = RegionState.OPENING
    cause: Cause | None = None
    reason: str = ""
    deadline_ns: int | None = None
    end_due_ns: int | None = None
    ended_ns: int | None = None
    kept_bytes: int = 0
    is_cancelled: bool = False
    is_given_up: bool = False
    is_restored: bool = False
    free_request: int | None = None
    revoke_requests: list[int] = field(default_factory=list)
    history: list[TransitionRecord] = field(default_factory=list)

    def move(self, trigger: Trigger | Cause, now_ns: int) -> None:
        """Make the transition for `trigger` and record it.

        Raises:
            InvalidTransition: The transitions have no such step.
        """
        self.state = _follow(REGION_TRANSITIONS, self, self.state, trigger, now_ns)

    @property
    def charge_bytes(self) -> int:
        """Bytes of the session's slice that the region holds."""
        # Until the end is proved, the region holds all of its bytes, even if they are unmapped.
        return self.kept_bytes if self.state is RegionState.RETURNED else self.size_bytes

    @property
    def word(self) -> RegionWord:
        # Check the final states first: an end stays, an opening region has no word yet, a cancellation can be lifted.
        if self.cause is not None:
            return _REGION_WORDS[self.cause.row.region]
        if self.state is RegionState.OPENING:
            return RegionWord.NONE
        return RegionWord.CANCELLED if self.is_cancelled else RegionWord.ACTIVE

    @property
    def lease_state(self) -> LeaseState:
        """The lease state that corresponds to the region's state.

        A fence is shown as FENCED only once it is lasting; before that, the region counts as DRAINING.
        """
        match self.state:
            case RegionState.OPENING:
                return LeaseState.PENDING
            case RegionState.ACTIVE:
                return LeaseState.ACTIVE
            case RegionState.RETURNED:
                return LeaseState.TORNDOWN
        return LeaseState.FENCED if self.is_given_up else LeaseState.DRAINING

    def is_expired(self, now_ns: int) -> bool:
        """Return whether the region is ACTIVE past its deadline because its timer is late."""
        return self.state is RegionState.ACTIVE and self.deadline_ns is not None and now_ns >= self.deadline_ns

    def snapshot(self) -> LeaseSnapshot:
        return LeaseSnapshot(
            self.region_id,
            self.tenant,
            self.card_uuid,
            self.size_bytes,
            self.exclusivity,
            self.generation,
            self.lease_state,
            self.cause,
            self.reason,
            "",
            self.created_ns,
            self.deadline_ns,
            self.ended_ns,
            self.ttl_ms,
            self.lease_id,
        )


# --- submits ---


class SubmitState(Enum):
    __hash__ = object.__hash__

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class SubmitSnapshot:
    """State of one submit at one moment; times are those of `Submit`."""

    submit_id: int
    lease_id: int
    state: SubmitState
    reason: str
    due_ns: int | None
    is_timed_out: bool

    @property
    def number(self) -> int:
        """The submit's number in reports to the tenant, counted from 0."""
        return self.submit_id - FIRST_SUBMIT_ID


@dataclass(slots=True)
class Submit:
    """A second worker of a lease, with its own context, for one kernel. Times are monotonic nanoseconds.

    Only `Submits` changes it.

    Attributes:
        size_bytes: Bytes for the kernel's buffers and code.
        charge_bytes: The size and the submit's context, a part of the lease's charge.
        request: Request that waits for the submit to be ready; meaningless once answered.
        timeout_ms: Longest run once the submit is ready.
        spawn_due_ns: Time at which a STARTING submit is abandoned.
        due_ns: Time at which a RUNNING submit is ended; None before.
        grace_due_ns: Time at which the worker is killed; None without a grace.
        reclaim_due_ns: Time at which the submit is fenced unless its bytes are proved free; None before the reclaim.
        is_kill_sent: Whether the kill was ordered; it is not ordered again.
        is_worker_gone: Whether the worker's process was reaped, so that a proof of its bytes is valid.
        is_timed_out: Whether the submit, its kernel or its image took too long.
        is_warm: Whether the submit took over a warm context.
        is_replaced: Whether the warm context was lost before the submit was ready. A new worker starts once the lost
          context's bytes are proved free.
    """

    submit_id: int
    lease_id: int
    card_uuid: str
    size_bytes: int
    charge_bytes: int
    request: int
    timeout_ms: int
    spawn_due_ns: int
    state: SubmitState = SubmitState.STARTING
    reason: str = ""
    due_ns: int | None = None
    grace_due_ns: int | None = None
    reclaim_due_ns: int | None = None
    is_kill_sent: bool = False
    is_worker_gone: bool = False
    is_timed_out: bool = False
    is_warm: bool = False
    is_replaced: bool = False

    def snapshot(self) -> SubmitSnapshot:
        return SubmitSnapshot(self.submit_id, self.lease_id, self.state, self.reason, self.due_ns, self.is_timed_out)


# --- warm contexts ---


class WarmState(Enum):
    """States of a warm context. Once a lease takes it over, it is part of the lease and has no separate state."""

    __hash__ = object.__hash__

    WARMING = "warming"
    READY = "ready"
    DROPPING = "dropping"
    FENCED = "fenced"
    HELD = "held"
    """A session has left this worker, and will return to it if the next worker can't continue the session."""


# Contexts that the pool drops when a lease needs their room.
YIELDING: Final = frozenset({WarmState.WARMING, WarmState.READY})


@dataclass(frozen=True, slots=True)
class WarmSnapshot:
    """State of one warm context at one moment. `is_recycled`: whether it waits for the tenant that it served."""

    warm_id: int
    card_uuid: str
    state: WarmState
    is_recycled: bool = False


@dataclass(slots=True)
class WarmContext:
    """A worker with an open context and no lease; only the pool changes it.

    Attributes:
        charge_bytes: Bytes held on the card: one context's overhead.
        due_ns: Time at which a WARMING context is abandoned, the slice of a DROPPING context is fenced, or a READY
          context that waits for a tenant is dropped.
        is_worker_gone: Whether the worker's process was reaped, so that a proof of its bytes is valid.
        reason: Why it was dropped; "" before.
        is_restored: Whether an earlier daemon made it.
        tenant: The only tenant it may serve, because it served one before; None if it served none.
        leases: Number of leases it served.
        left_by: The lease whose session has left this worker for another one; 0 for any other context.
    """

    warm_id: int
    card_uuid: str
    charge_bytes: int
    due_ns: int
    state: WarmState = WarmState.WARMING
    is_worker_gone: bool = False
    reason: str = ""
    is_restored: bool = False
    tenant: str | None = None
    leases: int = 0
    left_by: int = 0

    @property
    def waits_for_tenant(self) -> bool:
        """True while the context is ready and reserved for the tenant that it served."""
        return self.state is WarmState.READY and self.tenant is not None

    def snapshot(self) -> WarmSnapshot:
        return WarmSnapshot(self.warm_id, self.card_uuid, self.state, self.tenant is not None)


@dataclass(frozen=True, slots=True)
class Recycling:
    """Bounds of recycling, in which a context serves the next lease of its tenant.

    When a tenant frees a lease and nothing is in doubt, its context is scrubbed instead of killed. Once the scrub is
    proved, the slice is free. The context waits in the pool for that tenant only, within these bounds. In all other
    cases, and if a step takes too long, the worker is killed.

    Raises:
        ValueError: A bound is below 1.
    """

    # Stops an idle context from holding memory and a process for long.
    idle_s: int = 10
    # Remains that a scrub misses, such as leaks in the driver, last no longer than the process.
    max_leases: int = 1000
    # Stops a tenant that frees many leases at once from leaving a process for each.
    max_idle: int = 16

    def __post_init__(self) -> None:
        if min(self.idle_s, self.max_leases, self.max_idle) < 1:
            raise ValueError(f"Every bound of recycling must be at least 1: {self!r}.")


def contexts_to_drop(waiting: Sequence[WarmContext], tenant: str, max_idle: int) -> list[WarmContext] | None:
    """Choose the waiting contexts of a card to drop, so that one more context of `tenant` may wait; None if it may not.

    While there is room, none is dropped. Otherwise the tenant with the most contexts loses its oldest one, provided
    that it keeps at least as many as `tenant` then has. So a tenant gains nothing by leaving as many contexts as
    possible, and two tenants with equal numbers take nothing from each other.

    Args:
        waiting: Contexts of one card that wait for a tenant, oldest first.
        tenant: Tenant of the lease that was just scrubbed.
        max_idle: Maximum number of contexts that may wait on one card.
    """
    if len(waiting) < max_idle:
        return []
    counts = Counter(context.tenant for context in waiting)
    most = max(counts.values())
    # After the exchange the loser has `most - 1` contexts and `tenant` one more than now. The loser must not end up
    # with fewer, so it needs at least two more than `tenant` has.
    if most < counts[tenant] + 2:
        return None
    # Drop its oldest context, which is its first one.
    return [next(context for context in waiting if counts[context.tenant] == most)]
