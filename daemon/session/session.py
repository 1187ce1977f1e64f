"""A session, which checks the state of its lease, dispatches requests by opcode, and reports failures of earlier ones.

`Session` checks for every request, in this order: the control page, which shows whether the lease has expired or been
revoked; a failure of an earlier quiet request that is still to be reported; the opcode and the session id; and the
operation's own conditions. When a quiet request fails, the session keeps its failure and skips the requests after it
on the same connection. The next request that has a reply is not executed either: its reply reports the failure. A
kernel's fault belongs to no connection: it makes the session skip every connection's requests until it is reported, and
then also to the connections that had a request skipped. After a fault that destroyed the context, every later reply
reports that fault. A guest's PING reports only why that guest's own requests failed or were skipped.

A session handles frames and calls the driver, but uses no sockets.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from gpulease.daemon.contract.control_page import Counter, WorkerPage
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import LatencyWord
from gpulease.daemon.drivers.interface import (
    Context,
    DriverError,
    KernelFault,
    NativeLaunch,
    Poll,
    keep_waiting,
)
from gpulease.daemon.session.ended_connections import EndedConnections
from gpulease.daemon.session.graph_operations import GraphOperations
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.image import CantLeave, SessionParts
from gpulease.daemon.session.kept_buffers import KeepOperations
from gpulease.daemon.session.launches import KernelWatch, LaunchOperations, Planner, PrintedOperations
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.memory_operations import ArenaOperations, MemoryOperations
from gpulease.daemon.session.modules import ModuleOperations
from gpulease.daemon.session.native.launch_fast_path import LaunchFastPath
from gpulease.daemon.session.native.layout import Outcome, RingEnds
from gpulease.daemon.session.native.pacing import Pacer
from gpulease.daemon.session.operations import NO_OPTIONS, LeaseOver, Operation, OperationHandler, SessionResources
from gpulease.daemon.session.parking import SessionParking
from gpulease.daemon.session.region_memory import RegionMemory
from gpulease.daemon.session.region_operations import RegionGate, RegionOperations
from gpulease.daemon.session.replies import NO_NUMBER, SyncPattern, done, failed, failure_of, refusal_of, refused
from gpulease.daemon.session.stream_operations import ConnectionStreams, StreamOperations
from gpulease.daemon.session.submit_run import SubmitOperations
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError, FramingError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader
from gpulease.protocol.lease_options import WorkerOptions
from gpulease.protocol.messages import Ping
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.operations import SPECS, Trait

# Plain integers, because looking up an enum's member costs as much as the rest of a check.
_QUIET: Final = int(Flag.QUIET)
_SYNC: Final = int(Opcode.SYNC)
_CHOICES: Final = frozenset({int(Opcode.STREAM_SELECT), int(Opcode.USE_TOKEN)})
_PING: Final = int(Opcode.PING)
_OPS: Final = int(Counter.OPS)
_LAUNCHES: Final = int(Counter.LAUNCHES)
_SYNCS: Final = int(Counter.SYNCS)
_FAILED_OPS: Final = int(Counter.FAILED_OPS)
_LAST_POLL_NS: Final = int(Counter.LAST_POLL_NS)
_DOING: Final = int(Counter.DOING)

_SYNC_OPERATIONS: Final = frozenset({Opcode.SYNC, Opcode.STREAM_SYNC})
_WAITS: Final = _SYNC_OPERATIONS | {Opcode.SUBMIT_RUN}
# Operations that put work into a stream of the card. SUBMIT_RUN also does, once its image is loaded.
_CARD_WORK: Final = frozenset(
    int(op) for op, spec in SPECS.items() if Trait.IN_STREAM in spec.traits or op is Opcode.MEM_REUSE
)
_OPCODES: Final = frozenset(map(int, Opcode))

_OPERATION_ERRORS: Final = (Refused, BodyError, DriverError, LeaseOver)
"""Raised by `OperationHandler`; anything else is a bug."""


class Session:
    """A lease's session.

    Args:
        lease_id: The session id of every request.
        context: The driver's context, which nothing else uses.
        ledger: The session's empty ledger.
        page: The control page, on which the session shows its counters.
        options: The options of its lease.
        native: How native code launches in the context; None leaves all launches to Python. Ignored if the lease bounds
            kernels' run times, because then Python checks after every launch.
        is_submit: Whether the session serves one SUBMIT_RUN and nothing else.
        is_parkable: Whether the context was made parkable, so that the session may be parked.
        hold_spin_ns: Time for which native code may spin while work waits for the time limits.
        take_printed: Returns and clears what kernels have printed, and says whether some of it was lost.

    Attributes:
        lost: The fault that destroyed the context; None while the context works.
        arena: The session's arena, and the copies from and to it.
        pinned_buffers: Pinned memory that connections may receive large writes into.
        streams: The streams of all connections.
        ended: The objects that ended connections created.
        watch: Measures the kernels' run times.
        submit: The operations of a submit.
        regions: Opens and removes the memory of its regions, on the broker's orders.
        parking: Moves its bytes to host memory and back, on the broker's orders.
        pacer: Accounts for the card's time, and applies the limits on it.
        parts: The state that a session takes along when it leaves its process.
        on_wait: Called about every millisecond while the session waits for launches.
    """

    def __init__(
        self,
        lease_id: int,
        context: Context,
        ledger: Ledger,
        page: WorkerPage,
        options: WorkerOptions = NO_OPTIONS,
        native: NativeLaunch | None = None,
        *,
        is_submit: bool = False,
        is_parkable: bool = False,
        hold_spin_ns: int = 0,
        take_printed: Callable[[], tuple[bytes, bool]] = lambda: (b"", False),
    ) -> None:
        self.lease_id = lease_id
        self.lost: Failure | None = None
        self._has_faulted = False
        # What is still to be reported: to a connection, why a quiet request of its own failed or was skipped; and a
        # kernel's fault, to the connection that sends the next request that has a reply.
        self._kept: dict[ConnectionStreams, Failure] = {}
        self._fault: Failure | None = None
        # Which of these the current connection gets next.
        self._pending_failure: Failure | None = None
        # The count of launches when Python last answered a wait or reported a failure.
        self._synced_launches = 0
        self.on_wait: Callable[[], None] = keep_waiting
        self._context, self._ledger, self._page = context, ledger, page
        self._counters = page.counters
        # Native code may launch only if kernels' run times are unlimited, because a limit needs this watch.
        self.watch = KernelWatch(context, page.counters, options.max_kernel_ms)
        if self.watch.is_on:
            context.watch(self._check_lease)
        self.pacer = Pacer(page, context, hold_spin_ns)
        # All calls that may wait get the same poll, so that every wait ends with the lease.
        ledger.make_room = lambda most_bytes: context.trim(most_bytes, self._check_lease)
        self._resources = resources = SessionResources(ledger, context, self._check_lease, page.counters, options)
        resources.check_sync, resources.keep_fault = self._check_sync, self._keep_fault
        resources.admit_work, resources.admit_next = self._admit_work, self._admit_next
        # Make one handler per group of operations; they share the resources.
        self._planner = planner = Planner(ledger, lease_id, resources.compile_kernel)
        self._memory = MemoryOperations(resources)
        self.pinned_buffers = self._memory.pinned_buffers
        self.arena = ArenaOperations(resources)
        self.streams = StreamOperations(resources)
        self._modules = ModuleOperations(resources, planner)
        self._gate = gate = RegionGate(resources, self._launches_begun)
        self.regions = RegionMemory(resources, gate, lambda: self.streams.live, lambda: bool(self._kept or self._fault))
        self.parking = SessionParking(
            resources, lambda: gate.is_ending(), lambda: self.lost is not None, is_parkable=is_parkable
        )
        self._region_sets = RegionOperations(resources, gate, self.regions.forget)
        self.streams.on_select, self.streams.on_destroy = gate.forget_current, self.regions.leave_stream
        self._launches = LaunchOperations(resources, planner, gate)
        self._printed = PrintedOperations(resources, take_printed)
        self._graphs = GraphOperations(resources, planner, self.arena, gate)
        self.submit = SubmitOperations(resources, planner, self._modules)
        self._keeper = KeepOperations(resources)
        parts = (self._keeper, self._modules, self._graphs, self._region_sets)
        # An ended connection keeps its objects until no work uses them.
        self.ended = EndedConnections(resources, parts, planner)
        ledger.holder = self.ended.unheld
        self.parts = SessionParts(
            resources,
            self._modules,
            self._graphs,
            self.streams,
            self._keeper,
            self.ended,
            self.arena,
            self._printed,
            self.regions,
            self._region_sets,
        )
        self._last_connection = 0
        self._sync_pattern = SyncPattern(lease_id)
        # Serves launches and syncs in native code, or in Python without parsing.
        self._fast_path = LaunchFastPath(
            context,
            planner,
            page,
            self._sync_pattern,
            gate,
            self._keep_failure,
            self._note_reported,
            self.pacer,
            self._check_held,
        )
        if native is not None and not self.watch.is_on:
            self._fast_path.use_native(native, ledger, self._graphs.records, self._graphs.recent_replays)
            self._memory.on_first_read = self._fast_path.prepare_reads
            self.arena.on_open = lambda arena: self._fast_path.use_arena(
                arena.address, arena.size_bytes, arena.extents_address
            )
        # The table of operations: a submit's session serves only the submit, any other everything else.
        kinds: tuple[OperationHandler, ...] = (
            self._memory,
            self._keeper,
            self.ended,
            self.arena,
            self._modules,
            self._launches,
            self.streams,
            self._printed,
            self._graphs,
            self._region_sets,
        )
        self._operations: dict[int, Operation] = {Opcode.PING: _ping}
        for kind in (self.submit,) if is_submit else kinds:
            self._operations |= {op: getattr(kind, name) for op, name in kind.served.items()}

    # --- requests ---

    def handle(self, frame: Frame) -> bytes | memoryview | None:
        """Serve a request and return its reply, None for a quiet request.

        A memoryview is the session's own memory, invalid at the next call. Raises FramingError for a frame that is not
        a request; the connection must end then.
        """
        # Before anything else, check for the two errors that end the connection.
        if frame.request_id == 0:
            raise FramingError("request id 0 is reserved for goodbyes")
        self._counters[_OPS] += 1
        if frame.flags not in (0, _QUIET):
            raise FramingError("a client sent a reply")
        # Show the operation on the page, where the broker reads it if this process hangs.
        self._counters[_DOING] = frame.op
        try:
            # Read the lease's state before the request is served; every wait reads it again.
            lease_end = self._page.refusal()
            if self._resources.is_parked and lease_end is None and self._pending_failure is None:
                # Do not execute the request, as after an earlier failure.
                failure = self.parking.refusal
                quiet = replace(failure, failed_request_id=frame.request_id, failed_op=frame.op)
                self._keep(quiet if frame.flags else failure)
            if frame.flags == 0:
                return self._answer(frame, lease_end)
            self._do_quietly(frame, lease_end)
            return None
        finally:
            self._counters[_DOING] = 0

    def take_launches(self, reader: FrameReader) -> None:
        """Serve the expected launches that are first in the reader; see `LaunchFastPath`."""
        if self._pending_failure is None and self.lost is None and not self._resources.is_parked:
            self._fast_path.take(reader)

    @property
    def is_away(self) -> bool:
        """Return whether requests must wait for the session's return: it is parked, and its lease is not over."""
        return self._resources.is_parked and self._page.refusal() is None

    def check_leave(self) -> None:
        """Raise CantLeave if the parked session can't leave its process now."""
        if self.lost is not None or self._fault is not None or self._kept:
            raise CantLeave("it has a failure that no client has received yet", is_lasting=False)
        self._context.flush_printed()
        self.parts.check()

    def adopted(self, launches_begun: int) -> None:
        """Continue the counts of the process that the session comes from."""
        self._synced_launches = self._counters[_LAUNCHES] - launches_begun

    @property
    def is_native(self) -> bool:
        return self._fast_path.is_native

    @property
    def keeps_failure(self) -> bool:
        """Return whether a failure waits for the current connection's next request that has a reply."""
        return self._pending_failure is not None

    def serve_ring(self, reader: FrameReader, ends: RingEnds) -> Outcome | None:
        """Let native code serve launches and syncs from a ring; None if it can't now. See `LaunchFastPath`."""
        if self._pending_failure is None and self.lost is None and not self._resources.is_parked:
            return self._fast_path.serve(reader, ends, self._synced_launches)
        return None

    def take_sync(self, reader: FrameReader) -> bytes | None:
        """Serve a SYNC that is first in the reader, and return the reply.

        A SYNC is the most frequent request with a reply. Returns None, and leaves the frame to `handle`, if there is no
        SYNC, or if its reply has to report something other than the wait's result.
        """
        # Leave unusual cases to `handle`: a request id of 0, a failure to report, the end of the lease.
        number = self._sync_pattern.number(reader)
        if not number or number == NO_NUMBER or self._pending_failure is not None or self.lost is not None:
            return None
        if self._page.refusal() is not None or self._resources.is_parked:
            return None
        # Take the request from the reader.
        reader.start += HEADER_BYTES
        self._counters[_OPS] += 1
        self._counters[_DOING] = _SYNC
        self.pacer.begin_wait()
        try:
            self._context.sync(self._check_sync)
            self.pacer.end_wait()
        except (DriverError, LeaseOver) as error:
            self._count_failure(_SYNC, error)
            request_id = int.from_bytes(number, "big")
            return self._failure(error, _SYNC).to_frame(_SYNC, request_id=request_id, session_id=self.lease_id)
        finally:
            self._counters[_DOING] = 0
        self._counters[_SYNCS] += 1
        self._synced_launches = self._counters[_LAUNCHES]
        return self._sync_pattern.reply(number)

    def _answer(self, frame: Frame, lease_end: Status | None) -> bytes | memoryview:
        # Check 1: the lease. Check 2: a failure that is still to be reported, which replaces this request.
        if lease_end is not None:
            self._counters[_FAILED_OPS] += 1
            return refused(frame, lease_end, self._page.reason(lease_end))
        is_guests_ping = frame.op == _PING and self._page.guest is not None
        failure = self._take_guests_failure() if is_guests_ping else self._take_failure()
        if failure is None:
            try:
                reply = self._serve(frame)
                if frame.op in _SYNC_OPERATIONS:
                    self._synced_launches = self._counters[_LAUNCHES]
                return reply
            except _OPERATION_ERRORS as error:
                # A retry helps only if ended connections still hold memory.
                if isinstance(error, Refused) and self.ended.may_make_room(error.failure):
                    try:
                        return self._retry(frame, error.failure)
                    except _OPERATION_ERRORS as again:
                        failure = self._failure(again, frame.op)
                else:
                    failure = self._failure(error, frame.op)
                self._count_failure(frame.op, error)
        else:
            # An earlier quiet request has failed: do not execute this request; its reply reports that failure.
            self._skip(frame)
            self._count_failure(frame.op)
        self._synced_launches = self._counters[_LAUNCHES]
        if self._gate.unreported:
            self._gate.report_refusals()
        return failed(frame, failure)

    def _retry(self, frame: Frame, refused: Failure) -> bytes | memoryview:
        """Repeat a request that lacked room, if ended connections can release some. Raises the errors of the retry."""
        # Keep no reference to the error here. Otherwise the error and this frame would refer to each other, and keep
        # the request's image until the garbage collector ran.
        if self.ended.make_room(is_alone=self._counters[Counter.CONNECTIONS] <= 1):
            try:
                return self._serve(frame)
            except Refused as again:
                refused = again.failure
        raise Refused(self.ended.explained(refused))

    def _do_quietly(self, frame: Frame, lease_end: Status | None) -> None:
        # Skipped requests are not reported one by one: the next reply reports the failure that caused the skipping.
        if self._pending_failure is not None or self.lost is not None or lease_end is not None:
            if (failure := self.lost or self._pending_failure) is not None:
                self._keep(failure)
            self._skip(frame)
            return
        try:
            self._serve(frame)
        except _OPERATION_ERRORS as error:
            self._keep_failure(error, frame.op, frame.request_id)

    def _serve(self, frame: Frame) -> bytes | memoryview:
        """Serve a request that has been checked.

        If it is work for the card, first wait until the time limits admit it.
        """
        operation = self._operation(frame)
        if frame.op in _CARD_WORK:
            pacer = self.pacer
            if not self._page.is_time_limited:
                pacer.begin()
                return operation(frame)
            # The kind of work is the operation plus the handle at the start of its body: a module, a graph or an
            # allocation.
            self._admit_work(frame.op + int.from_bytes(frame.payload[:8], "big"))
            reply = operation(frame)
            pacer.begun()
            return reply
        if frame.op in _WAITS:
            self.pacer.begin_wait()
            reply = operation(frame)
            self.pacer.end_wait()
            return reply
        return operation(frame)

    def _admit_work(self, kind: int) -> None:
        self.pacer.admit(self.pacer.mean_of(kind), self._check_held)

    def _admit_next(self) -> None:
        self.pacer.admit_next(self._check_held)

    def _operation(self, frame: Frame) -> Operation:
        operation = self._operations.get(frame.op)
        if operation is None:
            if frame.op in _OPCODES:
                raise BodyError(f"{Opcode(frame.op).name} is not allowed on a connection to a session")
            raise BodyError(f"unknown operation {frame.op:#06x}", Status.UNSUPPORTED)
        # Check the session id after the opcode, so that an unknown operation is reported as such.
        if frame.session_id != self.lease_id:
            raise BodyError(
                f"the request is for session {frame.session_id:032x}, but this connection belongs to another session"
            )
        return operation

    def _skip(self, frame: Frame) -> None:
        """Skip a request after a failure, but never a STREAM_SELECT or a USE_TOKEN.

        The requests after the report must go into the stream, and have the permissions, that the tenant meant.
        """
        if frame.op in _CHOICES and frame.session_id == self.lease_id:
            self.streams.choose_anyway(frame)

    # --- failures ---

    def _keep_failure(self, error: Exception, op: int, request_id: int) -> None:
        """Keep a quiet request's failure for its connection's next request that has a reply."""
        failure = self._failure(error, op)
        if isinstance(error, KernelFault):
            # An earlier launch failed, perhaps that of another connection: this request was only skipped.
            self._fault = failure
        else:
            failure = replace(failure, failed_request_id=request_id, failed_op=op)
        self._keep(failure)
        self._count_failure(op, error)

    def _keep(self, failure: Failure) -> None:
        self._kept[self.streams.current] = self._pending_failure = failure

    def _keep_fault(self, fault: KernelFault) -> None:
        """Keep a fault that was found outside a tenant's request, so that it is reported like other faults."""
        failure = self._failure_of_fault(fault)
        if self.ended.has_any and not self._counters[Counter.CONNECTIONS]:
            return  # The connection that launched it has ended, and no other one could receive the report.
        # A connection's own failure is reported before the fault.
        self._fault = self._fault or failure
        self._pending_failure = self._pending_failure or failure

    def _note_reported(self, replied_ns: int) -> None:
        """Record that a SYNC's reply, made at `replied_ns`, has reported the failure that was just kept."""
        self._counters[_OPS] += 1
        self._take_failure()
        self._count_failure(_SYNC)
        self._synced_launches = self._counters[_LAUNCHES]
        self._gate.report_refusals(replied_ns)

    def _launches_begun(self) -> int:
        """Return the number of launches begun since the last wait was answered, or the last failure reported."""
        return int(self._counters[_LAUNCHES]) - max(self._synced_launches, self._fast_path.synced)

    def _take_failure(self) -> Failure | None:
        """Return the failure to report now. Each is reported once, unless it destroyed the context."""
        if self.lost is not None:
            return self.lost
        # No request has failed, but a kernel may have faulted.
        if self._pending_failure is None:
            fault = self._context.fault()
            return None if fault is None else self._failure_of_fault(fault)
        failure = self._pending_failure
        self._kept.pop(self.streams.current, None)
        if failure is self._fault:
            self._fault = None
        self._pending_failure = self._fault
        return failure

    def _take_guests_failure(self) -> Failure | None:
        """Return why a quiet request of the current connection failed or was skipped. A fault remains pending."""
        failure = self._kept.pop(self.streams.current, None)
        self._pending_failure = self._fault
        return failure

    def _failure(self, error: Exception, op: int) -> Failure:
        match error:
            case KernelFault():
                return self._failure_of_fault(error)
            case LeaseOver():
                return self.refusal() or Failure(
                    Status.INTERNAL, "the wait was interrupted although the lease is active"
                )
        return failure_of(error, op)

    def _failure_of_fault(self, fault: KernelFault) -> Failure:
        self._has_faulted = True
        failure = Failure(
            Status.SYNC_FAILED,
            str(fault),
            hint=fault.hint or "Fix the kernel or its arguments. Operations that were queued after it were skipped.",
            failed_request_id=fault.tag or None,
            failed_op=Opcode.GRAPH_LAUNCH if fault.tag in self._graphs.recent_replays else Opcode.LAUNCH,
            kernel=fault.kernel,
            address=fault.address,
        )
        # The fault is sticky: from now on every reply reports it.
        if fault.context_lost:
            self.lost = failure
        return failure

    def _count_failure(self, op: int, error: Exception | None = None) -> None:
        """Count a failed request; a wait that the lease's end cut short is not a failed sync."""
        self._counters[_FAILED_OPS] += 1
        if op in _SYNC_OPERATIONS and not isinstance(error, LeaseOver):
            self._counters[Counter.SYNC_ERRORS] += 1

    # --- the lease ---

    def refusal(self) -> Failure | None:
        """Return the lease's end as a failure; None while the lease lasts."""
        status = self._page.refusal()
        return None if status is None else refusal_of(status, self._page.reason(status))

    def poll(self) -> None:
        """Update the heartbeat for the broker, and show how long the running kernel has run."""
        now_ns = time.monotonic_ns()
        self.watch.poll(now_ns)
        # Write this last: if an earlier call saw a kernel, the broker assumes that the kernel has run until this time.
        self._counters[_LAST_POLL_NS] = now_ns

    def _check_lease(self) -> None:
        """Serve as the `Poll` of every wait for the card. Raises LeaseOver."""
        self.poll()
        self.pacer.note_work_seen(self._counters[_LAST_POLL_NS])
        if self._page.refusal() is not None:
            raise LeaseOver

    def _check_held(self) -> None:
        """Serve as the `Poll` while work waits for the time limits. Also serves the broker.

        Raises LeaseOver.
        """
        self.poll()
        if self._page.refusal() is not None:
            raise LeaseOver
        self.on_wait()

    def _check_sync(self) -> None:
        """Serve as the `Poll` of a wait for launches. Also serves orders about regions. Raises LeaseOver."""
        self._check_lease()
        self.on_wait()

    # --- connections ---

    def prepare_connection(self, *, is_stranger: bool) -> None:
        """Prepare for a connection.

        `is_stranger`: Whether it may belong to a tenant other than that of this process's earlier leases.
        """
        # Otherwise a new tenant could find out by load times which images an earlier tenant had loaded.
        if is_stranger:
            self._context.forget_earlier()

    def begin_connection(self, pid: int, *, owns: bool) -> Holder:
        """Record that a connection is attached; return the holder of the objects that it creates.

        Args:
            pid: The client's process; 0 if it is not known.
            owns: Whether these objects end with it. Clients of earlier versions do not request that: all of their
                connections share one holder.
        """
        self._last_connection += 1
        if not owns:
            self.ended.unheld_users += 1
            return self.ended.unheld
        return Holder(self._counters, self._page.show_connection(self._last_connection, pid))

    def switch_to(self, streams: ConnectionStreams, holder: Holder) -> None:
        """Make this connection's streams and holder the current ones."""
        self._ledger.holder = holder
        if streams is not self.streams.current:
            self.streams.switch_to(streams)
            self._pending_failure = self._kept.get(streams, self._fault)

    def end_connection(self, streams: ConnectionStreams, holder: Holder, *, is_last: bool) -> None:
        """Record that a connection has ended: destroy its streams, and free its other objects once nothing uses them.

        Args:
            streams: Its streams.
            holder: The holder of the objects that it created.
            is_last: Whether no other connection is attached.
        """
        owns = holder is not self.ended.unheld
        is_over = self.lost is not None or self._page.refusal() is not None
        if not owns:
            self.ended.unheld_users -= 1
        # After the end of the lease or the context, everything ends with the process.
        elif not is_over:
            self._page.hide_connection(holder.at)
            self.ended.end(holder, streams.known.values())
        # The streams always end with the connection, whether or not its allocations do.
        self.streams.release(streams)
        # Nobody is left to receive the failures of this connection's requests, so drop them.
        self._kept.pop(streams, None)
        if is_last and owns and not is_over:
            self._fault = None
            self._region_sets.release_ended()
        self._pending_failure = self._kept.get(self.streams.current, self._fault)

    @contextlib.contextmanager
    def serving(self, guest: Guest) -> Iterator[None]:
        """Bind everything done in the block to a guest's token.

        Once the token is no longer valid, waits end and requests are refused.
        """
        self._page.guest = guest
        try:
            yield
        finally:
            self._page.guest = None

    def is_held_by(self, guest: Guest) -> bool:
        """Return whether a guest's token permits anything now."""
        return self._page.is_held_by(guest)

    def count_connections(self, count: int) -> None:
        """Show the broker how many connections are attached."""
        self._counters[Counter.CONNECTIONS] = count

    def use_latency_word(self, word: LatencyWord, fds: list[int]) -> None:
        """Map a latency word from its descriptor, which the caller closes."""
        # If memory for the mapping is short, ignore the word: the session then holds no launches back for it.
        with contextlib.suppress(OSError, ValueError):
            if len(fds) == 1:
                self.pacer.use_word(word.number, *fds, is_own=word.is_own)

    def take_growth(self) -> bool:
        """Return whether the card may hold more for this context than the ledger counts; reported once."""
        has_grown, self._resources.may_have_grown = self._resources.may_have_grown, False
        return has_grown

    # --- the card ---

    @property
    def compute_capability(self) -> int:
        """The compute capability that images are compiled for, for example 90 for 9.0."""
        return self._context.compute_capability

    @property
    def cuda_version(self) -> int:
        """The CUDA version of the card's driver, for example 13000 for 13.0; 0 if it is not a CUDA driver."""
        return self._context.cuda_version

    # --- regions ---

    @property
    def region_granule_bytes(self) -> int:
        """Regions begin and end at multiples of this; 0 if the session can have none."""
        return self._context.region_granule_bytes

    @property
    def slice_bytes(self) -> int:
        """Bytes of the card that the session may use now."""
        return self._ledger.slice_bytes

    def take_reports(self) -> Iterator[Message]:
        """Yield each message for the broker about regions and parking, once."""
        if self._gate.unreported:
            self._gate.report_overdue(time.monotonic_ns())
        for outbox in (self._gate.outbox, self.parking.outbox):
            while outbox:
                yield outbox.popleft()

    # --- the end ---

    def release(self, poll: Poll) -> None:
        """Wait for running work, then return everything that the session holds to the context.

        Serve no request afterwards.

        Raises DriverError if that fails, or if the context would keep something of it.
        """
        if self._resources.is_parked:
            raise DriverError("it is parked")
        # The poll of the bound on kernels would end this wait as well.
        if self.watch.is_on:
            self._context.watch(keep_waiting)
        # Some things can't be undone and prevent the context's reuse: a fault, regions, memory that the driver keeps.
        self._context.sync(poll)
        fault = self._context.fault()
        if fault is not None:
            raise fault
        if self.regions.had_any:
            raise DriverError("it had regions, whose addresses must never be used again")
        if self._has_faulted or self._ledger.keeps_for_good:
            raise DriverError("a kernel has failed" if self._has_faulted else "the driver keeps memory for its kernels")
        # Release graphs first, because they depend on modules and allocations.
        self._graphs.close()
        self._planner.forget()
        for number, module in self._ledger.modules():
            self._context.module_unload(module, poll)
            self._ledger.remove_module(number)
        for address in self._ledger.allocations():
            self._context.mem_free(address, poll)
            self._ledger.remove_allocation(address)

    def release_memory(self) -> None:
        """Return pinned memory to the host; the driver must have unpinned it. Raises BufferError if it is in use."""
        self._memory.close()
        self.arena.close()
        self.regions.close()
        self.parking.close()
        self.pacer.close()


def _ping(frame: Frame) -> bytes:
    if frame.flags:
        raise BodyError("PING can't be quiet: only session operations can")
    return done(frame, parse_body(Ping, frame.payload))
