"""How busy the cards were in the last hour, for the web page: a sample of each card every ten seconds, kept in memory.

The cards are asked in a thread. While a driver does not answer, no sample is taken, and the page shows a gap. Times
are monotonic. A restart of the daemon begins anew; one of the web process does not.
"""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpulease.daemon.broker.readings import held_bytes
from gpulease.daemon.broker.workers import Workers
from gpulease.daemon.cards.source import CardLoad, CardSource
from gpulease.daemon.core import LeaseTable
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell
from gpulease.daemon.web.loads import MAX_SAMPLES, SAMPLE_S, LoadSample, message_of

OnSample = Callable[[dict[str, Any]], None]


class LoadHistory:
    """Takes the samples and keeps them.

    Args:
        on_sample: Told each sample as it is taken, a message for each card.
    """

    def __init__(
        self,
        table: LeaseTable,
        source: CardSource,
        workers: Workers,
        on_sample: OnSample,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._table = table
        self._source = source
        self._workers = workers
        self._on_sample = on_sample
        self._clock_ns = clock_ns
        self._samples = {card.uuid: deque[LoadSample](maxlen=MAX_SAMPLES) for card in table.cards()}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take samples from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Take none any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def messages(self) -> Iterator[dict[str, Any]]:
        """All that is kept, a message for each card."""
        return (message_of(uuid, samples) for uuid, samples in self._samples.items() if samples)

    async def sample(self) -> None:
        """Take a sample of each card now."""
        loads = await asyncio.to_thread(self._ask_cards)
        now_ns = self._clock_ns()
        leased, allocated = self._leased_bytes(), self._allocated_bytes()
        for uuid, kept in self._samples.items():
            load = loads[uuid]
            used_bytes = allocated[uuid] if load.used_bytes is None else load.used_bytes
            kept.append(LoadSample(now_ns, load.utilization_percent, used_bytes, leased[uuid]))
            self._on_sample(message_of(uuid, [kept[-1]]))

    async def _run(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception:
                # No thread, or a bug of ours, in what no lease depends on: the page shows a gap.
                tell(LogEvent.DAEMON_FAULT, is_fault=True, doing="taking a sample of the cards")
            await asyncio.sleep(SAMPLE_S)

    def _ask_cards(self) -> dict[str, CardLoad]:
        return {uuid: self._source.load(uuid) for uuid in self._samples}

    def _leased_bytes(self) -> Mapping[str, int]:
        leased: defaultdict[str, int] = defaultdict(int)
        for lease in self._table.snapshots():
            leased[lease.card_uuid] += lease.size_bytes
        return leased

    def _allocated_bytes(self) -> Mapping[str, int]:
        """By sessions' own count, for cards whose driver does not say what is used."""
        allocated: defaultdict[str, int] = defaultdict(int)
        for lease in self._table.snapshots():
            if (worker := self._workers.worker(lease.lease_id)) is not None:
                allocated[lease.card_uuid] += held_bytes(worker, lease.size_bytes)
        return allocated
