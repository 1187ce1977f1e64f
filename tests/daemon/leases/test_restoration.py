"""Restoring an earlier table, case by case; `test_table_any_order` covers any order."""

from dataclasses import replace
from typing import Any

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    ArmTimer,
    DrainCancelled,
    DrainTimerFired,
    Effect,
    FenceClearRequested,
    FreeRequested,
    KillWorker,
    LeaseEnded,
    LeaseRestored,
    PoolTimerFired,
    ProveReclaimed,
    ReclaimFailed,
    RefuseWork,
    RenameWorker,
    Renewed,
    RenewRequested,
    RevokeDone,
    RevokeRequested,
    SetDeadline,
    SlicesCleared,
    TimerFired,
    TimerKind,
    WarmEnded,
    WarmUp,
    WorkerExited,
    WorkerFound,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_WARM_ID, Cause, LeaseState, LeaseTerms
from gpulease.daemon.leases.persisted import LeaseRow, RecoveredState, WarmRow
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Exclusivity, RevokeOutcome, Waiting

from .scenario import MS, OVERHEAD, S, Scenario, armed, card, denied, end, kinds, one, placed

DEADLINE = 1005 * S
WARM = FIRST_WARM_ID
TERMS = LeaseTerms(20, 10_000, exclusivity=Exclusivity.SHARED, max_kernel_ms=7, waiting=Waiting.BLOCK, orphan_ms=0)


def kept(lease_id: int = 1, size: int = 20, state: LeaseState = LeaseState.ACTIVE, **more: object) -> LeaseRow:
    """Return a lease of tenant ann on the first card, with five seconds to go."""
    cause = None if state is LeaseState.ACTIVE else Cause.REVOKED
    lease = LeaseRow(
        lease_id, "ann", "GPU-a", replace(TERMS, size_bytes=size), size + OVERHEAD, 3, state, cause, "", "", 990 * S,
        DEADLINE, 995 * S if state is LeaseState.FENCED else None,
    )  # fmt: skip
    return lease._replace(**more)  # type: ignore[arg-type]


class Restored(Scenario):
    """A table restored with leases."""

    def __init__(
        self,
        *leases: LeaseRow,
        recovered: RecoveredState | None = None,
        warm: int = 0,
        limits: CoreLimits | None = None,
    ):
        super().__init__()
        self.table = LeaseTable((card(),), limits or CoreLimits(), warm, recovered)
        self.effects: list[Effect] = []
        for lease in leases:
            self.restore(lease)

    def restore(self, lease: LeaseRow, *, has_worker: bool = True) -> list[Effect]:
        self.effects = self.do(LeaseRestored(lease, has_worker))
        return self.effects


def test_a_lease_whose_worker_lives_goes_on() -> None:
    s = Restored(kept())
    assert s.effects == [SetDeadline(1, 3, DEADLINE), ArmTimer(TimerFired(1, 3, TimerKind.EXPIRY), DEADLINE)]
    lease = s.lease(1)
    assert (lease.state, lease.generation, lease.deadline_ns, lease.created_ns) == (
        LeaseState.ACTIVE, 3, DEADLINE, 990 * S,
    )  # fmt: skip
    assert s.table.denial_for(1, s.now_ns) is None
    assert (s.card().held_bytes, s.card().available_bytes) == (30, 70)
    renewed = one(s.do(RenewRequested(9, 1, "ann", 8000)), Renewed).lease
    assert (renewed.generation, renewed.deadline_ns) == (4, s.now_ns + 8 * S)
    again = s.table.lease_row(1)
    terms = replace(TERMS, ttl_ms=8000)
    assert again == kept(generation=4, deadline_ns=s.now_ns + 8 * S, terms=terms, region_number=MAX_REGIONS)


def test_a_lease_whose_time_is_over_is_expired() -> None:
    s = Restored()
    s.at(5)
    assert one(s.restore(kept()), RefuseWork) == RefuseWork(1, Cause.EXPIRED)
    assert denied(s.do(RenewRequested(9, 1, "ann", 8000))).reason is DenialReason.LEASE_EXPIRED


@pytest.mark.parametrize(
    ("more", "at_s", "cause"),
    [({}, 0, Cause.WORKER_DIED), ({"fault": "an illegal address"}, 0, Cause.FAULTED), ({}, 5, Cause.EXPIRED)],
)
def test_a_lease_whose_worker_is_gone_is_ended_and_its_bytes_are_proved(
    more: dict[str, Any], at_s: float, cause: Cause
) -> None:
    s = Restored()
    s.at(at_s)
    effects = s.restore(kept(**more), has_worker=False)
    assert kinds(effects) == [RefuseWork, ProveReclaimed, TimerFired]
    assert s.lease(1).cause is cause
    assert s.card().held_bytes == 30
    s.gone(1)
    assert s.card().held_bytes == 0


@pytest.mark.parametrize(("has_worker", "done"), [(True, KillWorker), (False, ProveReclaimed)])
def test_a_teardown_goes_on_without_another_grace(has_worker: bool, done: type) -> None:
    s = Restored()
    effects = s.restore(kept(state=LeaseState.DRAINING), has_worker=has_worker)
    assert kinds(effects) == [RefuseWork, done, TimerFired]
    assert armed(effects, TimerKind.RECLAIM).due_ns == s.now_ns + CoreLimits().reclaim_timeout_s * S
    assert denied(s.do(FreeRequested(9, 1, "ann"))).reason is DenialReason.REVOKED
    s.do(RevokeRequested(10, 1, "again"))
    assert one(s.gone(1), RevokeDone).outcome is RevokeOutcome.TORN_DOWN


def test_a_fence_holds_until_it_is_cleared() -> None:
    s = Restored(kept(state=LeaseState.FENCED))
    assert s.effects == []
    assert (s.card().fenced_bytes, s.card().available_bytes) == (30, 70)
    assert one(s.do(RevokeRequested(8, 1, "x")), RevokeDone).outcome is RevokeOutcome.FENCED
    assert one(s.do(FenceClearRequested(9, None)), SlicesCleared).lease_ids == (1,)
    assert s.card().held_bytes == 0


def test_a_fenced_warm_context_holds_its_bytes_and_its_number() -> None:
    s = Restored(
        recovered=RecoveredState(fenced_warm=(WarmRow(WARM + 4, "GPU-a", 10, "x"), WarmRow(WARM, "GPU-z", 10, "x"))),
        warm=1,
    )
    assert (s.card().fenced_bytes, s.card().available_bytes) == (10, 90)
    assert s.do(PoolTimerFired()) == []
    effects = s.do(FenceClearRequested(9, None))
    assert one(effects, SlicesCleared).warm_ids == (WARM + 4,)
    assert one(effects, WarmUp).warm_id == WARM + 5


@pytest.mark.parametrize(("left_s", "is_over"), [(2, False), (-2, True)])
def test_a_drain_goes_on_to_the_same_deadline(left_s: int, is_over: bool) -> None:
    ends_ns = 1000 * S + left_s * S
    s = Restored(kept(), recovered=RecoveredState(drain_ns=ends_ns), warm=1)
    assert s.table.drain_ns == ends_ns
    effects = s.do(DrainTimerFired())
    assert (
        effects == [RefuseWork(1, Cause.DRAINED), ArmTimer(TimerFired(1, 3, TimerKind.GRACE), s.now_ns + 20 * MS)]
        if is_over
        else ([ArmTimer(DrainTimerFired(), ends_ns)])
    )
    assert denied(s.acquire(2)).reason is DenialReason.DRAINED
    assert WarmUp not in kinds(s.do(PoolTimerFired()))
    s.do(DrainCancelled(9))
    assert placed(s.acquire(3)) == [(3, "GPU-a")]


def test_no_warm_context_is_made_before_all_is_restored() -> None:
    s = Restored(kept(1, 30), warm=1)
    assert WarmUp not in kinds(s.restore(kept(2, 60)))
    assert s.do(PoolTimerFired()) == []


def test_an_unknown_worker_is_killed_and_forgotten() -> None:
    s = Restored()
    assert kinds(s.do(WorkerFound(5, "GPU-a", 60))) == [RefuseWork, KillWorker, TimerFired]
    assert s.card().available_bytes == 40
    assert denied(s.do(FreeRequested(9, 5, "ann"))).reason is DenialReason.NOT_FOUND
    assert denied(s.acquire(6, 45)).reason is DenialReason.CAPACITY_EXCEEDED
    assert one(s.gone(5), LeaseEnded).lease.tenant == ""
    assert s.table.get(5) is None
    assert s.card().held_bytes == 0


def test_a_worker_of_a_lease_that_has_ended_is_not_that_lease() -> None:
    """The lease is reported as ended while its worker's bytes are held again, and ends no second time."""
    before = Scenario()
    before.active(5)
    end(before, 5)
    s = Restored(recovered=RecoveredState((before.lease(5),)))
    effects = s.do(WorkerFound(5, "GPU-a", 60))
    assert kinds(effects) == [RenameWorker, RefuseWork, KillWorker, TimerFired]
    left_id = one(effects, RenameWorker).to_id
    assert s.card().warm_bytes == 60
    assert s.lease(5) == before.lease(5)
    assert denied(s.do(FreeRequested(9, 5, "ann"))).reason is DenialReason.FREED
    assert denied(s.acquire(5)).reason is DenialReason.INVALID_REQUEST
    effects = s.gone(left_id)
    assert one(effects, WarmEnded).is_fenced is False
    assert LeaseEnded not in kinds(effects)
    assert s.lease(5) == before.lease(5)
    assert s.card().warm_bytes == s.card().held_bytes == 0


@pytest.mark.parametrize("is_ended", [True, False])
def test_an_additional_worker_of_a_lease_is_no_lease(is_ended: bool) -> None:
    """A submit's worker, or a second one, gets a drawn id that is never reported as a lease's."""
    before = Scenario()
    before.active(5)
    end(before, 5)
    s = Restored(recovered=RecoveredState((before.lease(5),))) if is_ended else Restored(kept(5))
    held_bytes = s.card().held_bytes
    effects = s.do(WorkerFound(1234, "GPU-a", 60, 5))
    assert kinds(effects) == [RenameWorker, RefuseWork, KillWorker, TimerFired]
    assert s.table.get(1234) is None
    assert s.card().warm_bytes == 60
    effects = s.gone(one(effects, RenameWorker).to_id)
    assert LeaseEnded not in kinds(effects)
    assert one(effects, WarmEnded).reason == f"lease {5:032x} has left it"
    assert (s.card().warm_bytes, s.card().held_bytes) == (0, held_bytes)


def test_a_worker_left_by_an_ended_lease_takes_no_id_that_is_found() -> None:
    before = Scenario()
    before.active(5)
    end(before, 5)
    s = Restored(recovered=RecoveredState((before.lease(5),)), warm=1)
    left_id = one(s.do(WorkerFound(5, "GPU-a", 30)), RenameWorker).to_id
    s.do(WorkerFound(WARM, "GPU-a", 10))
    assert one(s.do(PoolTimerFired()), WarmUp).warm_id == WARM + 1
    s.reaped(left_id)
    fence = one(s.do(ReclaimFailed(left_id, "NVML gave an error")), WarmEnded)
    assert fence.is_fenced
    kept_fence = s.table.warm_row(left_id)
    assert kept_fence is not None
    again = Restored(recovered=RecoveredState((before.lease(5),), fenced_warm=(kept_fence,)))
    assert one(again.do(WorkerFound(5, "GPU-a", 30)), RenameWorker).to_id == left_id + 1


def test_an_unknown_warm_context_is_dropped() -> None:
    s = Restored(warm=1)
    assert kinds(s.do(WorkerFound(WARM + 7, "GPU-a", 10))) == [RefuseWork, KillWorker, TimerFired]
    assert s.card().warm_bytes == 10
    assert one(s.do(PoolTimerFired()), WarmUp).warm_id == WARM + 8
    s.gone(WARM + 7)
    assert s.card().warm_bytes == 10


def test_a_card_that_is_not_here() -> None:
    s = Restored()
    effects = s.restore(kept(card_uuid="GPU-z"))
    assert kinds(effects) == [RefuseWork, KillWorker, LeaseEnded]
    assert denied(s.do(FreeRequested(9, 1, "ann"))).reason is DenialReason.SESSION_FAILED
    assert s.restore(kept(2, state=LeaseState.FENCED, card_uuid="GPU-z")) == []
    assert s.table.get(2) is None, "a fence on a card that is not here waits where it is kept"
    assert kinds(s.do(WorkerFound(3, "GPU-z", 10))) == [RefuseWork, KillWorker]
    assert s.do(WorkerExited(3, "killed")) == []


def test_leases_over_the_capacity_go_on_and_nothing_more_is_granted() -> None:
    limits = CoreLimits(max_leases=1)
    s = Restored(kept(1, 80), kept(2, 50, charge_bytes=55), limits=limits)
    assert (s.card().held_bytes, s.card().available_bytes) == (145, 0)
    assert denied(s.acquire(3, 1)).reason is DenialReason.LIMIT
    s.do(FreeRequested(9, 1, "ann"))
    s.gone(1)
    s.do(FreeRequested(9, 2, "ann"))
    s.gone(2)
    assert placed(s.acquire(3, 100)) == [(3, "GPU-a")]


def test_a_lease_to_be_alone_stays_alone() -> None:
    s = Restored(kept(terms=replace(TERMS, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)))
    assert denied(s.acquire(2)).reason is DenialReason.CAPACITY_EXCEEDED


def test_a_revoked_id_is_known_for_ever() -> None:
    s = Scenario(card(), limits=CoreLimits(max_tombstones=1))
    s.active(1)
    s.do(RevokeRequested(8, 1, "because"))
    s.gone(1)
    for lease_id in (2, 3):
        s.active(lease_id)
        s.do(FreeRequested(9, lease_id, "ann"))
        s.gone(lease_id)
    assert s.table.get(1) is None
    restored = Restored(recovered=RecoveredState(revoked=(1, 7)))
    for table in (s, restored):
        assert denied(table.do(RenewRequested(9, 1, "ann", 1000))).reason is DenialReason.REVOKED
        assert denied(table.do(FreeRequested(9, 1, "bob"))).reason is DenialReason.REVOKED
        assert one(table.do(RevokeRequested(9, 1, "x")), RevokeDone).outcome is RevokeOutcome.TORN_DOWN
        denial = table.table.denial_for(1, table.now_ns)
        assert denial is not None
        assert denial.reason is DenialReason.REVOKED
        assert denied(table.acquire(1)).reason is DenialReason.INVALID_REQUEST
        assert table.do(WorkerReady(1)) == []


@pytest.mark.parametrize("way", ["before", "restarted", "forgotten"])
def test_a_lease_whose_fence_was_cleared_was_never_torn_down(way: str) -> None:
    s = Restored(kept(state=LeaseState.FENCED))
    s.do(RevokeRequested(7, 1, "because"))
    s.do(FenceClearRequested(8, None))
    if way != "before":
        s = Restored(
            recovered=RecoveredState(tombstones=(s.lease(1),) if way == "restarted" else (), cleared=(1,), revoked=(1,))
        )
    assert one(s.do(RevokeRequested(9, 1, "again")), RevokeDone).outcome is RevokeOutcome.FENCED
    assert denied(s.do(RenewRequested(10, 1, "ann", 1000))).reason is DenialReason.REVOKED
    assert denied(s.do(FreeRequested(11, 1, "ann"))).reason is DenialReason.REVOKED
    assert denied(s.acquire(1)).reason is DenialReason.INVALID_REQUEST


def test_tombstones_give_the_same_answers() -> None:
    s = Scenario()
    s.active(1)
    s.do(FreeRequested(9, 1, "ann"))
    s.gone(1)
    again = Restored(recovered=RecoveredState(tombstones=(s.lease(1),)))
    assert again.lease(1) == s.lease(1)
    assert denied(again.do(RenewRequested(9, 1, "ann", 1000))).reason is DenialReason.FREED
    assert denied(again.do(RenewRequested(9, 1, "bob", 1000))).reason is DenialReason.NOT_FOUND


def test_a_repeated_event_is_entered_once() -> None:
    s = Restored(kept())
    assert s.restore(kept()) == []
    assert s.do(WorkerFound(1, "GPU-a", 30)) == []
    assert s.card().held_bytes == 30
