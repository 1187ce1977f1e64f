"""Running leases that get another size, within admission, and charged the larger one until the smaller is proved."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    DrainRequested,
    FreeRequested,
    LeaseRestored,
    ProveRegion,
    RegionProved,
    RegionRequested,
    RequestDenied,
    Resized,
    ResizeRequested,
    ResizeSlice,
    RevokeRequested,
    SliceResized,
    WaitTimerFired,
    WorkerReady,
)
from gpulease.daemon.leases.membership_events import MembershipDeadlineMoved
from gpulease.daemon.leases.model import LeaseState, LeaseTerms, SubmitRequested
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules

from .scenario import Scenario, armed, card, denied, kinds, one


@pytest.fixture
def s() -> Scenario:
    """Return a card of 110 bytes with a lease, 1, of 20 bytes and a context of 10."""
    s = Scenario(card(0, 110))
    s.active(1, ttl_ms=60_000)
    return s


def resize(size: int, *, tenant: str = "ann", lease_id: int = 1, is_operator: bool = False) -> ResizeRequested:
    return ResizeRequested(70, lease_id, tenant, size, is_operator)


def test_a_lease_grows_on_the_card_before_its_worker_knows(s: Scenario) -> None:
    out = s.do(resize(50))
    assert one(out, ResizeSlice) == ResizeSlice(1, 50, after_record=True)
    assert s.card().held_bytes == 60
    assert Resized not in kinds(out)
    assert one(s.do(SliceResized(1, 50)), Resized).lease.size_bytes == 50
    assert s.card().held_bytes == 60


def test_a_lease_shrinks_on_the_card_once_that_is_proved(s: Scenario) -> None:
    assert one(s.do(resize(5)), ResizeSlice) == ResizeSlice(1, 5, after_record=False)
    out = s.do(SliceResized(1, 5))
    assert one(out, ProveRegion) == ProveRegion(1, 1, "GPU-a", 15)
    assert s.card().held_bytes == 30
    assert one(s.do(RegionProved(1)), Resized).lease.size_bytes == 5
    assert s.card().held_bytes == 15


def test_a_waiter_gets_the_bytes_that_a_lease_gave_back(s: Scenario) -> None:
    s.acquire(2, 80, wait_ms=5000)
    assert s.table.waiting()
    s.do(resize(5))
    s.do(SliceResized(1, 5))
    assert s.table.waiting()
    s.do(RegionProved(1))
    assert not s.table.waiting()


def test_the_same_size_is_granted_at_once(s: Scenario) -> None:
    assert kinds(s.do(resize(20))) == [Resized]


def test_the_worker_of_a_restored_lease_is_asked_for_the_same_size_too(s: Scenario) -> None:
    kept = s.table.lease_row(1)
    assert kept is not None
    new = Scenario(card(0, 110))
    new.now_ns = s.now_ns
    new.do(LeaseRestored(kept, has_worker=True))
    assert one(new.do(resize(20)), ResizeSlice).size_bytes == 20, "the daemon before may have ordered a smaller slice"
    assert one(new.do(SliceResized(1, 20)), Resized).lease.size_bytes == 20
    assert new.card().held_bytes == 30


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (resize(50, tenant="bob"), DenialReason.NOT_FOUND),
        (resize(50, lease_id=8), DenialReason.NOT_FOUND),
        (resize(0), DenialReason.INVALID_REQUEST),
        (resize(3), DenialReason.CAPACITY_EXCEEDED),
        (resize(101), DenialReason.CAPACITY_EXCEEDED),
        (resize(50, lease_id=2), DenialReason.INVALID_REQUEST),
    ],
)
def test_a_size_that_cannot_be_is_refused(s: Scenario, event: ResizeRequested, reason: DenialReason) -> None:
    s.region(2, 4, owner="ann")
    assert denied(s.do(event)).reason is reason
    assert s.card().held_bytes == 30


def test_a_lease_takes_the_whole_rest_of_its_card_and_no_more(s: Scenario) -> None:
    assert one(s.do(resize(100, tenant="root", is_operator=True)), ResizeSlice).size_bytes == 100


def test_a_lease_does_not_grow_into_what_somebody_waits_for(s: Scenario) -> None:
    s.acquire(2, 90, tenant="bob", wait_ms=5000)
    assert denied(s.do(resize(21))).reason is DenialReason.CAPACITY_EXCEEDED


def test_a_lease_does_not_grow_beyond_its_tenants_bytes() -> None:
    limits = CoreLimits(tenants=TenantRules(default=TenantLimits(max_vram_bytes=40)))
    s = Scenario(card(0, 110), limits=limits)
    s.active(1)
    assert denied(s.do(resize(41))).reason is DenialReason.LIMIT
    s.do(resize(40))
    s.do(SliceResized(1, 40))
    assert denied(s.acquire(2, 1)).reason is DenialReason.LIMIT


def test_a_lease_does_not_grow_beyond_what_was_claimed_of_its_quota_in_the_fleet() -> None:
    s = Scenario(card(0, 110))
    s.do(MembershipDeadlineMoved(s.now_ns + 10**12, s.now_ns + 10**12))
    s.do(AcquireRequested(2, "ann", 1, LeaseTerms(20, 60_000, fleet_bytes=20)))
    s.do(WorkerReady(1))
    assert denied(s.do(resize(21))).reason is DenialReason.LIMIT
    for size in (5, 20):
        assert one(s.do(resize(size)), ResizeSlice).size_bytes == size
        s.do(SliceResized(1, size))
        s.do(RegionProved(1))


def test_a_lease_does_not_grow_on_a_drained_node(s: Scenario) -> None:
    s.do(DrainRequested(9, 5000))
    assert denied(s.do(resize(21))).reason is DenialReason.BUSY, "for a client, DRAINED would end the lease"
    assert one(s.do(resize(10)), ResizeSlice).size_bytes == 10


def test_bytes_kept_for_submits_stay_when_a_lease_is_resized() -> None:
    s = Scenario(card(0, 200))
    s.do(AcquireRequested(1001, "ann", 1, LeaseTerms(20, 60_000, submit_bytes=5)))
    s.do(WorkerReady(1))
    assert denied(s.do(resize(5))).reason is DenialReason.INVALID_REQUEST
    assert one(s.do(resize(12)), ResizeSlice).size_bytes == 7
    assert one(s.do(SliceResized(1, 7)), ProveRegion).allowed_bytes == 17
    assert one(s.do(RegionProved(1)), Resized).lease.size_bytes == 12


def test_a_lease_has_one_resize_at_a_time(s: Scenario) -> None:
    s.do(resize(30))
    assert denied(s.do(resize(40))).reason is DenialReason.BUSY


def test_while_a_lease_is_resized_its_regions_have_the_smaller_slice(s: Scenario) -> None:
    s.do(resize(10))
    region = RegionRequested(71, 1, 2, "ann", "bob", 11, 1000, 1)
    assert denied(s.do(region)).reason is DenialReason.CAPACITY_EXCEEDED


def test_a_refused_growth_is_charged_until_the_card_shows_that_nothing_of_it_is_used(s: Scenario) -> None:
    s.do(resize(50))
    assert one(s.do(SliceResized(1, 20, "no")), ProveRegion).allowed_bytes == 30
    assert s.card().held_bytes == 60
    out = s.do(RegionProved(1))
    assert "no; its size is now 20 bytes" in denied(out).message
    assert s.card().held_bytes == 30


def test_a_refused_shrink_changes_nothing(s: Scenario) -> None:
    s.do(resize(5))
    assert kinds(s.do(SliceResized(1, 20, "the session uses 7 bytes"))) == [RequestDenied]
    assert s.lease(1).size_bytes == 20


def test_a_worker_is_believed_within_its_charge_alone(s: Scenario) -> None:
    s.do(resize(50))
    assert kinds(s.do(SliceResized(1, 1 << 40, ""))) == [RequestDenied]
    assert (s.lease(1).size_bytes, s.card().held_bytes) == (50, 60)


def test_a_lost_answer_ends_the_wait_and_bars_the_next_resize(s: Scenario) -> None:
    due = armed(s.do(resize(50)), WaitTimerFired)
    assert kinds(s.do(due.event)) == [WaitTimerFired]
    s.now_ns = due.due_ns
    assert denied(s.do(due.event)).reason is DenialReason.BUSY
    assert s.do(due.event) == []
    assert denied(s.do(resize(60))).reason is DenialReason.BUSY
    assert s.card().held_bytes == 60
    assert s.do(SliceResized(1, 50)) == []
    assert one(s.do(resize(60)), ResizeSlice).size_bytes == 60


def test_a_lost_proof_ends_the_wait_and_keeps_the_charge(s: Scenario) -> None:
    s.do(resize(5))
    s.do(SliceResized(1, 5))
    assert denied(s.at(10).do(WaitTimerFired(70))).reason is DenialReason.BUSY
    assert s.card().held_bytes == 30
    assert s.do(RegionProved(1)) == []
    assert s.card().held_bytes == 15


def test_an_end_answers_the_resize(s: Scenario) -> None:
    s.do(resize(50))
    assert denied(s.do(RevokeRequested(9, 1, "because"))).reason is DenialReason.REVOKED
    assert s.do(SliceResized(1, 50)) == []
    s.gone(1)
    assert s.card().held_bytes == 0


def test_an_answer_that_nobody_asked_for_changes_no_size(s: Scenario) -> None:
    assert s.do(SliceResized(1, 5)) == []
    assert s.do(RegionProved(1)) == []
    assert s.lease(1).size_bytes == 20


def test_no_submit_takes_the_place_of_a_session_that_is_resized(s: Scenario) -> None:
    s.do(resize(50))
    assert denied(s.do(SubmitRequested(9, 1, "ann", 1000))).reason is DenialReason.BUSY


def test_a_lease_with_a_submit_in_its_sessions_place_is_not_resized(s: Scenario) -> None:
    s.do(SubmitRequested(9, 1, "ann", 1000))
    assert denied(s.do(resize(10))).reason is DenialReason.BUSY


def test_a_resized_lease_gives_all_of_its_bytes_back(s: Scenario) -> None:
    s.do(resize(50))
    s.do(SliceResized(1, 50))
    s.do(FreeRequested(9, 1, "ann"))
    s.gone(1)
    assert (s.card().held_bytes, s.lease(1).state) == (0, LeaseState.TORNDOWN)
