"""Finds what takes too long by what workers show on their pages: kernels, compilations, and silence.

A worker's loop goes round at least every few seconds, and so do its waits; what it may do for longer without going
round, it says beforehand. One that does not is stopped, or stuck in the driver: its tenant would wait for the lease's
end.
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
"""Without a look of the worker's: six times what it sleeps at most, for hosts under heavy load."""

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
"""What may block inside the driver for as long as a kernel runs, its queue being full, or for a compiler. The lease's
deadline bounds it, and compilers have a bound of their own."""

_ROUNDS_PER_BOUND: Final = 8
_NS_PER_S: Final = 1_000_000_000


@dataclass(slots=True)
class _Seen:
    """What a worker's page last showed, and when that was new."""

    looked_ns: int
    at_ns: int


class KernelWatchdog:
    """Goes round all workers, from the first lease on."""

    def __init__(self, workers: Workers, post: Callable[[Event], None], max_load_s: int) -> None:
        self._max_load_ns = max_load_s * _NS_PER_S
        self._workers = workers
        self._post = post
        self._seen: dict[int, _Seen] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go round from now on; once is enough."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def go_round(self, now_ns: int) -> None:
        """Look at every worker once; what must end is posted."""
        serving = {worker.spec.lease_id: worker for worker in self._workers.serving()}
        for lease_id in self._seen.keys() - serving.keys():
            del self._seen[lease_id]
        for lease_id, worker in serving.items():
            verdict = self._verdict(worker, now_ns)
            if verdict is not None:
                self._post(SessionCondemned(lease_id, *verdict))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s())
            self.go_round(time.monotonic_ns())

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
        seen = self._seen.get(worker.spec.lease_id)
        if seen is None or looked_ns != seen.looked_ns or worker.page.counter(Counter.DOING) in KNOWN_WAITS:
            self._seen[worker.spec.lease_id] = _Seen(looked_ns, now_ns)
        elif now_ns - seen.at_ns >= UNRESPONSIVE_AFTER_S * _NS_PER_S:
            return Cause.UNRESPONSIVE, f"it showed no sign of life for {(now_ns - seen.at_ns) / _NS_PER_S:.1f} s"
        return None
