"""Serves expected launches, syncs and small copies without parsing them, in native code or in Python.

`LaunchFastPath` compares what a connection sent with the pattern of the plan that is expected next. Native code
(serve.ll) does the same as `LaunchFastPath._take`, which is the reference: both have the same effects, byte for byte.
`NativeServing` is the Python side of serve.ll; it fills the structures of layout.py.

Native code works directly on the buffer of a connection's `FrameReader`, and on nothing else that a tenant can name.
Code that fills a structure here must keep alive everything that the structure points to, as long as native code may use
it.
"""

import ctypes
import importlib.util
import mmap
import platform
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

from gpulease.daemon.contract.control_page import Counter, WorkerPage
from gpulease.daemon.contract.regions_page import WorkerRegions
from gpulease.daemon.drivers.interface import Context, DriverError, DriverKernel, NativeLaunch, Poll
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session.launches import Plan, Planner
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.native.allocation_records import AllocationRecords
from gpulease.daemon.session.native.chains import GATHER_AFTER, Chains
from gpulease.daemon.session.native.graph_records import GraphRecords, RecentReplays
from gpulease.daemon.session.native.layout import (
    Move,
    Outcome,
    PlanRecord,
    RegionCheckRecord,
    RingEnds,
    ServingState,
)
from gpulease.daemon.session.native.pacing import Pacer, session_code
from gpulease.daemon.session.native.region_refusals import REFUSAL_BYTES, kernel_part, refusal_front
from gpulease.daemon.session.operations import LeaseOver
from gpulease.daemon.session.region_operations import NO_EPOCH, RegionGate
from gpulease.daemon.session.replies import SyncPattern
from gpulease.protocol.failures import Refused
from gpulease.protocol.fastpath import ARENA_FRONTS, MIDDLE_AT, REGIONS, REQUEST_ID_OFFSET, SMALL_FRONTS
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.opcodes import Opcode

LAUNCHES_PER_CLOCK: Final = 8
"""Number of launches in a row between two checks of the deadline, about 50 us. The worker checks the revocation word
before each launch, and the broker sets the word at the deadline too. On some hosts reading the clock takes as long as
all other checks of a launch. serve.ll repeats this number."""

# Plain integers: looking up a member of its enum costs as much as the rest of a check.
_LAUNCH: Final = int(Opcode.LAUNCH)
_LAUNCH_IN: Final = int(Opcode.LAUNCH_IN)
_OPS: Final = int(Counter.OPS)
_LAUNCHES: Final = int(Counter.LAUNCHES)
_DOING: Final = int(Counter.DOING)
_REQUEST_ID: Final = struct.Struct(">Q")


class LaunchFastPath:
    """Serves one session's expected launches.

    It checks the control page before each launch, as `Session` does before any request, and the regions page before a
    LAUNCH_IN. It does not repeat the checks that were made for the plan. It leaves a frame in the buffer if the frame
    is not the expected one, is incomplete, or follows a failure. Native code also leaves two kinds of launches to
    Python: one in another region set than the set in use, and one that is refused for a reason other than a revoked
    region.

    Args:
        gate: The regions, with the set in use.
        keep_failure: Called with a failed launch's error, operation and request id. The caller takes no more launches
          until the failure was reported.
        note_reported: Called after `keep_failure` if native code has reported the failure already, as the reply to a
          SYNC that was made at this time.
        pacer: The account of time, and the limits on it.
        check_lease: Called while a launch waits for these limits; raises LeaseOver.
    """

    def __init__(
        self,
        context: Context,
        planner: Planner,
        page: WorkerPage,
        sync_pattern: SyncPattern,
        gate: RegionGate,
        keep_failure: Callable[[Exception, int, int], None],
        note_reported: Callable[[int], None],
        pacer: Pacer,
        check_lease: Poll,
    ) -> None:
        self._context = context
        self._pacer = pacer
        self._check_lease = check_lease
        self._gate = gate
        self._planner = planner
        self._page = page
        self._counters = page.counters
        self._sync_pattern = sync_pattern
        self._keep_failure = keep_failure
        self._note_reported = note_reported
        self._native: NativeServing | None = None
        self._chains: Chains | None = None

    def use_native(self, launch: NativeLaunch, ledger: Ledger, graphs: GraphRecords, replays: RecentReplays) -> None:
        """Let native code serve operations, if this machine supports it. Must be called before any launch."""
        # Planner and gate call back, so that the structures stay up to date.
        code = serving_code()
        if code is not None:
            self._native = NativeServing(
                code, launch, self._page, self._sync_pattern, self._gate, ledger.records, self._pacer, graphs, replays
            )
            self._planner.add_record = self._native.add_record
            self._gate.on_change = self._native.show_regions
            if launch.chain is not None:
                self._chains = Chains(launch.chain, ledger)
                self._planner.on_forget = self._chains.drop

    @property
    def is_native(self) -> bool:
        """Return whether native code serves operations."""
        return self._native is not None

    def prepare_reads(self) -> None:
        """Let native code serve small reads from now on. Call this at the session's first read."""
        if self._native is not None:
            self._native.prepare_reads(self._context.pin)

    def use_arena(self, arena: int, size_bytes: int, extents: int) -> None:
        """Let native code serve copies of the session's arena; the arguments are ServingState's."""
        if self._native is not None:
            self._native.use_arena(arena, size_bytes, extents)

    @property
    def synced(self) -> int:
        """Launches counted when native code last answered a SYNC; 0 if it never did."""
        return 0 if self._native is None else self._native.synced

    def take(self, reader: FrameReader) -> None:
        """Serve all expected launches at the front of what a connection sent."""
        native = self._native
        if native is None:
            self._take(reader, reader.end - reader.start)
            return
        # Python does the launches that native code can't do, one at a time: it can wait for room, and report what
        # failed.
        while (plan := self._planner.expected) is not None and reader.start != reader.end:
            is_for_python = native.take(reader, plan)
            self._resume_after(native)
            if not is_for_python or not self._take(reader, 1):
                return

    def serve(self, reader: FrameReader, ends: RingEnds, settled: int) -> Outcome | None:
        """Serve launches and syncs from a ring and reply there, until Python has something to do; see serve.ll.

        The reader must be empty. `settled` is the number of launches counted when Python last answered a wait, or
        reported a failure. Returns None without native code.
        """
        native = self._native
        if native is None:
            return None
        outcome = native.serve(reader, self._planner.expected, ends, settled)
        self._resume_after(native)
        if outcome is Outcome.REFUSED:
            return self._note_refusal(native.refusal)
        # Enough launches have waited in a row: from now on a chain may serve them.
        if self._chains is not None and native.takes_rows() and self._planner.expected is not None:
            self._chains.add(self._planner.expected)
        return outcome

    def _note_refusal(self, refusal: RegionCheckRecord) -> Outcome:
        """Handle a launch that native code has refused as `_take` does, and return the next step."""
        plan = self._planner.plan_at(refusal.plan)
        position = int.from_bytes(int(refusal.position).to_bytes(8, sys.byteorder), "big")
        request_id = int.from_bytes(int(refusal.number).to_bytes(8, sys.byteorder), "big")
        self._counters[_OPS] += 1
        error = self._gate.refuse_revoked(
            refusal.member, refusal.flipped_ns, plan.kernel.name, position, refusal.seen_ns
        )
        self._keep_failure(error, _LAUNCH_IN, request_id)
        if refusal.told_ns:
            self._note_reported(refusal.told_ns)
        if refusal.wakes:
            return Outcome(refusal.wakes)
        # If the refusal was reported, the broker is about to order the region's end. If not, Python serves what came
        # next.
        return Outcome.QUANTUM_OVER if refusal.told_ns else Outcome.FRAMES

    def _resume_after(self, native: "NativeServing") -> None:
        """Let the planner continue after native code's last launch, and notify the driver of what was queued last."""
        if native.latest:
            plan = self._planner.plan_at(native.latest)
            native.launched(plan.kernel)
            self._planner.resume(plan)
        native.note_replayed()

    def _take(self, reader: FrameReader, most: int) -> bool:
        """Serve at most `most` launches in Python; return whether all of them had arrived and were launched."""
        plan = self._planner.expected
        if plan is None or reader.start == reader.end:
            return False
        buffer, start, end = reader.buffer, reader.start, reader.end
        stands_at, refusal, launch = buffer.startswith, self._page.refusal, self._context.launch
        word, is_quiet, pacer = self._page.word, self._gate.is_quiet, self._pacer
        latest: Plan | None = None
        request_id = count = done = 0
        self._counters[_DOING] = _LAUNCH
        try:
            while count < most:
                pattern = plan.pattern
                after = start + pattern.frame_bytes
                # A comparison of bytes replaces the parser: everything but the request id and the arguments must equal
                # the plan's bytes. Then come the checks with results that can change from launch to launch: the
                # revocation word, every few launches the clock, and the region set.
                if (
                    after > end
                    or not stands_at(pattern.front, start)
                    or not stands_at(pattern.middle, start + MIDDLE_AT)
                    or not stands_at(pattern.tail, start + pattern.args_end)
                    or word[0]
                    or (count % LAUNCHES_PER_CLOCK == 0 and refusal() is not None)
                ):
                    break
                (request_id,) = _REQUEST_ID.unpack_from(buffer, start + REQUEST_ID_OFFSET)
                if request_id == 0:
                    break
                args = bytes(buffer[start + pattern.args_at : start + pattern.args_end])
                # Count the frame as taken before the launch, so that `handle` does not serve a failed launch again.
                start = after
                count += 1
                # Check the regions after the wait for the card's time, because they may end during it.
                pacer.admit(pacer.mean_of(_LAUNCH) if plan.record is None else plan.record.mean, self._check_lease)
                if pattern.trailer_bytes and not is_quiet(buffer, after - pattern.trailer_bytes):
                    region_set, position = REGIONS.unpack_from(buffer, after - pattern.trailer_bytes)
                    self._gate.admit(region_set, position, plan.kernel.name)
                params = args if plan.moves is None else plan.lay_out(args)
                launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, params, request_id)
                pacer.begun()
                done += 1
                # Count the launch at once: a refusal of the next launch says how many launches began before it.
                self._counters[_LAUNCHES] += 1
                latest = plan
                plan = plan.follower or plan
        except (Refused, DriverError, LeaseOver) as error:
            self._keep_failure(error, _LAUNCH_IN if plan.pattern.trailer_bytes else _LAUNCH, request_id)
        finally:
            self._counters[_DOING] = 0
        reader.start = start
        if latest is not None:
            self._planner.resume(latest)
        self._counters[_OPS] += count
        return done == most


class ServingCode:
    """The functions of serve.ll; ctypes lets other Python threads run during a call."""

    def __init__(self) -> None:
        self._code = session_code()
        self.take_launches: Callable[[int], int] = self._bind("gpulease_take_launches", 1)
        self.serve_ring: Callable[[int, int], int] = self._bind("gpulease_serve_ring", 2)

    def _bind(self, name: str, arguments: int) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * arguments)(self._code.address(name))


@cache
def serving_code() -> ServingCode | None:
    """Compile serve.ll once per process; the zygote does it for all workers, without starting a thread.

    Returns None where serve.ll can't run; there, Python serves everything.
    """
    if platform.machine() != "x86_64" or importlib.util.find_spec("llvmlite") is None:
        return None
    return ServingCode()


SCRATCH_BYTES: Final = 2 * MAX_ARGUMENT_BYTES
"""Room for one parameter buffer. Python does a launch that needs more, including gaps between the parameters."""

SMALL_COPY_BYTES: Final = 64 << 10
"""Largest copy that native code serves: up to this size, the driver puts the bytes of ordinary memory into its command,
and the receive buffer has room for the whole frame. serve.ll repeats this number.
"""

COPIED_BYTES: Final = SMALL_COPY_BYTES + 64
"""Room for a reply that carries SMALL_COPY_BYTES."""

_ALIGNMENT: Final = 16


class NativeServing:
    """A session's launches and syncs in native code.

    Raises nothing that a tenant can cause: native code leaves requests that it can't serve to Python.
    """

    def __init__(
        self,
        code: ServingCode,
        launch: NativeLaunch,
        page: WorkerPage,
        sync_pattern: SyncPattern,
        gate: RegionGate,
        allocations: AllocationRecords,
        pacer: Pacer,
        graphs: GraphRecords,
        replays: RecentReplays,
    ) -> None:
        self._code = code
        self._gate = gate
        self._pacer = pacer
        self._plans_made = 0
        self._launch = launch
        # Keep these objects alive, because the state below contains their addresses.
        self._page = page
        self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES + _ALIGNMENT)
        self._texts = [ctypes.create_string_buffer(text, len(text)) for text in sync_pattern.texts]
        sync_front, sync_tail, reply_front, reply_tail = map(ctypes.addressof, self._texts)
        self._state = ServingState(
            page=address_of(page.word),
            counters=address_of(page.counters),
            launch=launch.launch,
            query=launch.query,
            driver=launch.state,
            scratch=-(-ctypes.addressof(self._scratch) // _ALIGNMENT) * _ALIGNMENT,
            sync_front=sync_front,
            sync_tail=sync_tail,
            reply_front=reply_front,
            reply_tail=reply_tail,
            sync_spin_ns=launch.spin_ns,
            pacing=pacer.address,
            graphs=graphs.address,
            replay_graph=launch.replay_graph,
            replays=replays.address,
            **self._for_copies(launch, allocations),
        )
        self._graphs, self._replays = graphs, replays
        graphs.is_read = bool(launch.replay_graph)
        # If there is no regions page, use a word that never changes.
        self._no_page = ctypes.c_uint64()
        self._page_shown: WorkerRegions | None = None
        self._refusal_front = refusal_front()
        self._refusal_reply = ctypes.create_string_buffer(REFUSAL_BYTES)
        self.refusal = RegionCheckRecord(
            front=address_of(self._refusal_front), reply=ctypes.addressof(self._refusal_reply)
        )
        self._state.refusal = ctypes.addressof(self.refusal)
        self.show_regions()
        self._state_address = ctypes.addressof(self._state)
        self._buffer: bytearray | None = None

    def _for_copies(self, launch: NativeLaunch, allocations: AllocationRecords) -> dict[str, int]:
        """Return the state's fields for small copies."""
        self._allocations = allocations
        self._fronts = [ctypes.create_string_buffer(text, len(text)) for text in SMALL_FRONTS]
        fronts = zip(("write_front", "read_front", "data_front", "reuse_front"), self._fronts, strict=True)
        self._arena_fronts = ctypes.create_string_buffer(b"".join(ARENA_FRONTS), sum(map(len, ARENA_FRONTS)))
        return {name: ctypes.addressof(front) for name, front in fronts} | {
            "arena_fronts": ctypes.addressof(self._arena_fronts),
            "allocations": allocations.address,
            "copy_in": launch.copy_in,
            "copy_out": launch.copy_out,
            "zero": launch.zero,
            "replay": launch.replay,
        }

    def prepare_reads(self, pin: Callable[[memoryview], None]) -> None:
        """Serve reads from now on, into memory that is pinned first: the card copies there in half the time."""
        # Pin the memory only now, because pinning costs more than the reads of a short session would save.
        self._copied = memoryview(mmap.mmap(-1, COPIED_BYTES))
        pin(self._copied)
        self._state.copied = address_of(self._copied)

    def use_arena(self, arena: int, size_bytes: int, extents: int) -> None:
        self._state.arena, self._state.arena_bytes, self._state.extents = arena, size_bytes, extents

    def add_record(self, plan: Plan) -> None:
        pattern, params_bytes = plan.pattern, plan.kernel.parameter_bytes
        args_bytes = pattern.args_end - pattern.args_at
        # Leave a launch to Python (`launch` stays 0) if it does not fit the scratch memory, or if the driver can't
        # record it.
        launch = None
        if max(args_bytes, params_bytes) <= SCRATCH_BYTES:
            launch = self._launch.record(plan.kernel, plan.grid, plan.block, plan.shared_bytes)
        moves = (Move * len(plan.moves))(*(Move(*move) for move in plan.moves)) if plan.moves else None
        texts = [ctypes.create_string_buffer(text, len(text)) for text in (pattern.front, pattern.middle, pattern.tail)]
        front, middle, tail = map(ctypes.addressof, texts)
        self._plans_made += 1
        launch_buffer = None if launch is None else ctypes.create_string_buffer(launch, len(launch))
        # The part of a refusal that describes the kernel. Only launches that name regions need it, because only these
        # can be refused.
        refusal = kernel_part(plan.kernel.name) if pattern.trailer_bytes else b""
        refusal_buffer = ctypes.create_string_buffer(refusal, len(refusal))
        plan.record = record = PlanRecord(
            front=front,
            middle=middle,
            middle_bytes=len(pattern.middle),
            tail=tail,
            tail_bytes=len(pattern.tail),
            args_bytes=args_bytes,
            frame_bytes=pattern.frame_bytes,
            launch=0 if launch_buffer is None else ctypes.addressof(launch_buffer),
            moves=0 if moves is None else ctypes.addressof(moves),
            moves_count=len(plan.moves or ()),
            param_bytes=params_bytes,
            trailer_bytes=pattern.trailer_bytes,
            tail_at=pattern.args_end,
            refusal=ctypes.addressof(refusal_buffer),
            refusal_bytes=len(refusal),
            mean=self._pacer.mean_of(self._plans_made),
        )
        # Store these in an attribute of the record, so that what the record points to lives as long as the record.
        record.referents = (texts, launch_buffer, moves, refusal_buffer)
        plan.address = record.follower = ctypes.addressof(record)

    def take(self, reader: FrameReader, expected: Plan) -> bool:
        """Serve the expected launches at the front of the reader; return whether Python has to launch the next one."""
        self._prepare(reader, expected)
        is_for_python = self._code.take_launches(self._state_address)
        reader.start = self._state.start
        return bool(is_for_python)

    def serve(self, reader: FrameReader, expected: Plan | None, ends: RingEnds, settled: int) -> Outcome:
        """Serve a ring for a while; the reader must be empty."""
        # Make room in the buffer first, because native code can't enlarge it.
        reader.get_buffer()
        self._prepare(reader, expected)
        ends.buffer_bytes = len(reader.buffer)
        if (page := self._gate.page) is not None:
            # With any epoch other than the present one, native code stops after one portion.
            self._state.seen_epoch = NO_EPOCH if self._gate.is_moving() else page.epoch
            self.refusal.settled = settled
        outcome = self._code.serve_ring(self._state_address, ctypes.addressof(ends))
        reader.start, reader.end = self._state.start, self._state.end
        return Outcome(outcome)

    def takes_rows(self) -> bool:
        """Return whether GATHER_AFTER more launches have waited in a row since this last returned True."""
        if self._state.in_rows < GATHER_AFTER:
            return False
        self._state.in_rows = 0
        return True

    def show_regions(self) -> None:
        """Give native code the regions page and the set in use. Must be called whenever either may have changed."""
        state, page, current = self._state, self._gate.page, self._gate.current
        # Without a page or a set, the epochs are values that never match.
        state.epoch = ctypes.addressof(self._no_page) if page is None else address_of(page.epoch_word)
        state.set_epoch = NO_EPOCH if current is None else current.epoch
        if page is not None and page is not self._page_shown:
            self._page_shown = page
            columns = (page.words, page.flipped_ns, page.deadlines)
            self.refusal.words, self.refusal.flipped, self.refusal.deadlines = map(address_of, columns)
        self.refusal.count = 0
        if current is not None:
            state.region_set = int.from_bytes(current.wire, sys.byteorder)
            state.set_deadline = current.deadline_ns
            self.refusal.members, self.refusal.count = current.address_of_records(), len(current.regions)

    @property
    def synced(self) -> int:
        """Launches counted when native code last answered a SYNC."""
        return int(self._state.synced)

    def launched(self, kernel: DriverKernel) -> None:
        """Tell the driver which kernel native code launched last."""
        self._launch.launched(kernel)

    def note_replayed(self) -> None:
        """Notify the driver if native code queued a graph last."""
        if self._state.graph:
            self._graphs.replayed(self._state.graph)

    @property
    def latest(self) -> int:
        """The address of the record of the plan launched last, 0 if none was."""
        return int(self._state.latest)

    def _prepare(self, reader: FrameReader, expected: Plan | None) -> None:
        state, buffer = self._state, reader.buffer
        # The buffer's address changes only when the reader replaces it.
        if buffer is not self._buffer:
            state.buffer = address_of(buffer)
            # Keep no reference to a large buffer, which would keep it alive.
            self._buffer = buffer if len(buffer) <= RETAINED_BUFFER_BYTES else None
        state.start, state.end = reader.start, reader.end
        state.expected = 0 if expected is None else expected.address
        state.latest = state.graph = 0
