"""The block's loop for a kernel whose threads run together: a row's threads in groups, one after another.

With barriers each group has a frame, and rounds go as in runner.py.
"""

from collections.abc import Sequence

from gpulease.daemon.drivers.cpu.areas import Needs
from gpulease.daemon.drivers.cpu.native.layout import Environment
from gpulease.daemon.drivers.cpu.translate.ir import Value, constant
from gpulease.daemon.drivers.cpu.translate.operands import ENVIRONMENT, LAUNCH
from gpulease.daemon.drivers.cpu.translate.runner import RunnerWriter
from gpulease.daemon.drivers.cpu.translate.waiting import Waits

# What is above a fault's status: the lane.
_LANE_SHIFT = 8


class LaneRunnerWriter(RunnerWriter):
    """Writes the runner of one kernel around a function of lanes.py."""

    def __init__(self, thread: str, *, lanes: int, frame_bytes: int, local_bytes: int, waits: Waits) -> None:
        super().__init__(thread, frame_bytes=frame_bytes, local_bytes=local_bytes, waits=waits)
        self._lanes = lanes
        self._groups = constant("i32", 0)

    @property
    def needs(self) -> Needs:
        """What a block takes: a frame for each group, of which a block of narrow rows has as many as threads."""
        if not self._waits.sites:
            return Needs(self._lanes * self._local_bytes, 0, 0, 0, parks=False)
        return Needs(0, self._local_bytes, 0, self._frame_bytes, parks=False)

    def _run_block(self, block: Sequence[Value]) -> None:
        ir, sizes = self.ir, self._count_groups()
        if not self._waits.sites:
            self._nest(sizes, [], lambda group: self._run_group(group, block))
            return
        self._nest(sizes, [], lambda group: ir.store(constant("i32", 0), self._group_frame(group)))
        waiting = self._variable("i1")
        again, done = ir.fresh("round"), ir.fresh("blockdone")
        ir.block(again)
        ir.store(constant("i1", 0), waiting)
        self._nest(sizes, [], lambda group: self._resume_group(group, block, waiting))
        ir.branch_if(ir.load("i1", waiting), again, done)
        ir.block(done)

    def _count_groups(self) -> Sequence[Value]:
        """How many there are along each axis."""
        width, height, depth = self._sizes["block"]
        self._groups = self.ir.binary("udiv", self.ir.binary("add", width, self._lanes - 1), self._lanes)
        return self._groups, height, depth

    def _run_group(self, group: Sequence[Value], block: Sequence[Value]) -> None:
        """From start to end; groups that run alone share their local windows."""
        self._call_group(group, block, Value("ptr", "null"), self._area(Environment.local.offset))

    def _resume_group(self, group: Sequence[Value], block: Sequence[Value], waiting: Value) -> None:
        """Up to the next barrier or the end, unless it has ended before."""
        ir, frame = self.ir, self._group_frame(group)
        flat = self._flat(self._thread_of(group, constant("i32", 0)))
        local = ir.offset(self._area(Environment.local.offset), ir.binary("mul", flat, self._local_bytes))
        with self._unless_ended(frame, waiting) as outcome:
            outcome.append(self._call_group(group, block, frame, local))

    def _call_group(self, group: Sequence[Value], block: Sequence[Value], frame: Value, local: Value) -> Value:
        ir, left = self.ir, self._left(group)
        some = ir.binary("sub", ir.binary("shl", constant("i64", 1), ir.cast("zext", left, "i64")), 1)
        is_whole = ir.compare("icmp uge", left, self._lanes)
        mask = ir.cast("trunc", ir.select(is_whole, constant("i64", -1), some), f"i{self._lanes}")
        first = self._thread_of(group, constant("i32", 0))
        arguments = ", ".join(map(str, (LAUNCH, ENVIRONMENT, frame, local, mask, *first, *block)))
        status = ir.value("i32", f"call i32 @{self._thread}({arguments})")
        lane = ir.binary("lshr", status, _LANE_SHIFT)
        kind = ir.binary("and", status, (1 << _LANE_SHIFT) - 1)
        self._stop_if_faulted(kind, lambda: self._thread_of(group, lane), block)
        return kind

    def _thread_of(self, group: Sequence[Value], lane: Value) -> list[Value]:
        """The indices of a lane's thread."""
        return [self.ir.binary("add", self.ir.binary("mul", group[0], self._lanes), lane), *group[1:]]

    def _left(self, group: Sequence[Value]) -> Value:
        """How many threads there are from the group's first on."""
        return self.ir.binary("sub", self._sizes["block"][0], self.ir.binary("mul", group[0], self._lanes))

    def _group_frame(self, group: Sequence[Value]) -> Value:
        ir = self.ir
        row = ir.binary("add", ir.binary("mul", group[2], self._sizes["block"][1]), group[1])
        number = ir.binary("add", ir.binary("mul", row, self._groups), group[0])
        return self._frame(ir.cast("zext", number, "i64"))


class WarpRunnerWriter(LaneRunnerWriter):
    """The same for groups that are warps: neighbours by their number in the block, of whatever rows."""

    @property
    def needs(self) -> Needs:
        """What a block takes; its last warp may lack threads."""
        if not self._waits.sites:
            return super().needs
        each = -(-self._frame_bytes // self._lanes)
        return Needs(0, self._local_bytes, self._frame_bytes, each, parks=False)

    def _count_groups(self) -> Sequence[Value]:
        threads = self._threads()
        return [self.ir.binary("udiv", self.ir.binary("add", threads, self._lanes - 1), self._lanes)]

    def _thread_of(self, group: Sequence[Value], lane: Value) -> list[Value]:
        ir, (width, height, _) = self.ir, self._sizes["block"]
        flat = ir.binary("add", ir.binary("mul", group[0], self._lanes), lane)
        row = ir.binary("udiv", flat, width)
        return [ir.binary("urem", flat, width), ir.binary("urem", row, height), ir.binary("udiv", row, height)]

    def _left(self, group: Sequence[Value]) -> Value:
        return self.ir.binary("sub", self._threads(), self.ir.binary("mul", group[0], self._lanes))

    def _threads(self) -> Value:
        width, height, depth = self._sizes["block"]
        return self.ir.binary("mul", self.ir.binary("mul", width, height), depth)

    def _group_frame(self, group: Sequence[Value]) -> Value:
        return self._frame(self.ir.cast("zext", group[0], "i64"))
