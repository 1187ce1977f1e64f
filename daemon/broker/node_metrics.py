"""The broker's metrics: what it counts as it goes, what it looks at when it is scraped, and the text of both.

The loop belongs to leases. Counting an event takes it a microsecond or two; a scrape's text is made a family at a time,
between which the loop goes round, and however many ask, one text is made at a time.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

from gpulease.daemon.broker.health import Health
from gpulease.daemon.gpus.source import CardSource, CardsUnavailable
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.leases import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.history import Fact
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import CONTENT_TYPE, Content, NodeCollector, chunks
from gpulease.daemon.record.metrics.gauges import AuditFacts, NodeFacts, gauges
from gpulease.daemon.record.metrics.lease_counters import LeaseCounters
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker, begin_at, held_bytes, news_of
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import Metrics
from gpulease.protocol.opcodes import Status

BEAT_S: Final = 1.0
"""Between two looks at how late the loop is."""

LOOK_TIMEOUT_S: Final = 1.0
"""For the cards to say what they hold; a driver that hangs costs the scrape one family, and is not asked again until
it has answered."""

OnText = Callable[[Metrics | Failure], None]


class NodeMetrics:
    """The node's one registry."""

    def __init__(
        self, table: LeaseTable, source: CardSource, workers: Workers, recorder: Recorder, health: Health
    ) -> None:
        self._table = table
        self._source = source
        self._workers = workers
        self._recorder = recorder
        self._health = health
        self._cards = [card.uuid for card in table.cards()]
        self._tally = LeaseCounters(self._cards)
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(self._content))
        ProcessCollector(registry=self._registry)
        self._waiting: list[OnText] = []
        self._scrape: asyncio.Task[None] | None = None
        self._look: asyncio.Task[dict[str, int]] | None = None
        self._stray_bytes: dict[str, int] = {}
        self._beat: asyncio.TimerHandle | None = None
        workers.tell_of_ends(self._worker_ended)

    def start(self) -> None:
        """Begin to look how late the loop is."""
        due_s = time.monotonic() + BEAT_S
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._on_beat, due_s)

    async def stop(self) -> None:
        """Give up whatever is being made."""
        if self._beat is not None:
            self._beat.cancel()
        tasks = [task for task in (self._scrape, self._look) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what the broker tells ---

    def on_facts(self, facts: Sequence[Fact]) -> None:
        """Count what an event brought about. A bug here must not keep its effects from being carried out."""
        try:
            self._tally.on_facts(facts)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"counting {facts!r}")

    def refused(self, operation: str, status: Status) -> None:
        """A request was refused that never got to the lease table."""
        self._tally.refused(operation.lower(), status.name.lower())

    def took_over(self) -> None:
        """The workers that there are were another daemon's."""
        for worker in self._workers.serving():
            begin_at(worker)

    def _worker_ended(self, worker: Worker) -> None:
        """Its page shows for the last time what it did, however it ended."""
        lease = self._table.get(worker.spec.submit_of or worker.spec.lease_id)
        if lease is not None:
            self._tally.worked(self._tally.pair(lease), news_of(worker))

    def _on_beat(self, due_s: float) -> None:
        self._tally.histograms[families.LOOP_LAG_SECONDS].observe((), time.monotonic() - due_s)
        self.start()

    # --- scrapes ---

    def ask(self, on_text: OnText) -> None:
        """Have the text made, and `on_text` called with it, once."""
        self._waiting.append(on_text)
        if self._scrape is None:
            self._scrape = asyncio.get_running_loop().create_task(self._make())

    async def _make(self) -> None:
        try:
            while self._waiting:
                await self._look_at_cards()
                # Who comes from here on is told what is so from then on.
                asked, self._waiting = self._waiting, []
                result = await self._text()
                for on_text in asked:
                    try:
                        on_text(result)
                    except Exception:
                        # A bug of ours; the others that asked are to be told all the same.
                        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="answering with the metrics")
        finally:
            self._scrape = None

    async def _text(self) -> Metrics | Failure:
        parts = []
        try:
            for chunk in chunks(self._registry):
                parts.append(chunk)
                await asyncio.sleep(0)
        except Exception:
            # A bug of ours, in what no lease depends on.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="telling the metrics")
            return Failure(Status.INTERNAL, "the metrics can't be told", hint="The daemon's log says why.")
        return Metrics(CONTENT_TYPE, b"".join(parts).decode())

    async def _look_at_cards(self) -> None:
        """Ask the cards, in a thread, what no process accounts for."""
        self._stray_bytes = {}
        if self._look is None or self._look.done():
            self._look = asyncio.get_running_loop().create_task(self._strays())
        done, _ = await asyncio.wait({self._look}, timeout=LOOK_TIMEOUT_S)
        if done:
            self._stray_bytes = self._look.result()

    async def _strays(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for uuid in self._cards:
            # No thread, or no answer: what is not known is not told.
            with contextlib.suppress(CardsUnavailable, MemoryError, RuntimeError):
                reading = await asyncio.to_thread(self._source.read, uuid)
                found[uuid] = self._table.stray_bytes(uuid, reading.unowned_bytes)
        return found

    def _content(self) -> Content:
        leases = self._table.snapshots()
        pair_of = {lease.lease_id: self._tally.pair(lease) for lease in leases}
        charged = {lease.lease_id: self._table.charge_bytes(lease.lease_id) for lease in leases}
        allocated: dict[int, int] = {}
        for worker in self._workers.serving():
            lease_id = worker.spec.submit_of or worker.spec.lease_id
            if (pair := pair_of.get(lease_id)) is not None:
                self._tally.worked(pair, news_of(worker))
                # Of a lease's two workers together no more than it has.
                most_bytes = charged[lease_id] - allocated.get(lease_id, 0)
                allocated[lease_id] = allocated.get(lease_id, 0) + held_bytes(worker, most_bytes)
        facts = NodeFacts(
            now_ns=time.monotonic_ns(),
            leases=leases,
            cards=self._table.cards(),
            warm=self._table.warming(),
            waiting=self._table.waiting(),
            pair_of=pair_of,
            pairs=self._tally.pairs,
            allocated_bytes=allocated,
            charged_bytes=charged,
            stray_bytes=self._stray_bytes,
            checks={check.name: check.is_met for check in self._health.checks()},
            is_draining=self._table.drain_ns is not None,
            audit=self._audit(),
            version=VERSION,
            driver=self._source.driver,
        )
        return {**self._tally.counters, **self._tally.histograms, **gauges(facts)}

    def _audit(self) -> AuditFacts | None:
        figures = self._recorder.figures()
        if figures is None:
            return None
        return AuditFacts(not self._recorder.problem(), figures["waiting"], figures["dropped"])
