"""Counts of the real lease table's life."""

import pytest

from gpulease.daemon.leases.cold_parking import MAX_MISFITS
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    Event,
    FenceClearRequested,
    FreeRequested,
    LeaseRestored,
    MoveRequested,
    ParkRequested,
    ParkSession,
    PoolTimerFired,
    ReclaimFailed,
    ReclaimProved,
    RegionProved,
    RenewRequested,
    RequesterGone,
    ReturnWanted,
    RevokeRequested,
    SessionFaulted,
    SessionImaged,
    SessionParked,
    SessionParkRefused,
    SessionReturnFailed,
    SessionStays,
    TimerKind,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, FIRST_WARM_ID, LeaseState, LeaseTerms, SubmitRequested
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.lease_history import LeaseHistory
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import MAX_PAIR_SERIES, OTHERS, Distribution, MetricFamily, TenantLabels
from gpulease.daemon.record.metrics.lease_counters import LeaseCounters

from ...leases.scenario import Scenario, card, end  # noqa: TID252  # the core's own scenarios
from ...leases.test_restoration import kept  # noqa: TID252  # the core's own scenarios

ANN = ("GPU-a", "ann")
CARD = ("GPU-a",)


class Counted(Scenario):
    """A scenario that is counted."""

    def __init__(self, *, warm: int = 0, tenants: int = 8, limits: CoreLimits | None = None) -> None:
        super().__init__()
        self.table = LeaseTable((card(),), limits, warm)
        self.tally = LeaseCounters(["GPU-a"], TenantLabels(tenants))
        self.history = LeaseHistory(self.table.get, self.table.submits.lease_of)

    def do(self, event: Event) -> list[Effect]:
        effects = super().do(event)
        self.tally.on_facts(self.history.on_event(event, effects, self.now_ns))
        return effects

    def count(self, family: MetricFamily, *labels: str) -> float:
        return self.tally.counters[family][labels]

    def seen(self, family: MetricFamily, *labels: str) -> Distribution:
        return self.tally.histograms[family].of[labels]


def test_a_life() -> None:
    s = Counted()
    s.acquire(1)
    s.at(0.5).do(WorkerReady(1))
    assert [s.count(family, *ANN) for family in (families.LEASES_ACQUIRED, families.LEASES_DROPPED)] == [1, 0]
    assert (s.seen(families.ACQUIRE_SECONDS, *CARD).total, s.seen(families.ACQUIRE_SECONDS, *CARD).count) == (0.5, 1)
    s.at(2).do(RenewRequested(9, 1, "ann", 8000))
    s.do(FreeRequested(10, 1, "ann"))
    s.at(0.02).fire(1, TimerKind.GRACE, 2)
    s.at(0.1).do(WorkerExited(1, "killed"))
    s.at(0.05).do(ReclaimProved(1))
    assert s.count(families.LEASES_RENEWED, *ANN) == s.count(families.LEASES_DROPPED, *ANN) == 1
    assert s.seen(families.LEASE_SECONDS, *ANN).total == pytest.approx(2)
    assert s.seen(families.REVOCATION_SECONDS, "freed").total == pytest.approx(0.12)
    assert s.seen(families.RECLAIM_SECONDS, *CARD).total == pytest.approx(0.17)
    assert s.history.is_at_rest


def test_submits_begin_or_are_denied() -> None:
    s = Counted()
    s.do(AcquireRequested(1, "ann", 1, LeaseTerms(50, 60_000, submit_bytes=20)))
    s.do(WorkerReady(1))
    s.do(SubmitRequested(2, 1, "ann", 1000))
    s.do(WorkerReady(FIRST_SUBMIT_ID))
    s.do(SubmitRequested(3, 1, "ann", 0))
    assert s.count(families.SUBMITS, *ANN) == 1
    assert s.count(families.DENIALS, "gpu_submit", "invalid_request") == 1
    s.do(FreeRequested(10, 1, "ann"))
    for number in (1, FIRST_SUBMIT_ID):
        s.do(WorkerExited(number, "killed"))
        s.do(ReclaimProved(number))
    assert s.history.is_at_rest


def test_a_submit_that_faults_counts_for_its_leases_tenant() -> None:
    s = Counted()
    s.do(AcquireRequested(1, "ann", 1, LeaseTerms(50, 60_000, submit_bytes=20)))
    s.do(WorkerReady(1))
    for number in range(2):
        submit_id = FIRST_SUBMIT_ID + number
        s.do(SubmitRequested(2 + number, 1, "ann", 1000))
        s.do(WorkerReady(submit_id))
        for _ in range(2):
            s.do(SessionFaulted(submit_id, "an address"))
        s.do(WorkerExited(submit_id, "it ended"))
        s.do(ReclaimProved(submit_id))
    s.do(SessionFaulted(FIRST_SUBMIT_ID, "one that is gone"))
    assert s.count(families.SESSION_FAULTS, *ANN) == 2
    s.do(SessionFaulted(1, "an address"))
    assert s.count(families.SESSION_FAULTS, *ANN) == 3, "the session's own"
    s.gone(1)
    assert s.history.is_at_rest


def test_a_session_that_fits_no_other_worker_is_counted() -> None:
    s = Counted(limits=CoreLimits(park_memory_bytes=64 << 20))
    s.active(1, park_idle_ms=0)
    ordered = next(one for one in s.do(MoveRequested(7, 1, "ann", None)) if isinstance(one, ParkSession))
    s.do(SessionParked(1, ordered.number, 20))
    s.do(RegionProved(1))
    s.do(SessionImaged(1, ordered.number, 1000))
    s.do(ReturnWanted(1, ordered.number))
    for _ in range(MAX_MISFITS):
        assert s.count(families.IMAGE_MISMATCHES, *CARD) == 0
        s.do(WorkerReady(1))
        s.do(SessionReturnFailed(1, ordered.number, "a variable is elsewhere", is_mismatch=True))
        for dropped in s.table.warming():
            s.do(WorkerExited(dropped.warm_id, "it was killed"))
            s.do(ReclaimProved(dropped.warm_id))
    assert s.count(families.IMAGE_MISMATCHES, *CARD) == 1, "the lease ends"
    assert s.tally.counters[families.PARK_FAILURES] == {
        ("GPU-a", "misfit"): MAX_MISFITS - 1,
        ("GPU-a", "mismatch"): 1,
    }
    assert s.count(families.PARKS_FAILED, *CARD) == MAX_MISFITS


def test_what_failed_is_counted_by_reason() -> None:
    s = Counted(limits=CoreLimits(park_memory_bytes=64 << 20))
    s.active(1, park_idle_ms=0)
    for refusal in (SessionParkRefused, SessionStays):
        number = next(one.number for one in s.do(MoveRequested(7, 1, "ann", None)) if isinstance(one, ParkSession))
        if refusal is SessionParkRefused:
            s.do(SessionParkRefused(1, number, "a kernel runs"))
        else:
            s.do(SessionParked(1, number, 20))
            s.do(RegionProved(1))
            s.do(SessionStays(1, number, "it has a graph", is_lasting=True))
    assert s.tally.counters[families.PARK_FAILURES] == {("GPU-a", "park"): 1, ("GPU-a", "leave"): 1}


@pytest.mark.parametrize("late_s", [0, 0.004])
def test_how_late_an_expiry_is(late_s: float) -> None:
    s = Counted()
    s.active(1, ttl_ms=5000)
    s.at(5 + late_s).fire(1, TimerKind.EXPIRY)
    assert s.seen(families.EXPIRY_LATENESS_SECONDS).total == pytest.approx(late_s)
    s.gone(1)
    assert s.seen(families.REVOCATION_SECONDS, "expired").count == 1


def test_a_worker_that_dies_by_itself_is_gone_at_once() -> None:
    s = Counted()
    s.active(1)
    s.do(SessionFaulted(1, "an address"))
    s.do(SessionFaulted(1, "an address"))
    s.at(1).gone(1)
    assert s.count(families.SESSION_FAULTS, *ANN) == 1, "a context is lost once"
    assert (s.seen(families.REVOCATION_SECONDS, "faulted").total, s.history.is_at_rest) == (0, True)


def test_who_never_got_a_lease_has_dropped_none() -> None:
    s = Counted()
    s.acquire(1)
    s.do(RequesterGone(1001))
    s.gone(1)
    s.acquire(2)
    s.do(WorkerExited(2, "it could not start"))
    s.do(ReclaimProved(2))
    assert s.count(families.LEASES_ACQUIRED, *ANN) == s.count(families.LEASES_DROPPED, *ANN) == 0
    assert set(s.tally.histograms[families.REVOCATION_SECONDS].of) == {("abandoned",), ("spawn_failed",)}
    assert s.count(families.DENIALS, "lease_alloc", "session_failed") == 1
    assert s.history.is_at_rest


def test_denials_by_operation_and_reason() -> None:
    s = Counted()
    s.acquire(1, 1000)
    s.do(FreeRequested(2, 99, "ann"))
    s.do(RenewRequested(3, 99, "ann", 1))
    s.do(RevokeRequested(4, 99, "because"))
    s.do(FenceClearRequested(5, "nope"))
    s.do(RevokeRequested(0, 99, "the daemon's own"))
    s.tally.refused("attach", "denied")
    assert dict(s.tally.counters[families.DENIALS]) == {
        ("lease_alloc", "capacity_exceeded"): 1,
        ("lease_free", "not_found"): 1,
        ("lease_renew", "not_found"): 1,
        ("fence_clear", "invalid_request"): 1,
        ("attach", "denied"): 1,
    }
    assert s.history.is_at_rest


def test_a_fence_is_no_reclaim_and_is_counted_for_ever() -> None:
    s = Counted()
    s.active(1)
    s.do(RevokeRequested(9, 1, "because"))
    s.do(ReclaimFailed(1, "it shows"))
    assert s.count(families.FENCES, *CARD) == s.count(families.LEASES_DROPPED, *ANN) == 1
    s.do(FenceClearRequested(10, None))
    s.do(WorkerExited(1, "at last"))
    assert s.count(families.FENCES, *CARD) == 1
    assert not s.tally.histograms[families.RECLAIM_SECONDS]
    assert s.history.is_at_rest


@pytest.mark.parametrize(
    ("state", "has_worker", "adopted", "dropped"),
    [
        (LeaseState.ACTIVE, True, 1, 0),
        (LeaseState.ACTIVE, False, 1, 1),
        (LeaseState.DRAINING, True, 1, 1),
        (LeaseState.FENCED, True, 0, 0),
    ],
)
def test_an_earlier_daemons_lease_is_no_new_one(
    state: LeaseState, has_worker: bool, adopted: int, dropped: int
) -> None:
    s = Counted()
    s.do(LeaseRestored(kept(state=state), has_worker))
    if dropped:
        s.gone(1)
    counted = (families.LEASES_ACQUIRED, families.LEASES_ADOPTED, families.LEASES_DROPPED)
    assert [s.count(family, *ANN) for family in counted] == [0, adopted, dropped]
    assert s.history.is_at_rest == (state is not LeaseState.ACTIVE or bool(dropped))


def test_a_lease_of_a_card_that_is_not_here_any_more_leaves_nothing() -> None:
    s = Counted()
    s.do(LeaseRestored(kept(card_uuid="GPU-gone"), has_worker=True))
    assert s.history.is_at_rest


def test_warm_contexts_that_were_taken_and_lost() -> None:
    s = Counted(warm=1)
    s.do(PoolTimerFired())
    s.do(WorkerReady(FIRST_WARM_ID))
    s.active(1)
    assert (s.count(families.WARM_TAKEN, *CARD), s.count(families.WARM_LOST, *CARD)) == (1, 0)
    end(s, 1)
    s.at(60).do(PoolTimerFired())
    s.do(WorkerExited(FIRST_WARM_ID + 1, "signal 9"))
    s.do(ReclaimProved(FIRST_WARM_ID + 1))
    assert (s.count(families.WARM_TAKEN, *CARD), s.count(families.WARM_LOST, *CARD)) == (1, 1)
    assert s.history.is_at_rest


def test_a_warm_context_that_a_submit_took() -> None:
    s = Counted(warm=1)
    s.do(AcquireRequested(1, "ann", 1, LeaseTerms(50, 60_000, submit_bytes=20)))
    s.do(WorkerReady(1))
    s.do(PoolTimerFired())
    s.do(WorkerReady(FIRST_WARM_ID))
    s.do(SubmitRequested(2, 1, "ann", 1000))
    assert s.count(families.WARM_TAKEN, *CARD) == 1
    s.do(WorkerReady(FIRST_SUBMIT_ID))
    assert s.count(families.SUBMITS, *ANN) == 1


@pytest.mark.parametrize(("cards", "tenants"), [(0, 64), (1, 64), (8, 64), (16, 32), (1000, 1)])
def test_the_more_cards_the_fewer_tenants_are_told_apart(cards: int, tenants: int) -> None:
    tally = LeaseCounters([f"GPU-{number}" for number in range(cards)])
    assert tally._tenants.most == tenants
    assert max(1, cards) * tenants <= MAX_PAIR_SERIES or tenants == 1


def test_tenants_beyond_the_bound_share_a_label_and_nobody_moves() -> None:
    s = Counted(tenants=2, limits=CoreLimits(max_leases=100))
    for lease_id, tenant in enumerate(("ann", "bob", "cid", "dan", "ann", "cid"), start=1):
        s.active(lease_id, 1, tenant=tenant)
        end(s, lease_id)
    acquired = s.tally.counters[families.LEASES_ACQUIRED]
    assert dict(acquired) == {ANN: 2, ("GPU-a", "bob"): 1, ("GPU-a", OTHERS): 3}
    assert dict(s.tally.counters[families.LEASES_DROPPED]) == dict(acquired)


@pytest.mark.parametrize("ahead_bytes", [0, 15])
def test_parks_that_were_copied_ahead(ahead_bytes: int) -> None:
    s = Counted(limits=CoreLimits(park_memory_bytes=1 << 30))
    s.active(1, 20, park_idle_ms=0)
    number = next(effect.number for effect in s.do(ParkRequested(9, 1, "ann")) if isinstance(effect, ParkSession))
    s.do(SessionParked(1, number, 20, ahead_bytes=ahead_bytes))
    s.do(RegionProved(1))
    ahead = [s.count(family, *CARD) for family in (families.PARKED_AHEAD, families.PARKED_AHEAD_BYTES)]
    assert (s.count(families.LEASES_PARKED, *CARD), ahead) == (1, [int(ahead_bytes > 0), ahead_bytes])


def test_copies_ahead_in_vain_count_by_card() -> None:
    s = Counted()
    for tenant in ("ann", "bob"):
        s.tally.worked(("GPU-a", tenant), [(families.AHEAD_DISCARDED, 1), (families.AHEAD_DISCARDED_BYTES, 70)])
    found = [s.count(family, *CARD) for family in (families.AHEAD_DISCARDED, families.AHEAD_DISCARDED_BYTES)]
    assert found == [2, 140]
