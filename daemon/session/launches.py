"""Launches, checked once and repeated cheaply.

Everything of a LAUNCH but its argument bytes keys a plan: the kernel, its shape, and where each argument goes in the
parameter buffer (CUDA driver API, cuLaunchKernel: parameters lie at their natural alignment; on the wire they have no
gaps).

Tenants launch in loops, so a plan also remembers which one came after it last time. As long as the next frame is of
that plan's pattern, byte for byte, nothing of it has to be parsed or checked again.

How long the kernel that runs has run, as far as it can be told without waiting for it.

What one stream holds runs in order. So as long as the number of what has ended in it does not change, and a kernel is
next, it is one kernel that runs. Its time counts from the look that saw what was before it ended, or that saw it first:
later than the stream came to it, never earlier. The broker reads on the control page since when the oldest of them has
run as the last look saw it, and ends what runs for too long. A kernel that the card has no room for, beside those of
other streams, can't be told from one that runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import Context, Dim3, DriverError, Kernel, KernelFault
from gpulease.daemon.session.ledger import Ledger, Refused
from gpulease.daemon.session.native.layout import PlanRecord
from gpulease.protocol.codec import parse_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.fastpath import LaunchPattern, split_launch
from gpulease.protocol.messages import Launch
from gpulease.protocol.opcodes import Status

MAX_PLANS: Final = 4096
"""Most plans kept. A tenant that never launches the same shape twice gets no faster, and uses no more memory."""


def launch_failed(message: str, *, kernel: str = "", hint: str = "") -> Refused:
    """The launch was refused before it was queued."""
    return Refused(Failure(Status.LAUNCH_FAILED, message, hint=hint, kernel=kernel))


@dataclass(slots=True, eq=False)
class Plan:
    """A checked launch, waiting for argument bytes.

    Attributes:
        moves: (from, to, size) of each argument if the wire's bytes need gaps, None if they fit as they are.
        pattern: What its frames look like.
        follower: The plan that came after this one last time.
        record: The same for native code, if there is any.
        at: That record's address, 0 without one.
    """

    kernel: Kernel
    grid: Dim3
    block: Dim3
    shared_bytes: int
    moves: tuple[tuple[int, int, int], ...] | None
    pattern: LaunchPattern
    follower: "Plan | None" = None
    record: PlanRecord | None = None
    at: int = 0

    def lay_out(self, args: bytes) -> bytes:
        """The kernel's parameter buffer."""
        if self.moves is None:
            return args
        params = bytearray(self.kernel.parameter_bytes)
        for start, target, size in self.moves:
            params[target : target + size] = args[start : start + size]
        return bytes(params)


class Planner:
    """Plans of one session, by what the launches look like on the wire.

    Attributes:
        expected: The plan of the next launch, if all goes on as it did.
        has_new_kernel: A plan was made: its kernel's first launch may make the context grow.
        write_down: Gives a new plan its record for native code, if there is any.
    """

    def __init__(self, ledger: Ledger, session_id: int) -> None:
        self.write_down: Callable[[Plan], None] | None = None
        self._written: dict[int, Plan] = {}
        self.expected: Plan | None = None
        self.has_new_kernel = False
        self._ledger = ledger
        self._session_id = session_id
        self._plans: dict[bytes, Plan] = {}
        self._latest: Plan | None = None
        self._kept_before: int | None = None

    def plan(self, payload: memoryview) -> tuple[Plan, bytes]:
        """The plan of a LAUNCH and its argument bytes. Raises BodyError or Refused."""
        self._kept_before = None
        key, args = split_launch(payload)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(parse_body(Launch, payload), LaunchPattern(payload, self._session_id))
            if len(self._plans) >= MAX_PLANS:
                self.forget()
            self._plans[key] = plan
            if self.write_down is not None:
                self.write_down(plan)
                self._written[plan.at] = plan
        self.follow(plan)
        return plan, args

    def follow(self, plan: Plan) -> None:
        """The latest launch was of this plan, so what came after it then is expected to come again."""
        latest = self._latest
        if latest is not None and latest.follower is not plan:
            latest.follower = plan
            if latest.record is not None:
                latest.record.follower = plan.at
        self.resume(plan)

    def resume(self, plan: Plan) -> None:
        """The latest launch was of this plan, and came as expected."""
        self._latest = plan
        self.expected = plan.follower or plan

    def written_at(self, address: int) -> Plan:
        """The plan whose record lies there."""
        return self._written[address]

    def forget(self) -> None:
        """A module went away: its plans must not launch it."""
        self._plans.clear()
        self._written.clear()
        self.expected = self._latest = None

    def refused(self) -> None:
        """The driver refused the launch that was planned last: what was charged for its plan was not taken.

        The plan goes, so that the next launch of its kind is charged again; so do all that might expect it.
        """
        if self._kept_before is not None:
            self._ledger.keep_again(self._kept_before)
            self.forget()

    def _keep(self, kernel: Kernel) -> None:
        """Charge what the driver takes at this kernel's first launch."""
        self._kept_before = self._ledger.kept_bytes
        try:
            self._ledger.keep(kernel.kept_bytes)
        except KernelFault:
            raise  # of an earlier launch
        except DriverError as error:
            raise launch_failed(f"{kernel.name}: {error}", kernel=kernel.name, hint=error.hint) from None
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
                f"{kernel.name}: {block_threads} threads a block; at most {kernel.max_threads_per_block} fit",
                kernel=kernel.name,
                hint="Use smaller blocks and more of them.",
            )
        self._keep(kernel)
        block = (launch.block_x, launch.block_y, launch.block_z)
        return Plan(kernel, grid, block, launch.shared_bytes, _moves(kernel), pattern)


def _check_sizes(launch: Launch, kernel: Kernel) -> None:
    sizes = [parameter.size for parameter in kernel.parameters]
    if list(launch.arg_sizes) != sizes:
        raise launch_failed(
            f"{kernel.name} takes arguments of {sizes} bytes, not {list(launch.arg_sizes)}",
            kernel=kernel.name,
            hint="Push one argument for each of the kernel's parameters, of its size.",
        )
    if len(launch.args) != sum(sizes):
        raise launch_failed(
            f"{kernel.name}: {len(launch.args)} argument bytes, though their sizes add up to {sum(sizes)}",
            kernel=kernel.name,
        )


def _moves(kernel: Kernel) -> tuple[tuple[int, int, int], ...] | None:
    moves = []
    start = 0
    for parameter in kernel.parameters:
        moves.append((start, parameter.offset, parameter.size))
        start += parameter.size
    if start == kernel.parameter_bytes and all(source == target for source, target, _ in moves):
        return None
    return tuple(moves)


LOOKS_PER_BOUND: Final = 8
"""How late a kernel that runs too long is found at most, as a part of the time it may run."""

MAX_LOOK_MS: Final = 1000
"""Between two looks, however long kernels may run."""

MIN_LOOK_MS: Final = 5
"""Between two looks, however short: a look costs microseconds."""


class KernelWatch:
    """Watches one context's kernels, if a bound was asked for."""

    def __init__(self, context: Context, counters: memoryview, max_kernel_ms: int) -> None:
        self.is_on = max_kernel_ms > 0
        self._context = context
        self._counters = counters
        self._running: dict[int, tuple[int, int]] = {}
        self._look_ms = max(MIN_LOOK_MS, min(max_kernel_ms // LOOKS_PER_BOUND, MAX_LOOK_MS))

    def look(self, now_ns: int) -> None:
        """See what has ended; without a bound there is nothing to see."""
        if not self.is_on:
            return
        known, self._running = self._running, {}
        for stream, ended in self._context.running().items():
            seen, since_ns = known.get(stream, (-1, 0))
            self._running[stream] = (ended, since_ns if seen == ended else now_ns)
        self._counters[Counter.KERNEL_SINCE_NS] = min((since_ns for _, since_ns in self._running.values()), default=0)

    def look_after_ms(self) -> int | None:
        """When to look again at the latest, None if nothing runs."""
        return self._look_ms if self._counters[Counter.KERNEL_SINCE_NS] else None
