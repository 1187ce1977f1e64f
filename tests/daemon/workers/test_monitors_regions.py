"""Looks at a card until an ended region's bytes are back."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from gpulease.daemon.gpus.source import CardSource, CardsUnavailable
from gpulease.daemon.leases.events import Event, ProveRegion, RegionProved
from gpulease.daemon.workers.monitors import BytesProver
from gpulease.daemon.workers.registry import Workers

LEASE, REGION = 7, 70
ORDER = ProveRegion(LEASE, REGION, "GPU-a", 100)


@dataclass
class MadeCards:
    """A card that shows these figures for the process, one after the other; the last one for ever."""

    figures: list[int | Exception]
    looks: int = 0

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        self.looks += 1
        figure = self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]
        if isinstance(figure, Exception):
            raise figure
        return figure


@dataclass
class MadeWorkers:
    pids: dict[int, int] = field(default_factory=lambda: {LEASE: 77})

    def pid(self, lease_id: int) -> int:
        return self.pids.get(lease_id, 0)


class Rig:
    def __init__(self, *figures: int | Exception) -> None:
        self.cards, self.workers, self.posted = MadeCards(list(figures)), MadeWorkers(), list[Event]()
        self.allowed = {LEASE: 0}
        self.prover = BytesProver(
            cast(CardSource, self.cards), cast(Workers, self.workers), self.posted.append, self.allowed.__getitem__
        )

    async def settled(self) -> None:
        """Wait until nothing is looked for any more."""
        while others := asyncio.all_tasks() - {cast(asyncio.Task[None], asyncio.current_task())}:
            await asyncio.gather(*others, return_exceptions=True)

    async def looked(self, count: int) -> None:
        while self.cards.looks < count:  # noqa: ASYNC110  # the card tells nobody
            await asyncio.sleep(0.001)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(play())


def test_it_is_proved_once_the_card_shows_no_more_than_is_allowed() -> None:
    async def story() -> None:
        rig = Rig(101, CardsUnavailable("no", hint="Look."), 101, 100)
        rig.prover.prove(ORDER)
        await rig.settled()
        assert rig.posted == [RegionProved(REGION)]
        assert rig.cards.looks == 4

    run(story)


def test_bytes_of_another_region_that_was_proved_meanwhile_may_be_taken_again() -> None:
    async def story() -> None:
        rig = Rig(150)
        rig.prover.prove(ORDER)
        await rig.looked(1)
        rig.allowed[LEASE] = 150
        await rig.settled()
        assert rig.posted == [RegionProved(REGION)]

    run(story)


def test_a_smaller_slice_is_proved_as_it_was_asked_for() -> None:
    async def story() -> None:
        rig = Rig(150)
        rig.allowed[LEASE] = 150
        rig.prover.prove(ProveRegion(LEASE, LEASE, "GPU-a", 100))
        await rig.looked(2)
        rig.prover.give_up(LEASE)
        await rig.settled()
        assert rig.posted == []

    run(story)


def test_looks_end_when_they_are_given_up() -> None:
    async def story() -> None:
        rig = Rig(101)
        rig.prover.prove(ORDER)
        await rig.looked(2)
        rig.prover.give_up(REGION)
        await rig.settled()
        assert rig.posted == []

    run(story)


def test_looks_end_with_the_session() -> None:
    async def story() -> None:
        rig = Rig(101)
        rig.prover.prove(ORDER)
        await rig.looked(1)
        rig.workers.pids.clear()
        await rig.settled()
        assert rig.posted == []

    run(story)


def test_a_later_order_takes_the_place_of_an_earlier_one() -> None:
    async def story() -> None:
        rig = Rig(150)
        rig.prover.prove(ORDER)
        rig.prover.prove(ProveRegion(LEASE, REGION, "GPU-a", 150))
        await rig.settled()
        assert rig.posted == [RegionProved(REGION)]

    run(story)


def test_nothing_is_looked_for_after_the_stop() -> None:
    async def story() -> None:
        rig = Rig(101)
        rig.prover.prove(ORDER)
        await rig.prover.stop()
        await rig.settled()
        assert rig.posted == []

    run(story)
