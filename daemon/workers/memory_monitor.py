"""Whether a session holds no more of its card than was admitted.

Allocations are counted before they are made; modules and local memory are foreseen by rules (drivers/cuda). This is
the proof that the rules hold: the card's own figure for the process, looked at whenever the driver may have taken more,
and once a second besides, as contexts are that wait for the tenant whom they served. One that is over, or whose figure
can't be had, is ended.

Looks at the cards' memory, without blocking the loop: for dead workers' bytes, and for what others hold.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

from gpulease.daemon.gpus.source import CardReading, CardSource, CardsUnavailable
from gpulease.daemon.leases import (
    CardLooked,
    Cause,
    Event,
    LeaseState,
    LeaseTable,
    ReclaimProved,
    SessionCondemned,
    WorkerKind,
    WorkerUnlisted,
    kind_of,
)
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.workers.registry import Workers

ROUND_S: Final = 1.0
"""Between two looks at every session: what no rule foresaw is found within this. A look takes 0.1 ms."""

PAUSE_S: Final = 0.01
"""Between two looks at one session. Stops a tenant that loads one module after the other from keeping the card's driver
busy with listing processes; what a session takes meanwhile is found that much later."""


class MemoryMonitor:
    """Looks at sessions, each at most once at a time."""

    def __init__(self, table: LeaseTable, source: CardSource, workers: Workers, post: Callable[[Event], None]) -> None:
        self._table = table
        self._source = source
        self._workers = workers
        self._post = post
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._again: set[int] = set()
        self._rounds: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go round from now on, where a session can take more than it is given; once is enough."""
        if self._rounds is None and self._source.reserve_bytes:
            self._rounds = asyncio.get_running_loop().create_task(self._go_round())

    def look(self, lease_id: int) -> None:
        """Look at a session, and once more if that is asked for meanwhile."""
        if lease_id in self._tasks:
            self._again.add(lease_id)
            return
        task = asyncio.get_running_loop().create_task(self._look_and_pause(lease_id))
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._done(lease_id))

    async def stop(self) -> None:
        """Stop looking altogether."""
        tasks = [*self._tasks.values(), *([self._rounds] if self._rounds else [])]
        self._again.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go_round(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            for lease in self._table.snapshots():
                if lease.state is LeaseState.ACTIVE:
                    self.look(lease.lease_id)
            for submit in self._table.submits.snapshots():
                self.look(submit.submit_id)
            for context in self._table.warming():
                if context.is_recycled:
                    # Its process ran a tenant's kernels: that it said it is scrubbed binds it to nothing.
                    self.look(context.warm_id)

    def _done(self, lease_id: int) -> None:
        del self._tasks[lease_id]
        if lease_id in self._again:
            self._again.discard(lease_id)
            self.look(lease_id)

    async def _look_and_pause(self, lease_id: int) -> None:
        await self._look(lease_id)
        await asyncio.sleep(PAUSE_S)

    async def _look(self, lease_id: int) -> None:
        place, pid = self._table.submits.may_hold(lease_id), self._workers.pid(lease_id)
        if place is None or not pid:
            return
        card_uuid, allowed = place
        try:
            held = await asyncio.to_thread(self._source.process_bytes, card_uuid, pid)
        except CardsUnavailable as error:
            reason = str(error)
        else:
            if held <= allowed:
                return
            reason = (
                f"the card shows {held} bytes for its process; {allowed} were admitted, the context's share included"
            )
        # A worker that ended meanwhile is not on the card any more, and its end is told by whoever reaped it.
        if self._workers.is_alive(lease_id):
            owner_id = self._table.submits.lease_of(lease_id) or lease_id
            log_event(
                LogEvent.WORKER_OVER_SLICE,
                lease_id=owner_id if kind_of(owner_id) is WorkerKind.LEASE else 0,
                reason=reason,
            )
            self._post(SessionCondemned(lease_id, Cause.OVER_SLICE, reason))


FIRST_LOOK_DELAY_S: Final = 0.002
"""Before the second look at the card. The driver gives bytes back some milliseconds after the reap (74 ms seen for
60 GiB), so looks start close together and get rarer."""

MAX_LOOK_DELAY_S: Final = 0.1
"""Between two looks in the end: the core fences the slice when its own timer runs out, and looks are not free."""


"""Between two looks at what others hold. A program outside the daemon that takes memory shrinks the capacity within
this; the leases of this second may have more of the card promised than it has. A look takes 0.3 ms."""

FIRST_ROUND_TIMEOUT_S: Final = 5.0
"""For the look before the daemon listens. Stops a driver that hangs from keeping tenants from their leases."""


class UnlistedSince:
    """The looks at a card that did not list one process: the facts of `WorkerUnlisted`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_ns: int | None = None
        self._least_bytes = 0

    def missing(self, reading: CardReading, looked_ns: int) -> str:
        """Take in a look, and say what is missing; "" if the card does not list the process."""
        if (held := reading.processes.get(self._pid)) is not None:
            self._since_ns = None
            return f"NVML still lists process {self._pid} with {held} bytes"
        if self._since_ns is None:
            self._since_ns, self._least_bytes = looked_ns, reading.unowned_bytes
        self._least_bytes = min(self._least_bytes, reading.unowned_bytes)
        return ""

    def event(self, lease_id: int, card_uuid: str, reading: CardReading, looked_ns: int) -> WorkerUnlisted:
        """What the lease table is told of the last look."""
        since_ns = looked_ns if self._since_ns is None else self._since_ns
        return WorkerUnlisted(lease_id, card_uuid, reading.unowned_bytes, self._least_bytes, since_ns, looked_ns)


class Reclaimer:
    """Looks at the card for a dead worker until the lease table has its proof.

    It gives up only when told to: how long is too long is the lease table's to say.
    """

    def __init__(self, source: CardSource, post: Callable[[Event], None]) -> None:
        self._source = source
        self._post = post
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def prove(self, lease_id: int, card_uuid: str, pid: int) -> None:
        """Post `WorkerUnlisted` at each look that does not list the process, or `ReclaimProved` if there was none."""
        task = asyncio.get_running_loop().create_task(self._look(lease_id, card_uuid, pid))
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(lease_id, None))

    def give_up(self, lease_id: int) -> None:
        """Stop looking."""
        if (task := self._tasks.get(lease_id)) is not None:
            task.cancel()

    async def stop(self) -> None:
        """Stop looking altogether."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, lease_id: int, card_uuid: str, pid: int) -> None:
        delay_s = FIRST_LOOK_DELAY_S
        unlisted = UnlistedSince(pid)
        while pid:
            looked_ns = time.monotonic_ns()
            try:
                reading = await asyncio.to_thread(self._source.read, card_uuid)
            except (CardsUnavailable, MemoryError, RuntimeError) as error:
                # No thread can be started: that is no reason to fence, there may be memory before the time is over.
                missing = f"the card can't be looked at: {error}"
            else:
                missing = unlisted.missing(reading, looked_ns)
                if not missing:
                    self._post(unlisted.event(lease_id, card_uuid, reading, looked_ns))
                    # With its proof the lease table told this task to give up: it ends here.
                    await asyncio.sleep(0)
                    missing = f"{reading.unowned_bytes} bytes more than at the start belong to no process"
            log_event(LogEvent.RECLAIM_AWAITED, lease_id=lease_id, reason=missing)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_LOOK_DELAY_S)
        self._post(ReclaimProved(lease_id))


class CardWatch:
    """Looks once a second at what others than workers hold of the cards, and tells the lease table."""

    def __init__(
        self, source: CardSource, card_uuids: Sequence[str], workers: Workers, post: Callable[[Event], None]
    ) -> None:
        self._source = source
        self._card_uuids = card_uuids
        self._workers = workers
        self._post = post
        self._rounds: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once now, and go round from then on, where others can hold anything."""
        if self._rounds is None and self._source.has_others:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_ROUND_TIMEOUT_S):
                    await self._look_at_all()
            self._rounds = asyncio.get_running_loop().create_task(self._go_round())

    async def stop(self) -> None:
        """Stop looking."""
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)

    async def _go_round(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            await self._look_at_all()

    async def _look_at_all(self) -> None:
        for card_uuid in self._card_uuids:
            # What can't be seen now is seen a second later; proofs wait meanwhile.
            try:
                await self._look(card_uuid)
            except (CardsUnavailable, MemoryError, RuntimeError):
                pass
            except Exception:
                # A bug of ours: without later looks, others' memory would be granted.
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"looking at card {card_uuid}")

    async def _look(self, card_uuid: str) -> None:
        own, looked_ns = self._workers.pids(), time.monotonic_ns()
        reading = await asyncio.to_thread(self._source.read, card_uuid)
        # A worker that began, or was settled, while the card was looked at is the daemon's own too.
        own |= self._workers.pids()
        self._workers.see_listed(card_uuid, reading.processes.keys())
        self._post(CardLooked(card_uuid, reading.unowned_bytes, reading.outside_bytes(own), looked_ns))
