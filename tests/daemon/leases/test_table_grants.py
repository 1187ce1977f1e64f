"""From the acquire to the grant: spawning, the clock that starts with the worker, renewing."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    ArmTimer,
    Granted,
    KillWorker,
    ProveReclaimed,
    RefuseWork,
    Renewed,
    RenewRequested,
    RequestDenied,
    RequesterGone,
    SetDeadline,
    SpawnWorker,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState, LeaseTerms
from gpulease.protocol.opcodes import Exclusivity

from .scenario import MS, OVERHEAD, S, Scenario, armed, denied, kinds, one


def test_an_acquire_spawns_a_worker_and_gives_it_a_time_to_start() -> None:
    s = Scenario()
    assert s.acquire(1, 20) == [
        SpawnWorker(1, "GPU-a", LeaseTerms(20, 10_000, exclusivity=Exclusivity.SHARED, orphan_ms=0)),
        ArmTimer(TimerFired(1, 1, TimerKind.SPAWN), s.now_ns + 60 * S),
    ]
    assert s.lease(1).state is LeaseState.PENDING
    assert s.card().held_bytes == 20 + OVERHEAD


def test_the_time_to_live_starts_when_the_worker_is_ready() -> None:
    s = Scenario()
    s.acquire(1, ttl_ms=5000)
    effects = s.at(3).do(WorkerReady(1))
    deadline = s.now_ns + 5 * S
    assert effects == [
        SetDeadline(1, 1, deadline),
        ArmTimer(TimerFired(1, 1, TimerKind.EXPIRY), deadline),
        Granted(1001, s.lease(1)),
    ]
    assert s.lease(1).deadline_ns == deadline
    assert s.table.denial_for(1, deadline - 1) is None


def test_a_second_ready_changes_nothing() -> None:
    s = Scenario()
    s.active(1)
    assert s.at(1).do(WorkerReady(1)) == []


def test_a_worker_that_fails_to_start_is_killed_and_its_requester_told_why() -> None:
    s = Scenario()
    s.acquire(1)
    effects = s.do(WorkerFailed(1, "cuInit gave error 999"))
    assert kinds(effects) == [RefuseWork, RequestDenied, KillWorker, TimerFired]
    assert denied(effects).reason is DenialReason.SESSION_FAILED
    assert "cuInit gave error 999" in denied(effects).message
    assert s.lease(1).cause is Cause.SPAWN_FAILED


def test_a_worker_that_dies_before_it_is_ready_needs_no_kill() -> None:
    s = Scenario()
    s.acquire(1)
    effects = s.do(WorkerExited(1, "signal 11"))
    assert kinds(effects) == [RefuseWork, RequestDenied, ProveReclaimed, TimerFired]
    assert "signal 11" in denied(effects).message
    assert s.lease(1).cause is Cause.SPAWN_FAILED


def test_a_worker_that_takes_too_long_to_start_is_given_up() -> None:
    s = Scenario()
    s.acquire(1)
    early = s.at(59).fire(1, TimerKind.SPAWN)
    assert armed(early, TimerKind.SPAWN).due_ns == s.now_ns + 1 * S
    effects = s.at(1).fire(1, TimerKind.SPAWN)
    assert denied(effects).reason is DenialReason.SESSION_FAILED
    assert "60 s" in denied(effects).message
    assert s.do(WorkerReady(1)) == [], "a worker that is ready while draining is ignored"
    assert s.lease(1).state is LeaseState.DRAINING


def test_the_spawn_timer_does_nothing_once_the_worker_is_ready() -> None:
    s = Scenario()
    s.active(1, ttl_ms=1000_000)
    assert s.at(61).fire(1, TimerKind.SPAWN) == []


def test_a_requester_that_leaves_while_pending_gets_no_answer_and_its_lease_goes() -> None:
    s = Scenario()
    s.acquire(1)
    assert kinds(s.do(RequesterGone(1001))) == [RefuseWork, KillWorker, TimerFired]
    assert s.lease(1).cause is Cause.ABANDONED
    s.gone(1)
    assert s.card().held_bytes == 0


def test_a_requester_that_leaves_after_the_grant_leaves_the_lease_alone() -> None:
    s = Scenario()
    s.active(1)
    assert s.do(RequesterGone(1001)) == []
    assert s.lease(1).state is LeaseState.ACTIVE


def test_renewing_numbers_the_grant_anew_and_moves_the_deadline() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    effects = s.at(4).do(RenewRequested(7, 1, "ann", 10_000))
    deadline = s.now_ns + 10 * S
    assert effects == [
        SetDeadline(1, 2, deadline),
        ArmTimer(TimerFired(1, 2, TimerKind.EXPIRY), deadline),
        Renewed(7, s.lease(1)),
    ]
    assert s.lease(1).generation == 2


def test_renewing_never_shortens() -> None:
    s = Scenario()
    deadline = s.active(1, ttl_ms=10_000).deadline_ns
    s.do(RenewRequested(7, 1, "ann", 1))
    assert s.lease(1).deadline_ns == deadline
    assert s.lease(1).generation == 2


def test_an_expiry_timer_from_before_the_renewal_does_nothing() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    s.at(9).do(RenewRequested(7, 1, "ann", 10_000))
    assert s.at(5).fire(1, TimerKind.EXPIRY, generation=1) == []
    assert s.lease(1).state is LeaseState.ACTIVE


def test_an_early_expiry_timer_is_armed_again() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    effects = s.at(9).fire(1, TimerKind.EXPIRY)
    assert effects == [ArmTimer(TimerFired(1, 1, TimerKind.EXPIRY), s.now_ns + 1 * S)]


def test_a_renewal_at_the_deadline_is_too_late_even_before_the_timer() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    effects = s.at(10).do(RenewRequested(7, 1, "ann", 10_000))
    assert kinds(effects) == [RefuseWork, TimerFired, RequestDenied]
    assert denied(effects).reason is DenialReason.LEASE_EXPIRED
    assert s.lease(1).cause is Cause.EXPIRED


def test_a_pending_lease_cannot_be_renewed() -> None:
    s = Scenario()
    s.acquire(1)
    assert denied(s.do(RenewRequested(7, 1, "ann", 10))).reason is DenialReason.INVALID_REQUEST


def test_another_tenants_lease_looks_like_an_unknown_one() -> None:
    s = Scenario()
    s.active(1)
    theirs = denied(s.do(RenewRequested(7, 1, "bob", 10)))
    none = denied(s.do(RenewRequested(7, 2, "bob", 10)))
    assert theirs.reason is DenialReason.NOT_FOUND
    assert theirs.message.replace("1", "2") == none.message
    assert theirs.hint == none.hint


def test_an_operator_may_renew_for_a_tenant() -> None:
    s = Scenario()
    s.active(1)
    assert one(s.do(RenewRequested(7, 1, "root", 10, is_operator=True)), Renewed).lease.tenant == "ann"


@pytest.mark.parametrize(
    ("ttl_ms", "reason"),
    [(0, DenialReason.INVALID_REQUEST), (-1, DenialReason.INVALID_REQUEST), (86_400_001, DenialReason.LIMIT)],
)
def test_a_time_to_live_has_bounds(ttl_ms: int, reason: DenialReason) -> None:
    s = Scenario()
    assert denied(s.acquire(1, ttl_ms=ttl_ms)).reason is reason
    s.active(2)
    assert denied(s.do(RenewRequested(7, 2, "ann", ttl_ms))).reason is reason
    assert s.lease(2).generation == 1


def test_denial_for_says_why_work_is_refused() -> None:
    s = Scenario()
    unknown = s.table.denial_for(1, s.now_ns)
    assert unknown is not None
    assert unknown.reason is DenialReason.NOT_FOUND
    s.acquire(1, ttl_ms=10)
    pending = s.table.denial_for(1, s.now_ns)
    assert pending is not None
    assert pending.reason is DenialReason.INVALID_REQUEST
    s.do(WorkerReady(1))
    assert s.table.denial_for(1, s.now_ns) is None
    expired = s.table.denial_for(1, s.now_ns + 10 * MS)
    assert expired is not None
    assert expired.reason is DenialReason.LEASE_EXPIRED
    assert s.lease(1).state is LeaseState.ACTIVE, "a query changes nothing"


def test_an_open_acquires_number_cannot_be_reused() -> None:
    s = Scenario()
    s.acquire(1)
    with pytest.raises(ValueError, match="1001 is still open"):
        s.acquire(1)
