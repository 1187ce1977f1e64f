"""Writes the runner for kernels with waits other than at barrier 0.

Threads run warp by warp. The threads of a warp that are ready run until they wait or end. Then the threads of complete
exchanges become ready. This is repeated until no thread of the warp is ready. After all warps, complete barriers
release their threads. If then no thread is ready and some still wait, they would wait forever, which is a fault. If all
threads that are ready poll memory in loops, the block may be waiting for another block. Then the function returns, and
continues when it is called again.
"""

from collections.abc import Sequence

from gpulease.daemon.ptx.native.library import RELEASE_WARP, SETTLE_BLOCK
from gpulease.daemon.ptx.native.structures import (
    BARRIERS,
    BOARD_BYTES,
    PLACE_MASK,
    PLACE_SHIFTS,
    Access,
    BlockEnvironment,
    FrameHead,
    ReturnStatus,
    ThreadState,
)
from gpulease.daemon.ptx.parse.syntax import Space
from gpulease.daemon.ptx.translate.access import RECORD_FAULT, SPACE_NUMBERS
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT
from gpulease.daemon.ptx.translate.runner import RunnerWriter
from gpulease.daemon.ptx.translate.specials import WARP_THREADS


class SchedulerWriter(RunnerWriter):
    """Writes the runner of one kernel. Its frames begin with a `FrameHead`."""

    def _run_block(self, block: Sequence[Value]) -> None:
        ir = self.ir
        board = self._area(BlockEnvironment.frames.offset)
        width, height, depth = self._sizes["block"]
        threads = ir.binary("mul", ir.binary("mul", width, height), depth)
        again, done, stuck, parks = (ir.fresh(stem) for stem in ("round", "blockdone", "stuck", "parks"))
        # If the block was suspended, its frames exist, so continue.
        if self._waits.parks:
            begins = ir.fresh("begins")
            resumes = ir.load("i64", ir.offset(ENVIRONMENT, BlockEnvironment.resumes.offset))
            ir.branch_if(ir.compare("icmp eq", resumes, 0), begins, again)
            ir.block(begins)
        # For a new block, no thread has arrived at any barrier, and all frames are at the start.
        ir.emit(f"store [{BARRIERS} x i32] zeroinitializer, {board}")
        self._loop("block", self._prepare_thread)
        # In each round, run every warp as far as possible, then release complete barriers of the block.
        ir.block(again)
        self._begin_round()
        self._run_warps(threads, block)
        # The verdict is 0 if all threads have ended, 1 if some are ready, and -1 if all ready threads poll memory.
        # Otherwise it is 2 plus the number of a thread that would wait forever.
        frames = self._frame(constant("i64", 0))
        arguments = ", ".join(map(str, (board, frames, threads, self._stride())))
        verdict = ir.value("i32", f"call i32 @{SETTLE_BLOCK}({arguments})")
        ir.switch(verdict, stuck, [(0, done), (1, again), (-1, parks)])
        ir.block(parks)
        ir.ret(ReturnStatus.WAITS)
        ir.block(stuck)
        self._fail(ir.cast("zext", ir.binary("sub", verdict, 2), "i64"), block)
        ir.block(done)

    def _run_warps(self, threads: Value, block: Sequence[Value]) -> None:
        """Run every warp until none of its threads is ready."""
        ir = self.ir
        counter = self._variable("i32")
        warp, again, following, done = (ir.fresh(stem) for stem in ("warp", "again", "warpdone", "warpsdone"))
        ir.store(constant("i32", 0), counter)
        ir.block(warp)
        # Compute the warp's first thread and the number of its lanes. The last warp may be partial.
        begun = ir.load("i32", counter)
        warps = ir.binary("and", ir.binary("add", threads, WARP_THREADS - 1), -WARP_THREADS)
        first = self._turned(begun, warps, WARP_THREADS)
        threads_left = ir.binary("sub", threads, first)
        is_whole = ir.compare("icmp ugt", threads_left, WARP_THREADS)
        lanes = ir.select(is_whole, constant("i32", WARP_THREADS), threads_left)
        frames = self._frame(ir.cast("zext", first, "i64"))
        # Run the lanes that are ready, and release complete exchanges. Repeat this if any lane was released.
        ir.block(again)
        self._run_lanes(first, lanes, block)
        arguments = ", ".join(map(str, (frames, lanes, self._stride(), constant("i64", self._waits.words))))
        released = ir.value("i1", f"call i1 @{RELEASE_WARP}({arguments})")
        ir.branch_if(released, again, following)
        ir.block(following)
        following_warp = ir.binary("add", begun, WARP_THREADS)
        ir.store(following_warp, counter)
        ir.branch_if(ir.compare("icmp ult", following_warp, threads), warp, done)
        ir.block(done)

    def _run_lanes(self, first: Value, lanes: Value, block: Sequence[Value]) -> None:
        """Run each ready thread of a warp until it waits or ends."""
        ir = self.ir
        counter = self._variable("i32")
        head, run, ended, after, done = (ir.fresh(stem) for stem in ("lane", "run", "ended", "after", "lanesdone"))
        ir.store(constant("i32", 0), counter)
        ir.block(head)
        # A thread that is not ready keeps its state.
        lane = ir.load("i32", counter)
        flat = ir.cast("zext", ir.binary("add", first, lane), "i64")
        frame = self._frame(flat)
        state = ir.offset(frame, FrameHead.state.offset)
        ir.branch_if(ir.compare("icmp eq", ir.load("i32", state), ThreadState.READY), run, after)
        ir.block(run)
        thread = self._indices(frame)
        local = ir.offset(self._area(BlockEnvironment.local.offset), ir.binary("mul", flat, self._local_bytes))
        status = self._call(thread, block, frame, local)
        self._stop_if_faulted(status, lambda: thread, block)
        # A thread that waits has already set its state.
        ir.branch_if(ir.compare("icmp eq", status, ReturnStatus.WAITS), after, ended)
        ir.block(ended)
        ir.store(constant("i32", ThreadState.ENDED), state)
        ir.block(after)
        next_lane = ir.binary("add", lane, 1)
        ir.store(next_lane, counter)
        ir.branch_if(ir.compare("icmp ult", next_lane, lanes), head, done)
        ir.block(done)

    def _prepare_thread(self, thread: Sequence[Value]) -> None:
        ir = self.ir
        frame = self._frame(self._flat(thread))
        # Store the packed indices in the frame, because the loops over warps have only the threads' numbers.
        place = thread[0]
        for index, shift in zip(thread[1:], PLACE_SHIFTS[1:], strict=True):
            place = ir.binary("or", place, ir.binary("shl", index, shift))
        start = {"resume": constant("i32", 0), "state": constant("i32", ThreadState.READY), "place": place}
        for field, value in start.items():
            ir.store(value, ir.offset(frame, getattr(FrameHead, field).offset))

    def _indices(self, frame: Value) -> list[Value]:
        place = self.ir.load("i32", self.ir.offset(frame, FrameHead.place.offset))
        return [self.ir.binary("and", self.ir.binary("lshr", place, shift), PLACE_MASK) for shift in PLACE_SHIFTS]

    def _fail(self, flat: Value, block: Sequence[Value]) -> None:
        """End the launch with a fault: a thread would wait forever."""
        ir = self.ir
        frame = self._frame(flat)
        fields = {
            field: ir.load("i32", ir.offset(frame, getattr(FrameHead, field).offset))
            for field in ("state", "kind", "members", "line")
        }
        # At a barrier, the fault contains the barrier's number; in an exchange, it contains the member mask.
        at_barrier = ir.compare("icmp eq", fields["state"], ThreadState.AT_BARRIER)
        number = ir.binary("and", fields["kind"], BARRIERS - 1)
        argument = ir.cast("zext", ir.select(at_barrier, number, fields["members"]), "i64")
        access = ir.select(at_barrier, constant("i32", Access.BARRIER), constant("i32", Access.EXCHANGE))
        space = constant("i32", SPACE_NUMBERS[Space.GENERIC])
        arguments = ", ".join(map(str, (ENVIRONMENT, argument, constant("i32", 0), access, space, fields["line"])))
        ir.emit(f"call void @{RECORD_FAULT}({arguments})")
        self._stop(self._indices(frame), block)

    def _frame(self, flat: Value) -> Value:
        # The counts of arrivals are before the first frame.
        return self.ir.offset(super()._frame(flat), BOARD_BYTES)

    def _stride(self) -> Value:
        return constant("i64", self._frame_bytes)
