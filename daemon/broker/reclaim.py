"""Waiting for the proof that a dead worker's bytes are back, without blocking the loop."""

import asyncio
from collections.abc import Callable
from typing import Final

from gpulease.daemon.cards.source import CardSource
from gpulease.daemon.core import Event, ReclaimProved
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell

FIRST_LOOK_DELAY_S: Final = 0.002
"""Before the second look at the card. The driver gives bytes back some milliseconds after the reap (74 ms seen for
60 GiB), so looks start close together and get rarer."""

MAX_LOOK_DELAY_S: Final = 0.1
"""Between two looks in the end: the core fences the slice when its own timer runs out, and looks are not free."""


class Reclaimer:
    """Looks at the card until it shows a worker's bytes back.

    It gives up only when told to: how long is too long is the lease table's to say.
    """

    def __init__(self, source: CardSource, post: Callable[[Event], None]) -> None:
        self._source = source
        self._post = post
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def prove(self, lease_id: int, card_uuid: str, pid: int) -> None:
        """Post `ReclaimProved` once it is proved."""
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
        while pid:
            try:
                missing = await asyncio.to_thread(self._source.missing_proof, card_uuid, pid)
            except (MemoryError, RuntimeError) as error:
                # No thread can be started: that is no reason to fence, there may be memory before the time is over.
                missing = f"the card can't be looked at: {error}"
            if not missing:
                break
            tell(LogEvent.RECLAIM_AWAITED, lease_id=lease_id, reason=missing)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_LOOK_DELAY_S)
        self._post(ReclaimProved(lease_id))
