"""Upgrades of workers: the former worker is set aside until the next one has the session, or takes it back."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AdoptSession,
    Effect,
    FreeRequested,
    KillWorker,
    LeaseMoved,
    LeaveSession,
    MoveRequested,
    ParkRequested,
    ReclaimProved,
    RefuseWork,
    RegionProved,
    RenameWorker,
    RenewRequested,
    RequestDenied,
    RestartWorker,
    ReturnSession,
    ReturnWanted,
    RevokeRequested,
    SessionImaged,
    SessionMoved,
    SessionParked,
    SessionReturned,
    SessionReturnFailed,
    SessionStays,
    SetDeadline,
    StaySession,
    WaitTimerFired,
    WorkerExited,
    WorkerReady,
    WorkerReplaced,
)
from gpulease.daemon.leases.model import Cause, WarmState
from gpulease.daemon.leases.park_state import ParkDepth, ParkPhase, ParkState
from gpulease.daemon.leases.quotas import CoreLimits

from .scenario import Scenario, card, denied, kinds, one, placed

LIMITS = CoreLimits(park_memory_bytes=16 << 20, overcommit=4.0)
HELD = 7
"""The request of the upgrade."""


def scenario(capacity: int = 200) -> Scenario:
    return Scenario(card(capacity=capacity), limits=LIMITS)


def state_of(s: Scenario) -> ParkState:
    state = s.table._store.parkable[1].park
    assert state is not None
    return state


def held(s: Scenario) -> list[WarmState]:
    return [context.state for context in s.table.warming()]


def leave(s: Scenario) -> list[Effect]:
    """Have lease 1 ask for its upgrade, its session parked and its image sent."""
    s.do(MoveRequested(HELD, 1, "root", "0", True, "0.1"))
    number = state_of(s).number
    s.do(SessionParked(1, number, 60))
    one(s.do(RegionProved(1)), LeaveSession)
    return list(s.do(SessionImaged(1, number, 1000)))


def test_the_former_worker_lives_until_the_next_one_has_the_session() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    effects = leave(s)
    assert one(effects, RenameWorker).from_id == 1
    one(effects, RestartWorker)
    assert not any(isinstance(effect, KillWorker) for effect in effects)
    assert (held(s), s.card().held_bytes) == ([WarmState.HELD], 70)
    one(s.do(WorkerReady(1)), AdoptSession)
    effects = list(s.do(SessionReturned(1, state_of(s).number, 60)))
    replaced = one(effects, WorkerReplaced)
    assert (replaced.from_version, replaced.lease.lease_id) == ("0.1", 1)
    assert one(effects, SessionMoved).request == HELD
    one(effects, KillWorker)
    assert LeaseMoved not in kinds(effects)
    assert (held(s), state_of(s).phase) == ([WarmState.DROPPING], ParkPhase.RESIDENT)


def test_a_session_that_fits_no_new_worker_is_back_in_its_former_one() -> None:
    s = scenario(capacity=300)
    s.active(1, 60, park_idle_ms=0)
    aside = one(leave(s), RenameWorker).to_id
    s.do(WorkerReady(1))
    number = state_of(s).number
    effects = list(s.do(SessionReturnFailed(1, number, "a variable has moved", is_mismatch=True)))
    # Without contexts made ahead there is no worker of another kind.
    assert RenameWorker(aside, 1) in effects
    assert effects.index(RenameWorker(aside, 1)) < effects.index(StaySession(1, number))
    assert denied(effects).reason is DenialReason.UNSUPPORTED
    assert "a variable has moved" in state_of(s).stays_here
    assert one(effects, ReturnSession).number == number
    s.do(SessionReturned(1, number, 60))
    assert (state_of(s).phase, state_of(s).depth) == (ParkPhase.RESIDENT, ParkDepth.WARM)
    assert s.card().held_bytes == 70


def test_the_room_of_a_session_that_goes_back_to_its_former_worker_is_granted_at_once() -> None:
    s = scenario(capacity=140)
    s.active(1, 60, park_idle_ms=0)
    leave(s)
    s.do(WorkerReady(1))
    s.do(SessionReturnFailed(1, state_of(s).number, "a variable has moved", is_mismatch=True))
    # It has room for a second new worker once the first is gone, and lease 2 has none next to that and the former one.
    dropped = next(context for context in s.table.warming() if context.state is WarmState.DROPPING)
    assert placed(s.acquire(2, 55, tenant="bob", wait_ms=9000)) == []
    s.do(WorkerExited(dropped.warm_id, "it was killed"))
    effects = list(s.do(ReclaimProved(dropped.warm_id)))
    # There is no worker of another kind, so the session needs no room for one.
    one(effects, StaySession)
    assert placed(effects) == [(2, "GPU-a")]
    assert one(effects, ReturnSession).lease_id == 1


@pytest.mark.parametrize("is_adopting", [False, True])
@pytest.mark.parametrize("overhead", [10, 0])
def test_a_new_worker_that_dies_costs_the_session_nothing(is_adopting: bool, overhead: int) -> None:
    s = Scenario(Card("GPU-a", 0, "Test Card", 300, overhead), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0)
    leave(s)
    if is_adopting:
        s.do(WorkerReady(1))
    effects = list(s.do(WorkerExited(1, "signal 11")))
    one(effects, StaySession)
    one(effects, ReturnSession)
    assert denied(effects).reason is DenialReason.BUSY
    assert s.lease(1).cause is None


def test_without_room_for_both_workers_it_returns_to_its_former_one() -> None:
    s = scenario(capacity=75)
    s.active(1, 60, park_idle_ms=0)
    effects = leave(s)
    assert RestartWorker not in kinds(effects)
    effects = list(s.at(200).do(WaitTimerFired(-1)))
    one(effects, StaySession)
    one(effects, ReturnSession)
    assert any(isinstance(effect, RequestDenied) and effect.request == HELD for effect in effects)
    assert held(s) == []


def test_a_session_that_can_not_leave_returns_and_is_refused_with_the_reason() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(MoveRequested(HELD, 1, "root", "0", True, "0.1"))
    number = state_of(s).number
    s.do(SessionParked(1, number, 60))
    s.do(RegionProved(1))
    effects = list(s.do(SessionStays(1, number, "its image must have a version up to 1, not 2", is_lasting=True)))
    assert (denied(effects).reason, "version" in denied(effects).message) == (DenialReason.UNSUPPORTED, True)
    one(effects, ReturnSession)


def test_a_parked_session_is_parked_again_and_a_former_worker_learns_of_renewals() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(ParkRequested(5, 1, "ann"))
    s.do(SessionParked(1, state_of(s).number, 60))
    s.do(RegionProved(1))
    s.do(MoveRequested(HELD, 1, "root", "0", True, "0.1"))
    number = state_of(s).number
    aside = one(s.do(SessionImaged(1, number, 1000)), RenameWorker).to_id
    renewed = [effect for effect in s.do(RenewRequested(8, 1, "ann", 9000)) if isinstance(effect, SetDeadline)]
    assert aside in [effect.worker_id for effect in renewed]
    s.do(WorkerReady(1))
    s.do(SessionReturned(1, number, 60))
    assert state_of(s).phase is ParkPhase.PARKING


def test_the_lease_may_end_meanwhile() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    aside = one(leave(s), RenameWorker).to_id
    effects = list(s.do(FreeRequested(9, 1, "ann")))
    # The next daemon may continue the session in either worker, so both pages show the end, before anything else.
    assert effects[:2] == [RefuseWork(1, Cause.FREED), RefuseWork(aside, Cause.FREED)]
    assert KillWorker(aside) in effects
    assert held(s) == [WarmState.DROPPING]


def test_an_end_is_shown_to_the_worker_that_a_session_has_left_until_that_is_gone() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(MoveRequested(HELD, 1, "ann", None))
    s.do(SessionParked(1, state_of(s).number, 60))
    s.do(RegionProved(1))
    left = one(s.do(SessionImaged(1, state_of(s).number, 1000)), RenameWorker).to_id
    # Its kill waits for the record, without which the next daemon continues the session in it.
    store = s.table._store
    assert store.left_workers(store.live[1]) == (left,)
    s.do(WorkerExited(left, "it was killed"))
    effects = list(s.do(RevokeRequested(9, 1, "maintenance", is_operator=True)))
    assert [effect for effect in effects if isinstance(effect, RefuseWork)] == [RefuseWork(1, Cause.REVOKED)]


def test_a_worker_of_this_version_is_not_replaced() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    assert denied(s.do(MoveRequested(HELD, 1, "root", "0", True))).reason is DenialReason.INVALID_REQUEST


@pytest.mark.parametrize("version", ["", "0.1"])
def test_an_operation_that_comes_before_the_session_has_left_goes_with_it(version: str) -> None:
    s = Scenario(card(capacity=200), card(1, capacity=200), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.do(MoveRequested(HELD, 1, "root", "0" if version else "1", True, version))
    number = state_of(s).number
    s.do(SessionParked(1, number, 60))
    assert s.do(ReturnWanted(1, number)) == []
    assert one(s.do(RegionProved(1)), LeaveSession).carries
