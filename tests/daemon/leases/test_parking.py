"""Parking: who may park what, whose bytes are granted to whom, and what a return waits for."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from gpulease.daemon.leases import deferred_requests, parking
from gpulease.daemon.leases.cold_parking import MAX_MISFITS
from gpulease.daemon.leases.deferred_requests import MAX_DEFERRED
from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    AdoptSession,
    ArmTimer,
    CopyAhead,
    DrainRequested,
    DropParkMemory,
    Effect,
    EndRegion,
    Event,
    FreeRequested,
    GiveParkMemory,
    Granted,
    KillWorker,
    LeaseEnded,
    LeaseParked,
    LeaseRestored,
    LeaseReturned,
    LeaveSession,
    MoveRequested,
    OpenRegion,
    ParkFailed,
    ParkRequested,
    ParkSession,
    ParkTimerFired,
    ProveRegion,
    ReclaimProved,
    RefuseWaitingOperations,
    RegionEnded,
    RegionOpened,
    RegionProved,
    RegionReleased,
    RegionRequested,
    RenewRequested,
    RequestDenied,
    RequesterGone,
    ResizeRequested,
    ResizeSlice,
    RestartWorker,
    ReturnSession,
    ReturnWanted,
    RevokeRequested,
    SessionImaged,
    SessionMoved,
    SessionParkDone,
    SessionParked,
    SessionParkRefused,
    SessionReturned,
    SessionReturnFailed,
    SessionStays,
    SessionsUsed,
    SpawnSubmit,
    SpawnWorker,
    StayClaimed,
    TenantRulesChanged,
    TimerFired,
    TimerKind,
    WaitTimerFired,
    WarmEnded,
    WatchClients,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseTerms, SubmitRequested
from gpulease.daemon.leases.park_state import ParkCause, ParkDepth, ParkFailure, ParkPhase, ParkState
from gpulease.daemon.leases.parking import KEPT_SHARE, PARK_BURST
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.record.group_commit import MAX_WAIT_S
from gpulease.protocol.opcodes import Exclusivity

from .scenario import OVERHEAD, S, Scenario, armed, card, denied, end, kinds, one, placed

GRANULE = 2 << 20
HOST = 8 * GRANULE
LIMITS = CoreLimits(park_memory_bytes=HOST, overcommit=4.0)


def scenario(limits: CoreLimits = LIMITS, capacity: int = 110) -> Scenario:
    return Scenario(card(capacity=capacity), limits=limits)


def state_of(s: Scenario, lease_id: int) -> ParkState:
    state = s.table._store.parkable[lease_id].park
    assert state is not None
    return state


def number_of(s: Scenario, lease_id: int) -> int:
    state = s.table._store.parkable[lease_id].park
    assert state is not None
    return state.number


def phase(s: Scenario, lease_id: int) -> ParkPhase:
    found = s.table.parking.of(lease_id)
    assert found is not None
    return found.phase


def parked(s: Scenario, lease_id: int, *, kept: int = 0) -> list[object]:
    """Have the tenant park the lease, the worker answer and the card prove."""
    effects: list[object] = list(s.do(ParkRequested(lease_id + 3000, lease_id, "ann")))
    effects += s.do(SessionParked(lease_id, number_of(s, lease_id), 20, kept))
    return effects + s.do(RegionProved(lease_id))


def test_a_tenant_parks_its_session_and_the_card_has_the_bytes_back() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    ordered = one(s.do(ParkRequested(7, 1, "ann")), ParkSession)
    assert (phase(s, 1), s.card().held_bytes) == (ParkPhase.PARKING, 70)
    assert s.do(SessionParked(1, ordered.number, 60)) == [ProveRegion(1, 1, "GPU-a", 10)]
    assert s.card().held_bytes == 70, "the worker's word is no proof"
    effects = s.do(RegionProved(1))
    assert kinds(effects) == [LeaseParked, SessionParkDone]
    assert one(effects, SessionParkDone) == SessionParkDone(7, s.lease(1), 60)
    assert (phase(s, 1), s.card().held_bytes, s.card().available_bytes) == (ParkPhase.PARKED, 10, 90)


def test_what_the_worker_keeps_stays_charged() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    parked(s, 1, kept=15)
    assert s.card().held_bytes == 25


def test_the_next_operation_brings_it_back() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    parked(s, 1)
    number = number_of(s, 1)
    effects = s.at(3).do(ReturnWanted(1, number))
    assert effects == [ReturnSession(1, number)]
    assert s.card().held_bytes == 70, "charged before the worker takes a byte"
    returned = one(s.do(SessionReturned(1, number, 60)), LeaseReturned)
    assert (returned.parked_for_ns, phase(s, 1)) == (3 * S, ParkPhase.RESIDENT)


def test_an_operation_that_comes_before_the_proof_needs_no_room() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(ParkRequested(7, 1, "ann"))
    number = number_of(s, 1)
    s.do(SessionParked(1, number, 60))
    assert kinds(s.do(ReturnWanted(1, number))) == [ReturnSession]
    assert s.do(RegionProved(1)) == [], "a proof that comes late frees nothing"
    assert s.card().held_bytes == 70


def test_a_park_that_an_operation_overtakes_is_repeated_once_it_is_over() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(ParkRequested(7, 1, "root", is_operator=True))
    for expected in ([ReturnSession, ParkSession, TimerFired], [RequestDenied, ReturnSession]):
        number = number_of(s, 1)
        s.do(SessionParked(1, number, 60))
        effects = s.do(ReturnWanted(1, number)) + s.do(SessionReturned(1, number, 60))
        assert kinds(effects) == expected
    # The second time its tenant is at work: it is not parked over and over.
    assert (denied(effects).reason, phase(s, 1)) == (DenialReason.BUSY, ParkPhase.RESIDENT)


def test_a_repeated_park_answers_its_request() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(ParkRequested(7, 1, "root", is_operator=True))
    for is_overtaken in (True, False):
        number = number_of(s, 1)
        s.do(SessionParked(1, number, 60))
        if is_overtaken:
            s.do(ReturnWanted(1, number))
            s.do(SessionReturned(1, number, 60))
    effects = s.do(RegionProved(1))
    assert one(effects, LeaseParked).cause is ParkCause.OPERATOR
    assert one(effects, SessionParkDone).request == 7


def test_a_refused_park_changes_nothing() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(ParkRequested(7, 1, "ann"))
    effects = s.do(SessionParkRefused(1, number_of(s, 1), "a kernel of it still runs"))
    assert kinds(effects) == [ParkFailed, RequestDenied]
    assert denied(effects).reason is DenialReason.BUSY
    assert (phase(s, 1), s.card().held_bytes) == (ParkPhase.RESIDENT, 70)


@pytest.mark.parametrize(
    ("tenant", "is_operator", "reason"),
    [("ann", False, None), ("bob", True, None), ("bob", False, DenialReason.NOT_FOUND)],
)
def test_the_tenant_and_operators_may_park(tenant: str, is_operator: bool, reason: DenialReason | None) -> None:
    s = scenario()
    s.active(1, 20, park_idle_ms=0)
    effects = s.do(ParkRequested(7, 1, tenant, is_operator))
    if reason is None:
        one(effects, ParkSession)
        s.do(SessionParked(1, number_of(s, 1), 20))
        cause = ParkCause.TENANT if tenant == "ann" else ParkCause.OPERATOR
        assert one(s.do(RegionProved(1)), LeaseParked).cause is cause
    else:
        assert denied(effects).reason is reason


def test_leases_that_are_not_parkable_stay_on_their_cards() -> None:
    s = scenario()
    s.active(1)
    assert denied(s.do(ParkRequested(7, 1, "ann"))).reason is DenialReason.UNSUPPORTED
    assert denied(s.acquire(2, park_idle_ms=0, submit_bytes=5)).reason is DenialReason.INVALID_REQUEST
    alone = s.acquire(3, park_idle_ms=0, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)
    assert denied(alone).reason is DenialReason.INVALID_REQUEST


def test_a_node_without_park_memory_parks_nothing() -> None:
    s = scenario(CoreLimits())
    s.active(1, park_idle_ms=1000)
    denial = denied(s.do(ParkRequested(7, 1, "ann")))
    assert (denial.reason, "park_memory" in denial.hint) == (DenialReason.UNSUPPORTED, True)
    s.at(1.5).fire(1, TimerKind.PARK)
    assert phase(s, 1) is ParkPhase.RESIDENT


def test_a_full_host_refuses_and_says_so() -> None:
    s = scenario(CoreLimits(park_memory_bytes=GRANULE, overcommit=4.0))
    s.active(1, park_idle_ms=0)
    s.active(2, park_idle_ms=0)
    parked(s, 1)
    assert s.table.parking.host_bytes() == (GRANULE, GRANULE)
    denial = denied(s.do(ParkRequested(7, 2, "ann")))
    assert (denial.reason, "0 bytes" in denial.message) == (DenialReason.CAPACITY_EXCEEDED, True)


def test_memory_that_a_session_on_the_card_only_keeps_goes_to_another_ones_park() -> None:
    s = scenario(CoreLimits(park_memory_bytes=GRANULE, overcommit=4.0))
    assert GiveParkMemory(1, GRANULE) in s.do(
        AcquireRequested(1, "ann", 1, LeaseTerms(20, 9000, park_idle_ms=0))
    ) + s.do(WorkerReady(1))
    s.active(2, park_idle_ms=0)
    effects = s.do(ParkRequested(7, 2, "ann"))
    assert effects[:2] == [DropParkMemory(1), GiveParkMemory(2, GRANULE)]


@pytest.mark.parametrize("used_last", [1, 2])
def test_the_session_that_is_parked_next_keeps_its_memory(used_last: int) -> None:
    """Sessions are parked for others in the order of their last use."""
    s = scenario(CoreLimits(park_memory_bytes=2 * GRANULE, overcommit=4.0))
    for lease_id in (1, 2, 3):
        s.active(lease_id, park_idle_ms=0)
    s.at(1).do(SessionsUsed((3 - used_last, 3)))
    s.at(2).do(SessionsUsed((used_last,)))
    effects = s.do(ParkRequested(7, 3, "ann"))
    assert effects[:2] == [DropParkMemory(used_last), GiveParkMemory(3, GRANULE)]
    one(effects, ParkSession)


def crowded_card(host_bytes: int) -> Scenario:
    """Of three sessions on a card that holds two, the first was parked for the third, and returns for need of its own.

    The second one is parked for it, so the first and the third are on the card then.
    """
    s = scenario(CoreLimits(park_memory_bytes=host_bytes, overcommit=4.0, park_stay_ms=0), 2 * 20 + 3 * OVERHEAD)
    s.active(1, 20, park_idle_ms=0)
    s.at(1).active(2, 20, park_idle_ms=0)
    one(s.at(1).acquire(3, 20, park_idle_ms=0, wait_ms=20_000), ParkSession)
    leaves(s, 1)
    s.do(WorkerReady(3))
    one(s.at(1).do(ReturnWanted(1, number_of(s, 1))), ParkSession)
    one(leaves(s, 2), ReturnSession)
    return s


def leaves(s: Scenario, lease_id: int) -> list[Effect]:
    """Have a session leave the card as it was ordered to."""
    return s.do(SessionParked(lease_id, number_of(s, lease_id), 20)) + s.do(RegionProved(lease_id))


def test_a_session_that_returns_leaves_its_memory_to_the_one_that_is_parked_next() -> None:
    s = crowded_card(2 * GRANULE)
    effects = s.do(SessionReturned(1, number_of(s, 1), 20))
    assert kinds(effects) == [LeaseReturned, DropParkMemory, GiveParkMemory, CopyAhead]
    assert effects[1:] == [DropParkMemory(1), GiveParkMemory(3, GRANULE), CopyAhead(3)]
    assert s.table.parking.host_bytes() == (2 * GRANULE, 2 * GRANULE)
    # So the next park finds memory that was prepared.
    effects = s.at(1).do(ReturnWanted(2, number_of(s, 2)))
    assert one(effects, ParkSession).lease_id == 3
    assert not {DropParkMemory, GiveParkMemory} & set(kinds(effects))


def test_a_session_that_returns_keeps_its_memory_if_the_host_has_more() -> None:
    s = crowded_card(3 * GRANULE)
    effects = s.do(SessionReturned(1, number_of(s, 1), 20))
    assert not {DropParkMemory, GiveParkMemory} & set(kinds(effects))


def test_need_has_the_session_that_is_parked_next_copy_its_bytes_ahead() -> None:
    """It begins when the first one has left the card, so that one session's return runs beside it."""
    s = scenario(CoreLimits(park_memory_bytes=4 * GRANULE, overcommit=4.0, park_stay_ms=0), 3 * 20 + 4 * OVERHEAD)
    for lease_id in (1, 2, 3):
        s.at(1).active(lease_id, 20, park_idle_ms=0)
    s.at(1).do(SessionsUsed((2,)))
    one(s.at(1).acquire(4, 20, park_idle_ms=0, wait_ms=20_000), ParkSession)
    assert one(leaves(s, 1), CopyAhead).lease_id == 3
    s.do(WorkerReady(4))
    # It is on the card as before, and its use is all that decides.
    assert phase(s, 3) is ParkPhase.RESIDENT
    s.at(1).do(SessionsUsed((3,)))
    assert one(s.at(1).do(ReturnWanted(1, number_of(s, 1))), ParkSession).lease_id == 2
    assert one(leaves(s, 2), CopyAhead).lease_id == 4
    assert one(s.do(SessionReturned(1, number_of(s, 1), 20)), CopyAhead).lease_id == 4


def test_a_session_with_a_region_in_doubt_or_without_memory_copies_nothing_ahead() -> None:
    s = scenario(CoreLimits(park_memory_bytes=2 * GRANULE, overcommit=4.0, park_stay_ms=0), 2 * 20 + 3 * OVERHEAD)
    s.active(1, 20, park_idle_ms=0)
    s.at(1).active(2, 20, park_idle_ms=0)
    one(s.do(RegionRequested(9, 2, 100, "ann", "ann", 8, 60_000, 1)), OpenRegion)
    one(s.at(1).acquire(3, 20, park_idle_ms=0, wait_ms=20_000), ParkSession)
    assert CopyAhead not in kinds(leaves(s, 1))


@pytest.mark.parametrize("why", ["no overcommit", "no need"])
def test_without_overcommit_or_need_nothing_is_copied_ahead(why: str) -> None:
    overcommit = 1.0 if why == "no overcommit" else 4.0
    s = scenario(CoreLimits(park_memory_bytes=4 * GRANULE, overcommit=overcommit, park_stay_ms=0), 40 + 3 * OVERHEAD)
    s.active(1, 20, park_idle_ms=0)
    s.at(1).active(2, 20, park_idle_ms=0)
    if why == "no need":
        one(s.do(ParkRequested(7, 1, "ann")), ParkSession)
    else:
        one(s.at(1).acquire(3, 20, wait_ms=20_000), ParkSession)
    effects = leaves(s, 1)
    one(effects, LeaseParked)
    assert CopyAhead not in kinds(effects)


def test_a_session_that_was_parked_for_nobodys_need_keeps_its_memory() -> None:
    s = scenario(CoreLimits(park_memory_bytes=GRANULE, overcommit=4.0))
    s.active(1, park_idle_ms=0)
    s.at(1).active(2, park_idle_ms=0)
    parked(s, 1)
    s.do(ReturnWanted(1, number_of(s, 1)))
    assert kinds(s.do(SessionReturned(1, number_of(s, 1), 20))) == [LeaseReturned]


def test_a_tenants_quota_of_parked_bytes() -> None:
    rules = TenantRules(default=TenantLimits(max_parked_bytes=30))
    s = scenario(CoreLimits(park_memory_bytes=HOST, overcommit=4.0, tenants=rules))
    s.active(1, park_idle_ms=0)
    s.active(2, park_idle_ms=0)
    parked(s, 1)
    assert denied(s.do(ParkRequested(7, 2, "ann"))).reason is DenialReason.LIMIT


def test_idleness_parks_a_session_and_use_postpones_it() -> None:
    s = scenario()
    s.active(1, park_idle_ms=2000)
    s.at(1.5).do(SessionsUsed((1,)))
    assert s.at(0.5).fire(1, TimerKind.PARK) == [ArmTimer(_park_timer(1), s.now_ns + int(1.5 * S))]
    effects = s.at(1.5).fire(1, TimerKind.PARK)
    one(effects, ParkSession)
    s.do(SessionParked(1, number_of(s, 1), 20))
    assert one(s.do(RegionProved(1)), LeaseParked).cause is ParkCause.IDLE


def test_an_idle_session_that_can_t_be_parked_is_no_more_recently_used_for_it() -> None:
    s = scenario()
    s.active(1, 40, park_idle_ms=2000)
    s.active(2, 40, park_idle_ms=0)
    s.at(0.5).do(SessionsUsed((2,)))
    s.do(RegionRequested(9, 1, 100, "ann", "ann", 8, 60_000, 1))
    # The region that opens keeps the session on the card for now; idleness tries again after another idle time.
    assert s.at(1.5).fire(1, TimerKind.PARK) == [ArmTimer(_park_timer(1), s.now_ns + 2 * S)]
    s.do(RegionOpened(100, 0x1000))
    assert s.at(0.5).fire(1, TimerKind.PARK) == [ArmTimer(_park_timer(1), s.now_ns + int(1.5 * S))]
    assert one(s.acquire(3, 40), ParkSession).lease_id == 1


def test_idleness_tries_again_after_another_idle_time() -> None:
    s = scenario()
    s.active(1, 40, park_idle_ms=2000)
    s.do(RegionRequested(9, 1, 100, "ann", "ann", 8, 60_000, 1))
    s.at(2).fire(1, TimerKind.PARK)
    s.do(RegionOpened(100, 0x1000))
    one(s.at(2).fire(1, TimerKind.PARK), ParkSession)
    # The worker's refusal postpones it as well.
    effects = s.at(0.5).do(SessionParkRefused(1, number_of(s, 1), "the driver refused a call"))
    assert armed(effects, TimerKind.PARK).due_ns == s.now_ns + 2 * S


def test_a_session_whose_worker_refused_is_no_more_recently_used_for_it() -> None:
    s = scenario()
    s.active(1, 40, park_idle_ms=0)
    s.active(2, 40, park_idle_ms=0)
    s.at(2).do(SessionsUsed((2,)))
    s.do(ParkRequested(7, 1, "ann"))
    s.at(0.5).do(SessionParkRefused(1, number_of(s, 1), "the driver refused a call"))
    assert denied(s.acquire(3, 40)).reason is DenialReason.CAPACITY_EXCEEDED, "both stay for a second"
    assert one(s.at(1).acquire(4, 40), ParkSession).lease_id == 1


@pytest.mark.parametrize(
    ("host_bytes", "tenant_bytes", "are_parked"),
    [(2 * GRANULE, 80, True), (2 * GRANULE, None, True), (2 * GRANULE - 1, None, False), (2 * GRANULE, 79, False)],
)
def test_sessions_parked_together_keep_within_the_bounds_of_parked_bytes(
    host_bytes: int, tenant_bytes: int | None, are_parked: bool
) -> None:
    rules = TenantRules(default=TenantLimits(max_parked_bytes=tenant_bytes))
    s = scenario(CoreLimits(park_memory_bytes=host_bytes, overcommit=4.0, tenants=rules))
    s.active(1, 40, park_idle_ms=0)
    s.active(2, 40, park_idle_ms=0)
    # Either of them may be parked; the acquire needs the room of both.
    effects = s.at(2).acquire(3, 70, tenant="bob")
    if are_parked:
        assert [effect.lease_id for effect in effects if isinstance(effect, ParkSession)] == [1, 2]
        assert s.table.parking.host_bytes() == (2 * GRANULE, host_bytes)
    else:
        assert denied(effects).reason is DenialReason.CAPACITY_EXCEEDED
        assert phase(s, 1) is phase(s, 2) is ParkPhase.RESIDENT


def _park_timer(lease_id: int, generation: int = 1) -> TimerFired:
    return TimerFired(lease_id, generation, TimerKind.PARK)


def test_a_grant_without_room_parks_the_session_used_least_recently() -> None:
    s = scenario()
    s.active(1, 40, park_idle_ms=0)
    s.active(2, 40, park_idle_ms=0)
    s.at(2).do(SessionsUsed((1,)))
    s.at(2)
    effects = s.acquire(3, 40)
    assert one(effects, ParkSession).lease_id == 2
    s.do(SessionParked(2, number_of(s, 2), 40))
    assert placed(s.do(RegionProved(2))) == [(3, "GPU-a")]
    assert phase(s, 1) is ParkPhase.RESIDENT


def test_a_session_in_use_is_not_parked_for_others_until_it_rests() -> None:
    s = scenario()
    s.active(1, 80, park_idle_ms=0)
    s.at(5).do(SessionsUsed((1,)))
    assert denied(s.acquire(2, 40)).reason is DenialReason.CAPACITY_EXCEEDED
    effects = s.acquire(3, 40, wait_ms=5000)
    due_ns = next(e.due_ns for e in effects if isinstance(e, ArmTimer) and isinstance(e.event, ParkTimerFired))
    assert due_ns == s.now_ns + S
    assert one(s.at(1).do(ParkTimerFired()), ParkSession).lease_id == 1


def test_a_return_without_room_parks_another_and_both_wait_in_one_queue() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    parked(s, 1)
    s.active(2, 60, park_idle_ms=0)
    s.at(3)
    number = number_of(s, 1)
    effects = s.do(ReturnWanted(1, number))
    assert one(effects, ParkSession).lease_id == 2
    # An acquire that would fit joins behind the session that waits.
    s.do(SessionParked(2, number_of(s, 2), 60))
    assert one(s.do(RegionProved(2)), ReturnSession).lease_id == 1
    assert s.card().held_bytes == 80


def test_a_return_that_finds_no_room_in_time_is_refused_and_nothing_is_lost() -> None:
    s = scenario()
    s.acquire(1, 60, park_idle_ms=0, wait_ms=20_000, ttl_ms=60_000)
    s.do(WorkerReady(1))
    parked(s, 1)
    s.active(2, 80, ttl_ms=60_000)
    assert ArmTimer(WaitTimerFired(-1), s.now_ns + 20 * S) in s.do(ReturnWanted(1, number_of(s, 1)))
    effects = s.at(20).do(WaitTimerFired(-1))
    assert kinds(effects) == [RefuseWaitingOperations, ParkFailed]
    assert phase(s, 1) is ParkPhase.PARKED
    end(s, 2)
    assert s.do(ReturnWanted(1, number_of(s, 1))) == [ReturnSession(1, number_of(s, 1))]


def test_a_failed_return_keeps_the_session_parked_and_proves_the_card_again() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    parked(s, 1)
    number = number_of(s, 1)
    s.do(ReturnWanted(1, number))
    effects = s.do(SessionReturnFailed(1, number, "the address was refused"))
    assert kinds(effects) == [ParkFailed, RefuseWaitingOperations, ProveRegion]
    assert s.card().held_bytes == 70
    assert kinds(s.do(RegionProved(1))) == []
    assert (phase(s, 1), s.card().held_bytes) == (ParkPhase.PARKED, 10)
    # A later operation asks again.
    assert s.do(ReturnWanted(1, number)) == [ReturnSession(1, number)]


def test_overcommit_bounds_the_parkable_slices_of_a_card() -> None:
    s = scenario(CoreLimits(park_memory_bytes=HOST))
    s.active(1, 60, park_idle_ms=0)
    parked(s, 1)
    assert denied(s.acquire(2, 60, park_idle_ms=0)).reason is DenialReason.CAPACITY_EXCEEDED
    # A lease that is not parkable has its own guarantee: the bytes are free.
    s.active(3, 60)


def test_a_card_has_a_bounded_rate_of_parks() -> None:
    s = scenario(CoreLimits(park_memory_bytes=HOST, parks_per_minute=1, overcommit=4.0))
    s.active(1, 20, park_idle_ms=0, ttl_ms=500_000)
    waits: list[tuple[int, int]] = []
    for request in range(32):
        waits.append(s.table.parking.paces(s.now_ns)["GPU-a"])
        s.do(ParkRequested(request, 1, "root", is_operator=True))
        s.do(SessionParked(1, number_of(s, 1), 20))
        s.do(RegionProved(1))
        s.do(ReturnWanted(1, number_of(s, 1)))
        s.do(SessionReturned(1, number_of(s, 1), 20))
    # As long as the next park may begin at once, nothing waits; tenants wait for their share of the burst.
    assert waits == [(0, max(0, parks - 15) * 60 * S) for parks in range(32)]
    assert s.table.parking.paces(s.now_ns) == {"GPU-a": (60 * S, 17 * 60 * S)}
    assert denied(s.do(ParkRequested(70, 1, "root", is_operator=True))).reason is DenialReason.RATE
    assert denied(s.at(60).do(ParkRequested(71, 1, "ann"))).reason is DenialReason.RATE
    one(s.do(ParkRequested(72, 1, "root", is_operator=True)), ParkSession)


@pytest.mark.parametrize("way", ["park", "idle", "move"])
def test_a_tenant_that_parks_all_the_time_leaves_the_pace_to_those_who_need_room(way: str) -> None:
    limits = CoreLimits(park_memory_bytes=HOST, parks_per_minute=1, overcommit=4.0, park_stay_ms=0)
    s = scenario(limits)
    s.active(1, 20, park_idle_ms=1 if way == "idle" else 0, ttl_ms=500_000)
    for lease_id in (2, 3):
        s.active(lease_id, 25, park_idle_ms=0, tenant="bob", ttl_ms=500_000)
    parks = 0
    for request in range(PARK_BURST + 5):
        if way == "idle":
            effects = s.at(0.001).fire(1, TimerKind.PARK)
        elif way == "move":
            effects = s.do(MoveRequested(5000 + request, 1, "ann", None))
        else:
            effects = s.do(ParkRequested(5000 + request, 1, "ann"))
        if ParkSession not in kinds(effects):
            continue
        parks += 1
        s.do(SessionParkRefused(1, number_of(s, 1), "the driver refused a call"))
    assert parks == PARK_BURST - int(PARK_BURST * KEPT_SHARE)
    # The others' parks still have their share, and operators theirs.
    s.at(0.001).do(SessionsUsed((1,)))
    effects = s.acquire(4, 40, wait_ms=9000)
    assert {effect.lease_id for effect in effects if isinstance(effect, ParkSession)} == {2, 3}
    one(s.do(ParkRequested(6000, 1, "root", is_operator=True)), ParkSession)


NEEDS_SESSION = [
    (RegionRequested(9, 1, 101, "ann", "ann", 4, 5000, 1), OpenRegion),
    (ResizeRequested(9, 1, "ann", 30), ResizeSlice),
    (SubmitRequested(9, 1, "ann", 1000), SpawnSubmit),
]
"""Requests that need lease 1's session in a worker, and the effect of each once it is there."""


def orders(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects if not isinstance(effect, ArmTimer)]


def cold(s: Scenario, lease_id: int) -> int:
    """Have a resident session leave its worker; returns the number of its park."""
    s.do(MoveRequested(lease_id + 4000, lease_id, "root", None, True))
    number = number_of(s, lease_id)
    s.do(SessionParked(lease_id, number, 20))
    s.do(RegionProved(lease_id))
    s.do(SessionImaged(lease_id, number, 1000))
    assert state_of(s, lease_id).depth is ParkDepth.COLD
    return number


@pytest.mark.parametrize(("request_", "effect"), NEEDS_SESSION)
def test_a_request_brings_a_session_back_and_is_handled_then(request_: Event, effect: type[Effect]) -> None:
    # Parked warm: the request brings it back.
    s = scenario()
    s.active(1, 20, park_idle_ms=0)
    parked(s, 1)
    number = number_of(s, 1)
    assert orders(s.do(request_)) == [ReturnSession]
    assert effect in kinds(s.do(SessionReturned(1, number, 20)))
    # Parked cold: in another worker.
    s = scenario()
    s.active(1, 20, park_idle_ms=0)
    number = cold(s, 1)
    one(s.do(request_), RestartWorker)
    one(s.do(WorkerReady(1)), AdoptSession)
    assert effect in kinds(s.do(SessionReturned(1, number, 20)))


def tried_in_vain(s: Scenario, number: int, workers: int) -> list[Effect]:
    """Have workers fail to adopt cold session 1; return the last one's effects."""
    effects = s.do(ReturnWanted(1, number))
    for _ in range(workers):
        one(effects, RestartWorker)
        one(s.do(WorkerReady(1)), AdoptSession)
        effects = s.do(SessionReturnFailed(1, number, "a variable has moved", is_mismatch=True))
    return effects


def test_a_cold_session_that_fits_a_later_worker_goes_on() -> None:
    s = scenario(capacity=400)
    s.active(1, 20, park_idle_ms=0)
    for _ in range(2):
        number = cold(s, 1)
        assert one(tried_in_vain(s, number, MAX_MISFITS - 1), ParkFailed).failure is ParkFailure.MISFIT
        one(s.do(WorkerReady(1)), AdoptSession)
        s.do(SessionReturned(1, number, 20))
        assert (phase(s, 1), s.lease(1).cause) == (ParkPhase.RESIDENT, None)


def test_a_cold_session_that_fits_no_worker_ends_its_lease() -> None:
    s = scenario(capacity=400)
    s.active(1, 20, park_idle_ms=0)
    effects = tried_in_vain(s, cold(s, 1), MAX_MISFITS)
    assert one(effects, ParkFailed).failure is ParkFailure.MISMATCH
    assert RestartWorker not in kinds(effects)
    assert s.lease(1).cause is Cause.FAULTED


@pytest.mark.parametrize(("request_", "effect"), NEEDS_SESSION)
def test_a_request_that_overtakes_the_report_of_a_return_waits_for_it(request_: Event, effect: type[Effect]) -> None:
    """The tenant has the answer of its operation before the broker reads that the session is back."""
    s = scenario()
    s.active(1, 20, park_idle_ms=0)
    number = cold(s, 1)
    s.do(ReturnWanted(1, number))
    s.do(WorkerReady(1))
    assert orders(s.do(request_)) == []
    assert effect in kinds(s.do(SessionReturned(1, number, 20)))


def test_a_park_during_the_return_does_not_delay_the_request_that_needs_it() -> None:
    s = scenario_of_one()
    parked(s, 1)
    s.do(ResizeRequested(9, 1, "ann", 30))
    assert orders(s.do(ParkRequested(10, 1, "ann"))) == []
    effects = s.do(SessionReturned(1, number_of(s, 1), 20))
    assert one(effects, RequestDenied).request == 10
    assert (ResizeSlice in kinds(effects), ParkSession in kinds(effects)) == (True, False)


def test_a_move_that_overtakes_the_report_of_a_return_follows_it() -> None:
    s = Scenario(card(0), card(1), limits=LIMITS)
    s.active(1, 20, park_idle_ms=0, selector="0")
    parked(s, 1)
    number = number_of(s, 1)
    s.do(ReturnWanted(1, number))
    assert orders(s.do(MoveRequested(9, 1, "ann", "1"))) == []
    assert ParkSession in kinds(s.do(SessionReturned(1, number, 20)))
    assert state_of(s, 1).move is not None


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_session_that_waits_for_room_moves_to_a_card_that_has_it(is_cold: bool) -> None:
    s = Scenario(card(0), card(1), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0, selector="0")
    if is_cold:
        number = cold(s, 1)
    else:
        parked(s, 1)
        number = number_of(s, 1)
    s.active(2, 80, selector="0")
    s.do(ReturnWanted(1, number))
    assert state_of(s, 1).is_awaited
    effects = s.do(MoveRequested(9, 1, "root", "1", True))
    if not is_cold:
        assert orders(effects) == [LeaveSession]
        effects = s.do(SessionImaged(1, number, 1000))
    assert one(effects, RestartWorker).card_uuid == "GPU-b"
    s.do(WorkerReady(1))
    assert one(s.do(SessionReturned(1, number, 60)), SessionMoved).lease.card_uuid == "GPU-b"


def test_a_move_of_a_session_that_has_to_stay_is_refused_for_good_while_it_waits_for_room() -> None:
    s = Scenario(card(0), card(1), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.do(MoveRequested(7, 1, "root", None, True))
    number = number_of(s, 1)
    s.do(SessionParked(1, number, 60))
    s.do(RegionProved(1))
    s.do(SessionStays(1, number, "it has something", is_lasting=True))
    s.active(2, 80, selector="0")
    s.do(ReturnWanted(1, number))
    assert state_of(s, 1).is_awaited
    denied = one(s.do(MoveRequested(9, 1, "root", "1", True)), RequestDenied)
    assert denied.denial.reason is DenialReason.UNSUPPORTED
    assert "it has something" in denied.denial.message


def test_a_request_waits_for_a_session_that_sends_its_image() -> None:
    for stays in (True, False):
        s = scenario()
        s.active(1, 20, park_idle_ms=0)
        s.do(MoveRequested(7, 1, "root", None, True))
        number = number_of(s, 1)
        s.do(SessionParked(1, number, 20))
        s.do(RegionProved(1))
        region = RegionRequested(9, 1, 101, "ann", "ann", 4, 5000, 1)
        assert orders(s.do(region)) == []
        if stays:
            assert ReturnSession in kinds(s.do(SessionStays(1, number, "it has something", is_lasting=True)))
        else:
            assert RestartWorker in kinds(s.do(SessionImaged(1, number, 1000)))
            s.do(WorkerReady(1))
        one(s.do(SessionReturned(1, number, 20)), OpenRegion)


def test_what_waits_for_a_return_is_refused_with_the_return() -> None:
    region = RegionRequested(9, 1, 101, "ann", "ann", 4, 5000, 1)
    # Its card has no room in time.
    s = Scenario(card(), limits=LIMITS)
    s.active(1, 20, park_idle_ms=0)
    cold(s, 1)
    for context in s.table.warming():
        s.do(WorkerExited(context.warm_id, "it was killed"))
        s.do(ReclaimProved(context.warm_id))
    s.active(2, 90)
    assert orders(s.do(region)) == []
    denial = denied(s.at(20).do(WaitTimerFired(-1)))
    assert (denial.reason, "can't return" in denial.message) == (DenialReason.BUSY, True)
    # Its new worker ends before it has the image; later the next one fails to bring it back.
    s = scenario()
    s.active(1, 20, park_idle_ms=0)
    number = cold(s, 1)
    s.do(region)
    assert denied(s.do(WorkerExited(1, "it was killed"))).reason is DenialReason.BUSY
    parked(s := scenario_of_one(), 1)
    s.do(region)
    number = number_of(s, 1)
    assert "no memory" in denied(s.do(SessionReturnFailed(1, number, "no memory"))).message
    # Its lease ends, or its client leaves, or its time is over.
    parked(s := scenario_of_one(), 1)
    s.do(region)
    ended = s.do(RevokeRequested(8, 1, "maintenance", is_operator=True))
    assert denied(ended).reason is DenialReason.REVOKED
    parked(s := scenario_of_one(), 1)
    s.do(region)
    s.do(RequesterGone(9))
    assert OpenRegion not in kinds(s.do(SessionReturned(1, number_of(s, 1), 20)))
    parked(s := scenario_of_one(), 1)
    timer = armed(s.do(region), WaitTimerFired)
    assert s.do(timer.event) == [timer], "it fired early, and is armed again"
    assert denied(s.at(60).do(timer.event)).reason is DenialReason.BUSY


def scenario_of_one() -> Scenario:
    s = scenario()
    s.active(1, 20, park_idle_ms=0)
    return s


def test_a_request_that_would_be_denied_brings_nothing_back() -> None:
    s = scenario_of_one()
    parked(s, 1)
    for stranger in (RegionRequested(9, 1, 101, "eve", "eve", 4, 5000, 1), ResizeRequested(9, 1, "eve", 30)):
        assert denied(s.do(stranger)).reason is DenialReason.NOT_FOUND
    assert phase(s, 1) is ParkPhase.PARKED


def test_a_bounded_number_of_requests_waits_for_a_return() -> None:
    s = scenario_of_one()
    parked(s, 1)
    for number in range(MAX_DEFERRED):
        assert RequestDenied not in kinds(s.do(ResizeRequested(1000 + number, 1, "ann", 20)))
    assert denied(s.do(ResizeRequested(9, 1, "ann", 20))).reason is DenialReason.BUSY
    assert len(resized := s.do(SessionReturned(1, number_of(s, 1), 20))) >= MAX_DEFERRED, resized


def test_an_event_does_not_check_each_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may have many of them, and each event of the node would take longer."""
    checks: list[bool] = []

    def must_wait(state: ParkState, *, is_move: bool) -> bool:
        checks.append(is_move)
        return counted(state, is_move=is_move)

    counted = deferred_requests.must_wait
    s = scenario_of_one()
    parked(s, 1)
    for number in range(MAX_DEFERRED):
        s.do(ResizeRequested(1000 + number, 1, "ann", 20))
    monkeypatch.setattr(deferred_requests, "must_wait", must_wait)
    s.do(SessionsUsed(()))
    assert len(checks) <= 4


def test_regions_are_parked_with_their_session_and_stay_what_they_are() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.region(100, 8)
    before = s.table.regions.get(100)
    assert LeaseParked in map(type, parked(s, 1))
    assert (s.card().held_bytes, s.table.regions.get(100)) == (10, before)
    number = number_of(s, 1)
    s.do(ReturnWanted(1, number))
    s.do(SessionReturned(1, number, 60))
    assert (s.card().held_bytes, s.table.regions.get(100)) == (70, before)


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_region_that_ends_while_parked_needs_no_proof_of_its_own(is_shown: bool) -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.region(100, 8)
    parked(s, 1)
    effects = s.do(RevokeRequested(9, 100, "maintenance", is_operator=True))
    assert EndRegion in kinds(effects)
    effects = s.do(RegionEnded(100, 6, 2, is_shown))
    assert (ProveRegion in kinds(effects), one(effects, LeaseEnded).lease.lease_id) == (False, 100)
    assert (s.card().held_bytes, s.table.regions.held_bytes(1)) == (10, 2)
    s.do(RegionReleased(100))
    assert s.table.regions.held_bytes(1) == 0


@pytest.mark.parametrize("step", ["opening", "ending", "fenced", "given up"])
def test_nothing_is_parked_while_a_region_of_it_is_in_doubt(step: str) -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.do(RegionRequested(9, 1, 100, "ann", "ann", 8, 60_000, 1))
    if step != "opening":
        s.do(RegionOpened(100, 0x1000))
        s.do(FreeRequested(10, 100, "ann"))
    if step in ("fenced", "given up"):
        s.do(RegionEnded(100, 6, 2, is_shown=False))
    if step == "given up":
        s.do(RenewRequested(11, 1, "ann", 600_000))
        s.at(300).do(TimerFired(100, 1, TimerKind.RECLAIM))
    denial = denied(s.do(ParkRequested(7, 1, "ann")))
    assert (denial.reason, "not proved free" in denial.message) == (DenialReason.BUSY, step == "given up")


@pytest.mark.parametrize("step", ["parking", "proving", "parked", "waiting", "returning"])
def test_a_revoke_ends_the_lease_in_every_step_once(step: str) -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    steps = ["parking", "proving", "parked", "waiting", "returning"]
    at = steps.index(step)
    s.do(ParkRequested(7, 1, "ann"))
    if at >= 1:
        s.do(SessionParked(1, number_of(s, 1), 60))
    if at >= 2:
        s.do(RegionProved(1))
    if step == "waiting":
        s.active(2, 80)
    if at >= 3:
        s.do(ReturnWanted(1, number_of(s, 1)))
    s.do(RevokeRequested(8, 1, "maintenance"))
    s.fire(1, TimerKind.GRACE)
    ended = s.gone(1)
    one(ended, LeaseEnded)
    assert s.table.parking.host_bytes() == (0, HOST)
    assert s.card().held_bytes == (90 if step == "waiting" else 0)
    assert not s.table.waiting()


def test_a_restored_session_is_charged_in_full_until_its_worker_has_shown_where_it_is() -> None:
    first = scenario()
    first.active(1, 60, park_idle_ms=5000, ttl_ms=60_000)
    parked(first, 1)
    kept = first.table.lease_row(1)
    assert kept is not None
    assert kept.parked_ns == first.now_ns
    s = scenario()
    s.now_ns = first.now_ns + S
    effects = s.do(LeaseRestored(kept, has_worker=True, has_session=True))
    assert s.card().held_bytes == 70
    order = one(effects, ParkSession)
    s.do(SessionParked(1, order.number, 60))
    assert kinds(s.do(RegionProved(1))) == [], "the earlier daemon has recorded the park"
    assert s.card().held_bytes == 10
    snapshot = s.table.parking.of(1)
    assert snapshot is not None
    assert snapshot.parked_ns == first.now_ns


def test_a_restored_session_whose_park_was_not_on_record_returns_at_once() -> None:
    first = scenario()
    first.active(1, 60, park_idle_ms=0, ttl_ms=60_000)
    first.do(ParkRequested(7, 1, "ann"))
    old = number_of(first, 1)
    first.do(SessionParked(1, old, 60))
    kept = first.table.lease_row(1)
    assert kept is not None
    assert kept.parked_ns == 0
    s = scenario()
    s.now_ns = first.now_ns + S
    effects = s.do(LeaseRestored(kept, has_worker=True, has_session=True, park_number=old))
    assert one(effects, ReturnSession) == ReturnSession(1, old)
    # A park whose report waited in the worker's channel.
    assert s.do(SessionParked(1, old, 60)) == []
    s.do(SessionReturned(1, old, 60))
    assert (phase(s, 1), s.card().held_bytes) == (ParkPhase.RESIDENT, 70)


def test_a_restored_session_that_is_parked_after_that_without_a_record_returns_when_it_asks() -> None:
    first = scenario()
    first.active(1, 60, park_idle_ms=0, ttl_ms=60_000)
    first.do(ParkRequested(7, 1, "ann"))
    old = number_of(first, 1)
    kept = first.table.lease_row(1)
    assert kept is not None
    s = scenario()
    s.now_ns = first.now_ns + S
    order = one(s.do(LeaseRestored(kept, has_worker=True, has_session=True)), ReturnSession)
    assert s.do(ReturnWanted(1, old)) == [ReturnSession(1, old)]
    assert order.number != old
    s.do(SessionReturned(1, old, 60))
    assert (phase(s, 1), s.card().held_bytes) == (ParkPhase.RESIDENT, 70)


def test_a_restored_session_that_can_not_return_holds_the_host_memory_that_it_is_in() -> None:
    first = scenario()
    first.active(1, 60, park_idle_ms=0, ttl_ms=60_000)
    first.do(ParkRequested(7, 1, "ann"))
    old = number_of(first, 1)
    kept = first.table.lease_row(1)
    assert kept is not None
    s = scenario()
    s.now_ns = first.now_ns + S
    s.do(LeaseRestored(kept, has_worker=True, has_session=True))
    s.do(ReturnWanted(1, old))
    assert s.table.parking.host_bytes() == (0, HOST)
    s.do(SessionReturnFailed(1, old, "the card has no room"))
    assert s.table.parking.host_bytes() == (GRANULE, HOST)
    s.do(RegionProved(1))
    assert (phase(s, 1), s.table.parking.host_bytes()) == (ParkPhase.PARKED, (GRANULE, HOST))


def test_a_wait_of_none_waits_for_parks_only() -> None:
    s = scenario()
    s.active(1, 80, park_idle_ms=0)
    effects = s.at(2).acquire(2, 60)
    one(effects, ParkSession)
    effects = s.do(SessionParkRefused(1, number_of(s, 1), "a kernel of it still runs"))
    assert not any(isinstance(effect, Granted | SpawnWorker) for effect in effects)
    assert denied(s.at(10).do(WaitTimerFired(1002))).reason is DenialReason.CAPACITY_EXCEEDED


def test_a_park_that_overtakes_the_return_follows_it() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    parked(s, 1)
    number = number_of(s, 1)
    s.do(ReturnWanted(1, number))
    assert s.do(ParkRequested(8, 1, "ann")) == []
    assert kinds(s.do(SessionReturned(1, number, 60)))[:2] == [LeaseReturned, ParkSession]
    s.do(SessionParked(1, number_of(s, 1), 60))
    assert one(s.do(RegionProved(1)), SessionParkDone).request == 8


def test_a_card_that_pins_host_memory_charges_its_page_tables() -> None:
    gib = 1 << 30
    pinning = Card("GPU-a", 0, "Test Card", 64 * gib, gib, pins_host_memory=True)
    s = Scenario(pinning, limits=CoreLimits(park_memory_bytes=64 * gib))
    s.active(1, 16 * gib, park_idle_ms=0)
    assert s.card().held_bytes == 17 * gib + 16 * GRANULE
    s.do(ParkRequested(7, 1, "ann"))
    effects = s.do(SessionParked(1, number_of(s, 1), 16 * gib))
    assert one(effects, ProveRegion).allowed_bytes == gib + 16 * GRANULE


def test_a_need_of_several_parks_waits_until_the_pace_allows_all_of_them() -> None:
    limits = CoreLimits(park_memory_bytes=HOST, overcommit=4.0, park_stay_ms=0, parks_per_minute=60)
    s = scenario(limits, capacity=1000)
    for lease_id in range(1, 4):
        s.active(lease_id, 300, park_idle_ms=0)
    s.at(1)
    # All but two parks of the burst have been used up.
    for _ in range(PARK_BURST - 2):
        s.table.parking._paces.count("GPU-a", S, s.now_ns)
    assert ParkSession not in kinds(s.acquire(5, 900, wait_ms=9000))
    effects = s.at(2).do(ParkTimerFired())
    assert kinds(effects).count(ParkSession) == 3


def test_more_parks_than_a_burst_come_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PARK_BURST", 2)
    limits = CoreLimits(park_memory_bytes=HOST, overcommit=4.0, park_stay_ms=0, parks_per_minute=60)
    s = scenario(limits, capacity=1000)
    for lease_id in range(1, 4):
        s.active(lease_id, 300, park_idle_ms=0)
    s.at(5)
    assert kinds(s.acquire(5, 900, wait_ms=9000)).count(ParkSession) == 2
    assert kinds(s.at(6).do(ParkTimerFired())).count(ParkSession) == 1


@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_a_slow_disk_does_not_fence_the_bytes_of_a_worker_that_waits_for_its_record(late_s: float) -> None:
    """The worker is killed only once the disk has the record that its session has left, which may take MAX_WAIT_S."""
    limits = CoreLimits(park_memory_bytes=8 * HOST, reclaim_timeout_s=1)
    s = Scenario(card(), limits=limits)
    s.active(1, 60, park_idle_ms=0)
    s.do(MoveRequested(7, 1, "root", None, True))
    number = state_of(s, 1).number
    s.do(SessionParked(1, number, 60))
    s.do(RegionProved(1))
    effects = s.do(SessionImaged(1, number, 1000))
    kill = one(effects, KillWorker)
    assert kill.after_record
    s.at(MAX_WAIT_S + limits.reclaim_timeout_s - 0.1 + late_s)
    effects = s.do(TimerFired(kill.worker_id, 0, TimerKind.RECLAIM))
    assert [effect.is_fenced for effect in effects if isinstance(effect, WarmEnded)] == [True] * (late_s > 0)


def cold_without_room(kept: int, other: int) -> Scenario:
    """Return a table whose cold session 1 has waited in vain for room that lease 2 has."""
    s = Scenario(card(), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0)
    s.do(MoveRequested(7, 1, "root", None, True))
    number = state_of(s, 1).number
    s.do(SessionParked(1, number, 60, kept))
    s.do(RegionProved(1))
    s.do(SessionImaged(1, number, 1000))
    for context in s.table.warming():
        s.do(WorkerExited(context.warm_id, "it was killed"))
        s.do(ReclaimProved(context.warm_id))
    s.active(2, other)
    s.do(ReturnWanted(1, number))
    assert state_of(s, 1).is_awaited
    return s.at(20)


def test_a_cold_session_without_room_is_refused_by_a_worker_that_has_it_parked() -> None:
    s = cold_without_room(kept=4, other=80)
    effects = s.do(WaitTimerFired(-1))
    one(effects, RestartWorker)
    assert s.card().held_bytes == 90 + OVERHEAD + 4, "its context and code are charged, and nothing else of it"
    adopt = one(s.do(WorkerReady(1)), AdoptSession)
    assert "can't return" in adopt.refusal
    assert not s.do(SessionReturned(1, adopt.number, 60)), "a worker that returns it all the same is not believed"
    effects = s.do(SessionReturnFailed(1, adopt.number, adopt.refusal))
    assert one(effects, RefuseWaitingOperations).reason == adopt.refusal
    state = state_of(s, 1)
    assert (state.phase, state.depth, state.is_awaited) == (ParkPhase.PARKED, ParkDepth.WARM, False)
    # From there it returns as any warm one does.
    end(s, 2)
    assert one(s.do(ReturnWanted(1, adopt.number)), ReturnSession).number == adopt.number


def test_a_cold_session_waits_on_if_not_even_a_context_has_room() -> None:
    s = cold_without_room(kept=4, other=90)
    one(s.do(WaitTimerFired(-1)), WatchClients)
    assert state_of(s, 1).depth is ParkDepth.COLD


def test_a_session_stays_on_its_card_if_the_next_one_may_not_take_it_any_more() -> None:
    exclusive = {"selector": "1", "exclusivity": Exclusivity.DEVICE_EXCLUSIVE}
    changes: list[tuple[DenialReason, Callable[[Scenario], object]]] = [
        # Its leases have ended, and the deadline does not come again.
        (DenialReason.BUSY, lambda s: s.do(DrainRequested(8, 0, "1"))),
        (DenialReason.CAPACITY_EXCEEDED, lambda s: s.active(2, 10, **exclusive)),
        (DenialReason.CAPACITY_EXCEEDED, lambda s: s.active(2, 60, selector="1", park_idle_ms=0)),
    ]
    for reason, change in changes:
        s = Scenario(card(0), card(1), limits=CoreLimits(park_memory_bytes=8 * HOST, park_stay_ms=1000))
        s.active(1, 60, park_idle_ms=0, selector="0")
        s.do(MoveRequested(7, 1, "root", "1", True))
        number = state_of(s, 1).number
        s.do(SessionParked(1, number, 60))
        s.do(RegionProved(1))
        change(s)
        assert denied(s.do(SessionImaged(1, number, 1000))).reason is reason
        assert (s.lease(1).card_uuid, s.card(1).parked_bytes, state_of(s, 1).depth) == ("GPU-a", 0, ParkDepth.COLD)
        one(s.do(ReturnWanted(1, number)), RestartWorker)


def test_a_refused_session_is_charged_for_the_code_of_its_last_park() -> None:
    s = Scenario(card(), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0)
    for kept in (40, 0):
        s.do(MoveRequested(7, 1, "root", None, True))
        number = state_of(s, 1).number
        s.do(SessionParked(1, number, 60 - kept, kept))
        s.do(RegionProved(1))
        s.do(SessionImaged(1, number, 1000))
        for context in s.table.warming():
            s.do(WorkerExited(context.warm_id, "it was killed"))
            s.do(ReclaimProved(context.warm_id))
        if kept:
            s.do(ReturnWanted(1, number))
            s.do(WorkerReady(1))
            s.do(SessionReturned(1, number, 60))
    s.active(2, 60)
    s.do(ReturnWanted(1, number))
    one(s.at(20).do(WaitTimerFired(-1)), RestartWorker)
    assert s.card().held_bytes == 60 + 2 * OVERHEAD


# --- many parkable leases ---


def calls_of(s: Scenario, event: Event) -> int:
    """Return the number of Python functions that the table calls for an event."""
    calls = 0

    def count(frame: FrameType, kind: str, argument: object) -> None:
        nonlocal calls
        calls += kind == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        s.table.handle(event, s.now_ns)
    finally:
        sys.setprofile(before)
    return calls


def crowded(leases: int, host_bytes: int = 1000 * GRANULE, tenants: TenantRules | None = None) -> Scenario:
    """A card full of idle parkable leases, and a tenant that waits for half of it, but none can be parked."""
    limits = CoreLimits(park_memory_bytes=host_bytes, park_stay_ms=0, tenants=tenants or TenantRules())
    s = Scenario(card(capacity=leases * 30), limits=limits)
    for lease_id in range(1, leases + 1):
        s.active(lease_id, park_idle_ms=0)
    s.at(1).acquire(1000, leases * 15, tenant="bob", wait_ms=60_000)
    return s


def test_the_work_for_a_plan_grows_with_the_leases_and_not_with_their_square() -> None:
    rules = TenantRules(TenantLimits(max_parked_bytes=0))
    of_tenants = [calls_of(crowded(leases, tenants=rules), ParkTimerFired()) for leases in (25, 100)]
    of_full_hosts = [calls_of(crowded(leases, GRANULE), ParkTimerFired()) for leases in (25, 100)]
    for few, many in (of_tenants, of_full_hosts):
        assert 2 * few < many < 6 * few


def test_a_renewal_plans_no_parks_while_a_tenant_waits() -> None:
    few, many = (calls_of(crowded(leases, GRANULE), RenewRequested(7, 1, "ann", 10_000)) for leases in (25, 100))
    assert many == few


def test_a_renewal_that_finds_its_lease_expired_lets_the_waiter_have_the_room() -> None:
    s = scenario()
    s.active(1, 60, park_idle_ms=0)
    s.acquire(2, 60, tenant="bob", wait_ms=60_000)
    assert one(s.at(11).do(RenewRequested(7, 1, "ann", 10_000)), RequestDenied).request == 7
    assert placed(s.gone(1)) == [(2, "GPU-a")]


# --- the cards that a tenant may use ---


@pytest.mark.parametrize("is_operator", [False, True], ids=["its tenant", "an operator"])
@pytest.mark.parametrize("is_cold", [False, True], ids=["resident", "cold"])
def test_no_session_is_moved_to_a_card_that_its_tenant_may_not_use(*, is_operator: bool, is_cold: bool) -> None:
    rules = TenantRules(by_name={"ann": TenantLimits(devices=("0", "GPU-c"))})
    s = Scenario(card(), card(1), card(2), limits=replace(LIMITS, tenants=rules))
    s.active(1, 60, park_idle_ms=0, selector="0")
    if is_cold:
        s.do(MoveRequested(8, 1, "ann", None))
        number = number_of(s, 1)
        s.do(SessionParked(1, number, 20))
        s.do(RegionProved(1))
        s.do(SessionImaged(1, number, 20))
    tenant = "root" if is_operator else "ann"
    denial = denied(s.do(MoveRequested(9, 1, tenant, "1", is_operator)))
    assert (denial.reason, "(limit devices of tenant 'ann')" in denial.message) == (DenialReason.LIMIT, True)
    assert s.lease(1).card_uuid == "GPU-a"
    assert state_of(s, 1).move is None
    effects = s.do(MoveRequested(10, 1, tenant, "2", is_operator))
    assert RequestDenied not in kinds(effects)


def test_a_tenants_cards_that_change_during_a_move_stop_it() -> None:
    s = Scenario(card(), card(1), limits=LIMITS)
    s.active(1, 60, park_idle_ms=0, selector="0")
    s.do(MoveRequested(9, 1, "ann", "1"))
    number = number_of(s, 1)
    s.do(SessionParked(1, number, 20))
    s.do(RegionProved(1))
    rules = TenantRules(by_name={"ann": TenantLimits(devices=("0",))})
    s.do(TenantRulesChanged(rules))
    assert denied(s.do(SessionImaged(1, number, 20))).reason is DenialReason.LIMIT
    assert s.lease(1).card_uuid == "GPU-a"


def test_what_keeps_a_session_in_its_worker_shows_on_its_card_and_parked() -> None:
    s = scenario()
    s.active(1, 20, park_idle_ms=0)

    def warm_only() -> str:
        shown = s.table.parking.of(1)
        assert shown is not None
        return shown.warm_only

    assert warm_only() == ""
    assert s.do(StayClaimed(1, "it has a graph")) == []
    assert warm_only() == "it has a graph"
    parked(s, 1)
    assert warm_only() == "it has a graph"
    # The claim is only what the worker says: an attempt to leave decides.
    effects = s.do(MoveRequested(7, 1, "root", None, is_operator=True))
    s.do(SessionStays(1, one(effects, LeaveSession).number, "it calls malloc", is_lasting=True))
    assert warm_only() == "it calls malloc"
    s.do(StayClaimed(1, ""))
    assert warm_only() == "it calls malloc"
    s.do(ReturnWanted(1, number_of(s, 1)))
    s.do(SessionReturned(1, number_of(s, 1), 20))
    assert warm_only() == "", "its worker says that nothing keeps it"
    s.do(StayClaimed(9, "of no lease"))
