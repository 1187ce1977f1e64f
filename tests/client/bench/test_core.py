"""The bounds of the lease core's benchmark, and its exit status."""

import json

import pytest
from click.testing import CliRunner

from gpulease.client.bench import core
from gpulease.client.bench.bounds import load_bounds
from gpulease.client.bench.core import core_figures
from gpulease.client.cli.bench import CORE_ROWS, bench
from gpulease.client.console.exit_status import MissingPrerequisite
from helpers.daemon import python_environment

MOST_PARSES, LATEST_MS = (bound.limit for bound in load_bounds("cuda") if bound.part == "core")
PARSE_US = 30.0
GOOD = {name: 1.0 for name, _ in CORE_ROWS} | {"mixed_us": MOST_PARSES * PARSE_US * 0.99, "mixed_floor_us": PARSE_US}


@pytest.mark.parametrize(
    ("figures", "is_good"),
    [
        (GOOD, True),
        (GOOD | {"mixed_us": MOST_PARSES * PARSE_US * 1.01}, False),
        (GOOD | {"expiry_late_p99_ms": LATEST_MS + 0.1}, False),
    ],
)
def test_a_core_below_its_bounds_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, figures: dict[str, float], is_good: bool
) -> None:
    asked: list[tuple[int, tuple[str, ...]]] = []

    def measured(leases: int, kept: tuple[str, ...]) -> dict[str, float]:
        asked.append((leases, kept))
        return figures

    monkeypatch.setattr(core, "core_figures", measured)
    for words, leases in ((["--core"], 10_000), (["--core", "--leases", "7", "--json"], 7)):
        result = CliRunner().invoke(bench, words)
        assert result.exit_code == (0 if is_good else 1)
        assert str(leases) in result.stdout
        assert {count for count, _ in asked} == {leases}
        asked.clear()
    assert set(json.loads(result.stdout)["figures"]) == {" + ".join(kept) or "nothing kept" for kept in core.KEPT}


def test_a_core_that_can_not_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_environment()["PYTHONPATH"])
    with pytest.raises(MissingPrerequisite, match="must be among journal, audit, log, not stamps"):
        core_figures(10, ("stamps",))
