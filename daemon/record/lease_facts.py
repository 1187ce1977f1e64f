"""The kinds of facts about leases. A kind's row names its log event, its audit record and its counters.

A fact is an event or effect together with the requester and the times of the lease's life. `lease_history` makes the
facts; the audit log, the log and the metrics read them.

The journal does not use facts: it writes rows from effects, which include the effects of the daemon's own requests. The
subscriptions do not use facts either: they read a lease's phase from the lease table, because effects without a fact
also change it (`SetDeadline`, `Warned`).
"""

from enum import Enum
from typing import Any, Final, NamedTuple, get_args

from gpulease.daemon.leases import events
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, SubmitRequested
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.record.audit.records import RecordKind
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import MetricFamily
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Opcode

THE_DAEMON: Final = "gpuleased"
"""The requester's name in facts that the daemon itself caused."""

RegionRequest = (
    events.RegionRequested
    | events.RegionCancelRequested
    | events.ResizeRequested
    | events.ParkRequested
    | events.MoveRequested
)
TenantRequest = events.RenewRequested | events.AcquireRequested | events.FreeRequested | SubmitRequested | RegionRequest
Request = (
    TenantRequest | events.RevokeRequested | events.FenceClearRequested | events.DrainRequested | events.DrainCancelled
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FactRow:
    """The sources of a kind of fact, and the records, log events and counters that it leads to.

    Attributes:
        sources: The types that `Fact.source` may have.
        is_answer: Whether it answers a request. Answers to the daemon's own requests have no audit record, because the
            lease's other records say the same.
        logs: The log events; the first is the usual one. A fact with an audit record is logged with the record's
            particulars. A fact without a record, or with two log events, needs a method in `LeaseLog`.
        audit: The kind of its audit record; `projector` makes the particulars.
        has_worker: Whether the lease then has a worker, whose process id is in the log line.
        counts: The counters to which a lease's fact adds 1. A region's fact uses `of_regions`.
        counts_lives: Counters like `counts`, only for leases that had been granted.
        of_regions: The counters to which a region's fact adds 1.
        lives_of_regions: Counters like `of_regions`, only for regions that had been granted.
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
    REQUESTED = FactRow(sources=(events.AcquireRequested,), logs=(LogEvent.LEASE_REQUESTED, LogEvent.LEASE_QUEUED))
    """A tenant requested a lease."""
    PLACED = FactRow(sources=(events.SpawnWorker,), logs=(LogEvent.LEASE_PLACED,))
    """The lease has its bytes, and gets a worker."""
    WORKER_READY = FactRow(sources=(events.WorkerReady,), logs=(LogEvent.WORKER_READY,))
    """The lease's worker has its context."""
    WORKER_FAILED = FactRow(sources=(events.WorkerFailed,), logs=(LogEvent.WORKER_FAILED,))
    """The lease's worker could not create its context."""
    WORKER_EXITED = FactRow(sources=(events.WorkerExited,), logs=(LogEvent.WORKER_EXITED, LogEvent.WORKER_DIED))
    """The lease's worker has ended."""
    WORKER_KILLED = FactRow(sources=(events.KillWorker,), logs=(LogEvent.WORKER_KILLED, LogEvent.WARM_REFUSED))
    """The lease's worker is killed."""
    SCRUB_DOUBTED = FactRow(sources=(events.WorkerScrubbed,), logs=(LogEvent.WARM_REFUSED,))
    """A worker scrubbed its context, but the memory is not proved free."""
    GRANTED = FactRow(
        sources=(events.Granted, events.RegionGranted),
        is_answer=True,
        logs=(LogEvent.LEASE_GRANTED,),
        audit=RecordKind.GRANT,
        has_worker=True,
        counts=(families.LEASES_ACQUIRED,),
        of_regions=(families.REGIONS_OPENED,),
    )
    """A region is a lease that has a parent."""
    ADOPTED = FactRow(
        sources=(events.LeaseRestored, events.RegionRestored),
        logs=(LogEvent.LEASE_ADOPTED,),
        audit=RecordKind.ADOPT,
        has_worker=True,
        counts=(families.LEASES_ADOPTED,),
        of_regions=(families.REGIONS_ADOPTED,),
    )
    """An earlier daemon's lease continues."""
    ADOPTED_ENDING = FactRow(
        sources=(events.LeaseRestored, events.RegionRestored),
        counts=(families.LEASES_ADOPTED,),
        of_regions=(families.REGIONS_ADOPTED,),
    )
    """An earlier daemon's lease continues, and its teardown too."""
    # Answers to requests about leases, and to operators.
    RENEWED = FactRow(
        sources=(events.Renewed,),
        is_answer=True,
        logs=(LogEvent.LEASE_RENEWED,),
        audit=RecordKind.RENEW,
        counts=(families.LEASES_RENEWED,),
        of_regions=(families.REGIONS_RENEWED,),
    )
    RESIZED = FactRow(
        sources=(events.Resized,), is_answer=True, logs=(LogEvent.LEASE_RESIZED,), audit=RecordKind.RESIZE
    )
    PARK_DONE = FactRow(
        sources=(events.SessionParkDone,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    MOVE_DONE = FactRow(
        sources=(events.SessionMoved,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    CANCEL_SET = FactRow(sources=(events.RegionCancelSet,), is_answer=True)
    FREED = FactRow(
        sources=(events.FreeDone,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    REVOKED = FactRow(
        sources=(events.RevokeDone,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    FENCES_CLEARED = FactRow(
        sources=(events.SlicesCleared,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    UNFENCED = FactRow(
        sources=(events.SlicesCleared,), is_answer=True, logs=(LogEvent.LEASE_UNFENCED,), audit=RecordKind.CLEAR
    )
    """Fences were cleared: one fact for each lease."""
    DRAIN_SET = FactRow(
        sources=(events.DrainSet,), is_answer=True, logs=(LogEvent.OPERATOR_ACTED,), audit=RecordKind.OPERATOR
    )
    DENIED = FactRow(
        sources=(events.RequestDenied,),
        is_answer=True,
        logs=(LogEvent.REQUEST_DENIED,),
        audit=RecordKind.DENY,
        counts=(families.DENIALS,),
    )
    # Facts about leases, up to their end.
    FAULTED = FactRow(
        sources=(events.SessionFaulted,),
        logs=(LogEvent.SESSION_FAULTED,),
        audit=RecordKind.FAULT,
        has_worker=True,
        counts=(families.SESSION_FAULTS,),
    )
    """A lease's session lost its context. There is one such fact for each session."""
    SUBMIT_FAULTED = FactRow(sources=(events.SessionFaulted,), counts=(families.SESSION_FAULTS,))
    """A submit lost its context. There is one such fact for each submit."""
    PARKED = FactRow(
        sources=(events.LeaseParked,),
        logs=(LogEvent.LEASE_PARKED,),
        audit=RecordKind.PARK,
        counts=(families.LEASES_PARKED,),
    )
    """A session's bytes are in the host's memory, and proved free on the card."""
    UNPARKED = FactRow(
        sources=(events.LeaseReturned,),
        logs=(LogEvent.LEASE_RETURNED,),
        audit=RecordKind.RETURN,
        counts=(families.LEASES_RETURNED,),
    )
    """A parked session is on its card again."""
    LEFT = FactRow(
        sources=(events.LeaseLeft,),
        logs=(LogEvent.LEASE_COLD,),
        audit=RecordKind.COLD,
        counts=(families.LEASES_COLD,),
    )
    """A parked session has left its worker, and the worker is ended."""
    MOVED = FactRow(
        sources=(events.LeaseMoved,),
        logs=(LogEvent.LEASE_MOVED,),
        audit=RecordKind.MOVE,
        counts=(families.LEASES_MOVED,),
    )
    """A session is complete on another card."""
    UPGRADED = FactRow(
        sources=(events.WorkerReplaced,),
        logs=(LogEvent.LEASE_UPGRADED,),
        audit=RecordKind.UPGRADE,
        has_worker=True,
    )
    """A session has left a worker of another version."""
    PARK_FAILED = FactRow(
        sources=(events.ParkFailed,),
        logs=(LogEvent.LEASE_PARK_FAILED,),
        counts=(families.PARKS_FAILED, families.PARK_FAILURES),
    )
    """A session could not be parked, or could not return."""
    ENDING = FactRow(
        sources=(events.RefuseWork, events.SetRegion),
        logs=(LogEvent.LEASE_ENDING,),
        audit=RecordKind.OVER,
        has_worker=True,
    )
    """Work of a lease that was granted is refused from now on."""
    CANCELLED = FactRow(sources=(events.RefuseWork, events.SetRegion))
    """A lease that was never granted ends."""
    ENDED = FactRow(
        sources=(events.LeaseEnded,),
        logs=(LogEvent.LEASE_RECLAIMED,),
        audit=RecordKind.END,
        counts_lives=(families.LEASES_DROPPED,),
        lives_of_regions=(families.REGIONS_ENDED,),
    )
    """A lease's bytes are proved free."""
    FENCED = FactRow(
        sources=(events.LeaseEnded,),
        logs=(LogEvent.LEASE_FENCED,),
        audit=RecordKind.FENCE,
        counts=(families.FENCES,),
        counts_lives=(families.LEASES_DROPPED,),
        lives_of_regions=(families.REGIONS_ENDED,),
    )
    """A lease's bytes are fenced."""
    # Submits, warm contexts and cards.
    SUBMIT_READY = FactRow(
        sources=(events.SubmitReady,),
        is_answer=True,
        logs=(LogEvent.SUBMIT_READY,),
        audit=RecordKind.SUBMIT,
        counts=(families.SUBMITS,),
    )
    SUBMIT_ENDED = FactRow(sources=(events.SubmitEnded,), logs=(LogEvent.SUBMIT_ENDED,), audit=RecordKind.SUBMIT)
    SUBMIT_FENCED = FactRow(sources=(events.SubmitFenced,), logs=(LogEvent.SUBMIT_FENCED,), audit=RecordKind.SUBMIT)
    WARM_TAKEN = FactRow(sources=(events.RenameWorker, events.SpawnSubmit), counts=(families.WARM_TAKEN,))
    """A lease or submit took a warm context."""
    WARM_RECYCLED = FactRow(sources=(events.RecycleWorker,), counts=(families.WARM_RECYCLED,))
    """A lease's worker became a warm context."""
    WARM_LOST = FactRow(sources=(events.WarmEnded,), logs=(LogEvent.WARM_GONE,), counts=(families.WARM_LOST,))
    """A warm context is gone, and its bytes are free."""
    WARM_FENCED = FactRow(
        sources=(events.WarmEnded,),
        logs=(LogEvent.WARM_FENCED,),
        audit=RecordKind.POOL,
        counts=(families.WARM_LOST, families.FENCES),
    )
    """The bytes of a warm context are fenced."""
    CAPACITY_CHANGED = FactRow(sources=(events.CapacityChanged,), logs=(LogEvent.CARD_GREW, LogEvent.CARD_SHRANK))

    # Each fact is a lookup by member. `Enum` hashes members' names, which is slow.
    __hash__ = object.__hash__
    row: FactRow

    def __init__(self, row: FactRow) -> None:
        self.row = row


class RequestKind(NamedTuple):
    """The names of an event that is a request.

    Attributes:
        names_tenant: Whether the event has a field `tenant`. Operators' requests have none.
        operation: Its name in audit records.
        opcode: The operation by which peers request it. Metrics use the opcode's name.
    """

    names_tenant: bool
    operation: str
    opcode: Opcode


REQUESTS: Final[dict[type, RequestKind]] = {
    events.AcquireRequested: RequestKind(True, "acquire", Opcode.LEASE_ALLOC),
    events.RenewRequested: RequestKind(True, "renew", Opcode.LEASE_RENEW),
    SubmitRequested: RequestKind(True, "submit", Opcode.GPU_SUBMIT),
    events.FreeRequested: RequestKind(True, "free", Opcode.LEASE_FREE),
    events.RegionRequested: RequestKind(True, "region_open", Opcode.REGION_OPEN),
    events.RegionCancelRequested: RequestKind(True, "region_cancel", Opcode.REGION_CANCEL),
    events.ResizeRequested: RequestKind(True, "resize", Opcode.LEASE_RESIZE),
    events.ParkRequested: RequestKind(True, "park", Opcode.LEASE_PARK),
    events.MoveRequested: RequestKind(True, "move", Opcode.LEASE_MOVE),
    events.RevokeRequested: RequestKind(False, "revoke", Opcode.LEASE_REVOKE),
    events.FenceClearRequested: RequestKind(False, "fence_clear", Opcode.FENCE_CLEAR),
    events.DrainRequested: RequestKind(False, "drain", Opcode.DRAIN),
    events.DrainCancelled: RequestKind(False, "drain_cancel", Opcode.DRAIN_CANCEL),
}
"""The events that are requests."""

if REQUESTS.keys() != set(get_args(Request)):
    raise TypeError(f"REQUESTS must have exactly the types of Request, not {sorted(map(repr, REQUESTS))}")


class ReceivedRequest(NamedTuple):
    """A request with its peer and monotonic time. `event` is None if it is unknown or the daemon's own."""

    by: str
    at_ns: int
    event: Request | None


class Times(NamedTuple):
    """The times of a lease's life so far, in monotonic nanoseconds; None for a step that has not happened.

    Attributes:
        asked_ns: When it was requested.
        spawned_ns: When its worker was started; None again once the worker was ready.
        granted_ns: When this daemon granted it; None for a lease of an earlier daemon.
        began_ns: When it was granted, or when an earlier daemon created it.
        is_granted: Whether it was ever granted to its tenant.
        over_ns: From when on its work was refused.
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
        source: The event or effect that caused the fact; its type is in the kind's row.
        lease_id: The lease's id; 0 for a fact about no lease.
        lease: The lease after the event; None if it is unknown or not needed.
        request: The request that it answers.
        times: The times of the lease's life, up to and including this fact.
        card: The GPU of a warm context.
        is_warm: Whether a placed lease took a warm context.
        use: The card time that a lease had used when it ended or moved; None if unknown.
    """

    kind: FactKind
    now_ns: int
    source: Any
    lease_id: int = 0
    lease: LeaseSnapshot | None = None
    request: ReceivedRequest | None = None
    times: Times = NO_TIMES
    card: str = ""
    is_warm: bool = False
    use: LeaseTimeUse | None = None
