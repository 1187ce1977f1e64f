"""The native function that runs some of a launch's blocks: one after another, a block's threads in turn.

    i32 kernel(launch, environment, i64 first_block, i64 last_block) -> Status

The answer is WAITS where a block only waits for others: called again with the same block in the same environment, which
says so, it goes on. Blocks are numbered x fastest; `last_block` is the one behind the last, and there is at least one.

In a block with barriers every thread has a frame. Each round runs every thread that has not ended up to its next
barrier or its end; when a round leaves none waiting, the block is done. That is enough where the only waits are for
barrier 0; scheduler.py has the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import sizeof

from gpulease.daemon.drivers.cpu.areas import Needs
from gpulease.daemon.drivers.cpu.native.frame import BOARD_BYTES
from gpulease.daemon.drivers.cpu.native.layout import PARAMETERS_OFFSET, Environment, Fault, Launch, Status
from gpulease.daemon.drivers.cpu.translate.ir import INVARIANT, TRUE, IrWriter, Value, constant
from gpulease.daemon.drivers.cpu.translate.operands import ENVIRONMENT, LAUNCH
from gpulease.daemon.drivers.cpu.translate.waiting import Waits

# In a frame's head: the thread has ended. Barriers are numbered from 1.
ENDED = -1

_FIRST, _LAST = Value("i64", "%first"), Value("i64", "%last")

# Gets the indices x, y and z of the innermost loop.
Body = Callable[[Sequence[Value]], None]


class RunnerWriter:
    """Writes the runner of one kernel around its thread function."""

    def __init__(self, thread: str, *, frame_bytes: int, local_bytes: int, waits: Waits) -> None:
        self.ir = IrWriter(set())
        self._thread = thread
        self._frame_bytes = frame_bytes
        self._local_bytes = local_bytes
        self._waits = waits
        self._allocas: list[str] = []
        self._sizes: dict[str, list[Value]] = {}

    @property
    def needs(self) -> Needs:
        """What a block takes."""
        if not self._waits.sites:
            return Needs(self._local_bytes, 0, 0, 0, parks=False)
        return Needs(0, self._local_bytes, BOARD_BYTES, self._frame_bytes, parks=self._waits.parks)

    def write(self, name: str) -> str:
        """The function's IR."""
        for field, start in (("grid", Launch.grid.offset), ("block", Launch.block.offset)):
            places = [self.ir.offset(LAUNCH, start + 4 * axis) for axis in range(3)]
            self._sizes[field] = [self.ir.load("i32", place, extra=INVARIANT) for place in places]
        self._run_blocks()
        self.ir.ret(Status.DONE)
        launch = f"ptr noalias dereferenceable({PARAMETERS_OFFSET}) %launch"
        environment = f"ptr noalias dereferenceable({sizeof(Environment)}) %environment"
        head = f"define i32 @{name}({launch}, {environment}, {_FIRST}, {_LAST}) {{"
        return "\n".join([head, "entry:", *self._allocas, *self.ir.lines, "}", ""])

    def _run_blocks(self) -> None:
        """Those from the first to the last."""
        ir = self.ir
        counter, head, done = self._variable("i64"), ir.fresh("block"), ir.fresh("blocksdone")
        ir.store(_FIRST, counter)
        ir.block(head)
        number = ir.load("i64", counter)
        self._run_block(self._place_of(number))
        following = ir.binary("add", number, 1)
        ir.store(following, counter)
        ir.branch_if(ir.compare("icmp ult", following, _LAST), head, done)
        ir.block(done)

    def _place_of(self, number: Value) -> list[Value]:
        """A block's x, y and z."""
        ir, left, place = self.ir, number, list[Value]()
        for size in self._sizes["grid"][:2]:
            wide = ir.cast("zext", size, "i64")
            place.append(ir.cast("trunc", ir.binary("urem", left, wide), "i32"))
            left = ir.binary("udiv", left, wide)
        return [*place, ir.cast("trunc", left, "i32")]

    def _run_block(self, block: Sequence[Value]) -> None:
        if not self._waits.sites:
            self._loop("block", lambda thread: self._run_thread(thread, block))
            return
        self._loop("block", self._prepare_thread)
        waiting = self._variable("i1")
        again, done = self.ir.fresh("round"), self.ir.fresh("blockdone")
        self.ir.block(again)
        self.ir.store(constant("i1", 0), waiting)
        self._loop("block", lambda thread: self._resume_thread(thread, block, waiting))
        self.ir.branch_if(self.ir.load("i1", waiting), again, done)
        self.ir.block(done)

    def _run_thread(self, thread: Sequence[Value], block: Sequence[Value]) -> None:
        """From start to end; threads that run alone share one local window."""
        status = self._call(thread, block, Value("ptr", "null"), self._area(Environment.local.offset))
        self._stop_if_faulted(status, lambda: thread, block)

    def _prepare_thread(self, thread: Sequence[Value]) -> None:
        self.ir.store(constant("i32", 0), self._frame(self._flat(thread)))

    def _resume_thread(self, thread: Sequence[Value], block: Sequence[Value], waiting: Value) -> None:
        """Up to the next barrier or the end, unless it has ended before."""
        ir = self.ir
        flat = self._flat(thread)
        frame = self._frame(flat)
        local = ir.offset(self._area(Environment.local.offset), ir.binary("mul", flat, self._local_bytes))
        with self._unless_ended(frame, waiting) as outcome:
            outcome.append(self._call(thread, block, frame, local))
            self._stop_if_faulted(outcome[0], lambda: thread, block)

    @contextmanager
    def _unless_ended(self, frame: Value, waiting: Value) -> Iterator[list[Value]]:
        """What is written inside resumes a frame, if it has not ended, and gives the status it comes back with."""
        ir, outcome = self.ir, list[Value]()
        run, waits, ended, after = (ir.fresh(stem) for stem in ("run", "waits", "ended", "after"))
        ir.branch_if(ir.compare("icmp eq", ir.load("i32", frame), ENDED), after, run)
        ir.block(run)
        yield outcome
        (status,) = outcome
        ir.branch_if(ir.compare("icmp eq", status, Status.WAITS), waits, ended)
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
        """End the launch, leaving behind which thread it was, as told then."""
        ir = self.ir
        stop, go_on = ir.fresh("stop"), ir.fresh("goon")
        ir.branch_if(ir.compare("icmp eq", status, Status.FAULT), stop, go_on)
        ir.block(stop)
        self._stop(thread(), block)
        ir.block(go_on)

    def _stop(self, thread: Sequence[Value], block: Sequence[Value]) -> None:
        fault = self._area(Environment.fault.offset)
        for start, indices in ((Fault.thread.offset, thread), (Fault.block.offset, block)):
            for axis, index in enumerate(indices):
                self.ir.store(index, self.ir.offset(fault, start + 4 * axis))
        self.ir.ret(Status.FAULT)

    def _flat(self, thread: Sequence[Value]) -> Value:
        """The thread's number in its block, as i64."""
        width, height, _ = self._sizes["block"]
        rows = self.ir.binary("add", self.ir.binary("mul", thread[2], height), thread[1])
        number = self.ir.binary("add", self.ir.binary("mul", rows, width), thread[0])
        return self.ir.cast("zext", number, "i64")

    def _frame(self, flat: Value) -> Value:
        return self.ir.offset(self._area(Environment.frames.offset), self.ir.binary("mul", flat, self._frame_bytes))

    def _area(self, offset: int) -> Value:
        return self.ir.load("ptr", self.ir.offset(ENVIRONMENT, offset), extra=INVARIANT)

    def _loop(self, field: str, body: Body) -> None:
        """Run a body for all indices below a size, x fastest."""
        self._nest(self._sizes[field], [], body)

    def _nest(self, sizes: Sequence[Value], outer: list[Value], body: Body) -> None:
        """One loop for the last axis that has none yet; every size is at least 1."""
        if len(outer) == len(sizes):
            body(outer)
            return
        ir = self.ir
        size = sizes[len(sizes) - len(outer) - 1]
        counter, head, done = self._variable("i32"), ir.fresh("loop"), ir.fresh("loopdone")
        ir.store(constant("i32", 0), counter)
        ir.block(head)
        index = ir.load("i32", counter)
        self._nest(sizes, [index, *outer], body)
        following = ir.binary("add", index, 1)
        ir.store(following, counter)
        ir.branch_if(ir.compare("icmp ult", following, size), head, done)
        ir.block(done)

    def _variable(self, kind: str) -> Value:
        """A stack slot, made in the entry block so that LLVM can turn it into a value."""
        name = f"%slot{len(self._allocas)}"
        self._allocas.append(f"  {name} = alloca {kind}")
        return Value("ptr", name)
