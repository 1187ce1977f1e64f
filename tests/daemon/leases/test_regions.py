"""A region's life: asked for, opened, renewed, cancelled, ended, and its memory proved back."""

import pytest

from gpulease.daemon.contract.regions_page import MAX_NUMBER
from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    DrainCancelled,
    DrainRequested,
    Effect,
    EndRegion,
    FreeDone,
    FreeRequested,
    LeaseEnded,
    OpenRegion,
    ProveRegion,
    RegionCancelRequested,
    RegionCancelSet,
    RegionEnded,
    RegionGranted,
    RegionOpened,
    RegionProved,
    RegionRefused,
    RegionReleased,
    RegionRequested,
    RegionStuck,
    Renewed,
    RenewRequested,
    RequestDenied,
    RequesterGone,
    RevokeDone,
    RevokeRequested,
    SetRegion,
    TimerKind,
    Warned,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState, LeaseTerms, RegionState, SubmitRequested
from gpulease.daemon.leases.quotas import TenantLimits, TenantRules
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Phase, RevokeOutcome
from gpulease.protocol.session_words import RegionWord

from .scenario import MS, S, Scenario, armed, card, denied, kinds, one


@pytest.fixture
def s() -> Scenario:
    """Return a node with one active lease: 1, of ann, with 20 bytes."""
    s = Scenario(card(0, 1000))
    s.active(1, ttl_ms=60_000)
    return s


def asking(region_id: int = 2, **more: object) -> RegionRequested:
    values: dict[str, object] = {
        "request": 2002,
        "lease_id": 1,
        "region_id": region_id,
        "tenant": "ann",
        "owner": "bob",
        "size_bytes": 4,
        "ttl_ms": 5000,
        "granule_bytes": 1,
    }
    return RegionRequested(**(values | more))  # type: ignore[arg-type]


def taken(s: Scenario, region_id: int = 2, *, size: int = 4, kept: int = 0, is_shown: bool = True) -> list[Effect]:
    return s.do(RegionEnded(region_id, size - kept, kept, is_shown))


def state_of(s: Scenario, region_id: int = 2) -> RegionState:
    kept = s.table.regions.get(region_id)
    assert kept is not None
    return kept.state


# --- opening ---


def test_a_region_is_opened_by_the_worker_and_then_granted(s: Scenario) -> None:
    out = s.do(asking(size_bytes=5, granule_bytes=4))
    assert one(out, OpenRegion) == OpenRegion(1, 2, 0, 1, 8)
    assert s.lease(2).state is LeaseState.PENDING
    out = s.do(RegionOpened(2, 0x7000))
    deadline_ns = s.now_ns + 5 * S
    assert one(out, SetRegion) == SetRegion(1, 2, 0, 1, RegionWord.ACTIVE, deadline_ns)
    assert one(out, RegionGranted) == RegionGranted(2002, s.lease(2), 0x7000, 0, 1)
    assert s.lease(2).state is LeaseState.ACTIVE
    assert (s.lease(2).tenant, s.lease(2).parent_id, s.lease(2).size_bytes) == ("bob", 1, 8)
    assert s.lease(2).deadline_ns == deadline_ns


def test_a_region_without_an_owner_is_its_leases_tenants(s: Scenario) -> None:
    s.do(asking(owner=""))
    assert s.lease(2).tenant == "ann"


def test_a_region_is_no_lease_of_the_card(s: Scenario) -> None:
    before = s.card()
    s.region(2)
    assert s.card() == before
    assert [lease.lease_id for lease in s.table.snapshots()] == [1]
    assert [region.lease_id for region in s.table.regions.of(1)] == [2]
    assert s.table.regions.snapshots() == s.table.regions.of(1)
    assert s.table.regions.held_bytes(1) == 4


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (asking(tenant="bob"), DenialReason.NOT_FOUND),
        (asking(lease_id=77), DenialReason.NOT_FOUND),
        (asking(granule_bytes=0), DenialReason.UNSUPPORTED),
        (asking(size_bytes=0), DenialReason.INVALID_REQUEST),
        (asking(region_id=0), DenialReason.INVALID_REQUEST),
        (asking(region_id=1), DenialReason.INVALID_REQUEST),
        (asking(region_id=1 << 128), DenialReason.INVALID_REQUEST),
        (asking(ttl_ms=0), DenialReason.INVALID_REQUEST),
        (asking(size_bytes=21), DenialReason.CAPACITY_EXCEEDED),
        (asking(size_bytes=19, granule_bytes=32), DenialReason.CAPACITY_EXCEEDED),
    ],
)
def test_a_region_that_cannot_be_is_refused(s: Scenario, event: RegionRequested, reason: DenialReason) -> None:
    assert denied(s.do(event)).reason is reason
    assert s.table.regions.snapshots() == ()


def test_an_operator_opens_a_region_for_a_tenant(s: Scenario) -> None:
    assert one(s.do(asking(tenant="root", is_operator=True)), OpenRegion).region_id == 2


def test_the_regions_of_a_lease_share_its_slice(s: Scenario) -> None:
    s.region(2, 15)
    assert "has only 5 bytes left" in denied(s.do(asking(3, size_bytes=6))).message
    s.region(3, 5)


def test_bytes_kept_for_submits_are_no_regions() -> None:
    s = Scenario(card(0, 1000))
    s.do(AcquireRequested(1001, "ann", 1, LeaseTerms(20, 60_000, submit_bytes=15)))
    s.do(WorkerReady(1))
    assert denied(s.do(asking(size_bytes=6))).reason is DenialReason.CAPACITY_EXCEEDED
    s.region(2, 5)


def test_a_region_has_none_of_its_own(s: Scenario) -> None:
    s.region(2)
    assert denied(s.do(asking(3, lease_id=2, tenant="bob"))).reason is DenialReason.UNSUPPORTED


def test_a_session_has_at_most_so_many_regions() -> None:
    s = Scenario(card(0, 1000))
    s.active(1, 300)
    for number in range(MAX_REGIONS):
        assert one(s.do(asking(number + 2, size_bytes=1, request=number)), OpenRegion).slot == number
    assert denied(s.do(asking(1000, size_bytes=1, request=1000))).reason is DenialReason.LIMIT


def test_the_owners_own_time_limit_counts() -> None:
    s = Scenario(card(0, 1000))
    s.table._store.limits = s.table._store.limits.__class__(
        tenants=TenantRules(by_name={"bob": TenantLimits(max_ttl_s=2)})
    )
    s.active(1)
    assert denied(s.do(asking(ttl_ms=2001))).reason is DenialReason.LIMIT
    s.region(2, ttl_ms=2000)
    assert denied(s.do(RenewRequested(9, 2, "bob", 2001))).reason is DenialReason.LIMIT


def test_a_drained_node_opens_no_region_and_warns_those_that_are_open(s: Scenario) -> None:
    s.region(2)
    warned = [effect for effect in s.do(DrainRequested(9, 3000)) if isinstance(effect, Warned)]
    assert [(effect.lease_id, effect.phase, effect.left_ms) for effect in warned] == [
        (1, Phase.WARNING, 3000),
        (2, Phase.WARNING, 3000),
    ]
    assert denied(s.do(asking(3))).reason is DenialReason.BUSY, "for a client, DRAINED would end the lease"
    renewed = one(s.do(RenewRequested(9, 2, "bob", 8000)), Renewed).lease
    assert renewed.deadline_ns == s.now_ns + 5 * S, "a renewal never shortens"
    s.do(DrainCancelled(10))
    s.region(3)


def test_a_region_that_the_worker_refuses_is_denied_and_gone(s: Scenario) -> None:
    s.do(asking())
    out = s.do(RegionRefused(2, "The card is full."))
    assert "The card is full" in denied(out).message
    assert one(out, LeaseEnded).cause is Cause.SPAWN_FAILED
    assert s.lease(2).state is LeaseState.TORNDOWN
    assert s.table.regions.held_bytes(1) == 0
    assert one(s.do(asking(3)), OpenRegion).number == 2


def test_a_region_that_does_not_open_in_time_is_denied_and_ended(s: Scenario) -> None:
    out = s.do(asking())
    due_ns = armed(out, TimerKind.SPAWN).due_ns
    assert kinds(s.fire(2, TimerKind.SPAWN)) == kinds([armed(out, TimerKind.SPAWN)])
    s.now_ns = due_ns
    out = s.fire(2, TimerKind.SPAWN)
    assert denied(out).reason is DenialReason.BUSY
    assert one(out, EndRegion).region_id == 2
    assert s.do(RegionOpened(2, 0x7000)) == []
    assert one(taken(s), LeaseEnded).cause is Cause.SPAWN_FAILED


def test_a_refusal_that_comes_late_ends_the_region_too(s: Scenario) -> None:
    s.do(asking())
    s.at(10).fire(2, TimerKind.SPAWN)
    assert one(s.do(RegionRefused(2, "The card is full.")), LeaseEnded).cause is Cause.SPAWN_FAILED
    assert s.table.regions.of(1) == ()


def test_a_region_whose_requester_left_is_taken_back_without_a_reply(s: Scenario) -> None:
    s.do(asking())
    out = s.do(RequesterGone(2002))
    assert RequestDenied not in kinds(out)
    assert one(out, EndRegion).region_id == 2
    assert one(taken(s), LeaseEnded).cause is Cause.ABANDONED


def test_a_submit_in_the_sessions_place_leaves_no_room_for_regions(s: Scenario) -> None:
    s.do(SubmitRequested(9, 1, "ann", 1000))
    assert denied(s.do(asking())).reason is DenialReason.BUSY


def test_a_lease_with_regions_takes_no_submit_in_its_sessions_place(s: Scenario) -> None:
    s.region(2)
    assert denied(s.do(SubmitRequested(9, 1, "ann", 1000))).reason is DenialReason.INVALID_REQUEST


# --- renewals, and who may ---


def test_a_renewal_moves_the_deadline_and_the_generation(s: Scenario) -> None:
    s.region(2)
    out = s.at(1).do(RenewRequested(9, 2, "bob", 8000))
    lease = one(out, Renewed).lease
    assert (lease.generation, lease.deadline_ns, lease.ttl_ms) == (2, s.now_ns + 8 * S, 8000)
    assert one(out, SetRegion).deadline_ns == lease.deadline_ns
    assert s.at(4).fire(2, TimerKind.EXPIRY) == [], "an outdated timer"
    assert s.lease(2).state is LeaseState.ACTIVE


@pytest.mark.parametrize(("tenant", "is_operator"), [("bob", False), ("ann", False), ("root", True)])
def test_its_tenant_its_leases_tenant_and_operators_renew_a_region(s: Scenario, tenant: str, is_operator: bool) -> None:
    s.region(2)
    assert one(s.do(RenewRequested(9, 2, tenant, 8000, is_operator)), Renewed).lease.generation == 2


def test_a_region_is_its_own_tenants_to_give_back(s: Scenario) -> None:
    s.region(2)
    assert denied(s.do(FreeRequested(9, 2, "ann"))).reason is DenialReason.NOT_ALLOWED
    assert s.lease(2).state is LeaseState.ACTIVE


@pytest.mark.parametrize(
    "event",
    [
        RenewRequested(9, 2, "eve", 1000),
        FreeRequested(9, 2, "eve"),
        RevokeRequested(9, 2, "no", "eve", is_operator=False),
        RegionCancelRequested(9, 2, "eve", is_cancelled=True),
    ],
)
def test_a_stranger_finds_no_region(
    s: Scenario, event: RenewRequested | FreeRequested | RevokeRequested | RegionCancelRequested
) -> None:
    s.region(2)
    assert denied(s.do(event)).reason is DenialReason.NOT_FOUND
    assert s.lease(2).state is LeaseState.ACTIVE


def test_the_leases_tenant_revokes_its_regions_alone(s: Scenario) -> None:
    s.region(2)
    assert denied(s.do(RevokeRequested(9, 2, "no", "bob", is_operator=False))).reason is DenialReason.NOT_ALLOWED
    assert denied(s.do(RevokeRequested(9, 1, "no", "ann", is_operator=False))).reason is DenialReason.NOT_ALLOWED
    assert denied(s.do(RevokeRequested(9, 7, "no", "ann", is_operator=False))).reason is DenialReason.NOT_FOUND
    out = s.do(RevokeRequested(9, 2, "over quota", "ann", is_operator=False))
    assert one(out, SetRegion).word is RegionWord.REVOKED
    assert one(taken(s), RevokeDone).outcome is RevokeOutcome.TORN_DOWN
    assert (
        one(s.do(RevokeRequested(9, 2, "x", "ann", is_operator=False)), RevokeDone).outcome is RevokeOutcome.TORN_DOWN
    )


def test_the_tenants_of_a_region_and_of_its_lease_may_know_of_it(s: Scenario) -> None:
    s.region(2)
    assert s.table.tenants_with_access(2) == {"ann", "bob"}
    assert s.table.tenants_with_access(1) == {"ann"}
    assert s.table.tenants_with_access(3) == frozenset()


# --- cancel ---


def test_a_cancelled_region_is_taken_up_again(s: Scenario) -> None:
    s.region(2)
    out = s.do(RegionCancelRequested(9, 2, "bob", is_cancelled=True))
    assert kinds(out) == [SetRegion, RegionCancelSet]
    assert one(out, SetRegion).word is RegionWord.CANCELLED
    assert kinds(s.do(RegionCancelRequested(9, 2, "ann", is_cancelled=True))) == [RegionCancelSet]
    assert one(s.do(RenewRequested(9, 2, "bob", 6000)), SetRegion).word is RegionWord.CANCELLED
    out = s.do(RegionCancelRequested(9, 2, "ann", is_cancelled=False))
    assert one(out, SetRegion).word is RegionWord.ACTIVE


def test_an_ended_region_is_never_cancelled(s: Scenario) -> None:
    s.region(2)
    s.do(FreeRequested(8, 2, "bob"))
    for is_cancelled in (True, False):
        out = s.do(RegionCancelRequested(9, 2, "bob", is_cancelled))
        assert kinds(out) == [RequestDenied]
    assert denied(s.do(RegionCancelRequested(9, 1, "ann", is_cancelled=True))).reason is DenialReason.INVALID_REQUEST


# --- ends ---


@pytest.mark.parametrize(
    ("how", "cause", "word"),
    [
        (FreeRequested(9, 2, "bob"), Cause.FREED, RegionWord.FREED),
        (FreeRequested(9, 2, "root", is_operator=True), Cause.FREED, RegionWord.FREED),
        (RevokeRequested(9, 2, "because"), Cause.REVOKED, RegionWord.REVOKED),
        (None, Cause.EXPIRED, RegionWord.EXPIRED),
    ],
)
def test_an_end_changes_the_word_before_anything_else(
    s: Scenario, how: FreeRequested | RevokeRequested | None, cause: Cause, word: RegionWord
) -> None:
    s.region(2)
    out = s.at(5).fire(2, TimerKind.EXPIRY) if how is None else s.do(how)
    assert kinds(out)[:2] == [SetRegion, EndRegion]
    assert one(out, SetRegion).word is word
    assert one(out, EndRegion).grace_ms == 1000
    assert (s.lease(2).state, s.lease(2).cause) == (LeaseState.DRAINING, cause)
    ended = one(taken(s), LeaseEnded)
    assert (ended.cause, ended.lease.state, ended.lease.parent_id) == (cause, LeaseState.TORNDOWN, 1)
    assert s.lease(1).state is LeaseState.ACTIVE


def test_the_first_cause_is_kept(s: Scenario) -> None:
    s.region(2)
    s.do(FreeRequested(8, 2, "bob"))
    assert kinds(s.do(RevokeRequested(9, 2, "because"))) == []
    out = taken(s)
    assert one(out, FreeDone).lease.cause is Cause.FREED
    assert one(out, RevokeDone).outcome is RevokeOutcome.TORN_DOWN
    assert one(out, LeaseEnded).cause is Cause.FREED


def test_a_late_timer_is_noticed_by_the_next_request(s: Scenario) -> None:
    s.region(2)
    out = s.at(6).do(RenewRequested(9, 2, "bob", 1000))
    assert denied(out).reason is DenialReason.LEASE_EXPIRED
    assert one(out, SetRegion).word is RegionWord.EXPIRED


def test_the_bytes_stay_charged_until_they_are_proved_back(s: Scenario) -> None:
    s.region(2, 16)
    s.do(FreeRequested(8, 2, "bob"))
    assert denied(s.do(asking(3, size_bytes=5))).reason is DenialReason.CAPACITY_EXCEEDED
    out = taken(s, size=16, kept=2, is_shown=False)
    # The worker may hold its context's 10 bytes and its slice's 20, less the 14 that went back.
    assert one(out, ProveRegion) == ProveRegion(1, 2, "GPU-a", 16)
    assert state_of(s) is RegionState.FENCED
    assert s.lease(2).state is LeaseState.DRAINING
    assert denied(s.do(asking(3, size_bytes=5))).reason is DenialReason.CAPACITY_EXCEEDED
    out = s.do(RegionProved(2))
    assert kinds(out) == [FreeDone, LeaseEnded]
    assert s.table.regions.held_bytes(1) == 2
    s.region(3, 18)
    s.do(RegionReleased(2))
    assert s.table.regions.held_bytes(1) == 18
    assert s.table.regions.get(2) is None


def test_bytes_that_nobody_accounts_for_stay_charged(s: Scenario) -> None:
    s.region(2, 16)
    s.do(FreeRequested(8, 2, "bob"))
    s.do(RegionEnded(2, 10, 1, is_shown=True))
    assert s.table.regions.held_bytes(1) == 6


def test_a_worker_that_has_nothing_of_an_open_region_is_not_believed_alone(s: Scenario) -> None:
    s.region(2, 16)
    s.do(FreeRequested(8, 2, "bob"))
    assert one(s.do(RegionRefused(2, "It has none.")), ProveRegion).allowed_bytes == 14
    assert one(s.do(RegionProved(2)), FreeDone).lease.lease_id == 2
    assert s.table.regions.held_bytes(1) == 0


def test_a_place_let_go_of_before_the_proof_keeps_nothing(s: Scenario) -> None:
    s.region(2, 16)
    s.do(FreeRequested(8, 2, "bob"))
    taken(s, size=16, kept=2, is_shown=False)
    s.do(RegionReleased(2))
    s.do(RegionProved(2))
    assert s.table.regions.held_bytes(1) == 0


def test_a_region_that_is_not_proved_back_stays_fenced(s: Scenario) -> None:
    s.region(2, 16)
    s.do(FreeRequested(8, 2, "bob"))
    s.do(RevokeRequested(7, 2, "because"))
    due_ns = armed(taken(s, size=16, is_shown=False), TimerKind.RECLAIM).due_ns
    s.now_ns = due_ns
    out = s.fire(2, TimerKind.RECLAIM)
    assert denied(out).reason is DenialReason.FENCED
    assert one(out, RevokeDone).outcome is RevokeOutcome.FENCED
    assert one(out, LeaseEnded).lease.state is LeaseState.FENCED
    assert s.do(RegionProved(2)) == [], "no proof lifts a fence that lasts"
    assert one(s.do(RevokeRequested(7, 2, "again")), RevokeDone).outcome is RevokeOutcome.FENCED
    assert s.table.regions.held_bytes(1) == 16
    assert (s.lease(1).state, s.lease(2).state) == (LeaseState.ACTIVE, LeaseState.FENCED)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_region_that_cannot_be_taken_away_ends_its_lease(s: Scenario, *, is_silent: bool) -> None:
    s.region(2)
    s.region(3)
    out = s.do(RevokeRequested(9, 2, "because"))
    if is_silent:
        s.now_ns = armed(out, TimerKind.RECLAIM).due_ns
        out = s.fire(2, TimerKind.RECLAIM)
    else:
        out = s.do(RegionStuck(2, "a kernel did not end."))
    cause = Cause.UNRESPONSIVE if is_silent else Cause.KERNEL_TIMEOUT
    assert (s.lease(1).cause, s.lease(3).cause) == (cause, cause)
    assert f"region {2:032x} could not be taken away" in s.lease(1).reason
    assert s.lease(2).cause is Cause.REVOKED, "the first cause is kept"
    denial = denied(s.do(RenewRequested(10, 1, "ann", 1000)))
    assert "max_kernel_secs" not in denial.hint
    assert ("region_grace_ms" in denial.hint) is not is_silent


@pytest.mark.parametrize(
    "answer", [RegionStuck(2, "x"), RegionEnded(2, 4, 0, True), RegionProved(2), RegionReleased(2)]
)
def test_an_answer_that_nobody_asked_for_changes_nothing(
    s: Scenario, answer: RegionStuck | RegionEnded | RegionProved | RegionReleased
) -> None:
    s.region(2)
    assert s.do(answer) == []
    assert s.lease(2).state is LeaseState.ACTIVE


def test_a_slot_is_used_again_with_another_number_once_its_region_is_returned(s: Scenario) -> None:
    s.region(2)
    s.do(FreeRequested(8, 2, "bob"))
    assert (one(s.do(asking(3)), OpenRegion).slot, s.table.regions.of(1)[0].lease_id) == (1, 2)
    taken(s, kept=1)
    assert one(s.do(asking(4, request=4)), OpenRegion) == OpenRegion(1, 4, 0, 3, 4)


def test_numbers_are_used_up_before_one_is_given_twice(s: Scenario) -> None:
    s.table._store.live[1].region_number = MAX_NUMBER - 1
    assert one(s.do(asking()), OpenRegion).number == MAX_NUMBER
    s.do(RegionRefused(2, "no"))
    assert denied(s.do(asking(3))).reason is DenialReason.LIMIT


def test_a_region_has_phases_of_its_own(s: Scenario) -> None:
    def phase() -> Phase | None:
        found = s.table.phase(2, s.now_ns)
        return None if found is None else found.phase

    s.do(asking())
    seen = [phase()]
    s.do(RegionOpened(2, 1))
    seen.append(phase())
    s.at(4.6)
    seen.append(phase())
    s.do(FreeRequested(8, 2, "bob"))
    seen.append(phase())
    taken(s, is_shown=False)
    seen.append(phase())
    s.do(RegionProved(2))
    seen.append(phase())
    assert seen == [None, Phase.ACTIVE, Phase.WARNING, Phase.GRACE, Phase.TEARDOWN, Phase.ENDED]


def test_the_history_of_a_region_tells_its_states(s: Scenario) -> None:
    s.region(2)
    assert len(s.table.history(2)) == 1
    s.do(FreeRequested(8, 2, "bob"))
    ended = one(taken(s), LeaseEnded)
    assert [entry.finish for entry in ended.history] == [
        RegionState.ACTIVE,
        RegionState.FREED,
        RegionState.FENCED,
        RegionState.RETURNED,
    ]


def test_a_region_of_a_lease_that_starts_is_refused() -> None:
    s = Scenario(card(0, 1000))
    s.acquire(1)
    assert denied(s.do(asking())).reason is DenialReason.INVALID_REQUEST
    s.do(WorkerReady(1))
    assert armed(s.do(asking()), TimerKind.SPAWN).due_ns == s.now_ns + 10_000 * MS


def test_what_a_returned_region_gave_back_may_be_held_while_another_one_is_proved(s: Scenario) -> None:
    s.region(2, 4)
    s.region(3, 5)
    for region_id, size in ((2, 4), (3, 5)):
        s.do(RevokeRequested(region_id, region_id, "over"))
        taken(s, region_id, size=size, is_shown=False)
    assert s.table.regions.allowed_bytes(1) == s.table.charge_bytes(1) - 9
    s.do(RegionProved(2))
    assert s.table.regions.allowed_bytes(1) == s.table.charge_bytes(1) - 5
    assert s.table.regions.allowed_bytes(77) == 0
