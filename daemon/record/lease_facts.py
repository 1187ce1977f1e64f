"""The history of leases: events and their effects in, facts out, computed once for the audit log, the log and metrics.

A fact holds what no single effect has: who asked and when, when the lease was granted, and when its work was refused.
The memory for that is bounded by open requests and live leases. The only I/O is the log line that reports a bug.

Two readers of events do not use facts. The journal writes rows directly from effects: what is durable must not depend
on what is reported, and the daemon's own requests also change rows, although no fact answers them. The subscriptions
read a lease's phase from the lease table, because it also changes with effects that make no fact (`SetDeadline`,
`Warned`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, get_args

from gpulease.daemon.leases import (
    AcquireRequested,
    AcquireStep,
    CapacityChanged,
    Cause,
    Checked,
    DrainCancelled,
    DrainRequested,
    DrainSet,
    Effect,
    Event,
    FenceClearRequested,
    FreeDone,
    FreeRequested,
    Granted,
    KillWorker,
    LeaseEnded,
    LeaseLeft,
    LeaseMoved,
    LeaseParked,
    LeaseRestored,
    LeaseReturned,
    LeaseSnapshot,
    LeaseState,
    MoveRequested,
    ParkFailed,
    ParkRequested,
    RecycleWorker,
    RefuseWork,
    RegionCancelRequested,
    RegionCancelSet,
    RegionGranted,
    RegionRequested,
    RegionRestored,
    RenameWorker,
    Renewed,
    RenewRequested,
    RequestDenied,
    RequesterGone,
    Resized,
    ResizeRequested,
    RevokeDone,
    RevokeRequested,
    SessionFaulted,
    SessionMoved,
    SessionParkDone,
    SetRegion,
    SlicesCleared,
    SpawnSubmit,
    SpawnWorker,
    SubmitEnded,
    SubmitFenced,
    SubmitReady,
    SubmitRequested,
    WarmEnded,
    WorkerExited,
    WorkerFailed,
    WorkerKind,
    WorkerReady,
    WorkerScrubbed,
    kind_of,
)
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.records import RecordKind
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import MetricFamily
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.session_words import ENDED_WORDS

THE_DAEMON: Final = "gpuleased"
"""The requester of what no peer requested: the daemon itself."""

RegionRequest = RegionRequested | RegionCancelRequested | ResizeRequested | ParkRequested | MoveRequested
TenantRequest = RenewRequested | AcquireRequested | FreeRequested | SubmitRequested | RegionRequest
Request = TenantRequest | RevokeRequested | FenceClearRequested | DrainRequested | DrainCancelled
Lookup = Callable[[int], LeaseSnapshot | None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FactRow:
    """What a kind of fact comes from, and what is made of it.

    Attributes:
        sources: The types of the event or effect that is its `Fact.source`.
        is_answer: Whether it answers a request. The audit log omits answers to the daemon's own requests: the records
            of the lease say the same.
        logs: The log events; the first is the usual one. A fact with an audit record is logged with the record's
            particulars. A fact without one, or with two events, needs a method in `LeaseLog`.
        audit: The kind of its audit record; `projector` makes the particulars.
        has_worker: Whether the lease has a worker at that moment. Its process id is then part of the log line.
        counts: The counters that it adds 1 to, each by the labels of its family. A region's facts count in `of_regions`
            instead.
        counts_lives: The counters that count it only for a lease that had been granted.
        of_regions: What `counts` is for regions.
        lives_of_regions: What `counts_lives` is for regions.
    """

    sources: tuple[type, ...]
    is_answer: bool = False
    logs: tuple[LogEvent, ...] = ()
    audit: RecordKind | None = None
    has_worker: bool = False
    counts: tuple[MetricFamily, ...] = ()
    counts_lives: tuple[MetricFamily, ...] = ()
    of_regions: tuple[MetricFamily, ...] = ()
    lives_of_regions: tuple[MetricFamily, ...] = ()

    @property
    def families(self) -> tuple[MetricFamily, ...]:
        return self.counts + self.counts_lives + self.of_regions + self.lives_of_regions


class FactKind(Enum):
    """The kinds of facts: each with its source, its log event, its audit record and its counters."""

    # A lease, from the request to its grant.
    REQUESTED = FactRow(sources=(AcquireRequested,), logs=(LogEvent.LEASE_REQUESTED, LogEvent.LEASE_QUEUED))
    """A tenant requested a lease."""
    PLACED = FactRow(sources=(SpawnWorker,), logs=(LogEvent.LEASE_PLACED,))
    """The lease has its bytes, and gets a worker."""
    WORKER_READY = FactRow(sources=(WorkerReady,), logs=(LogEvent.WORKER_READY,))
    """The lease's worker has its context."""
    WORKER_FAILED = FactRow(sources=(WorkerFailed,), logs=(LogEvent.WORKER_FAILED,))
    """The lease's worker could not make its context."""
    WORKER_EXITED = FactRow(sources=(WorkerExited,), logs=(LogEvent.WORKER_EXITED, LogEvent.WORKER_DIED))
    """The lease's worker has ended."""
    WORKER_KILLED = FactRow(sources=(KillWorker,), logs=(LogEvent.WORKER_KILLED,))
    """The lease's worker is killed."""
    SCRUB_DOUBTED = FactRow(sources=(WorkerScrubbed,), logs=(LogEvent.WARM_REFUSED,))
    """A context was scrubbed without a proof."""
    GRANTED = FactRow(
        sources=(Granted, RegionGranted),
        is_answer=True,
        logs=(LogEvent.LEASE_GRANTED,),
        audit=RecordKind.GRANT,
        has_worker=True,
        counts=(families.LEASES_ACQUIRED,),
        of_regions=(families.REGIONS_OPENED,),
    )
    """A region is a lease that has a parent."""
    ADOPTED = FactRow(
        sources=(LeaseRestored, RegionRestored),
        logs=(LogEvent.LEASE_ADOPTED,),
        audit=RecordKind.ADOPT,
        has_worker=True,
        counts=(families.LEASES_ADOPTED,),
        of_regions=(families.REGIONS_ADOPTED,),
    )
    """An earlier daemon's lease continues."""
    ADOPTED_ENDING = FactRow(
        sources=(LeaseRestored, RegionRestored),
        counts=(families.LEASES_ADOPTED,),
        of_regions=(families.REGIONS_ADOPTED,),
    )
    """An earlier daemon's lease is being torn down."""
    # Answers to requests about leases, and to operators.
    RENEWED = FactRow(
        sources=(Renewed,),
        is_answer=True,
        logs=(LogEvent.LEASE_RENEWED,),
        audit=RecordKind.RENEW,
        counts=(families.LEASES_RENEWED,),
        of_regions=(families.REGIONS_RENEWED,),
    )
    RESIZED = FactRow(sources=(Resized,), is_answer=True, logs=(LogEvent.LEASE_RESIZED,), audit=RecordKind.RESIZE)
    PARK_DONE = FactRow(
        sources=(SessionParkDone,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    MOVE_DONE = FactRow(
        sources=(SessionMoved,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    CANCEL_SET = FactRow(sources=(RegionCancelSet,), is_answer=True)
    FREED = FactRow(sources=(FreeDone,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR)
    REVOKED = FactRow(sources=(RevokeDone,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR)
    FENCES_CLEARED = FactRow(
        sources=(SlicesCleared,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    UNFENCED = FactRow(
        sources=(SlicesCleared,), is_answer=True, logs=(LogEvent.LEASE_UNFENCED,), audit=RecordKind.CLEAR
    )
    """Fences were cleared: one fact for each lease."""
    DRAIN_SET = FactRow(sources=(DrainSet,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR)
    DENIED = FactRow(
        sources=(RequestDenied,),
        is_answer=True,
        logs=(LogEvent.REQUEST_DENIED,),
        audit=RecordKind.DENY,
        counts=(families.DENIALS,),
    )
    # What happens to leases, up to their end.
    FAULTED = FactRow(
        sources=(SessionFaulted,),
        logs=(LogEvent.SESSION_FAULTED,),
        audit=RecordKind.FAULT,
        has_worker=True,
        counts=(families.SESSION_FAULTS,),
    )
    """A lease's session lost its context; once for each."""
    SUBMIT_FAULTED = FactRow(sources=(SessionFaulted,), counts=(families.SESSION_FAULTS,))
    """A submit lost its context; once for each."""
    PARKED = FactRow(
        sources=(LeaseParked,),
        logs=(LogEvent.LEASE_PARKED,),
        audit=RecordKind.PARK,
        counts=(families.LEASES_PARKED,),
    )
    """A session's bytes are in the host's memory, and proved free on the card."""
    UNPARKED = FactRow(
        sources=(LeaseReturned,),
        logs=(LogEvent.LEASE_RETURNED,),
        audit=RecordKind.RETURN,
        counts=(families.LEASES_RETURNED,),
    )
    """A parked session is on its card again."""
    LEFT = FactRow(
        sources=(LeaseLeft,),
        logs=(LogEvent.LEASE_COLD,),
        audit=RecordKind.COLD,
        counts=(families.LEASES_COLD,),
    )
    """A parked session has left its worker, which ends."""
    MOVED = FactRow(
        sources=(LeaseMoved,),
        logs=(LogEvent.LEASE_MOVED,),
        audit=RecordKind.MOVE,
        counts=(families.LEASES_MOVED,),
    )
    """A session is whole on another card."""
    PARK_FAILED = FactRow(sources=(ParkFailed,), logs=(LogEvent.LEASE_PARK_FAILED,), counts=(families.PARKS_FAILED,))
    """A session could not be parked, or could not return."""
    ENDING = FactRow(
        sources=(RefuseWork, SetRegion), logs=(LogEvent.LEASE_ENDING,), audit=RecordKind.OVER, has_worker=True
    )
    """Work of a lease that was granted is refused from now on."""
    CANCELLED = FactRow(sources=(RefuseWork, SetRegion))
    """A lease that was never granted ends."""
    ENDED = FactRow(
        sources=(LeaseEnded,),
        logs=(LogEvent.LEASE_RECLAIMED,),
        audit=RecordKind.END,
        counts_lives=(families.LEASES_DROPPED,),
        lives_of_regions=(families.REGIONS_ENDED,),
    )
    """A lease's bytes are proved free."""
    FENCED = FactRow(
        sources=(LeaseEnded,),
        logs=(LogEvent.LEASE_FENCED,),
        audit=RecordKind.FENCE,
        counts=(families.FENCES,),
        counts_lives=(families.LEASES_DROPPED,),
        lives_of_regions=(families.REGIONS_ENDED,),
    )
    """A lease's bytes are fenced."""
    # Submits, warm contexts and cards.
    SUBMIT_READY = FactRow(
        sources=(SubmitReady,),
        is_answer=True,
        logs=(LogEvent.SUBMIT_READY,),
        audit=RecordKind.SUBMIT,
        counts=(families.SUBMITS,),
    )
    SUBMIT_ENDED = FactRow(sources=(SubmitEnded,), logs=(LogEvent.SUBMIT_ENDED,), audit=RecordKind.SUBMIT)
    SUBMIT_FENCED = FactRow(sources=(SubmitFenced,), logs=(LogEvent.SUBMIT_FENCED,), audit=RecordKind.SUBMIT)
    WARM_TAKEN = FactRow(sources=(RenameWorker, SpawnSubmit), counts=(families.WARM_TAKEN,))
    """A lease or submit took a warm context."""
    WARM_RECYCLED = FactRow(sources=(RecycleWorker,), counts=(families.WARM_RECYCLED,))
    """A lease's worker became a warm context."""
    WARM_LOST = FactRow(sources=(WarmEnded,), logs=(LogEvent.WARM_GONE,), counts=(families.WARM_LOST,))
    """A warm context is gone, and its bytes are free."""
    WARM_FENCED = FactRow(
        sources=(WarmEnded,),
        logs=(LogEvent.WARM_FENCED,),
        audit=RecordKind.POOL,
        counts=(families.WARM_LOST, families.FENCES),
    )
    """The bytes of a warm context are fenced."""
    CAPACITY_CHANGED = FactRow(sources=(CapacityChanged,), logs=(LogEvent.CARD_GREW, LogEvent.CARD_SHRANK))

    # Members are looked up with every fact. `Enum` hashes their names, which is slow.
    __hash__ = object.__hash__
    row: FactRow

    def __init__(self, row: FactRow) -> None:
        self.row = row


class RequestKind(NamedTuple):
    """The names of an event that is a request.

    Attributes:
        names_tenant: Whether the event has its tenant. Operators' requests have no such field.
        operation: Its name in audit records.
        opcode: The operation by which peers request it. Metrics use the opcode's name.
    """

    names_tenant: bool
    operation: str
    opcode: Opcode


REQUESTS: Final[dict[type, RequestKind]] = {
    AcquireRequested: RequestKind(True, "acquire", Opcode.LEASE_ALLOC),
    RenewRequested: RequestKind(True, "renew", Opcode.LEASE_RENEW),
    SubmitRequested: RequestKind(True, "submit", Opcode.GPU_SUBMIT),
    FreeRequested: RequestKind(True, "free", Opcode.LEASE_FREE),
    RegionRequested: RequestKind(True, "region_open", Opcode.REGION_OPEN),
    RegionCancelRequested: RequestKind(True, "region_cancel", Opcode.REGION_CANCEL),
    ResizeRequested: RequestKind(True, "resize", Opcode.LEASE_RESIZE),
    ParkRequested: RequestKind(True, "park", Opcode.LEASE_PARK),
    MoveRequested: RequestKind(True, "move", Opcode.LEASE_MOVE),
    RevokeRequested: RequestKind(False, "revoke", Opcode.LEASE_REVOKE),
    FenceClearRequested: RequestKind(False, "fence_clear", Opcode.FENCE_CLEAR),
    DrainRequested: RequestKind(False, "drain", Opcode.DRAIN),
    DrainCancelled: RequestKind(False, "drain_cancel", Opcode.DRAIN_CANCEL),
}
"""The events that are requests."""

if REQUESTS.keys() != set(get_args(Request)):
    raise TypeError(f"REQUESTS must have exactly the types of Request, not {sorted(map(repr, REQUESTS))}")


class Asked(NamedTuple):
    """A request: who asked, at which monotonic time, and the event; None if it is unknown or the daemon's own."""

    by: str
    at_ns: int
    request: Request | None


class Times(NamedTuple):
    """The life of a lease so far, in monotonic nanoseconds; None for what has not happened.

    Attributes:
        asked_ns: When it was requested.
        spawned_ns: When its worker was started; None again once the worker was ready.
        granted_ns: When this daemon granted it; None for a lease of an earlier daemon.
        began_ns: When it was granted, or created under an earlier daemon.
        is_granted: Whether it is, or was, known as granted to its tenant.
        over_ns: When its work was refused.
        cause: Why its work was refused.
    """

    asked_ns: int | None = None
    spawned_ns: int | None = None
    granted_ns: int | None = None
    began_ns: int | None = None
    is_granted: bool = False
    over_ns: int | None = None
    cause: Cause | None = None


NO_TIMES: Final = Times()


class Fact(NamedTuple):
    """An event of a lease's life, with everything that an audit record, a log line or a counter needs.

    Attributes:
        kind: What happened.
        now_ns: The monotonic time of the event.
        source: The event or effect that it comes from; its type is in the kind's row.
        lease_id: The lease; 0 if it is about none.
        lease: The lease after the event, where a record or a count needs it; None if it is unknown.
        asked: The request that it answers.
        times: The life of the lease, this fact included.
        card: The GPU of a warm context.
        is_warm: Whether a placed lease took a warm context.
        use: What an ended lease used of its card's time; None if that is not known.
    """

    kind: FactKind
    now_ns: int
    source: Any
    lease_id: int = 0
    lease: LeaseSnapshot | None = None
    asked: Asked | None = None
    times: Times = NO_TIMES
    card: str = ""
    is_warm: bool = False
    use: LeaseTimeUse | None = None


class LeaseHistory:
    """Turns each event, with the effects that the lease table made of it, into facts.

    Request 0 is the daemon's own: no peer waits for its outcome.

    Args:
        lookup: Returns a lease in its state after the event.
        lease_of_submit: Returns the lease of a submit by the submit's number, 0 for any other number.
        use_of: Returns what a lease has used of its card's time; None if that is not known.
    """

    def __init__(
        self,
        lookup: Lookup,
        lease_of_submit: Callable[[int], int] = lambda _: 0,
        use_of: Callable[[int], LeaseTimeUse | None] = lambda _: None,
    ) -> None:
        self._lookup = lookup
        self._lease_of_submit = lease_of_submit
        self._use_of = use_of
        self._asked: dict[int, Asked] = {}
        self._askers: dict[int, str] = {}
        self._times: dict[int, Times] = {}
        # The lease that took over a running worker in this event. The `SpawnWorker` that follows reads it.
        self._renamed_to = 0
        # Leases and submits with a reported fault: a second fault of the same session makes no fact.
        self._faulted: set[int] = set()
        self._on_event: Final[dict[type, Callable[[Any, int], Fact | None]]] = {
            AcquireRequested: self._requested,
            WorkerReady: self._worker_ready,
            WorkerFailed: self._worker_failed,
            WorkerScrubbed: self._scrubbed,
            SessionFaulted: self._session_faulted,
            LeaseRestored: self._restored,
            RegionRestored: self._region_restored,
        }
        self._on_effect: Final[dict[type, Callable[[Any, int], Fact | None]]] = {
            SpawnWorker: self._placed,
            KillWorker: self._killed,
            Granted: self._granted,
            RegionGranted: self._granted,
            Checked: self._checked,
            RequestDenied: self._denied,
            RefuseWork: self._refused_work,
            SetRegion: self._set_region,
            LeaseEnded: self._ended,
            SubmitReady: self._submit_ready,
            SubmitEnded: self._submit_ended,
            SubmitFenced: self._submit_fenced,
            RenameWorker: self._renamed,
            SpawnSubmit: self._submit_spawned,
            RecycleWorker: self._recycled,
            WarmEnded: self._warm_ended,
            CapacityChanged: self._capacity_changed,
            LeaseParked: lambda effect, now_ns: _parking(FactKind.PARKED, effect, now_ns),
            LeaseReturned: lambda effect, now_ns: _parking(FactKind.UNPARKED, effect, now_ns),
            ParkFailed: lambda effect, now_ns: _parking(FactKind.PARK_FAILED, effect, now_ns),
            LeaseLeft: lambda effect, now_ns: _parking(FactKind.LEFT, effect, now_ns),
            LeaseMoved: lambda effect, now_ns: _parking(FactKind.MOVED, effect, now_ns),
        }
        # The other effects are answers, all alike. `_follow` makes the facts of WorkerExited and UNFENCED.
        handled = {*self._on_event, *self._on_effect, WorkerExited}
        for kind in FactKind:
            for source in kind.row.sources:
                if source in handled:
                    continue
                # A new fact with a new source fails at the start, not when it first happens.
                if not kind.row.is_answer:
                    raise TypeError(f"{source.__name__} must have a method that makes its fact, {kind.name}")
                self._on_effect.setdefault(source, self._answer_of(kind))

    @property
    def is_at_rest(self) -> bool:
        """True if nothing is remembered: no request is open, and no lease is left."""
        return not (self._asked or self._askers or self._times or self._faulted)

    def asked_by(self, request: int, peer: str) -> None:
        """Note the peer that made a request, if its event has no tenant, or the operator who acts for its tenant."""
        self._askers[request] = peer

    def on_event(self, event: Event, effects: Sequence[Effect], now_ns: int) -> list[Fact]:
        """Return what one event brought about, in order, at monotonic time `now_ns`.

        A bug here must not keep effects from being carried out: it is logged, and the facts before it are returned.
        """
        facts: list[Fact] = []
        try:
            self._follow(event, effects, now_ns, facts)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"following {type(event).__name__}")
        return facts

    def _follow(self, event: Event, effects: Sequence[Effect], now_ns: int, facts: list[Fact]) -> None:
        kind = type(event)
        # A rename concerns only the spawn in the same event.
        self._renamed_to = 0
        # Step 1: remember who asks and when, for the answer, which may be a later event's effect.
        if (request := REQUESTS.get(kind)) is not None:
            self._take_in(event, now_ns, names_tenant=request.names_tenant)
        # Step 2: the event's own fact.
        on_event = self._on_event.get(kind)
        if on_event is not None and (fact := on_event(event, now_ns)) is not None:
            facts.append(fact)
        # Step 3: the facts of its effects, in their order.
        for effect in effects:
            on_effect = self._on_effect.get(type(effect))
            # Most effects make no fact: orders to workers, timers, the page.
            if on_effect is None or (fact := on_effect(effect, now_ns)) is None:
                continue
            facts.append(fact)
            # One answer to the operator, but one fact for each lease: their tenants have records of their own.
            if fact.kind is FactKind.FENCES_CLEARED:
                facts += self._unfenced(fact)
        # Step 4: events that end what is remembered, or that belong before their effects.
        if isinstance(event, RequesterGone):
            self._forget_request(self._asked.pop(event.request, None))
        elif isinstance(event, WorkerExited) and kind_of(event.worker_id) is WorkerKind.LEASE:
            # The worker's end comes first, but may itself be why the work of its lease is refused.
            times = self._times.get(event.worker_id, NO_TIMES)
            facts.insert(0, Fact(FactKind.WORKER_EXITED, now_ns, event, event.worker_id, None, None, times))

    def _take_in(self, event: Any, now_ns: int, *, names_tenant: bool) -> None:
        # Request 0 is the daemon's own and is never answered, so it would be remembered for ever.
        if request := event.request:
            by = event.tenant if names_tenant else THE_DAEMON
            self._asked[request] = Asked(self._askers.pop(request, by), now_ns, event)

    # --- events ---

    def _requested(self, event: AcquireRequested, now_ns: int) -> Fact | None:
        # The clock of the acquire starts here; a second step of the same acquire starts it again.
        self._times[event.lease_id] = times = Times(now_ns)
        if event.step is AcquireStep.PLACE:
            # Its check was the request.
            return None
        return Fact(FactKind.REQUESTED, now_ns, event, event.lease_id, None, None, times)

    def _worker_ready(self, event: WorkerReady, now_ns: int) -> Fact | None:
        if kind_of(event.worker_id) is not WorkerKind.LEASE:
            return None
        times = self._times.get(event.worker_id, NO_TIMES)
        if times.spawned_ns is not None:
            # A second event, which does no harm, is not the end of the same start.
            self._times[event.worker_id] = Times(times.asked_ns, None, *times[2:])
        return Fact(FactKind.WORKER_READY, now_ns, event, event.worker_id, None, None, times)

    def _worker_failed(self, event: WorkerFailed, now_ns: int) -> Fact | None:
        if kind_of(event.worker_id) is not WorkerKind.LEASE:
            return None
        return Fact(FactKind.WORKER_FAILED, now_ns, event, event.worker_id)

    def _scrubbed(self, event: WorkerScrubbed, now_ns: int) -> Fact | None:
        return Fact(FactKind.SCRUB_DOUBTED, now_ns, event, event.lease_id) if event.doubt else None

    def _session_faulted(self, event: SessionFaulted, now_ns: int) -> Fact | None:
        number = event.worker_id
        # The number is a submit's or a lease's. Only the first fault of a session is reported, while its lease lives.
        of_submit = self._lease_of_submit(number)
        lease = self._lookup(of_submit or number)
        if lease is None or lease.state is not LeaseState.ACTIVE or number in self._faulted:
            return None
        self._faulted.add(number)
        kind = FactKind.SUBMIT_FAULTED if of_submit else FactKind.FAULTED
        return Fact(kind, now_ns, event, lease.lease_id, lease)

    def _restored(self, event: LeaseRestored, now_ns: int) -> Fact | None:
        return self._adopted(event, event.kept.lease_id, event.kept.created_ns, now_ns)

    def _region_restored(self, event: RegionRestored, now_ns: int) -> Fact | None:
        return self._adopted(event, event.kept.region_id, event.kept.created_ns, now_ns)

    def _adopted(
        self, event: LeaseRestored | RegionRestored, lease_id: int, created_ns: int, now_ns: int
    ) -> Fact | None:
        lease = self._lookup(lease_id)
        # A restored lease that has ended, or that is only fenced, does not continue.
        if lease is None or lease.state not in (LeaseState.ACTIVE, LeaseState.DRAINING):
            return None
        is_active = lease.state is LeaseState.ACTIVE
        self._times[lease.lease_id] = times = Times(began_ns=created_ns, is_granted=is_active)
        kind = FactKind.ADOPTED if is_active else FactKind.ADOPTED_ENDING
        return Fact(kind, now_ns, event, lease.lease_id, lease, times=times)

    # --- answers ---

    def _answer_of(self, kind: FactKind) -> Callable[[Any, int], Fact]:
        def answered(effect: Any, now_ns: int) -> Fact:
            # Every answer has a request, and most have a lease.
            lease = getattr(effect, "lease", None)
            lease_id = 0 if lease is None else lease.lease_id
            return Fact(kind, now_ns, effect, lease_id, lease, self._take_request(effect.request, now_ns))

        return answered

    def _granted(self, effect: Granted | RegionGranted, now_ns: int) -> Fact:
        lease = effect.lease
        before = self._times.get(lease.lease_id, NO_TIMES)
        # A lease's life begins with its grant. Its end may already be known: the same event may refuse its work.
        times = Times(before.asked_ns, before.spawned_ns, now_ns, now_ns, True, before.over_ns, before.cause)
        self._times[lease.lease_id] = times
        asked = self._take_request(effect.request, now_ns)
        return Fact(FactKind.GRANTED, now_ns, effect, lease.lease_id, lease, asked, times)

    def _denied(self, effect: RequestDenied, now_ns: int) -> Fact:
        asked = self._take_request(effect.request, now_ns)
        self._forget_request(asked)
        lease_id = getattr(asked.request, "lease_id", 0)
        return Fact(FactKind.DENIED, now_ns, effect, lease_id, asked=asked)

    def _checked(self, effect: Checked, now_ns: int) -> None:
        """Forget an acquire that passed its check. It returns as a new request once its name is claimed."""
        self._forget_request(self._take_request(effect.request, now_ns))

    def _submit_ready(self, effect: SubmitReady, now_ns: int) -> Fact:
        asked, lease = self._take_request(effect.request, now_ns), self._lookup(effect.lease_id)
        return Fact(FactKind.SUBMIT_READY, now_ns, effect, effect.lease_id, lease, asked)

    def _unfenced(self, cleared: Fact) -> list[Fact]:
        effect: SlicesCleared = cleared.source
        return [
            Fact(FactKind.UNFENCED, cleared.now_ns, effect, lease_id, self._lookup(lease_id), cleared.asked)
            for lease_id in effect.lease_ids
        ]

    def _take_request(self, request: int, now_ns: int) -> Asked:
        return self._asked.pop(request, None) or Asked(THE_DAEMON, now_ns, None)

    def _forget_request(self, asked: Asked | None) -> None:
        """Forget the times of a requested lease that was not placed, because it never will be."""
        if asked is None or not isinstance(asked.request, AcquireRequested):
            return
        times = self._times.get(asked.request.lease_id)
        if times is not None and times.spawned_ns is None and times.over_ns is None:
            del self._times[asked.request.lease_id]

    # --- other effects ---

    def _placed(self, effect: SpawnWorker, now_ns: int) -> Fact:
        lease_id = effect.lease_id
        # An acquire's own times stay: they are parts of the grant's latency.
        before = self._times.get(lease_id, NO_TIMES)
        self._times[lease_id] = times = Times(before.asked_ns, now_ns, *before[2:])
        is_warm = self._renamed_to == lease_id
        return Fact(FactKind.PLACED, now_ns, effect, lease_id, None, None, times, "", is_warm)

    def _killed(self, effect: KillWorker, now_ns: int) -> Fact | None:
        if kind_of(effect.worker_id) is not WorkerKind.LEASE:
            return None
        return Fact(FactKind.WORKER_KILLED, now_ns, effect, effect.worker_id)

    def _refused_work(self, effect: RefuseWork, now_ns: int) -> Fact | None:
        lease = self._lookup(effect.worker_id)
        # Not for a warm context: `WarmEnded` makes the fact of its end.
        return None if lease is None else self._over(effect, lease, effect.cause, now_ns)

    def _set_region(self, effect: SetRegion, now_ns: int) -> Fact | None:
        region = self._lookup(effect.region_id)
        if effect.word not in ENDED_WORDS or region is None or region.cause is None:
            return None
        # The word of a region that is over may be written again: only the first time is its end.
        is_over = self._times.get(effect.region_id, NO_TIMES).over_ns is not None
        return None if is_over else self._over(effect, region, region.cause, now_ns)

    def _over(self, effect: RefuseWork | SetRegion, lease: LeaseSnapshot, cause: Cause, now_ns: int) -> Fact:
        before = self._times.get(lease.lease_id, NO_TIMES)
        self._times[lease.lease_id] = times = Times(*before[:5], now_ns, cause)
        # A lease that was never granted has no tenant's record: its denial and its end are reported.
        kind = FactKind.ENDING if times.is_granted else FactKind.CANCELLED
        return Fact(kind, now_ns, effect, lease.lease_id, lease, None, times)

    def _ended(self, effect: LeaseEnded, now_ns: int) -> Fact:
        lease_id = effect.lease.lease_id
        self._faulted.discard(lease_id)
        return _end_of(effect.lease, effect, now_ns, self._times.pop(lease_id, NO_TIMES), self._use_of(lease_id))

    def _submit_ended(self, effect: SubmitEnded, now_ns: int) -> Fact:
        self._faulted.discard(effect.submit_id)
        return Fact(FactKind.SUBMIT_ENDED, now_ns, effect, effect.lease_id, self._lookup(effect.lease_id))

    def _submit_fenced(self, effect: SubmitFenced, now_ns: int) -> Fact:
        return Fact(FactKind.SUBMIT_FENCED, now_ns, effect, effect.lease_id, self._lookup(effect.lease_id))

    def _renamed(self, effect: RenameWorker, now_ns: int) -> Fact | None:
        # The spawn that follows in the same event takes this context over.
        self._renamed_to = effect.to_id
        # A lease's worker is renamed when it is recycled; only a warm context that gets a lease is taken.
        if kind_of(effect.from_id) is WorkerKind.LEASE or (lease := self._lookup(effect.to_id)) is None:
            return None
        return Fact(FactKind.WARM_TAKEN, now_ns, effect, lease.lease_id, card=lease.card_uuid)

    def _submit_spawned(self, effect: SpawnSubmit, now_ns: int) -> Fact | None:
        # The submit has a worker of its own, so the pool was not used.
        if not effect.is_warm:
            return None
        return Fact(FactKind.WARM_TAKEN, now_ns, effect, effect.lease_id, card=effect.card_uuid)

    def _recycled(self, effect: RecycleWorker, now_ns: int) -> Fact | None:
        lease = self._lookup(effect.lease_id)
        if lease is None:
            return None
        return Fact(FactKind.WARM_RECYCLED, now_ns, effect, lease.lease_id, card=lease.card_uuid)

    def _warm_ended(self, effect: WarmEnded, now_ns: int) -> Fact:
        kind = FactKind.WARM_FENCED if effect.is_fenced else FactKind.WARM_LOST
        return Fact(kind, now_ns, effect, card=effect.card_uuid)

    def _capacity_changed(self, effect: CapacityChanged, now_ns: int) -> Fact:
        return Fact(FactKind.CAPACITY_CHANGED, now_ns, effect)


def _parking(
    kind: FactKind, effect: LeaseParked | LeaseReturned | ParkFailed | LeaseLeft | LeaseMoved, now_ns: int
) -> Fact:
    return Fact(kind, now_ns, effect, effect.lease.lease_id, effect.lease)


def end_under_earlier_daemon(lease: LeaseSnapshot, now_ns: int) -> Fact:
    """Return the fact that a lease ended under an earlier daemon, which was killed before it could record the end."""
    return _end_of(lease, None, lease.ended_ns or now_ns, NO_TIMES)


def _end_of(
    lease: LeaseSnapshot, effect: LeaseEnded | None, now_ns: int, times: Times, use: LeaseTimeUse | None = None
) -> Fact:
    kind = FactKind.FENCED if lease.state is LeaseState.FENCED else FactKind.ENDED
    return Fact(kind, now_ns, effect, lease.lease_id, lease, times=times, use=use)
