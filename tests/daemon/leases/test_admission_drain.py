"""Drains: refused acquires, warnings, the deadline, cancellation."""

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    DrainCancelled,
    DrainRequested,
    DrainSet,
    DrainTimerFired,
    Effect,
    FenceClearRequested,
    FreeRequested,
    PoolTimerFired,
    ReclaimProved,
    RefuseWork,
    RegionRequested,
    Renewed,
    RenewRequested,
    RequestDenied,
    ResizeRequested,
    RevokeRequested,
    SpawnWorker,
    TimerKind,
    WarmUp,
    Warned,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState, WarmState
from gpulease.daemon.leases.quotas import CARD_DRAINS, DRAINS, ENDS_SOON, RENEWAL_SLACK_MS, remaining_ms
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.opcodes import Phase

from .scenario import MS, S, Scenario, armed, card, denied, end, one, placed

SLACK_NS = RENEWAL_SLACK_MS * MS


def drain(s: Scenario, within_s: float = 5) -> list[Effect]:
    return s.do(DrainRequested(90, int(within_s * 1000)))


def renew(s: Scenario, ttl_ms: int) -> list[Effect]:
    return s.do(RenewRequested(91, 1, "ann", ttl_ms))


def test_a_drained_node_grants_nothing() -> None:
    s = Scenario()
    s.acquire(1, 60)
    s.do(WorkerReady(1))
    s.acquire(2, 20)
    s.acquire(3, 90, wait_ms=9000)
    out = drain(s)
    refused = {effect.request: effect.denial for effect in out if isinstance(effect, RequestDenied)}
    assert set(refused) == {1002, 1003}, "who waits, and who has no worker yet"
    assert {denial.reason for denial in refused.values()} == {DenialReason.DRAINED}
    assert one(out, DrainSet) == DrainSet(90, s.now_ns + 5 * S, 1)
    denial = denied(s.at(2).acquire(4))
    assert denial.reason is DenialReason.DRAINED
    assert "in 3 s" in denial.message
    assert "another node" in denial.hint
    s.at(3).do(DrainTimerFired())
    assert "is drained" in denied(s.acquire(5)).message


def test_active_leases_are_warned_and_ended_at_the_deadline() -> None:
    s = Scenario()
    s.active(1, ttl_ms=60_000)
    out = drain(s)
    assert one(out, Warned) == Warned(1, Phase.WARNING, 5000)
    assert armed(out, DrainTimerFired).due_ns == s.now_ns + 5 * S
    assert armed(s.at(4).do(DrainTimerFired()), DrainTimerFired).due_ns == s.now_ns + S, "an early timer ends nobody"
    out = s.at(1).do(DrainTimerFired())
    assert one(out, RefuseWork).cause is Cause.DRAINED
    assert s.lease(1).reason == "the node is drained"
    s.fire(1, TimerKind.GRACE)
    s.gone(1)
    assert s.lease(1).state is LeaseState.TORNDOWN
    assert denied(s.do(FreeRequested(92, 1, "ann"))).reason is DenialReason.DRAINED
    assert not s.do(DrainTimerFired())


def test_a_lease_that_ends_by_itself_ends_as_ever() -> None:
    s = Scenario()
    s.active(1, ttl_ms=2000)
    drain(s)
    assert one(s.at(2).fire(1, TimerKind.EXPIRY), RefuseWork).cause is Cause.EXPIRED


@pytest.mark.parametrize(
    ("had_ms", "asked_ms", "lasts_ns"),
    [
        (2000, 3000, 3 * S),
        (2000, 60_000, 5 * S + SLACK_NS),
        (60_000, 70_000, 60 * S),
    ],
    ids=["all that was asked for", "capped", "what it had"],
)
def test_renewals_reach_to_the_deadline(had_ms: int, asked_ms: int, lasts_ns: int) -> None:
    s = Scenario()
    s.active(1, ttl_ms=had_ms)
    drain(s)
    renewed = one(renew(s, asked_ms), Renewed).lease
    assert renewed.deadline_ns is not None
    assert renewed.deadline_ns - s.now_ns == lasts_ns
    assert remaining_ms(renewed, s.now_ns, s.table.drain_ns) == min(5_000, lasts_ns // MS)
    s.at(5).do(DrainTimerFired())
    assert s.lease(1).cause in (Cause.DRAINED, Cause.EXPIRED)
    assert s.lease(1).cause is Cause.DRAINED or lasts_ns < 5 * S


def test_a_worker_that_never_hears_of_the_end_stops_by_itself() -> None:
    s = Scenario()
    s.active(1, ttl_ms=1000)
    drain(s)
    renew(s, 8000)
    out = s.at(5 + RENEWAL_SLACK_MS / 1000).fire(1, TimerKind.EXPIRY, generation=2)
    assert one(out, RefuseWork).cause is Cause.EXPIRED


@pytest.mark.parametrize(("later_s", "left_ms"), [(1, 1000), (9, 9000), (0, 0)])
def test_a_second_drain_moves_the_deadline(later_s: int, left_ms: int) -> None:
    s = Scenario()
    s.active(1, ttl_ms=60_000)
    drain(s)
    out = drain(s, later_s)
    assert one(out, Warned).left_ms == left_ms
    out += s.at(later_s).do(DrainTimerFired())
    assert one(out, RefuseWork).cause is Cause.DRAINED


def test_after_a_cancelled_drain_all_goes_on() -> None:
    s = Scenario()
    s.active(1, ttl_ms=60_000)
    drain(s)
    out = s.at(1).do(DrainCancelled(93))
    assert one(out, DrainSet) == DrainSet(93, None, 1)
    assert one(out, Warned).phase is Phase.ACTIVE
    assert not s.at(10).do(DrainTimerFired())
    assert s.lease(1).deadline_ns == s.now_ns + 49 * S, "it has lost none of its time"
    assert s.active(2, ttl_ms=1000).state is LeaseState.ACTIVE
    assert one(s.do(DrainCancelled(94)), DrainSet).deadline_ns is None


def test_the_pool_is_dropped_and_made_anew() -> None:
    s = Scenario()
    s.table = type(s.table)([Card("GPU-a", 0, "a", 1000, 10)], warm_contexts=1)
    warm = one(s.do(PoolTimerFired()), WarmUp)
    s.do(WorkerReady(warm.warm_id))
    drain(s)
    s.do(WorkerExited(warm.warm_id, "killed"))
    assert not [effect for effect in s.do(ReclaimProved(warm.warm_id)) if isinstance(effect, WarmUp)]
    assert not s.table.warming()
    assert one(s.at(60).do(DrainCancelled(95)), WarmUp).warm_id == warm.warm_id + 1


def test_a_lease_placed_on_a_warm_context_is_refused_too() -> None:
    s = Scenario()
    s.table = type(s.table)([Card("GPU-a", 0, "a", 1000, 10)], warm_contexts=1)
    s.do(WorkerReady(one(s.do(PoolTimerFired()), WarmUp).warm_id))
    one(s.acquire(1), SpawnWorker)
    assert denied(drain(s)).reason is DenialReason.DRAINED
    s.gone(1)
    assert s.lease(1).cause is Cause.DRAINED


# --- where a lease stands ---


def standing(s: Scenario, lease_id: int = 1) -> tuple[Phase, int, str, str]:
    found = s.table.phase(lease_id, s.now_ns)
    assert found is not None
    return found.phase, found.left_ms(s.now_ns), found.cause, found.reason


@pytest.mark.parametrize(("ttl_s", "warning_s"), [(10, 1), (300, 30), (3600, 30)])
def test_a_lease_s_own_end_is_warned_of(ttl_s: int, warning_s: int) -> None:
    s = Scenario()
    assert s.table.phase(1, s.now_ns) is None
    s.acquire(1, ttl_ms=ttl_s * 1000)
    assert s.table.phase(1, s.now_ns) is None, "nobody has it yet"
    s.do(WorkerReady(1))
    assert standing(s) == (Phase.ACTIVE, (ttl_s - warning_s) * 1000, "", "")
    found = s.table.phase(1, s.now_ns)
    assert found is not None
    assert found.next_check_ns == s.now_ns + (ttl_s - warning_s) * S
    s.at(ttl_s - warning_s)
    assert standing(s) == (Phase.WARNING, warning_s * 1000, "", ENDS_SOON)
    renew(s, ttl_s * 1000)
    assert standing(s)[0] is Phase.ACTIVE


def test_the_whole_way() -> None:
    s = Scenario()
    s.active(1, ttl_ms=60_000)
    drain(s)
    assert standing(s) == (Phase.WARNING, 5000, "", DRAINS)
    s.at(5).do(DrainTimerFired())
    assert standing(s) == (Phase.GRACE, 20, "drained", "the node is drained")
    s.at(0.02).fire(1, TimerKind.GRACE)
    assert standing(s) == (Phase.TEARDOWN, 30_000, "drained", "the node is drained")
    s.gone(1)
    assert standing(s) == (Phase.ENDED, 0, "drained", "the node is drained")


def test_a_fenced_lease_has_ended() -> None:
    s = Scenario()
    s.active(1)
    s.do(RevokeRequested(96, 1, "because"))
    s.at(0.02).fire(1, TimerKind.GRACE)
    s.at(30).fire(1, TimerKind.RECLAIM)
    assert s.lease(1).state is LeaseState.FENCED
    phase, _, cause, reason = standing(s)
    assert (phase, cause) == (Phase.ENDED, "revoked")
    assert "could not be reaped" in reason


# --- a drain of one card ---


def two_cards() -> Scenario:
    return Scenario(card(0), card(1))


def drain_card(s: Scenario, named: str = "0", within_s: float = 5) -> list[Effect]:
    return s.do(DrainRequested(90, int(within_s * 1000), named))


def test_a_drained_card_grants_nothing_and_the_others_do() -> None:
    s = two_cards()
    s.active(1, 60, selector="0")
    s.active(2, 60, selector="1")
    s.acquire(3, 20, selector="0")
    s.acquire(4, 90, wait_ms=9000)
    s.acquire(5, 90, wait_ms=9000, selector="gpu-a")
    out = drain_card(s)
    refused = {effect.request: effect.denial for effect in out if isinstance(effect, RequestDenied)}
    assert set(refused) == {1003, 1005}, "who has no worker there yet, and who waits for that card alone"
    assert {denial.reason for denial in refused.values()} == {DenialReason.DRAINED}
    assert one(out, DrainSet) == DrainSet(90, s.now_ns + 5 * S, 1, "GPU-a")
    assert one(out, Warned) == Warned(1, Phase.WARNING, 5000)
    assert standing(s)[3] == CARD_DRAINS
    assert (s.card(0).available_bytes, s.card(0).drain_ns, s.card(1).drain_ns) == (0, s.now_ns + 5 * S, None)
    denial = denied(s.acquire(6, selector="0"))
    assert (denial.reason, "GPU-a is being drained" in denial.message) == (DenialReason.DRAINED, True)
    s.do(FreeRequested(50, 1, "ann"))
    assert not placed(s.gone(1)), "its bytes are granted to nobody"
    assert placed(end(s, 2)) == [(4, "GPU-b")], "the waiter gets another card"
    assert s.table.drain_ns is None
    assert not s.table.grants_nothing


def test_a_waiter_gets_the_card_again_whose_drain_is_cancelled() -> None:
    s = two_cards()
    s.active(1, 90, selector="1")
    drain_card(s)
    s.acquire(2, 90, wait_ms=9000)
    out = s.do(DrainCancelled(91, "GPU-a"))
    assert placed(out) == [(2, "GPU-a")]
    assert one(out, DrainSet) == DrainSet(91, None, 0, "GPU-a")


def test_the_leases_of_a_drained_card_are_ended_at_its_deadline() -> None:
    s = two_cards()
    s.active(1, ttl_ms=60_000, selector="0")
    s.active(2, ttl_ms=60_000, selector="1")
    drain_card(s)
    assert one(renew(s, 60_000), Renewed).lease.deadline_ns == s.now_ns + 60 * S
    out = s.at(5).do(DrainTimerFired())
    assert (one(out, RefuseWork).worker_id, s.lease(1).cause) == (1, Cause.DRAINED)
    assert s.lease(1).reason == "its card is drained"
    assert s.lease(2).state is LeaseState.ACTIVE
    assert "is drained" in denied(s.acquire(3, selector="0")).message


def test_the_drains_of_the_node_and_of_a_card_are_independent() -> None:
    s = two_cards()
    s.active(1, ttl_ms=60_000, selector="0")
    drain_card(s, within_s=2)
    assert armed(drain(s), DrainTimerFired).due_ns == s.now_ns + 2 * S, "the earlier of both"
    assert standing(s) == (Phase.WARNING, 2000, "", CARD_DRAINS)
    assert one(s.do(DrainCancelled(91, "0")), Warned).left_ms == 5000
    assert standing(s) == (Phase.WARNING, 5000, "", DRAINS)
    drain_card(s, within_s=9)
    assert standing(s)[3] == DRAINS
    assert one(s.do(DrainCancelled(92)), Warned).left_ms == 9000
    assert denied(s.acquire(3, selector="0")).reason is DenialReason.DRAINED
    assert placed(s.acquire(4)) == [(4, "GPU-b")]


def test_who_names_no_card_is_refused() -> None:
    s = two_cards()
    name_one = "Name a card by its uuid or its index"
    for effects, hint in (
        (s.do(DrainRequested(90, 1000, "7")), f"{name_one}."),
        (s.do(DrainCancelled(90, "7")), f"{name_one}."),
        (s.do(FenceClearRequested(90, "7")), f"{name_one}, or name none to clear every fence."),
        (s.acquire(91, selector="7"), f"{name_one}, or leave the choice to the daemon."),
    ):
        denial = denied(effects)
        assert "No card matches" in denial.message
        assert denial.hint == hint
    assert not s.table.has_drain


def test_a_node_whose_cards_are_all_drained_grants_nothing() -> None:
    s = two_cards()
    drain_card(s)
    drain_card(s, "1")
    assert s.table.grants_nothing
    assert denied(s.acquire(1)).reason is DenialReason.DRAINED


def test_a_drained_card_grants_no_growth_and_no_region() -> None:
    s = two_cards()
    s.active(1, 20, selector="0", regions_required=True)
    drain_card(s)
    for event in (
        ResizeRequested(93, 1, "ann", 40),
        RegionRequested(94, 1, 7, "ann", "bob", 4, 5000, 1),
    ):
        assert denied(s.do(event)).reason is DenialReason.BUSY, "for a client, DRAINED would end the lease"


def test_a_drained_card_keeps_no_warm_contexts() -> None:
    s = two_cards()
    s.table = LeaseTable([card(0), card(1)], warm_contexts=1)
    s.do(PoolTimerFired())
    for context in s.table.warming():
        s.do(WorkerReady(context.warm_id))
    drain_card(s)
    assert [one.card_uuid for one in s.table.warming() if one.state is WarmState.READY] == ["GPU-b"]
