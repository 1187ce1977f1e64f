"""`tests.lab.fleet_scale` with real daemons, a real directory and a real etcd. The figures depend on the host, so they
are not checked.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.daemon import python_environment
from helpers.etcd_cluster import need_etcd
from helpers.fleet_rig import HORIZON_S

from . import fleet_leases, fleet_scale
from .fleet_fail_over import GOAL_HORIZON_S, GOAL_S, fails_over, measure_fail_over
from .fleet_leases import LAUNCH_ROWS
from .fleet_scale import QUICK, FleetPlan, main, plan_of, reaches_fleet_goals
from .fleet_tables import fleet_tables

SOME = 3
"""Number of acquires of each kind. Few suffice, because the tests check the report and not the times."""

SECONDS = 0.2
LONG_HORIZON_S = 120
"""A membership deadline that a busy host does not miss, for what does not wait for one."""

LAUNCHES = 200
DAEMONS = (1, 2)
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.lab.fleet_scale", "--quick"]

FAILED_OVER = {
    "fault": "node",
    "runs": 1,
    "served_again_s": [33.0],
    "served_again_median_s": 33.0,
    "served_again_max_s": 33.0,
    "ended_after_s": [0.1],
    "session_ends": ["Disconnected"],
    "longest_gap_ms": [None],
    "overlaps": 0,
    "epochs_rise": True,
}
REFUSED = {
    "nodes": 50,
    "asked_part": 0.9,
    "order": "pack",
    "refused_percent": 0.5,
    "asked_again_percent": 1.0,
    "used_percent": 88.0,
}


@pytest.fixture(autouse=True)
def _this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    need_etcd()
    monkeypatch.setenv("PYTHONPATH", python_environment()["PYTHONPATH"])


def silent(text: str) -> None: ...


def all_positive(figures: dict[str, float]) -> bool:
    return all(value > 0 for value in figures.values())


def check_leases(found: dict[str, Any]) -> None:
    placement, launches = found["placement"], found["launches"]
    assert set(placement) == {"host", "anonymous", "named", "ratio"}
    assert all(all_positive(figures) for figures in placement.values())
    assert all(figures["p50_ms"] <= figures["p99_ms"] for kind, figures in placement.items() if kind != "ratio")
    kinds = [(one["daemons"], one["kind"]) for one in found["grants"]]
    assert kinds == [(0, "host"), *((count, kind) for count in DAEMONS for kind in ("anonymous", "named"))]
    assert all(one["per_s"] > 0 for one in found["grants"])
    assert set(launches) == {"host", "node", "ratio"}
    assert all(set(figures) == set(LAUNCH_ROWS) for figures in launches.values())
    assert all(all_positive(figures) for figures in launches.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fault",
    ["leader and node", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("node", "daemon", "cut"))],
)
def test_a_name_is_served_again_and_never_twice(fault: str) -> None:
    """tests/behaviour/test_fleet.py checks what happens after each fault. Here only the figures are checked."""
    found = measure_fail_over([fault], HORIZON_S, 1, silent)
    (one,) = found["faults"]
    assert (one["fault"], one["runs"], one["overlaps"], one["epochs_rise"]) == (fault, 1, 0, True)
    assert one["served_again_max_s"] > 0
    assert one["session_ends"] != [""]
    # The first session ended before the second session's first kernel was complete.
    assert 0 <= one["ended_after_s"][0] <= one["served_again_s"][0]
    assert found["goal_s"] is None
    assert fails_over(found)


@pytest.mark.parametrize(
    ("horizon_s", "changes", "is_good"),
    [
        (GOAL_HORIZON_S, {}, True),
        (GOAL_HORIZON_S, {"overlaps": 1}, False),
        (GOAL_HORIZON_S, {"epochs_rise": False}, False),
        (GOAL_HORIZON_S, {"served_again_max_s": GOAL_S + 0.1}, False),
        (GOAL_HORIZON_S, {"refused_percent": 1.1}, False),
        (4, {"served_again_max_s": GOAL_S + 0.1}, True),
        (4, {"overlaps": 1}, False),
    ],
)
def test_goals(horizon_s: int, changes: dict[str, Any], is_good: bool) -> None:
    fault, refused = ({name: changes.get(name, value) for name, value in one.items()} for one in (FAILED_OVER, REFUSED))
    goal_s = GOAL_S if horizon_s == GOAL_HORIZON_S else None
    fail_over = {"horizon_s": horizon_s, "goal_s": goal_s, "faults": [fault]}
    assert reaches_fleet_goals({"refusals": [refused], "fail_over": fail_over}) == is_good


@pytest.mark.exhaustive
def test_the_command_prints_tables_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        QUICK, beat_nodes=(10,), beats_for_s=1.0, load_s=SECONDS, horizon_s=LONG_HORIZON_S, faults=("leader",)
    )
    monkeypatch.setattr(fleet_scale, "QUICK", small)
    # Fewer processes. The fleet still grows, and its faults still have three members of etcd.
    monkeypatch.setattr(fleet_leases, "DAEMONS", DAEMONS)
    monkeypatch.setattr(fleet_leases, "TIMED_DAEMONS", DAEMONS[-1])
    monkeypatch.setattr(fleet_leases, "MEMBERS", 1)
    monkeypatch.setattr(fleet_scale, "MEMBERS", 1)
    monkeypatch.setattr(fleet_scale, "USED", (0.9,))
    words = ["--quick", "--nodes", "10", "--leases", str(SOME), "--launches", str(LAUNCHES), "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    found = json.loads(result.stdout)
    assert set(found) == {"placement", "grants", "launches", "fail_over", "refusals", "beats"}
    check_leases(found)
    assert found["fail_over"]["horizon_s"] == LONG_HORIZON_S
    # The node still serves the name.
    (leader,) = found["fail_over"]["faults"]
    assert (leader["session_ends"], leader["ended_after_s"], leader["overlaps"]) == ([""], [None], 0)
    assert leader["longest_gap_ms"][0] > 0
    assert [one["nodes"] for one in found["beats"]] == [10]
    assert result.exit_code == (0 if reaches_fleet_goals(found) else 1)
    shown = fleet_tables(found)
    for head in ("a fleet, by a name", "launch, pipelined", "etcd's leader is killed", "etcd's cores, by member"):
        assert head in shown


def test_sizes_that_are_given_replace_the_plan_s() -> None:
    assert plan_of(True, horizon_s=7, rounds=None) == replace(QUICK, horizon_s=7)
    assert plan_of(False, rounds=9) == replace(FleetPlan(), rounds=9)
    assert CliRunner().invoke(main, ["--horizon-secs", "1"]).exit_code == 2


def test_an_etcd_that_is_missing_is_told_at_once() -> None:
    variables = os.environ | {"PATH": "/nowhere"}
    done = subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "etcd is not installed: install it, for example with `apt install etcd-server`" in done.stderr


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder with room for the paths of a fleet's sockets. Pytest's own grow with the number of its runs."""
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.exhaustive
def test_an_interrupt_leaves_no_process(short_path: Path) -> None:
    variables = os.environ | {"TMPDIR": str(short_path)}
    command = [*COMMAND, "--horizon-secs", str(LONG_HORIZON_S)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, cwd=ROOT
    )
    lines = process.stderr
    assert lines is not None
    said: list[str] = []
    try:
        # By then a fleet of one node is running. If the command fails, its output ends.
        while "1 daemons, anonymous" not in (line := lines.readline()):
            assert line, said
            said.append(line)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 1
    assert list(short_path.iterdir()) == []
    assert not [words for words in _commands() if str(short_path) in words]


def _commands() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # The process has ended meanwhile.
    return found
