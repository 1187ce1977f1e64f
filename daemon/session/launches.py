"""Launches, the plans that save their checks, and the bound on kernels' run times.

The first launch of a shape is checked and makes a plan, which later launches of the shape reuse. A plan contains the
kernel, its shape, and the place of each argument in the parameter buffer. A plan's key is the LAUNCH without its
argument bytes, or the LAUNCH_IN without its argument bytes and region set. In the parameter buffer, parameters are at
their natural alignment (CUDA driver API, cuLaunchKernel); on the wire they have no gaps.

Tenants launch in loops, so a plan also records which plan followed it last time. As long as the next frame matches that
plan's pattern byte for byte, the worker neither parses nor checks it again (`LaunchFastPath`).

`KernelWatch` estimates how long the running kernel has run, without waiting for it. One stream runs its kernels in
order. So while the number of ended kernels of a stream does not change, and another kernel is queued, one and the same
kernel runs. Its time counts from the first poll that found it running, or that found the previous kernel ended: never
from before the kernel's real start. On the control page the broker reads the start time of the oldest running kernel,
and ends the worker if that kernel runs for too long. A kernel that waits for room on the card, after kernels of other
streams, also counts as running, because polls can't distinguish the two.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import (
    Context,
    Dim3,
    DriverError,
    DriverKernel,
    DriverLaunchAttributes,
    KernelFault,
    LaunchRejected,
)
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.native.layout import PlanRecord
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.region_operations import RegionGate, no_set
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fastpath import LaunchPattern, split_attributes, split_launch, split_regions
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_PRINTED_BYTES
from gpulease.protocol.messages import Launch, Printed
from gpulease.protocol.opcodes import LaunchFlag, Opcode, Status

MAX_PLANS: Final = 4096
"""Maximum number of plans that are kept. It bounds the worker's memory for a tenant that never launches the same shape
twice."""

_LAUNCHES: Final = int(Counter.LAUNCHES)


class LaunchOperations(OperationHandler):
    """LAUNCH, LAUNCH_IN and LAUNCH_WITH, and SYNC, which waits for all launches."""

    def __init__(self, resources: SessionResources, planner: "Planner", gate: RegionGate) -> None:
        super().__init__(resources)
        self._planner, self._gate = planner, gate
        self._needs_set = resources.options.regions_required

    @serves(Opcode.LAUNCH)
    def launch(self, frame: Frame) -> bytes:
        """Serve LAUNCH: queue a kernel, by its plan if there is one."""
        if self._needs_set:
            raise no_set()
        plan, args = self._planner.plan(memoryview(frame.payload))
        return self._queue(frame, plan, args)

    @serves(Opcode.LAUNCH_IN)
    def launch_in(self, frame: Frame) -> bytes:
        """Serve LAUNCH_IN: check its set's regions, then do a LAUNCH."""
        payload = memoryview(frame.payload)
        _, region_set, position = split_regions(payload)
        # Check the set only after the launch's own fields: a wrong launch is reported as such, whatever the state of
        # its regions.
        plan, args = self._planner.find(payload, Opcode.LAUNCH_IN)
        self._gate.admit(region_set, position, plan.kernel.name)
        self._planner.follow(plan)
        return self._queue(frame, plan, args)

    @serves(Opcode.LAUNCH_WITH)
    def launch_with(self, frame: Frame) -> bytes:
        """Serve LAUNCH_WITH: with attributes, a LAUNCH or, if it names a region set, a LAUNCH_IN."""
        payload, flags, cluster = split_attributes(memoryview(frame.payload))
        body, region_set, position = split_regions(payload)
        if not region_set and self._needs_set:
            raise no_set()
        # A LAUNCH_WITH is never expected to follow a plan, because native code can't launch with attributes.
        plan, args = self._planner.find(body, Opcode.LAUNCH_WITH)
        if region_set:
            self._gate.admit(region_set, position, plan.kernel.name)
        return self._queue(frame, plan, args, _attributes(plan, flags, cluster))

    def _queue(
        self, frame: Frame, plan: "Plan", args: bytes, attributes: DriverLaunchAttributes | None = None
    ) -> bytes:
        # The driver needs the parameter buffer. If no parameter needs alignment, these are the bytes on the wire.
        planner = self._planner
        params = args if plan.moves is None else plan.lay_out(args)
        launch = (plan.kernel, plan.grid, plan.block, plan.shared_bytes, params, frame.request_id)
        try:
            if attributes is None:
                self._context.launch(*launch)
            else:
                self._context.launch_with(*launch, attributes)
        except LaunchRejected:
            # The driver refused and took no memory, so undo the charge for a kernel's first launch.
            planner.refused()
            raise
        # A first launch may have made the context grow: the broker has to read its size from the card.
        if planner.has_new_kernel:
            planner.has_new_kernel = False
            self._resources.may_have_grown = True
            self._record_usage()
        self._counters[_LAUNCHES] += 1
        return b"" if frame.flags else empty(frame)

    @serves(Opcode.SYNC)
    def sync(self, frame: Frame) -> bytes:
        if frame.payload:
            raise BodyError("SYNC takes no payload")
        self._context.sync(self._resources.check_sync)
        self._counters[Counter.SYNCS] += 1
        return empty(frame)


class PrintedOperations(OperationHandler):
    """PRINTED.

    Args:
        take: Returns and clears the printed text, and says whether a part of it was lost.
    """

    def __init__(self, resources: SessionResources, take: Callable[[], tuple[bytes, bool]]) -> None:
        super().__init__(resources)
        self._take = take
        # Text that was taken earlier and that no client has asked for yet.
        self._earlier: tuple[bytes, bool] = (b"", False)

    @serves(Opcode.PRINTED)
    def printed(self, frame: Frame) -> bytes:
        """Serve PRINTED: wait for all launches, and take what they printed."""
        if frame.payload:
            raise BodyError("PRINTED takes no payload")
        # A kernel's output reaches the host only after the kernel has ended.
        self._context.sync(self._resources.check_sync)
        self._context.flush_printed()
        data, is_lost = self.take()
        return done(frame, Printed(data, int(is_lost)))

    def take(self) -> tuple[bytes, bool]:
        """Return what was printed since the last call, and whether some of it was lost. No kernel may be running."""
        (earlier, was_lost), self._earlier = self._earlier, (b"", False)
        data, is_lost = self._take()
        joined = earlier + data
        return joined[:MAX_PRINTED_BYTES], is_lost or was_lost or len(joined) > MAX_PRINTED_BYTES

    def put_back(self, data: bytes, *, is_lost: bool) -> None:
        """Put back what `take` returned: the next `take` returns it before everything that is printed from now on."""
        self._earlier = data, is_lost


def launch_failed(message: str, *, kernel: str = "", hint: str = "") -> Refused:
    """Return the refusal of a launch that was not queued."""
    return Refused(Failure(Status.LAUNCH_FAILED, message, hint=hint, kernel=kernel))


def _attributes(plan: "Plan", flags: int, cluster: Dim3) -> DriverLaunchAttributes:
    """Return the attributes of a LAUNCH_WITH. Raises Refused for values that are invalid on any card."""
    name = plan.kernel.name
    # Refuse unknown flags: ignoring one could give the launch another meaning.
    if flags & ~int(LaunchFlag.COOPERATIVE):
        raise launch_failed(f"{name}: {flags:#x} has flags that this daemon does not support", kernel=name)
    # All zeros mean no cluster.
    if not any(cluster):
        return DriverLaunchAttributes(bool(flags & LaunchFlag.COOPERATIVE), None)
    if not all(cluster) or any(
        blocks % cluster_length for blocks, cluster_length in zip(plan.grid, cluster, strict=True)
    ):
        raise launch_failed(
            f"{name}: the grid must be a multiple of the cluster {cluster}, not {plan.grid}",
            kernel=name,
            hint="Give the cluster at least 1 in each dimension, and the grid a multiple of it.",
        )
    return DriverLaunchAttributes(bool(flags & LaunchFlag.COOPERATIVE), cluster)


@dataclass(slots=True, eq=False)
class Plan:
    """A checked launch that lacks only its argument bytes.

    Attributes:
        moves: (offset on the wire, offset in the parameter buffer, size) of each argument, in bytes; None if both are
          equal.
        pattern: The constant bytes of its frames; those of a LAUNCH_IN have a trailer.
        follower: The plan that followed this one last time.
        record: The copy of this plan that native code reads; None without native code.
        address: The record's address; 0 without a record.
    """

    kernel: DriverKernel
    grid: Dim3
    block: Dim3
    shared_bytes: int
    moves: tuple[tuple[int, int, int], ...] | None
    pattern: LaunchPattern
    follower: "Plan | None" = None
    record: PlanRecord | None = None
    address: int = 0

    def lay_out(self, args: bytes) -> bytes:
        """Return the kernel's parameter buffer for these argument bytes."""
        if self.moves is None:
            return args
        params = bytearray(self.kernel.parameter_bytes)
        for start, target, size in self.moves:
            params[target : target + size] = args[start : start + size]
        return bytes(params)


class Planner:
    """A session's plans, found by the bytes of a launch on the wire.

    Args:
        compile_kernel: Compiles a kernel before a launch of this many threads. Raises DriverError or LeaseOver.

    Attributes:
        expected: The plan that the next launch is expected to use; None without an expectation.
        has_new_kernel: Whether a plan was made since the last launch; the first launch of its kernel may make the
            context grow.
        add_record: Gives a new plan its record for native code; None without native code.
        on_forget: Called before all plans are dropped.
    """

    def __init__(self, ledger: Ledger, session_id: int, compile_kernel: Callable[[DriverKernel, int], None]) -> None:
        self.expected: Plan | None = None
        self.has_new_kernel = False
        self.add_record: Callable[[Plan], None] | None = None
        self.on_forget: Callable[[], None] = lambda: None
        self._ledger = ledger
        self._session_id = session_id
        self._compile_kernel = compile_kernel
        # The key: the operation, and the launch's body without its arguments, its region set and its position.
        self._plans: dict[tuple[int, bytes], Plan] = {}
        self._plan_by_address: dict[int, Plan] = {}
        self._latest: Plan | None = None
        # The context's kept bytes before the latest plan was charged; None if the last launch made no plan.
        self._kept_before: int | None = None

    def plan(self, payload: memoryview) -> tuple[Plan, bytes]:
        """Return the plan of a LAUNCH and its argument bytes. The caller launches at once.

        Raises BodyError or Refused.
        """
        plan, args = self.find(payload)
        self.follow(plan)
        return plan, args

    def find(self, payload: memoryview, op: Opcode = Opcode.LAUNCH) -> tuple[Plan, bytes]:
        """Return the plan of a LAUNCH or LAUNCH_IN, or of a LAUNCH_WITH's launch, and its argument bytes.

        A new kernel is compiled. Raises BodyError or Refused.
        """
        self._kept_before = None
        # The key is the body without what differs from launch to launch.
        body = split_regions(payload)[0] if op == Opcode.LAUNCH_IN else payload
        shape, args = split_launch(body)
        key = (op, shape)
        plan = self._plans.get(key)
        if plan is None:
            # Step 1: make a plan for a new shape. Launches with attributes are never predicted, so they need no
            # pattern.
            is_expected = op != Opcode.LAUNCH_WITH
            pattern = LaunchPattern(payload, self._session_id, op if is_expected else Opcode.LAUNCH)
            plan = self._make(parse_body(Launch, body), pattern)
            # Step 2: make room. Drop all plans together, because they refer to one another.
            if len(self._plans) >= MAX_PLANS:
                self.forget()
            self._plans[key] = plan
            # Step 3: add the record that native code reads.
            if self.add_record is not None and is_expected:
                self.add_record(plan)
                self._plan_by_address[plan.address] = plan
        elif plan.kernel.is_due:
            # Native code has left this launch to Python, so that the kernel is optimised before it.
            self._compile(plan.kernel, prod(plan.grid) * prod(plan.block))
        return plan, args

    def follow(self, plan: Plan) -> None:
        """Record a launch of this plan: it follows the previous launch, and its own follower is expected next."""
        # Set the previous plan's follower, also in its copy for native code.
        latest = self._latest
        if latest is not None and latest.follower is not plan:
            latest.follower = plan
            if latest.record is not None:
                latest.record.follower = plan.address
        self.resume(plan)

    def resume(self, plan: Plan) -> None:
        """Record that the latest launch used this plan, as expected."""
        self._latest = plan
        self.expected = plan.follower or plan

    def plan_at(self, address: int) -> Plan:
        """Return the plan with its record at this address."""
        return self._plan_by_address[address]

    def forget(self) -> None:
        """Drop all plans, because a module is being unloaded and no plan may launch its kernels."""
        self.on_forget()
        self._plans.clear()
        self._plan_by_address.clear()
        self.expected = self._latest = None

    def refused(self) -> None:
        """Undo the charge for the latest plan, because the driver refused its launch and took nothing.

        Drops all plans, so that the next such launch is charged again and no other plan expects this one.
        """
        if self._kept_before is not None:
            self._ledger.restore_kept(self._kept_before)
            self.forget()

    def optimise(self, kernels: Iterable[DriverKernel]) -> None:
        """Optimise kernels that are due, before a graph is replayed. Raises Refused."""
        for kernel in kernels:
            self._compile(kernel, 1)

    def _compile(self, kernel: DriverKernel, threads: int) -> None:
        with _named(kernel):
            self._compile_kernel(kernel, threads)

    def _charge(self, kernel: DriverKernel) -> None:
        """Charge the slice for the memory that the driver takes at a kernel's first launch."""
        with _named(kernel):
            # Keep the bytes from before the charge, so that `refused` can undo it.
            self._kept_before = self._ledger.kept_bytes
            self._ledger.charge_kept(kernel.kept_bytes)
        self.has_new_kernel = True

    def _make(self, launch: Launch, pattern: LaunchPattern) -> Plan:
        kernels = self._ledger.module(launch.module).kernels
        kernel = kernels.get(launch.kernel)
        if kernel is None:
            names = ", ".join(sorted(kernels)[:16]) or "none"
            raise launch_failed(
                f"module {launch.module} has no kernel {launch.kernel!r}",
                kernel=launch.kernel,
                hint=f'Its kernels: {names}. C++ names are mangled unless declared extern "C".',
            )
        # Check the sizes, then the shape, and charge last: a wrong request must not be charged.
        _check_sizes(launch, kernel)
        block_threads = launch.block_x * launch.block_y * launch.block_z
        grid = (launch.grid_x, launch.grid_y, launch.grid_z)
        if not block_threads or not all(grid):
            raise launch_failed(
                f"{kernel.name}: grid {grid} and block {(launch.block_x, launch.block_y, launch.block_z)} "
                "must be at least 1 in every dimension",
                kernel=kernel.name,
            )
        if block_threads > kernel.max_threads_per_block:
            raise launch_failed(
                f"{kernel.name}: a block of {block_threads} threads was requested; at most "
                f"{kernel.max_threads_per_block} fit",
                kernel=kernel.name,
                hint="Use smaller blocks and more of them.",
            )
        self._compile(kernel, prod(grid) * block_threads)
        self._charge(kernel)
        block = (launch.block_x, launch.block_y, launch.block_z)
        return Plan(kernel, grid, block, launch.shared_bytes, _moves(kernel), pattern)


@contextmanager
def _named(kernel: DriverKernel) -> Iterator[None]:
    """Turn a DriverError in the preparation of a launch into the failure of that launch, with the kernel's name."""
    try:
        yield
    except KernelFault:
        raise  # An earlier launch has faulted.
    except DriverError as error:
        raise launch_failed(f"{kernel.name}: {error}", kernel=kernel.name, hint=error.hint) from None


def _check_sizes(launch: Launch, kernel: DriverKernel) -> None:
    sizes = [parameter.size for parameter in kernel.parameters]
    if list(launch.arg_sizes) != sizes:
        raise launch_failed(
            f"{kernel.name} takes arguments of {sizes} bytes, not {list(launch.arg_sizes)}",
            kernel=kernel.name,
            hint="Push one argument of the right size for each parameter of the kernel.",
        )
    if len(launch.args) != sum(sizes):
        raise launch_failed(
            f"{kernel.name}: the arguments must have {sum(sizes)} bytes, the sum of their sizes, not "
            f"{len(launch.args)}",
            kernel=kernel.name,
        )


def _moves(kernel: DriverKernel) -> tuple[tuple[int, int, int], ...] | None:
    moves = []
    # On the wire the arguments have no gaps; in the buffer each is at its parameter's offset.
    start = 0
    for parameter in kernel.parameters:
        moves.append((start, parameter.offset, parameter.size))
        start += parameter.size
    if start == kernel.parameter_bytes and all(source == target for source, target, _ in moves):
        return None
    return tuple(moves)


POLLS_PER_BOUND: Final = 8
"""Number of polls within the time that a kernel may run. A kernel that runs too long is found at most one interval too
late."""

MAX_POLL_MS: Final = 1000
"""Longest time between two polls, even if kernels may run for long."""

MIN_POLL_MS: Final = 5
"""Shortest time between two polls, even if kernels may run only briefly: a poll costs microseconds."""


class KernelWatch:
    """Measures how long one context's kernels run, if the lease bounds that."""

    def __init__(self, context: Context, counters: memoryview, max_kernel_ms: int) -> None:
        self.is_on = max_kernel_ms > 0
        self._context = context
        self._counters = counters
        # By stream: the number of its ended launches, and the time (ns) since which that number has not changed.
        self._running: dict[int, tuple[int, int]] = {}
        self._poll_interval_ms = max(MIN_POLL_MS, min(max_kernel_ms // POLLS_PER_BOUND, MAX_POLL_MS))

    def poll(self, now_ns: int) -> None:
        """Write the start time of the oldest running kernel to the control page. Does nothing without a bound."""
        if not self.is_on:
            return
        # Forget streams without a running kernel. Where the number of ended launches has changed, the time starts
        # again.
        running, self._running = self._running, {}
        for stream, ended in self._context.running().items():
            seen, since_ns = running.get(stream, (-1, 0))
            self._running[stream] = (ended, since_ns if seen == ended else now_ns)
        self._counters[Counter.KERNEL_SINCE_NS] = min((since_ns for _, since_ns in self._running.values()), default=0)

    def next_poll_in_ms(self) -> int | None:
        """Return the milliseconds until the next poll; None if no kernel runs."""
        return self._poll_interval_ms if self._counters[Counter.KERNEL_SINCE_NS] else None
