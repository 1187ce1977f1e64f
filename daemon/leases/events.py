"""What can happen to the lease table. The shell turns the world into these; the table turns them into effects.

`request` is a number the shell gives to one call of one client; it must not be in use by another open acquire.
Lease ids are u128. An event for a lease that is unknown or has ended is harmless. What is said of workers, timers and
proofs is said of warm contexts and submits too, by their numbers.

What the lease table wants done. The shell executes effects in the order given; it never decides.

Every acquire, renew, free, revoke, fence clear, drain and submit gets exactly one of `Granted`, `Renewed`, `Freed`,
`RevokeDone`, `FenceCleared`, `DrainSet`, `SubmitReady` or `Denied`, except an acquire or submit whose requester left.
Times are monotonic nanoseconds. What is done to a lease's worker, timers and bytes is done to those of warm contexts
and submits by the same effects, with their numbers.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardSnapshot
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseTerms, TransitionRecord
from gpulease.daemon.leases.persisted import KeptLease
from gpulease.daemon.leases.rules import TenantRules
from gpulease.protocol.opcodes import Phase, RevokeOutcome


class TimerKind(Enum):
    """Which of a lease's clocks ran out."""

    __hash__ = object.__hash__

    SPAWN = "spawn"
    EXPIRY = "expiry"
    GRACE = "grace"
    RECLAIM = "reclaim"
    IDLE = "idle"
    ORPHAN = "orphan"


@dataclass(frozen=True, slots=True)
class AcquireRequested:
    """A tenant asks for a lease.

    Attributes:
        lease_id: Chosen by the shell, nonzero and never used before.
        selector: A card's uuid (with or without "GPU-") or its index in decimals; None for any card.
        wait_ms: How long to wait in line if there is no room; 0 not to wait.
    """

    request: int
    tenant: str
    lease_id: int
    terms: LeaseTerms
    selector: str | None = None
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionsChanged:
    """A granted lease lost its last connection, or has one again; until the first of these it counts as having one.

    What counts: connections of its session, those of guests too; control connections that acquired or renewed it, or
    asked about it as its tenant; a submit's.

    Attributes:
        least_wait_ms: How long it is waited for at the least, however soon the lease would end without a connection.
    """

    lease_id: int
    is_connected: bool
    least_wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class SubmitRequested:
    """A tenant, or whoever bears a token of its, wants one kernel run beside the session; see `submitting`.

    Attributes:
        timeout_ms: How long it may take once it is ready.
    """

    request: int
    lease_id: int
    tenant: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Somebody who may is about to be attached to a lease's session, unless a submit runs in its place."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SubmitAbandoned:
    """The submit was ready, but its requester had left: nobody can take its connection."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class SubmitFound:
    """A submit's worker of an earlier daemon, of a lease that was restored before; told once each.

    Attributes:
        is_running: It was told of to who asked for it, and nothing has ended it.
        timeout_ms: How long it may take, counted from now.
        size_bytes: What its kernel's buffers and code may take of the card.
    """

    submit_id: int
    lease_id: int
    card_uuid: str
    is_running: bool
    timeout_ms: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequesterGone:
    """The client that asked for a lease, or a submit, left before it was answered. An active lease is not touched."""

    request: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The lease's worker has its context: the lease begins."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker could not start. It is killed all the same, so `WorkerExited` must still follow."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process was reaped; also the answer to a `KillWorker` when there is no process at all.

    Attributes:
        is_by_daemon: A `KillWorker` is what ended it; the table does the same either way, who looks does not.
        is_busy: It was never started, for want of what the daemon may have again in a moment: a descriptor, say.
    """

    worker_id: int
    reason: str
    is_by_daemon: bool = False
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class RenewRequested:
    """A tenant, or an operator in its stead, asks for more time: `ttl_ms` from now."""

    request: int
    lease_id: int
    tenant: str
    ttl_ms: int
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class FreeRequested:
    """A tenant, or an operator in its stead, gives a lease back."""

    request: int
    lease_id: int
    tenant: str
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """An operator takes a lease away; `reason` is shown to its tenant."""

    request: int
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionFaulted:
    """The context is lost but its worker lives and says so to its client. The lease stays active."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionCondemned:
    """The shell saw a session break a rule that ends it: OVER_SLICE, KERNEL_TIMEOUT, UNRESPONSIVE, LOAD_TIMEOUT."""

    worker_id: int
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class GuestAttached:
    """Somebody was let into a lease's session, or may end it, of whom nobody vouches that it is the lease's tenant."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class WorkerScrubbed:
    """The answer to `ScrubWorker`: nothing of the lease is left, and the card shows what was held back.

    `doubt` says why that is not so, or not known; "" if it is proved.
    """

    lease_id: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer armed by `ArmTimer` ran out. Late, early, repeated and outdated ones do no harm."""

    worker_id: int
    generation: int
    kind: TimerKind


@dataclass(frozen=True, slots=True)
class WaitTimerFired:
    """A timer armed by `ArmTimer` ran out."""

    request: int


@dataclass(frozen=True, slots=True)
class HoldTimerFired:
    """The timer armed by `ArmTimer` ran out. Late, early and repeated ones do no harm."""


@dataclass(frozen=True, slots=True)
class PoolTimerFired:
    """The daemon has begun, or the timer armed by `ArmTimer` ran out. Others do no harm."""


@dataclass(frozen=True, slots=True)
class ReclaimProved:
    """The device shows the bytes of a reaped worker back. Counts only after `ProveReclaimed` asked for it."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerUnlisted:
    """The card does not list the process of a reaped worker. Sent at each look, until the table has its proof.

    Attributes:
        unowned_bytes: What of the card belonged to no process at this look, beyond what did when it was measured.
        least_bytes: The least of that at any look that did not list the process.
        since_ns: The time of the first of these looks.
        looked_ns: The time at which this look began.
    """

    worker_id: int
    card_uuid: str
    unowned_bytes: int
    least_bytes: int
    since_ns: int
    looked_ns: int


@dataclass(frozen=True, slots=True)
class CardLooked:
    """What others than leases and the pool hold of a card, beyond what they held when it was measured; see `others`.

    Attributes:
        unowned_bytes: What belongs to no process.
        outside_bytes: What belongs to processes that are none of the daemon's workers.
        looked_ns: The time at which the look began.
    """

    card_uuid: str
    unowned_bytes: int
    outside_bytes: int
    looked_ns: int


@dataclass(frozen=True, slots=True)
class ReclaimFailed:
    """The worker could not be killed, or its bytes could not be shown back: the slice is fenced."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class FenceClearRequested:
    """An operator vouches that the fenced slices of a card (None: of every card) are free."""

    request: int
    card_uuid: str | None


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """A lease that an earlier table left; told before anything else, once each.

    Attributes:
        kept: What was kept of it, and what its control page says: the later deadline, the higher generation; DRAINING
            if its revocation word is flipped.
        has_worker: Its worker lives. If not, it was reaped, or will be by whoever its parent is.
        has_session: Somebody may have attached to its session, as its control page says.
    """

    kept: KeptLease
    has_worker: bool
    has_session: bool = True


@dataclass(frozen=True, slots=True)
class WorkerFound:
    """A worker of an earlier daemon that no kept lease has, alive or dead; told before anything else, once each.

    It is killed, its bytes are proved back, and nothing is remembered of it.

    Attributes:
        worker_id: Its number: a lease's id, or a warm context's.
        beside_lease_id: The lease that it was one more worker of, a submit's or a second one; 0 if it was none. Its
            own number is drawn then, and no lease's.
    """

    worker_id: int
    card_uuid: str
    charge_bytes: int
    beside_lease_id: int = 0


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants the node empty within so many milliseconds: see `draining`."""

    request: int
    within_ms: int


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """An operator lets tenants in again."""

    request: int


@dataclass(frozen=True, slots=True)
class DrainTimerFired:
    """The timer armed by `ArmTimer` ran out. Late, early and repeated ones do no harm."""


@dataclass(frozen=True, slots=True)
class TenantRulesChanged:
    """The operator has other bounds for tenants.

    Attributes:
        renamed: Tenants who may be other people from now on.
    """

    rules: TenantRules
    renamed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The daemon stops: nobody is let in, everybody is let go."""


WorkerEvent = (
    WorkerReady
    | WorkerFailed
    | WorkerExited
    | SessionCondemned
    | SubmitAbandoned
    | TimerFired
    | ReclaimProved
    | ReclaimFailed
)
"""Events about one worker: of a lease, a warm context or a submit."""

TimerEvent = TimerFired | WaitTimerFired | HoldTimerFired | PoolTimerFired | DrainTimerFired
"""Events that the shell sends because the table armed a timer for them."""

Event = (
    AcquireRequested
    | ConnectionsChanged
    | SubmitRequested
    | SessionOpened
    | SubmitAbandoned
    | SubmitFound
    | RequesterGone
    | WorkerReady
    | WorkerFailed
    | WorkerExited
    | RenewRequested
    | FreeRequested
    | RevokeRequested
    | SessionFaulted
    | SessionCondemned
    | GuestAttached
    | WorkerScrubbed
    | TimerFired
    | WaitTimerFired
    | HoldTimerFired
    | PoolTimerFired
    | ReclaimProved
    | WorkerUnlisted
    | CardLooked
    | ReclaimFailed
    | FenceClearRequested
    | LeaseRestored
    | WorkerFound
    | DrainRequested
    | DrainCancelled
    | DrainTimerFired
    | TenantRulesChanged
    | ShutdownRequested
)


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a worker for the lease; answered by `WorkerReady`, `WorkerFailed` or `WorkerExited`."""

    lease_id: int
    card_uuid: str
    terms: LeaseTerms
    generation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Start a worker that opens a context for no lease; answered as `SpawnWorker` is, by its number."""

    warm_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class RenameWorker:
    """The worker known by one number is known by the other from now on, dead or alive, in every event and effect.

    A lease takes a warm context so, which the `SpawnWorker` that follows then uses; or gives it back. So does a submit,
    which gives none back.
    """

    from_id: int
    to_id: int


@dataclass(frozen=True, slots=True)
class WarmEnded:
    """For logs and metrics, once per warm context that no lease took: it is gone, or fenced."""

    warm_id: int
    card_uuid: str
    reason: str
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class SpawnSubmit:
    """Start a second worker for a lease, known by its own number; answered as `SpawnWorker` is.

    One that is warm is there already: a `RenameWorker` before this one gave it the number.
    """

    submit_id: int
    lease_id: int
    card_uuid: str
    size_bytes: int
    timeout_ms: int
    terms: LeaseTerms
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class RefuseSubmit:
    """Flip the revocation word of a submit's page, once per submit; without a cause its own time is over."""

    submit_id: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class SubmitFenced:
    """For logs: a submit could not be proved gone. Its lease goes on, and holds its bytes."""

    submit_id: int
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SubmitEnded:
    """Nothing need be known of a submit any more, once each: its bytes are proved back, or are its lease's fence."""

    submit_id: int
    lease_id: int
    reason: str


class SetDeadline(NamedTuple):
    """Write the deadline and the generation where the worker reads them."""

    worker_id: int
    generation: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class RefuseWork:
    """Flip the control page's revocation word; the first effect of every teardown, sent once per lease."""

    worker_id: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker's process and reap it; answered by `WorkerExited`, also if there is no process."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class ScrubWorker:
    """Have the worker release and zero all that the lease left, and prove it; answered by `WorkerScrubbed` or never."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class RecycleWorker:
    """The scrubbed worker of a lease is a warm context from now on, known by that number, with a control page anew."""

    lease_id: int
    warm_id: int


@dataclass(frozen=True, slots=True)
class ProveReclaimed:
    """Watch the device until the lease's bytes are back; answered by `WorkerUnlisted`, as often as it takes.

    `ReclaimProved` answers it too, and `ReclaimFailed`.
    """

    worker_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """For logs: others hold more or less of a card than was booked, so that more or less of it can be leased."""

    card: CardSnapshot
    is_less: bool


class ArmTimer(NamedTuple):
    """Send `event` at `due_ns`, in place of a timer armed before for the same worker and kind, or the same request.

    The earlier timer may fire all the same: the table checks every timer against its own times.
    """

    event: TimerEvent
    due_ns: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Tell whoever listens where an active lease stands now.

    A drain began, moved or was cancelled; or the lease lost its last connection, or has one again.
    """

    lease_id: int
    phase: Phase
    left_ms: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Reply to an acquire: the lease is active and its clock runs."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class Renewed:
    """Reply to a renew: the lease with its new generation and deadline."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class Freed:
    """Reply to a free: the lease is torn down and its bytes are proved back."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class RevokeDone:
    """Reply to a revoke, sent only once the lease is torn down or fenced, or was never there."""

    request: int
    outcome: RevokeOutcome


@dataclass(frozen=True, slots=True)
class FenceCleared:
    """Reply to a fence clear: how many fenced slices are grantable again; which leases and warm contexts they were."""

    request: int
    count: int
    lease_ids: tuple[int, ...]
    warm_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainSet:
    """Reply to a drain or its cancellation: when it ends what is left, None if nothing is drained; who is there."""

    request: int
    deadline_ns: int | None
    active_leases: int


@dataclass(frozen=True, slots=True)
class SubmitReady:
    """Reply to a submit's request: its worker has a context and waits for the connection."""

    request: int
    submit_id: int
    lease_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    """Reply to any request that can't be met."""

    request: int
    denial: Denial


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """For logs and metrics, once per lease: it is torn down or fenced (`lease.state` says which), and its story."""

    lease: LeaseSnapshot
    cause: Cause
    history: tuple[TransitionRecord, ...]


Outcome = Granted | Renewed | Freed | RevokeDone | FenceCleared | DrainSet | SubmitReady | Denied
"""What a request is answered with."""

Effect = (
    SpawnWorker
    | SpawnSubmit
    | RefuseSubmit
    | SubmitFenced
    | SubmitEnded
    | SubmitReady
    | WarmUp
    | RenameWorker
    | WarmEnded
    | SetDeadline
    | RefuseWork
    | KillWorker
    | ScrubWorker
    | RecycleWorker
    | ProveReclaimed
    | CapacityChanged
    | ArmTimer
    | Warned
    | Granted
    | Renewed
    | Freed
    | RevokeDone
    | FenceCleared
    | DrainSet
    | Denied
    | LeaseEnded
)
