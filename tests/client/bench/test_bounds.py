"""Bounds of promised figures: their file, what keeps them, what a run beside an earlier one shows."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.bench.bounds import (
    DRIVERS,
    FALL,
    BoundOutcome,
    flat,
    has_fallen,
    load_bounds,
    outcomes,
    parse_bounds,
)
from gpulease.client.bench.check import fallen, read_earlier
from gpulease.client.bench.check_parts import PARTS
from gpulease.client.bench.host_floors import FLOORS
from gpulease.client.cli.bench import check_table, missed_text
from gpulease.client.console.exit_status import MissingPrerequisite

FILE = """
[launch]
text = "a launch"
unit = "us"
cuda = { figure = "a.launch_us", of = "c.launch_us", beside = "C", at_most = 0.5, goal = 0.25 }

[copy]
text = "a copy"
unit = "GB/s"
cuda = { figure = "a.copy_gb_s", at_least = 40.0, goal = 50 }
cpu = { figure = "a.copy_gb_s", at_least = 4.0 }

[torch]
text = "a step"
unit = "ms"
cuda = { figure = "a.step_ms", of = "torch.step_ms", beside = "torch", at_most = 1.0, needs = "torch" }

[call]
text = "a call"
unit = "ms"
cuda = { figure = "a.call_ms", of = "a.host.call_us", beside = "Python's call", at_most = 2000 }
"""
KEPT: dict[str, dict[str, Any]] = {
    "a": {"launch_us": 1.0, "copy_gb_s": 45.0, "step_ms": 3.0, "call_ms": 1.5, "host": {"call_us": 1}, "name": "x"},
    "c": {"launch_us": 4},
}


def test_a_report_keeps_or_misses_each_bound_of_its_driver() -> None:
    launch, copy, torch, call = outcomes(parse_bounds(FILE, "cuda"), KEPT)
    assert (launch.value, launch.bound.unit, launch.is_kept, launch.has_reached_goal) == (0.25, "x", True, True)
    assert (copy.value, copy.bound.unit, copy.is_kept, copy.has_reached_goal) == (45.0, "GB/s", True, False)
    assert (torch.value, torch.is_kept, torch.has_reached_goal) == (None, None, None)
    assert (call.figure, call.divisor, call.value, call.is_kept) == (1.5, 1.0, 1500.0, True)
    (copy,) = outcomes(parse_bounds(FILE, "cpu"), {"a": {"copy_gb_s": 3.9}})
    assert copy.is_kept is False
    assert missed_text(copy) == "a copy: 3.9 GB/s, 1.03 times beyond 4 (measured once)."


@pytest.mark.parametrize(
    ("second", "value", "is_kept"), [(2.5, 2500.0, False), (4.0, 3000.0, False), (1.5, 1500.0, True)]
)
def test_a_missed_bound_is_judged_by_the_better_of_two_measurements(second: float, value: float, is_kept: bool) -> None:
    first = {"a": KEPT["a"] | {"call_ms": 3.0}, "c": KEPT["c"]}
    report = first | {"again": {"a": KEPT["a"] | {"call_ms": second, "launch_us": 9.0}}}
    launch, _, _, call = outcomes(parse_bounds(FILE, "cuda"), report)
    # A bound that was kept at first keeps its value.
    assert (launch.value, launch.is_kept, launch.first_value) == (0.25, True, None)
    assert (call.value, call.is_kept, call.first_value) == (value, is_kept, 3000.0)
    (row,) = check_table([call], {}).splitlines()[1:]
    assert f"{'yes' if is_kept else 'NO'}, at first 3e+03" in row
    if value == 2500:
        assert missed_text(call) == (
            "a call: 2.5 ms, 2.5e+03 of Python's call (a.host.call_us = 1), 1.25 times beyond 2000"
            " (the better of two; the first was 3e+03)."
        )


@pytest.mark.parametrize("report", [{}, {"a": {"launch_us": 1.0}}, {"a": {"launch_us": 1.0}, "c": {"launch_us": 0.0}}])
def test_a_figure_that_was_not_measured_is_a_bound_missed(report: dict[str, dict[str, float]]) -> None:
    launch, *_ = outcomes(parse_bounds(FILE, "cuda"), report)
    assert (launch.value, launch.is_kept) == (None, False)
    assert missed_text(launch) == "a launch: not measured (a.launch_us / c.launch_us)."


def test_the_table_shows_bounds_goals_and_what_a_host_lacks() -> None:
    now = outcomes(parse_bounds(FILE, "cuda"), KEPT)
    before = {one.bound.name: one for one in outcomes(parse_bounds(FILE, "cuda"), {"a": {"copy_gb_s": 60.0}})}
    _, launch, copy, torch, call = check_table(now, before).splitlines()
    assert launch.split() == ["a", "launch", "1", "us", "C", "4", "0.25", "<=", "0.5", "yes", "<=", "0.25", "yes"]
    assert copy.split() == ["a", "copy", "45", "GB/s", "45", "60", ">=", "40", "yes", ">=", "50", "no"]
    assert torch.split() == ["a", "step", "3", "ms", "torch", "<=", "1", "no", "torch", "here"]
    assert call.split() == ["a", "call", "1.5", "ms", "Python's", "call", "1", "1.5e+03", "<=", "2000", "yes"]
    assert [bound.name for bound in fallen(now, before)] == ["copy"]


@pytest.mark.parametrize(
    ("changed", "to", "error"),
    [
        ("at_most = 0.5, goal = 0.25", "goal = 0.25", "launch: it must have either at_most or at_least"),
        ("at_most = 0.5", "at_most = 0.5, at_least = 0.1", "launch: it must have either at_most or at_least"),
        ("goal = 0.25", "goal = 0.75", "its goal of 0.75 must be better than its bound of 0.5"),
        ("goal = 0.25", "gaol = 0.25", "launch: gaol must be one of"),
    ],
)
def test_what_is_no_bound_is_refused(changed: str, to: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_bounds(FILE.replace(changed, to, 1), "cuda")


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_file_has_bounds_of_each_driver_with_units_and_divisors_named(driver: str) -> None:
    bounds = load_bounds(driver)
    assert len({bound.name for bound in bounds}) == len(bounds) > 25
    assert all(bound.unit and bool(bound.of) == bool(bound.beside) for bound in bounds)
    # Each bound has a part of the run that measures it, and its host's floors are measured with that part.
    assert {bound.part for bound in bounds} <= {part.name for part in PARTS}
    assert all(bound.of.startswith(f"{bound.part}.host.") for bound in bounds if bound.floor)
    assert {bound.floor for bound in bounds if bound.floor} <= set(FLOORS)


@given(value=st.floats(1e-6, 1e6), worse=st.floats(1.0, 10.0))
def test_a_value_has_fallen_if_it_is_worse_by_the_factor(value: float, worse: float) -> None:
    launch, copy, *_ = parse_bounds(FILE, "cuda")
    if abs(worse - FALL) > 1e-6:
        assert has_fallen(launch, value * worse, value) == (worse > FALL)
        assert has_fallen(copy, value / worse, value) == (worse > FALL)
    assert not has_fallen(launch, value / worse, value)
    assert not has_fallen(copy, value * worse, value)


def test_a_report_is_flattened_to_its_numbers() -> None:
    assert dict(flat({"a": {"b": 1, "c": "x", "d": {"e": 2.5}}, "f": True, "g": None})) == {"a.b": 1.0, "a.d.e": 2.5}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "must be a file that `gpulease bench --check` wrote"),
        ("[]", "must be a file that"),
        ("[" * 100_000, "must be a file that"),
        ('{"driver": "cuda"}', "must be a file that"),
        (" " * (1 << 21), "must be a file that"),
        (
            '{"driver": "cuda", "card": "NVIDIA H100", "title": "t"}',
            "only runs on the same kind of card can be compared",
        ),
    ],
)
def test_an_earlier_file_of_another_kind_is_refused(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "earlier.json"
    file.write_text(text)
    with pytest.raises(MissingPrerequisite, match=error):
        read_earlier(file, {"driver": "cuda", "card": "NVIDIA H200", "title": "now"})


def test_an_earlier_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingPrerequisite, match="No such file"):
        read_earlier(tmp_path / "none.json", {"driver": "cpu", "card": "c", "title": "t"})


def test_an_outcome_without_a_value_is_left_out_or_missed() -> None:
    bound, *_ = parse_bounds(FILE, "cuda")
    assert BoundOutcome(bound, None, None, None, None).has_reached_goal is None
