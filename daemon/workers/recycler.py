"""Having a worker scrubbed after its lease, and the proof that it is.

Two must say so: the worker, which counts what it still has, and the card, which must show no more for its process than
before the first lease. The worker's control page is another one from then on: the old one's word is flipped for good.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gpulease.daemon.contract.control_page import BrokerPage, for_reading
from gpulease.daemon.gpus.source import CardSource, CardsUnavailable
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.leases import FIRST_SUBMIT_ID, FIRST_WARM_ID, Event, WorkerReady, WorkerScrubbed
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker

_NO_FIGURE: Final = (CardsUnavailable, MemoryError, RuntimeError)
"""The card does not say, or no thread can be started to ask it."""


class Recycler:
    """Weighs contexts before they serve anybody, has them scrubbed, and weighs them again."""

    def __init__(self, source: CardSource, workers: Workers, post: Callable[[Event], None]) -> None:
        self._source = source
        self._workers = workers
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, event: Event) -> None:
        """Post a worker's event: at once, or once its warm context was weighed."""
        if not self.holds_back(event):
            self._post(event)

    def holds_back(self, event: Event) -> bool:
        """Whether it is to be told later: a context that is ready is weighed before a lease can have it."""
        if not isinstance(event, WorkerReady) or not FIRST_WARM_ID <= event.lease_id < FIRST_SUBMIT_ID:
            return False
        worker = self._workers.worker(event.lease_id)
        if not self._workers.wipes_heap or worker is None or worker.is_weighed:
            return False
        worker.is_weighed = True
        self._start(self._weigh(worker, event))
        return True

    def scrub(self, lease_id: int) -> None:
        """Ask the worker; `WorkerScrubbed` follows unless it does not answer."""
        worker = self._workers.worker(lease_id)
        if worker is None:
            return
        try:
            worker.next_page = page = BrokerPage()
            lease_fd = for_reading(page.fds.lease)
            try:
                send_message(worker.channel, {"op": "scrub"}, (lease_fd, page.fds.claims))
            finally:
                os.close(lease_fd)
        except (OSError, ChannelClosed) as error:
            doubt = f"it could not be asked: {error}"
            asyncio.get_running_loop().call_soon(self._post, WorkerScrubbed(lease_id, doubt))

    def on_scrubbed(self, worker: Worker, doubt: str, held_bytes: int) -> None:
        """What the worker says of itself."""
        if worker.next_page is None or worker.has_answered:
            return  # nobody has asked
        worker.has_answered = True
        if not doubt and (held_bytes or worker.hand_overs):
            doubt = f"it still has {held_bytes} bytes and {worker.hand_overs} connections"
        self._start(self._prove(worker, worker.spec.lease_id, doubt))

    async def stop(self) -> None:
        """Wait for no card any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _weigh(self, worker: Worker, ready: WorkerReady) -> None:
        # One that can't be weighed serves one lease, as ever.
        with contextlib.suppress(*_NO_FIGURE):
            card_uuid, pid = worker.spec.card_uuid, worker.pid
            worker.own_bytes = await asyncio.to_thread(self._source.process_bytes, card_uuid, pid)
        self._post(ready)

    async def _prove(self, worker: Worker, lease_id: int, doubt: str) -> None:
        if not doubt:
            try:
                held = await asyncio.to_thread(self._source.process_bytes, worker.spec.card_uuid, worker.pid)
            except _NO_FIGURE as error:
                doubt = f"the card can't be looked at: {error}"
            else:
                if worker.hand_overs:
                    doubt = "a connection was handed to it meanwhile"
                elif worker.own_bytes is None or held > worker.own_bytes:
                    doubt = f"the card shows {held} bytes for its process, not {worker.own_bytes}"
        self._post(WorkerScrubbed(lease_id, doubt))

    def _start(self, weighing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(weighing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
