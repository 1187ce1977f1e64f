"""What is asked of the broker, how often, and what is made of it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gpulease.daemon.web import page_state as feed_module
from gpulease.daemon.web.app import Cached
from gpulease.daemon.web.broker_link import BrokerSilent
from gpulease.daemon.web.page_state import LOOKUP_PAUSE_S, MAX_CHANGES, MAX_LOOKUPS, Feed
from gpulease.daemon.web.view import Changed
from gpulease.protocol.connection import Request
from gpulease.protocol.messages import LeaseEvent
from gpulease.protocol.opcodes import Opcode, Phase
from helpers.web_rig import CARD, GIB, Scene, lease


class Link:
    """A broker's answers without a connection."""

    agent = "gpuleased/1"

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    async def ask(self, op: Opcode, body: Any) -> Any:
        await asyncio.sleep(0)
        if self.scene.is_silent:
            raise BrokerSilent("it sleeps")
        return self.scene.answer(Request(op, 1, 0, False, body))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fed(play: Callable[[Feed, Scene, Clock], Coroutine[Any, Any, None]], scene: Scene | None = None) -> Scene:
    scene, clock = scene or Scene(), Clock()

    async def run() -> None:
        feed = Feed("gpu1", clock)
        running = asyncio.create_task(feed.run(Link(scene)))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        try:
            await play(feed, scene, clock)
        finally:
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(run())
    return scene


def event(number: int, phase: Phase = Phase.ACTIVE) -> LeaseEvent:
    return LeaseEvent(number, 1, 0, int(phase), 0, 1, "", "")


def test_all_who_ask_share_one_look() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        found = await asyncio.gather(*(feed.latest() for _ in range(50)))
        assert len(set(map(id, found))) == 1
        await feed.latest()
        clock.now_s += 0.4
        await feed.latest()
        assert scene.asked.count(Opcode.LEASE_LIST_ACTIVE) == 1
        clock.now_s += 0.2
        await feed.latest()
        assert scene.asked.count(Opcode.LEASE_LIST_ACTIVE) == 2

    fed(play)


def test_who_gives_up_takes_nobodys_look() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        first = asyncio.create_task(feed.latest())
        second = asyncio.create_task(feed.latest())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).cards
        assert scene.asked.count(Opcode.LEASE_LIST_ACTIVE) == 1

    fed(play)


def test_while_nobody_looks_nothing_is_asked() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        feed.on_event(event(1))
        await asyncio.sleep(0.3)
        assert Opcode.LEASE_LIST_ACTIVE not in scene.asked

    fed(play)


def test_a_watcher_is_told_soon_of_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FETCH_EVERY_S", 60.0)

    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        looks = feed.watch(5.0)
        first = await anext(looks)
        assert first is not None
        assert not first.changes
        scene.leases = [lease(1, "ann")]
        feed.on_event(event(1))
        second = await asyncio.wait_for(anext(looks), 60)
        assert second is not None
        assert [one.about for one in second.changes] == [Changed("ann", CARD, GIB, is_region=False)]
        await looks.aclose()  # type: ignore[attr-defined]

    fed(play)


def test_an_end_is_one_event() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        for phase in (Phase.ACTIVE, Phase.WARNING, Phase.GRACE, Phase.TEARDOWN):
            feed.on_event(event(1, phase))
        feed.on_event(event(2, Phase.GRACE))
        feed.on_event(event(1, Phase.ENDED))
        found = await feed.latest()
        assert [(one.lease_id[-1], one.phase) for one in found.changes] == [
            ("1", "active"),
            ("1", "warning"),
            ("2", "grace"),
            ("1", "ended"),
        ]
        assert found.node == "gpu1"

    fed(play)


def test_silence_is_told() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        with pytest.raises(BrokerSilent, match="it sleeps"):
            await feed.latest()
        looks = feed.watch(0.01)
        assert await anext(looks) is None
        scene.is_silent = False
        while await anext(looks) is None:
            pass
        await looks.aclose()  # type: ignore[attr-defined]

    scene = Scene()

    async def silent(feed: Feed, scene: Scene, clock: Clock) -> None:
        scene.is_silent = True
        await play(feed, scene, clock)

    fed(silent, scene)


def test_rates() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        scene.leases = [lease(1, "ann", launches=1000), lease(2, "bob", launches=50)]
        first = await feed.latest()
        assert (first.rates, first.history[CARD]) == ({}, (None,))
        clock.now_s += 2
        # A worker's word: one that counts backwards, or has no page any more, has launched nothing.
        scene.leases = [lease(1, "ann", launches=1500), lease(2, "bob", launches=10), lease(3, "bob", launches=9)]
        second = await feed.latest()
        assert second.rates == {f"{1:032x}": 250.0, f"{2:032x}": 0.0}
        assert second.history[CARD] == (None, 250.0)
        clock.now_s += 60
        scene.leases = [{key: value for key, value in lease(1, "ann").items() if key != "launches"}]
        assert (await feed.latest()).history[CARD] == (None, 250.0, None)

    fed(play)


def test_a_thousand_leases_that_come_and_go_are_not_all_asked_for() -> None:
    async def play(feed: Feed, scene: Scene, clock: Clock) -> None:
        began_s = time.monotonic()
        for number in range(1, 1001):
            feed.on_event(event(number, Phase.ENDED))
        await asyncio.sleep(0.2)
        asked = scene.asked.count(Opcode.LEASE_QUERY)
        assert 1 <= asked <= 1 + (time.monotonic() - began_s) / LOOKUP_PAUSE_S
        found = await feed.latest()
        assert len(found.changes) == MAX_CHANGES
        assert len(feed._lookup_queue) <= MAX_LOOKUPS

    fed(play)


def test_an_answer_is_kept_and_so_is_that_there_is_none() -> None:
    asked = 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked == 1:
            raise BrokerSilent("not yet")
        return "yes"

    async def play() -> None:
        clock = Clock()
        cached = Cached(ask, 0.5, clock)
        found = await asyncio.gather(*(cached.get() for _ in range(9)), return_exceptions=True)
        assert {type(one) for one in found} == {BrokerSilent}
        assert asked == 1
        clock.now_s += 0.5
        assert {await cached.get() for _ in range(9)} == {"yes"}
        assert asked == 2

    asyncio.run(play())
