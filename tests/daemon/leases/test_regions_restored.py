"""Regions of an earlier daemon, which go on, are ended again, or end with their lease."""

from gpulease.daemon.leases.events import (
    Effect,
    EndRegion,
    FreeRequested,
    LeaseEnded,
    LeaseRestored,
    OpenRegion,
    ProveRegion,
    ReclaimFailed,
    RegionEnded,
    RegionRequested,
    RegionRestored,
    RevokeRequested,
    SetRegion,
    TimerKind,
)
from gpulease.daemon.leases.model import Cause, LeaseState, RegionState
from gpulease.daemon.leases.persisted import RegionRow
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.session_words import RegionWord

from .scenario import S, Scenario, armed, card, kinds, one


def before() -> Scenario:
    s = Scenario(card(0, 1000))
    s.active(1, ttl_ms=60_000)
    return s


def kept(s: Scenario, region_id: int = 2) -> RegionRow:
    found = s.table.regions.get(region_id)
    assert found is not None
    return found


def after(s: Scenario, region: RegionRow, *, has_worker: bool = True) -> tuple[Scenario, list[Effect]]:
    """Return the next daemon's table, and what became of the region there."""
    lease = s.table.lease_row(1)
    assert lease is not None
    new = Scenario(card(0, 1000))
    new.now_ns = s.now_ns
    new.do(LeaseRestored(lease, has_worker))
    return new, new.do(RegionRestored(region))


def test_an_active_region_goes_on_with_its_word_and_its_deadline() -> None:
    s = before()
    s.region(2)
    new, out = after(s, kept(s))
    assert one(out, SetRegion) == SetRegion(1, 2, 0, 1, RegionWord.ACTIVE, s.now_ns + 5 * S)
    assert armed(out, TimerKind.EXPIRY).due_ns == s.now_ns + 5 * S
    assert new.lease(2) == s.lease(2)
    assert kept(new) == kept(s)


def test_a_number_is_not_given_again_after_its_region_was_forgotten() -> None:
    s = before()
    for number in (2, 3):
        s.region(number)
    s.do(FreeRequested(9, 3, "bob"))
    s.do(RegionEnded(3, 4, 0, is_shown=True))
    new, _ = after(s, kept(s))
    again = one(new.do(RegionRequested(77, 1, 4, "ann", "bob", 1, 1000, 1)), OpenRegion)
    # Nor are those that were ordered, and lost with the last rows: one for each slot at most.
    assert (again.slot, again.number) == (1, 3 + MAX_REGIONS)


def test_a_region_whose_time_is_over_expires() -> None:
    s = before()
    s.region(2)
    _, out = after(s.at(5), kept(s))
    assert one(out, SetRegion).word is RegionWord.EXPIRED
    assert one(out, EndRegion).region_id == 2


def test_a_cancelled_region_stays_cancelled() -> None:
    s = before()
    s.region(2)
    _, out = after(s, kept(s)._replace(is_cancelled=True))
    assert {e.word for e in out if isinstance(e, SetRegion)} == {RegionWord.CANCELLED}


def test_a_region_that_nobody_was_told_of_is_taken_back() -> None:
    s = before()
    s.do(RegionRequested(77, 1, 2, "ann", "bob", 4, 1000, 1))
    new, out = after(s, kept(s))
    assert kinds(out)[:2] == [SetRegion, EndRegion]
    assert one(new.do(RegionEnded(2, 4, 0, is_shown=True)), LeaseEnded).cause is Cause.ABANDONED


def test_a_region_that_had_ended_is_ended_again() -> None:
    s = before()
    s.region(2)
    s.do(RevokeRequested(9, 2, "because"))
    new, out = after(s, kept(s))
    assert kinds(out)[:2] == [SetRegion, EndRegion]
    assert one(out, SetRegion).word is RegionWord.REVOKED
    assert one(new.do(RegionEnded(2, 4, 0, is_shown=True)), LeaseEnded).cause is Cause.REVOKED


def test_a_region_that_the_worker_saw_end_ends_although_the_journal_missed_it() -> None:
    s = before()
    s.region(2)
    new, _ = after(s, kept(s))
    out = new.do(RegionEnded(2, 4, 0, is_shown=True))
    assert one(out, SetRegion).word is RegionWord.REVOKED
    assert one(out, LeaseEnded).cause is Cause.REVOKED


def test_a_region_whose_proof_was_awaited_is_proved() -> None:
    s = before()
    s.region(2)
    s.do(RevokeRequested(9, 2, "because"))
    s.do(RegionEnded(2, 3, 1, is_shown=False))
    new, out = after(s, kept(s))
    assert one(out, ProveRegion).allowed_bytes == 27
    assert kept(new).state is RegionState.FENCED


def test_a_fence_that_lasts_lasts_on_without_a_second_end() -> None:
    s = before()
    s.region(2)
    s.do(RevokeRequested(9, 2, "because"))
    s.do(RegionEnded(2, 3, 1, is_shown=False))
    s.at(31).fire(2, TimerKind.RECLAIM)
    new, out = after(s, kept(s))
    assert kinds(out) == [SetRegion]
    assert new.table.regions.held_bytes(1) == 4


def test_bytes_kept_in_a_returned_regions_place_stay_charged() -> None:
    s = before()
    s.region(2)
    s.do(RevokeRequested(9, 2, "because"))
    s.do(RegionEnded(2, 3, 1, is_shown=True))
    new, out = after(s, kept(s))
    assert out == []
    assert (new.table.regions.held_bytes(1), new.table.regions.of(1)) == (1, ())


def test_a_region_of_a_lost_worker_ends_with_its_lease() -> None:
    s = before()
    s.region(2)
    new, out = after(s, kept(s), has_worker=False)
    assert one(out, SetRegion).word is RegionWord.REVOKED
    assert (new.lease(2).cause, new.lease(2).state) == (Cause.WORKER_DIED, LeaseState.DRAINING)
    assert [e.lease.lease_id for e in new.gone(1) if isinstance(e, LeaseEnded)] == [2, 1]


def test_a_region_of_a_fenced_lease_is_part_of_its_fence() -> None:
    s = before()
    s.region(2)
    region = kept(s)
    s.do(RevokeRequested(9, 1, "because"))
    s.do(ReclaimFailed(1, "no"))
    new, out = after(s, region)
    assert one(out, LeaseEnded).lease.state is LeaseState.FENCED
    assert new.lease(2).cause is Cause.REVOKED


def test_a_region_whose_lease_is_over_is_remembered_as_ended() -> None:
    s = before()
    s.region(2)
    region = kept(s)
    s.do(FreeRequested(9, 1, "ann"))
    lease = s.table.lease_row(1)
    assert lease is not None
    new = Scenario(card(1, 1000))
    new.do(LeaseRestored(lease, has_worker=False))
    assert one(new.do(RegionRestored(region)), LeaseEnded).lease.parent_id == 1
    assert new.lease(2).state is LeaseState.TORNDOWN
    assert new.do(RegionRestored(region)) == []
