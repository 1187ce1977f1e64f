"""Events that the lease table handles, and effects that it returns.

The shell turns what happens into events. Lease ids are u128; warm contexts and submits have ids above (`kind_of`).
`worker_id` is the id of a worker of any kind. `request` numbers one call of one client; no other open acquire may have
the number. An event about a lease that is unknown or has ended does no harm.

The shell executes effects in the order given and never decides. All times are monotonic nanoseconds.

Every acquire, renew, free, revoke, fence clear, drain, submit, region request, cancel and resize gets exactly one of
`Granted`, `Renewed`, `Freed`, `RevokeDone`, `FenceCleared`, `DrainSet`, `SubmitReady`, `RegionGranted`,
`RegionCancelSet`, `Resized` or `Denied`. An acquire, submit or region request whose requester left gets none.

A region's id is a lease's: renew, free and revoke take it, and `Renewed`, `Freed`, `RevokeDone`, `LeaseEnded` and the
timers carry it.
"""

from enum import Enum
from typing import NamedTuple

from gpulease.daemon.leases.acquire_steps import AcquireStep, Checked
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardSnapshot
from gpulease.daemon.leases.horizon_events import ClaimsLost, HorizonMoved, SetHorizon
from gpulease.daemon.leases.model import Cause, Horizon, LeaseSnapshot, LeaseTerms, TransitionRecord
from gpulease.daemon.leases.persisted import KeptLease, KeptRegion
from gpulease.daemon.leases.quotas import TenantRules
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Phase, RevokeOutcome
from gpulease.protocol.session_words import RegionWord


class TimerKind(Enum):
    """Kinds of timers of one worker."""

    __hash__ = object.__hash__

    SPAWN = "spawn"
    EXPIRY = "expiry"
    GRACE = "grace"
    RECLAIM = "reclaim"
    IDLE = "idle"
    ORPHAN = "orphan"
    HORIZON = "horizon"


# --- events ---


@dataclass(frozen=True, slots=True)
class AcquireRequested:
    """A tenant asks for a lease.

    Attributes:
        lease_id: Id chosen by the shell, nonzero and never used before.
        terms: Terms asked for; `orphan_ms` may be None, for the node's default.
        selector: Uuid of a card (with or without "GPU-") or its index in decimals; None for any card.
        wait_ms: Longest wait in the queue if there is no room; 0: no wait.
        step: Part of the acquire that is done now.
    """

    request: int
    tenant: str
    lease_id: int
    terms: LeaseTerms
    selector: str | None = None
    wait_ms: int = 0
    step: AcquireStep = AcquireStep.BOTH


@dataclass(frozen=True, slots=True)
class ConnectionsChanged:
    """A granted lease lost its last connection, or has one again.

    Before the first such event a lease counts as connected. Connections of the session count, guests' too. So do
    control connections that acquired or renewed the lease, or asked about it as its tenant, and a submit's connection.

    Attributes:
        least_wait_ms: Shortest wait for a new connection, even if the lease would end sooner without one.
    """

    lease_id: int
    is_connected: bool
    least_wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class SubmitRequested:
    """A tenant, or the bearer of its token, asks to run one kernel beside the session; see `submits`.

    Attributes:
        timeout_ms: Longest run of the submit once it is ready.
    """

    request: int
    lease_id: int
    tenant: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An authorised client will attach to a lease's session, unless a submit runs in its place."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SubmitAbandoned:
    """A submit was ready, but its requester had left."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class SubmitFound:
    """A submit's worker of an earlier daemon, found after its lease was restored; sent once each.

    Attributes:
        is_running: The requester was told that the submit is ready, and nothing has ended it.
        timeout_ms: Longest run of the submit, counted from now.
        size_bytes: Bytes for its kernel's buffers and code.
    """

    submit_id: int
    lease_id: int
    card_uuid: str
    is_running: bool
    timeout_ms: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequesterGone:
    """The client left before its acquire, submit or region request was answered; an active lease is not touched."""

    request: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has its context: the lease begins."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker could not start. The shell kills it all the same, so `WorkerExited` follows."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process was reaped; also the answer to a `KillWorker` without a process.

    Attributes:
        is_by_daemon: A `KillWorker` ended the process. Logs tell the cases apart; the table does not.
        is_busy: The worker was never started, for want of a resource that may be free again soon, such as a descriptor.
    """

    worker_id: int
    reason: str
    is_by_daemon: bool = False
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class RenewRequested:
    """A tenant, or an operator on its behalf, asks for `ttl_ms` more from now."""

    request: int
    lease_id: int
    tenant: str
    ttl_ms: int
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class FreeRequested:
    """A tenant, or an operator on its behalf, gives a lease back."""

    request: int
    lease_id: int
    tenant: str
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """An operator revokes a lease or region, or a lease's tenant one of its regions; the tenant sees `reason`.

    Attributes:
        tenant: Who asks, if it is no operator.
    """

    request: int
    lease_id: int
    reason: str
    tenant: str = ""
    is_operator: bool = True


@dataclass(frozen=True, slots=True)
class SessionFaulted:
    """The session lost its context, but its worker lives and tells the client; the lease goes on."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionCondemned:
    """A session broke a rule that ends it: OVER_SLICE, KERNEL_TIMEOUT, UNRESPONSIVE or LOAD_TIMEOUT."""

    worker_id: int
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class GuestAttached:
    """A client other than the lease's proven tenant entered its session, or may end it."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class WorkerScrubbed:
    """Answer to `ScrubWorker`: nothing of the lease is left, and the card shows the memory as free.

    Attributes:
        doubt: Reason why that is false or unknown; "" if it is proved.
    """

    lease_id: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A worker's timer armed by `ArmTimer` ran out. Late, early, repeated and outdated timers do no harm."""

    worker_id: int
    generation: int
    kind: TimerKind


@dataclass(frozen=True, slots=True)
class WaitTimerFired:
    """The wait of a queued acquire or submit ran out, or that for the answer to a resize."""

    request: int


@dataclass(frozen=True, slots=True)
class HoldTimerFired:
    """A waiter's time to hold others back ran out. Late, early and repeated timers do no harm."""


@dataclass(frozen=True, slots=True)
class PoolTimerFired:
    """The daemon began, or the pause before the next warm context is over. Extra ones do no harm."""


@dataclass(frozen=True, slots=True)
class ReclaimProved:
    """The device shows the bytes of a reaped worker as free; counts only after `ProveReclaimed`."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerUnlisted:
    """The card does not list the process of a reaped worker.

    Sent at each look until the table has its proof.

    Attributes:
        unowned_bytes: Bytes that belong to no process at this look, beyond those when the card was measured.
        least_bytes: Smallest such figure at any look that did not list the process.
        since_ns: Time of the first of these looks.
        looked_ns: Time at which this look began.
    """

    worker_id: int
    card_uuid: str
    unowned_bytes: int
    least_bytes: int
    since_ns: int
    looked_ns: int


@dataclass(frozen=True, slots=True)
class CardLooked:
    """A look at the memory of a card that others than leases and the pool hold.

    Bytes count beyond those when the card was measured. `devices.Others` books them.

    Attributes:
        unowned_bytes: Bytes that belong to no process.
        outside_bytes: Bytes of processes that are none of the daemon's workers.
        looked_ns: Time at which the look began.
    """

    card_uuid: str
    unowned_bytes: int
    outside_bytes: int
    looked_ns: int


@dataclass(frozen=True, slots=True)
class ReclaimFailed:
    """The worker could not be killed, or its bytes could not be shown free: the slice is fenced."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class FenceClearRequested:
    """An operator vouches that the fenced slices of a card (None: of every card) are free."""

    request: int
    card_uuid: str | None


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """A lease that an earlier table left; sent before all other events, once each.

    Attributes:
        kept: The persisted lease, corrected by its control page: the later deadline and the higher generation count,
            and a flipped revocation word makes it DRAINING.
        has_worker: The worker lives. Otherwise its parent has reaped it, or will.
        has_session: Someone may have attached to the session, as the control page says.
        horizon: Time until which a claimed lease may be served, as the control page says; None if it says none.
    """

    kept: KeptLease
    has_worker: bool
    has_session: bool = True
    horizon: Horizon | None = None


@dataclass(frozen=True, slots=True)
class RegionRestored:
    """A region that an earlier table left; sent once each, after all leases and before all other events."""

    kept: KeptRegion


@dataclass(frozen=True, slots=True)
class WorkerFound:
    """A worker of an earlier daemon, alive or dead, that no persisted lease has.

    Sent before all other events, once each. The table kills it and holds its bytes until they are proved back. Nothing
    is remembered of it.

    Attributes:
        worker_id: The id of its lease or warm context, or one drawn for it.
        beside_lease_id: Lease of which this is an additional worker, a submit's or a second session's; 0 if none. Its
            `worker_id` is then drawn and belongs to no lease.
    """

    worker_id: int
    card_uuid: str
    charge_bytes: int
    beside_lease_id: int = 0


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants the node empty in `within_ms`; see `admission.Drain`."""

    request: int
    within_ms: int


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """An operator lets tenants in again."""

    request: int


@dataclass(frozen=True, slots=True)
class DrainTimerFired:
    """The deadline of a drain is due. Late, early and repeated timers do no harm."""


@dataclass(frozen=True, slots=True)
class TenantRulesChanged:
    """The operator changed the bounds of tenants.

    Attributes:
        renamed: Tenant names that may belong to other people from now on.
    """

    rules: TenantRules
    renamed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RegionRequested:
    """A tenant, or an operator on its behalf, asks for a region of an active lease.

    Attributes:
        lease_id: The lease that the region is to lie in.
        region_id: Id chosen by the shell, nonzero and never used before by a lease or a region.
        tenant: Who asks.
        owner: The region's own tenant, which may renew and free it.
        granule_bytes: Regions of that session have multiples of so many bytes; 0 if it can have none.
    """

    request: int
    lease_id: int
    region_id: int
    tenant: str
    owner: str
    size_bytes: int
    ttl_ms: int
    granule_bytes: int
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class RegionOpened:
    """Answer to `OpenRegion`: the region's memory is mapped there, and its time begins."""

    region_id: int
    address: int


@dataclass(frozen=True, slots=True)
class RegionRefused:
    """Answer to `OpenRegion` or `EndRegion`: the session has nothing of the region.

    Attributes:
        reason: A sentence for the tenant that says why it could not be mapped.
    """

    region_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegionEnded:
    """Answer to `EndRegion`: nothing in the session can reach the region's memory any more.

    Attributes:
        freed_bytes: Bytes that went back to the card.
        kept_bytes: Bytes that stay in the region's place until `RegionReleased`.
        is_shown: The driver's free figure grew by at least `freed_bytes`.
    """

    region_id: int
    freed_bytes: int
    kept_bytes: int
    is_shown: bool


@dataclass(frozen=True, slots=True)
class RegionStuck:
    """Answer to `EndRegion`: the memory can't be taken away while the session lives, so the session ends."""

    region_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegionProved:
    """Answer to `ProveRegion`: the card showed no more bytes for the worker than that allowed.

    Attributes:
        region_id: The region, or the lease that was resized.
    """

    region_id: int


@dataclass(frozen=True, slots=True)
class RegionReleased:
    """The session let go of an ended region's address; the bytes kept in its place are back."""

    region_id: int


@dataclass(frozen=True, slots=True)
class RegionCancelRequested:
    """The tenant of a region or of its lease, or an operator, has launches in the region refused, or taken again."""

    request: int
    region_id: int
    tenant: str
    is_cancelled: bool
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    """A tenant, or an operator on its behalf, wants a running lease of another size."""

    request: int
    lease_id: int
    tenant: str
    size_bytes: int
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class SliceResized:
    """Answer to each `ResizeSlice`: the session's bytes now, and why they are not those asked for, "" if they are."""

    lease_id: int
    size_bytes: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The daemon stops: no acquire is granted, and every lease ends."""


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
    | RegionRestored
    | WorkerFound
    | DrainRequested
    | DrainCancelled
    | DrainTimerFired
    | TenantRulesChanged
    | HorizonMoved
    | ClaimsLost
    | RegionRequested
    | RegionOpened
    | RegionRefused
    | RegionEnded
    | RegionStuck
    | RegionProved
    | RegionReleased
    | RegionCancelRequested
    | ResizeRequested
    | SliceResized
    | ShutdownRequested
)


# --- effects: orders to the shell ---


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a worker for the lease; answered by `WorkerReady`, `WorkerFailed` or `WorkerExited`.

    Its session gets `terms.session_bytes`.
    """

    lease_id: int
    card_uuid: str
    terms: LeaseTerms
    generation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Start a worker that opens a context for no lease; answered like `SpawnWorker`."""

    warm_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class RenameWorker:
    """Use another id for a worker from now on, dead or alive, in every event and effect.

    A lease takes a warm context this way before its `SpawnWorker`, or gives one back. A submit takes one and gives none
    back.
    """

    from_id: int
    to_id: int


@dataclass(frozen=True, slots=True)
class WarmEnded:
    """For logs and metrics, once per warm context that no lease took: gone, or fenced."""

    warm_id: int
    card_uuid: str
    reason: str
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class SpawnSubmit:
    """Start a second worker for a lease under the submit's id; answered like `SpawnWorker`.

    With `is_warm`, a `RenameWorker` before this effect gave a warm context the id.
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
    """Flip the revocation word of a submit's page, once; `cause` is None if only the submit ends."""

    submit_id: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class SubmitFenced:
    """For logs: a submit could not be proved gone. Its lease goes on and holds its bytes."""

    submit_id: int
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SubmitEnded:
    """Forget a submit, once: its bytes are proved back, or belong to its lease's fence."""

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
    """Flip the control page's revocation word: the first effect of every teardown, once per lease."""

    worker_id: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker's process and reap it; answered by `WorkerExited`, even if there is no process."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class ScrubWorker:
    """Have the worker free and zero the lease's memory; answered by `WorkerScrubbed`, or never."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class RecycleWorker:
    """Turn a lease's scrubbed worker into a warm context with the given id and a new control page."""

    lease_id: int
    warm_id: int


@dataclass(frozen=True, slots=True)
class ProveReclaimed:
    """Watch the device until the worker's bytes are free.

    Answered by `WorkerUnlisted`, as often as needed, or by `ReclaimProved` or `ReclaimFailed`.
    """

    worker_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """For logs: others hold more or less of a card than before, so its capacity changed."""

    card: CardSnapshot
    is_less: bool


class ArmTimer(NamedTuple):
    """Send `event` at `due_ns`.

    Replaces an earlier timer for the same worker and kind, for the same request, or node-wide. The replaced timer may
    fire all the same: the table checks every timer against its own times.
    """

    event: TimerEvent
    due_ns: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Tell subscribers the phase of an active lease.

    Sent when a drain begins, moves or is cancelled, and when a lease loses its last connection or has one again.
    """

    lease_id: int
    phase: Phase
    left_ms: int


@dataclass(frozen=True, slots=True)
class OpenRegion:
    """Have the lease's worker map a region; answered by `RegionOpened` or `RegionRefused`, or never."""

    lease_id: int
    region_id: int
    slot: int
    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SetRegion:
    """Write a region's word and deadline where the worker reads them, then raise the epoch.

    The first effect of every end of a region.
    """

    lease_id: int
    region_id: int
    slot: int
    number: int
    word: RegionWord
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class EndRegion:
    """Have the worker take an ended region's memory away; answered by `RegionEnded` or `RegionStuck`, or never.

    A region that the worker has nothing of gets `RegionRefused` instead. Sent again for a region of an earlier table.
    """

    lease_id: int
    region_id: int
    grace_ms: int


@dataclass(frozen=True, slots=True)
class ProveRegion:
    """Look at the card until it shows at most `allowed_bytes` for the lease's worker; answered by `RegionProved`.

    Attributes:
        region_id: A region whose bytes went back, or the lease itself, whose slice got smaller.
    """

    lease_id: int
    region_id: int
    card_uuid: str
    allowed_bytes: int


@dataclass(frozen=True, slots=True)
class ResizeSlice:
    """Have the worker give its session a slice of another size; answered by `SliceResized`, or never.

    Attributes:
        size_bytes: The session's own bytes: without those that the lease keeps for submits.
    """

    lease_id: int
    size_bytes: int


# --- effects: replies ---


@dataclass(frozen=True, slots=True)
class Granted:
    """Reply to an acquire: the lease is active and its time runs."""

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
    """Reply to a revoke: sent once the lease is torn down or fenced, or at once if there is none."""

    request: int
    outcome: RevokeOutcome


@dataclass(frozen=True, slots=True)
class FenceCleared:
    """Reply to a fence clear: how many slices were released, and their leases and warm contexts."""

    request: int
    count: int
    lease_ids: tuple[int, ...]
    warm_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainSet:
    """Reply to a drain or its cancellation.

    Attributes:
        deadline_ns: Time at which the drain ends the leases left; None if the node is not drained.
        active_leases: Number of active leases.
    """

    request: int
    deadline_ns: int | None
    active_leases: int


@dataclass(frozen=True, slots=True)
class SubmitReady:
    """Reply to a submit request: the worker has a context and waits for the connection."""

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
    """For logs and metrics, once per lease: torn down or fenced, as `lease.state` says."""

    lease: LeaseSnapshot
    cause: Cause
    history: tuple[TransitionRecord, ...]


@dataclass(frozen=True, slots=True)
class RegionGranted:
    """Reply to a region request: the region is active and its time runs."""

    request: int
    lease: LeaseSnapshot
    address: int
    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class RegionCancelSet:
    """Reply to a region's cancel: launches that name it are refused, or taken again."""

    request: int
    region_id: int


@dataclass(frozen=True, slots=True)
class Resized:
    """Reply to a resize: the lease with its new size, which the card's sums hold."""

    request: int
    lease: LeaseSnapshot


Outcome = (
    Granted
    | RegionGranted
    | RegionCancelSet
    | Resized
    | Renewed
    | Freed
    | RevokeDone
    | FenceCleared
    | DrainSet
    | SubmitReady
    | Checked
    | Denied
)
"""Replies to requests."""

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
    | SetHorizon
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
    | Checked
    | Denied
    | OpenRegion
    | SetRegion
    | EndRegion
    | ProveRegion
    | ResizeSlice
    | RegionGranted
    | RegionCancelSet
    | Resized
    | LeaseEnded
)
