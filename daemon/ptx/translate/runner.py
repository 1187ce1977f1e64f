"""Writes the native function that runs some of a launch's blocks, one after another.

    i32 kernel(launch, environment, i64 first_block, i64 last_block)

Blocks are numbered, with x varying fastest. The function runs the blocks from `first_block` up to `last_block`,
exclusive, of which there is at least one. It returns a `ReturnStatus`. WAITS means that all threads of a block that
have not ended poll memory, and so may wait for other blocks. Another call with the same block in the same environment
continues the block.

In a block with barriers, every thread has a frame. Each round runs every thread that has not ended up to its next
barrier or its end. The block is done when no thread waits after a round. This is for waits at barrier 0 only;
scheduler.py handles other waits. If threads run together as lanes, each group of threads has one frame.

By default, blocks and the warps of each block run in the order of their numbers. With a seed, which the operator can
set, the order of blocks begins at another number, and in each round the order of a block's warps begins at another
warp. Only the result of a kernel with a race may depend on the order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import sizeof

from gpulease.daemon.ptx.memory import KernelNeeds
from gpulease.daemon.ptx.native.structures import (
    BOARD_BYTES,
    PARAMETERS_OFFSET,
    BlockEnvironment,
    Fault,
    QueuedLaunch,
    ReturnStatus,
)
from gpulease.daemon.ptx.translate.ir import INVARIANT, TRUE, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT, LAUNCH
from gpulease.daemon.ptx.translate.specials import WARP_THREADS
from gpulease.daemon.ptx.translate.waits import Waits

# The first word of a frame after its thread has ended. Before that, it is the number of the place at which the thread
# resumes, or 0 for the start.
ENDED = -1

_FIRST, _LAST = Value("i64", "%first"), Value("i64", "%last")

# Writes the body of the innermost loop. Its arguments are the indices x, y and z.
Body = Callable[[Sequence[Value]], None]

# Multiplier and increment of a linear congruential generator (Knuth, "The Art of Computer Programming", 3.3.4).
_SPREAD = 1_664_525
_STEP = 1_013_904_223

# The generator's low bits repeat after a few steps, so they are dropped.
_LOW_BITS = 8


class RunnerWriter:
    """Writes the runner of one kernel, which calls the function that runs one thread."""

    # Number of adjacent threads along x that stay together if the order is shuffled.
    turn_unit = WARP_THREADS

    def __init__(
        self, thread: str, *, frame_bytes: int, local_bytes: int, waits: Waits, shuffle: int | None = None
    ) -> None:
        self.ir = IrWriter(set())
        self._thread = thread
        self._frame_bytes = frame_bytes
        self._local_bytes = local_bytes
        self._waits = waits
        self._shuffle = shuffle
        self._turn: Value | None = None
        self._allocas: list[str] = []
        self._sizes: dict[str, list[Value]] = {}

    @property
    def needs(self) -> KernelNeeds:
        """The memory that a block needs in addition to shared memory."""
        # Without waits, one thread runs after another, so all threads share one local window and have no frames.
        if not self._waits.sites:
            return KernelNeeds(self._local_bytes, 0, 0, 0, parks=False)
        return KernelNeeds(0, self._local_bytes, BOARD_BYTES, self._frame_bytes, parks=self._waits.parks)

    def write(self, name: str) -> str:
        """Return the IR of the function, with this name."""
        # Load the launch's dimensions once.
        for field, start in (("grid", QueuedLaunch.grid.offset), ("block", QueuedLaunch.block.offset)):
            places = [self.ir.offset(LAUNCH, start + 4 * axis) for axis in range(3)]
            self._sizes[field] = [self.ir.load("i32", place, extra=INVARIANT) for place in places]
        self._run_blocks()
        self.ir.ret(ReturnStatus.DONE)
        # The stack slots that were collected while the code was written come first.
        launch = f"ptr noalias dereferenceable({PARAMETERS_OFFSET}) %launch"
        environment = f"ptr noalias dereferenceable({sizeof(BlockEnvironment)}) %environment"
        head = f"define i32 @{name}({launch}, {environment}, {_FIRST}, {_LAST}) {{"
        return "\n".join([head, "entry:", *self._allocas, *self.ir.lines, "}", ""])

    def _run_blocks(self) -> None:
        """Write the loop from the first block to the last."""
        ir = self.ir
        counter, head, done = self._variable("i64"), ir.fresh("block"), ir.fresh("blocksdone")
        ir.store(_FIRST, counter)
        ir.block(head)
        number = ir.load("i64", counter)
        place = self._place_of(self._shuffled_block(number))
        self._run_block(place)
        following = ir.binary("add", number, 1)
        ir.store(following, counter)
        ir.branch_if(ir.compare("icmp ult", following, _LAST), head, done)
        ir.block(done)

    def _shuffled_block(self, number: Value) -> Value:
        """Return the block to run as the `number`th one, and choose the warp with which it begins."""
        if self._shuffle is None:
            return number
        ir = self.ir
        blocks = ir.load("i64", ir.offset(LAUNCH, QueuedLaunch.blocks.offset), extra=INVARIANT)
        # The seed rotates the numbers, so every block runs once.
        begun = ir.binary("add", number, (self._shuffle * _SPREAD + _STEP) >> _LOW_BITS)
        block = ir.binary("urem", begun, blocks)
        self._turn = self._turn or self._variable("i32")
        ir.store(ir.binary("add", ir.cast("trunc", block, "i32"), self._shuffle), self._turn)
        self._begin_round()
        return block

    def _begin_round(self) -> None:
        """Choose the warp with which the next round begins."""
        if self._turn is not None:
            turned = self.ir.binary("mul", self.ir.load("i32", self._turn), _SPREAD)
            self.ir.store(self.ir.binary("add", turned, _STEP), self._turn)

    def _turned(self, index: Value, size: Value, unit: int) -> Value:
        """Rotate an index below `size` by the current random number. `unit` neighbours stay together."""
        if self._turn is None:
            return index
        ir = self.ir
        units = ir.binary("udiv", ir.binary("add", size, unit - 1), unit)
        first = ir.binary("urem", ir.binary("lshr", ir.load("i32", self._turn), _LOW_BITS), units)
        turned = ir.binary("add", index, ir.binary("mul", first, unit))
        return ir.select(ir.compare("icmp uge", turned, size), ir.binary("sub", turned, size), turned)

    def _place_of(self, number: Value) -> list[Value]:
        ir, remaining, place = self.ir, number, list[Value]()
        for size in self._sizes["grid"][:2]:
            wide = ir.cast("zext", size, "i64")
            place.append(ir.cast("trunc", ir.binary("urem", remaining, wide), "i32"))
            remaining = ir.binary("udiv", remaining, wide)
        return [*place, ir.cast("trunc", remaining, "i32")]

    def _run_block(self, block: Sequence[Value]) -> None:
        # Without waits, run each thread from its start to its end.
        if not self._waits.sites:
            self._loop("block", lambda thread: self._run_thread(thread, block))
            return
        # With barriers, clear all frames, then run rounds until no thread waits.
        self._loop("block", self._prepare_thread)
        waiting = self._variable("i1")
        again, done = self.ir.fresh("round"), self.ir.fresh("blockdone")
        self.ir.block(again)
        self._begin_round()
        self.ir.store(constant("i1", 0), waiting)
        self._loop("block", lambda thread: self._resume_thread(thread, block, waiting))
        self.ir.branch_if(self.ir.load("i1", waiting), again, done)
        self.ir.block(done)

    def _run_thread(self, thread: Sequence[Value], block: Sequence[Value]) -> None:
        """Run a thread from its start to its end. Threads that never wait share one local window."""
        status = self._call(thread, block, Value("ptr", "null"), self._area(BlockEnvironment.local.offset))
        self._stop_if_faulted(status, lambda: thread, block)

    def _prepare_thread(self, thread: Sequence[Value]) -> None:
        self.ir.store(constant("i32", 0), self._frame(self._flat(thread)))

    def _resume_thread(self, thread: Sequence[Value], block: Sequence[Value], waiting: Value) -> None:
        """Run a thread up to its next barrier or its end, unless it has already ended."""
        ir = self.ir
        flat = self._flat(thread)
        frame = self._frame(flat)
        local = ir.offset(self._area(BlockEnvironment.local.offset), ir.binary("mul", flat, self._local_bytes))
        with self._unless_ended(frame, waiting) as outcome:
            outcome.append(self._call(thread, block, frame, local))
            self._stop_if_faulted(outcome[0], lambda: thread, block)

    @contextmanager
    def _unless_ended(self, frame: Value, waiting: Value) -> Iterator[list[Value]]:
        """Write the code around a call that resumes a frame, unless the frame has ended.

        The block must write the call, and append its status to the list.
        """
        ir, outcome = self.ir, list[Value]()
        run, waits, ended, after = (ir.fresh(stem) for stem in ("run", "waits", "ended", "after"))
        ir.branch_if(ir.compare("icmp eq", ir.load("i32", frame), ENDED), after, run)
        ir.block(run)
        yield outcome
        (status,) = outcome
        # If the thread waits, there will be another round. If it has ended, mark its frame.
        ir.branch_if(ir.compare("icmp eq", status, ReturnStatus.WAITS), waits, ended)
        ir.block(waits)
        ir.store(TRUE, waiting)
        ir.branch(after)
        ir.block(ended)
        ir.store(constant("i32", ENDED), frame)
        ir.block(after)

    def _call(self, thread: Sequence[Value], block: Sequence[Value], frame: Value, local: Value) -> Value:
        arguments = ", ".join(map(str, (LAUNCH, ENVIRONMENT, frame, local, *thread, *block)))
        return self.ir.value("i32", f"call i32 @{self._thread}({arguments})")

    def _stop_if_faulted(self, status: Value, thread: Callable[[], Sequence[Value]], block: Sequence[Value]) -> None:
        """End the launch if the status is a fault. `thread` writes code for the indices of the thread at fault."""
        ir = self.ir
        stop, go_on = ir.fresh("stop"), ir.fresh("goon")
        ir.branch_if(ir.compare("icmp eq", status, ReturnStatus.FAULT), stop, go_on)
        ir.block(stop)
        self._stop(thread(), block)
        ir.block(go_on)

    def _stop(self, thread: Sequence[Value], block: Sequence[Value]) -> None:
        # The function has recorded the fault. Add the thread and the block, which are known only here.
        fault = self._area(BlockEnvironment.fault.offset)
        for start, indices in ((Fault.thread.offset, thread), (Fault.block.offset, block)):
            for axis, index in enumerate(indices):
                self.ir.store(index, self.ir.offset(fault, start + 4 * axis))
        self.ir.ret(ReturnStatus.FAULT)

    def _flat(self, thread: Sequence[Value]) -> Value:
        """Return the thread's number in its block, as i64."""
        width, height, _ = self._sizes["block"]
        rows = self.ir.binary("add", self.ir.binary("mul", thread[2], height), thread[1])
        number = self.ir.binary("add", self.ir.binary("mul", rows, width), thread[0])
        return self.ir.cast("zext", number, "i64")

    def _frame(self, flat: Value) -> Value:
        return self.ir.offset(
            self._area(BlockEnvironment.frames.offset), self.ir.binary("mul", flat, self._frame_bytes)
        )

    def _area(self, offset: int) -> Value:
        return self.ir.load("ptr", self.ir.offset(ENVIRONMENT, offset), extra=INVARIANT)

    def _loop(self, field: str, body: Body) -> None:
        """Write a loop over all indices below a launch's dimensions, with x varying fastest."""
        self._nest(self._sizes[field], [], body)

    def _nest(self, sizes: Sequence[Value], outer: list[Value], body: Body) -> None:
        """Write a loop for the last axis that has none yet. Every size is at least 1."""
        # The recursion writes three loops: z is the outermost, then y, then x.
        if len(outer) == len(sizes):
            body(outer)
            return
        ir = self.ir
        size = sizes[len(sizes) - len(outer) - 1]
        counter, head, done = self._variable("i32"), ir.fresh("loop"), ir.fresh("loopdone")
        ir.store(constant("i32", 0), counter)
        ir.block(head)
        index = ir.load("i32", counter)
        is_innermost = len(outer) + 1 == len(sizes)
        self._nest(sizes, [self._turned(index, size, self.turn_unit if is_innermost else 1), *outer], body)
        following = ir.binary("add", index, 1)
        ir.store(following, counter)
        ir.branch_if(ir.compare("icmp ult", following, size), head, done)
        ir.block(done)

    def _variable(self, kind: str) -> Value:
        """Return a new stack slot. It is in the entry block, so that LLVM can replace it with a register."""
        name = f"%slot{len(self._allocas)}"
        self._allocas.append(f"  {name} = alloca {kind}")
        return Value("ptr", name)


# In the status of a fault, the bits from this one on are the lane.
_LANE_SHIFT = 8


class LaneRunnerWriter(RunnerWriter):
    """Writes the runner of one kernel, which calls a function of lanes.py for a group of threads in a row."""

    turn_unit = 1

    def __init__(
        self,
        thread: str,
        *,
        lanes: int,
        frame_bytes: int,
        local_bytes: int,
        waits: Waits,
        shuffle: int | None = None,
    ) -> None:
        super().__init__(thread, frame_bytes=frame_bytes, local_bytes=local_bytes, waits=waits, shuffle=shuffle)
        self._lanes = lanes
        self._groups = constant("i32", 0)

    @property
    def needs(self) -> KernelNeeds:
        """The memory that a block needs: a frame for each group. In rows of one thread, each thread is a group."""
        if not self._waits.sites:
            return KernelNeeds(self._lanes * self._local_bytes, 0, 0, 0, parks=False)
        return KernelNeeds(0, self._local_bytes, 0, self._frame_bytes, parks=False)

    def _run_block(self, block: Sequence[Value]) -> None:
        # This is the same as for single threads, but with groups.
        ir, sizes = self.ir, self._count_groups()
        if not self._waits.sites:
            self._nest(sizes, [], lambda group: self._run_group(group, block))
            return
        self._nest(sizes, [], lambda group: ir.store(constant("i32", 0), self._group_frame(group)))
        waiting = self._variable("i1")
        again, done = ir.fresh("round"), ir.fresh("blockdone")
        ir.block(again)
        self._begin_round()
        ir.store(constant("i1", 0), waiting)
        self._nest(sizes, [], lambda group: self._resume_group(group, block, waiting))
        ir.branch_if(ir.load("i1", waiting), again, done)
        ir.block(done)

    def _count_groups(self) -> Sequence[Value]:
        """Compute the number of groups along each axis."""
        width, height, depth = self._sizes["block"]
        self._groups = self.ir.binary("udiv", self.ir.binary("add", width, self._lanes - 1), self._lanes)
        return self._groups, height, depth

    def _run_group(self, group: Sequence[Value], block: Sequence[Value]) -> None:
        """Run a group from its start to its end. Groups that never wait share their local windows."""
        self._call_group(group, block, Value("ptr", "null"), self._area(BlockEnvironment.local.offset))

    def _resume_group(self, group: Sequence[Value], block: Sequence[Value], waiting: Value) -> None:
        """Run a group up to its next barrier or its end, unless it has already ended."""
        ir, frame = self.ir, self._group_frame(group)
        flat = self._flat(self._thread_of(group, constant("i32", 0)))
        local = ir.offset(self._area(BlockEnvironment.local.offset), ir.binary("mul", flat, self._local_bytes))
        with self._unless_ended(frame, waiting) as outcome:
            outcome.append(self._call_group(group, block, frame, local))

    def _call_group(self, group: Sequence[Value], block: Sequence[Value], frame: Value, local: Value) -> Value:
        # The mask has all lanes, or as many as the row has threads from this group on.
        ir, lanes_left = self.ir, self._left(group)
        low_lanes = ir.binary("sub", ir.binary("shl", constant("i64", 1), ir.cast("zext", lanes_left, "i64")), 1)
        is_whole = ir.compare("icmp uge", lanes_left, self._lanes)
        mask = ir.cast("trunc", ir.select(is_whole, constant("i64", -1), low_lanes), f"i{self._lanes}")
        first = self._thread_of(group, constant("i32", 0))
        arguments = ", ".join(map(str, (LAUNCH, ENVIRONMENT, frame, local, mask, *first, *block)))
        status = ir.value("i32", f"call i32 @{self._thread}({arguments})")
        # Separate the lane of a fault from the status.
        lane = ir.binary("lshr", status, _LANE_SHIFT)
        kind = ir.binary("and", status, (1 << _LANE_SHIFT) - 1)
        self._stop_if_faulted(kind, lambda: self._thread_of(group, lane), block)
        return kind

    def _thread_of(self, group: Sequence[Value], lane: Value) -> list[Value]:
        return [self.ir.binary("add", self.ir.binary("mul", group[0], self._lanes), lane), *group[1:]]

    def _left(self, group: Sequence[Value]) -> Value:
        """Compute the number of threads in the row from the group's first one on."""
        return self.ir.binary("sub", self._sizes["block"][0], self.ir.binary("mul", group[0], self._lanes))

    def _group_frame(self, group: Sequence[Value]) -> Value:
        ir = self.ir
        row = ir.binary("add", ir.binary("mul", group[2], self._sizes["block"][1]), group[1])
        number = ir.binary("add", ir.binary("mul", row, self._groups), group[0])
        return self._frame(ir.cast("zext", number, "i64"))


class WarpRunnerWriter(LaneRunnerWriter):
    """Writes the runner for groups that are warps: threads with consecutive numbers in the block, in any rows."""

    @property
    def needs(self) -> KernelNeeds:
        """The memory that a block needs. Its last warp may be partial."""
        if not self._waits.sites:
            return super().needs
        # Each warp has a frame. Count a part of a frame for each thread, rounded up, and one more frame for a partial
        # warp.
        bytes_per_lane = -(-self._frame_bytes // self._lanes)
        return KernelNeeds(0, self._local_bytes, self._frame_bytes, bytes_per_lane, parks=False)

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
