"""The load benchmark passes on a correct daemon, and fails on one that leaks."""

import json

import pytest
from click.testing import CliRunner

from helpers.daemon import Daemon, Faults, python_environment

from .churn import ENDINGS
from .load import BOUNDS, main

FILLS_UP = {name for name in BOUNDS if "KiB" in name} | {"broker threads"}
LOOKS = 4
SHORT = ["--leases", "5", "--minutes", "0.06", "--life", "0.4", "--looks", str(LOOKS), "--json"]


@pytest.mark.exhaustive
def test_a_daemon_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_environment()["PYTHONPATH"])
    result = CliRunner().invoke(main, SHORT, catch_exceptions=False)
    report = json.loads(result.stdout)
    assert result.stderr.count(" leases ended\n") == LOOKS
    # Memory and threads of a daemon that was just started grow. To see them become constant takes minutes.
    assert {name for name, told in report["trends"].items() if told["is"] != "flat"} <= FILLS_UP
    assert result.exit_code == (0 if report["is_flat"] else 1)
    assert report["surprises"] == []
    assert report["series"]["workers"] == [5.0] * LOOKS
    # The number of leases in that time depends on the host.
    assert {"acquire", "attach", "list", "inventory"} <= set(report["control_ms"])
    assert set(report["ended"]) <= set(ENDINGS)
    assert set(report["trends"]) == set(BOUNDS)


@pytest.mark.exhaustive
def test_one_that_leaks_a_descriptor_with_each_lease_is_told() -> None:
    daemon = Daemon(faults=Faults(leaks_descriptors=True))
    try:
        daemon.wait_until_it_answers()
        result = CliRunner().invoke(main, [*SHORT, "--address", daemon.address], catch_exceptions=False)
        report = json.loads(result.stdout)
        assert result.exit_code == 1
        assert {name for name, told in report["trends"].items() if told["is"] != "flat"} - FILLS_UP == {"broker fds"}
    finally:
        daemon.stop()


@pytest.mark.parametrize("words", [["--leases", "0"], ["--looks", "2"], ["--minutes", "0"]])
def test_what_can_not_be_measured(words: list[str]) -> None:
    assert CliRunner().invoke(main, words).exit_code == 2
