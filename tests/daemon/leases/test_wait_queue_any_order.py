"""The wait queue in any order: what its indexes find is what a walk through the queue finds, to the last tie."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpulease.daemon.leases.devices import Card, CardAccount, PlacementOrder, suitable
from gpulease.daemon.leases.events import AcquireRequested
from gpulease.daemon.leases.invariants import first_placeable
from gpulease.daemon.leases.model import Lease, LeaseTerms
from gpulease.daemon.leases.park_state import ParkState
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.wait_queue import Waiter, WaitQueue
from gpulease.protocol.opcodes import Exclusivity

TENANTS = st.sampled_from(["ann", "bob", "cid", "dan"])
# Few sizes, so that several waiters have the same one, and others near the limits of what fits.
SIZES = st.one_of(st.sampled_from([10, 20, 40]), st.integers(1, 120))
CARDS = (
    Card("GPU-a", 0, "Big", 120, 5, pins_host_memory=True),
    Card("GPU-b", 1, "Small", 60, 5),
    Card("GPU-c", 2, "Part", 60, 5, is_partition=True),
)


class QueueAnyOrder(RuleBasedStateMachine):
    """State machine of a queue and of leases on its cards. No waiter is placed, so that searches often find one."""

    @initialize(order=st.sampled_from(PlacementOrder), overcommit=st.sampled_from([1.0, 1.5]))
    def begin(self, order: PlacementOrder, overcommit: float) -> None:
        self.accounts = [CardAccount(card, 0, overcommit) for card in CARDS]
        self.queue = WaitQueue(CoreLimits(), order)
        self.numbers = count(1)
        self.leases: list[tuple[CardAccount, Lease]] = []
        self.now_ns = 1000

    def check(self) -> None:
        assert self.queue.next_placeable() == first_placeable(self.queue)
        waiters = list(self.queue)
        holding = [waiter for waiter in waiters if waiter.acquire.request in self.queue.holders]
        held = [waiter.open_candidates() for waiter in holding if not waiter.group.has_own_lease()]
        assert self.queue.held_cards() == {account.card.uuid for accounts in held for account in accounts}
        assert self.queue.next_hold_end_ns() == min((waiter.holds_until_ns for waiter in holding), default=None)

    def lease(self, account: CardAccount, tenant: str, size: int, exclusivity: Exclusivity, parkable: bool) -> Lease:
        terms = LeaseTerms(size, 1000, exclusivity=exclusivity, park_idle_ms=0 if parkable else None)
        number, charge_bytes = next(self.numbers), account.charge_bytes(terms)
        park = ParkState() if parkable else None
        return Lease(number, tenant, account.card.uuid, terms, charge_bytes, number, 0, 0, 1, park=park)

    @rule(
        card=st.integers(0, len(CARDS) - 1),
        tenant=TENANTS,
        size=SIZES,
        exclusivity=st.sampled_from([Exclusivity.SHARED, Exclusivity.SHARED, *Exclusivity]),
        parkable=st.booleans(),
    )
    def lease_begins(self, card: int, tenant: str, size: int, exclusivity: Exclusivity, parkable: bool) -> None:
        account = self.accounts[card]
        lease = self.lease(account, tenant, size, exclusivity, parkable)
        account.restore(lease)
        self.leases.append((account, lease))
        self.check()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        account, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if (waiter := self.queue.get(-lease.lease_id)) is not None:
            self.queue.leave(waiter)
        account.give_back(lease)
        self.check()

    @rule(
        tenant=TENANTS,
        size=SIZES,
        cards=st.sampled_from([(0, 1, 2), (0, 1, 2), (0,), (1,), (0, 2)]),
        exclusivity=st.sampled_from([Exclusivity.SHARED, Exclusivity.SHARED, *Exclusivity]),
        submit_bytes=st.sampled_from([0, 0, 1]),
        parkable=st.booleans(),
        holds_ns=st.sampled_from([0, 5, 5, 50]),
    )
    def acquire_waits(
        self,
        tenant: str,
        size: int,
        cards: tuple[int, ...],
        exclusivity: Exclusivity,
        submit_bytes: int,
        parkable: bool,
        holds_ns: int,
    ) -> None:
        terms = LeaseTerms(
            size,
            1000,
            exclusivity=exclusivity,
            submit_bytes=0 if parkable else submit_bytes,
            park_idle_ms=0 if parkable else None,
        )
        candidates = tuple(suitable([self.accounts[card] for card in cards], exclusivity))
        number = next(self.numbers)
        event = AcquireRequested(number, tenant, number, terms)
        self.queue.join(Waiter(event, candidates, self.now_ns, self.now_ns + 1000, self.now_ns + holds_ns))
        self.check()

    @precondition(lambda self: any(lease.park is not None for _, lease in self.leases))
    @rule(data=st.data(), holds_ns=st.sampled_from([0, 5, 50]))
    def session_waits_to_return(self, data: st.DataObject, holds_ns: int) -> None:
        parkable = [(account, lease) for account, lease in self.leases if lease.park is not None]
        account, lease = data.draw(st.sampled_from(parkable))
        if self.queue.get(-lease.lease_id) is not None or lease.park is None:
            return
        if not lease.park.off_bytes:
            lease.park.off_bytes = data.draw(st.integers(1, lease.charge_bytes))
            account.free_parked(lease, lease.park.off_bytes)
        event = AcquireRequested(-lease.lease_id, lease.tenant, lease.lease_id, lease.terms)
        times_ns = (self.now_ns, self.now_ns + 1000, self.now_ns + holds_ns)
        self.queue.join(Waiter(event, (account,), *times_ns, lease))
        self.check()

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def waiter_leaves(self, data: st.DataObject) -> None:
        self.queue.leave(data.draw(st.sampled_from(list(self.queue))))
        self.check()

    @rule(card=st.integers(0, len(CARDS) - 1))
    def card_is_drained_or_admitted(self, card: int) -> None:
        self.accounts[card].drain_ns = 1 if self.accounts[card].drain_ns is None else None
        self.check()

    @rule(ns=st.sampled_from([1, 5, 50]))
    def holds_end(self, ns: int) -> None:
        self.now_ns += ns
        due = any(waiter.holds_until_ns <= self.now_ns for waiter in self.queue.holders.values())
        assert self.queue.end_holds(self.now_ns) == due
        self.check()


FEW = settings(max_examples=60, stateful_step_count=40, deadline=None)
QueueAnyOrder.TestCase.settings = FEW
TestQueueAnyOrder = QueueAnyOrder.TestCase


@pytest.mark.exhaustive
class TestManyQueues(TestQueueAnyOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=1000)
