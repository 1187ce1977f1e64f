"""Claimed leases, with a name or with bytes of a quota, and the membership deadline of the node that serves them."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.epochs import MAX_NAMES, HighestEpochs
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    FenceClearRequested,
    Granted,
    KillWorker,
    LeaseRestored,
    MoveRequested,
    ParkSession,
    ReclaimFailed,
    RefuseWork,
    RegionProved,
    RenameWorker,
    RenewRequested,
    RequestDenied,
    SessionImaged,
    SessionParked,
    SetDeadline,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved, SetMembershipDeadline
from gpulease.daemon.leases.model import Cause, LeaseState, LeaseTerms, MembershipDeadline
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable

from .scenario import S, Scenario, card, one

SLEPT_NS = 9 * S


def moved(s: Scenario, ahead_s: float) -> list[Effect]:
    at_ns = s.now_ns + int(ahead_s * S)
    return s.do(MembershipDeadlineMoved(at_ns, at_ns + SLEPT_NS))


def ask(s: Scenario, lease_id: int, epoch: int, name: str = "a", wait_ms: int = 0) -> list[Effect]:
    terms = LeaseTerms(20, 60_000, name=name, epoch=epoch)
    return s.do(AcquireRequested(1000 + lease_id, "ann", lease_id, terms, None, wait_ms))


def named(ahead_s: float = 30) -> Scenario:
    s = Scenario()
    moved(s, ahead_s)
    ask(s, 1, epoch=7)
    s.do(WorkerReady(1))
    return s


def denial_of(effects: list[Effect]) -> DenialReason:
    (denied,) = (effect for effect in effects if isinstance(effect, RequestDenied))
    return denied.denial.reason


def test_the_membership_deadline_is_on_the_page_before_the_lease_begins() -> None:
    s = Scenario()
    moved(s, 30)
    ask(s, 1, epoch=7)
    effects = s.do(WorkerReady(1))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(SetMembershipDeadline) < kinds.index(SetDeadline) < kinds.index(Granted)
    assert SetMembershipDeadline(1, s.now_ns + 30 * S + SLEPT_NS) in effects
    assert s.table.claims() == {"a": 7}


@pytest.mark.parametrize(("card", "version"), [("0", "0.1"), (None, "")], ids=["upgrade", "cold"])
def test_a_worker_that_a_session_has_left_gets_the_membership_deadline_until_it_is_gone(
    card: str | None, version: str
) -> None:
    s = Scenario(limits=CoreLimits(park_memory_bytes=16 << 20, park_stay_ms=0))
    moved(s, 30)
    terms = LeaseTerms(20, 60_000, name="a", epoch=7, park_idle_ms=0)
    s.do(AcquireRequested(1, "ann", 1, terms))
    s.do(WorkerReady(1))
    order = one(s.do(MoveRequested(2, 1, "root", card, True, version)), ParkSession)
    s.do(SessionParked(1, order.number, 20))
    s.do(RegionProved(1))
    former = one(s.do(SessionImaged(1, order.number, 1000)), RenameWorker).to_id
    # The zygote ends a worker at the membership deadline on its page, and this or the next daemon may have to continue
    # the session in the former one.
    due_ns = s.at(20).now_ns + 30 * S + SLEPT_NS
    assert moved(s, 30) == [SetMembershipDeadline(1, due_ns), SetMembershipDeadline(former, due_ns)]
    s.do(WorkerExited(former, "signal 9"))
    assert [effect for effect in moved(s.at(25), 30) if isinstance(effect, SetMembershipDeadline)] == [
        SetMembershipDeadline(1, s.now_ns + 30 * S + SLEPT_NS)
    ]


def test_a_name_is_not_granted_without_a_membership_deadline_nor_behind_it() -> None:
    s = Scenario()
    assert denial_of(ask(s, 1, epoch=7)) is DenialReason.ISOLATED
    moved(s, 5)
    ask(s, 2, epoch=8)
    effects = s.at(5).do(WorkerReady(2))
    assert denial_of(effects) is DenialReason.ISOLATED
    assert effects[0] == RefuseWork(2, Cause.ISOLATED)
    assert KillWorker(2) in effects


def test_a_lease_ends_at_the_membership_deadline_at_once_unless_it_moves() -> None:
    s = named(ahead_s=30)
    assert moved(s.at(20), 30) == [SetMembershipDeadline(1, s.now_ns + 30 * S + SLEPT_NS)]
    assert s.at(10).fire(1, TimerKind.MEMBERSHIP) != []
    assert s.lease(1).state is LeaseState.ACTIVE
    effects = s.at(20).fire(1, TimerKind.MEMBERSHIP)
    assert [effects[0], effects[1]] == [RefuseWork(1, Cause.ISOLATED), KillWorker(1)]
    s.gone(1)
    assert (s.lease(1).state, s.lease(1).cause) == (LeaseState.TORNDOWN, Cause.ISOLATED)
    assert s.table.claims() == {}


def test_a_membership_deadline_that_moves_too_late_saves_no_lease() -> None:
    s = named(ahead_s=30)
    assert RefuseWork(1, Cause.ISOLATED) in moved(s.at(30), 30)


def test_a_renewal_does_not_go_beyond_the_membership_deadline() -> None:
    s = named(ahead_s=30)
    s.do(RenewRequested(5, 1, "ann", 80_000))
    assert s.at(30).do(TimerFired(1, 2, TimerKind.MEMBERSHIP))[0] == RefuseWork(1, Cause.ISOLATED)


def test_claims_that_are_lost_end_names_and_refuse_those_that_wait() -> None:
    s = named()
    s.acquire(2, 20, tenant="bob")
    s.do(WorkerReady(2))
    ask(s, 3, epoch=9, name="b", wait_ms=1000)
    effects = s.do(ClaimsLost("it was fenced"))
    assert RefuseWork(1, Cause.ISOLATED) in effects
    assert RefuseWork(2, Cause.ISOLATED) not in effects
    assert s.lease(1).reason == "it was fenced"
    assert s.lease(2).state is LeaseState.ACTIVE
    assert denial_of(ask(s, 4, epoch=10, name="c")) is DenialReason.ISOLATED


def test_a_lease_with_bytes_of_a_quota_ends_at_the_membership_deadline_too() -> None:
    s = Scenario()
    terms = LeaseTerms(20, 60_000, fleet_bytes=20)
    assert denial_of(s.do(AcquireRequested(1, "ann", 1, terms))) is DenialReason.ISOLATED
    moved(s, 30)
    s.do(AcquireRequested(2, "ann", 1, terms))
    assert SetMembershipDeadline(1, s.now_ns + 30 * S + SLEPT_NS) in s.do(WorkerReady(1))
    assert (s.table.claims(), s.table.counted()) == ({}, {1: "ann"})
    assert s.at(30).fire(1, TimerKind.MEMBERSHIP)[0] == RefuseWork(1, Cause.ISOLATED)
    assert s.table.counted() == {1: "ann"}
    s.gone(1)
    assert s.table.counted() == {}


def test_who_waits_for_room_has_claims_and_loses_them_with_the_others() -> None:
    s = Scenario(card(0, 40))
    moved(s, 30)
    s.acquire(1, 20)
    ask(s, 2, epoch=8, wait_ms=1000)
    s.do(AcquireRequested(1003, "bob", 3, LeaseTerms(20, 60_000, fleet_bytes=20), None, 1000))
    assert (s.table.claims(), s.table.counted()) == ({"a": 8}, {3: "bob"})
    assert len([denied for denied in s.do(ClaimsLost("it was fenced")) if isinstance(denied, RequestDenied)]) == 2
    assert (s.table.claims(), s.table.counted()) == ({}, {})


def test_a_taken_name_tells_the_lease_to_its_own_tenant_alone() -> None:
    s = named()
    told = {}
    for tenant in ("ann", "bob"):
        terms = LeaseTerms(20, 60_000, name="a", epoch=8)
        (denied,) = (
            effect
            for effect in s.do(AcquireRequested(1002, tenant, 2, terms, None, 0))
            if isinstance(effect, RequestDenied)
        )
        assert denied.denial.reason is DenialReason.NAME_TAKEN
        told[tenant] = f"{1:032x}" in denied.denial.message
    assert told == {"ann": True, "bob": False}


def test_an_epoch_that_is_not_higher_is_refused() -> None:
    s = named()
    assert denial_of(ask(s, 2, epoch=8)) is DenialReason.NAME_TAKEN
    s.do(ClaimsLost("it was fenced"))
    s.gone(1)
    moved(s, 40)
    for epoch in (6, 7):
        assert denial_of(ask(s, 10 + epoch, epoch=epoch)) is DenialReason.FENCED
    assert not any(isinstance(effect, RequestDenied) for effect in ask(s, 20, epoch=8))


def test_a_fenced_slice_keeps_its_name_until_the_fence_is_cleared() -> None:
    s = named()
    s.do(ClaimsLost("it was fenced"))
    s.do(ReclaimFailed(1, "the card does not answer"))
    moved(s, 40)
    assert s.table.claims() == {"a": 7}
    assert denial_of(ask(s, 2, epoch=8)) is DenialReason.NAME_TAKEN
    s.do(FenceClearRequested(9, None))
    assert s.table.claims() == {}


@pytest.mark.parametrize("left_s", [10, -1])
def test_a_restored_lease_keeps_its_page_s_membership_deadline(left_s: int) -> None:
    before = named()
    kept = before.table.lease_row(1, 77)
    assert kept is not None
    s = Scenario()
    s.now_ns = before.now_ns
    membership_deadline = MembershipDeadline(s.now_ns + left_s * S, s.now_ns + left_s * S + SLEPT_NS)
    s.do(LeaseRestored(kept, has_worker=True, membership_deadline=membership_deadline))
    assert s.table.claims() == {"a": 7}
    if left_s < 0:
        assert s.lease(1).cause is Cause.ISOLATED
        return
    assert s.lease(1).state is LeaseState.ACTIVE
    assert s.at(10).fire(1, TimerKind.MEMBERSHIP)[0] == RefuseWork(1, Cause.ISOLATED)


def test_the_lowest_epoch_becomes_the_floor_of_names_that_are_not_kept() -> None:
    epochs = HighestEpochs()
    for number in range(MAX_NAMES):
        assert epochs.note(f"name-{number}", 10 + number) == [(f"name-{number}", 10 + number)]
    assert epochs.note("one-more", 9000) == [("one-more", 9000), ("name-0", None), ("", 10)]
    assert (len(epochs), epochs.of("name-0"), epochs.of("unknown"), epochs.of("name-1")) == (MAX_NAMES, 10, 10, 11)
    assert epochs.note("one-more", 8999) == []
    assert HighestEpochs([("", 10), ("one-more", 9000)]).of("unknown") == 10


def test_a_request_id_finds_its_tenant_s_active_lease() -> None:
    table = LeaseTable([card()])
    terms = LeaseTerms(20, 60_000, request_id="0f" * 16)
    table.handle(AcquireRequested(1, "ann", 5, terms), 0)
    assert table.lease_of_request("ann", "0f" * 16) is None
    table.handle(WorkerReady(5), 0)
    assert table.lease_of_request("ann", "0f" * 16) == table.get(5)
    assert table.lease_of_request("bob", "0f" * 16) is None
