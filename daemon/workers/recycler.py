"""Has a worker scrubbed after its lease, and proves that it is clean.

The worker counts what it still has, and must have nothing. The card must show no more bytes for the worker's process
than before its first lease. The worker then gets another control page: the old page's revocation word is flipped for
good.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gpulease.daemon.contract.control_page import BrokerPage, for_reading
from gpulease.daemon.contract.messages import Scrub
from gpulease.daemon.gpus.source import CardSource, CardsUnavailable
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.leases import Event, WorkerKind, WorkerReady, WorkerScrubbed, kind_of
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker

_UNKNOWN: Final = (CardsUnavailable, MemoryError, RuntimeError)
"""The card does not say how many bytes a process has, or no thread can be started to ask it."""


class Recycler:
    """Reads the memory of warm contexts before their first lease, has them scrubbed after a lease, and compares.

    Args:
        source: The cards.
        workers: The workers.
        post: Called with `WorkerReady`, once a context's memory was read, and with `WorkerScrubbed`.
    """

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
        """Return whether to hold an event back: a warm context's memory is read before a lease can have the context."""
        if not isinstance(event, WorkerReady) or kind_of(event.worker_id) is not WorkerKind.WARM:
            return False
        worker = self._workers.worker(event.worker_id)
        if not self._workers.wipes_heap or worker is None or worker.is_weighed:
            return False
        worker.is_weighed = True
        self._start(self._weigh(worker, event))
        return True

    def scrub(self, lease_id: int) -> None:
        """Ask a worker to scrub its context; `WorkerScrubbed` follows unless it does not answer."""
        worker = self._workers.worker(lease_id)
        if worker is None:
            return
        try:
            worker.next_page = page = BrokerPage()
            lease_fd = for_reading(page.fds.lease)
            try:
                send_message(worker.channel, Scrub().to_map(), (lease_fd, page.fds.claims))
            finally:
                os.close(lease_fd)
        except (OSError, ChannelClosed) as error:
            doubt = f"it could not be asked: {error}"
            asyncio.get_running_loop().call_soon(self._post, WorkerScrubbed(lease_id, doubt))

    def on_scrubbed(self, worker: Worker, doubt: str, held_bytes: int) -> None:
        """Take in a worker's answer: why it is not clean, or "", and the bytes that it still counts as its own."""
        if worker.next_page is None or worker.has_answered:
            return  # Nobody has asked for a scrub, or the worker has answered before.
        worker.has_answered = True
        if not doubt and (held_bytes or worker.hand_overs):
            doubt = f"it still has {held_bytes} bytes and {worker.hand_overs} connections"
        self._start(self._prove(worker, worker.spec.lease_id, doubt))

    async def stop(self) -> None:
        """Stop reading cards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _weigh(self, worker: Worker, ready: WorkerReady) -> None:
        # A context whose memory can't be read serves one lease, and is not scrubbed.
        with contextlib.suppress(*_UNKNOWN):
            card_uuid, pid = worker.spec.card_uuid, worker.pid
            worker.own_bytes = await asyncio.to_thread(self._source.process_bytes, card_uuid, pid)
        self._post(ready)

    async def _prove(self, worker: Worker, lease_id: int, doubt: str) -> None:
        if not doubt:
            try:
                held = await asyncio.to_thread(self._source.process_bytes, worker.spec.card_uuid, worker.pid)
            except _UNKNOWN as error:
                doubt = f"the card can't be looked at: {error}"
            else:
                if worker.hand_overs:
                    doubt = "a connection was handed to it meanwhile"
                elif worker.own_bytes is None or held > worker.own_bytes:
                    doubt = f"the card shows {held} bytes for its process, not {worker.own_bytes}"
        self._post(WorkerScrubbed(lease_id, doubt))

    def _start(self, reading: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(reading)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
