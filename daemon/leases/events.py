"""Events that the lease table handles, and effects that it returns.

The broker (`broker.runtime`) reports everything that happens as an event. Lease ids are u128; warm contexts and submits
have ids above that range (`kind_of`). `worker_id` identifies a worker of any kind. `request` numbers one call of one
client; no other open acquire may have the same number. The table ignores an event about a lease that is unknown or has
ended.

The broker executes effects in the order given and decides nothing. All times are monotonic nanoseconds.

Every request gets exactly one `Outcome`: `RequestDenied`, or the outcome for its kind of request, such as `Granted` for
an acquire. An acquire with a claim gets `Checked` first, and then the outcome of its second step (`AcquireStep`). An
acquire, submit or region request gets none if its client has disconnected.

A region's id is used like a lease's: renew, free and revoke accept it, and `Renewed`, `FreeDone`, `RevokeDone`,
`LeaseEnded` and the timers carry it.
"""

from enum import Enum
from typing import NamedTuple

from gpulease.daemon.leases.acquire_steps import AcquireStep, Checked
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardSnapshot
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved, SetMembershipDeadline
from gpulease.daemon.leases.model import (
    Cause,
    LeaseSnapshot,
    LeaseTerms,
    MembershipDeadline,
    SubmitRequested,
    TransitionRecord,
)
from gpulease.daemon.leases.park_state import ParkCause, ParkFailure
from gpulease.daemon.leases.persisted import LeaseRow, RegionRow
from gpulease.daemon.leases.quotas import TenantRules
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Phase, RevokeOutcome
from gpulease.protocol.session_words import RegionWord


class TimerKind(Enum):
    # Hash by identity, which is fast, as a timer is looked up with each event.
    __hash__ = object.__hash__

    SPAWN = "spawn"
    EXPIRY = "expiry"
    GRACE = "grace"
    RECLAIM = "reclaim"
    IDLE = "idle"
    ORPHAN = "orphan"
    MEMBERSHIP = "horizon"
    PARK = "park"


# --- events ---


@dataclass(frozen=True, slots=True)
class AcquireRequested:
    """A tenant requests a lease.

    Attributes:
        lease_id: Id chosen by the broker, nonzero and never used before.
        terms: The requested terms; `orphan_ms` may be None, for the node's default.
        selector: Uuid of a card (with or without "GPU-") or its index in decimals; None for any card.
        wait_ms: Longest wait in the queue if no card has room; 0: no wait.
        step: The part of the acquire to do now.
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
    """A granted lease has lost its last connection, or is connected again.

    A lease counts as connected until the first such event. These connections count: those of the session, including
    guests' connections; control connections that acquired or renewed the lease, or queried it as its tenant; and the
    connection of a submit.

    Attributes:
        least_wait_ms: Shortest wait for a new connection, even if the lease's own bound is shorter.
    """

    lease_id: int
    is_connected: bool
    least_wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An authorised client is about to attach to a lease's session, unless a submit runs in its place."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SubmitAbandoned:
    """A submit is ready, but its client has disconnected."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class SubmitFound:
    """A submit's worker that an earlier daemon left; sent once for each, after its lease was restored.

    Attributes:
        is_running: Whether the client was notified that the submit is ready, and the submit has not ended since.
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
    """The client disconnected before its acquire, submit or region request was answered.

    Active leases are unaffected.
    """

    request: int


# --- events: reports about workers ---


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has its context: the lease begins."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker could not start. The broker kills it in any case, so `WorkerExited` follows."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process was reaped. Also the answer to a `KillWorker` that finds no process.

    Attributes:
        is_by_daemon: Whether a `KillWorker` ended the process. This matters only for logs, not for the table.
        is_busy: Whether the worker was never started, for lack of a resource that may soon be free again, such as a
          descriptor.
    """

    worker_id: int
    reason: str
    is_by_daemon: bool = False
    is_busy: bool = False


# --- events: requests about granted leases ---


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
    """An operator revokes a lease or a region, or a tenant revokes a region of its lease. The tenant is shown `reason`.

    Attributes:
        tenant: The tenant that asks, if it is not an operator.
    """

    request: int
    lease_id: int
    reason: str
    tenant: str = ""
    is_operator: bool = True


# --- events: sessions ---


@dataclass(frozen=True, slots=True)
class SessionFaulted:
    """The session has lost its context.

    Its worker still runs and reports the fault to the client; the lease continues.
    """

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionCondemned:
    """A monitor ends a session for OVER_SLICE, UNMEASURED, KERNEL_TIMEOUT, UNRESPONSIVE or LOAD_TIMEOUT."""

    worker_id: int
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class GuestAttached:
    """A client other than the lease's proven tenant has attached to its session, or may end it."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class WorkerScrubbed:
    """Answer to `ScrubWorker`: whether nothing of the lease is left and the card shows its memory as free.

    Attributes:
        doubt: Why that is not proved; "" if it is.
    """

    lease_id: int
    doubt: str = ""


# --- events: timers. The table checks each against its own times, so late, early and repeated ones are harmless ---


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A worker's timer, armed by `ArmTimer`, has fired. Late, early, repeated and outdated timers are harmless."""

    worker_id: int
    generation: int
    kind: TimerKind


@dataclass(frozen=True, slots=True)
class WaitTimerFired:
    """The maximum wait of a queued acquire or submit is over, or the maximum wait for the answer to a resize."""

    request: int


@dataclass(frozen=True, slots=True)
class HoldTimerFired:
    """The time for which a waiting request may hold back others is over.

    Late, early and repeated timers are harmless.
    """


@dataclass(frozen=True, slots=True)
class ParkTimerFired:
    """From now on a session may be parked for others' need. Late, early and repeated timers are harmless."""


@dataclass(frozen=True, slots=True)
class PoolTimerFired:
    """The daemon has started, or the pause before the next warm context is over. Repeated timers are harmless."""


# --- events: proofs, polls of the cards, and fences ---


@dataclass(frozen=True, slots=True)
class ReclaimProved:
    """The device shows the bytes of a reaped worker as free. Counts only after `ProveReclaimed`."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerUnlisted:
    """The card no longer lists the process of a reaped worker.

    Sent on each poll until the table has its proof.

    Attributes:
        unowned_bytes: Bytes that belong to no process in this poll, beyond those that belonged to none when the card
            was measured.
        least_bytes: Smallest `unowned_bytes` of all polls that did not list the process.
        since_ns: Time of the first of these polls.
        polled_ns: Time at which this poll began.
    """

    worker_id: int
    card_uuid: str
    unowned_bytes: int
    least_bytes: int
    since_ns: int
    polled_ns: int


@dataclass(frozen=True, slots=True)
class CardPolled:
    """A poll of a card, for the memory that belongs neither to leases nor to the pool.

    All figures exclude bytes that were already taken when the card was measured. `devices.Others` keeps the account of
    them.

    Attributes:
        unowned_bytes: Bytes that belong to no process.
        outside_bytes: Bytes of processes that are not workers of the daemon.
        polled_ns: Time at which the poll began.
    """

    card_uuid: str
    unowned_bytes: int
    outside_bytes: int
    polled_ns: int


@dataclass(frozen=True, slots=True)
class ReclaimFailed:
    """The worker could not be killed, or its bytes could not be proved free: the slice is fenced."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class FenceClearRequested:
    """An operator vouches that the fenced slices of a card (None: of every card) are free."""

    request: int
    card_uuid: str | None


# --- events: what an earlier daemon has left. They come before all other events ---


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """A lease of an earlier table; sent before all other events, once for each lease.

    Attributes:
        kept: The persisted lease, corrected by its control page: the later deadline and the higher generation apply,
            and a flipped revocation word makes it DRAINING.
        has_worker: Whether the worker runs. If not, its parent process has reaped it or will reap it.
        has_session: Whether a client may have attached to the session, according to the control page.
        membership_deadline: Time until which a claimed lease may be served, according to the control page; None if it
          has none.
        park_number: Number of the park that its session is in, according to its worker, which may have parked it
          without a record; 0 if it is not parked.
    """

    kept: LeaseRow
    has_worker: bool
    has_session: bool = True
    membership_deadline: MembershipDeadline | None = None
    park_number: int = 0


@dataclass(frozen=True, slots=True)
class RegionRestored:
    """A region of an earlier table; sent once for each, after all leases and before all other events."""

    kept: RegionRow


@dataclass(frozen=True, slots=True)
class WorkerFound:
    """A worker of an earlier daemon, alive or dead, that belongs to no persisted lease.

    Sent before all other events, once for each worker. The table kills it and holds its bytes until they are proved
    free. The journal has no record of it.

    Attributes:
        worker_id: The id of its lease or warm context, or a random one.
        beside_lease_id: The lease that has this worker in addition to its own, for a submit or a second session; 0 if
          there is none. Otherwise `worker_id` is random and belongs to no lease.
    """

    worker_id: int
    card_uuid: str
    charge_bytes: int
    beside_lease_id: int = 0


# --- events: the node as a whole ---


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator requests that the node, or one card, be empty within `within_ms`; see `admission.Drains`.

    Attributes:
        card: UUID or index of the card; None for the whole node.
    """

    request: int
    within_ms: int
    card: str | None = None


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """An operator ends the drain of the node, or of one card: tenants may acquire there again.

    Attributes:
        card: UUID or index of the card; None for the whole node.
    """

    request: int
    card: str | None = None


@dataclass(frozen=True, slots=True)
class DrainTimerFired:
    """The deadline of the node's drain, or of a card's, has passed. Late, early and repeated timers are harmless."""


@dataclass(frozen=True, slots=True)
class TenantRulesChanged:
    """The operator changed the bounds of tenants.

    Attributes:
        renamed: Tenant names that may belong to other people from now on; they must not get their predecessors'
          contexts.
    """

    rules: TenantRules
    renamed: frozenset[str] = frozenset()


# --- events: regions and resizes. The answers must come from the lease's own worker ---


@dataclass(frozen=True, slots=True)
class RegionRequested:
    """A tenant, or an operator on its behalf, asks for a region of an active lease.

    Attributes:
        lease_id: The lease that is to contain the region.
        region_id: Id chosen by the broker, nonzero and never used before by a lease or a region.
        tenant: The tenant that asks.
        owner: The region's own tenant, who may renew and free it.
        granule_bytes: Region sizes in this session are multiples of it; 0 if the session can have no regions.
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
    """Answer to `OpenRegion`: the region's memory is mapped at `address`, and its time begins."""

    region_id: int
    address: int


@dataclass(frozen=True, slots=True)
class RegionRefused:
    """Answer to `OpenRegion` or `EndRegion`: the session does not have the region.

    Attributes:
        reason: A sentence for the tenant that says why it could not be mapped.
    """

    region_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegionEnded:
    """Answer to `EndRegion`: nothing in the session can reach the region's memory any more.

    Attributes:
        freed_bytes: Bytes that were returned to the card.
        kept_bytes: Bytes that stay in the region's place until `RegionReleased`.
        is_shown: Whether the driver's free memory grew by at least `freed_bytes`.
    """

    region_id: int
    freed_bytes: int
    kept_bytes: int
    is_shown: bool


@dataclass(frozen=True, slots=True)
class RegionStuck:
    """Answer to `EndRegion`: the session can't be made to give up the memory, so the session ends.

    Attributes:
        region_id: The region.
        reason: What prevents this.
        cause: KERNEL_TIMEOUT if the worker reports it, for example because a launch that named the region still runs;
            UNRESPONSIVE if the worker did not receive the order, or if its answer can't be true.
    """

    region_id: int
    reason: str
    cause: Cause = Cause.KERNEL_TIMEOUT


@dataclass(frozen=True, slots=True)
class RegionProved:
    """Answer to `ProveRegion`: the card showed no more bytes for the worker than `ProveRegion` allowed.

    Attributes:
        region_id: The region, or the lease that was resized.
    """

    region_id: int


@dataclass(frozen=True, slots=True)
class RegionReleased:
    """The session has released an ended region's address; the bytes kept in its place are back on the card."""

    region_id: int


@dataclass(frozen=True, slots=True)
class RegionCancelRequested:
    """A region's tenant, its lease's tenant or an operator asks to refuse launches in it, or to accept them again."""

    request: int
    region_id: int
    tenant: str
    is_cancelled: bool
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    """A tenant, or an operator on its behalf, asks to change the size of a running lease."""

    request: int
    lease_id: int
    tenant: str
    size_bytes: int
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class SliceResized:
    """Answer to each `ResizeSlice`, with the session's present size.

    Attributes:
        doubt: Why it is not the requested size; "" if it is.
    """

    lease_id: int
    size_bytes: int
    doubt: str = ""


# --- events: parking. The answers must come from the lease's own worker, with the number of the last order ---


@dataclass(frozen=True, slots=True)
class ParkRequested:
    """A tenant, or an operator, asks to move the bytes of a lease's session to the host's memory."""

    request: int
    lease_id: int
    tenant: str
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class SessionParked:
    """Answer to `ParkSession`: the bytes are in the host's memory, and the worker has released them.

    Attributes:
        moved_bytes: Bytes that were copied.
        kept_bytes: Bytes of the slice that stay on the card, such as code.
        is_in_place: Whether all bytes stay on the card, as ordered; then `moved_bytes` are those that will move.
        ahead_bytes: Bytes of `moved_bytes` that were copied before the order.
    """

    lease_id: int
    number: int
    moved_bytes: int
    kept_bytes: int = 0
    is_in_place: bool = False
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionParkRefused:
    """Answer to `ParkSession`: the session stays on the card, unchanged.

    Attributes:
        reason: Why, as a clause.
        lacks_memory: Whether the worker has too little host memory, or none.
    """

    lease_id: int
    number: int
    reason: str
    lacks_memory: bool = False


@dataclass(frozen=True, slots=True)
class ReturnWanted:
    """An operation waits for a parked session. Repeated while it does."""

    lease_id: int
    number: int


@dataclass(frozen=True, slots=True)
class SessionReturned:
    """Answer to `ReturnSession`: the session is on the card. If it was not parked, nothing was moved."""

    lease_id: int
    number: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class SessionReturnFailed:
    """Answer to `ReturnSession` or `AdoptSession`: the session is parked as before, and holds nothing of the card.

    Attributes:
        is_mismatch: Whether the worker that was to adopt it could not restore it exactly.
    """

    lease_id: int
    number: int
    reason: str
    is_mismatch: bool = False


@dataclass(frozen=True, slots=True)
class SessionImaged:
    """Answer to `LeaveSession`: the broker has the session's image, and the worker no longer serves the session."""

    lease_id: int
    number: int
    image_bytes: int


@dataclass(frozen=True, slots=True)
class SessionStays:
    """Answer to `LeaveSession`: the session can't leave its process, and stays parked there.

    Attributes:
        is_lasting: Whether the reason is permanent, such as something that the session contains.
    """

    lease_id: int
    number: int
    reason: str
    is_lasting: bool


@dataclass(frozen=True, slots=True)
class MoveRequested:
    """A tenant, or an operator, asks to move a lease's session to another card.

    Attributes:
        card: The card's uuid (with or without "GPU-") or its index in decimals; None if the session is to leave its
            process and stay in the host's memory.
        from_version: The version of the session's worker if that runs other code than this daemon's, else "". Such a
            session may be moved to its own card, which gives it a new worker.
    """

    request: int
    lease_id: int
    tenant: str
    card: str | None
    is_operator: bool = False
    from_version: str = ""


@dataclass(frozen=True, slots=True)
class SessionsUsed:
    """A poll found that the sessions of these leases were used after the previous poll."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StayClaimed:
    """A worker's claim about why its session can't leave its process; "" if it can."""

    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The daemon is stopping: it grants no acquire, and every lease ends."""


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

TimerEvent = TimerFired | WaitTimerFired | HoldTimerFired | ParkTimerFired | PoolTimerFired | DrainTimerFired
"""Events that the broker posts because the table armed a timer for them."""

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
    | CardPolled
    | ReclaimFailed
    | FenceClearRequested
    | LeaseRestored
    | RegionRestored
    | WorkerFound
    | DrainRequested
    | DrainCancelled
    | DrainTimerFired
    | TenantRulesChanged
    | MembershipDeadlineMoved
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
    | ParkRequested
    | SessionParked
    | SessionParkRefused
    | ReturnWanted
    | SessionReturned
    | SessionReturnFailed
    | SessionImaged
    | SessionStays
    | MoveRequested
    | SessionsUsed
    | StayClaimed
    | ParkTimerFired
    | ShutdownRequested
)


# --- effects: what the broker executes ---


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a worker for the lease; the answer is `WorkerReady`, `WorkerFailed` or `WorkerExited`.

    Its session gets `terms.session_bytes`.
    """

    lease_id: int
    card_uuid: str
    terms: LeaseTerms


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Start a worker that opens a context without a lease; the answers are those of `SpawnWorker`."""

    warm_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class RenameWorker:
    """From now on use another id for a worker, running or not, in every event and effect.

    This is how a lease takes over a warm context, before its `SpawnWorker`, or returns one. A submit takes one over and
    never returns it.
    """

    from_id: int
    to_id: int


@dataclass(frozen=True, slots=True)
class WarmEnded:
    """For logs and metrics, once for each warm context that no lease has taken over: it has ended, or is fenced."""

    warm_id: int
    card_uuid: str
    reason: str
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class SpawnSubmit:
    """Start a second worker for a lease under the submit's id; the answers are those of `SpawnWorker`.

    If `is_warm`, an earlier `RenameWorker` has given a warm context this id.
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
    """For logs: a submit's bytes could not be proved free. Its lease continues and holds them."""

    submit_id: int
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SubmitEnded:
    """Forget a submit, once: its bytes are proved free, or belong to its lease's fence."""

    submit_id: int
    lease_id: int
    reason: str


# --- effects: a worker's control page, its end, and the proof that its bytes are free ---


class SetDeadline(NamedTuple):
    """Write the deadline and the generation to the control page, where the worker reads them."""

    worker_id: int
    generation: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class RefuseWork:
    """Set the revocation word on the control page: the first effect of every teardown, once for each worker."""

    worker_id: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker's process and reap it; the answer is `WorkerExited`, even without a process.

    Attributes:
        after_record: Whether the kill must wait until all records so far are durable, or never will be. The lease
            continues without this worker, but a table that was restored from an earlier record would need it.
        doubt: Why the worker's context is not reused, if its scrub was not proved in time; otherwise "".
    """

    worker_id: int
    after_record: bool = False
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class ScrubWorker:
    """Order the worker to free and zero the lease's memory. The answer is `WorkerScrubbed`, or may not come at all."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class RecycleWorker:
    """Turn a lease's scrubbed worker into a warm context with the given id and a new control page."""

    lease_id: int
    warm_id: int


@dataclass(frozen=True, slots=True)
class ProveReclaimed:
    """Poll the device until the worker's bytes are free.

    The answer is `WorkerUnlisted`, as often as needed, or `ReclaimProved` or `ReclaimFailed`.
    """

    worker_id: int
    card_uuid: str


# --- effects: cards, timers and subscribers ---


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """For logs: programs other than workers hold more or less of a card's memory, so its capacity has changed."""

    card: CardSnapshot
    is_less: bool


class ArmTimer(NamedTuple):
    """Send `event` at `due_ns`.

    Replaces an earlier timer of the same kind, for the same worker, for the same request or for the node. The replaced
    timer may still fire: the table checks every timer against its own times.
    """

    event: TimerEvent
    due_ns: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Notify subscribers of the phase of an active lease.

    Sent when a drain begins, is moved or is cancelled, and when a lease loses its last connection or gets one again.
    """

    lease_id: int
    phase: Phase
    left_ms: int


# --- effects: regions and resizes ---


@dataclass(frozen=True, slots=True)
class OpenRegion:
    """Order the lease's worker to map a region. The answer is `RegionOpened` or `RegionRefused`, or may not come."""

    lease_id: int
    region_id: int
    slot: int
    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SetRegion:
    """Write a region's word and deadline to the regions page, where the worker reads them, then raise the page's epoch.

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
    """Order the worker to remove an ended region's memory.

    The answer is `RegionEnded` or `RegionStuck`, or may not come.

    If the worker does not have the region, the answer is `RegionRefused`. For a region of an earlier table, the order
    is sent again.
    """

    lease_id: int
    region_id: int
    grace_ms: int


@dataclass(frozen=True, slots=True)
class ProveRegion:
    """Poll the card until it shows at most `allowed_bytes` for the lease's worker; the answer is `RegionProved`.

    Attributes:
        region_id: The region that released the bytes; the lease itself after it was parked, or its slice was reduced.
    """

    lease_id: int
    region_id: int
    card_uuid: str
    allowed_bytes: int


@dataclass(frozen=True, slots=True)
class ResizeSlice:
    """Order the worker to change its session's slice. The answer is `SliceResized`, or may not come.

    Attributes:
        size_bytes: The session's own bytes, without those that the lease keeps for submits.
        after_record: Whether the records so far must be durable before the order. A table that was restored from an
            earlier record would not charge the card for the bytes by which the worker has grown.
    """

    lease_id: int
    size_bytes: int
    after_record: bool


# --- effects: parking ---


@dataclass(frozen=True, slots=True)
class ParkSession:
    """Order the lease's worker to park its session. The answer is `SessionParked` or `SessionParkRefused`.

    Attributes:
        number: The park's number, larger than all earlier ones.
        grace_ms: Time within which the session's launched work must end.
        in_place: Whether its bytes are to stay on the card, for a direct move.
    """

    lease_id: int
    number: int
    grace_ms: int
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class ReturnSession:
    """Order the lease's worker to bring its session back. The answer is `SessionReturned` or `SessionReturnFailed`."""

    lease_id: int
    number: int


@dataclass(frozen=True, slots=True)
class RefuseWaitingOperations:
    """Order the worker to refuse the operations that wait for its parked session, as BUSY. `reason` is a sentence."""

    lease_id: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveParkMemory:
    """Give the lease's worker host memory for its session, in place of any earlier one.

    It is prepared in the background.

    Attributes:
        host_bytes: Bytes that are held for it: those of its slice, rounded up to whole granules.
    """

    lease_id: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class DropParkMemory:
    """Order the worker of a resident session to release the host memory that it keeps for its next park."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class CopyAhead:
    """Order the worker of a resident session to copy its bytes to its host memory while nobody uses it.

    The session stays on its card. If it is parked before it is used again, the park copies only the rest.
    """

    lease_id: int


@dataclass(frozen=True, slots=True)
class LeaveSession:
    """Order the worker of a parked session to send its image. The answer is `SessionImaged` or `SessionStays`.

    Attributes:
        carries: Whether the session returns at once in its next worker, so that it may leave while operations wait.
        is_upgrade: Whether its worker is kept until the next one has restored the whole session.
        in_place: Whether it is parked in place, so that its worker lends its pages.
        by_ring: Whether that worker lends them through a ring in host memory.
    """

    lease_id: int
    number: int
    carries: bool = False
    is_upgrade: bool = False
    in_place: bool = False
    by_ring: bool = False


@dataclass(frozen=True, slots=True)
class StaySession:
    """Discard the image of a session, and order its worker to serve it again."""

    lease_id: int
    number: int


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Start a worker for a lease with a cold session; answers and fields are those of `SpawnWorker`."""

    lease_id: int
    card_uuid: str
    terms: LeaseTerms


@dataclass(frozen=True, slots=True)
class AdoptSession:
    """Order a lease's new worker to adopt its session from the image that the broker keeps.

    The answer is `SessionReturned` or `SessionReturnFailed`.

    Attributes:
        refusal: Why the worker must leave the session parked, and answer with `SessionReturnFailed`; "" to return it.
    """

    lease_id: int
    number: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class WatchClients:
    """Watch the clients of a cold session again, because one of them may be waiting."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class RequestFaulted:
    """Answer a request that waited in the table, because a bug in the core made its handling fail."""

    request: int
    error: Exception


@dataclass(frozen=True, slots=True)
class LeaseLeft:
    """A session has left its process. From now on the broker keeps its image. Also for logs, metrics and the journal.

    Attributes:
        took_ns: Time from the order to the image.
    """

    lease: LeaseSnapshot
    image_bytes: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class LeaseMoved:
    """For logs, metrics and the journal: a session is on another card.

    Attributes:
        from_uuid: The card that it left.
        moved_bytes: Bytes of its pages.
        took_ns: Time from the request until the session was complete on the new card.
        why_through_host: Why its bytes went through the host's memory; "" if they went directly to the other card.
    """

    lease: LeaseSnapshot
    from_uuid: str
    moved_bytes: int
    took_ns: int
    why_through_host: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """For logs and metrics: a session has moved from a worker of another version to one of this version, on its card.

    Attributes:
        from_version: The version of the worker that it left.
        moved_bytes: Bytes of its pages.
        took_ns: Time from the request until the session was complete in the new worker.
    """

    lease: LeaseSnapshot
    from_version: str
    moved_bytes: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class LeaseParked:
    """For logs, metrics and the journal: a session's bytes are off the card, and proved free.

    Attributes:
        took_ns: Time from the order to the proof.
        ahead_bytes: Bytes of `moved_bytes` that were copied before the order, while the session was idle.
    """

    lease: LeaseSnapshot
    cause: ParkCause
    moved_bytes: int
    took_ns: int
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """For logs, metrics and the journal: a parked session is on its card again.

    Attributes:
        parked_for_ns: Time since it was parked.
        took_ns: Time from the order to the answer.
    """

    lease: LeaseSnapshot
    moved_bytes: int
    parked_for_ns: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class ParkFailed:
    """For logs and metrics: a session could not be parked or could not return. It stays where it was.

    Attributes:
        cause: Why it was to be parked; None for a return.
    """

    lease: LeaseSnapshot
    cause: ParkCause | None
    reason: str
    failure: ParkFailure


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
class FreeDone:
    """Reply to a free: the lease is torn down and its bytes are proved free."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class RevokeDone:
    """Reply to a revoke: sent once the lease is torn down or fenced, or at once if no lease has the id."""

    request: int
    outcome: RevokeOutcome


@dataclass(frozen=True, slots=True)
class SlicesCleared:
    """Reply to a fence clear: how many slices were released, and their leases and warm contexts."""

    request: int
    count: int
    lease_ids: tuple[int, ...]
    warm_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainSet:
    """Reply to a drain or its cancellation.

    Attributes:
        deadline_ns: Time at which the drain ends the remaining leases; None without a drain.
        active_leases: Number of active leases of the node, or of the card.
        card_uuid: The drained card; "" for the node.
    """

    request: int
    deadline_ns: int | None
    active_leases: int
    card_uuid: str = ""


@dataclass(frozen=True, slots=True)
class SubmitReady:
    """Reply to a submit request: the worker has a context and waits for the connection."""

    request: int
    submit_id: int
    lease_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RequestDenied:
    """Reply to any request that is refused; `denial` has the reason for its client."""

    request: int
    denial: Denial


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """For logs and metrics, once per lease: it is torn down or fenced; `lease.state` says which."""

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
    """Reply to a region's cancel: launches that name it are refused, or accepted again."""

    request: int
    region_id: int


@dataclass(frozen=True, slots=True)
class Resized:
    """Reply to a resize: the lease with its new size, which its card is now charged for."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class SessionParkDone:
    """Reply to a park: the session's bytes have left its card and are proved free."""

    request: int
    lease: LeaseSnapshot
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class SessionMoved:
    """Reply to a move: the session is on the other card, or only in the host's memory.

    Attributes:
        moved_bytes: Bytes of its pages.
        took_ns: Time from the request to the end of the move.
    """

    request: int
    lease: LeaseSnapshot
    moved_bytes: int
    took_ns: int


Outcome = (
    Granted
    | RegionGranted
    | RegionCancelSet
    | Resized
    | SessionParkDone
    | SessionMoved
    | Renewed
    | FreeDone
    | RevokeDone
    | SlicesCleared
    | DrainSet
    | SubmitReady
    | Checked
    | RequestDenied
)

Effect = (
    SpawnWorker
    | RequestFaulted
    | SpawnSubmit
    | RefuseSubmit
    | SubmitFenced
    | SubmitEnded
    | SubmitReady
    | WarmUp
    | RenameWorker
    | WarmEnded
    | SetDeadline
    | SetMembershipDeadline
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
    | FreeDone
    | RevokeDone
    | SlicesCleared
    | DrainSet
    | Checked
    | RequestDenied
    | OpenRegion
    | SetRegion
    | EndRegion
    | ProveRegion
    | ResizeSlice
    | RegionGranted
    | RegionCancelSet
    | Resized
    | ParkSession
    | ReturnSession
    | RefuseWaitingOperations
    | GiveParkMemory
    | DropParkMemory
    | CopyAhead
    | LeaseParked
    | LeaseReturned
    | ParkFailed
    | LeaveSession
    | StaySession
    | RestartWorker
    | AdoptSession
    | WatchClients
    | LeaseLeft
    | LeaseMoved
    | WorkerReplaced
    | SessionParkDone
    | SessionMoved
    | LeaseEnded
)
