"""The check's run: which parts it measures, and which of them once more."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import pytest

from gpulease.client.bench import check
from gpulease.client.bench.bounds import load_bounds, parse_bounds
from gpulease.client.bench.check import AGAIN_S, _Run, check_promises
from gpulease.client.bench.check_parts import PARTS, CheckPart, DaemonKind, MeasuredDaemon
from gpulease.client.bench.first_uses import first_uses
from gpulease.client.bench.host_floors import FLOORS, host_floors, with_floors
from gpulease.client.bench.session_speed import fresh_copies
from helpers.daemon import Daemon

BOUNDS = """
[launch]
text = "a launch"
unit = "us"
cpu = { figure = "calls.launch_us", at_most = 2.0 }

[copy]
text = "a copy"
unit = "us"
cpu = { figure = "copies.copy_us", at_most = 2.0 }
"""
DAEMON = MeasuredDaemon(
    "unix:/none", {"driver": "cpu", "name": "a card", "uuid": "u"}, "cpu", "", "", lambda text: None
)


class _Measured:
    """A part whose figure is another one in each measurement."""

    def __init__(self, name: str, figure: str, values: list[float], took_s: float = 1.0) -> None:
        self.part = CheckPart(name, f"the {name}", DaemonKind.ANY, self._measure)
        self.values, self._figure, self._took_s = values, figure, took_s

    def _measure(self, daemon: MeasuredDaemon) -> Mapping[str, Any]:
        _Clock.now_s += self._took_s
        return {self._figure: self.values.pop(0)}


class _Clock:
    now_s = 0.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> _Run:
    monkeypatch.setattr("gpulease.client.bench.check.time.monotonic", lambda: _Clock.now_s)
    monkeypatch.setattr(check, "load_bounds", lambda driver: parse_bounds(BOUNDS, driver))
    return _Run(DAEMON)


def _kept(run: _Run) -> list[tuple[float | None, bool | None, float | None]]:
    return [(one.value, one.is_kept, one.first_value) for one in check_promises(run.report)]


def test_only_parts_with_bounds_are_measured_and_only_those_that_missed_once_more(run: _Run) -> None:
    calls, copies = _Measured("calls", "launch_us", [3.0, 1.0]), _Measured("copies", "copy_us", [1.0, 1.0])
    other = _Measured("others", "other_us", [1.0])
    run.measure([calls.part, copies.part, other.part], DAEMON)
    assert (calls.values, copies.values, other.values) == ([], [1.0], [1.0])
    assert _kept(run) == [(1.0, True, 3.0), (1.0, True, None)]


def test_a_bound_that_is_missed_twice_is_missed(run: _Run) -> None:
    calls, copies = _Measured("calls", "launch_us", [3.0, 2.5]), _Measured("copies", "copy_us", [1.0])
    run.measure([calls.part], DAEMON)
    run.measure([copies.part], DAEMON)
    assert _kept(run) == [(2.5, False, 3.0), (1.0, True, None)]


def test_nothing_is_measured_once_more_after_the_time_for_that(run: _Run) -> None:
    calls = _Measured("calls", "launch_us", [3.0, 1.0], AGAIN_S * 0.6)
    copies = _Measured("copies", "copy_us", [3.0, 1.0], AGAIN_S * 0.6)
    run.measure([calls.part, copies.part], DAEMON)
    assert _kept(run) == [(1.0, True, 3.0), (3.0, False, None)]


def test_a_figure_that_can_not_be_measured_is_not_tried_again(run: _Run) -> None:
    calls, copies = _Measured("calls", "another_us", [1.0, 1.0]), _Measured("copies", "copy_us", [1.0])
    run.measure([calls.part, copies.part], DAEMON)
    assert _kept(run) == [(None, False, None), (1.0, True, None)]


def test_the_parts_of_one_daemon_are_in_a_row() -> None:
    kinds = [kind for kind, _ in groupby(PARTS, lambda part: part.kind)]
    assert len(kinds) == len(set(kinds))
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_floors_are_measured_before_and_after() -> None:
    report = with_floors(lambda: {"x": 1.0}, ["call_us", "parse_us"])
    assert report["x"] == 1.0
    assert set(report["host"]) == {"call_us", "parse_us"}
    assert all(value > 0 for value in report["host"].values())
    floors = host_floors()
    assert set(floors) == set(FLOORS)
    # An exchange contains a parse, and is slower for the way between the processes.
    assert floors["exchange_us"] > floors["call_us"] > 0


def test_first_uses_and_fresh_copies_have_the_figures_of_their_bounds(daemon: Daemon) -> None:
    figures = first_uses(daemon.address, 1)
    paths = {f"first.{name}" for name in figures}
    assert {bound.figure for bound in load_bounds("cuda") if bound.part == "first"} <= paths
    size = 1 << 20
    copies = {f"session.fresh.{name.replace('_1m_', '_256m_')}" for name in fresh_copies(daemon.address, size)}
    fresh = {bound.figure for bound in load_bounds("cuda") if bound.figure.startswith("session.fresh.")}
    assert fresh <= copies
