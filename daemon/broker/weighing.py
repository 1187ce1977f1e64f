"""Whether a session holds no more of its card than was admitted.

Allocations are counted before they are made; modules and local memory are foreseen by rules (drivers/cuda). This is
the proof that the rules hold: the card's own figure for the process, looked at whenever the driver may have taken more,
and once a second besides, as contexts are that wait for the tenant whom they served. One that is over, or whose figure
can't be had, is ended.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from gpulease.daemon.broker.workers import Workers
from gpulease.daemon.cards.source import CardSource, CardsUnavailable
from gpulease.daemon.core import FIRST_WARM_ID, Cause, Event, LeaseState, LeaseTable, SessionCondemned
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell

ROUND_S: Final = 1.0
"""Between two looks at every session: what no rule foresaw is found within this. A look takes 0.1 ms."""

PAUSE_S: Final = 0.01
"""Between two looks at one session. Stops a tenant that loads one module after the other from keeping the card's driver
busy with listing processes; what a session takes meanwhile is found that much later."""


class Weigher:
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
            tell(LogEvent.WORKER_OVER_SLICE, lease_id=owner_id if owner_id < FIRST_WARM_ID else 0, reason=reason)
            self._post(SessionCondemned(lease_id, Cause.OVER_SLICE, reason))
