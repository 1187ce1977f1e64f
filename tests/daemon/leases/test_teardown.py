"""Teardown: grace, kill, reap, and proof or fence."""

from collections.abc import Callable

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    ArmTimer,
    ConnectionsChanged,
    DrainRequested,
    Effect,
    FenceClearRequested,
    FreeDone,
    FreeRequested,
    KillWorker,
    LeaseEnded,
    ProveReclaimed,
    ReclaimFailed,
    ReclaimProved,
    RefuseWork,
    RenewRequested,
    RequestDenied,
    RevokeDone,
    RevokeRequested,
    SessionCondemned,
    SessionFaulted,
    ShutdownRequested,
    SlicesCleared,
    SpawnWorker,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.protocol.opcodes import RevokeOutcome

from .scenario import MS, OVERHEAD, S, Scenario, armed, card, denied, kinds, one


def free(s: Scenario, lease_id: int, tenant: str = "ann") -> list[Effect]:
    return s.do(FreeRequested(50, lease_id, tenant))


def revoke(s: Scenario, lease_id: int, request: int = 60) -> list[Effect]:
    return s.do(RevokeRequested(request, lease_id, "the card is needed"))


def fenced(s: Scenario, lease_id: int) -> list[Effect]:
    free(s, lease_id)
    return s.do(ReclaimFailed(lease_id, "NVML still shows the process"))


def test_expiry_refuses_work_waits_its_grace_kills_reaps_and_proves() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    assert s.at(10).fire(1, TimerKind.EXPIRY) == [
        RefuseWork(1, Cause.EXPIRED),
        ArmTimer(TimerFired(1, 1, TimerKind.GRACE), s.now_ns + 20 * MS),
    ]
    assert s.at(0.02).fire(1, TimerKind.GRACE) == [
        KillWorker(1),
        ArmTimer(TimerFired(1, 1, TimerKind.RECLAIM), s.now_ns + 30 * S),
    ]
    assert s.reaped(1) == [ProveReclaimed(1, "GPU-a")]
    assert s.card().held_bytes == 20 + OVERHEAD, "reaped is not proved"
    assert kinds(s.do(ReclaimProved(1))) == [LeaseEnded]
    assert s.card().held_bytes == 0
    assert s.lease(1).state is LeaseState.TORNDOWN
    assert s.lease(1).ended_ns == s.now_ns


def test_an_early_grace_timer_is_armed_again_and_a_repeated_one_does_nothing() -> None:
    s = Scenario()
    s.active(1)
    revoke(s, 1)
    assert armed(s.fire(1, TimerKind.GRACE), TimerKind.GRACE).due_ns == s.now_ns + 20 * MS
    assert KillWorker in kinds(s.at(1).fire(1, TimerKind.GRACE))
    assert s.fire(1, TimerKind.GRACE) == []


def test_a_worker_that_leaves_by_itself_in_its_grace_is_not_killed() -> None:
    s = Scenario()
    s.active(1)
    revoke(s, 1)
    assert kinds(s.reaped(1)) == [ProveReclaimed, TimerFired]
    assert s.at(1).fire(1, TimerKind.GRACE) == []


def test_a_free_kills_at_once_and_is_answered_when_the_bytes_are_back() -> None:
    s = Scenario()
    s.active(1)
    assert kinds(free(s, 1)) == [RefuseWork, KillWorker, TimerFired]
    effects = s.gone(1)
    assert one(effects, FreeDone).request == 50
    ended = one(effects, LeaseEnded)
    assert ended.cause is Cause.FREED
    assert [entry.finish for entry in ended.history] == [
        LeaseState.ACTIVE,
        LeaseState.DRAINING,
        LeaseState.TORNDOWN,
    ]


def test_freeing_again_is_answered_with_freed() -> None:
    s = Scenario()
    s.active(1)
    free(s, 1)
    assert denied(free(s, 1)).reason is DenialReason.FREED
    assert kinds(s.gone(1)).count(FreeDone) == 1
    again = denied(free(s, 1))
    assert again.reason is DenialReason.FREED
    assert "already freed" in again.message


def test_a_pending_lease_can_be_freed() -> None:
    s = Scenario()
    s.acquire(1)
    assert denied(free(s, 1)).reason is DenialReason.FREED, "the acquire is answered too"
    assert one(s.gone(1), FreeDone).request == 50


def test_freeing_another_tenants_or_an_unknown_lease_finds_nothing() -> None:
    s = Scenario()
    s.active(1)
    assert denied(free(s, 1, "bob")).reason is DenialReason.NOT_FOUND
    assert denied(free(s, 9)).reason is DenialReason.NOT_FOUND
    assert s.lease(1).state is LeaseState.ACTIVE
    free(s, 1)
    s.gone(1)
    assert denied(free(s, 1, "bob")).reason is DenialReason.NOT_FOUND, "not even when it has ended"


def test_a_free_at_the_deadline_finds_the_lease_expired() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    assert denied(s.at(10).do(FreeRequested(50, 1, "ann"))).reason is DenialReason.LEASE_EXPIRED
    assert s.lease(1).cause is Cause.EXPIRED


def fault_and_die(s: Scenario) -> list[Effect]:
    s.do(SessionFaulted(1, "illegal address"))
    return s.do(WorkerExited(1, "status 1"))


def orphan(s: Scenario) -> list[Effect]:
    s.do(ConnectionsChanged(1, is_connected=False))
    return s.at(4).fire(1, TimerKind.ORPHAN)


ENDINGS: dict[Cause, Callable[[Scenario], list[Effect]]] = {
    Cause.FREED: lambda s: free(s, 1),
    Cause.EXPIRED: lambda s: s.at(10).fire(1, TimerKind.EXPIRY),
    Cause.REVOKED: lambda s: revoke(s, 1),
    Cause.FAULTED: fault_and_die,
    Cause.WORKER_DIED: lambda s: s.do(WorkerExited(1, "signal 9")),
    Cause.OVER_SLICE: lambda s: s.do(SessionCondemned(1, Cause.OVER_SLICE, "9 bytes too many")),
    Cause.UNMEASURED: lambda s: s.do(SessionCondemned(1, Cause.UNMEASURED, "NVML can't list the processes")),
    Cause.KERNEL_TIMEOUT: lambda s: s.do(SessionCondemned(1, Cause.KERNEL_TIMEOUT, "2 s")),
    Cause.UNRESPONSIVE: lambda s: s.do(SessionCondemned(1, Cause.UNRESPONSIVE, "30 s")),
    Cause.LOAD_TIMEOUT: lambda s: s.do(SessionCondemned(1, Cause.LOAD_TIMEOUT, "120 s")),
    Cause.SPAWN_FAILED: lambda s: s.do(WorkerFailed(1, "no device")),
    Cause.SHUTDOWN: lambda s: s.do(ShutdownRequested()),
    Cause.DRAINED: lambda s: s.do(DrainRequested(60, 0)),
    Cause.ORPHANED: orphan,
}


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (Cause.FREED, DenialReason.FREED),
        (Cause.EXPIRED, DenialReason.LEASE_EXPIRED),
        (Cause.REVOKED, DenialReason.REVOKED),
        (Cause.FAULTED, DenialReason.SESSION_FAILED),
        (Cause.WORKER_DIED, DenialReason.SESSION_FAILED),
        (Cause.OVER_SLICE, DenialReason.SESSION_FAILED),
        (Cause.UNMEASURED, DenialReason.SESSION_FAILED),
        (Cause.KERNEL_TIMEOUT, DenialReason.SESSION_FAILED),
        (Cause.UNRESPONSIVE, DenialReason.SESSION_FAILED),
        (Cause.LOAD_TIMEOUT, DenialReason.SESSION_FAILED),
        (Cause.SPAWN_FAILED, DenialReason.SESSION_FAILED),
        (Cause.SHUTDOWN, DenialReason.SHUTTING_DOWN),
        (Cause.DRAINED, DenialReason.DRAINED),
        (Cause.ORPHANED, DenialReason.LEASE_EXPIRED),
    ],
)
def test_an_ended_lease_answers_with_what_ended_it(cause: Cause, reason: DenialReason, is_over: bool) -> None:
    s = Scenario(limits=CoreLimits(orphan_s=4))
    s.acquire(1, ttl_ms=10_000)
    if cause is not Cause.SPAWN_FAILED:
        s.do(WorkerReady(1))
    ENDINGS[cause](s)
    assert s.lease(1).cause is cause
    if is_over:
        s.gone(1)
    assert denied(free(s, 1)).reason is reason
    assert denied(s.do(RenewRequested(51, 1, "ann", 1000))).reason is reason
    denial = s.table.denial_for(1, s.now_ns)
    assert denial is not None
    assert denial.reason is reason


def test_an_acquire_that_the_daemon_has_no_room_for_now_may_be_tried_again() -> None:
    s = Scenario()
    s.acquire(1)
    denial = denied(s.do(WorkerExited(1, "could not be started: Too many open files", is_busy=True)))
    assert denial.reason is DenialReason.BUSY
    assert denial.message.endswith("it could not be started: Too many open files.")
    s.do(ReclaimProved(1))
    assert s.card().held_bytes == 0


def test_a_second_cause_never_overrides_the_first() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    revoke(s, 1)
    s.at(10).fire(1, TimerKind.EXPIRY)
    s.do(ShutdownRequested())
    s.do(WorkerExited(1, "signal 9"))
    s.do(WorkerFailed(1, "late"))
    assert s.lease(1).cause is Cause.REVOKED


def test_revokes_are_answered_only_when_the_lease_is_torn_down() -> None:
    s = Scenario()
    s.active(1)
    assert RevokeDone not in kinds(revoke(s, 1, 60))
    assert revoke(s, 1, 61) == []
    effects = s.gone(1)
    assert [e for e in effects if isinstance(e, RevokeDone)] == [
        RevokeDone(60, RevokeOutcome.TORN_DOWN),
        RevokeDone(61, RevokeOutcome.TORN_DOWN),
    ]
    assert revoke(s, 1, 62) == [RevokeDone(62, RevokeOutcome.TORN_DOWN)], "revoking twice is no mistake"
    assert revoke(s, 9, 63) == [RevokeDone(63, RevokeOutcome.NOT_FOUND)]


def test_the_revokes_reason_reaches_the_tenant() -> None:
    s = Scenario()
    s.active(1)
    revoke(s, 1)
    assert "the card is needed" in denied(free(s, 1)).message


def test_a_revoked_pending_lease_answers_its_acquire() -> None:
    s = Scenario()
    s.acquire(1)
    effects = revoke(s, 1)
    assert denied(effects).reason is DenialReason.REVOKED
    assert KillWorker in kinds(effects), "nothing is in flight, so there is no grace"
    assert one(s.gone(1), RevokeDone).outcome is RevokeOutcome.TORN_DOWN


def test_a_revoke_at_the_deadline_joins_the_expiry() -> None:
    s = Scenario()
    s.active(1, ttl_ms=10_000)
    revoke(s.at(10), 1)
    assert s.lease(1).cause is Cause.EXPIRED
    assert one(s.gone(1), RevokeDone).outcome is RevokeOutcome.TORN_DOWN


def test_a_worker_that_dies_while_active_goes_straight_to_the_proof() -> None:
    s = Scenario()
    s.active(1)
    effects = s.do(WorkerExited(1, "signal 11"))
    assert effects[:2] == [RefuseWork(1, Cause.WORKER_DIED), ProveReclaimed(1, "GPU-a")]
    assert armed(effects, TimerKind.RECLAIM).due_ns == s.now_ns + 30 * S
    assert s.lease(1).reason == "signal 11"
    s.do(ReclaimProved(1))
    assert s.lease(1).cause is Cause.WORKER_DIED


def test_a_fault_keeps_the_lease_active_and_is_remembered() -> None:
    s = Scenario()
    s.active(1)
    assert s.do(SessionFaulted(1, "illegal address in k")) == []
    s.do(SessionFaulted(1, "and then everything else"))
    assert s.lease(1).state is LeaseState.ACTIVE
    assert s.lease(1).fault == "illegal address in k"
    assert s.table.denial_for(1, s.now_ns) is None
    s.do(WorkerExited(1, "status 1"))
    assert s.lease(1).cause is Cause.FAULTED
    assert s.lease(1).reason == "illegal address in k; status 1"


def test_a_proof_before_the_reap_proves_nothing() -> None:
    s = Scenario()
    s.active(1)
    free(s, 1)
    assert s.do(ReclaimProved(1)) == []
    assert s.card().held_bytes == 20 + OVERHEAD


def test_bytes_not_proved_back_in_time_are_fenced() -> None:
    s = Scenario()
    s.active(1)
    free(s, 1)
    s.reaped(1)
    assert armed(s.at(29).fire(1, TimerKind.RECLAIM), TimerKind.RECLAIM).due_ns == s.now_ns + 1 * S
    effects = s.at(1).fire(1, TimerKind.RECLAIM)
    assert kinds(effects) == [RequestDenied, LeaseEnded]
    assert denied(effects).reason is DenialReason.FENCED
    assert "30 s" in denied(effects).message
    assert s.lease(1).state is LeaseState.FENCED
    assert s.lease(1).cause is Cause.FREED
    assert s.card().fenced_bytes == s.card().held_bytes == 20 + OVERHEAD


def test_a_worker_that_cannot_be_reaped_is_fenced_too() -> None:
    s = Scenario()
    s.active(1)
    free(s, 1)
    assert "could not be reaped" in denied(s.at(30).fire(1, TimerKind.RECLAIM)).message


def test_a_failed_reclaim_fences_and_answers_everybody() -> None:
    s = Scenario()
    s.active(1)
    free(s, 1)
    revoke(s, 1)
    effects = s.do(ReclaimFailed(1, "NVML still shows the process"))
    assert one(effects, RevokeDone) == RevokeDone(60, RevokeOutcome.FENCED)
    assert "NVML still shows the process" in denied(effects).message
    assert revoke(s, 1, 61) == [RevokeDone(61, RevokeOutcome.FENCED)]
    assert denied(free(s, 1)).reason is DenialReason.FENCED
    assert denied(s.do(RenewRequested(51, 1, "ann", 10))).reason is DenialReason.FENCED


def test_a_late_proof_does_not_lift_a_fence() -> None:
    s = Scenario()
    s.active(1)
    fenced(s, 1)
    for event in (WorkerExited(1, "late"), ReclaimProved(1), ReclaimFailed(1, "again"), WorkerReady(1)):
        assert s.do(event) == []
    assert s.at(40).fire(1, TimerKind.RECLAIM) == []
    assert s.lease(1).state is LeaseState.FENCED


def test_an_operator_lifts_fences_and_the_queue_goes_on() -> None:
    s = Scenario(card(0), card(1))
    s.active(1, 100, selector="0")
    s.active(2, 100, selector="1")
    fenced(s, 1)
    fenced(s, 2)
    s.acquire(3, 100, wait_ms=1000)
    effects = s.do(FenceClearRequested(70, "GPU-b"))
    assert effects[0] == SlicesCleared(70, 1, (2,))
    assert one(effects, SpawnWorker).card_uuid == "GPU-b"
    assert s.lease(2).state is LeaseState.TORNDOWN
    assert s.lease(1).state is LeaseState.FENCED
    assert s.do(FenceClearRequested(71, None)) == [SlicesCleared(71, 1, (1,))]
    assert s.do(FenceClearRequested(72, None)) == [SlicesCleared(72, 0, ())]
    assert s.card(0).held_bytes == s.card(0).fenced_bytes == 0


def test_clearing_an_unknown_card_names_those_there_are() -> None:
    denial = denied(Scenario().do(FenceClearRequested(70, "GPU-z")))
    assert denial.reason is DenialReason.INVALID_REQUEST
    assert "GPU-a" in denial.message


def test_a_shutdown_ends_every_lease_and_grants_none() -> None:
    s = Scenario()
    s.active(1, 20)
    s.acquire(2, 20)
    s.acquire(3, 50, wait_ms=1000)
    effects = s.do(ShutdownRequested())
    refused = {e.request: e.denial.reason for e in effects if isinstance(e, RequestDenied)}
    assert refused == {1002: DenialReason.SHUTTING_DOWN, 1003: DenialReason.SHUTTING_DOWN}
    assert [e for e in effects if isinstance(e, KillWorker)] == [KillWorker(2)]
    assert armed(effects, TimerKind.GRACE).event == TimerFired(1, 1, TimerKind.GRACE)
    assert denied(s.acquire(4)).reason is DenialReason.SHUTTING_DOWN
    assert s.do(ShutdownRequested()) == []
    assert s.table.is_shutting_down
    s.gone(1)
    s.gone(2)
    assert s.table.snapshots() == ()


def test_events_for_unknown_and_ended_leases_are_harmless() -> None:
    s = Scenario()
    s.active(1)
    free(s, 1)
    s.gone(1)
    for lease_id in (1, 99):
        for event in (
            WorkerReady(lease_id),
            WorkerFailed(lease_id, "x"),
            WorkerExited(lease_id, "x"),
            SessionFaulted(lease_id, "x"),
            ReclaimProved(lease_id),
            ReclaimFailed(lease_id, "x"),
        ):
            assert s.do(event) == []
        for kind in TimerKind:
            assert s.fire(lease_id, kind) == []
