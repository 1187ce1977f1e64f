"""Scrapes: one text for all who wait, the cost of a driver that hangs, and faults that must cost no lease."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulease.daemon.broker import node_metrics
from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.handlers.query_requests import NodeHandler
from gpulease.daemon.broker.health import Health
from gpulease.daemon.broker.memory_reserve import MemoryReserve
from gpulease.daemon.broker.node_metrics import NodeMetrics
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.gpus.source import CardReading, CardsUnavailable
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import AcquireRequested, WorkerReady
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.record.lease_facts import Fact
from gpulease.daemon.workers.card_time import CardTimes
from gpulease.daemon.workers.registry import Workers
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.messages import Empty, Metrics
from gpulease.protocol.opcodes import Exclusivity, Status
from helpers.waiting import PATIENCE_S, wait_until

OPERATOR = Peer("root", is_operator=True, is_known=True)
REQUEST = cast(Request, None)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow host needs longer for the thread that asks the driver."""
    monkeypatch.setattr(node_metrics, "STRAY_BYTES_TIMEOUT_S", PATIENCE_S)


class Scene:
    """A node of one card. `look` is what the card's driver does when it is asked."""

    def __init__(self, look: Callable[[], int] = lambda: 0, leases: int = 0) -> None:
        limits = CoreLimits(max_leases=leases + 1, max_leases_per_tenant=leases + 1)
        table = LeaseTable([Card("GPU-a", 0, "Test", 100 + 11 * leases, 10)], limits)
        for number in range(1, leases + 1):
            table.handle(
                AcquireRequested(number, "ann", number, LeaseTerms(1, 10_000, exclusivity=Exclusivity.SHARED), None, 0),
                0,
            )
            table.handle(WorkerReady(number), 0)
        workers = Workers("cpu")
        reserve = MemoryReserve()
        reserve.close()
        self.health = Health(table, workers, Journal(), FactRecorder(), reserve)
        source = EmbeddedCards([100])
        source.read = lambda card_uuid: CardReading(look(), {})  # type: ignore[method-assign]
        self.metrics = NodeMetrics(table, source, workers, FactRecorder(), self.health, CardTimes(table, workers))
        self.answers: list[Any] = []

    def handler_for(self, peer: Peer) -> NodeHandler:
        """A handler whose caller is that peer; it answers into `answers`."""
        runtime = SimpleNamespace(metrics=self.metrics, health=self.health)
        caller = SimpleNamespace(runtime=runtime, peer=peer, answer=lambda _, result: self.answers.append(result))
        return NodeHandler(cast(Caller, caller))

    async def answered(self, count: int) -> list[Any]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < count:  # noqa: ASYNC110  # nothing else tells of it
                await asyncio.sleep(0.001)
        return self.answers


def text_of(answer: Metrics | Failure) -> str:
    assert isinstance(answer, Metrics)
    assert answer.content_type.startswith("text/plain; version=0.0.4")
    return answer.exposition


def test_who_asks_meanwhile_is_answered_by_the_next_text() -> None:
    async def run() -> None:
        scene = Scene()
        for _ in range(3):
            scene.metrics.scrape(scene.answers.append)
        first, second, third = await scene.answered(3)
        assert first is second is third, "one text for all who waited"
        scene.metrics.scrape(lambda answer: scene.metrics.scrape(scene.answers.append))
        (*_, last) = await scene.answered(4)
        assert last is not first
        assert "gpulease_ready 0.0" in text_of(last)
        await scene.metrics.stop()

    asyncio.run(run())


def test_the_loop_runs_between_a_few_hundred_leases_of_a_scrape() -> None:
    leases = 5 * node_metrics.LEASES_AT_ONCE + 1
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run() -> None:
        scene = Scene(leases=leases)
        turning = asyncio.create_task(count_turns())
        await asyncio.sleep(0)
        before = turns
        totals = await scene.metrics._add_up()
        assert turns - before == 5
        turning.cancel()
        assert totals.active == {("GPU-a", "ann"): leases}
        scene.metrics.scrape(scene.answers.append)
        text = text_of((await scene.answered(1))[0])
        assert f'gpu_lease_active{{UUID="GPU-a",tenant="ann"}} {leases}.0' in text
        assert 'gpu_lease_leaked_bytes{UUID="GPU-a"} 0.0' in text

    asyncio.run(run())


def test_a_driver_that_hangs_costs_its_own_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "STRAY_BYTES_TIMEOUT_S", 0.05)
    hangs = threading.Event()
    asked = 0

    def look() -> int:
        nonlocal asked
        asked += 1
        hangs.wait(PATIENCE_S)
        return 5

    async def run() -> None:
        scene = Scene(look)
        for count in (1, 2):
            scene.metrics.scrape(scene.answers.append)
            (*_, answer) = await scene.answered(count)
            assert "gpu_lease_leaked_bytes{" not in text_of(answer)
            assert "gpulease_card_capacity_bytes{" in text_of(answer)
        await asyncio.to_thread(wait_until, lambda: asked, "it is asked")
        assert asked == 1, "it is not asked again until it has answered"
        hangs.set()
        monkeypatch.setattr(node_metrics, "STRAY_BYTES_TIMEOUT_S", PATIENCE_S)
        scene.metrics.scrape(scene.answers.append)
        (*_, answer) = await scene.answered(3)
        assert 'gpu_lease_leaked_bytes{UUID="GPU-a"} 5.0' in text_of(answer)
        await scene.metrics.stop()

    asyncio.run(run())


def test_a_card_that_can_not_be_looked_at_is_not_said_to_leak_nothing() -> None:
    def look() -> int:
        raise CardsUnavailable("it fell off the bus", hint="")

    async def run() -> None:
        scene = Scene(look)
        scene.metrics.scrape(scene.answers.append)
        assert "gpu_lease_leaked_bytes{" not in text_of((await scene.answered(1))[0])

    asyncio.run(run())


def test_a_fault_of_ours_is_told_and_costs_nobody_else_anything(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError

    async def run() -> None:
        scene = Scene()
        scene.metrics.counters.on_facts([cast(Fact, SimpleNamespace(kind=SimpleNamespace(name="GRANTED")))])
        scene.metrics.counters = cast(Any, SimpleNamespace(pairs=breaks))
        scene.metrics.scrape(breaks)
        scene.metrics.scrape(scene.answers.append)
        (answer,) = await scene.answered(1)
        assert isinstance(answer, Failure)
        assert answer.status is Status.INTERNAL

    asyncio.run(run())
    assert [getattr(record, ATTRIBUTE)[1]["doing"] for record in caplog.records] == [
        "counting ['GRANTED']",
        "formatting the metrics",
        "sending the metrics",
    ]


def test_how_late_the_loop_is_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "LAG_CHECK_S", 0.01)

    async def run() -> None:
        scene = Scene()
        scene.metrics.start()
        count, text = 0, ""
        while "gpulease_loop_lag_seconds_count" not in text:
            scene.metrics.scrape(scene.answers.append)
            count += 1
            text = text_of((await scene.answered(count))[-1])
        await scene.metrics.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_connection_asks_one_by_one() -> None:
    async def run() -> None:
        scene = Scene()
        handler = scene.handler_for(OPERATOR)
        handler.metrics(REQUEST, Empty())
        with pytest.raises(Refused, match="already has a METRICS request in progress") as caught:
            handler.metrics(REQUEST, Empty())
        assert caught.value.failure.status is Status.BUSY
        await scene.answered(1)
        handler.metrics(REQUEST, Empty())
        await scene.answered(2)

    asyncio.run(run())


def test_health_is_for_this_hosts_peers() -> None:
    async def run() -> None:
        scene = Scene()
        tenant = Peer("tcp", is_operator=False, is_known=False)
        scene.handler_for(tenant).health(REQUEST, Empty())
        assert scene.answers.pop().report["ready"] is False
        relayed = Peer("ann", is_operator=True, is_known=True, is_relayed=True)
        with pytest.raises(Refused, match="host"):
            scene.handler_for(relayed).health(REQUEST, Empty())

    asyncio.run(run())
