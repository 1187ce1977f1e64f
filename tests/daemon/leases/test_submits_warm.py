"""Submits on warm contexts, step by step; `test_table_any_order` covers any order."""

from collections.abc import Callable

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    FreeRequested,
    KillWorker,
    PoolTimerFired,
    ProveReclaimed,
    ReclaimFailed,
    ReclaimProved,
    RefuseSubmit,
    RenameWorker,
    RequesterGone,
    SetDeadline,
    SpawnSubmit,
    SubmitEnded,
    SubmitReady,
    TimerFired,
    TimerKind,
    WarmUp,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, FIRST_WARM_ID, LeaseTerms, SubmitRequested, SubmitState
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.warm_pool import FIRST_BACK_OFF_S, REFILL_PAUSE_MS

from .scenario import MS, OVERHEAD, S, armed, denied, kinds, one, placed
from .test_warm_pool import WARM, PoolScenario, killed

LEASE = 1
FIRST = FIRST_SUBMIT_ID
SIZE, KEPT = 50, 20
ADOPT_S = CoreLimits().adopt_timeout_s

Act = Callable[[PoolScenario], list[Effect]]


def leased(wanted: int = 1, capacity: int = 110) -> PoolScenario:
    """Return an active lease of 50 bytes, 20 of them for submits, and a pool that is full again."""
    s = PoolScenario(wanted, capacity=capacity)
    s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(SIZE, 100_000, submit_bytes=KEPT)))
    s.do(WorkerReady(LEASE))
    s.at(REFILL_PAUSE_MS / 1000)
    s.fill()
    assert s.card().warm_contexts == wanted
    return s


def ask(s: PoolScenario, request: int = 20) -> list[Effect]:
    return s.do(SubmitRequested(request, LEASE, "ann", 1000))


def state(s: PoolScenario) -> SubmitState | None:
    submit = s.table.submits.of(LEASE)
    return None if submit is None else submit.state


def test_a_submit_takes_a_warm_context_whose_bytes_become_free() -> None:
    s = leased()
    effects = ask(s)
    assert kinds(effects)[:2] == [RenameWorker, SpawnSubmit]
    assert one(effects, RenameWorker) == RenameWorker(WARM + 1, FIRST)
    spawned = one(effects, SpawnSubmit)
    assert (spawned.submit_id, spawned.size_bytes, spawned.is_warm) == (FIRST, KEPT, True)
    assert armed(effects, TimerKind.SPAWN).due_ns == s.now_ns + ADOPT_S * S
    assert (s.card().held_bytes, s.card().warm_bytes) == (SIZE + 2 * OVERHEAD, 0)
    ready = s.do(WorkerReady(FIRST))
    assert one(ready, SubmitReady).request == 20
    assert one(ready, SetDeadline).deadline_ns == s.lease(LEASE).deadline_ns
    assert s.table.submits.may_hold(FIRST) == ("GPU-a", KEPT + OVERHEAD)


def test_a_submits_context_does_not_come_back_and_the_pool_is_filled_after_a_pause() -> None:
    s = leased()
    assert armed(ask(s), PoolTimerFired).due_ns == s.now_ns + REFILL_PAUSE_MS * MS
    s.do(WorkerReady(FIRST))
    assert one(s.do(WorkerExited(FIRST, "exited")), ProveReclaimed).worker_id == FIRST
    assert one(s.do(ReclaimProved(FIRST)), SubmitEnded).submit_id == FIRST
    assert s.table.warming() == ()
    assert one(s.at(REFILL_PAUSE_MS / 1000).do(PoolTimerFired()), WarmUp).warm_id == WARM + 2


def test_a_submit_without_a_warm_context_gets_a_new_one() -> None:
    s = leased(0)
    spawned = one(ask(s), SpawnSubmit)
    assert not spawned.is_warm
    assert RenameWorker not in kinds(s.do(WorkerReady(FIRST)))


def test_a_submit_does_not_wait_for_a_context_being_made() -> None:
    s = PoolScenario()
    s.do(AcquireRequested(9, "ann", LEASE, LeaseTerms(SIZE, 100_000, submit_bytes=KEPT)))
    s.do(WorkerReady(LEASE))
    one(s.at(1).do(PoolTimerFired()), WarmUp)
    assert not one(ask(s), SpawnSubmit).is_warm


def test_bytes_freed_by_taking_a_context_go_to_a_lease_that_waits() -> None:
    s = leased(3, capacity=130)
    effects = s.acquire(2, 35)
    # The lease takes one of the three contexts and waits for another's room; the third may stay.
    assert (killed(effects), placed(effects)) == ([WARM + 3], [])
    effects = ask(s)
    assert one(effects, SpawnSubmit).is_warm
    assert placed(effects) == [(2, "GPU-a")]


def dies(s: PoolScenario) -> None:
    effects = s.do(WorkerExited(FIRST, "was killed by SIGKILL"))
    assert kinds(effects)[:2] == [RefuseSubmit, ProveReclaimed]


def hangs(s: PoolScenario) -> None:
    effects = s.at(ADOPT_S).do(TimerFired(FIRST, 0, TimerKind.SPAWN))
    assert kinds(effects)[:2] == [RefuseSubmit, KillWorker]
    s.do(WorkerExited(FIRST, "was killed by SIGKILL"))


LOST = pytest.mark.parametrize("lose", [dies, hangs])


@LOST
def test_a_submit_whose_warm_context_is_lost_gets_a_new_one(lose: Callable[[PoolScenario], None]) -> None:
    s = leased(2, capacity=200)
    ask(s)
    lose(s)
    assert state(s) is SubmitState.ENDING
    effects = s.do(ReclaimProved(FIRST))
    spawned = one(effects, SpawnSubmit)
    # Another warm context may be as bad, and a submit's bytes never have two workers at a time.
    assert (spawned.submit_id, spawned.is_warm, spawned.timeout_ms) == (FIRST + 1, False, 1000)
    assert s.card().warm_contexts == 1
    assert one(s.do(WorkerReady(FIRST + 1)), SubmitReady).request == 20


def test_the_loss_of_a_submits_context_postpones_the_pool() -> None:
    s = leased()
    ask(s)
    dies(s)
    s.do(ReclaimProved(FIRST))
    assert s.at(REFILL_PAUSE_MS / 1000).do(PoolTimerFired()) != []
    assert WarmUp not in kinds(s.do(PoolTimerFired()))
    assert WarmUp in kinds(s.at(FIRST_BACK_OFF_S).do(PoolTimerFired()))


def test_a_waiting_submit_goes_on_waiting_during_the_replacement() -> None:
    s = leased()
    ask(s)
    ask(s, 21)
    dies(s)
    s.do(ReclaimProved(FIRST))
    assert one(s.do(WorkerReady(FIRST + 1)), SubmitReady).request == 20
    s.do(WorkerExited(FIRST + 1, "exited"))
    assert one(s.do(ReclaimProved(FIRST + 1)), SpawnSubmit).submit_id == FIRST + 2
    assert one(s.do(WorkerReady(FIRST + 2)), SubmitReady).request == 21


@LOST
def test_a_second_loss_is_reported(lose: Callable[[PoolScenario], None]) -> None:
    s = leased()
    ask(s)
    lose(s)
    s.do(ReclaimProved(FIRST))
    assert denied(s.do(WorkerExited(FIRST + 1, "died"))).reason is DenialReason.SESSION_FAILED


def test_a_context_that_can_not_be_opened_again_is_reported() -> None:
    s = leased()
    ask(s)
    assert denied(s.do(WorkerFailed(FIRST, "no memory"))).reason is DenialReason.SESSION_FAILED


INSTEAD: dict[str, tuple[Act, DenialReason | None]] = {
    "its lease is freed": (lambda s: s.do(FreeRequested(5, LEASE, "ann")), DenialReason.FREED),
    "it is not proved gone": (lambda s: s.do(ReclaimFailed(FIRST, "why")), DenialReason.CAPACITY_EXCEEDED),
    "who asked leaves": (lambda s: s.do(RequesterGone(20)), None),
}


@pytest.mark.parametrize(("act", "reason"), INSTEAD.values(), ids=INSTEAD)
def test_no_replacement_starts_once_nobody_waits(act: Act, reason: DenialReason | None) -> None:
    s = leased()
    ask(s)
    dies(s)
    effects = act(s)
    if reason is not None:
        assert denied(effects).reason is reason
    assert not s.table.submits.open_requests()
    assert SpawnSubmit not in kinds(s.do(ReclaimProved(FIRST)))


def test_a_lease_that_ends_takes_its_starting_submit_along() -> None:
    s = leased()
    ask(s)
    effects = s.do(FreeRequested(5, LEASE, "ann"))
    assert denied(effects).reason is DenialReason.FREED
    assert KillWorker(FIRST) in effects
    s.do(WorkerExited(FIRST, "killed"))
    s.do(ReclaimProved(FIRST))
    s.gone(LEASE)
    assert s.card().held_bytes == 0


def test_ids_tell_submits_from_warm_contexts() -> None:
    assert FIRST_WARM_ID < FIRST_SUBMIT_ID
    s = leased()
    ask(s)
    # Late events under the context's warm id do nothing.
    assert s.do(WorkerReady(WARM + 1)) == []
    assert s.do(TimerFired(WARM + 1, 0, TimerKind.SPAWN)) == []
