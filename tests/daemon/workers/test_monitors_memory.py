import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import cast

import pytest

from gpulease.daemon.gpus.source import CardSource, CardsUnavailable
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Event,
    FreeRequested,
    KillWorker,
    PoolTimerFired,
    ResizeRequested,
    SessionCondemned,
    WorkerReady,
    WorkerScrubbed,
)
from gpulease.daemon.leases.model import FIRST_WARM_ID, Cause, LeaseTerms, Recycling
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.workers.monitors import MAX_FAILED_POLLS, MemoryMonitor
from gpulease.daemon.workers.registry import Workers
from helpers.waiting import wait_until

SIZE, OVERHEAD, PID = 1000, 50, 77


@dataclass
class MadeCards:
    """What a card shows for the one process, and how often it was asked."""

    held: int | None
    looks: int = 0
    reserve_bytes: int = 1
    meanwhile: Callable[[], object] = lambda: None
    figure_after: int | None = None

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        assert (card_uuid, pid) == ("GPU-a", PID)
        self.looks += 1
        if self.looks == 1:
            self.meanwhile()
        if self.held is None and self.looks == (self.figure_after or 0) + 1 and self.figure_after:
            return SIZE
        if self.held is None:
            raise CardsUnavailable("NVML does not show it", hint="Look.")
        return self.held


@dataclass
class MadeWorkers:
    alive: bool = True
    has_context: bool = True

    def context_pid(self, lease_id: int) -> int:
        return PID if self.has_context else 0

    def is_alive(self, lease_id: int) -> bool:
        return self.alive


@dataclass
class Scene:
    cards: MadeCards
    workers: MadeWorkers = field(default_factory=MadeWorkers)
    posted: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = LeaseTable([Card("GPU-a", 0, "a", 10_000, OVERHEAD)])
        self.table.handle(AcquireRequested(1, "t", 5, LeaseTerms(SIZE, 60_000)), 0)
        self.table.handle(WorkerReady(5), 0)
        self.weigher = MemoryMonitor(
            self.table, cast(CardSource, self.cards), cast(Workers, self.workers), self.posted.append
        )


def run(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(story())


async def settled(scene: Scene, looks: int) -> None:
    while others := asyncio.all_tasks() - {cast(asyncio.Task[None], asyncio.current_task())}:
        await asyncio.gather(*others)
        await asyncio.sleep(0)
    assert scene.cards.looks >= looks


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.workers.monitors.FAILED_POLL_PAUSE_S", 0)


def test_a_worker_without_its_context_is_not_measured() -> None:
    """The session of an active lease is on its way to a new process, which takes its time to open a context."""

    async def story() -> None:
        scene = Scene(MadeCards(None), MadeWorkers(has_context=False))
        for _ in range(2 * MAX_FAILED_POLLS):
            scene.weigher.poll(5)
            await settled(scene, 0)
        assert (scene.cards.looks, scene.posted) == (0, [])
        scene.workers.has_context = True
        scene.weigher.poll(5)
        await settled(scene, MAX_FAILED_POLLS)
        assert [type(event) for event in scene.posted] == [SessionCondemned]

    run(story)


@pytest.mark.parametrize(
    ("held", "alive", "cause"),
    [
        (SIZE + OVERHEAD, True, None),
        (SIZE + OVERHEAD + 1, True, Cause.OVER_SLICE),
        (None, True, Cause.UNMEASURED),
        (None, False, None),
    ],
)
def test_more_than_was_admitted_ends_the_lease(held: int | None, alive: bool, cause: Cause | None) -> None:
    async def story() -> None:
        scene = Scene(MadeCards(held), MadeWorkers(alive))
        scene.weigher.poll(5)
        await settled(scene, 1)
        assert [type(event) for event in scene.posted] == [SessionCondemned] * (cause is not None)
        for event in scene.posted:
            effects = scene.table.handle(event, 1)
            assert KillWorker(5) in effects
            snapshot = scene.table.get(5)
            assert snapshot is not None
            assert snapshot.cause is cause
            assert snapshot.reason
            # The second look at a lease that is over finds nothing to say.
            scene.weigher.poll(5)
            await settled(scene, 1)
            assert len(scene.posted) == 1

    run(story)


@pytest.mark.parametrize("failures", [1, MAX_FAILED_POLLS - 1, MAX_FAILED_POLLS])
def test_a_card_that_gives_no_figure_is_polled_before_its_session_is_ended(failures: int) -> None:
    async def story() -> None:
        cards = MadeCards(None, figure_after=failures)
        scene = Scene(cards)
        # A figure in between starts the count again, so no number of single failures ends a session.
        for _ in range(3):
            cards.looks = 0
            scene.weigher.poll(5)
            await settled(scene, min(failures + 1, MAX_FAILED_POLLS))
        ends = failures >= MAX_FAILED_POLLS
        assert {event.cause for event in scene.posted if isinstance(event, SessionCondemned)} == (
            {Cause.UNMEASURED} if ends else set()
        )

    run(story)


@pytest.mark.parametrize("held", [SIZE + OVERHEAD + 100, SIZE + OVERHEAD + 101])
def test_what_was_admitted_during_a_look_is_compared_at_the_next(held: int) -> None:
    async def story() -> None:
        scene = Scene(MadeCards(held))
        scene.cards.meanwhile = lambda: scene.table.handle(ResizeRequested(8, 5, "t", SIZE + 100), 1)
        scene.weigher.poll(5)
        await settled(scene, 2)
        assert (scene.cards.looks, len(scene.posted)) == (2, held > SIZE + OVERHEAD + 100)

    run(story)


def test_looks_asked_for_meanwhile_are_one_more() -> None:
    async def story() -> None:
        scene = Scene(MadeCards(0))
        for _ in range(5):
            scene.weigher.poll(5)
        await settled(scene, 2)
        assert scene.cards.looks == 2

    run(story)


def test_between_two_looks_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.workers.monitors.PAUSE_S", 3600)

    async def story() -> None:
        scene = Scene(MadeCards(0))
        scene.weigher.poll(5)
        await asyncio.to_thread(wait_until, lambda: scene.cards.looks == 1, "it is looked at at once")
        for _ in range(20):
            scene.weigher.poll(5)
            await asyncio.to_thread(int)
        assert scene.cards.looks == 1
        await scene.weigher.stop()

    run(story)


def recycled(scene: Scene) -> int:
    """Its lease was given back and left a context, whose number this is."""
    scene.table = LeaseTable([Card("GPU-a", 0, "a", 10_000, OVERHEAD)], warm_contexts=1, recycling=Recycling())
    scene.table.handle(PoolTimerFired(), 0)
    for event in (
        WorkerReady(FIRST_WARM_ID),
        AcquireRequested(1, "t", 5, LeaseTerms(SIZE, 60_000)),
        WorkerReady(5),
        FreeRequested(2, 5, "t"),
        WorkerScrubbed(5),
    ):
        scene.table.handle(event, 0)
    (context,) = scene.table.warming()
    assert context.is_recycled
    return context.warm_id


@pytest.mark.parametrize("more_bytes", [0, 1])
def test_a_context_that_waits_for_its_tenant_is_held_to_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int
) -> None:
    monkeypatch.setattr("gpulease.daemon.workers.monitors.ROUND_S", 0.01)

    async def story() -> None:
        scene = Scene(MadeCards(OVERHEAD + more_bytes))
        number = recycled(scene)
        weigher = MemoryMonitor(
            scene.table, cast(CardSource, scene.cards), cast(Workers, scene.workers), scene.posted.append
        )
        weigher.start()
        await asyncio.to_thread(wait_until, lambda: scene.cards.looks >= 2, "it is looked at")
        await weigher.stop()
        assert bool(scene.posted) is bool(more_bytes)
        for event in scene.posted[:1]:
            assert KillWorker(number) in scene.table.handle(event, 1)

    run(story)


@pytest.mark.parametrize("reserve_bytes", [0, 1])
def test_rounds_find_what_nobody_asked_to_look_at(monkeypatch: pytest.MonkeyPatch, reserve_bytes: int) -> None:
    monkeypatch.setattr("gpulease.daemon.workers.monitors.ROUND_S", 0.01)

    async def story() -> None:
        scene = Scene(MadeCards(SIZE + OVERHEAD + 1, reserve_bytes=reserve_bytes))
        scene.weigher.start()
        if reserve_bytes:
            await asyncio.to_thread(wait_until, lambda: scene.posted, "it is found")
        else:
            await asyncio.sleep(0.1)
        await scene.weigher.stop()
        assert bool(scene.posted) is bool(reserve_bytes)

    run(story)
