"""Watches of regions: who hears of a refused launch, and what a slow reader loses."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gpulease.daemon.broker.subscriptions import ConnectionSubscriptions, Publisher
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.failures import Refused
from gpulease.protocol.limits import MAX_SUBSCRIPTIONS
from gpulease.protocol.messages import LeaseEvent, RegionEvent
from gpulease.protocol.opcodes import Status

LEASE, REGION, OTHER = 5, 50, 51
EVENT = RegionEvent(REGION, 0, 0, Status.REVOKED, "decode", 3, 4, 5, 6)


class Reader:
    """A connection that watches."""

    def __init__(self, publisher: Publisher) -> None:
        self.heard: list[LeaseEvent | RegionEvent] = []
        self.has_room = True
        self.subscriptions = ConnectionSubscriptions(publisher, "ann", self.write)
        self.last = 0

    def write(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        if self.has_room:
            self.heard.append(event)
        return self.has_room

    def watch(self, lease_id: int, *, may_see: bool = True) -> int:
        self.last += 1
        self.subscriptions.watch(self.last, lease_id, lambda _: may_see)
        return self.last


def on_loop(story: Callable[[Publisher, Reader], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def play() -> None:
            publisher = Publisher(LeaseTable([Card("GPU-a", 0, "a", 1000, 10)]))
            await story(publisher, Reader(publisher))
            publisher.stop()

        asyncio.run(play())

    run.__name__ = story.__name__
    return run


@on_loop
async def test_a_watch_of_a_region_and_one_of_its_lease_are_each_told_once(
    publisher: Publisher, reader: Reader
) -> None:
    for watched in (REGION, LEASE, OTHER):
        reader.watch(watched)
    publisher.on_forward_revoked(LEASE, EVENT)
    assert reader.heard == [replace(EVENT, sequence=1)] * 2


@on_loop
async def test_who_may_not_see_a_region_any_more_hears_nothing(publisher: Publisher, reader: Reader) -> None:
    reader.watch(REGION, may_see=False)
    publisher.on_forward_revoked(LEASE, EVENT)
    assert reader.heard == []


@on_loop
async def test_a_slow_reader_loses_old_events_and_learns_how_many(publisher: Publisher, reader: Reader) -> None:
    reader.watch(REGION)
    reader.has_room = False
    for position in range(4):
        publisher.on_forward_revoked(LEASE, replace(EVENT, position=position))
    reader.has_room = True
    publisher.on_forward_revoked(LEASE, replace(EVENT, position=9))
    assert reader.heard == [replace(EVENT, sequence=5, lost=4, position=9)]


@on_loop
async def test_a_watch_counts_as_one_of_its_tenant_s_subscriptions_until_it_ends(
    publisher: Publisher, reader: Reader
) -> None:
    numbers = [reader.watch(REGION) for _ in range(MAX_SUBSCRIPTIONS)]
    with pytest.raises(Refused):
        reader.watch(REGION)
    reader.subscriptions.unsubscribe(numbers[0])
    reader.watch(LEASE)
    reader.subscriptions.end_all()
    publisher.on_forward_revoked(LEASE, EVENT)
    assert reader.heard == []
