"""Submits step by step; `test_table_any_order` covers any order."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    CardPolled,
    Effect,
    FenceClearRequested,
    FreeDone,
    FreeRequested,
    KillWorker,
    LeaseRestored,
    PoolTimerFired,
    ProveReclaimed,
    ReclaimFailed,
    ReclaimProved,
    RefuseSubmit,
    RenameWorker,
    RenewRequested,
    RequestDenied,
    RequesterGone,
    RevokeRequested,
    SessionCondemned,
    SessionOpened,
    SetDeadline,
    SlicesCleared,
    SpawnSubmit,
    SpawnWorker,
    SubmitAbandoned,
    SubmitEnded,
    SubmitFenced,
    SubmitFound,
    SubmitReady,
    TimerFired,
    TimerKind,
    WaitTimerFired,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, Cause, LeaseState, LeaseTerms, SubmitRequested, SubmitState
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.leases.submits import MAX_WAIT_S
from gpulease.daemon.leases.table import LeaseTable

from .scenario import MS, OVERHEAD, Scenario, armed, card, denied, kinds, one

Act = Callable[[Scenario], list[Effect]]

LEASE = 1
FIRST = FIRST_SUBMIT_ID
SIZE, KEPT = 50, 20


def leased(limits: CoreLimits | None = None, *, keeps: int = KEPT, capacity: int = 100) -> Scenario:
    """Return an active lease of 50 bytes, 20 of them for submits."""
    s = Scenario(card(capacity=capacity), limits=limits)
    s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(SIZE, 10_000, submit_bytes=keeps)))
    s.do(WorkerReady(LEASE))
    return s


def ask(s: Scenario, request: int = 20, timeout_ms: int = 1000) -> list[Effect]:
    return s.do(SubmitRequested(request, LEASE, "ann", timeout_ms))


def run(s: Scenario, number: int = FIRST, request: int = 20) -> list[Effect]:
    """Start a submit and report it ready."""
    ask(s, request)
    return s.do(WorkerReady(number))


def state(s: Scenario) -> SubmitState | None:
    submit = s.table.submits.of(LEASE)
    return None if submit is None else submit.state


def test_a_lease_that_keeps_room_is_charged_two_contexts() -> None:
    s = Scenario(card(capacity=100))
    acquired = s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(SIZE, 10_000, submit_bytes=KEPT)))
    assert one(acquired, SpawnWorker).terms.session_bytes == SIZE - KEPT
    s.do(WorkerReady(LEASE))
    assert s.card().held_bytes == SIZE + 2 * OVERHEAD
    assert s.table.submits.may_hold(LEASE) == ("GPU-a", SIZE - KEPT + OVERHEAD)
    spawned = one(ask(s), SpawnSubmit)
    assert (spawned.submit_id, spawned.lease_id, spawned.size_bytes) == (FIRST, LEASE, KEPT)
    assert s.table.submits.may_hold(FIRST) is None
    s.do(WorkerReady(FIRST))
    assert s.table.submits.may_hold(FIRST) == ("GPU-a", KEPT + OVERHEAD)
    assert s.card().held_bytes == SIZE + 2 * OVERHEAD
    s.do(SubmitAbandoned(FIRST))
    assert s.table.submits.may_hold(FIRST) is None


def test_memory_for_submits_is_refused_like_any_other() -> None:
    s = Scenario(card(capacity=100))
    wanted = AcquireRequested(9, "ann", LEASE, LeaseTerms(85, 10_000, submit_bytes=5))
    assert "80 bytes" in denied(s.do(wanted)).message
    fitting = replace(wanted, request=10, lease_id=2, terms=replace(wanted.terms, size_bytes=80))
    assert kinds(s.do(fitting))[0] is SpawnWorker


@pytest.mark.parametrize("kept", [-1, SIZE, SIZE + 1])
def test_the_session_keeps_something(kept: int) -> None:
    s = Scenario(card())
    effects = s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(SIZE, 10_000, submit_bytes=kept)))
    assert denied(effects).reason is DenialReason.INVALID_REQUEST


def test_a_submit_from_its_request_to_its_end() -> None:
    s = leased()
    assert kinds(ask(s)) == [SpawnSubmit, TimerFired]
    assert kinds([armed(s.do(TimerFired(FIRST, 0, TimerKind.SPAWN)), TimerKind.SPAWN)]) == [TimerFired]
    effects = s.do(WorkerReady(FIRST))
    assert one(effects, SubmitReady).request == 20
    deadline = one(effects, SetDeadline)
    assert (deadline.worker_id, deadline.deadline_ns) == (FIRST, s.lease(LEASE).deadline_ns)
    assert armed(effects, TimerKind.EXPIRY).due_ns == s.now_ns + 1000 * MS
    assert one(s.do(WorkerExited(FIRST, "exited")), ProveReclaimed).worker_id == FIRST
    assert one(s.do(ReclaimProved(FIRST)), SubmitEnded).lease_id == LEASE
    assert state(s) is None
    assert s.lease(LEASE).state is LeaseState.ACTIVE
    assert one(ask(s, 21), SpawnSubmit).submit_id == FIRST + 1


REFUSED: dict[str, tuple[Act, DenialReason]] = {
    "another's lease": (lambda s: s.do(SubmitRequested(20, LEASE, "bob", 1000)), DenialReason.NOT_FOUND),
    "no such lease": (lambda s: s.do(SubmitRequested(20, 77, "ann", 1000)), DenialReason.NOT_FOUND),
    "no time": (lambda s: ask(s, timeout_ms=0), DenialReason.INVALID_REQUEST),
    "the lease's time is over": (lambda s: ask(s.at(10)), DenialReason.LEASE_EXPIRED),
}


@pytest.mark.parametrize(("act", "reason"), REFUSED.values(), ids=REFUSED)
def test_submits_that_are_refused(act: Act, reason: DenialReason) -> None:
    assert denied(act(leased())).reason is reason


def test_a_lease_whose_session_has_its_memory_refuses() -> None:
    s = leased(keeps=0)
    s.do(SessionOpened(LEASE))
    denial = denied(ask(s))
    assert denial.reason is DenialReason.INVALID_REQUEST
    assert "GpuBuilder().submits(bytes)" in denial.hint


@pytest.mark.parametrize(("capacity", "has", "extra"), [(100, SIZE, OVERHEAD), (65, SIZE - OVERHEAD, 0)])
def test_a_lease_that_never_opened_its_session_runs_a_submit_in_its_place(capacity: int, has: int, extra: int) -> None:
    s = leased(keeps=0, capacity=capacity)
    assert one(ask(s), SpawnSubmit).size_bytes == has
    s.do(WorkerReady(FIRST))
    assert s.card().held_bytes == SIZE + OVERHEAD + extra
    assert s.table.submits.may_hold(FIRST) == ("GPU-a", has + OVERHEAD)
    assert s.table.submits.may_hold(LEASE) == ("GPU-a", OVERHEAD), "the session's worker has its context alone"
    kept = s.table.lease_row(LEASE)
    assert kept is not None
    assert kept.charge_bytes == SIZE + OVERHEAD, "what is borrowed goes back with the submit"
    s.do(WorkerExited(FIRST, "exited"))
    s.do(ReclaimProved(FIRST))
    assert s.card().held_bytes == SIZE + OVERHEAD
    assert s.table.submits.may_hold(LEASE) == ("GPU-a", SIZE + OVERHEAD)
    assert one(ask(s, 21), SpawnSubmit).size_bytes == has


def test_nobody_attaches_to_a_session_whose_memory_a_submit_has() -> None:
    s = leased(keeps=0)
    run(s)
    s.do(SessionOpened(LEASE))
    assert s.table.submits.in_place_of_session(LEASE) is not None
    s.do(WorkerExited(FIRST, "exited"))
    assert s.table.submits.in_place_of_session(LEASE) is not None, "its bytes are not proved free"
    s.do(ReclaimProved(FIRST))
    assert s.table.submits.in_place_of_session(LEASE) is None
    s.do(SessionOpened(LEASE))
    assert denied(ask(s, 21)).reason is DenialReason.INVALID_REQUEST


def test_a_submit_borrows_nothing_that_others_have_taken() -> None:
    s = leased(keeps=0, capacity=100)
    s.do(CardPolled("GPU-a", 0, 100 - SIZE - OVERHEAD, s.now_ns))
    assert one(ask(s), SpawnSubmit).size_bytes == SIZE - OVERHEAD
    assert s.card().held_bytes == s.card().capacity_bytes == SIZE + OVERHEAD


def test_a_submit_borrows_nothing_that_a_lease_holds_which_ended_before_it_had_room() -> None:
    s = Scenario()
    s.table = LeaseTable((card(capacity=SIZE + 3 * OVERHEAD),), warm_contexts=1)
    s.do(PoolTimerFired())
    s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(SIZE, 10_000)))
    s.do(WorkerReady(LEASE))
    (context,) = s.table.warming()
    s.do(WorkerFailed(context.warm_id, "no context"))
    assert SpawnWorker not in kinds(s.do(AcquireRequested(10, "bob", 2, LeaseTerms(OVERHEAD, 10_000))))
    s.do(FreeRequested(30, 2, "bob"))
    assert s.card().held_bytes == s.card().capacity_bytes
    assert one(ask(s), SpawnSubmit).size_bytes == SIZE - OVERHEAD


def test_a_lease_as_small_as_a_context_needs_the_cards_room() -> None:
    s = Scenario(card(capacity=2 * OVERHEAD + 5))
    s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(OVERHEAD, 10_000)))
    s.do(WorkerReady(LEASE))
    assert denied(ask(s)).reason is DenialReason.BUSY


def test_what_a_submit_borrowed_is_part_of_its_leases_fence() -> None:
    s = leased(keeps=0)
    run(s)
    s.do(FreeRequested(30, LEASE, "ann"))
    s.do(ReclaimFailed(LEASE, "NVML shows it"))
    assert s.lease(LEASE).state is LeaseState.FENCED
    assert s.card().fenced_bytes == SIZE + 2 * OVERHEAD
    kept = s.table.lease_row(LEASE)
    assert kept is not None
    assert kept.charge_bytes == SIZE + 2 * OVERHEAD
    s.do(FenceClearRequested(31, None))
    assert s.card().held_bytes == 0


@pytest.mark.parametrize("size", [SIZE, SIZE - OVERHEAD])
def test_a_submit_in_its_sessions_place_outlives_the_daemon(size: int) -> None:
    before = leased(keeps=0)
    run(before)
    kept = before.table.lease_row(LEASE, 77)
    assert kept is not None
    s = Scenario(card(capacity=100))
    s.do(LeaseRestored(kept, has_worker=True))
    s.do(SubmitFound(FIRST + 7, LEASE, "GPU-a", True, 1000, size))
    assert state(s) is SubmitState.RUNNING
    assert s.table.submits.may_hold(FIRST + 7) == ("GPU-a", size + OVERHEAD)
    s.do(WorkerExited(FIRST + 7, "exited"))
    s.do(ReclaimProved(FIRST + 7))
    assert s.card().held_bytes == SIZE + OVERHEAD
    assert denied(ask(s, 21)).reason is DenialReason.INVALID_REQUEST, "nobody knows whether its session was opened"


def test_submits_count_as_acquires_do() -> None:
    s = leased(CoreLimits(tenants=TenantRules(TenantLimits(acquires_per_minute=1, acquire_burst=2))))
    run(s)
    s.do(WorkerExited(FIRST, "exited"))
    s.do(ReclaimProved(FIRST))
    assert denied(ask(s, 21)).reason is DenialReason.RATE


def test_a_second_submit_waits_and_a_third_is_refused() -> None:
    s = leased()
    run(s)
    assert kinds(ask(s, 21)) == [WaitTimerFired]
    assert denied(ask(s, 22)).reason is DenialReason.BUSY
    s.do(WorkerExited(FIRST, "exited"))
    assert one(s.do(ReclaimProved(FIRST)), SpawnSubmit).submit_id == FIRST + 1
    assert one(s.do(WorkerReady(FIRST + 1)), SubmitReady).request == 21


def test_a_submit_waits_for_a_bounded_time() -> None:
    s = leased()
    run(s)
    ask(s, 21)
    assert kinds(s.at(1).do(WaitTimerFired(21))) == [WaitTimerFired]
    s.do(RenewRequested(5, LEASE, "ann", 100_000))
    assert one(s.at(MAX_WAIT_S).do(WaitTimerFired(21)), RequestDenied).denial.reason is DenialReason.BUSY
    assert kinds(ask(s, 22)) == [WaitTimerFired]


ENDS: dict[str, tuple[Act, Cause | None]] = {
    "its own time": (lambda s: s.at(1).do(TimerFired(FIRST, 0, TimerKind.EXPIRY)), None),
    "a rule it broke": (lambda s: s.do(SessionCondemned(FIRST, Cause.OVER_SLICE, "why")), Cause.OVER_SLICE),
    "nobody to hand it over": (lambda s: s.do(SubmitAbandoned(FIRST)), None),
    "its lease revoked": (lambda s: s.do(RevokeRequested(5, LEASE, "why")), Cause.REVOKED),
    "its lease freed": (lambda s: s.do(FreeRequested(5, LEASE, "ann")), Cause.FREED),
}


@pytest.mark.parametrize(("end", "cause"), ENDS.values(), ids=ENDS)
def test_an_ended_submit_gets_its_grace_and_is_killed(end: Act, cause: Cause | None) -> None:
    s = leased()
    run(s)
    effects = end(s)
    assert one(effects, RefuseSubmit).cause is cause
    assert KillWorker(FIRST) not in effects
    assert s.do(TimerFired(FIRST, 0, TimerKind.GRACE)) != [KillWorker(FIRST)]
    assert KillWorker(FIRST) in s.at(0.02).do(TimerFired(FIRST, 0, TimerKind.GRACE))


def test_a_lease_is_torn_down_only_once_its_submit_is_proved_gone() -> None:
    s = leased()
    run(s)
    s.do(FreeRequested(5, LEASE, "ann"))
    assert FreeDone not in kinds(s.gone(LEASE))
    assert s.card().held_bytes == SIZE + 2 * OVERHEAD
    s.do(WorkerExited(FIRST, "killed"))
    effects = s.do(ReclaimProved(FIRST))
    assert one(effects, FreeDone).request == 5
    assert s.card().held_bytes == 0


def test_a_waiting_submit_learns_that_its_lease_ended() -> None:
    s = leased()
    ask(s)
    ask(s, 21)
    effects = s.do(RevokeRequested(5, LEASE, "why"))
    told = {effect.request: effect.denial.reason for effect in effects if isinstance(effect, RequestDenied)}
    assert told == {20: DenialReason.REVOKED, 21: DenialReason.REVOKED}
    assert KillWorker(FIRST) in effects


def test_a_worker_that_can_not_start_is_reported_and_costs_nothing() -> None:
    for event in (WorkerFailed(FIRST, "no context"), WorkerExited(FIRST, "signal 9")):
        s = leased()
        ask(s)
        assert denied(s.do(event)).reason is DenialReason.SESSION_FAILED
        s.do(WorkerExited(FIRST, "killed"))
        s.do(ReclaimProved(FIRST))
        assert (state(s), s.lease(LEASE).state) == (None, LeaseState.ACTIVE)


def test_a_submit_that_does_not_start_in_time_is_given_up() -> None:
    s = leased(CoreLimits(spawn_timeout_s=2))
    ask(s)
    assert denied(s.at(2).do(TimerFired(FIRST, 0, TimerKind.SPAWN))).reason is DenialReason.SESSION_FAILED


def test_a_submit_the_daemon_has_no_room_for_may_be_tried_again() -> None:
    s = leased()
    ask(s)
    assert denied(s.do(WorkerExited(FIRST, "could not be started", is_busy=True))).reason is DenialReason.BUSY
    s.do(ReclaimProved(FIRST))
    assert one(ask(s, 21), SpawnSubmit).submit_id == FIRST + 1


def test_a_requester_that_leaves_early_gets_no_answer() -> None:
    s = leased()
    ask(s)
    ask(s, 21)
    assert kinds(s.do(RequesterGone(21))) == []
    effects = s.do(RequesterGone(20))
    assert RequestDenied not in kinds(effects)
    assert KillWorker(FIRST) in effects
    assert kinds(s.do(RequesterGone(20))) == []


def test_a_renewal_moves_the_submits_deadline_too() -> None:
    s = leased()
    run(s)
    moved = [effect for effect in s.do(RenewRequested(5, LEASE, "ann", 60_000)) if isinstance(effect, SetDeadline)]
    assert {effect.worker_id: effect.generation for effect in moved} == {LEASE: 2, FIRST: 2}


def stuck(s: Scenario) -> list[Effect]:
    run(s)
    s.do(WorkerExited(FIRST, "exited"))
    return s.do(ReclaimFailed(FIRST, "NVML gave an error"))


def test_a_submit_that_is_not_proved_gone_bars_the_next_ones() -> None:
    s = leased()
    assert one(stuck(s), SubmitFenced).lease_id == LEASE
    assert denied(ask(s, 21)).reason is DenialReason.CAPACITY_EXCEEDED
    assert s.lease(LEASE).state is LeaseState.ACTIVE
    effects = s.do(FenceClearRequested(6, None))
    assert one(effects, SlicesCleared).count == 1
    assert one(effects, SubmitEnded).submit_id == FIRST
    assert SpawnSubmit in kinds(ask(s, 22))


def test_a_submit_that_is_not_proved_gone_fences_the_lease_at_its_end() -> None:
    s = leased()
    stuck(s)
    s.do(RevokeRequested(5, LEASE, "why"))
    assert one(s.gone(LEASE), SubmitEnded).submit_id == FIRST
    assert s.lease(LEASE).state is LeaseState.FENCED
    assert s.card().fenced_bytes == SIZE + 2 * OVERHEAD


def restored(*, is_running: bool, has_worker: bool = True) -> tuple[Scenario, list[Effect]]:
    before = leased()
    kept = before.table.lease_row(LEASE)
    assert kept is not None
    assert kept.terms.submit_bytes == KEPT
    s = Scenario(card(capacity=100))
    s.do(LeaseRestored(kept, has_worker))
    return s, s.do(SubmitFound(FIRST + 7, LEASE, "GPU-a", is_running, 1000))


def test_an_earlier_daemons_submit_goes_on_with_its_lease() -> None:
    s, effects = restored(is_running=True)
    assert state(s) is SubmitState.RUNNING
    assert armed(effects, TimerKind.EXPIRY).due_ns == s.now_ns + 1000 * MS
    s.do(WorkerExited(FIRST + 7, "exited"))
    s.do(ReclaimProved(FIRST + 7))
    assert one(ask(s), SpawnSubmit).submit_id == FIRST + 8


@pytest.mark.parametrize(("is_running", "has_worker"), [(False, True), (True, False), (False, False)])
def test_an_earlier_daemons_submit_that_can_not_go_on_is_ended(is_running: bool, has_worker: bool) -> None:
    s, effects = restored(is_running=is_running, has_worker=has_worker)
    assert state(s) is SubmitState.ENDING
    assert KillWorker(FIRST + 7) in effects


@pytest.mark.parametrize("has_session", [False, True])
def test_the_next_table_has_submits_where_no_session_was_opened(has_session: bool) -> None:
    kept = leased(keeps=0).table.lease_row(LEASE)
    assert kept is not None
    s = Scenario(card(capacity=100))
    s.do(LeaseRestored(kept, has_worker=True, has_session=has_session))
    if has_session:
        assert denied(ask(s)).reason is DenialReason.INVALID_REQUEST
        return
    assert one(ask(s), SpawnSubmit).size_bytes == SIZE
    s.do(SessionOpened(LEASE))
    assert s.table.submits.in_place_of_session(LEASE) is not None, "nobody is let into it meanwhile"


def test_a_submit_without_a_lease_is_killed() -> None:
    s = Scenario(card())
    effects = s.do(SubmitFound(FIRST, 77, "GPU-a", True, 1000))
    killed = one(effects, KillWorker).worker_id
    assert RenameWorker(FIRST, killed) in effects
    assert s.card().warm_bytes == OVERHEAD
    s.do(WorkerExited(killed, "killed"))
    s.do(ReclaimProved(killed))
    assert s.card().warm_bytes == 0
