"""The wait queue in any order: what its indexes find is what a walk through the queue finds, to the last tie."""

from itertools import count
from random import Random

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

TENANTS = ("ann", "bob", "cid", "dan")
# Few sizes, so that several waiters have the same one, and others near the limits of what fits.
USUAL_SIZES = (10, 20, 40)
MOST_BYTES = 120
SIZES = st.one_of(st.sampled_from(USUAL_SIZES), st.integers(1, MOST_BYTES))
EXCLUSIVITY = (Exclusivity.SHARED, Exclusivity.SHARED, *Exclusivity)
CANDIDATES = ((0, 1, 2), (0, 1, 2), (0,), (1,), (0, 2))
SUBMIT_BYTES = (0, 0, 1)
HOLDS_NS = (0, 5, 5, 50)
RETURN_HOLDS_NS = (0, 5, 50)
STEPS_NS = (1, 5, 50)
OVERCOMMIT = (1.0, 1.5)
ANY = st.integers(0, 1 << 16)
# More join than leave, so that queues grow long.
MANY_STEPS = (*["begin"] * 3, *["acquire"] * 4, *["return"] * 2, "end", "leave", "drain", "pass")
CARDS = (
    Card("GPU-a", 0, "Big", 120, 5, pins_host_memory=True),
    Card("GPU-b", 1, "Small", 60, 5),
    Card("GPU-c", 2, "Part", 60, 5, is_partition=True),
)


class QueueAnyOrder(RuleBasedStateMachine):
    """State machine of a queue and of leases on its cards. No waiter is placed, so that searches often find one."""

    @initialize(order=st.sampled_from(PlacementOrder), overcommit=st.sampled_from(OVERCOMMIT))
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
        tenant=st.sampled_from(TENANTS),
        size=SIZES,
        exclusivity=st.sampled_from(EXCLUSIVITY),
        parkable=st.booleans(),
    )
    def lease_begins(self, card: int, tenant: str, size: int, exclusivity: Exclusivity, parkable: bool) -> None:
        account = self.accounts[card]
        lease = self.lease(account, tenant, size, exclusivity, parkable)
        account.restore(lease)
        self.leases.append((account, lease))
        self.check()

    @precondition(lambda self: self.leases)
    @rule(pick=ANY)
    def lease_ends(self, pick: int) -> None:
        account, lease = self.leases.pop(pick % len(self.leases))
        if (waiter := self.queue.get(-lease.lease_id)) is not None:
            self.queue.leave(waiter)
        account.give_back(lease)
        self.check()

    @rule(
        tenant=st.sampled_from(TENANTS),
        size=SIZES,
        cards=st.sampled_from(CANDIDATES),
        exclusivity=st.sampled_from(EXCLUSIVITY),
        submit_bytes=st.sampled_from(SUBMIT_BYTES),
        parkable=st.booleans(),
        holds_ns=st.sampled_from(HOLDS_NS),
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
    @rule(pick=ANY, off=ANY, holds_ns=st.sampled_from(RETURN_HOLDS_NS))
    def session_waits_to_return(self, pick: int, off: int, holds_ns: int) -> None:
        parkable = [(account, lease) for account, lease in self.leases if lease.park is not None]
        account, lease = parkable[pick % len(parkable)]
        if self.queue.get(-lease.lease_id) is not None or lease.park is None:
            return
        if not lease.park.off_bytes:
            lease.park.off_bytes = 1 + off % lease.charge_bytes
            account.free_parked(lease, lease.park.off_bytes)
        event = AcquireRequested(-lease.lease_id, lease.tenant, lease.lease_id, lease.terms)
        times_ns = (self.now_ns, self.now_ns + 1000, self.now_ns + holds_ns)
        self.queue.join(Waiter(event, (account,), *times_ns, lease))
        self.check()

    @precondition(lambda self: len(self.queue) > 0)
    @rule(pick=ANY)
    def waiter_leaves(self, pick: int) -> None:
        self.queue.leave(list(self.queue)[pick % len(self.queue)])
        self.check()

    @rule(card=st.integers(0, len(CARDS) - 1))
    def card_is_drained_or_admitted(self, card: int) -> None:
        self.accounts[card].drain_ns = 1 if self.accounts[card].drain_ns is None else None
        self.check()

    @rule(ns=st.sampled_from(STEPS_NS))
    def holds_end(self, ns: int) -> None:
        self.now_ns += ns
        due = any(waiter.holds_until_ns <= self.now_ns for waiter in self.queue.holders.values())
        assert self.queue.end_holds(self.now_ns) == due
        self.check()


FEW = settings(max_examples=60, stateful_step_count=40, deadline=None)
QueueAnyOrder.TestCase.settings = FEW
TestQueueAnyOrder = QueueAnyOrder.TestCase


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_of_many_queues_each_finds_what_a_walk_finds(first: int) -> None:
    """The same steps, drawn from seeds, because hypothesis would take nine tenths of the time of such a run."""
    for seed in range(first, first + 500):
        try:
            run_from_seed(seed)
        except Exception as error:
            error.add_note(f"run_from_seed({seed})")
            raise


def run_from_seed(seed: int) -> None:
    random = Random(seed)
    draw = random.choice
    state = QueueAnyOrder()
    state.begin(draw(list(PlacementOrder)), draw(OVERCOMMIT))

    def size() -> int:
        return draw(USUAL_SIZES) if random.random() < 0.5 else random.randint(1, MOST_BYTES)

    for _ in range(40):
        pick, is_parkable = random.getrandbits(16), random.random() < 0.5
        match draw(MANY_STEPS):
            case "begin":
                state.lease_begins(pick % len(CARDS), draw(TENANTS), size(), draw(EXCLUSIVITY), is_parkable)
            case "acquire":
                terms = draw(CANDIDATES), draw(EXCLUSIVITY), draw(SUBMIT_BYTES), is_parkable, draw(HOLDS_NS)
                state.acquire_waits(draw(TENANTS), size(), *terms)
            case "end" if state.leases:
                state.lease_ends(pick)
            case "return" if any(lease.park is not None for _, lease in state.leases):
                state.session_waits_to_return(pick, random.getrandbits(16), draw(RETURN_HOLDS_NS))
            case "leave" if len(state.queue):
                state.waiter_leaves(pick)
            case "drain":
                state.card_is_drained_or_admitted(pick % len(CARDS))
            case "pass":
                state.holds_end(draw(STEPS_NS))
