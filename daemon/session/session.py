"""What a session does with one request: the gate, the operation, the reply.

Order of checks for every operation: the control page (expired, revoked), the session id, a failure kept from an
earlier quiet operation, then the operation's own. A quiet operation that fails is kept, those behind it are skipped,
and the next operation with a reply reports it instead of being done. After a fault that cost the context, every later
operation reports that fault. A guest's PING reports what became of that guest's own requests and nothing else.

Knows frames and the driver, no sockets.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from gpulease.daemon.contract.control_page import Counter, WorkerPage
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.drivers.interface import (
    Context,
    DriverError,
    KernelFault,
    LaunchRejected,
    NativeLaunch,
    Poll,
    keep_waiting,
)
from gpulease.daemon.session.graphs import GraphOperations
from gpulease.daemon.session.launches import KernelWatch, Planner
from gpulease.daemon.session.ledger import Ledger, Refused, SessionResources
from gpulease.daemon.session.memory import ArenaOperations, MemoryOperations
from gpulease.daemon.session.modules import ModuleOperations
from gpulease.daemon.session.native.launch_fast_path import LaunchFastPath, LeaseOver
from gpulease.daemon.session.native.layout import Outcome, RingEnds
from gpulease.daemon.session.replies import NO_NUMBER, SyncPattern, done, empty, failed, failure_of, refusal_of, refused
from gpulease.daemon.session.streams import Place, StreamOperations
from gpulease.daemon.session.submit import SubmitOperations
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError, FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader
from gpulease.protocol.messages import Ping
from gpulease.protocol.opcodes import Flag, Opcode, Status

# Plain integers: looking a member up on its enum costs as much as the rest of a check.
_QUIET: Final = int(Flag.QUIET)
_LAUNCH: Final = int(Opcode.LAUNCH)
_SYNC: Final = int(Opcode.SYNC)
_SELECT: Final = int(Opcode.STREAM_SELECT)
_PING: Final = int(Opcode.PING)
_WAITS: Final = frozenset({Opcode.SYNC, Opcode.STREAM_SYNC})
_OPS: Final = int(Counter.OPS)
_KNOWN_OPERATIONS: Final = frozenset(int(op) for op in Opcode)
_SYNCS: Final = int(Counter.SYNCS)
_LAUNCHES: Final = int(Counter.LAUNCHES)
_FAILED_OPS: Final = int(Counter.FAILED_OPS)
_LOOKED_NS: Final = int(Counter.LOOKED_NS)
_DOING: Final = int(Counter.DOING)


class Session:
    """One lease's session: its ledger, its context, and the failure it has yet to report.

    Args:
        native: How native code launches in the context, if it is to; not where kernels' times are bounded, because
            every launch is looked after then.
        is_submit: Nothing is done in it but one SUBMIT_RUN.

    Attributes:
        lost: Why the context can do nothing any more, None while it can.
        arena: Its arena, and the copies from and to it.
        slots: Pinned memory that connections may receive large writes into.
        streams: Its streams.
        watch: Its kernels' times.
        submit: What is done in a submit.
    """

    def __init__(
        self,
        lease_id: int,
        context: Context,
        ledger: Ledger,
        page: WorkerPage,
        max_kernel_ms: int = 0,
        native: NativeLaunch | None = None,
        *,
        is_submit: bool = False,
    ) -> None:
        self.lease_id = lease_id
        self.lost: Failure | None = None
        self._has_faulted = False
        self._context, self._ledger = context, ledger
        self._page = page
        self._counters = page.counters
        self._planner = Planner(ledger, lease_id)
        self.watch = KernelWatch(context, page.counters, max_kernel_ms)
        if self.watch.is_on:
            context.watch(self._check_lease)
        self._kept: Failure | None = None
        self._kept_of: Place | None = None
        ledger.make_room = lambda most_bytes: context.trim(most_bytes, self._check_lease)
        self._holdings = holdings = SessionResources(ledger, context, self._count, self._check_lease, page.counters)
        memory = MemoryOperations(holdings)
        self._memory, self.slots = memory, memory.slots
        modules = ModuleOperations(holdings, self._planner, page.counters)
        self.arena = ArenaOperations(holdings)
        self.streams = streams = StreamOperations(holdings)
        self._graphs = graphs = GraphOperations(holdings, self._planner, self.arena)
        self._sync_pattern = SyncPattern(lease_id)
        self._taker = LaunchFastPath(context, self._planner, page, self._sync_pattern, self._keep_launch)
        if native is not None and not self.watch.is_on:
            self._taker.go_native(native)
        self._operations: dict[int, Callable[[Frame], bytes | memoryview]] = {
            Opcode.MEM_ALLOC: memory.alloc,
            Opcode.MEM_FREE: memory.free,
            Opcode.MEM_WRITE: memory.write,
            Opcode.MEM_READ: memory.read,
            Opcode.MODULE_LOAD: modules.load,
            Opcode.MODULE_UNLOAD: modules.unload,
            Opcode.MODULE_PARAMETERS: modules.parameters,
            Opcode.LAUNCH: self._launch,
            Opcode.SYNC: self._sync,
            Opcode.PING: self._ping,
            Opcode.ARENA_WRITE: self.arena.write,
            Opcode.ARENA_READ: self.arena.read,
            Opcode.STREAM_CREATE: streams.create,
            Opcode.STREAM_DESTROY: streams.destroy,
            Opcode.STREAM_SELECT: streams.select,
            Opcode.STREAM_WAIT: streams.wait,
            Opcode.STREAM_SYNC: streams.sync,
            Opcode.GRAPH_CREATE: graphs.create,
            Opcode.GRAPH_LAUNCH: graphs.launch,
            Opcode.GRAPH_DESTROY: graphs.destroy,
        }
        self.submit = SubmitOperations(holdings, self._planner, modules, page.counters)
        if is_submit:
            self._operations = {Opcode.PING: self._ping, Opcode.SUBMIT_RUN: self.submit.run}

    def handle(self, frame: Frame) -> bytes | memoryview | None:
        """Do what a request frame asks; its reply's bytes, None for a quiet one.

        A memoryview is the session's own and void at the next call. Raises FramingError if the peer can't be followed.
        """
        if frame.request_id == 0:
            raise FramingError("request id 0 is kept for goodbyes")
        self._counters[_OPS] += 1
        if frame.flags not in (0, _QUIET):
            raise FramingError("a client sent a reply")
        self._counters[_DOING] = frame.op
        try:
            if frame.flags == 0:
                return self._answer(frame)
            self._obey(frame)
            return None
        finally:
            self._counters[_DOING] = 0

    def take_launches(self, reader: FrameReader) -> None:
        """Do the expected launches at the front of what a connection sent; see `LaunchFastPath`."""
        if self._kept is None and self.lost is None:
            self._taker.take(reader)

    def serve_ring(self, reader: FrameReader, ends: RingEnds) -> Outcome | None:
        """Let native code serve launches and syncs from a ring (`LaunchFastPath`). None if it can't now."""
        return self._taker.serve(reader, ends) if self._kept is None and self.lost is None else None

    def take_sync(self, reader: FrameReader) -> bytes | None:
        """Do a SYNC at the front of what a connection sent, the most frequent request with a reply; its reply.

        None if there is none, or anything else is to be said than how the waiting went: that is left to `handle`.
        """
        number = self._sync_pattern.number(reader)
        if not number or number == NO_NUMBER or self._kept is not None or self.lost is not None:
            return None
        if self._page.refusal() is not None:
            return None
        reader.start += HEADER_BYTES
        self._counters[_OPS] += 1
        self._counters[_DOING] = _SYNC
        try:
            self._context.sync(self._check_lease)
        except (DriverError, LeaseOver) as error:
            self._count_failure(_SYNC, error)
            request_id = int.from_bytes(number, "big")
            return self._failure(error, _SYNC).to_frame(_SYNC, request_id=request_id, session_id=self.lease_id)
        finally:
            self._counters[_DOING] = 0
        self._counters[_SYNCS] += 1
        return self._sync_pattern.reply(number)

    def take_growth(self) -> bool:
        """Whether the context was made to do what can take memory of the card by itself; told once."""
        has_grown, self._holdings.may_have_grown = self._holdings.may_have_grown, False
        return has_grown

    @contextlib.contextmanager
    def serving(self, guest: Guest) -> Iterator[None]:
        """What is done meanwhile depends on a token: when that is over, waits end and everything is refused."""
        self._page.guest = guest
        try:
            yield
        finally:
            self._page.guest = None

    def meet(self, *, is_stranger: bool) -> None:
        """Somebody attaches: a stranger may be of another tenant than the leases that this process served before."""
        if is_stranger:
            self._context.forget_earlier()

    def is_held_by(self, guest: Guest) -> bool:
        """Whether a guest's token is good for anything now."""
        return self._page.is_held_by(guest)

    def count_connections(self, count: int) -> None:
        """Show the broker how many connections are attached."""
        self._counters[Counter.CONNECTIONS] = count

    def refusal(self) -> Failure | None:
        """Why the lease is over, None while it lives."""
        status = self._page.refusal()
        return None if status is None else refusal_of(status, self._page.reason(status))

    # --- the end ---

    def release(self, poll: Poll) -> None:
        """Wait for what runs, and give the context back all that the session has of it; it is not served any more.

        Raises DriverError if that can't be done, or if something stays for good.
        """
        if self.watch.is_on:
            self._context.watch(keep_waiting)
        self._context.sync(poll)
        fault = self._context.fault()
        if fault is not None:
            raise fault
        if self._has_faulted or self._ledger.keeps_for_good:
            raise DriverError("a kernel has failed" if self._has_faulted else "the driver keeps memory for its kernels")
        self._graphs.close()
        self._planner.forget()
        for number, module in self._ledger.modules():
            self._context.module_unload(module, poll)
            self._ledger.remove_module(number)
        for address in self._ledger.allocations():
            self._context.mem_free(address, poll)
            self._ledger.remove_allocation(address)

    def release_memory(self) -> None:
        """Give the host back what was pinned and is not any more. Raises BufferError if somebody uses it still."""
        self._memory.close()
        self.arena.close()

    # --- one request ---

    def _answer(self, frame: Frame) -> bytes | memoryview:
        status = self._page.refusal()
        if status is not None:
            self._counters[_FAILED_OPS] += 1
            return refused(frame, status, self._page.reason(status))
        is_guests_ping = frame.op == _PING and self._page.guest is not None
        failure = self._failure_of_guest() if is_guests_ping else self._take_kept()
        if failure is None:
            try:
                return self._operation(frame)(frame)
            except (Refused, BodyError, DriverError, LeaseOver) as error:
                failure = self._failure(error, frame.op)
                self._count_failure(frame.op, error)
        else:
            self._never_skipped(frame)
            self._count_failure(frame.op)
        return failed(frame, failure)

    def _obey(self, frame: Frame) -> None:
        if self._kept is not None or self.lost is not None or self._page.refusal() is not None:
            self.streams.place.skipped_by = self.lost or self._kept
            self._never_skipped(frame)
            return
        try:
            if frame.op == _LAUNCH and frame.session_id == self.lease_id:
                self._launch(frame)
            else:
                self._operation(frame)(frame)
        except (Refused, BodyError, DriverError, LeaseOver) as error:
            self._keep(error, frame.op, frame.request_id)

    def _never_skipped(self, frame: Frame) -> None:
        """What is behind a failure must go into the stream it is meant for once failures are told."""
        if frame.op == _SELECT and frame.session_id == self.lease_id:
            self.streams.select_anyway(frame)

    def _keep(self, error: Exception, op: int, request_id: int) -> None:
        """Remember why a quiet operation failed, for the next one that has a reply."""
        failure = self._failure(error, op)
        place = self.streams.place
        self._kept_of = place
        if isinstance(error, KernelFault):
            # Of an earlier launch, perhaps another connection's.
            self._kept_of, place.skipped_by = None, failure
        else:
            failure = replace(failure, failed_request_id=request_id, failed_op=op)
        self._kept = failure
        self._count_failure(op, error)

    def _keep_launch(self, error: Exception, request_id: int) -> None:
        self._keep(error, _LAUNCH, request_id)

    def _operation(self, frame: Frame) -> Callable[[Frame], bytes | memoryview]:
        operation = self._operations.get(frame.op)
        if operation is None:
            if frame.op in _KNOWN_OPERATIONS:
                raise BodyError(f"{Opcode(frame.op).name} is not allowed on a session's connection")
            raise BodyError(f"unknown operation {frame.op:#06x}", Status.UNSUPPORTED)
        if frame.session_id != self.lease_id:
            raise BodyError(f"the request is for session {frame.session_id:032x}, which this connection is not")
        return operation

    def _take_kept(self) -> Failure | None:
        """What an earlier operation left to report; reported once, unless it cost the context."""
        if self.lost is not None:
            return self.lost
        if self._kept is None:
            fault = self._context.fault()
            return None if fault is None else self._from_fault(fault)
        kept, self._kept = self._kept, None
        return kept

    def _failure_of_guest(self) -> Failure | None:
        """Why a quiet request of the connection that is served failed or was skipped; others' failures stay kept."""
        place = self.streams.place
        if self._kept is not None and self._kept_of is place:
            return self._take_kept()
        failure, place.skipped_by = place.skipped_by, None
        return failure

    def _count_failure(self, op: int, error: Exception | None = None) -> None:
        """A wait that the lease's end cut short, or that is answered with it, did not fail."""
        self._counters[_FAILED_OPS] += 1
        if op in _WAITS and not isinstance(error, LeaseOver):
            self._counters[Counter.SYNC_ERRORS] += 1

    def _failure(self, error: Exception, op: int) -> Failure:
        match error:
            case KernelFault():
                return self._from_fault(error)
            case LeaseOver():
                return self.refusal() or Failure(Status.INTERNAL, "the wait was ended while the lease lives")
        return failure_of(error, op)

    def _from_fault(self, fault: KernelFault) -> Failure:
        self._has_faulted = True
        failure = Failure(
            Status.SYNC_FAILED,
            str(fault),
            hint=fault.hint or "Fix the kernel or its arguments; what was queued behind it was skipped.",
            failed_request_id=fault.tag or None,
            failed_op=Opcode.GRAPH_LAUNCH if fault.tag in self._graphs.recent else Opcode.LAUNCH,
            kernel=fault.kernel,
            address=fault.address,
        )
        if fault.context_lost:
            self.lost = failure
        return failure

    # --- operations ---

    def _count(self) -> None:
        self._ledger.rounding_bytes = self._context.rounding_bytes
        self._counters[Counter.ALLOCATED_BYTES] = self._ledger.charged_bytes

    def _launch(self, frame: Frame) -> bytes:
        plan, args = self._planner.plan(frame.payload)  # type: ignore[arg-type]  # received payloads are views
        params = args if plan.moves is None else plan.lay_out(args)
        try:
            self._context.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, params, frame.request_id)
        except LaunchRejected:
            self._planner.refused()
            raise
        if self._planner.has_new_kernel:
            self._planner.has_new_kernel = False
            self._holdings.may_have_grown = True
            self._count()
        self._counters[_LAUNCHES] += 1
        return b"" if frame.flags else empty(frame)

    def _sync(self, frame: Frame) -> bytes:
        if frame.payload:
            raise BodyError("SYNC takes no payload")
        self._context.sync(self._check_lease)
        self._counters[Counter.SYNCS] += 1
        return empty(frame)

    def _ping(self, frame: Frame) -> bytes:
        if frame.flags:
            raise BodyError("PING can't be quiet: only session operations can")
        return done(frame, parse_body(Ping, frame.payload))

    def look(self) -> None:
        """Show the broker that this process goes round, and how long its kernel has run."""
        now_ns = time.monotonic_ns()
        self.watch.look(now_ns)
        # Last: with what an earlier look saw of a kernel, this one's time would say that it ran until now.
        self._counters[_LOOKED_NS] = now_ns

    def _check_lease(self) -> None:
        self.look()
        if self._page.refusal() is not None:
            raise LeaseOver
