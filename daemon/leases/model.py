"""Leases, submits and warm contexts: their ids, states and terms, and the transitions of a lease."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from gpulease.protocol.opcodes import Exclusivity, Waiting

if TYPE_CHECKING:
    from gpulease.daemon.leases.events import SubmitRequested

NS_PER_MS: Final = 1_000_000

NS_PER_S: Final = 1_000_000_000


# --- ids ---

FIRST_WARM_ID: Final = 1 << 128
"""Ids of warm contexts begin here, above every lease id, which is a u128."""

FIRST_LEFT_ID: Final = FIRST_WARM_ID + (1 << 127)
"""Here begin the ids of what leases of an earlier daemon left behind, held as warm contexts: above the ids that an
earlier daemon's own warm contexts may be found to have."""

FIRST_SUBMIT_ID: Final = 1 << 129
"""Ids of submits begin here, above those of warm contexts."""


class WorkerKind(Enum):
    """Kinds of workers: a lease's session, a warm context of the pool, a lease's submit."""

    __hash__ = object.__hash__

    LEASE = "lease"
    WARM = "warm"
    SUBMIT = "submit"


def kind_of(worker_id: int) -> WorkerKind:
    """Return the kind of the worker with that id; workers, timers and proofs of all kinds share one range of ids."""
    if worker_id < FIRST_WARM_ID:
        return WorkerKind.LEASE
    return WorkerKind.WARM if worker_id < FIRST_SUBMIT_ID else WorkerKind.SUBMIT


# --- leases ---


class LeaseState(Enum):
    """Where a lease is in its life."""

    __hash__ = object.__hash__

    PENDING = "pending"
    ACTIVE = "active"
    DRAINING = "draining"
    TORNDOWN = "torndown"
    FENCED = "fenced"


class Cause(Enum):
    """Why a lease ended."""

    __hash__ = object.__hash__

    FREED = "freed"
    EXPIRED = "expired"
    REVOKED = "revoked"
    FAULTED = "faulted"
    WORKER_DIED = "worker_died"
    SPAWN_FAILED = "spawn_failed"
    ABANDONED = "abandoned"
    SHUTDOWN = "shutdown"
    OVER_SLICE = "over_slice"
    KERNEL_TIMEOUT = "kernel_timeout"
    UNRESPONSIVE = "unresponsive"
    DRAINED = "drained"
    LOAD_TIMEOUT = "load_timeout"
    ORPHANED = "orphaned"


class Trigger(Enum):
    """What moves a lease, besides a cause that ends it; RENEWED appears in stories and moves nothing."""

    __hash__ = object.__hash__

    WORKER_READY = "worker_ready"
    RECLAIM_PROVED = "reclaim_proved"
    RECLAIM_FAILED = "reclaim_failed"
    FENCE_CLEARED = "fence_cleared"
    RENEWED = "renewed"


TRANSITIONS: Final = MappingProxyType(
    {
        (LeaseState.PENDING, Trigger.WORKER_READY): LeaseState.ACTIVE,
        (LeaseState.PENDING, Cause.FREED): LeaseState.DRAINING,
        (LeaseState.PENDING, Cause.REVOKED): LeaseState.DRAINING,
        (LeaseState.PENDING, Cause.SPAWN_FAILED): LeaseState.DRAINING,
        (LeaseState.PENDING, Cause.ABANDONED): LeaseState.DRAINING,
        (LeaseState.PENDING, Cause.SHUTDOWN): LeaseState.DRAINING,
        (LeaseState.PENDING, Cause.DRAINED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Trigger.RENEWED): LeaseState.ACTIVE,
        (LeaseState.ACTIVE, Cause.FREED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.EXPIRED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.REVOKED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.FAULTED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.WORKER_DIED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.SHUTDOWN): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.OVER_SLICE): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.KERNEL_TIMEOUT): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.UNRESPONSIVE): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.DRAINED): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.LOAD_TIMEOUT): LeaseState.DRAINING,
        (LeaseState.ACTIVE, Cause.ORPHANED): LeaseState.DRAINING,
        (LeaseState.DRAINING, Trigger.RECLAIM_PROVED): LeaseState.TORNDOWN,
        (LeaseState.DRAINING, Trigger.RECLAIM_FAILED): LeaseState.FENCED,
        (LeaseState.FENCED, Trigger.FENCE_CLEARED): LeaseState.TORNDOWN,
    }
)


class TransitionRecord(NamedTuple):
    """One recorded transition of a lease, at the monotonic time `at_ns`."""

    at_ns: int
    start: LeaseState
    trigger: Trigger | Cause
    finish: LeaseState
    generation: int

    def __str__(self) -> str:
        return (
            f"{self.at_ns} ns: {self.start.value} -> {self.finish.value}"
            f" by {self.trigger.value} (generation {self.generation})"
        )


class InvalidTransition(Exception):
    """A lease was asked to go where the table does not lead: a fault of the core or of its shell.

    Attributes:
        lease_id: The lease.
        state: Where it was.
        trigger: What was to move it.
        story: All that was recorded of it, oldest first.
    """

    def __init__(
        self, lease_id: int, state: LeaseState, trigger: Trigger | Cause, history: tuple[TransitionRecord, ...]
    ) -> None:
        super().__init__(lease_id, state, trigger, history)
        self.lease_id = lease_id
        self.state = state
        self.trigger = trigger
        self.history = history

    def __str__(self) -> str:
        told = "; ".join(str(entry) for entry in self.history) or "nothing yet"
        return (
            f"Lease {self.lease_id:032x} is {self.state.value} and {self.trigger.value} leads nowhere from there."
            f" Its story: {told}."
        )


# The two classes that keep every other lease off the card, or off the partition.
ALONE: Final = frozenset({Exclusivity.DEVICE_EXCLUSIVE, Exclusivity.PARTITION_EXCLUSIVE})


class LeaseTerms(NamedTuple):
    """The terms of one lease: the request, the lease, the journal's row and the order for a worker all carry them.

    Attributes:
        size_bytes: Bytes the tenant may allocate. Each context's overhead is charged on top.
        ttl_ms: Time to live last asked for, counted from the moment the worker is ready, or from the renewal.
        exclusivity: Other leases that the card may have beside this one.
        max_kernel_ms: Longest run of one kernel; 0: as long as the lease lives.
        waiting: How both ends of the session wait for each other; None: as the host allows.
        submit_bytes: Part of `size_bytes` kept for submits. With 0, a submit runs in place of a session that was never
            opened.
        orphan_ms: Longest time without a connection before the lease ends; 0: no bound; None: the node's default,
            which placement fills in.
    """

    size_bytes: int
    ttl_ms: int
    exclusivity: Exclusivity = Exclusivity.SHARED
    max_kernel_ms: int = 0
    waiting: Waiting | None = None
    submit_bytes: int = 0
    orphan_ms: int | None = None

    @property
    def contexts(self) -> int:
        """Number of contexts the lease is charged: the session's, and the submits' if memory is kept for them."""
        return 2 if self.submit_bytes else 1

    @property
    def session_bytes(self) -> int:
        """Bytes of the session, without those kept for submits."""
        return self.size_bytes - self.submit_bytes


class LeaseSnapshot(NamedTuple):
    """What one lease was at one moment; all times are monotonic nanoseconds. A tuple: each event makes several.

    Attributes:
        cause: Why it ended, None while nothing has ended it.
        reason: The cause in words, "" while there is none.
        fault: What the worker said when the context was lost, "" if it was not.
        deadline_ns: When it expires; None until the worker was ready.
        ended_ns: When it was torn down or fenced.
        ttl_ms: The time to live last asked for.
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


@dataclass(slots=True)
class Lease:
    """A live lease as the table keeps it; only the table's own parts change it.

    Attributes:
        request: The acquire that waits for the worker; meaningless once it was answered.
        charge_bytes: The size and the context's overhead, as held on the card.
        warm_id: The warm context it took, 0 if none.
        served: How many leases, all its tenant's, that context had served before.
        is_in_doubt: Another than its tenant had to do with it, or something of it was not proved gone.
        is_scrubbing: It was given back, and its worker may yet come back to the pool.
        awaited_bytes: How much of its charge warm contexts must leave first; 0 once its worker was asked for.
        grace_due_ns: When the worker is killed, None if no grace was given.
        reclaim_due_ns: When the slice is fenced unless proved back, None until the reclaim has begun.
        is_kill_sent: The worker was ordered dead; it is never ordered twice.
        is_worker_gone: The worker's process was reaped, so a proof of its bytes means something.
        free_request: The free that is answered when the teardown is over.
        revoke_requests: The revokes that are answered when the teardown is over.
        is_restored: An earlier table's, or what is held for a worker of an earlier daemon.
        unconnected_ns: Since when it has no connection, or since its renewal after that; later, where a daemon that
            took it over gives it more time; None while it has one.
        has_session: Somebody may have attached to its session: what is in it stays until the lease ends.
        own_submit_bytes: What of its charge the submit holds that runs in place of its session; 0 if there is none.
        extra_bytes: What of its charge is that submit's context, taken from the card for as long as it is there.
        submit_id: The submit that is not proved gone, 0 if there is none.
        next_submit: The one that waits for that one's bytes.
        last_submit: The last one that is gone, so that its caller can learn why.
        is_proved: Its own worker's bytes are proved back, and its submit's are waited for.
    """

    lease_id: int
    tenant: str
    card_uuid: str
    terms: LeaseTerms
    charge_bytes: int
    request: int
    created_ns: int
    spawn_due_ns: int
    max_history_entries: int
    warm_id: int = 0
    served: int = 0
    is_in_doubt: bool = False
    is_scrubbing: bool = False
    awaited_bytes: int = 0
    generation: int = 1
    state: LeaseState = LeaseState.PENDING
    cause: Cause | None = None
    reason: str = ""
    fault: str = ""
    deadline_ns: int | None = None
    grace_due_ns: int | None = None
    reclaim_due_ns: int | None = None
    ended_ns: int | None = None
    is_kill_sent: bool = False
    is_worker_gone: bool = False
    is_restored: bool = False
    unconnected_ns: int | None = None
    has_session: bool = False
    own_submit_bytes: int = 0
    extra_bytes: int = 0
    submit_id: int = 0
    next_submit: "SubmitRequested | None" = None
    last_submit: "SubmitSnapshot | None" = None
    is_proved: bool = False
    free_request: int | None = None
    revoke_requests: list[int] = field(default_factory=list)
    history: list[TransitionRecord] = field(default_factory=list)

    def move(self, trigger: Trigger | Cause, now_ns: int) -> None:
        """Follow the table and record the step.

        Raises:
            InvalidTransition: The table has no such step.
        """
        finish = TRANSITIONS.get((self.state, trigger))
        if finish is None:
            raise InvalidTransition(self.lease_id, self.state, trigger, tuple(self.history))
        if len(self.history) >= self.max_history_entries:
            del self.history[0]
        self.history.append(TransitionRecord(now_ns, self.state, trigger, finish, self.generation))
        self.state = finish

    @property
    def submit_charge_bytes(self) -> int:
        """What a submit of it may hold of the card, its context included; 0 if it is to have none."""
        if self.own_submit_bytes:
            return self.own_submit_bytes
        contexts_bytes = self.charge_bytes - self.terms.size_bytes
        return self.terms.submit_bytes + contexts_bytes // 2 if self.terms.submit_bytes else 0

    @property
    def orphan_ms(self) -> int:
        """Longest time without a connection before the lease ends; 0: no bound."""
        return self.terms.orphan_ms or 0

    @property
    def orphan_due_ns(self) -> int | None:
        """When it ends for want of a connection; None while it has one, or may be without."""
        if self.unconnected_ns is None or not self.orphan_ms:
            return None
        return self.unconnected_ns + self.orphan_ms * NS_PER_MS

    def is_expired(self, now_ns: int) -> bool:
        """Whether it is still ACTIVE though its time is over: the timer has yet to say so."""
        return self.state is LeaseState.ACTIVE and self.deadline_ns is not None and now_ns >= self.deadline_ns

    def snapshot(self) -> LeaseSnapshot:
        """The lease as it is now."""
        return LeaseSnapshot(
            self.lease_id,
            self.tenant,
            self.card_uuid,
            self.terms.size_bytes,
            self.terms.exclusivity,
            self.generation,
            self.state,
            self.cause,
            self.reason,
            self.fault,
            self.created_ns,
            self.deadline_ns,
            self.ended_ns,
            self.terms.ttl_ms,
        )


# --- submits ---


class SubmitState(Enum):
    """Where a submit is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class SubmitSnapshot:
    """What one submit was at one moment; the times are those of `Submit`."""

    submit_id: int
    lease_id: int
    state: SubmitState
    reason: str
    due_ns: int | None
    is_timed_out: bool

    @property
    def number(self) -> int:
        """What its tenant knows it by."""
        return self.submit_id - FIRST_SUBMIT_ID


@dataclass(slots=True)
class Submit:
    """A submit as the table keeps it; only `Submits` changes it. Times are monotonic nanoseconds.

    Attributes:
        size_bytes: What its kernel's buffers and code may take of the card.
        charge_bytes: The same and its context: a part of what its lease holds.
        request: Who waits for it to be ready; meaningless once that was answered.
        timeout_ms: How long it may take once it is ready.
        spawn_due_ns: When one that is STARTING is given up.
        due_ns: When one that is RUNNING is ended; None until it is.
        grace_due_ns: When its worker is killed, None if no grace was given.
        reclaim_due_ns: When it is fenced unless proved gone, None until that has begun.
        is_kill_sent: The worker was ordered dead; it is never ordered twice.
        is_worker_gone: Its process was reaped, so a proof of its bytes means something.
        is_timed_out: It was ended because it, its kernel or its image took too long.
        is_warm: Its context was made ahead.
        is_replaced: That was lost before it was ready: another one starts once its bytes are proved back.
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
        """The submit as it is now."""
        return SubmitSnapshot(self.submit_id, self.lease_id, self.state, self.reason, self.due_ns, self.is_timed_out)


# --- warm contexts ---


class WarmState(Enum):
    """Where a warm context is in its life; one that a lease takes is the lease's from then on."""

    WARMING = "warming"
    READY = "ready"
    DROPPING = "dropping"
    FENCED = "fenced"


# Those that go when a lease needs their room.
YIELDING: Final = frozenset({WarmState.WARMING, WarmState.READY})


@dataclass(frozen=True, slots=True)
class WarmSnapshot:
    """What one warm context was at one moment; `is_recycled`: it has served a tenant, whom it waits for."""

    warm_id: int
    card_uuid: str
    state: WarmState
    is_recycled: bool = False


@dataclass(slots=True)
class WarmContext:
    """A worker in the pool as the table keeps it; only the pool changes it.

    Attributes:
        charge_bytes: What it holds of its card: one context's overhead.
        due_ns: When one that is WARMING is given up, the slice of one that is DROPPING is fenced, or one that is READY
            and a tenant's is dropped.
        is_worker_gone: Its process was reaped, so a proof of its bytes means something.
        reason: Why it goes, "" while it does not.
        is_restored: An earlier daemon's.
        tenant: Whose leases alone it may serve, since it served one of them; None of one that served nobody.
        leases: How many it served.
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

    @property
    def waits_for_tenant(self) -> bool:
        """Whether it is ready, for the tenant alone whom it has served."""
        return self.state is WarmState.READY and self.tenant is not None

    def snapshot(self) -> WarmSnapshot:
        """The context as it is now."""
        return WarmSnapshot(self.warm_id, self.card_uuid, self.state, self.tenant is not None)


@dataclass(frozen=True, slots=True)
class Recycling:
    """The bounds of it.

    Raises:
        ValueError: One is below 1.
    """

    # One that nobody comes back for holds what a context costs, and a process.
    idle_s: int = 10
    # What no scrub foresaw, leaks of the driver's for one, ends with the process.
    max_leases: int = 1000
    # A tenant that gives back many leases at a time must not leave a process for each.
    max_idle: int = 16
    # A kernel that goes on, or a worker that hangs, must not keep the slice.
    scrub_timeout_ms: int = 500

    def __post_init__(self) -> None:
        if min(self.idle_s, self.max_leases, self.max_idle, self.scrub_timeout_ms) < 1:
            raise ValueError(f"Every bound of recycling must be at least 1: {self!r}.")


def contexts_to_drop(waiting: Sequence[WarmContext], tenant: str, max_idle: int) -> list[WarmContext] | None:
    """Which of a card's contexts that wait for a tenant goes, so that one more of `tenant`'s may; None if it may not.

    While there is room, none. Then the oldest of whoever has the most, if it would have no fewer than `tenant` even so:
    two tenants who have as many take nothing from each other. `waiting`: oldest first.
    """
    if len(waiting) < max_idle:
        return []
    counts = Counter(context.tenant for context in waiting)
    most = max(counts.values())
    if most < counts[tenant] + 2:
        return None
    return [next(context for context in waiting if counts[context.tenant] == most)]
