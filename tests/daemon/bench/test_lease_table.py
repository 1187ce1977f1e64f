"""The bench of the lease table runs the broker's own code, and counts what happened."""

import asyncio

import pytest

from gpulease.daemon.bench import lease_table
from gpulease.daemon.bench.lease_table import KEPT, measure
from gpulease.daemon.broker.service import loop_factory

LEASES = 60


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS_S": 0.05, "EXPIRY_S": 0.2, "SETTLE_MS": 200, "BURST": 20}.items():
        monkeypatch.setattr(lease_table, name, value)


@pytest.mark.parametrize("kept", [frozenset(), frozenset(KEPT)], ids=["nothing", "everything"])
def test_all_is_measured(kept: frozenset[str]) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures = runner.run(measure(LEASES, kept))
    rates = {
        f"{name}_{unit}" for name in ("grants", "renewals", "mixed") for unit in ("per_s", "us", "cpu_us", "floor_us")
    }
    lateness = {f"{name}_late_{part}_ms" for name in ("expiry", "burst") for part in ("p50", "p99", "max")}
    assert set(figures) == rates | lateness
    assert all(figures[name] > 0 for name in rates)
    # Never before its time, and far from the length of the test.
    assert all(0 <= figures[name] < 10_000 for name in lateness)
    assert figures["expiry_late_p50_ms"] <= figures["expiry_late_p99_ms"] <= figures["expiry_late_max_ms"]


def test_rates_alone() -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures = runner.run(measure(LEASES, frozenset(), has_expiry=False))
    assert {name.partition("_")[0] for name in figures} == {"grants", "renewals", "mixed"}


def test_what_can_not_be_kept() -> None:
    with pytest.raises(ValueError, match=r"must be among .*, not stamps"):
        asyncio.run(measure(LEASES, frozenset({"stamps"})))
