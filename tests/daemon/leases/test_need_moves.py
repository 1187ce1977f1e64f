"""Moves by need: which sessions leave a card so that an acquire fits, and where they go."""

from dataclasses import replace

from gpulease.daemon.leases.events import (
    Granted,
    LeaseMoved,
    LeaveSession,
    ParkSession,
    RegionProved,
    ReturnWanted,
    SessionImaged,
    SessionParked,
    SessionReturned,
    SessionStays,
    StayClaimed,
    WorkerReady,
)
from gpulease.daemon.leases.need_moves import MOVED_STAY_NS
from gpulease.daemon.leases.park_state import ParkState
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules

from .scenario import Scenario, card, kinds, one

GRANULE = 2 << 20
LIMITS = CoreLimits(park_memory_bytes=20 * GRANULE, overcommit=4.0, park_stay_ms=1000, moves_for_need=True)


def scenario(limits: CoreLimits = LIMITS, other_bytes: int = 100) -> Scenario:
    """A card of 200 bytes and another one; every lease takes 10 more than its size."""
    return Scenario(card(capacity=200), card(1, capacity=other_bytes), limits=limits)


def state_of(s: Scenario, lease_id: int) -> ParkState:
    state = s.table._store.parkable[lease_id].park
    assert state is not None
    return state


def orders(effects: list[object]) -> list[int]:
    return sorted(effect.lease_id for effect in effects if isinstance(effect, ParkSession))


def test_an_acquire_that_fits_nowhere_has_an_idle_session_moved() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.active(2, 30, park_idle_ms=0, selector="0")
    s.at(2)
    # 80 bytes are free on one card and 100 on the other: the smallest session that suffices goes.
    assert orders(list(s.acquire(3, 110, wait_ms=9000))) == [2]
    number = state_of(s, 2).number
    s.do(SessionParked(2, number, 30))
    effects = s.do(RegionProved(2))
    assert one(effects, LeaveSession).carries
    s.do(WorkerReady(3))
    assert s.lease(3).card_uuid == "GPU-a"
    s.do(SessionImaged(2, number, 100))
    s.do(WorkerReady(2))
    assert one(s.do(SessionReturned(2, number, 30)), LeaseMoved).from_uuid == "GPU-a"
    assert s.lease(2).card_uuid == "GPU-b"


def test_a_session_that_can_not_leave_its_worker_is_parked() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.do(StayClaimed(1, "a module calls malloc"))
    s.at(2)
    assert orders(list(s.acquire(3, 150, wait_ms=9000))) == [1]
    assert state_of(s, 1).move is None


def test_without_the_setting_it_is_parked() -> None:
    s = scenario(CoreLimits(park_memory_bytes=20 * GRANULE, overcommit=4.0))
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.at(2)
    assert orders(list(s.acquire(3, 150, wait_ms=9000))) == [1]
    assert state_of(s, 1).move is None


def test_sessions_that_fit_on_no_other_card_are_parked() -> None:
    s = scenario(other_bytes=50)
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.at(2)
    assert orders(list(s.acquire(3, 150, wait_ms=9000))) == [1]
    assert state_of(s, 1).move is None


def test_two_needs_do_not_count_on_the_same_room() -> None:
    s = Scenario(card(capacity=100), card(1, capacity=100), card(2, capacity=70), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.active(2, 60, park_idle_ms=0, selector="1")
    s.at(2)
    s.acquire(3, 80, wait_ms=9000, selector="0")
    s.acquire(4, 80, wait_ms=9000, selector="1")
    first, second = state_of(s, 1).move, state_of(s, 2).move
    assert first is not None
    assert (first.card_uuid, second) == ("GPU-c", None)


def test_a_session_in_use_and_one_that_was_moved_lately_stay() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0, selector="0")
    assert orders(list(s.acquire(3, 150, wait_ms=9000))) == []
    s = scenario()
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.at(2)
    state_of(s, 1).need_move_ns = s.now_ns + MOVED_STAY_NS
    assert orders(list(s.acquire(3, 150, wait_ms=9000))) == [1]
    assert state_of(s, 1).move is None, "it is parked, as without the setting"


def test_a_session_that_can_not_leave_makes_room_by_its_park() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.at(2)
    s.acquire(3, 150, wait_ms=9000)
    number = state_of(s, 1).number
    s.do(SessionParked(1, number, 60))
    assert state_of(s, 1).move is not None
    s.do(RegionProved(1))
    s.do(SessionStays(1, number, "it has events", is_lasting=True))
    assert Granted in kinds(s.do(WorkerReady(3)))
    assert (state_of(s, 1).move, s.lease(1).card_uuid) == (None, "GPU-a")


def test_an_operation_during_the_move_goes_with_the_session() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.at(2)
    s.acquire(3, 150, wait_ms=9000)
    number = state_of(s, 1).number
    s.do(SessionParked(1, number, 60))
    assert s.do(ReturnWanted(1, number)) == []
    assert one(s.do(RegionProved(1)), LeaveSession).carries


def test_no_session_is_moved_for_others_to_a_card_that_its_tenant_may_not_use() -> None:
    rules = TenantRules(by_name={"ann": TenantLimits(devices=("0",))})
    s = scenario(replace(LIMITS, tenants=rules))
    s.active(1, 60, park_idle_ms=0, selector="0", tenant="eve")
    s.active(2, 30, park_idle_ms=0, selector="0")
    s.at(2)
    # The smaller one would suffice.
    assert orders(list(s.acquire(3, 110, tenant="bob", wait_ms=9000, selector="0"))) == [1]
    assert state_of(s, 1).move is not None
