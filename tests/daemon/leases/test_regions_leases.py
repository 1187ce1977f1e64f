"""Regions whose lease ends: they end with it, and their memory is proved back, or fenced, with the lease's own."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    Effect,
    Event,
    FenceClearRequested,
    FreeDone,
    FreeRequested,
    KillWorker,
    LeaseEnded,
    PoolTimerFired,
    ReclaimFailed,
    ReclaimProved,
    RefuseWork,
    RegionEnded,
    RegionRequested,
    RequestDenied,
    RevokeDone,
    RevokeRequested,
    ScrubWorker,
    SessionCondemned,
    SetRegion,
    ShutdownRequested,
    SlicesCleared,
    TimerKind,
    WarmUp,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState, Recycling
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.opcodes import RevokeOutcome

from .scenario import Scenario, armed, card, denied, kinds, one


@pytest.fixture
def s() -> Scenario:
    """Return a node with a lease, 1, and its regions 2 and 3."""
    s = Scenario(card(0, 1000))
    s.active(1, ttl_ms=60_000)
    s.region(2)
    s.region(3)
    return s


def ends(effects: list[Effect]) -> list[tuple[int, Cause, LeaseState]]:
    return [(e.lease.lease_id, e.cause, e.lease.state) for e in effects if isinstance(e, LeaseEnded)]


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (FreeRequested(9, 1, "ann"), Cause.FREED),
        (RevokeRequested(9, 1, "because"), Cause.REVOKED),
        (SessionCondemned(1, Cause.OVER_SLICE, "a rule was broken"), Cause.OVER_SLICE),
        (WorkerExited(1, "signal 11"), Cause.WORKER_DIED),
        (ShutdownRequested(), Cause.SHUTDOWN),
    ],
)
def test_the_leases_end_ends_all_its_regions_with_its_cause(s: Scenario, event: Event, cause: Cause) -> None:
    out = s.do(event)
    assert kinds(out)[:3] == [RefuseWork, SetRegion, SetRegion]
    assert {s.lease(number).cause for number in (1, 2, 3)} == {cause}
    assert {s.lease(number).state for number in (1, 2, 3)} == {LeaseState.DRAINING}
    out = s.gone(1)
    assert ends(out) == [(number, cause, LeaseState.TORNDOWN) for number in (2, 3, 1)]
    assert s.table.regions.snapshots() == ()
    assert {s.lease(number).state for number in (1, 2, 3)} == {LeaseState.TORNDOWN}


def test_a_region_that_had_ended_keeps_its_cause_and_its_requests_are_answered(s: Scenario) -> None:
    s.do(FreeRequested(8, 2, "bob"))
    s.do(RevokeRequested(9, 3, "because"))
    s.do(WorkerExited(1, "signal 11"))
    out = s.do(ReclaimProved(1))
    assert ends(out) == [
        (2, Cause.FREED, LeaseState.TORNDOWN),
        (3, Cause.REVOKED, LeaseState.TORNDOWN),
        (1, Cause.WORKER_DIED, LeaseState.TORNDOWN),
    ]
    assert one(out, FreeDone).request == 8
    assert one(out, RevokeDone).request == 9


def test_a_region_that_opens_is_denied_when_its_lease_ends(s: Scenario) -> None:
    s.do(RegionRequested(77, 1, 4, "ann", "bob", 1, 1000, 1))
    out = s.do(RevokeRequested(9, 1, "because"))
    assert one(out, RequestDenied).request == 77
    assert denied(out).reason is DenialReason.REVOKED


def test_no_region_is_opened_in_a_lease_that_has_ended(s: Scenario) -> None:
    s.do(RevokeRequested(9, 1, "because"))
    assert denied(s.do(RegionRequested(77, 1, 4, "ann", "bob", 1, 1000, 1))).reason is DenialReason.REVOKED


def test_the_answers_of_a_worker_whose_lease_ended_change_nothing(s: Scenario) -> None:
    s.do(FreeRequested(8, 2, "bob"))
    s.do(RevokeRequested(9, 1, "because"))
    assert s.do(RegionEnded(2, 4, 0, is_shown=True)) == []
    assert s.fire(2, TimerKind.RECLAIM) == []


def test_a_lease_that_is_fenced_fences_its_regions(s: Scenario) -> None:
    s.do(RevokeRequested(7, 2, "first"))
    s.do(FreeRequested(8, 3, "bob"))
    s.do(RevokeRequested(9, 1, "because"))
    out = s.do(ReclaimFailed(1, "NVML gave an error"))
    assert [(number, state) for number, _, state in ends(out)] == [(n, LeaseState.FENCED) for n in (2, 3, 1)]
    assert [(e.request, e.outcome) for e in out if isinstance(e, RevokeDone)] == [
        (7, RevokeOutcome.FENCED),
        (9, RevokeOutcome.FENCED),
    ]
    assert one(out, RequestDenied).request == 8
    out = s.do(FenceClearRequested(10, None))
    cleared = one(out, SlicesCleared)
    assert (cleared.count, cleared.lease_ids) == (1, (1, 2, 3))
    assert LeaseEnded not in kinds(out), "their ends were told"
    assert {s.lease(number).state for number in (1, 2, 3)} == {LeaseState.TORNDOWN}
    assert one(s.do(RevokeRequested(9, 2, "again")), RevokeDone).outcome is RevokeOutcome.FENCED


def test_an_operator_vouches_for_a_region_whose_lease_goes_on(s: Scenario) -> None:
    s.do(RevokeRequested(7, 2, "first"))
    s.now_ns = armed(s.do(RegionEnded(2, 3, 1, is_shown=False)), TimerKind.RECLAIM).due_ns
    s.fire(2, TimerKind.RECLAIM)
    cleared = one(s.do(FenceClearRequested(10, None)), SlicesCleared)
    assert (cleared.count, cleared.lease_ids) == (1, (2,))
    assert s.table.regions.held_bytes(1) == 4 + 1


def test_a_fence_that_lasted_ends_silently_with_its_lease(s: Scenario) -> None:
    s.do(RevokeRequested(7, 2, "first"))
    s.now_ns = armed(s.do(RegionEnded(2, 4, 0, is_shown=False)), TimerKind.RECLAIM).due_ns
    s.fire(2, TimerKind.RECLAIM)
    s.do(FreeRequested(9, 1, "ann"))
    assert [number for number, _, _ in ends(s.gone(1))] == [3, 1]
    assert s.lease(2).state is LeaseState.TORNDOWN


@pytest.mark.parametrize("has_region", [False, True])
def test_a_lease_that_had_a_region_is_not_recycled(*, has_region: bool) -> None:
    s = Scenario(card(0, 1000))
    s.table = LeaseTable((card(0, 1000),), None, 1, recycling=Recycling())
    warm_id = one(s.do(PoolTimerFired()), WarmUp).warm_id
    s.do(WorkerReady(warm_id))
    s.active(1)
    if has_region:
        s.region(2)
        s.do(FreeRequested(8, 2, "bob"))
        s.do(RegionEnded(2, 4, 0, is_shown=True))
    out = s.do(FreeRequested(9, 1, "ann"))
    assert (ScrubWorker in kinds(out), KillWorker in kinds(out)) == (not has_region, has_region)


def test_ended_regions_displace_no_ended_lease() -> None:
    s = Scenario(card(0, 1000))
    s.active(9)
    s.do(FreeRequested(8, 9, "ann"))
    s.gone(9)
    s.active(1, ttl_ms=60_000)
    for number in range(10, 20):
        s.region(number)
        s.do(FreeRequested(8, number, "bob"))
        s.do(RegionEnded(number, 4, 0, is_shown=True))
    assert list(s.table._store.ended) == [9]
    assert len(s.table._store.ended_regions) == 10
