"""Finds sessions that take too long: kernels, compilations, and workers that show no sign of life.

Workers report on their control pages. A worker's loop, or a wait of its, looks at the page at least every few seconds.
An operation that may block for longer is named on the page beforehand. A worker that does not look is stopped, or stuck
in the driver. Without the watchdog its tenant would wait until the lease ends.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.contract.control_page import Counter, overran
from gpulease.daemon.leases import Cause, Event, SessionCondemned
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker
from gpulease.protocol.opcodes import Opcode

UNRESPONSIVE_AFTER_S: Final = 30.0
"""Longest time that a worker may go without a look: six times its longest sleep, for hosts under heavy load."""

ROUND_S: Final = 1.0
"""Between two rounds, unless a lease's kernels may run for less than a few of these."""

MIN_ROUND_S: Final = 0.01
"""Between two rounds in any case."""

KNOWN_WAITS: Final = frozenset(
    {
        Opcode.LAUNCH,
        Opcode.MODULE_LOAD,
        Opcode.MEM_ALLOC,
        Opcode.ARENA_WRITE,
        Opcode.ARENA_READ,
        Opcode.STREAM_CREATE,
        Opcode.STREAM_WAIT,
        Opcode.SUBMIT_RUN,
    }
)
"""Operations that may block inside the driver: for a kernel, while the driver's queue is full, or for a compiler. The
lease's deadline bounds them, and compilers have a bound of their own."""

_ROUNDS_PER_BOUND: Final = 8
_NS_PER_S: Final = 1_000_000_000


@dataclass(slots=True)
class _LastLook:
    """The last look that a worker's page showed, and when this process saw it first."""

    looked_ns: int
    since_ns: int


class KernelWatchdog:
    """Condemns sessions that take too long.

    Args:
        workers: The workers.
        post: Called with each `SessionCondemned`.
        max_load_s: How long an image may compile.
    """

    def __init__(self, workers: Workers, post: Callable[[Event], None], max_load_s: int) -> None:
        self._max_load_ns = max_load_s * _NS_PER_S
        self._workers = workers
        self._post = post
        self._looks: dict[int, _LastLook] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look at all workers from now on; later calls do nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def look_at_all(self, now_ns: int) -> None:
        """Look at every worker once, and condemn the sessions that must end."""
        serving = {worker.spec.lease_id: worker for worker in self._workers.serving()}
        for lease_id in self._looks.keys() - serving.keys():
            del self._looks[lease_id]
        for lease_id, worker in serving.items():
            verdict = self._verdict(worker, now_ns)
            if verdict is not None:
                self._post(SessionCondemned(lease_id, *verdict))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s())
            self.look_at_all(time.monotonic_ns())

    def _pause_s(self) -> float:
        bounds = [worker.spec.max_kernel_ms / 1000 for worker in self._workers.serving() if worker.spec.max_kernel_ms]
        return max(MIN_ROUND_S, min([ROUND_S, *(bound / _ROUNDS_PER_BOUND for bound in bounds)]))

    def _verdict(self, worker: Worker, now_ns: int) -> tuple[Cause, str] | None:
        looked_ns, since_ns = (worker.page.counter(one) for one in (Counter.LOOKED_NS, Counter.KERNEL_SINCE_NS))
        if reason := overran(looked_ns, since_ns, worker.spec.max_kernel_ms):
            return Cause.KERNEL_TIMEOUT, reason
        compiling_since_ns = worker.page.counter(Counter.COMPILING_SINCE_NS)
        if compiling_since_ns and now_ns - compiling_since_ns >= self._max_load_ns:
            return Cause.LOAD_TIMEOUT, f"an image compiled for more than {self._max_load_ns // _NS_PER_S} s"
        last = self._looks.get(worker.spec.lease_id)
        if last is None or looked_ns != last.looked_ns or worker.page.counter(Counter.DOING) in KNOWN_WAITS:
            self._looks[worker.spec.lease_id] = _LastLook(looked_ns, now_ns)
        elif now_ns - last.since_ns >= UNRESPONSIVE_AFTER_S * _NS_PER_S:
            return Cause.UNRESPONSIVE, f"it showed no sign of life for {(now_ns - last.since_ns) / _NS_PER_S:.1f} s"
        return None
