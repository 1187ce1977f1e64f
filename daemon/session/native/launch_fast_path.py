"""The code of serve.ll, compiled once per process: the zygote does it for all workers.

Python's side of serve.ll: what native code is told of a session, its plans and its ring, and what it says back.

Native code works on the very buffer that a connection's `FrameReader` has, and on nothing else that a tenant can name.
What a structure points to is kept by the structure's owner here, for as long as native code can be given it.

Launches that come as expected, taken from what a connection sent without parsing a frame: natively, or in Python.

Python's way is the reference for native code (native/serve.ll): both come to the same, byte for byte.
"""

import ctypes
import importlib.util
import platform
import struct
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Final

from gpulease.daemon.contract.control_page import Counter, WorkerPage
from gpulease.daemon.drivers.interface import Context, DriverError, Kernel, NativeLaunch
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session import native
from gpulease.daemon.session.launches import Plan, Planner
from gpulease.daemon.session.native.layout import Move, Outcome, PlanRecord, RingEnds, ServingState
from gpulease.daemon.session.replies import SyncPattern
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.opcodes import Opcode


class ServingCode:
    """The functions of serve.ll; both let other Python threads run meanwhile."""

    def __init__(self) -> None:
        from gpulease.daemon.native.code_cache import load_ir

        self._code = load_ir(files(native).joinpath("serve.ll").read_text("ascii"))
        self.take_launches: Callable[[int], int] = self._bind("gpulease_take_launches", 1)
        self.serve_ring: Callable[[int, int], int] = self._bind("gpulease_serve_ring", 2)

    def _bind(self, name: str, arguments: int) -> Callable[..., int]:
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * arguments)(self._code.address(name))
        return function


@cache
def serving_code() -> ServingCode | None:
    """Compile; starts no thread. None where it can't be done: Python does the same then."""
    if platform.machine() != "x86_64" or importlib.util.find_spec("llvmlite") is None:
        return None
    return ServingCode()


SCRATCH_BYTES: Final = 2 * MAX_ARGUMENT_BYTES
"""Where parameter buffers are laid out; what needs more, gaps and all, is left to Python."""

_ALIGNMENT: Final = 16


class NativeServing:
    """One session's launches and syncs in native code.

    Raises nothing that a tenant can cause: what native code can't do is left as it was.
    """

    def __init__(self, code: ServingCode, native: NativeLaunch, page: WorkerPage, pattern: SyncPattern) -> None:
        self._code = code
        self._native = native
        self._page = page
        self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES + _ALIGNMENT)
        self._texts = [ctypes.create_string_buffer(text, len(text)) for text in pattern.texts]
        sync_front, sync_tail, reply_front, reply_tail = map(ctypes.addressof, self._texts)
        self._desk = ServingState(
            page=address_of(page.word),
            counters=address_of(page.counters),
            launch=native.launch,
            query=native.query,
            driver=native.state,
            scratch=-(-ctypes.addressof(self._scratch) // _ALIGNMENT) * _ALIGNMENT,
            sync_front=sync_front,
            sync_tail=sync_tail,
            reply_front=reply_front,
            reply_tail=reply_tail,
            sync_spin_ns=native.spin_ns,
        )
        self._at = ctypes.addressof(self._desk)
        self._buffer: bytearray | None = None

    def write_down(self, plan: Plan) -> None:
        """Give a plan its record."""
        pattern, params_bytes = plan.pattern, plan.kernel.parameter_bytes
        args_bytes = pattern.args_end - pattern.args_at
        launch = None
        if max(args_bytes, params_bytes) <= SCRATCH_BYTES:
            launch = self._native.record(plan.kernel, plan.grid, plan.block, plan.shared_bytes)
        moves = (Move * len(plan.moves))(*(Move(*move) for move in plan.moves)) if plan.moves else None
        kept = [ctypes.create_string_buffer(text, len(text)) for text in (pattern.front, pattern.middle, pattern.tail)]
        front, middle, tail = map(ctypes.addressof, kept)
        held = None if launch is None else ctypes.create_string_buffer(launch, len(launch))
        plan.record = record = PlanRecord(
            front=front,
            middle=middle,
            middle_bytes=len(pattern.middle),
            tail=tail,
            tail_bytes=len(pattern.tail),
            args_bytes=args_bytes,
            frame_bytes=pattern.frame_bytes,
            launch=0 if held is None else ctypes.addressof(held),
            moves=0 if moves is None else ctypes.addressof(moves),
            moves_count=len(plan.moves or ()),
            param_bytes=params_bytes,
        )
        record.kept = (kept, held, moves)
        plan.at = record.follower = ctypes.addressof(record)

    def take(self, reader: FrameReader, expected: Plan) -> bool:
        """Do the expected launches at the front of the reader; whether the next one is for Python to launch."""
        self._prepare(reader, expected)
        is_for_python = self._code.take_launches(self._at)
        reader.start = self._desk.start
        return bool(is_for_python)

    def serve(self, reader: FrameReader, expected: Plan | None, ends: RingEnds) -> Outcome:
        """Serve a ring for a while; the reader is empty."""
        reader.get_buffer()
        self._prepare(reader, expected)
        ends.buffer_bytes = len(reader.buffer)
        outcome = self._code.serve_ring(self._at, ctypes.addressof(ends))
        reader.start, reader.end = self._desk.start, self._desk.end
        return Outcome(outcome)

    def launched(self, kernel: Kernel) -> None:
        """See NativeLaunch."""
        self._native.launched(kernel)

    @property
    def latest(self) -> int:
        """The address of the record of the plan launched last, 0 if none was."""
        return int(self._desk.latest)

    def _prepare(self, reader: FrameReader, expected: Plan | None) -> None:
        desk, buffer = self._desk, reader.buffer
        if buffer is not self._buffer:
            desk.buffer = address_of(buffer)
            # A large one must not be kept alive by being known.
            self._buffer = buffer if len(buffer) <= RETAINED_BUFFER_BYTES else None
        desk.start, desk.end = reader.start, reader.end
        desk.expected = 0 if expected is None else expected.at
        desk.latest = 0


LAUNCHES_PER_CLOCK: Final = 8
"""Launches taken in a row between two looks at the deadline, some 50 us; the revocation word, which the broker sets at
the deadline too, is looked at before each. On some hosts the clock takes as long as the rest of a launch's checks.
serve.ll has this number too."""

# Plain integers: looking a member up on its enum costs as much as the rest of a check.
_LAUNCH: Final = int(Opcode.LAUNCH)
_OPS: Final = int(Counter.OPS)
_LAUNCHES: Final = int(Counter.LAUNCHES)
_DOING: Final = int(Counter.DOING)
_REQUEST_ID: Final = struct.Struct(">Q")


class LeaseOver(Exception):
    """Raised out of a wait when the control page says that the lease is over."""


class LaunchFastPath:
    """Takes one session's launches.

    Each passes the same gate as any request; what was checked when its plan was made is not checked again. A frame that
    is not expected, incomplete, or behind a failure is left where it is.

    Args:
        keep: Is told of a launch that failed, and of its number. Nothing more may be taken until that was reported.
    """

    def __init__(
        self,
        context: Context,
        planner: Planner,
        page: WorkerPage,
        pattern: SyncPattern,
        keep: Callable[[Exception, int], None],
    ) -> None:
        self._context = context
        self._planner = planner
        self._page = page
        self._counters = page.counters
        self._pattern = pattern
        self._keep = keep
        self._desk: NativeServing | None = None

    def go_native(self, native: NativeLaunch) -> None:
        """Have native code do from now on what it can, if this machine has any; before any launch."""
        code = serving_code()
        if code is not None:
            self._desk = desk = NativeServing(code, native, self._page, self._pattern)
            self._planner.write_down = desk.write_down

    def take(self, reader: FrameReader) -> None:
        """Take all there are at the front of what a connection sent."""
        desk = self._desk
        if desk is None:
            self._take(reader, reader.end - reader.start)
            return
        # What native code can't launch, Python does, one at a time: it waits for room, and says what failed.
        while (plan := self._planner.expected) is not None and reader.start != reader.end:
            is_for_python = desk.take(reader, plan)
            self._resume_at(desk)
            if not is_for_python or not self._take(reader, 1):
                return

    def serve(self, reader: FrameReader, ends: RingEnds) -> Outcome | None:
        """Take launches and syncs from a ring and answer there, until something else is to be done; see serve.ll.

        The reader is empty. None without native code.
        """
        desk = self._desk
        if desk is None:
            return None
        outcome = desk.serve(reader, self._planner.expected, ends)
        self._resume_at(desk)
        return outcome

    def _resume_at(self, desk: NativeServing) -> None:
        """Go on behind what native code launched last, if it launched anything."""
        if desk.latest:
            plan = self._planner.written_at(desk.latest)
            desk.launched(plan.kernel)
            self._planner.resume(plan)

    def _take(self, reader: FrameReader, most: int) -> bool:
        """Take so many at most; whether so many were there, and launched."""
        plan = self._planner.expected
        if plan is None or reader.start == reader.end:
            return False
        buffer, start, end = reader.buffer, reader.start, reader.end
        stands_at, refusal, launch = buffer.startswith, self._page.refusal, self._context.launch
        word = self._page.word
        latest: Plan | None = None
        request_id = count = done = 0
        self._counters[_DOING] = _LAUNCH
        try:
            while count < most:
                pattern = plan.pattern
                after = start + pattern.frame_bytes
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
                start = after
                count += 1
                params = args if plan.moves is None else plan.lay_out(args)
                launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, params, request_id)
                done += 1
                latest = plan
                plan = plan.follower or plan
        except (DriverError, LeaseOver) as error:
            self._keep(error, request_id)
        finally:
            self._counters[_DOING] = 0
        reader.start = start
        if latest is not None:
            self._planner.resume(latest)
        self._counters[_OPS] += count
        self._counters[_LAUNCHES] += done
        return done == most
