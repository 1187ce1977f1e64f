"""Samples of the cards' last hour: their content, their number, and the gap of a card that does not answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

from gpulease.daemon.broker.web_frontend import LoadHistory
from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.gpus.source import CardLoad
from gpulease.daemon.web.load_samples import MAX_SAMPLES, CardLoads, LoadSample

GIB = 1 << 30
LEASES = [
    SimpleNamespace(lease_id=1, card_uuid="GPU-a", size_bytes=4 * GIB),
    SimpleNamespace(lease_id=2, card_uuid="GPU-a", size_bytes=2 * GIB),
    SimpleNamespace(lease_id=3, card_uuid="GPU-b", size_bytes=GIB),
]
# The second one's worker claims more than it has; the third one has none yet.
ALLOCATED = {1: 3 * GIB, 2: 99 * GIB}


class Node:
    """Two cards and three leases; what the cards say is the test's."""

    def __init__(self) -> None:
        self.loads = {"GPU-a": CardLoad(50, 7 * GIB), "GPU-b": CardLoad()}
        self.told: list[CardLoads] = []
        self.now_ns = 0
        table: Any = SimpleNamespace(
            cards=lambda: [SimpleNamespace(uuid=uuid) for uuid in self.loads], snapshots=lambda: LEASES
        )
        workers: Any = SimpleNamespace(worker=self.worker)
        self.history = LoadHistory(table, self, workers, self.told.append, lambda: self.now_ns)  # type: ignore[arg-type]

    def load(self, card_uuid: str) -> CardLoad:
        return self.loads[card_uuid]

    def worker(self, lease_id: int) -> Any:
        if lease_id not in ALLOCATED:
            return None
        counters = {Counter.ALLOCATED_BYTES: ALLOCATED[lease_id]}
        return SimpleNamespace(page=SimpleNamespace(counter=counters.__getitem__))


def test_a_sample_is_what_the_card_says_and_else_what_sessions_hold() -> None:
    node = Node()
    node.now_ns = 5
    asyncio.run(node.history.sample())
    first = CardLoads("GPU-a", (LoadSample(5, 50, 7 * GIB, 6 * GIB),))
    assert node.told == [first, CardLoads("GPU-b", (LoadSample(5, None, 0, GIB),))]
    node.loads["GPU-a"] = CardLoad(None, None)
    asyncio.run(node.history.sample())
    assert node.told[2].samples == (LoadSample(5, None, 5 * GIB, 6 * GIB),), "no more than each has"
    assert [len(message.samples) for message in node.history.messages()] == [2, 2]


def test_an_hour_is_kept() -> None:
    async def play() -> None:
        for number in range(MAX_SAMPLES + 5):
            node.now_ns = number
            await node.history.sample()

    node = Node()
    asyncio.run(play())
    kept = next(iter(node.history.messages())).samples
    assert (len(kept), kept[0].at_ns, kept[-1].at_ns) == (MAX_SAMPLES, 5, MAX_SAMPLES + 4)


def test_a_driver_that_hangs_leaves_a_gap_and_lets_the_daemon_stop() -> None:
    async def play() -> None:
        asked, goes_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hang(card_uuid: str) -> CardLoad:
            loop.call_soon_threadsafe(asked.set)
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
            return CardLoad()

        node.load = hang  # type: ignore[method-assign]
        node.history.start()
        await asked.wait()
        await node.history.stop()
        goes_on.set()

    node = Node()
    asyncio.run(play())
    assert node.told == []
    assert list(node.history.messages()) == []
