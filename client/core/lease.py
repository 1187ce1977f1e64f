"""A lease in the client: control requests about it, its renewal and its end.

`LeaseHandle` holds the lease for both APIs; `LeaseView` is the base of their public classes. `keep_renewed` renews a
lease at the times of a `RenewalSchedule`. `find_end_reason` asks the broker how a lease ended after its session's
connection ended.
`LeaseReport` types the map of a LEASE_QUERY.
"""

import json
import random
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Any, Final, Literal, NamedTuple, NotRequired, Protocol, TypedDict, cast

from gpulease.client.core.assigned_leases import assigned_lease_id
from gpulease.client.core.clean_ups import CLEAN_UP_S, CleanUp, with_clean_up
from gpulease.client.core.daemon_warnings import log_warning
from gpulease.client.core.events import EVERY_LEASE, EventStream, RefusalStream
from gpulease.client.core.exchange import (
    CONNECT_LIMIT_S,
    CONTROL_REPLY_LIMIT_S,
    First,
    FixedDeadline,
    GrantCleanUp,
    answer_to,
    control_limit_s,
    dial,
    dial_for,
    disconnected,
    operation_of,
    polls_for,
    receive,
    receive_from_living,
    receive_reply,
    send,
)
from gpulease.client.core.fleet_acquire import Fleet, acquire_in
from gpulease.client.core.lease_request import ASK_FIRST, LeaseRequest, device_of, milliseconds
from gpulease.client.core.spare_connections import SpareConnections
from gpulease.client.core.tokens import Grant, HeldToken
from gpulease.client.core.waits import Locked, Procedure, Sleep, is_held
from gpulease.client.errors import (
    PERMANENT_ERRORS,
    Busy,
    Disconnected,
    Drained,
    GpuLeaseError,
    InvalidRequest,
    NotFound,
    Unsupported,
    error_of,
)
from gpulease.client.fork_guard import OWNED_BY_PARENT, register
from gpulease.client.texts import check_callback, quoted
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.link import LinkEnded
from gpulease.client.transport.session_words import SessionWords
from gpulease.protocol import Exclusivity, Failure, Opcode, Phase, ProtocolError, Status, Waiting
from gpulease.protocol.address import Address
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.failures import KILLED, LEASE_ENDS, lease_end
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.lease_options import LATENCY, LEASE_NAME, WAITING
from gpulease.protocol.limits import MAX_NOTE_BYTES
from gpulease.protocol.messages import (
    Body,
    CapabilityGrant,
    CapabilityHeld,
    CapabilityIssue,
    CapabilityPresent,
    CapabilityRevoke,
    HelloReply,
    LeaseAlloc,
    LeaseGrant,
    LeaseMove,
    LeaseNote,
    LeaseRef,
    LeaseRenew,
    LeaseRenewed,
    LeaseResize,
    MovedSession,
    ParkedSession,
    RegionGrant,
)
from gpulease.protocol.opcodes import HelloOption


class SubmitReport(TypedDict):
    """A one-shot job of a lease.

    Attributes:
        number: The job's number on the daemon.
        reason: Why it has ended or is ending; "" before that.
        timed_out: True if the job, its kernel or its image took too long.
        state: starting, running, ending or fenced; absent once the job is gone.
        launches: Number of kernels started; absent once the job is gone.
    """

    number: int
    reason: str
    timed_out: bool
    state: NotRequired[Literal["starting", "running", "ending", "fenced"]]
    launches: NotRequired[int]


class MoveReport(TypedDict):
    """How the bytes of a moved session travelled.

    Attributes:
        is_direct: True if they went directly from card to card, False if they went through the host's memory.
        reason: Why they went through the host's memory; "" if they did not.
    """

    is_direct: bool
    reason: str


class ParkReport(TypedDict):
    """The parking state of a parkable lease's session.

    Attributes:
        phase: resident, parking or proving (on its way to the host), parked, or returning.
        cause: Why it was parked: tenant, operator, idle, need (of other leases) or adopted (by a new worker); None
            while resident.
        idle_ms: Time without use after which it is parked; 0 if idleness does not park it.
        parked_for_ms: Time since it was parked; None while its bytes are on the card.
        moved_bytes: Bytes that the last park moved to host memory.
        off_bytes: Bytes of the lease on the card that other leases may now use.
        host_bytes: Host memory that is reserved for it.
        is_awaited: Whether an operation waits for its return.
        parks: Number of times that it was parked since this daemon started.
        depth: How much of a parked session has left the card: warm (its process keeps a context there), leaving, cold
            (nothing is left there, and the session has no process), arriving or adopting (a new process takes it over).
            An older daemon sends neither this nor the next two.
        stays_here: Why it kept its process in its last park; "" if it left the process, or did not try to.
        is_moving: Whether it is being moved to another card.
        warm_only: Why it can only be parked warm, set also while it is on its card; "" if it can be parked cold. An
            older daemon does not send it.
        last_move: Its last move to another card since this daemon started; None before the first one. An older daemon
            does not send it.
    """

    phase: Literal["resident", "parking", "proving", "parked", "returning"]
    cause: Literal["tenant", "operator", "idle", "need", "adopted"] | None
    idle_ms: int
    parked_for_ms: int | None
    moved_bytes: int
    off_bytes: int
    host_bytes: int
    is_awaited: bool
    parks: int
    depth: NotRequired[Literal["warm", "leaving", "cold", "arriving", "adopting"]]
    stays_here: NotRequired[str]
    is_moving: NotRequired[bool]
    warm_only: NotRequired[str]
    last_move: NotRequired[MoveReport | None]


class ConnectionReport(TypedDict):
    """A connection to a lease's session.

    Attributes:
        number: Its number in the session, from 1.
        pid: Its program's process id on the daemon's host; 0 for a remote program.
        held_bytes: Device memory of its buffers.
    """

    number: int
    pid: int
    held_bytes: int


class LeaseReport(TypedDict):
    """A lease, as the daemon reports it.

    A daemon of another version may send more members, and may lack those that are not required.

    Attributes:
        lease_id: The id as text, 32 hexadecimal digits: equal to `lease.lease_id_text`, not to `lease.lease_id`.
        state: pending, active, draining (it is ending), torndown (its memory is free) or fenced (its memory could not
            be proved free).
        generation: Incremented by every renewal.
        size_bytes: Device memory granted.
        card_uuid: The card.
        exclusivity: shared, session_exclusive, device_exclusive or partition_exclusive.
        weight: Its share of the card's time, relative to the weights of the card's other leases.
        latency: Whether it is of the latency class, so that the card's other sessions hold back their launches for it.
        remaining_ms: Milliseconds until its end; 0 once it has ended.
        ttl_ms: The last requested time to live, in milliseconds.
        cause: Why it has ended or is ending, as one word such as `expired`; None before that.
        reason: The reason as a sentence; "" if there is none.
        fault: The worker's message when the context was lost; "" if it was not lost.
        tenant: Its tenant.
        age_ms: Milliseconds since it was requested.
        phase: active, warning, grace, teardown or ended; absent before it was granted.
        ended_after_deadline_us: Microseconds from its deadline to the proof that its memory is free; negative if it
            ended earlier; absent before its end.
        orphan_ms: How long it may be without a connection, in milliseconds; 0 if there is no limit.
        orphaned_in_ms: Milliseconds until it ends because it has no connection; None while it has one.
        allocated_bytes: Device memory that its session holds. The worker counts this and the members below; they are
            absent after the worker has ended.
        most_allocated_bytes: The most device memory that its session has held at once.
        launches: Number of kernels that its session queued.
        syncs: Number of waits for the card that succeeded.
        operations: Number of requests that its session received.
        failed_operations: Number of requests that failed.
        sync_errors: Number of waits for the card that ended with a failure.
        copies: Number of copies to and from the card.
        copied_bytes: Bytes of these copies.
        gpu_seconds: The card's time that it has used: while k sessions of a card are busy, each counts 1/k of the time.
            Absent, like the next two, if the daemon is older, and until its session has a context.
        busy_seconds: Time in which its session had work outstanding.
        held_back_seconds: Time in which its launches waited for others' work, by weights, a cap or the latency class.
        connections: The session's connections; absent with a daemon that is too old.
        kept_memory_bytes: Bytes of buffers that the lease keeps by name; absent together with `connections`.
        unheld_bytes: Bytes of buffers that no open session holds: those of a session that has ended while its kernels
            still run, or of an older client, whose buffers outlive its session; absent together with `connections`.
        submit: The current job, until its memory is proved free; absent if there is none.
        last_submit: The last job that ended with its memory proved free; absent if there was none.
        parent: For a region, the text of its lease's id; absent for a lease.
        name: The lease's name, which is unique in its fleet; absent without one.
        epoch: A number higher than that of every earlier lease of the name; absent without a name.
        regions: The ids of a lease's regions, as text; absent for a region, and with an older daemon for a lease
            without regions.
        region_bytes: Bytes of the lease's slice that its regions take; absent together with `regions`.
        park: The parking state of its session; None if it is not parkable; absent for a region, and with an older
            daemon.
        earlier_version: The version of the session's worker if that runs the code of an earlier daemon, else ""; absent
            together with `park`.
    """

    lease_id: str
    name: NotRequired[str]
    epoch: NotRequired[int]
    state: Literal["pending", "active", "draining", "torndown", "fenced"]
    generation: int
    size_bytes: int
    card_uuid: str
    exclusivity: str
    weight: NotRequired[int]
    latency: NotRequired[bool]
    remaining_ms: int
    ttl_ms: int
    cause: NotRequired[str | None]
    reason: NotRequired[str]
    fault: NotRequired[str]
    tenant: NotRequired[str]
    age_ms: NotRequired[int]
    phase: NotRequired[Literal["active", "warning", "grace", "teardown", "ended"]]
    ended_after_deadline_us: NotRequired[int]
    orphan_ms: NotRequired[int]
    orphaned_in_ms: NotRequired[int | None]
    gpu_seconds: NotRequired[float]
    busy_seconds: NotRequired[float]
    held_back_seconds: NotRequired[float]
    allocated_bytes: NotRequired[int]
    most_allocated_bytes: NotRequired[int]
    launches: NotRequired[int]
    syncs: NotRequired[int]
    operations: NotRequired[int]
    failed_operations: NotRequired[int]
    sync_errors: NotRequired[int]
    copies: NotRequired[int]
    copied_bytes: NotRequired[int]
    connections: NotRequired[list[ConnectionReport]]
    kept_memory_bytes: NotRequired[int]
    unheld_bytes: NotRequired[int]
    submit: NotRequired[SubmitReport]
    last_submit: NotRequired[SubmitReport]
    parent: NotRequired[str]
    regions: NotRequired[list[str]]
    region_bytes: NotRequired[int]
    park: NotRequired[ParkReport | None]
    earlier_version: NotRequired[str]


class LeaseUse(NamedTuple):
    """The device memory that a lease's session holds, and the time of the card that the lease has used.

    Attributes:
        now_bytes: Bytes that it holds now: buffers, modules, streams, and the memory that they share.
        most_bytes: The most bytes that it has held since the lease began, which is the size to ask for next time.
        gpu_seconds: The card's time that it has used: while k sessions of a card are busy, each counts 1/k of the time.
            0, like the next two, if the daemon is too old to report it.
        busy_seconds: Time in which its session had work outstanding.
        held_back_seconds: Time in which its launches waited for others' work.
    """

    now_bytes: int
    most_bytes: int
    gpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    held_back_seconds: float = 0.0


_TEXTS: Final = ("lease_id", "state", "card_uuid", "exclusivity")
_NUMBERS: Final = ("generation", "size_bytes", "remaining_ms", "ttl_ms")


def lease_report_of(reports: Any, operation: str) -> LeaseReport:
    """Check a map that the daemon sent, and return it.

    Raises Disconnected if it is not a map, or if members have other types than the protocol's.
    """
    is_typed = (
        isinstance(reports, dict)
        and all(isinstance(reports.get(name, ""), str) for name in _TEXTS)
        and all(type(reports.get(name, 0)) is int for name in _NUMBERS)
    )
    if not is_typed:
        raise error_of(Failure(Status.DISCONNECTED, "the report is not a lease's map"), operation)
    return cast(LeaseReport, reports)


LEASE_OVER_FOR_BROKER: Final = frozenset(end.status for end in LEASE_ENDS.values()) | {Status.FENCED, Status.NOT_FOUND}
"""Statuses with which the broker reports that a lease has ended permanently. DISCONNECTED is one of them, because a
daemon that stops sends it. Do not test the client's own failures against this set: their DISCONNECTED does not mean
that the lease has ended."""

LEASE_OVER: Final = LEASE_OVER_FOR_BROKER - {Status.SESSION_FAILED}
"""`LEASE_OVER_FOR_BROKER` for a session's replies, where SESSION_FAILED can concern a single operation."""

REPEATABLE: Final = frozenset({Opcode.LEASE_RENEW, Opcode.LEASE_QUERY, Opcode.LEASE_FREE, Opcode.CAPABILITY_REVOKE})
"""Requests that are safe to repeat: two have the same effect as one.
"""

ACQUIRE_REPLY_LIMIT_S: Final = 90.0
"""Longest wait for a grant, in seconds, in addition to the wait for room. If hundreds of clients send requests at once,
each waits until the workers of those before it have started. The daemon allows a worker 60 s to start."""

RECONNECT_LIMIT_S: Final = 30.0
"""How long a `REPEATABLE` request is repeated, in seconds, while a daemon that keeps its leases over a restart can't be
reached. A restart takes seconds; a daemon that is away for longer has another problem."""

END_MARGIN_S: Final = 5.0
"""How long after the lease's end LEASE_QUERY and LEASE_FREE are still repeated, in seconds: both are useful just after
the end, too."""

MAX_NOTES: Final = 256
"""Maximum number of notes in flight together: more would not be faster, and the daemon limits the requests in flight of
a connection."""

FIRST_RECONNECT_PAUSE_S: Final = 0.05
"""Pause before the first attempt to reconnect, in seconds; it doubles after each failure."""

MAX_RECONNECT_PAUSE_S: Final = 1.0
"""Longest pause between two attempts to reconnect, in seconds."""

DAEMON_STOPS_HINT: Final = LEASE_ENDS["shutdown"].hint.rstrip(".")


_ENDED_BEFORE_REPEAT: Final = frozenset({Status.LEASE_FREED, Status.LEASE_EXPIRED, Status.DRAINED, Status.NOT_FOUND})
"""Statuses that answer a repeated LEASE_FREE if the first one was executed, or if the lease expired in between."""


class LeaseHandle:
    """A granted lease, and the connection for requests about it.

    Attributes:
        grant: The daemon's grant.
        generation: Incremented by every renewal.
        ttl_s: Its time to live as it was last granted or renewed, in seconds.
        deadline: When it ends, on the monotonic clock in seconds.
        expires_at_unix_s: When it ends, by the daemon's wall clock, for display.
        end_failure: How the lease ended, once that is known.
        waiting: How client and worker wait for each other; None for the hosts' default.
        is_latency: Whether the request asked for the latency class.
        token: The token with which another tenant uses it; empty for its own tenant.
        outlives_daemon: True if the daemon reported that its leases outlive its process.
        regions: The regions of the lease that this program opened, by id.
        attached: Returns the operations of the session that this program opened last; None if that session was dropped.
        granted_request: The request for which it was granted; None if another program sent that.
        words: The session words of the session that this program opened last; None if it has ended or has none.
        unsettled: The clean-ups of running and interrupted calls on its connection. Such a call may have made an object
            that nothing owns yet.
        fleet: The fleet that granted it; None if it was a single daemon.
        name: Its name, which is unique in its fleet; "" without one.
        epoch: A number higher than that of every earlier lease of the name; 0 without a name.
        spare: Receives the connection, with the reply to HELLO, once the lease is freed; None to close it.
    """

    token = b""
    spare: tuple[SpareConnections, HelloReply] | None = None
    channel: Channel
    granted_request: LeaseAlloc | None = None
    fleet: Fleet | None = None
    name = ""
    epoch = 0

    def __init__(self, channel: Channel, lock: Any, grant: LeaseGrant) -> None:
        self.grant = grant
        self.waiting: Waiting | None = None
        self.is_latency = False
        self.address: Address = channel.address
        self.lock = lock
        self.channel = channel
        self.end_failure: Failure | None = None
        self.outlives_daemon = False
        self.regions: weakref.WeakValueDictionary[int, LeaseHandle] = weakref.WeakValueDictionary()
        self.attached: Callable[[], Any] = lambda: None
        self.words: SessionWords | None = None
        self.unsettled: dict[ReplyCleanUp, None] = {}
        # The deadline counts from now, so it is slightly later than the daemon's own.
        self.extend(grant.generation, grant.ttl_ms, grant.expires_at_unix_s)
        register(self)

    def disown(self) -> None:
        """Leave the lease to the parent process (`fork_guard.Inherited`)."""
        self.end_failure = self.end_failure or OWNED_BY_PARENT

    def extend(self, generation: int, ttl_ms: int, expires_at_unix_s: int) -> None:
        """Record that the lease lasts `ttl_ms` from now."""
        self.generation = generation
        self.ttl_s = ttl_ms / 1000
        self.deadline = time.monotonic() + self.ttl_s
        self.expires_at_unix_s = expires_at_unix_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the lease ends; 0 once it has."""
        return 0.0 if self.end_failure is not None else max(0.0, self.deadline - time.monotonic())

    @property
    def is_revoked(self) -> bool:
        """True once launches are refused because the lease has ended. With SessionWords, this is one read of memory."""
        words = self.words
        return self.end_failure is not None or (words is not None and words.lease[0] != 0)

    def poll_words(self) -> None:
        """Record an end that the session's words report."""
        end = None if self.words is None else self.words.lease_end()
        if end is not None and self.end_failure is None:
            self.end_failure = end_reason_of(end)

    def note_failure(self, failure: Failure, over: Container[Status] = LEASE_OVER) -> Failure:
        """Record a failure from the daemon, which may mean that the lease has ended.

        The first recorded end is kept. A failure that names a region concerns only that region.

        Args:
            failure: The failure.
            over: Statuses that mean that the lease has ended.

        Returns:
            The failure, with a hint if the daemon sent none.
        """
        # The lease continues; the region, if it was opened here, records its own end.
        if failure.region is not None:
            region = self.regions.get(failure.region)
            return failure if region is None else region.note_failure(failure)
        # The hint says that the daemon may be stopping, which clients can't see otherwise.
        if failure.status is Status.DISCONNECTED and not failure.hint:
            failure = replace(failure, hint=DAEMON_STOPS_HINT)
        if failure.status in over and self.end_failure is None:
            self.end_failure = failure
        return failure

    # --- procedures ---

    def renew(self, seconds: float, *, waits_for_daemon: bool = True) -> Procedure[None]:
        """Move the deadline to at least `seconds` from now.

        Args:
            seconds: The time to live, counted from now.
            waits_for_daemon: Whether to wait for a daemon that is restarting.
        """
        ttl_ms = milliseconds(seconds, "renew: seconds", least_ms=1)
        # If the session's words report the lease's end, no request is sent.
        self.poll_words()
        body = LeaseRenew(self.grant.lease_id, ttl_ms)
        renewed: LeaseRenewed = yield from self._control(Opcode.LEASE_RENEW, body, waits_for_daemon=waits_for_daemon)
        self.extend(renewed.generation, renewed.ttl_ms, renewed.expires_at_unix_s)

    def free(self) -> Procedure[None]:
        """Free the lease. Raises the error of its end if it had already ended."""
        yield from self._control(Opcode.LEASE_FREE, LeaseRef(self.grant.lease_id))
        self.end_failure = Failure(Status.LEASE_FREED, "the lease was freed")
        if self.spare is not None and self.channel.can_detach:
            connections, hello = self.spare
            connections.give(self.channel.detach(), hello)
        else:
            self.channel.close()

    def free_clean_up(self) -> GrantCleanUp:
        """Return the clean-up of a call that frees the lease: if that is interrupted, free it on another connection."""
        return GrantCleanUp(free_of, self.channel, self.grant)

    def free_at_exit(self) -> Procedure[None]:
        """Free the lease at the end of a `with` block; it may have ended already."""
        try:
            if self.end_failure is None:
                yield from self.free()
        except GpuLeaseError as error:
            # Always report FENCED: the memory was not proved free, and an operator has to act.
            if self.end_failure is None or error.status is Status.FENCED:
                raise
        finally:
            self.channel.close()

    def issue(self, request: CapabilityIssue) -> Procedure[Grant]:
        """Issue a token for another program, as `GpuLease.issue`."""
        granted: CapabilityGrant = yield from self._control(Opcode.CAPABILITY_ISSUE, request)
        return Grant(
            granted.token,
            granted.public_key,
            LeaseId(self.grant.lease_id),
            Permission(request.permissions),
            granted.ttl_ms / 1000,
            granted.expires_at_unix_s,
        )

    def inspect_token(self, token: bytes) -> Procedure[HeldToken]:
        """Ask what a token of the lease permits, on the lease's own connection."""
        return HeldToken.of((yield from self._control(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token))))

    def revoke_token(self, token: bytes) -> Procedure[None]:
        """End one token of the lease, and those attenuated from it."""
        yield from self._control(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(self.grant.lease_id, 0, token))

    def query(self, *, most_s: float = inf) -> Procedure[LeaseReport]:
        """Ask the daemon for the lease's state, even after its end.

        Args:
            most_s: Longest wait for a daemon that does not answer, in seconds, if it is shorter than the usual one.
        """
        reply = yield from self._control(Opcode.LEASE_QUERY, LeaseRef(self.grant.lease_id), most_s=most_s)
        return lease_report_of(reply.report, operation_of(Opcode.LEASE_QUERY))

    def note_end(self) -> Procedure[None]:
        """Ask the daemon whether the lease has ended, and record how.

        Does nothing if the daemon has no record of the lease.
        """
        with suppress(NotFound):
            end = end_reason_of((yield from self.query()))
            if end is not None:
                self.note_failure(end, {end.status})

    def used(self) -> Procedure[LeaseUse]:
        """Return the device memory that the session holds, and the lease's use of its card. Raises Unsupported."""
        # Buffers held for reuse are already freed from the program's view, so they must not be counted.
        yield from self.finish_sent()
        report = yield from self.query()
        now, most = report.get("allocated_bytes"), report.get("most_allocated_bytes")
        if not isinstance(now, int) or not isinstance(most, int):
            raise Unsupported(
                "used: the memory of the session is not known",
                "Call used() while the lease is active; if it is active, the daemon is too old",
            )
        return LeaseUse(
            now,
            most,
            report.get("gpu_seconds", 0.0),
            report.get("busy_seconds", 0.0),
            report.get("held_back_seconds", 0.0),
        )

    def finish_sent(self) -> Procedure[None]:
        """Wait until the last session opened here has served every request (`RequestPipeline.finish_sent`)."""
        operations = self.attached()
        if operations is not None:
            yield from operations.finish_sent()

    def resize(self, size_bytes: int) -> Procedure[None]:
        """Change the lease's size. Raises CapacityExceeded, Denied or Busy."""
        # Buffers held for reuse count as used, and would prevent a shrink, so free them.
        yield from self.finish_sent()
        clean_up = SizeCleanUp(self)
        yield from with_clean_up(clean_up, self._resize(LeaseResize(self.grant.lease_id, size_bytes), clean_up))

    def _resize(self, body: LeaseResize, clean_up: "SizeCleanUp") -> Procedure[None]:
        yield from self._control(Opcode.LEASE_RESIZE, body, clean_up=clean_up)
        clean_up.note()

    def park(self) -> Procedure[int]:
        """Move the session's memory to host memory, and return the number of bytes.

        Raises Unsupported, CapacityExceeded, Denied or Busy.
        """
        # Otherwise an operation sent earlier could arrive after the park and bring the session back, and buffers held
        # for reuse would be copied to the host.
        yield from self.finish_sent()
        reply = yield from self._control(Opcode.LEASE_PARK, LeaseRef(self.grant.lease_id))
        return cast(ParkedSession, reply).moved_bytes

    def move(self, device: int | str) -> Procedure[int]:
        """Move the session to another card of its host, and return the number of bytes.

        Raises InvalidRequest, Unsupported, CapacityExceeded, Denied or Busy.
        """
        card = device_of(device, "move: device")
        yield from self.finish_sent()
        reply = yield from self._control(Opcode.LEASE_MOVE, LeaseMove(self.grant.lease_id, card))
        moved = cast(MovedSession, reply)
        self.grant = replace(self.grant, card_uuid=moved.card_uuid)
        return moved.moved_bytes

    def note(self, data: Mapping[str, Any]) -> Procedure[None]:
        """Write a record about the lease to the audit log."""
        yield from self._control(Opcode.LEASE_NOTE, LeaseNote(self.grant.lease_id, _note_of(data)))

    def notes(self, several: Sequence[Mapping[str, Any]]) -> Procedure[list[GpuLeaseError | None]]:
        """Write records about the lease, all in flight together.

        Returns:
            For each record None if it is in the log, else the error.
        """
        operation = operation_of(Opcode.LEASE_NOTE)
        # All records are sent together, so the daemon must be able to accept all of them at once.
        if not isinstance(several, Sequence) or isinstance(several, str | bytes | bytearray):
            raise InvalidRequest(f"notes: the argument must be a sequence of notes, not {quoted(several)}")
        if len(several) > MAX_NOTES:
            raise InvalidRequest(f"notes: at most {MAX_NOTES} at once, not {len(several)}")
        if self.end_failure is not None:
            raise error_of(self.end_failure, operation)
        # Step 1: encode all records. For one that can't be encoded return the error, and send the others.
        bodies: dict[int, LeaseNote] = {}
        outcomes: list[GpuLeaseError | None] = [None] * len(several)
        for number, data in enumerate(several):
            try:
                bodies[number] = LeaseNote(self.grant.lease_id, _note_of(data))
            except InvalidRequest as error:
                outcomes[number] = error
        # Step 2: send all and collect replies. If the connection ends, `answers` has those that came before.
        answers: dict[int, Body | Failure] = {}
        lost: GpuLeaseError | None = None
        try:
            yield Locked(self.lock, self._ask_all(Opcode.LEASE_NOTE, bodies, answers, operation))
        except GpuLeaseError as error:
            lost = error
        # Step 3: it is unknown whether a record without a reply is in the log, so return the connection's error for it.
        for number in bodies:
            answer = answers.get(number)
            if answer is None:
                outcomes[number] = lost
            elif isinstance(answer, Failure):
                outcomes[number] = error_of(self.note_failure(answer, LEASE_OVER_FOR_BROKER), operation)
        return outcomes

    def refusal_stream(self) -> RefusalStream:
        """Return a subscription, not yet opened, to launches refused because of its regions."""
        if self.end_failure is OWNED_BY_PARENT:
            raise error_of(OWNED_BY_PARENT, "watch")
        return RefusalStream(self.address, self.grant.lease_id, self.token)

    def event_stream(self) -> EventStream:
        """Return a subscription to its events, not yet opened."""
        if self.end_failure is OWNED_BY_PARENT:
            raise error_of(OWNED_BY_PARENT, "events")
        return EventStream(self.address, self.grant.lease_id, self.token)

    def _control(
        self,
        op: Opcode,
        body: Body,
        *,
        waits_for_daemon: bool = True,
        clean_up: "ReplyCleanUp | None" = None,
        most_s: float = inf,
    ) -> Procedure[Any]:
        """Send a request about the lease; returns the reply's body.

        Args:
            op: The operation.
            body: The request's body.
            waits_for_daemon: Whether to wait for a daemon that is restarting.
            clean_up: Records the request and its reply, if the reply brings an object that must not be lost when the
                call is interrupted.
            most_s: Longest wait for a reply, in seconds, if it is shorter than the operation's.
        """
        operation = operation_of(op)
        # A freed or ended lease can still be queried: its report says how it ended.
        if self.end_failure is not None and (op is not Opcode.LEASE_QUERY or self.end_failure is OWNED_BY_PARENT):
            raise error_of(self.end_failure, operation)
        # First settle the requests of interrupted calls.
        yield from self.settle_clean_ups()
        # Repeating a request after a restart is safe only for some requests, and helps only if leases outlive the
        # daemon.
        waits_for_daemon = waits_for_daemon and self.outlives_daemon and op in REPEATABLE
        # Wait no longer than the lease lasts: an ended lease can't be renewed.
        wait_s = self.remaining_s + (0.0 if op is Opcode.LEASE_RENEW else END_MARGIN_S)
        wait_s = min(wait_s, RECONNECT_LIMIT_S) if waits_for_daemon else 0.0
        answer = yield Locked(self.lock, self._ask_with_retries(op, body, operation, wait_s, clean_up, most_s))
        if isinstance(answer, Failure):
            raise error_of(self.note_failure(answer, LEASE_OVER_FOR_BROKER), operation)
        return answer

    def settle_clean_ups(self) -> Procedure[None]:
        """Release the objects that interrupted calls have made on its connection."""
        for clean_up in [*self.unsettled]:
            yield from clean_up.settle()
            if clean_up.is_settled:
                self.unsettled.pop(clean_up, None)

    def _ask_with_retries(
        self, op: Opcode, body: Body, operation: str, wait_s: float, clean_up: "ReplyCleanUp | None", most_s: float
    ) -> Procedure[Any]:
        """Send the request. While the daemon can't be reached, repeat it for `wait_s` seconds, with growing pauses."""
        last, failures = time.monotonic() + wait_s, 0
        while True:
            try:
                is_repeat = failures > 0
                return (yield from self._ask_reconnecting(op, body, operation, clean_up, most_s, is_repeat=is_repeat))
            # Also try again after Busy, because right after a restart all clients reconnect at once.
            except (Disconnected, Busy):
                left_s = last - time.monotonic()
                if left_s <= 0:
                    raise
            yield Sleep(min(back_off_s(failures, FIRST_RECONNECT_PAUSE_S, MAX_RECONNECT_PAUSE_S), left_s))
            failures += 1

    def _ask_all(
        self, op: Opcode, bodies: Mapping[int, Body], answers: dict[int, Body | Failure], operation: str
    ) -> Procedure[None]:
        """Send several requests, none of them twice.

        `answers` receives the replies that come before the connection ends.
        """
        yield from self._reconnect_if_stale(operation)
        link, deadline = self.channel.link, FixedDeadline(CONTROL_REPLY_LIMIT_S, operation, self.address)
        try:
            # Number all requests, send them together, then receive their replies in order.
            request_ids = {number: link.request(op, body) for number, body in bodies.items()}
            yield from send(self.channel, [frame for _, frame in request_ids.values()], deadline)
            for number, (request_id, _) in request_ids.items():
                answers[number] = yield from receive(self.channel, request_id, deadline)
        except LinkEnded as ended:
            self.channel.close()
            raise disconnected(ended, self.channel, operation) from None

    def _reconnect_if_stale(self, operation: str) -> Procedure[bool]:
        """Connect again if the connection is dead, and return whether it was."""
        is_stale = self.channel.link.end is not None
        if is_stale:
            # The connection may have ended right after the last reply, unnoticed until now.
            self.channel.close()
            self.channel, _ = yield from dial(self.address, FixedDeadline(CONNECT_LIMIT_S, operation, self.address))
        self.channel.link.drop_unclaimed()
        return is_stale

    def _ask_reconnecting(
        self, op: Opcode, body: Body, operation: str, clean_up: "ReplyCleanUp | None", most_s: float, *, is_repeat: bool
    ) -> Procedure[Any]:
        """Send on the connection on which the lease was granted; if that is dead, send again on a new one.

        Every request but REGION_OPEN may be repeated: a second LEASE_FREE finds that the lease has ended, as intended.
        A second REGION_OPEN could leave a region whose id no client has.
        """
        while True:
            # Try at most twice: on the old connection and, if that ended without an answer, on a new one.
            is_new = yield from self._reconnect_if_stale(operation)
            try:
                deadline = FixedDeadline(min(most_s, control_limit_s(op)), operation, self.address)
                ask = answer_to if clean_up is None else clean_up.ask
                answer = yield from ask(self.channel, op, body, deadline)
            except LinkEnded as ended:
                self.channel.close()
                # The daemon is stopping, so its goodbye is the answer: it would not accept another connection.
                if self.channel.link.received_goodbye and ended.failure.status is Status.DISCONNECTED:
                    return ended.failure
                # Two tries are enough. REGION_OPEN is never repeated, because the first may have opened the region.
                if is_new or op is Opcode.REGION_OPEN:
                    raise disconnected(ended, self.channel, operation) from None
                is_repeat = True
                continue
            is_refused = isinstance(answer, Failure)
            # The first LEASE_FREE has freed the lease, and its reply was lost: the refusal of the second is a success.
            if is_refused and is_repeat and op is Opcode.LEASE_FREE and answer.status in _ENDED_BEFORE_REPEAT:
                return None
            return answer


class ReplyCleanUp(CleanUp):
    """Releases the object that the reply to a request on the lease's own connection brings.

    Attributes:
        lease: The lease.
        made: The reply's body, once it has come.
    """

    def __init__(self, lease: LeaseHandle) -> None:
        self.lease = lease
        self.made: Any = None
        self._channel: Channel | None = None
        self._number = 0
        self._unsent: deque[memoryview] = deque()
        self._frame_bytes = 0
        lease.unsettled[self] = None

    def ask(self, channel: Channel, op: Opcode, body: Body, deadline: FixedDeadline) -> Procedure[Any]:
        """Do `answer_to`, and record the request here. The link keeps the reply until it is in `made`."""
        number, frame = channel.link.request(op, body, creates=True)
        self._unsent = deque((memoryview(frame),))
        self._frame_bytes = len(frame)
        self._channel, self._number = channel, number
        yield from send(channel, self._unsent, deadline)
        # The daemon will send an order to the session's worker: wake the worker now.
        if (operations := self.lease.attached()) is not None:
            operations.attachment.channel.announce()
        channel.is_polled = polls_for(channel.address, self.lease.waiting)
        try:
            answer = yield from receive_reply(channel, op, number, deadline)
        finally:
            channel.is_polled = False
        self._take(channel, number, answer)
        return answer

    def _take(self, channel: Channel, number: int, answer: Body | Failure) -> None:
        if not isinstance(answer, Failure):
            self.made = answer
        channel.link.claim(number)

    def late(self) -> Procedure[None]:
        """Wait for the reply if the interrupted call has not received it.

        If none comes, close the connection; the daemon then releases anything that it made for the request.
        """
        channel, number = self._channel, self._number
        if self.made is None and channel is not None:
            yield Locked(self.lease.lock, self._late(channel, number))

    def _late(self, channel: Channel, number: int) -> Procedure[None]:
        # If no byte of the request was sent, no reply will come. With TLS, the number of bytes sent is not known.
        channel.finish()
        if type(channel) is Channel and sum(map(len, self._unsent)) == self._frame_bytes:
            channel.link.claim(number)
            return
        try:
            deadline = FixedDeadline(CLEAN_UP_S, "clean up", channel.address)
            self._take(channel, number, (yield from receive(channel, number, deadline)))
        except (LinkEnded, GpuLeaseError):
            channel.close()


class SizeCleanUp(ReplyCleanUp):
    """Records the size that an interrupted resize has set, because the next resize is relative to it."""

    def _give_back(self) -> Procedure[None]:
        yield from self.late()
        self.note()

    def note(self) -> None:
        if self.made is not None:
            self.lease.grant = replace(self.lease.grant, size_bytes=self.made.size_bytes)


def _note_of(data: Mapping[str, Any]) -> bytes:
    """Encode a note in the audit log's canonical form. Raises InvalidRequest if it is too long, or not JSON."""
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"note: it must be a mapping, not {quoted(data)}")
    # Sort the keys and write no blanks, so that two notes with the same content are the same bytes.
    try:
        text = json.dumps(dict(data), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        note = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"note: it can't be represented as JSON: {error}") from None
    if len(note) > MAX_NOTE_BYTES:
        raise InvalidRequest(f"note: it must have at most {MAX_NOTE_BYTES} bytes as JSON, not {len(note)}")
    return note


class RenewableLease(Protocol):
    """The attributes and methods of a lease or region that its renewal uses."""

    @property
    def _state(self) -> LeaseHandle: ...


def state_of(lease: Any) -> LeaseHandle:
    """Return a lease's state, for a session on it. Raises InvalidRequest for objects that are not a lease."""
    state = getattr(lease, "_state", None)
    # The leases of both APIs have a `_state`. Other objects are a common mistake, so each kind has its own hint.
    if isinstance(state, LeaseHandle):
        return state
    if isinstance(lease, LeaseRequest):
        raise InvalidRequest("session: the argument must be a lease, not a GpuBuilder", ASK_FIRST)
    hint = "Await it: lease = await builder.acquire()" if isinstance(lease, Awaitable) else ASK_FIRST
    raise InvalidRequest(f"session: the argument must be a lease, not {quoted(lease)}", hint)


class LeaseView:
    """Base of both APIs' leases: all properties that need no request to the daemon."""

    _state: LeaseHandle

    @property
    def lease_id(self) -> LeaseId:
        """The lease's id, 128 bits, printed as 32 hex digits; also its session's id."""
        return LeaseId(self._state.grant.lease_id)

    @property
    def lease_id_text(self) -> str:
        """The lease's id as 32 hex digits, for code that needs a str."""
        return str(self.lease_id)

    @property
    def expires_at_unix_secs(self) -> int:
        """When the lease ends, in Unix seconds by the daemon's wall clock; for display only."""
        return self._state.expires_at_unix_s

    @property
    def remaining_s(self) -> float:
        """Seconds until it ends, by this machine's monotonic clock; 0 once it has."""
        return self._state.remaining_s

    @property
    def size_bytes(self) -> int:
        """Device memory granted, in bytes, including every `grow` and `shrink` so far."""
        return self._state.grant.size_bytes

    @property
    def card_uuid(self) -> str:
        """The UUID of its card, as the driver reports it."""
        return self._state.grant.card_uuid

    @property
    def generation(self) -> int:
        """Incremented by every renewal, from 1; a token is valid for one generation."""
        return self._state.generation

    @property
    def name(self) -> str:
        """The name set by `GpuBuilder().name(...)`, which is unique in its fleet; "" without one."""
        return self._state.name

    @property
    def epoch(self) -> int:
        """A number higher than the epoch of every earlier lease with the same name; 0 without a name.

        A store that records the highest epoch it has seen can refuse late writes by an earlier holder of the name.
        """
        return self._state.epoch

    @property
    def exclusivity(self) -> Exclusivity:
        """Which other leases may be on the same card."""
        return Exclusivity(self._state.grant.exclusivity)

    @property
    def is_alive(self) -> bool:
        """True while it has time left and is not known here to have ended."""
        return self._state.remaining_s > 0

    @property
    def revoked(self) -> bool:
        """True once launches are refused because the lease has ended, for whatever cause.

        While a session with shared memory is open, this is one load of memory that the daemon writes, so an engine may
        read it between its steps. Over TCP and TLS it becomes True when an operation or the daemon has reported the
        end.
        """
        return self._state.is_revoked

    @property
    def address(self) -> str:
        """The address of its daemon; for a fleet's lease, of its node."""
        return str(self._state.address)

    def __repr__(self) -> str:
        time_left = f"{self.remaining_s:.1f} s left" if self.is_alive else "over"
        return f"<{type(self).__name__} {self.lease_id_text} {self.size_bytes} bytes on {self.card_uuid}, {time_left}>"

    def _free_when_dropped(self) -> None:
        """Try to free the lease when its last reference is dropped or the program exits."""
        weakref.finalize(self, free_silently, self._state)


def lease_clean_up() -> GrantCleanUp:
    """Return the `CleanUp` of an acquire, which frees the lease if the acquire is interrupted."""
    return GrantCleanUp(free_of)


def acquire(
    target: Address | Fleet,
    request: LeaseAlloc,
    lock: Any,
    clean_up: GrantCleanUp,
    spare: SpareConnections | None = None,
) -> Procedure[LeaseHandle]:
    """Ask a daemon or a fleet for a lease. Raises CapacityExceeded, Unsupported, InvalidRequest, Disconnected.

    Args:
        target: The daemon or the fleet.
        request: The request.
        lock: The API's kind of lock.
        clean_up: Records the lease that may have been granted, so that it can be freed if the call is interrupted.
        spare: Connections to the daemon to use first; a freed lease's connection is added to them. Only for a single
          daemon.
    """
    waiting = WAITING.read(request.parameters)
    # In a fleet, `acquire_in` finds the node. To a single daemon, send the request right after HELLO.
    if isinstance(target, Fleet):
        lease = yield from acquire_in(target, request, partial(_lease_on, lock=lock), clean_up)
        lease.fleet = target
    else:
        limit_s = ACQUIRE_REPLY_LIMIT_S + request.wait_ms / 1000
        # If a prepared context is ready, the grant comes within a millisecond.
        lease = yield from _open(
            target,
            lock,
            Opcode.LEASE_ALLOC,
            request,
            limit_s,
            lambda grant: grant,
            clean_up,
            spare,
            is_polled=polls_for(target, waiting),
        )
    lease.waiting, lease.granted_request = waiting, request
    lease.is_latency = LATENCY.read(request.parameters)
    # The grant does not contain the name's epoch, so query it.
    if name := LEASE_NAME.read(request.parameters):
        try:
            yield from _take_name(lease, name)
        except GpuLeaseError:
            clean_up.is_due = True
            yield from clean_up.settle()
            raise
    return lease


def _take_name(lease: LeaseHandle, name: str) -> Procedure[None]:
    """Ask for the epoch of a lease's name. Frees the lease if its daemon is too old for names."""
    report = yield from lease.query()
    _take_claim(lease, report)
    # A daemon too old for names has granted a lease without one, which another lease of that name would not exclude.
    if lease.name != name:
        yield from lease.free()
        failure = Failure(
            Status.UNSUPPORTED, "the daemon does not support names", hint="Leave the name out, or update the daemon."
        )
        raise error_of(failure, operation_of(Opcode.LEASE_ALLOC))


def _take_claim(lease: LeaseHandle, report: LeaseReport) -> None:
    lease.name, lease.epoch = report.get("name", ""), report.get("epoch", 0)


def reacquire(lease: LeaseHandle, lock: Any, clean_up: GrantCleanUp) -> Procedure[LeaseHandle]:
    """Repeat the request of a lease that has ended. Raises InvalidRequest if it has not ended."""
    if lease.end_failure is OWNED_BY_PARENT:
        raise error_of(OWNED_BY_PARENT, "reacquire")
    if lease.remaining_s > 0:
        # The lease's deadline has not passed, but the daemon may have ended the lease early, or may have no record of
        # it any more.
        report: LeaseReport | None = None
        with suppress(NotFound):
            report = yield from lease.query()
        if report is not None and end_reason_of(report) is None:
            raise InvalidRequest(
                "reacquire: the lease has not ended", "Use it, renew it, or free it before you call reacquire()"
            )
    if lease.granted_request is None:
        raise InvalidRequest("reacquire: this lease was acquired by another program", "Acquire one with GpuBuilder")
    return (yield from acquire(lease.fleet or lease.address, lease.granted_request, lock, clean_up))


def by_token(address: Address, token: bytes, lock: Any) -> Procedure[LeaseHandle]:
    """Return another tenant's lease, to which a token gives access. Raises Denied, naming the check that failed."""

    def grant_of(capability: CapabilityHeld) -> LeaseGrant:
        return LeaseGrant(
            capability.lease_id, capability.generation, 0, capability.ttl_ms, capability.expires_at_unix_s, 0, ""
        )

    body = CapabilityPresent(token)
    lease = yield from _open(address, lock, Opcode.CAPABILITY_PRESENT, body, CONTROL_REPLY_LIMIT_S, grant_of)
    # Sessions, submits and subscriptions present the token on their own connections.
    lease.token = token
    # After a restart, a new control connection would not have presented the token, so do not repeat requests on it.
    lease.outlives_daemon = False
    return lease


def by_assignment(address: Address, lock: Any, name: str | None) -> Procedure[LeaseHandle]:
    """Return the tenant's lease that was acquired for this program. Raises InvalidRequest, or NotFound if it has ended.

    `name` selects a lease as in `assigned_lease_id`.
    """
    return (yield from by_id(address, lock, assigned_lease_id(name)))


def by_id(address: Address, lock: Any, lease_id: int) -> Procedure[LeaseHandle]:
    """Return the tenant's own lease with that id. Raises NotFound if there is none."""
    # The reply's report contains the grant, and the lease's name and epoch. `_open` returns only the grant, so keep it.
    reports: list[LeaseReport] = []

    def grant_of(reply: Any) -> LeaseGrant:
        reports.append(reply.report)
        return _granted(lease_id, reply.report)

    body = LeaseRef(lease_id)
    lease = yield from _open(address, lock, Opcode.LEASE_QUERY, body, CONTROL_REPLY_LIMIT_S, grant_of)
    _take_claim(lease, reports[0])
    return lease


def _open(
    address: Address,
    lock: Any,
    op: Opcode,
    body: Body,
    reply_limit_s: float,
    grant_of: Callable[[Any], LeaseGrant],
    clean_up: GrantCleanUp | None = None,
    spare: SpareConnections | None = None,
    *,
    is_polled: bool = False,
) -> Procedure[LeaseHandle]:
    """Connect, send the request that yields a lease, and keep the connection for the lease; close it on any failure.

    Args:
        address: The daemon's address.
        lock: The API's kind of lock.
        op: The request.
        body: Its body.
        reply_limit_s: Longest wait for the reply, in seconds.
        grant_of: Makes the grant from the reply's body.
        clean_up: Records the object that the request may make; None if it makes none.
        spare: Open connections to use first. If one turns out to have ended, the daemon frees anything that it made for
            the request, which is sent again on a new connection.
        is_polled: Whether to poll for the reply before sleeping (`Channel.is_polled`).
    """
    operation = operation_of(op)
    deadline = FixedDeadline(CONNECT_LIMIT_S, "connect", address)
    channel: Channel | None = None
    began_s, connection = time.monotonic(), None if spare is None else spare.take()
    try:
        # Step 1: connect, and send the request right after HELLO; or send it on a spare connection.
        if connection is None:
            first = First(op, body, clean_up=clean_up, is_polled=is_polled)
            channel, hello, number = yield from dial_for(address, deadline, first)
        else:
            channel, hello = connection
            channel.is_polled = is_polled
            number, frame = channel.link.request(op, body, creates=clean_up is not None)
            if clean_up is not None:
                clean_up.channel, clean_up.number = channel, number
            yield from send(channel, (frame,), deadline)
        deadline = FixedDeadline(reply_limit_s, operation, address)
        # The grant may take long, so PINGs check whether the daemon is alive.
        reply = yield from receive_from_living(channel, number, deadline, pong_limit_s=CONNECT_LIMIT_S)
        channel.is_polled = False
        if isinstance(reply, Failure):
            raise error_of(reply, operation)
        if clean_up is not None:
            clean_up.made = reply
            channel.link.claim(number)
        lease = _lease_on(channel, hello, grant_of(reply), lock)
        if spare is not None:
            lease.spare = spare, hello
        return lease
    except LinkEnded as ended:
        assert channel is not None
        channel.close()
        if connection is None:
            raise disconnected(ended, channel, operation) from None
    except GpuLeaseError:
        if channel is not None:
            channel.close()
        raise
    except BaseException:
        # The call was interrupted. If the request may have made something, its reply is still needed (`GrantCleanUp`).
        if channel is not None and clean_up is None:
            channel.close()
        raise
    # The spare connection had ended because the daemon stopped or restarted, so the others have ended as well.
    if spare is not None:
        spare.close()
    # If the request waited for room on that connection, it waits only for the rest of its time.
    if isinstance(body, LeaseAlloc):
        waited_ms = min(int((time.monotonic() - began_s) * 1000), body.wait_ms)
        body, reply_limit_s = replace(body, wait_ms=body.wait_ms - waited_ms), reply_limit_s - waited_ms / 1000
    return (yield from _open(address, lock, op, body, reply_limit_s, grant_of, clean_up, spare, is_polled=is_polled))


def free_of(granted: LeaseGrant | RegionGrant) -> First:
    """Return the request that frees a lease or a region of the tenant."""
    return First(Opcode.LEASE_FREE, LeaseRef(granted.lease_id))


def _lease_on(channel: Channel, hello: HelloReply, grant: LeaseGrant, lock: Any) -> LeaseHandle:
    lease = LeaseHandle(channel, lock, grant)
    for option in hello.options:
        if option.type == HelloOption.KEEPS_LEASES:
            lease.outlives_daemon = True
        elif option.type == HelloOption.WARNING:
            log_warning(option.value.decode(errors="replace"))
    return lease


def _granted(lease_id: int, report: Any) -> LeaseGrant:
    """Return the grant, as far as a lease's report contains it. Raises Disconnected if `report` is not a report."""
    try:
        exclusivity = Exclusivity[report["exclusivity"].upper()]
        # A report has the remaining time instead of the time granted; the remaining time is what this program needs.
        times = report["generation"], report["size_bytes"], report["remaining_ms"]
        expires_at_unix_s = int(time.time() + report["remaining_ms"] / 1000)
        return LeaseGrant(lease_id, *times, expires_at_unix_s, exclusivity, report["card_uuid"])
    except (AttributeError, KeyError, TypeError):
        failure = Failure(Status.DISCONNECTED, "the daemon's report of the lease can't be read")
        raise error_of(failure, operation_of(Opcode.LEASE_QUERY)) from None


def free_silently(state: LeaseHandle) -> None:
    """Send LEASE_FREE if that needs no waiting. Runs in finalizers and after interrupts: never raises."""
    channel = state.channel
    # Do nothing if another thread or task uses the connection: the daemon will notice the end of the connection.
    if state.end_failure is None and channel.link.end is None and not is_held(state.lock):
        with suppress(OSError, ProtocolError):
            _, frame = channel.link.request(Opcode.LEASE_FREE, LeaseRef(state.grant.lease_id))
            channel.push(deque((memoryview(frame),)))
    channel.close()


RENEW_AT: Final = 0.75
"""Fraction of its time to live after which a lease is renewed: early enough for several tries."""

JITTER: Final = 0.10
"""Largest random shift of a renewal, as a fraction, so that leases granted together are not renewed together."""

FIRST_BACKOFF_S: Final = 0.1
"""Pause after the first failure, in seconds; it doubles after each further failure."""

MAX_BACKOFF_S: Final = 5.0
"""Longest pause between two tries, in seconds."""

CUT_SHORT_PART: Final = 0.9
"""A renewal that grants less than this fraction of the requested time was cut short by a drain."""

CUT_SHORT_SLACK_S: Final = 0.1
"""Allowance for the time that the daemon's reply takes, in seconds. If a lease is as short as this, a drain is noticed
only at the next renewal."""

LEAST_DELAY_S: Final = 0.01
"""Shortest pause between two renewals, in seconds. Stops a lease of a millisecond from being renewed in a busy loop."""


class RenewalSchedule:
    """Computes how long to wait before the next renewal.

    Args:
        uniform: Returns random numbers from 0 to 1.
    """

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self._uniform = uniform
        self._failures = 0

    def after_grant(self, remaining_s: float) -> float:
        """Seconds until the next renewal of a lease that was just granted or renewed and has `remaining_s` left."""
        self._failures = 0
        return max(LEAST_DELAY_S, remaining_s * RENEW_AT * (1 + JITTER * (2 * self._uniform() - 1)))

    def after_failure(self, error: GpuLeaseError, remaining_s: float) -> float | None:
        """Seconds until the next try; None if the lease is lost."""
        # Renewals of a lease that has ended can't succeed.
        if isinstance(error, PERMANENT_ERRORS) or remaining_s <= 0:
            return None
        pause_s = back_off_s(self._failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._failures += 1
        # Wait at most half of the time that is left, so that the last tries get closer together and do not come too
        # late.
        return max(LEAST_DELAY_S, min(pause_s, remaining_s / 2))


OnLoss = Callable[[GpuLeaseError], None]
"""A function called once, with the error that says why a lease is lost."""


def check_renewal(lease: Any, on_loss: Any) -> None:
    """Raise InvalidRequest unless these are a lease or region that can be renewed, and a function or None."""
    state = getattr(lease, "_state", None)
    if not isinstance(state, LeaseHandle):
        raise InvalidRequest(f"keep_alive: the argument must be a lease or a region, not {quoted(lease)}")
    if on_loss is not None:
        check_callback(on_loss, "keep_alive: on_loss")


def raise_unreported(loss: GpuLeaseError | None, on_loss: OnLoss | None) -> None:
    """Raise the loss unless `on_loss` reported it: a `with` block must not end as if the lease were still alive."""
    if loss is not None and on_loss is None:
        raise loss.with_traceback(None)


def keep_renewed(
    lease: Callable[[], RenewableLease | None], schedule: RenewalSchedule, stopped: Any = None
) -> Procedure[GpuLeaseError | None]:
    """Renew a lease until it is lost, each time for the time to live that it had when this procedure started.

    Args:
        lease: A weak reference to the lease. If the lease is dropped or freed, this procedure ends and reports no loss.
        schedule: When to renew.
        stopped: An event (of the API's kind) that ends this procedure; None if the API ends it in another way.

    Returns:
        Why the lease was lost; None if it was not.
    """
    view = lease()
    if view is None:
        return None
    state = view._state
    ttl_s = state.ttl_s
    delay_s = schedule.after_grant(state.remaining_s)
    while True:
        # Keep no reference while waiting, because the renewals must end when the lease is dropped.
        del view
        yield Sleep(delay_s, stopped)
        view = lease()
        if view is None or (stopped is not None and stopped.is_set()):
            return None
        try:
            # Do not wait for a daemon that is restarting: the schedule repeats the attempts until the lease ends.
            yield from state.renew(ttl_s, waits_for_daemon=False)
            # Only a drain grants less than the requested time. Further renewals would not help, so stop.
            if state.ttl_s < ttl_s * CUT_SHORT_PART - CUT_SHORT_SLACK_S:
                del view
                return Drained(
                    f"keep_alive: the lease's node is being drained: the lease lasts {state.ttl_s:.1f} s "
                    "more, and can't be renewed for longer",
                    "Complete your work, and acquire a lease on another node",
                )
            delay_s = schedule.after_grant(state.remaining_s)
        except GpuLeaseError as error:
            # The schedule decides whether another try makes sense.
            pause_s = schedule.after_failure(error, state.remaining_s)
            if pause_s is None:
                del view  # the error's traceback has this frame, and must not keep the lease
                return None if error.status is Status.LEASE_FREED else error
            delay_s = pause_s


END_REASON_WAIT_S: Final = 2.0
"""Longest time for the broker to notice that a worker has ended, in seconds. The kernel reports it within milliseconds,
except on a host under heavy load."""

END_REASON_POLL_S: Final = 0.05
"""Pause between two queries for the reason, in seconds."""

_REPLACED_BY_FENCED: Final = frozenset({Status.SESSION_FAILED, Status.DISCONNECTED})
"""Ends that FENCED replaces. Any other end matters more to the tenant than the fence."""


def end_reason_of(report: Mapping[str, object]) -> Failure | None:
    """Return the end of the lease in a LEASE_QUERY report; None if it has not ended."""
    # A fenced lease has ended even if the report has no cause.
    cause, state = report.get("cause"), report.get("state")
    if cause is None and state != "fenced":
        return None
    reason = str(report.get("reason") or "")
    end = lease_end(str(cause), reason)
    status, words = end.status, end.words
    # If a lease expired or was revoked, keep that reason even if its memory is fenced.
    if state == "fenced" and status in _REPLACED_BY_FENCED:
        status, words = Status.FENCED, f"{words} and its memory is fenced"
    hint = DAEMON_STOPS_HINT if status is Status.DISCONNECTED else ""
    is_kill = cause == "worker_died" and reason == KILLED
    return Failure(status, f"{words}: {reason}" if reason else words, hint, is_kill=is_kill)


def find_end_reason(lease: LeaseHandle, ended: Failure) -> Procedure[Failure]:
    """Ask the broker how a lease ended after its session's connection ended with `ended`. Raises nothing."""
    last = time.monotonic() + END_REASON_WAIT_S
    try:
        # The worker's connection often ends before the broker has noticed why: poll for a bounded time.
        while lease.end_failure is None:
            # An ended lease's reason is not worth a long wait for a daemon that hangs.
            report = yield from lease.query(most_s=ceil(lease.remaining_s) + END_MARGIN_S)
            lease.end_failure = end_reason_of(report)
            if lease.end_failure is not None or time.monotonic() >= last:
                break
            yield Sleep(END_REASON_POLL_S)
    # The daemon is gone as well, or hangs, so the reason is unknown: report both ends. But past its deadline the lease
    # has expired in any case; a worker may be killed before it can report that.
    except Disconnected as error:
        both = f"{ended.message}; then {error.message}"
        if lease.end_failure is None and time.monotonic() >= lease.deadline:
            return Failure(Status.LEASE_EXPIRED, f"the lease expired: {both}")
        return lease.end_failure or Failure(Status.DISCONNECTED, both, error.hint)
    except GpuLeaseError as error:
        return _unknown_lease(lease, error.failure)
    return lease.end_failure or Failure(
        Status.DISCONNECTED,
        f"{ended.message}, but the daemon reports that the lease is still active",
        "Open another session, or acquire another lease",
    )


def follow_regions(lease: LeaseHandle) -> Procedure[None]:
    """Record the ends of the lease's regions that this program opened, as soon as the daemon reports them.

    A session with shared memory reads the regions' words. Any other session finds out about an end through this
    subscription, or from its next operation. Raises Disconnected, or Busy if the tenant has too many subscriptions.
    """
    # Use one subscription for all regions, because a tenant may have only a bounded number.
    stream = EventStream(lease.address, EVERY_LEASE, lease.token)
    yield from stream.open()
    try:
        is_complete = False
        while True:
            # Regions may have ended before the subscription began, or while events were dropped.
            if not is_complete:
                for region in [*lease.regions.values()]:
                    yield from region.note_end()
            event = yield from stream.next()
            if event is None:
                return
            is_complete = not event.lost
            ended = lease.regions.get(event.lease_id)
            if ended is not None and ended.end_failure is None and event.phase in (Phase.TEARDOWN, Phase.ENDED):
                yield from ended.note_end()
    finally:
        stream.close()


def _unknown_lease(lease: LeaseHandle, failure: Failure) -> Failure:
    """Return the end of a lease that the daemon does not report.

    The daemon keeps no record of leases that ended long ago: if the deadline has passed, the lease expired.
    """
    if failure.status is Status.NOT_FOUND and time.monotonic() >= lease.deadline:
        return Failure(Status.LEASE_EXPIRED, "the lease expired")
    return failure
