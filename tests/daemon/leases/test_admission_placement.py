"""Placement and queueing: which card a lease gets, who waits, and who may not be passed."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.devices import Card, PlacementOrder
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    FreeRequested,
    HoldTimerFired,
    MoveRequested,
    ParkSession,
    ReclaimFailed,
    ReclaimProved,
    RegionProved,
    RequestDenied,
    RequesterGone,
    SessionImaged,
    SessionParked,
    SpawnWorker,
    WaitTimerFired,
    WorkerExited,
)
from gpulease.daemon.leases.model import Cause, LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.opcodes import Exclusivity

from .scenario import S, Scenario, card, denied, end, kinds, one, placed


def test_the_card_with_the_most_free_bytes_is_chosen_and_the_lowest_index_at_a_tie() -> None:
    s = Scenario(card(1), card(0), card(2, 120))
    assert placed(s.acquire(1, 20)) == [(1, "GPU-c")]
    assert placed(s.acquire(2, 20)) == [(2, "GPU-a")]
    assert placed(s.acquire(3, 20)) == [(3, "GPU-b")]


def packing(*cards: Card) -> Scenario:
    return Scenario(*cards, order=PlacementOrder.PACK)


def test_packing_chooses_the_fullest_card_that_fits_and_the_lowest_index_at_a_tie() -> None:
    s = packing(card(1), card(0), card(2, 120))
    assert placed(s.acquire(1, 20)) == [(1, "GPU-a")]
    assert placed(s.acquire(2, 20)) == [(2, "GPU-a")]
    assert placed(s.acquire(3, 70)) == [(3, "GPU-b")], "it does not fit the fullest one"
    assert placed(s.acquire(4, 40)) == [(4, "GPU-a")], "exactly what is left"
    assert placed(s.acquire(5, 100)) == [(5, "GPU-c")]


@pytest.mark.parametrize(("order", "is_whole_card_left"), [(PlacementOrder.SPREAD, False), (PlacementOrder.PACK, True)])
def test_packing_leaves_whole_cards_to_those_who_need_one(order: PlacementOrder, is_whole_card_left: bool) -> None:
    s = Scenario(card(0), card(1), order=order)
    s.active(1, 20)
    s.active(2, 20)
    assert bool(placed(s.acquire(3, 100))) is is_whole_card_left
    s = Scenario(card(0), card(1), order=order)
    s.active(1, 20)
    s.active(2, 20)
    alone = s.acquire(3, 10, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)
    assert bool(placed(alone)) is is_whole_card_left


def test_packing_never_puts_a_lease_beside_one_that_has_its_card_alone() -> None:
    s = packing(card(0), card(1))
    s.active(1, 90, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)
    assert placed(s.acquire(2, 5)) == [(2, "GPU-b")]
    assert "every card has other leases" in denied(s.acquire(3, 5, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)).message


def test_packing_prefers_the_smaller_of_two_empty_cards() -> None:
    """A whole large card is kept for a lease that fits no other, also from one that will be alone."""
    s = packing(card(0, 500), card(1))
    assert placed(s.acquire(1, 50, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)) == [(1, "GPU-b")]
    assert placed(s.acquire(2, 50)) == [(2, "GPU-a")]


def test_a_named_card_is_taken_whatever_the_order() -> None:
    s = packing(card(0), card(1))
    s.active(1, 20)
    assert placed(s.acquire(2, 20, selector="1")) == [(2, "GPU-b")]


@pytest.mark.parametrize(("order", "uuid"), [(PlacementOrder.SPREAD, "GPU-a"), (PlacementOrder.PACK, "GPU-b")])
def test_waiters_are_placed_in_the_same_order(order: PlacementOrder, uuid: str) -> None:
    s = Scenario(card(0), card(1), order=order)
    s.active(1, 50)
    s.active(2, 60, selector="1")
    s.acquire(3, 100, tenant="bob", wait_ms=5000)
    assert placed(s.acquire(4, 20, tenant="cid", wait_ms=5000)) == [], "it would fit, but 3 was first"
    assert placed(s.do(RequesterGone(1003))) == [(4, uuid)]


@pytest.mark.parametrize("selector", ["GPU-b", "gpu-B", "b", "B", "1"])
def test_a_card_can_be_named(selector: str) -> None:
    assert placed(Scenario(card(0), card(1)).acquire(1, selector=selector)) == [(1, "GPU-b")]


@pytest.mark.parametrize("selector", ["", "GPU-", "01", "-1", "2", "GPU-bb", "x" * 5000])
def test_an_unknown_card_is_refused_with_those_there_are(selector: str) -> None:
    denial = denied(Scenario(card(0), card(1)).acquire(1, selector=selector))
    assert denial.reason is DenialReason.INVALID_REQUEST
    assert "GPU-a" in denial.message
    assert "GPU-b" in denial.message
    assert len(denial.message) < 300


def test_the_overhead_is_charged_to_the_node_and_the_tenant_gets_all_it_asked_for() -> None:
    s = Scenario()
    assert one(s.acquire(1, 100), SpawnWorker).terms.session_bytes == 100
    assert s.card().free_bytes == 0
    assert s.card().available_bytes == 0


def test_a_request_that_could_never_fit_is_refused_at_once_with_the_numbers() -> None:
    s = Scenario()
    s.active(1, 20)
    denial = denied(s.acquire(2, 101, wait_ms=1000))
    assert denial.reason is DenialReason.CAPACITY_EXCEEDED
    for number in ("101 bytes", "100 bytes", "70 bytes"):
        assert number in denial.message


def test_no_room_and_no_wait_is_refused_with_the_numbers() -> None:
    s = Scenario()
    s.active(1, 50)
    denial = denied(s.acquire(2, 50))
    assert denial.reason is DenialReason.CAPACITY_EXCEEDED
    assert "40 bytes" in denial.message


def test_a_node_without_cards_refuses() -> None:
    table = LeaseTable(())
    assert table.cards() == ()
    s = Scenario()
    s.table = table
    assert denied(s.acquire(1)).reason is DenialReason.CAPACITY_EXCEEDED


def test_two_cards_of_the_same_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="same uuid"):
        LeaseTable((card(0), Card("a", 1, "x", 1, 1)))
    with pytest.raises(ValueError, match="same index"):
        LeaseTable((card(0), Card("b", 0, "x", 1, 1)))
    with pytest.raises(ValueError, match="negative"):
        Card("b", 0, "x", -1, 1)


def test_device_exclusivity_needs_an_empty_card_and_keeps_it_empty() -> None:
    s = Scenario()
    s.active(1, 10)
    refused = denied(s.acquire(2, 10, exclusivity=Exclusivity.DEVICE_EXCLUSIVE))
    assert "every card has other leases" in refused.message
    end(s, 1)
    s.active(3, 10, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)
    assert s.card().is_exclusive
    assert s.card().available_bytes == 0
    assert "exclusive use of the cards" in denied(s.acquire(4, 10)).message
    s.do(FreeRequested(50, 3, "ann"))
    assert RequestDenied in kinds(s.acquire(5, 10)), "it lives until its bytes are proved back"
    s.gone(3)
    assert placed(s.acquire(6, 10))


def test_a_fenced_lease_keeps_device_exclusive_ones_off() -> None:
    s = Scenario()
    s.active(1, 10)
    s.do(FreeRequested(50, 1, "ann"))
    s.at(30)
    s.do(ReclaimFailed(1, "x"))
    assert RequestDenied in kinds(s.acquire(2, 10, exclusivity=Exclusivity.DEVICE_EXCLUSIVE))
    assert placed(s.acquire(3, 10))


def test_partition_exclusivity_needs_a_partition() -> None:
    s = Scenario(card(0))
    denial = denied(s.acquire(1, exclusivity=Exclusivity.PARTITION_EXCLUSIVE))
    assert denial.reason is DenialReason.UNSUPPORTED
    assert "the device is not a MIG partition" in denial.message
    s = Scenario(card(0, 500), card(1, is_partition=True))
    assert placed(s.acquire(1, exclusivity=Exclusivity.PARTITION_EXCLUSIVE)) == [(1, "GPU-b")]
    assert RequestDenied in kinds(s.acquire(2, selector="1")), "a partition owned is not shared"


def test_session_exclusive_is_placed_like_shared() -> None:
    s = Scenario()
    s.active(1, exclusivity=Exclusivity.SESSION_EXCLUSIVE)
    s.active(2)
    s.active(3, exclusivity=Exclusivity.SESSION_EXCLUSIVE)


def test_a_waiter_is_placed_as_soon_as_the_bytes_are_proved_back() -> None:
    s = Scenario()
    s.active(1, 100)
    armed = [ArmTimer(WaitTimerFired(1002), s.now_ns + 5 * S), ArmTimer(HoldTimerFired(), s.now_ns + 10 * S)]
    assert s.acquire(2, 50, wait_ms=5000) == armed
    assert [(w.request, w.lease_id, w.size_bytes) for w in s.table.waiting()] == [(1002, 2, 50)]
    s.do(FreeRequested(50, 1, "ann"))
    assert placed(s.reaped(1)) == []
    assert placed(s.do(ReclaimProved(1))) == [(2, "GPU-a")]
    assert s.table.waiting() == ()


def test_a_waiter_is_refused_when_its_time_is_over() -> None:
    s = Scenario()
    s.active(1, 100)
    s.acquire(2, 50, wait_ms=5000)
    assert s.at(4).do(WaitTimerFired(1002)) == [ArmTimer(WaitTimerFired(1002), s.now_ns + 1 * S)], "too early"
    denial = denied(s.at(1).do(WaitTimerFired(1002)))
    assert denial.reason is DenialReason.CAPACITY_EXCEEDED
    assert "after waiting 5 s" in denial.message
    assert s.do(WaitTimerFired(1002)) == []


def test_a_waiter_past_its_time_is_not_placed_though_its_timer_is_late() -> None:
    s = Scenario()
    s.active(1, 100)
    s.acquire(2, 50, wait_ms=5000)
    s.acquire(3, 50, wait_ms=50_000)
    effects = end(s.at(6), 1)
    assert one(effects, RequestDenied).request == 1002
    assert placed(effects) == [(3, "GPU-a")]


def test_no_waiter_is_passed_on_the_same_card() -> None:
    s = Scenario()
    s.active(1, 50)
    s.acquire(2, 90, tenant="bob", wait_ms=5000)
    assert placed(s.acquire(3, 10, wait_ms=5000)) == [], "it would fit, but 2 was first"
    assert "earlier requests" in denied(s.acquire(4, 10)).message
    assert placed(end(s, 1)) == [(2, "GPU-a")]
    assert [waiter.lease_id for waiter in s.table.waiting()] == [3]
    s.do(RequesterGone(1002))  # 2 is placed, but not granted yet.
    assert placed(s.gone(2)) == [(3, "GPU-a")]


def test_a_waiter_for_another_card_may_pass() -> None:
    s = Scenario(card(0), card(1))
    s.active(1, 50, selector="0")
    s.acquire(2, 80, tenant="bob", selector="0", wait_ms=5000)
    assert placed(s.acquire(3, 10)) == [(3, "GPU-b")], "any card will do, and 1 is not awaited"
    assert placed(s.acquire(4, 10, selector="1")) == [(4, "GPU-b")]
    assert RequestDenied in kinds(s.acquire(5, 10, selector="0"))


def test_a_waiter_blocks_only_cards_that_could_serve_it() -> None:
    s = Scenario(card(0), card(1, 60))
    s.active(1, 50, selector="0")
    s.acquire(2, 80, tenant="bob", wait_ms=5000)
    assert placed(s.acquire(3, 10)) == [(3, "GPU-b")]


def test_a_waiter_that_leaves_unblocks_those_behind_it() -> None:
    s = Scenario()
    s.active(1, 50)
    s.acquire(2, 80, tenant="bob", wait_ms=5000)
    s.acquire(3, 10, wait_ms=5000)
    assert placed(s.do(RequesterGone(1002))) == [(3, "GPU-a")]
    s.acquire(4, 80, tenant="bob", wait_ms=5000)
    s.acquire(5, 5, wait_ms=9000)
    effects = s.at(5).do(WaitTimerFired(1004))
    assert placed(effects) == [(5, "GPU-a")]


def test_several_waiters_can_be_served_by_one_return() -> None:
    s = Scenario()
    s.active(1, 100)
    for lease_id in (2, 3, 4, 5):
        s.acquire(lease_id, 25, wait_ms=5000)
    assert placed(end(s, 1)) == [(2, "GPU-a"), (3, "GPU-a"), (4, "GPU-a")]


@pytest.mark.parametrize("lease_id", [0, -1, 1 << 128])
def test_a_lease_id_is_a_u128_above_zero(lease_id: int) -> None:
    assert denied(Scenario().acquire(lease_id)).reason is DenialReason.INVALID_REQUEST


def test_a_lease_id_is_used_once() -> None:
    s = Scenario()
    s.active(1, 90)
    s.acquire(2, 90, wait_ms=5000)
    for lease_id in (1, 2):
        s.requests += 1
        again = s.do(AcquireRequested(s.requests, "ann", lease_id, LeaseTerms(1, 1000)))
        assert denied(again).reason is DenialReason.INVALID_REQUEST


@pytest.mark.parametrize("size", [0, -5])
def test_a_lease_of_nothing_is_refused(size: int) -> None:
    assert denied(Scenario().acquire(1, size)).reason is DenialReason.INVALID_REQUEST


def test_a_negative_wait_is_refused() -> None:
    assert denied(Scenario().acquire(1, wait_ms=-1)).reason is DenialReason.INVALID_REQUEST


def test_every_limit_is_named_when_it_is_reached() -> None:
    limits = CoreLimits(max_leases=3, max_leases_per_tenant=2, max_waiting=1, max_wait_s=10)
    s = Scenario(limits=limits)
    assert "max_wait_s" in denied(s.acquire(1, wait_ms=10_001)).message
    s.active(1, 10)
    s.active(2, 10)
    assert "max_leases_per_tenant" in denied(s.acquire(3, 10)).message
    s.acquire(3, 100, tenant="bob", wait_ms=5000)
    over = denied(s.acquire(4, 10, tenant="cid"))
    assert over.reason is DenialReason.LIMIT
    assert "max_leases" in over.message


def test_the_queue_has_limits_too() -> None:
    s = Scenario(limits=CoreLimits(max_waiting=2, max_waiting_per_tenant=1))
    s.active(1, 100)
    s.acquire(2, 10, wait_ms=5000)
    assert "max_waiting_per_tenant" in denied(s.acquire(3, 10, wait_ms=5000)).message
    s.acquire(4, 10, tenant="bob", wait_ms=5000)
    assert "max_waiting)" in denied(s.acquire(5, 10, tenant="cid", wait_ms=5000)).message


def with_cold_session() -> Scenario:
    """Return a table of two cards. The session of ann's lease 1 on the first card is parked cold."""
    s = Scenario(card(capacity=200), card(1, capacity=200), limits=CoreLimits(park_memory_bytes=16 << 20))
    s.active(1, 60, park_idle_ms=0, selector="0")
    number = one(s.do(MoveRequested(1, 1, "root", None, True)), ParkSession).number
    s.do(SessionParked(1, number, 60))
    s.do(RegionProved(1))
    s.do(SessionImaged(1, number, 1000))
    for context in s.table.warming():
        s.do(WorkerExited(context.warm_id, "it was killed"))
        s.do(ReclaimProved(context.warm_id))
    return s


def test_a_cold_session_that_changes_its_card_leaves_it_to_a_lease_that_must_be_alone() -> None:
    s = with_cold_session()
    alone = s.acquire(2, 50, tenant="bob", wait_ms=9000, exclusivity=Exclusivity.DEVICE_EXCLUSIVE, selector="0")
    assert placed(alone) == []
    assert placed(s.do(MoveRequested(2, 1, "root", "1", True))) == [(2, "GPU-a")]


def test_a_tenant_whose_cold_session_changes_its_card_holds_none_back_there() -> None:
    s = with_cold_session()
    s.active(2, 100, tenant="bob", selector="1")
    s.acquire(3, 150, tenant="ann", selector="1", wait_ms=9000)
    assert placed(s.acquire(4, 40, tenant="cid", selector="1", wait_ms=9000)) == []
    assert placed(s.do(MoveRequested(2, 1, "root", "1", True))) == [(4, "GPU-b")]


def test_the_oldest_ended_lease_is_forgotten_first() -> None:
    s = Scenario(limits=CoreLimits(max_tombstones=2))
    for lease_id in (1, 2, 3):
        s.active(lease_id)
        end(s, lease_id)
    assert s.table.get(1) is None
    assert s.lease(2).lease_id == 2
    assert denied(s.do(FreeRequested(50, 1, "ann"))).reason is DenialReason.NOT_FOUND


def test_a_limit_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_leases must be a whole number of at least 1, not 0"):
        CoreLimits(max_leases=0)
    with pytest.raises(ValueError, match="grace"):
        CoreLimits(grace_ms={Cause.FREED: -1})
