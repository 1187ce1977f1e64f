"""Events reach the right subscribers, and slow readers lose only old ones."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fuzz.virtual import VirtualLoop, virtual_time
from gpulease.daemon.broker import subscriptions
from gpulease.daemon.broker.subscriptions import EVERY_LEASE, PeerSubscription, Publisher
from gpulease.daemon.leases import quotas
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    DrainRequested,
    Event,
    FreeRequested,
    ReclaimProved,
    RenewRequested,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.failures import Refused
from gpulease.protocol.limits import MAX_SUBSCRIPTIONS
from gpulease.protocol.messages import LeaseEvent, RegionEvent
from gpulease.protocol.opcodes import Phase, Status
from helpers.waiting import PATIENCE_S


class Reader:
    """A subscriber."""

    def __init__(self, lease_id: int = 5, tenant: str = "t") -> None:
        self.heard: list[LeaseEvent] = []
        self.has_room = True
        self.may_see = True
        self.subscription = PeerSubscription(9, lease_id, tenant, lambda _: self.may_see, self.write)

    def write(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        assert subscription == 9
        assert isinstance(event, LeaseEvent)
        if self.has_room:
            self.heard.append(event)
        return self.has_room

    @property
    def phases(self) -> list[int]:
        return [event.phase for event in self.heard]


class Life:
    """A table of one lease, and who is told of it."""

    def __init__(self) -> None:
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(grace_ms={}))
        self.publisher = Publisher(self.table)
        self.requests = 100

    def do(self, event: Event) -> None:
        now_ns = int(asyncio.get_running_loop().time() * 1e9)
        self.publisher.on_effects(self.table.handle(event, now_ns))

    def grant(self, lease_id: int = 5, ttl_ms: int = 60_000) -> None:
        self.requests += 1
        self.do(AcquireRequested(self.requests, "t", lease_id, LeaseTerms(10, ttl_ms)))
        self.do(WorkerReady(lease_id))

    def end(self, lease_id: int = 5) -> None:
        self.requests += 1
        self.do(FreeRequested(self.requests, lease_id, "t"))
        self.do(WorkerExited(lease_id, "killed"))
        self.do(ReclaimProved(lease_id))

    def read(self, lease_id: int = 5, tenant: str = "t") -> Reader:
        reader = Reader(lease_id, tenant)
        self.publisher.add(reader.subscription)
        self.publisher.begin(reader.subscription)
        return reader

    def is_empty(self) -> bool:
        kept: list[Any] = [getattr(self.publisher, name) for name in ("_by_lease", "_by_tenant", "_sent", "_timers")]
        return not any(kept) and not self.publisher._slow


def on_loop(scenario: Callable[[Life], Any]) -> Callable[[], None]:
    """Play a scenario on the virtual clock: how long a busy host takes changes nothing."""

    def run() -> None:
        async def play() -> None:
            life = Life()
            await scenario(life)
            life.publisher.stop()

        loop = VirtualLoop()
        with virtual_time(loop):
            loop.run_until_complete(play())
            loop.close()
        assert loop.wrong == []

    run.__name__ = scenario.__name__
    return run


@on_loop
async def test_a_lease_s_whole_way(life: Life) -> None:
    every = life.read(EVERY_LEASE)
    assert not every.heard
    life.grant()
    own = life.read()
    life.do(RenewRequested(1, 5, "t", 60_000))
    life.end()
    assert own.phases == [Phase.ACTIVE, Phase.TEARDOWN, Phase.ENDED], "a renewal of an active lease is no news"
    assert every.phases == own.phases
    assert [event.sequence for event in own.heard] == [1, 2, 3]
    for reader in (own, every):
        life.publisher.remove(reader.subscription)
    assert life.is_empty()


@on_loop
async def test_nothing_is_kept_of_a_lease_that_nobody_follows_any_more(life: Life) -> None:
    life.grant()
    life.grant(6)
    readers = [life.read(), life.read(6), life.read(EVERY_LEASE)]
    assert len(life.publisher._timers) == 2
    life.publisher.remove(readers[0].subscription)
    assert len(life.publisher._timers) == 2, "of all, it still is"
    life.publisher.remove(readers[2].subscription)
    assert list(life.publisher._sent) == [6]
    life.publisher.remove(readers[1].subscription)
    assert life.is_empty()


@on_loop
async def test_time_alone_warns(life: Life) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The warning comes soon, and long before the end: a busy host renews in time.
        patch.setattr(quotas, "WARNING_PART", 1)
        life.grant(ttl_ms=1000 * quotas.MAX_WARNING_S + 500)
        own, every = life.read(), life.read(EVERY_LEASE)
        assert own.phases == [Phase.ACTIVE]
        async with asyncio.timeout(PATIENCE_S):
            while not every.heard:  # noqa: ASYNC110  # a timer of the publisher writes it
                await asyncio.sleep(0.005)
        assert own.phases == [Phase.ACTIVE, Phase.WARNING]
        assert every.phases == [Phase.WARNING]
        life.do(RenewRequested(2, 5, "t", 600_000))
        assert own.phases[-1] == Phase.ACTIVE


@on_loop
async def test_a_drain_is_told_once_for_each_deadline(life: Life) -> None:
    life.grant()
    own = life.read()
    life.do(DrainRequested(3, 60_000))
    life.do(RenewRequested(4, 5, "t", 60_000))
    assert own.phases == [Phase.ACTIVE, Phase.WARNING]
    life.do(DrainRequested(5, 1000))
    assert own.phases == [Phase.ACTIVE, Phase.WARNING, Phase.WARNING]
    assert own.heard[2].left_ms <= 1000 < own.heard[1].left_ms


@on_loop
async def test_a_slow_reader_gets_the_latest_and_the_number_of_those_lost(life: Life) -> None:
    telling_s = subscriptions.FLUSH_S
    life.grant()
    own = life.read()
    own.has_room = False
    for deadline_ms in range(50_000, 10_000, -1000):
        life.do(DrainRequested(deadline_ms, deadline_ms))
    assert len(own.heard) == 1
    own.has_room = True
    await asyncio.sleep(telling_s * 1.5)
    assert [(event.sequence, event.lost) for event in own.heard] == [(1, 0), (41, 39)]
    assert own.heard[1].left_ms <= 11_000
    life.end()
    assert [(event.sequence, event.lost) for event in own.heard[2:]] == [(42, 0), (43, 0)]


@on_loop
async def test_the_end_waits_for_a_reader_that_is_slow(life: Life) -> None:
    life.grant()
    own = life.read()
    own.has_room = False
    life.end()
    own.has_room = True
    await asyncio.sleep(subscriptions.FLUSH_S * 1.5)
    assert [(event.phase, event.lost) for event in own.heard[1:]] == [(Phase.ENDED, 1)]


@on_loop
async def test_who_may_not_see_any_more_hears_nothing(life: Life) -> None:
    life.grant()
    own = life.read()
    own.may_see = False
    life.end()
    assert own.phases == [Phase.ACTIVE]


@on_loop
async def test_subscriptions_are_bounded_for_each_tenant(life: Life) -> None:
    readers = [life.read() for _ in range(MAX_SUBSCRIPTIONS)]
    with pytest.raises(Refused) as caught:
        life.read()
    assert caught.value.failure.status is Status.BUSY
    other = life.read(tenant="other")
    life.publisher.remove(readers.pop().subscription)
    readers.append(life.read())
    for reader in (*readers, other):
        life.publisher.remove(reader.subscription)
    assert life.is_empty()


@on_loop
async def test_a_lease_that_was_never_granted_is_nobody_s(life: Life) -> None:
    every = life.read(EVERY_LEASE)
    life.do(AcquireRequested(1, "t", 5, LeaseTerms(10, 60_000)))
    life.do(WorkerExited(5, "no context"))
    life.do(ReclaimProved(5))
    assert not every.heard
