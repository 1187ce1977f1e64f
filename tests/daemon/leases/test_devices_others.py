"""Memory held by others: booked once it lasts, off the capacity, and no obstacle to a dead worker's proof."""

from typing import Final

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.devices import SETTLE_NS, Card, Growth
from gpulease.daemon.leases.events import (
    CapacityChanged,
    CardPolled,
    Effect,
    FreeRequested,
    LeaseEnded,
    PoolTimerFired,
    ReclaimProved,
    WorkerExited,
    WorkerReady,
    WorkerUnlisted,
)
from gpulease.daemon.leases.model import Cause, LeaseState, WarmState
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.warm_pool import FIRST_BACK_OFF_S

from .scenario import OVERHEAD, S, Scenario, denied, kinds, one, placed

SETTLE_S: Final = SETTLE_NS / S
SLACK: Final = 8


class Node(Scenario):
    """A card of 110 bytes with contexts of 10; one look found no others."""

    def __init__(
        self, *, warm: int = 0, spare: int = 0, slack: int = 0, is_looked_at: bool = True, has_others: bool = False
    ) -> None:
        super().__init__()
        card = Card("GPU-a", 0, "Test Card", 110, OVERHEAD, spare_bytes=spare, slack_bytes=slack, has_others=has_others)
        self.table = LeaseTable((card,), CoreLimits(), warm)
        self.fill()
        if is_looked_at:
            self.poll(0)

    def fill(self) -> None:
        """Let the pool make its contexts."""
        self.do(PoolTimerFired())
        while wanted := [one.warm_id for one in self.table.warming() if one.state is WarmState.WARMING]:
            self.do(WorkerReady(wanted[0]))

    def poll(self, unowned: int, outside: int = 0) -> list[Effect]:
        return self.do(CardPolled("GPU-a", unowned, outside, self.now_ns))

    def settled(self, unowned: int, outside: int = 0) -> list[Effect]:
        """Return two looks that show the same, far enough apart."""
        self.poll(unowned, outside)
        return self.at(SETTLE_S).poll(unowned, outside)

    def dead(self, lease_id: int) -> int:
        """Free a lease and reap its worker; return the time."""
        self.do(FreeRequested(50, lease_id, "ann"))
        self.reaped(lease_id)
        return self.now_ns

    def unlisted(self, lease_id: int, unowned: int, since_ns: int, least: int | None = None) -> list[Effect]:
        """Report that the card does not list the lease's process, with so many unowned bytes."""
        least = unowned if least is None else least
        return self.do(WorkerUnlisted(lease_id, "GPU-a", unowned, least, since_ns, self.now_ns))

    @property
    def figures(self) -> tuple[int, int, int]:
        """Return the capacity and the bytes booked as unowned and as outside."""
        card = self.card()
        return card.capacity_bytes, card.unowned_bytes, card.outside_bytes


# --- a dead worker's bytes ---


def test_a_dead_workers_bytes_are_granted_only_when_they_are_nobodys_no_more() -> None:
    """A dead process's bytes stay in the card's sum for a while after it has left the card's list."""
    s = Node()
    s.active(1, 90)
    since = s.dead(1)
    assert s.unlisted(1, 100, since) == []
    assert denied(s.acquire(2, 20)).reason is DenialReason.CAPACITY_EXCEEDED
    s.at(0.074)
    assert one(s.unlisted(1, 0, since), LeaseEnded).lease.state is LeaseState.TORNDOWN
    assert placed(s.acquire(3, 100)) == [(3, "GPU-a")]
    assert s.figures == (110, 0, 0)


def test_bytes_that_stay_are_the_nodes_and_the_slice_is_not_fenced() -> None:
    """A managed variable does this: the driver keeps 15 bytes as long as any context lives."""
    s = Node()
    s.active(1, 60)
    s.active(2, 10)
    since = s.dead(1)
    s.unlisted(1, 15, since)
    assert s.at(SETTLE_S - 0.1).unlisted(1, 15, since) == []
    effects = s.at(0.1).unlisted(1, 15, since)
    assert kinds(effects)[0] is CapacityChanged, "it is booked before anything is let go"
    assert one(effects, LeaseEnded).lease.state is LeaseState.TORNDOWN
    assert s.figures == (95, 15, 0)
    assert s.card().available_bytes == 95 - 20 - OVERHEAD


def test_bytes_booked_for_a_proof_are_those_that_lasted() -> None:
    """Another dying worker's bytes are in the last look and not in the first."""
    s = Node()
    s.active(1, 20)
    since = s.dead(1)
    s.at(SETTLE_S).unlisted(1, 60, since, least=15)
    assert s.figures == (95, 15, 0)
    assert s.lease(1).state is LeaseState.TORNDOWN


def test_a_worker_that_was_not_reaped_is_not_proved_gone_whatever_the_card_lists() -> None:
    s = Node()
    s.active(1, 20)
    s.do(FreeRequested(50, 1, "ann"))
    s.at(10).unlisted(1, 0, s.now_ns)
    assert s.lease(1).state is LeaseState.DRAINING


def test_a_warm_contexts_bytes_are_proved_by_the_same_rules() -> None:
    s = Node(warm=1)
    (context,) = s.table.warming()
    s.do(WorkerExited(context.warm_id, "it died"))
    since = s.now_ns
    s.unlisted(context.warm_id, 15, since)
    assert len(s.table.warming()) == 1
    s.at(SETTLE_S).unlisted(context.warm_id, 15, since)
    s.at(FIRST_BACK_OFF_S)
    s.fill()
    assert s.figures == (95, 15, 0)
    assert s.card().warm_contexts == 1, "the pool is full again"


# --- what others take and give back ---


def test_lasting_bytes_are_booked_and_released_again() -> None:
    s = Node()
    s.poll(15)
    assert s.figures == (110, 0, 0)
    changed = one(s.at(SETTLE_S).poll(20), CapacityChanged)
    assert changed.is_less
    assert s.figures == (95, 15, 0), "the least of what was seen"
    s.poll(0)
    assert s.figures == (95, 15, 0)
    changed = one(s.at(SETTLE_S).poll(3), CapacityChanged)
    assert not changed.is_less
    assert s.figures == (107, 3, 0), "the most of what was seen"


def test_passing_bytes_are_not_booked() -> None:
    s = Node()
    for unowned in (15, 0, 90, 0, 15, 0):
        s.at(0.9 * SETTLE_S).poll(unowned)
        assert s.figures == (110, 0, 0)


def test_other_programs_bytes_are_off_the_capacity_at_once() -> None:
    s = Node()
    s.poll(0, outside=50)
    assert s.figures == (60, 0, 50)
    assert denied(s.acquire(1, 51)).reason is DenialReason.CAPACITY_EXCEEDED
    # Such a program ends: its bytes are nobody's for a moment, and can't be granted meanwhile.
    s.poll(50)
    assert s.card().capacity_bytes == 60
    s.at(0.1).poll(0)
    s.at(SETTLE_S).poll(0)
    assert s.figures == (110, 0, 0)


def test_the_first_look_is_booked_at_once() -> None:
    """A daemon that comes back does not know its predecessor's bookings."""
    s = Node(is_looked_at=False)
    s.poll(15, outside=20)
    assert s.figures == (75, 15, 20)


def test_a_look_from_before_the_last_proof_counts_for_nothing() -> None:
    s = Node()
    s.settled(60)
    s.poll(0)
    s.active(1, 30)
    early_ns = s.now_ns + SETTLE_NS
    s.at(SETTLE_S + 0.01)
    # While 40 bytes linger, it is proved: as many are booked already.
    s.unlisted(1, 40, s.dead(1))
    assert s.lease(1).state is LeaseState.TORNDOWN
    assert s.do(CardPolled("GPU-a", 0, 0, early_ns)) == []
    s.poll(40)
    assert s.card().capacity_bytes == 70


def test_waiters_are_served_when_others_leave() -> None:
    s = Node()
    s.settled(60)
    assert s.acquire(1, 60, wait_ms=60_000, ttl_ms=1000) != []
    assert s.table.get(1) is None
    s.poll(0)
    assert placed(s.at(SETTLE_S).poll(0)) == [(1, "GPU-a")]


def test_the_pool_gives_way_to_others_and_comes_back() -> None:
    s = Node(warm=3)
    s.active(1, 60)
    s.at(1)
    s.fill()
    assert s.card().warm_contexts == 3
    s.poll(0, outside=25)
    gone = [context.warm_id for context in s.table.warming() if context.state is WarmState.DROPPING]
    assert len(gone) == 2
    for warm_id in gone:
        s.do(WorkerExited(warm_id, "it was killed"))
        s.do(ReclaimProved(warm_id))
    assert s.at(10).card().warm_contexts == 1
    s.poll(0)
    s.at(SETTLE_S).poll(0)
    s.fill()
    assert s.card().warm_contexts == 3


def test_a_lease_that_waits_for_room_which_others_take_is_refused() -> None:
    s = Node(warm=2)
    s.acquire(1, 100)
    effects = s.poll(0, outside=20)
    assert denied(effects).reason is DenialReason.SESSION_FAILED
    s.gone(1)
    assert s.card().held_bytes == 0


def test_leases_keep_what_they_were_granted() -> None:
    s = Node()
    s.active(1, 90)
    s.poll(0, outside=60)
    assert s.lease(1).state is LeaseState.ACTIVE
    assert (s.card().free_bytes, s.card().available_bytes) == (0, 0)
    s.do(FreeRequested(50, 1, "ann"))
    s.gone(1)
    assert s.card().available_bytes == 50 - OVERHEAD


def test_spare_bytes_are_taken_first() -> None:
    s = Node(spare=40)
    s.settled(15, outside=20)
    assert s.figures == (110, 15, 20)
    s.poll(15, outside=30)
    assert s.figures == (105, 15, 30)


# --- slack ---


def test_bytes_within_the_slack_are_not_booked() -> None:
    s = Node(slack=SLACK)
    s.settled(SLACK)
    assert s.figures == (110, 0, 0)
    s.active(1)
    since = s.dead(1)
    s.unlisted(1, SLACK, since)
    assert s.lease(1).cause is Cause.FREED
    assert s.lease(1).state is LeaseState.TORNDOWN


@pytest.mark.parametrize("seen", [SLACK + 1, SLACK, SLACK // 2 + 1])
def test_a_figure_near_the_slack_is_not_booked_and_released_in_turns(seen: int) -> None:
    growth = Growth(SLACK, settles=False)
    growth.poll(SLACK + 1, 0)
    assert growth.booked_bytes == SLACK + 1
    growth.poll(seen, 1)
    growth.poll(seen, SETTLE_NS + 1)
    assert growth.booked_bytes == SLACK + 1
    growth.poll(SLACK // 2, SETTLE_NS + 2)
    growth.poll(SLACK // 2, 2 * SETTLE_NS + 2)
    assert growth.booked_bytes == 0


# --- the first poll ---


def test_nothing_is_granted_before_the_first_poll() -> None:
    s = Node(warm=1, is_looked_at=False, has_others=True)
    denial = denied(s.acquire(1, 20))
    assert (denial.reason, "could not be read yet" in denial.message) == (DenialReason.CAPACITY_EXCEEDED, True)
    assert s.acquire(2, 20, wait_ms=5000) != []
    assert (s.table.live_ids(), s.card().available_bytes, s.card().warm_contexts) == ((), 0, 0)
    effects = s.poll(0, 60)
    assert placed(effects) == [(2, "GPU-a")]
    assert s.figures == (50, 0, 60)
    assert denied(s.acquire(3, 20)).reason is DenialReason.CAPACITY_EXCEEDED


def test_a_first_poll_that_finds_no_others_changes_no_capacity() -> None:
    s = Node(is_looked_at=False, has_others=True)
    s.acquire(2, 100, wait_ms=5000)
    effects = s.poll(0)
    assert placed(effects) == [(2, "GPU-a")]
    assert CapacityChanged not in kinds(effects)


def test_a_card_that_others_cant_use_needs_no_poll() -> None:
    assert placed(Node(is_looked_at=False).acquire(1, 100)) == [(1, "GPU-a")]


def test_the_first_poll_counts_even_if_a_proof_overtook_it() -> None:
    """It was read before the proof of a worker, and arrives after it: the others that it shows are still there."""
    s = Node(is_looked_at=False)
    s.active(1, 90)
    since = s.dead(1)
    polled_ns = s.now_ns
    s.at(0.001)
    assert one(s.unlisted(1, 0, since), LeaseEnded).lease.state is LeaseState.TORNDOWN
    s.do(CardPolled("GPU-a", 0, 60, polled_ns))
    assert s.figures == (50, 0, 60)
    assert denied(s.acquire(2, 50)).reason is DenialReason.CAPACITY_EXCEEDED


def test_an_overtaken_first_poll_gives_back_nothing_that_a_proof_has_booked() -> None:
    s = Node(is_looked_at=False)
    s.active(1, 60)
    since = s.dead(1)
    s.at(SETTLE_S).unlisted(1, 15, since)
    s.do(CardPolled("GPU-a", 0, 10, since))
    assert s.figures == (85, 15, 10)
