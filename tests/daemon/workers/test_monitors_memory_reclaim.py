"""Looks at a card: for a dead worker's bytes until the table has its proof, and for what others hold."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import cast

import pytest

from gpulease.daemon.gpus.source import CardReading, CardSource, CardsUnavailable
from gpulease.daemon.leases.events import CardPolled, Event, ReclaimProved, WorkerUnlisted
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.workers import monitors
from gpulease.daemon.workers.monitors import CardWatch, Reclaimer
from gpulease.daemon.workers.registry import Workers

LEASE, PID, STRANGER = 5, 77, 88


@dataclass
class MadeCards:
    """Says one reading after the other, the last one again and again; None is a card that does not answer."""

    readings: list[CardReading | None]
    has_others: bool = True
    on_read: Callable[[], None] = lambda: None

    def read(self, card_uuid: str) -> CardReading:
        assert card_uuid == "GPU-a"
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        self.on_read()
        if reading is None:
            raise CardsUnavailable("it fell off the bus", hint="")
        return reading


@dataclass
class MadeWorkers:
    own: set[int] = field(default_factory=set)

    def pids(self) -> set[int]:
        return set(self.own)

    def on_processes_listed(self, card_uuid: str, pids: Collection[int]) -> None:
        pass


def run(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


async def proof(cards: MadeCards, enough: int, pid: int = PID) -> list[Event]:
    """What is posted until there are so many events; the last of them is the table's proof."""
    posted: list[Event] = []
    done = asyncio.Event()

    def post(event: Event) -> None:
        posted.append(event)
        if len(posted) == enough:
            reclaimer.give_up(LEASE)
            done.set()

    reclaimer = Reclaimer(cast(CardSource, cards), post)
    reclaimer.prove(LEASE, "GPU-a", pid)
    await done.wait()
    await reclaimer.stop()
    return posted


def test_a_listed_process_proves_nothing_and_an_unlisted_one_is_told_of_at_each_look() -> None:
    async def story() -> None:
        listed = CardReading(0, {PID: 9, STRANGER: 1})
        looks = [listed, CardReading(60, {}), None, CardReading(20, {}), CardReading(40, {})]
        posted = await proof(MadeCards([*looks]), 3)
        told = [event for event in posted if isinstance(event, WorkerUnlisted)]
        assert [(event.unowned_bytes, event.least_bytes) for event in told] == [(60, 60), (20, 20), (40, 20)]
        assert {event.since_ns for event in told} == {told[0].polled_ns}
        assert told == sorted(told, key=lambda event: event.polled_ns)

    run(story)


def test_a_process_that_is_listed_again_begins_anew() -> None:
    async def story() -> None:
        looks = [CardReading(60, {}), CardReading(0, {PID: 9}), CardReading(70, {})]
        first, second = await proof(MadeCards([*looks]), 2)
        assert isinstance(first, WorkerUnlisted)
        assert isinstance(second, WorkerUnlisted)
        assert (second.least_bytes, second.since_ns) == (70, second.polled_ns)

    run(story)


def test_a_worker_that_never_had_a_process_needs_no_look() -> None:
    async def story() -> None:
        assert await proof(MadeCards([None]), 1, pid=0) == [ReclaimProved(LEASE)]

    run(story)


def test_the_watch_tells_strangers_from_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is settled while the card is looked at, another begins: both are the daemon's own."""
    monkeypatch.setattr(monitors, "ROUND_S", 0.001)

    async def story() -> None:
        workers = MadeWorkers({PID})
        cards = MadeCards([CardReading(7, {PID: 10, PID + 1: 20, STRANGER: 30}, outside_bytes_at_first=5)])
        loop, enough = asyncio.get_running_loop(), asyncio.Event()
        cards.on_read = lambda: workers.own.symmetric_difference_update({PID, PID + 1})
        posted: list[Event] = []

        def post(event: Event) -> None:
            posted.append(event)
            if len(posted) == 3:
                loop.call_soon(enough.set)

        watch = CardWatch(cast(CardSource, cards), ["GPU-a"], cast(Workers, workers), post)
        await watch.start()
        assert len(posted) == 1, "the first look is over when it has started"
        cards.readings.insert(0, None)
        await enough.wait()
        await watch.stop()
        told = [event for event in posted if isinstance(event, CardPolled)]
        assert {(event.unowned_bytes, event.outside_bytes) for event in told} == {(7, 25)}

    run(story)


def test_the_watch_goes_on_after_a_fault_and_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitors, "ROUND_S", 0.001)

    async def story() -> None:
        loop, looked = asyncio.get_running_loop(), asyncio.Event()
        cards = MadeCards([CardReading(7, {})])
        faults: list[Exception] = [TypeError("no number"), KeyError("GPU-a")]

        def fail() -> None:
            if faults:
                raise faults.pop()

        cards.on_read = fail

        def post(event: Event) -> None:
            loop.call_soon(looked.set)

        watch = CardWatch(cast(CardSource, cards), ["GPU-a"], cast(Workers, MadeWorkers()), post)
        await watch.start()
        await looked.wait()
        await watch.stop()

    with caplog.at_level("ERROR", "gpulease"):
        run(story)
    told = [record for record in caplog.records if record.getMessage() == LogEvent.DAEMON_FAULT.value.message]
    assert len(told) == 2, "one of the first look, one of the first round"


def test_a_card_that_is_not_read_at_the_start_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        cards = MadeCards([None])
        watch = CardWatch(cast(CardSource, cards), ["GPU-a"], cast(Workers, MadeWorkers()), lambda event: None)
        await watch.start()
        await watch.stop()

    with caplog.at_level("WARNING", "gpulease"):
        run(story)
    (told,) = [record for record in caplog.records if record.getMessage() == LogEvent.CARD_UNREAD.value.message]
    assert told.levelname == "WARNING"


def test_a_card_that_does_not_answer_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first look at the other, nor later ones: one card answers only once the other was looked at."""
    monkeypatch.setattr(monitors, "FIRST_ROUND_TIMEOUT_S", 60.0)
    monkeypatch.setattr(monitors, "ROUND_S", 0.001)
    looks, looked = Counter[str](), threading.Condition()
    # How often the other card was looked at before this one answers for the first time, and before the next.
    awaited = [1, 4]

    class SlowCard(MadeCards):
        def read(self, card_uuid: str) -> CardReading:
            with looked:
                if card_uuid == "GPU-slow" and awaited:
                    assert looked.wait_for(lambda: looks["GPU-a"] >= awaited[0], 60)
                    del awaited[0]
                looks[card_uuid] += 1
                looked.notify_all()
            return CardReading(7, {})

    async def story() -> None:
        loop, enough = asyncio.get_running_loop(), asyncio.Event()
        posted = Counter[str]()

        def post(event: Event) -> None:
            assert isinstance(event, CardPolled)
            posted[event.card_uuid] += 1
            if posted["GPU-slow"] == 2:
                loop.call_soon(enough.set)

        cards = cast(CardSource, SlowCard([]))
        watch = CardWatch(cards, ["GPU-slow", "GPU-a"], cast(Workers, MadeWorkers()), post)
        await watch.start()
        assert set(posted) == {"GPU-slow", "GPU-a"}
        await enough.wait()
        await watch.stop()

    run(story)


def test_pretended_cards_are_not_watched() -> None:
    async def story() -> None:
        posted: list[Event] = []
        cards = MadeCards([None], has_others=False)
        watch = CardWatch(cast(CardSource, cards), ["GPU-a"], cast(Workers, MadeWorkers()), posted.append)
        before = asyncio.all_tasks()
        await watch.start()
        assert asyncio.all_tasks() == before
        await watch.stop()
        assert posted == []

    run(story)
