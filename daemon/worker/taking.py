"""Launches that come as expected, taken from what a connection sent without parsing a frame: natively, or in Python.

Python's way is the reference for native code (native/serve.ll): both come to the same, byte for byte.
"""

import struct
from collections.abc import Callable
from typing import Final

from gpulease.daemon.drivers.interface import Context, DriverError, NativeLaunch
from gpulease.daemon.worker.launching import Plan, Planner
from gpulease.daemon.worker.native.desk import NativeDesk
from gpulease.daemon.worker.native.functions import serving_code
from gpulease.daemon.worker.native.layout import Outcome, RingEnds
from gpulease.daemon.worker.page import Counter, WorkerPage
from gpulease.daemon.worker.replies import SyncPattern
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.opcodes import Opcode

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


class Taker:
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
        self._desk: NativeDesk | None = None

    def go_native(self, native: NativeLaunch) -> None:
        """Have native code do from now on what it can, if this machine has any; before any launch."""
        code = serving_code()
        if code is not None:
            self._desk = desk = NativeDesk(code, native, self._page, self._pattern)
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

    def _resume_at(self, desk: NativeDesk) -> None:
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
