"""Python's side of serve.ll: what native code is told of a session, its plans and its ring, and what it says back.

Native code works on the very buffer that a connection's `FrameReader` has, and on nothing else that a tenant can name.
What a structure points to is kept by the structure's owner here, for as long as native code can be given it.
"""

import ctypes
from typing import Final

from gpulease.daemon.drivers.interface import Kernel, NativeLaunch
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.worker.launching import Plan
from gpulease.daemon.worker.native.functions import ServingCode
from gpulease.daemon.worker.native.layout import Desk, Move, Outcome, PlanRecord, RingEnds
from gpulease.daemon.worker.page import WorkerPage
from gpulease.daemon.worker.replies import SyncPattern
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, RETAINED_BUFFER_BYTES

SCRATCH_BYTES: Final = 2 * MAX_ARGUMENT_BYTES
"""Where parameter buffers are laid out; what needs more, gaps and all, is left to Python."""

_ALIGNMENT: Final = 16


class NativeDesk:
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
        self._desk = Desk(
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
