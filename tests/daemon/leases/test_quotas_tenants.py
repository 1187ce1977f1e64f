"""Bounds of tenants, and the denials at each bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    Effect,
    Renewed,
    RenewRequested,
    RequestDenied,
    TenantRulesChanged,
    WorkerReady,
)
from gpulease.daemon.leases.quotas import AcquireRates, CoreLimits, TenantLimits, TenantRules
from gpulease.protocol.time_units import NS_PER_MINUTE

from .scenario import Scenario, card, one

ANN = "ann"


def scene(**own: object) -> Scenario:
    """Two cards; ann has bounds of her own, nobody else has any."""
    rules = TenantRules(by_name={ANN: TenantLimits(**own)})  # type: ignore[arg-type]
    return Scenario(card(0, 110), card(1, 110), limits=CoreLimits(tenants=rules))


def check_denied(effects: list[Effect], limit: str, reason: DenialReason = DenialReason.LIMIT) -> str:
    denial = one(effects, RequestDenied).denial
    assert denial.reason is reason
    assert f"(limit {limit} of tenant 'ann')" in denial.message
    assert denial.hint.endswith(".")
    return denial.hint


def test_bytes() -> None:
    scenario = scene(max_vram_bytes=50)
    scenario.active(1, 30)
    check_denied(scenario.acquire(2, 21), "max_vram")
    scenario.active(3, 20)
    scenario.active(4, 60, tenant="bob")
    check_denied(scenario.acquire(5, 1), "max_vram")


def test_queued_bytes_count() -> None:
    scenario = scene(max_vram_bytes=150)
    scenario.active(1, 100, tenant="bob")
    scenario.active(2, 100, tenant="bob")
    assert not [effect for effect in scenario.acquire(3, 100, wait_ms=5000) if isinstance(effect, RequestDenied)]
    check_denied(scenario.acquire(4, 51, wait_ms=5000), "max_vram")


def test_leases() -> None:
    scenario = scene(max_leases=1)
    scenario.active(1, 1)
    check_denied(scenario.acquire(2, 1), "max_leases")
    for lease_id in (3, 4):
        scenario.active(lease_id, 1, tenant="bob")


def test_more_leases_than_tenants_have_as_a_rule() -> None:
    rules = TenantRules(by_name={ANN: TenantLimits(max_leases=3)})
    scenario = Scenario(limits=CoreLimits(max_leases_per_tenant=1, tenants=rules))
    for lease_id in (1, 2, 3):
        scenario.active(lease_id, 1)
    check_denied(scenario.acquire(4, 1), "max_leases")


def test_time_to_live_at_an_acquire_and_a_renewal() -> None:
    scenario = scene(max_ttl_s=10)
    check_denied(scenario.acquire(1, ttl_ms=10_001), "max_ttl_s")
    scenario.active(2, ttl_ms=10_000)
    check_denied(scenario.do(RenewRequested(9, 2, ANN, 10_001)), "max_ttl_s")
    # An operator's renewal is bound by the tenant's rules too.
    check_denied(scenario.do(RenewRequested(9, 2, "root", 10_001, is_operator=True)), "max_ttl_s")
    assert one(scenario.do(RenewRequested(9, 2, ANN, 10_000)), Renewed)
    scenario.active(3, tenant="bob", ttl_ms=20_000)


def test_cards() -> None:
    scenario = scene(devices=("GPU-B",))
    for lease_id in (1, 2):
        assert scenario.active(lease_id, 20).card_uuid == "GPU-b"
    check_denied(scenario.acquire(3, selector="0"), "devices")
    # The denial speaks of the tenant's own card, not of room on the other.
    assert "waits" not in one(scenario.acquire(4, 60), RequestDenied).denial.message
    assert scenario.active(5, 90, tenant="bob").card_uuid == "GPU-a"


def test_a_card_that_is_not_here() -> None:
    check_denied(scene(devices=("7",)).acquire(1), "devices")


def test_rate() -> None:
    scenario = scene(acquires_per_minute=6, acquire_burst=2)
    for lease_id in (1, 2):
        scenario.active(lease_id, 1)
    assert check_denied(scenario.acquire(3, 1), "acquires_per_minute", DenialReason.RATE) == "Try again in 10 s."
    scenario.active(4, 1, tenant="bob")
    scenario.at(9.9)
    check_denied(scenario.acquire(5, 1), "acquires_per_minute", DenialReason.RATE)
    scenario.at(0.1).acquire(6, 1)
    assert scenario.do(WorkerReady(6))
    check_denied(scenario.acquire(7, 1), "acquires_per_minute", DenialReason.RATE)


@given(
    st.integers(1, 100_000),
    st.integers(1, 50),
    st.lists(st.integers(0, NS_PER_MINUTE // 4), min_size=1, max_size=60),
)
def test_no_window_has_more_than_the_burst_and_the_rate(per_minute: int, burst: int, pauses_ns: list[int]) -> None:
    limits, rates, now_ns = TenantLimits(acquires_per_minute=per_minute, acquire_burst=burst), AcquireRates(), 7
    interval_ns = NS_PER_MINUTE // per_minute
    taken: list[int] = []
    for pause_ns in pauses_ns:
        now_ns += pause_ns
        wait_ns = rates.wait_ns(ANN, limits, now_ns)
        assert 0 <= wait_ns <= interval_ns
        if wait_ns == 0:
            taken.append(now_ns)
            for first, since_ns in enumerate(taken):
                assert len(taken) - first <= burst + (now_ns - since_ns) // interval_ns
        else:
            # The tenant may ask when the denial said, and not before; a refused request costs nothing.
            assert AcquireRates.wait_ns(_copy(rates), ANN, limits, now_ns + wait_ns) == 0
            assert AcquireRates.wait_ns(_copy(rates), ANN, limits, now_ns + wait_ns - 1) > 0


def test_changed_bounds_apply_to_later_requests() -> None:
    scenario = scene(max_vram_bytes=150, max_ttl_s=100)
    scenario.active(1, 100)
    scenario.active(2, 50)
    narrow = TenantLimits(max_vram_bytes=120, devices=("1",), max_leases=1, max_ttl_s=5)
    scenario.do(TenantRulesChanged(TenantRules(by_name={ANN: narrow})))
    check_denied(scenario.acquire(3, 1, ttl_ms=5000), "max_leases")
    check_denied(scenario.do(RenewRequested(9, 1, ANN, 10_000)), "max_ttl_s")
    scenario.do(TenantRulesChanged(TenantRules()))
    scenario.active(4, 30)


def test_waiters_stay_queued_under_changed_bounds() -> None:
    scenario = scene()
    scenario.active(1, 100, tenant="bob")
    scenario.active(2, 100, tenant="bob")
    assert not [effect for effect in scenario.acquire(3, 60, wait_ms=60_000) if isinstance(effect, RequestDenied)]
    scenario.do(TenantRulesChanged(TenantRules(by_name={ANN: TenantLimits(max_vram_bytes=1)})))
    check_denied(scenario.acquire(4, 1, wait_ms=60_000), "max_vram")


def test_weights_and_the_latency_class_are_bounded_by_the_tenant() -> None:
    scenario = scene(max_weight=3)
    check_denied(scenario.acquire(1, weight=4), "max_weight")
    assert scenario.active(2, weight=3).weight == 3
    # Nobody may have either without the operator's permission.
    assert one(scenario.acquire(3, weight=2, tenant="bob"), RequestDenied).denial.reason is DenialReason.LIMIT
    check_denied(scenario.acquire(4, latency=True), "may_latency")
    # A reload applies to the next acquire.
    scenario.do(TenantRulesChanged(TenantRules(by_name={ANN: TenantLimits(may_latency=True)})))
    assert scenario.active(5, latency=True).latency
    check_denied(scenario.acquire(6, weight=3), "max_weight")
    assert scenario.lease(2).weight == 3


def _copy(rates: AcquireRates) -> AcquireRates:
    copy = AcquireRates()
    copy.full_at_ns = dict(rates.full_at_ns)
    return copy


@pytest.mark.parametrize(
    "wrong", [{"max_leases": 0}, {"acquire_burst": 0}, {"devices": ()}, {"max_vram_bytes": -1}, {"max_share": 101}]
)
def test_senseless_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TenantLimits(**wrong)  # type: ignore[arg-type]
