"""The broker's metrics: counters fed by events, gauges read at a scrape, and the text of both.

Leases have priority on the event loop. Counting one event takes a microsecond or two. A scrape adds up WORKERS_AT_ONCE
leases at a time, then makes its text one family at a time, and the loop runs in between. One text is made at a time,
for all peers that ask.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

from gpulease.daemon.broker.health import Health
from gpulease.daemon.gpus.source import POLL_ERRORS, CardSource
from gpulease.daemon.host.cancellation import cancel_all
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.leases.model import LeaseState
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.exposition import NodeCollector, chunks
from gpulease.daemon.record.metrics.families import CONTENT_TYPE, Content
from gpulease.daemon.record.metrics.gauges import AuditFacts, FleetFacts, NodeFacts, TenantTotals, gauges
from gpulease.daemon.record.metrics.lease_counters import LeaseCounters
from gpulease.daemon.workers.card_time import CardTimes
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker, counter_increments, held_bytes, skip_counts
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import Metrics
from gpulease.protocol.opcodes import Status

LAG_CHECK_S: Final = 1.0
"""Time between two measurements of the loop's lag."""

STRAY_BYTES_TIMEOUT_S: Final = 1.0
"""Time within which the cards must report stray memory. If a driver hangs, the scrape lacks one family, and the driver
is not polled again until it has answered."""

LEASES_AT_ONCE: Final = 256
WORKERS_AT_ONCE: Final = 64
"""Leases and workers that a scrape adds up before the loop runs again: about a millisecond of each."""

OnText = Callable[[Metrics | Failure], None]


class NodeMetrics:
    """The node's only registry of metrics.

    Attributes:
        counters: The counters, which the runtime gives the facts of each event.
        fleet: Returns the figures of the node's fleet; None if it belongs to none. The service sets it.
    """

    def __init__(
        self,
        table: LeaseTable,
        source: CardSource,
        workers: Workers,
        recorder: FactRecorder,
        health: Health,
        card_times: CardTimes,
    ) -> None:
        self.fleet: Callable[[], FleetFacts] | None = None
        self._table = table
        self._source = source
        self._workers = workers
        self._recorder = recorder
        self._health = health
        self._card_times = card_times
        self._cards = [card.uuid for card in table.cards()]
        self.counters = LeaseCounters(self._cards)
        # Use a separate registry: the library's global one has collectors that others register.
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(self._content))
        ProcessCollector(registry=self._registry)
        self._waiting: list[OnText] = []
        self._scraping: asyncio.Task[None] | None = None
        self._stray_bytes_task: asyncio.Task[dict[str, int]] | None = None
        self._stray_bytes: dict[str, int] = {}
        self._tenants = TenantTotals()
        self._lag_check: asyncio.TimerHandle | None = None
        workers.set_end_listener(self._on_worker_end)

    def start(self) -> None:
        """Schedule the first measurement of the loop's lag, which schedules the next, and so on."""
        due_s = time.monotonic() + LAG_CHECK_S
        self._lag_check = asyncio.get_running_loop().call_later(LAG_CHECK_S, self._measure_lag, due_s)

    async def stop(self) -> None:
        """Cancel the lag measurement and the scrape in progress."""
        if self._lag_check is not None:
            self._lag_check.cancel()
        tasks = [task for task in (self._scraping, self._stray_bytes_task) if task is not None]
        await cancel_all(tasks)

    # --- counting ---

    def take_over_workers(self) -> None:
        """Count an earlier daemon's workers from now on, because that daemon has counted their earlier work."""
        for worker in self._workers.serving():
            skip_counts(worker)

    def _on_worker_end(self, worker: Worker) -> None:
        # Read its counters from its page for the last time, however it ended.
        self._card_times.on_worker_end(worker)
        lease = self._table.get(worker.spec.submit_of or worker.spec.lease_id)
        if lease is not None:
            self.counters.worked(self.counters.pair(lease), counter_increments(worker))

    def _measure_lag(self, due_s: float) -> None:
        self.counters.histograms[families.LOOP_LAG_SECONDS].observe((), time.monotonic() - due_s)
        self.start()

    # --- scrapes ---

    def scrape(self, on_text: OnText) -> None:
        """Make the text, and call `on_text` with it once."""
        self._waiting.append(on_text)
        if self._scraping is None:
            self._scraping = asyncio.get_running_loop().create_task(self._scrape_while_asked())

    async def _scrape_while_asked(self) -> None:
        try:
            while self._waiting:
                # Poll the cards before the peers are counted: the poll may take a second, in which more peers may ask.
                await self._update_stray_bytes()
                # Peers that ask from now on get the next text.
                waiters, self._waiting = self._waiting, []
                result = await self._text()
                for on_text in waiters:
                    try:
                        on_text(result)
                    except Exception:
                        # This is a bug of ours; the other peers must still be answered.
                        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="sending the metrics")
        finally:
            self._scraping = None

    async def _text(self) -> Metrics | Failure:
        parts = []
        try:
            self._tenants = await self._add_up()
            for chunk in chunks(self._registry):
                parts.append(chunk)
                await asyncio.sleep(0)
        except Exception:
            # This is a bug of ours; no lease depends on metrics.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="formatting the metrics")
            return Failure(Status.INTERNAL, "the metrics can't be sent", hint="The daemon's log says why.")
        return Metrics(CONTENT_TYPE, b"".join(parts).decode())

    async def _update_stray_bytes(self) -> None:
        self._stray_bytes = {}
        # If an earlier scrape's poll still hangs, do not repeat it; wait for it again.
        if self._stray_bytes_task is None or self._stray_bytes_task.done():
            self._stray_bytes_task = asyncio.get_running_loop().create_task(self._read_stray_bytes())
        done, _ = await asyncio.wait({self._stray_bytes_task}, timeout=STRAY_BYTES_TIMEOUT_S)
        if done:
            self._stray_bytes = self._stray_bytes_task.result()

    async def _read_stray_bytes(self) -> dict[str, int]:
        """Poll the cards, in a thread, for the memory that no process accounts for, by uuid."""
        stray_bytes: dict[str, int] = {}
        for uuid in self._cards:
            # Without a thread or an answer, leave out the unknown figures.
            with contextlib.suppress(*POLL_ERRORS):
                reading = await asyncio.to_thread(self._source.read, uuid)
                stray_bytes[uuid] = self._table.stray_bytes(uuid, reading.unowned_bytes)
        return stray_bytes

    async def _add_up(self) -> TenantTotals:
        """Count what workers did since the last scrape, and add up all leases and regions."""
        # Step 1: add up the bytes that each lease's sessions hold. A lease's two workers together hold no more than its
        # charge.
        allocated: dict[int, int] = {}
        for number, worker in enumerate(self._workers.serving(), 1):
            lease_id = worker.spec.submit_of or worker.spec.lease_id
            lease = self._table.get(lease_id)
            # A lease that ended while the loop ran in between was counted when it ended.
            if lease is not None and self._workers.worker(worker.spec.lease_id) is worker and not worker.is_killed:
                self.counters.worked(self.counters.pair(lease), counter_increments(worker))
                allocated_bytes = allocated.get(lease_id, 0)
                allocated[lease_id] = allocated_bytes + held_bytes(
                    worker, self._table.charge_bytes(lease_id) - allocated_bytes
                )
            if number % WORKERS_AT_ONCE == 0:
                await asyncio.sleep(0)
        # Step 2: count the leases and regions.
        totals = TenantTotals()
        for number, lease_id in enumerate(self._table.live_ids(), 1):
            lease = self._table.get(lease_id)
            if lease is not None and lease.state is not LeaseState.TORNDOWN:
                totals.add(self.counters.pair(lease), lease, allocated.get(lease_id, 0))
            if number % LEASES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return totals

    def _content(self) -> Content:
        for (card_uuid, tenant), use in self._card_times.take_uncounted().items():
            self.counters.used(card_uuid, tenant, use)
        # Read all gauges of one scrape in one turn of the loop, so that they agree with each other.
        now_ns = time.monotonic_ns()
        facts = NodeFacts(
            now_ns=now_ns,
            tenants=self._tenants,
            cards=self._table.cards(),
            warm=self._table.warming(),
            waiting=self._table.waiting(),
            pairs=self.counters.pairs,
            booked_bytes=self._table.booked_bytes(),
            stray_bytes=self._stray_bytes,
            busy_ratios=self._card_times.busy_ratios(),
            checks={check.name: check.is_met for check in self._health.checks()},
            is_draining=self._table.drain_ns is not None,
            audit=self._audit(),
            version=VERSION,
            driver=self._source.driver,
            fleet=None if self.fleet is None else self.fleet(),
            park_host_bytes=self._table.parking.host_bytes(),
            park_paces=self._table.parking.paces(now_ns),
        )
        return {**self.counters.counters, **self.counters.histograms, **gauges(facts)}

    def _audit(self) -> AuditFacts | None:
        figures = self._recorder.figures()
        if figures is None:
            return None
        return AuditFacts(not self._recorder.problem(), figures["waiting"], figures["dropped"])
