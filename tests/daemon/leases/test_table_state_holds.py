"""Holds: how long a waiter may keep others off free bytes, and when it may not at all."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    ArmTimer,
    FreeRequested,
    HoldTimerFired,
    RequestDenied,
    RequesterGone,
    ShutdownRequested,
    WaitTimerFired,
)
from gpulease.daemon.leases.invariants import InvariantBroken
from gpulease.daemon.leases.quotas import CoreLimits

from .scenario import S, Scenario, armed, card, denied, end, kinds, one, placed

HOUR_MS = 3_600_000


def in_the_way(limits: CoreLimits | None = None) -> Scenario:
    """Return a table where ann holds half the card for long, and bob waits for all of it."""
    s = Scenario(limits=limits)
    s.active(1, 40, ttl_ms=HOUR_MS)
    s.acquire(2, 100, tenant="bob", wait_ms=HOUR_MS)
    return s


def held_back(s: Scenario, lease_id: int, tenant: str = "cid") -> bool:
    """Return whether a newcomer is refused free bytes; one that is placed gives them back."""
    effects = s.acquire(lease_id, 10, tenant=tenant)
    if placed(effects):
        s.do(RequesterGone(lease_id + 1000))
        s.gone(lease_id)
        return False
    denial = denied(effects)
    assert denial.reason is DenialReason.CAPACITY_EXCEEDED
    assert "earlier requests" in denial.message
    return True


# --- Who waits for its own leases. ------------------------------------------------


def test_a_waiter_whose_tenant_has_a_sliver_holds_nobody_back() -> None:
    s = Scenario()
    s.active(1, 1, tenant="bob", ttl_ms=HOUR_MS)
    s.acquire(2, 100, tenant="bob", wait_ms=HOUR_MS)
    assert not held_back(s, 3)
    assert placed(s.acquire(4, 10, tenant="cid", wait_ms=1000)) == [(4, "GPU-a")]
    assert [waiter.lease_id for waiter in s.table.waiting()] == [2]


def test_an_own_lease_on_any_card_that_could_serve_the_waiter_counts_and_on_others_does_not() -> None:
    s = Scenario(card(0), card(1))
    s.active(1, 1, tenant="bob", selector="1")
    s.active(2, 40, selector="0")
    s.acquire(3, 100, tenant="bob", wait_ms=5000)
    assert not held_back(s, 4), "bob could free what it has on the other card"
    s.acquire(5, 100, tenant="bob", selector="0", wait_ms=5000)
    effects = s.acquire(6, 10, tenant="cid", selector="0")
    assert "earlier requests" in denied(effects).message, "what bob has on the other card does not help it here"


def test_an_own_lease_that_is_being_torn_down_still_counts_and_after_it_the_waiter_holds_others_back() -> None:
    s = Scenario()
    s.active(1, 40, ttl_ms=HOUR_MS)
    s.active(2, 10, tenant="bob")
    s.acquire(3, 60, tenant="bob", wait_ms=5000)
    s.do(FreeRequested(50, 2, "bob"))
    assert not held_back(s, 4)
    assert placed(s.gone(2)) == []
    assert held_back(s, 5)
    assert placed(end(s, 1)) == [(3, "GPU-a")]


def test_a_tenant_whose_first_waiter_is_placed_holds_nobody_back_with_its_second() -> None:
    s = Scenario()
    s.active(1, 60, ttl_ms=HOUR_MS)
    s.active(2, 20, ttl_ms=HOUR_MS)
    s.acquire(3, 20, tenant="bob", wait_ms=HOUR_MS)
    s.acquire(4, 100, tenant="bob", wait_ms=HOUR_MS)
    s.acquire(5, 10, tenant="cid", wait_ms=HOUR_MS)
    assert placed(end(s, 1)) == [(3, "GPU-a"), (5, "GPU-a")]


# --- How long. --------------------------------------------------------------------


def test_newcomers_are_held_back_for_ten_seconds_and_no_longer() -> None:
    s = in_the_way()
    assert held_back(s, 3)
    assert held_back(s.at(9.999), 4)
    assert not held_back(s.at(0.001), 5)
    assert not held_back(s, 6, tenant="bob"), "its own newcomers neither"


def test_the_time_to_hold_back_can_be_set() -> None:
    s = in_the_way(CoreLimits(max_hold_back_s=2))
    assert held_back(s.at(1.999), 3)
    assert not held_back(s.at(0.001), 4)
    with pytest.raises(ValueError, match="max_hold_back_s must be a whole number of at least 1, not 0"):
        CoreLimits(max_hold_back_s=0)


def test_waiters_behind_go_on_when_the_hold_ends_though_no_bytes_came_back() -> None:
    s = Scenario()
    s.active(1, 40, ttl_ms=HOUR_MS)
    effects = s.acquire(2, 100, tenant="bob", wait_ms=HOUR_MS)
    assert armed(effects, HoldTimerFired).due_ns == s.now_ns + 10 * S
    assert kinds(s.at(5).acquire(3, 20, tenant="cid", wait_ms=HOUR_MS)) == [WaitTimerFired], "the timer is armed"
    assert s.do(HoldTimerFired()) == [ArmTimer(HoldTimerFired(), s.now_ns + 5 * S)], "too early"
    effects = s.at(5).do(HoldTimerFired())
    assert placed(effects) == [(3, "GPU-a")]
    assert HoldTimerFired not in kinds(effects), "nobody is left who holds others back"
    assert s.do(HoldTimerFired()) == []


def test_a_late_timer_helps_no_newcomer_past_the_queue() -> None:
    s = in_the_way()
    s.acquire(3, 40, tenant="cid", wait_ms=HOUR_MS)
    effects = s.at(10).acquire(4, 40, tenant="dan")
    assert placed(effects) == [(3, "GPU-a")]
    assert one(effects, RequestDenied).request == 1004


def test_a_waiter_whose_hold_is_over_keeps_its_place() -> None:
    s = in_the_way()
    s.acquire(3, 100, tenant="cid", wait_ms=HOUR_MS)
    s.at(20).do(HoldTimerFired())
    assert not held_back(s, 4)
    assert placed(end(s, 1)) == [(2, "GPU-a")]
    assert placed(end(s, 2)) == [(3, "GPU-a")]


def test_the_timer_is_for_the_first_hold_to_end() -> None:
    s = in_the_way()
    begun_ns = s.now_ns
    s.at(1).do(RequesterGone(1002))
    cid = s.at(1).acquire(3, 100, tenant="cid", wait_ms=HOUR_MS)
    assert armed(cid, HoldTimerFired).due_ns == begun_ns + 12 * S
    bob = s.at(1).acquire(4, 100, tenant="bob", wait_ms=HOUR_MS)
    assert armed(bob, HoldTimerFired).due_ns == begun_ns + 10 * S, "bob's time began with its first wait"
    s.acquire(5, 10, tenant="dan", wait_ms=HOUR_MS)
    assert s.at(7).do(HoldTimerFired()) == [ArmTimer(HoldTimerFired(), begun_ns + 12 * S)], "cid still holds dan back"
    assert placed(s.at(2).do(HoldTimerFired())) == [(5, "GPU-a")]


def test_a_hold_timer_after_a_shutdown_is_harmless() -> None:
    s = in_the_way()
    s.do(ShutdownRequested())
    assert s.at(10).do(HoldTimerFired()) == []


# --- Per tenant. ------------------------------------------------------------------


def test_leaving_and_joining_again_gains_no_time() -> None:
    s = in_the_way()
    s.at(9).do(RequesterGone(1002))
    assert not held_back(s, 3)
    s.acquire(4, 100, tenant="bob", wait_ms=HOUR_MS)
    assert held_back(s.at(0.999), 5)
    assert not held_back(s.at(0.001), 6)
    s.do(RequesterGone(1004))
    assert kinds(s.acquire(7, 100, tenant="bob", wait_ms=HOUR_MS)) == [WaitTimerFired]
    assert not held_back(s, 8)


def test_many_waiters_of_one_tenant_hold_others_back_no_longer_than_one() -> None:
    s = in_the_way()
    for lease_id in range(3, 8):
        s.at(1.5).acquire(lease_id, 100, tenant="bob", wait_ms=HOUR_MS)
    assert held_back(s.at(2.499), 10)
    assert not held_back(s.at(0.001), 11)


def test_a_tenant_may_hold_others_back_again_after_ten_times_as_long() -> None:
    s = in_the_way()
    s.at(99.999).acquire(3, 100, tenant="bob", wait_ms=HOUR_MS)
    assert not held_back(s, 4)
    s.at(0.001).acquire(5, 100, tenant="bob", wait_ms=HOUR_MS)
    assert held_back(s, 6)
    s.do(RequesterGone(1005))
    assert not held_back(s, 7), "those who waited already do not hold others back anew"


def test_every_tenant_has_a_time_of_its_own() -> None:
    s = in_the_way()
    s.at(5).acquire(3, 100, tenant="cid", wait_ms=HOUR_MS)
    assert held_back(s.at(9), 4, tenant="dan")
    assert not held_back(s.at(1), 5, tenant="dan")


def test_remembered_terms_are_bounded_and_a_tenant_without_room_holds_nobody_back() -> None:
    s = in_the_way(CoreLimits(max_waiting=3))
    for lease_id in (3, 4, 5, 6):
        s.acquire(lease_id, 100, tenant=f"tenant {lease_id}", wait_ms=HOUR_MS)
        s.do(RequesterGone(lease_id + 1000))
    assert set(s.table._store.queue.terms.begun_ns) == {"bob", "tenant 3", "tenant 4"}
    s.do(RequesterGone(1002))
    s.acquire(7, 100, tenant="eve", wait_ms=HOUR_MS)
    assert not held_back(s, 8)
    s.at(100).acquire(9, 100, tenant="eve", wait_ms=HOUR_MS)
    assert set(s.table._store.queue.terms.begun_ns) == {"eve"}
    assert held_back(s, 10)


# --- The checks' own teeth. -------------------------------------------------------


def test_validate_finds_a_waiter_that_holds_others_back_out_of_its_time() -> None:
    s = in_the_way()
    s.table._store.queue.terms.begun_ns["bob"] -= 1
    with pytest.raises(InvariantBroken, match="outside the term of 'bob'"):
        s.table.validate()


def test_validate_finds_a_tenant_miscounted_on_a_card() -> None:
    s = in_the_way()
    s.table._store.accounts[0].leases_by_tenant["bob"] += 1
    with pytest.raises(InvariantBroken, match="leases per tenant"):
        s.table.validate()
