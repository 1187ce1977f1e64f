"""Lines of two samples: rates, and reports of a daemon of another version or of a hostile session."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.cli.top.frame import frame, plain
from gpulease.client.cli.top.sample import Sample, ScreenSamples, lease_lines
from gpulease.client.cli.top.view import View
from helpers.node_reports import CARD, lease, sample


@pytest.mark.parametrize(
    ("then", "now", "span_s", "rate"),
    [
        (0, 100, 2.0, 50.0),
        (100, 100, 2.0, 0.0),
        (100, 99, 2.0, None),  # counters that go backwards say nothing
        (0, 100, 0.0, None),
        (None, 100, 2.0, None),
        (0, None, 2.0, None),
        (0, 2**64 - 1, 1.0, float(2**64 - 1)),
        ("1", 2, 1.0, None),
        (False, True, 1.0, None),
        (0, math.inf, 1.0, None),
    ],
)
def test_rates(then: Any, now: Any, span_s: float, rate: float | None) -> None:
    (line,) = lease_lines(sample(lease(1, launches=now), at_s=100 + span_s), sample(lease(1, launches=then)))
    assert line.launches_per_s == rate


def test_a_lease_is_compared_with_itself() -> None:
    before = sample(lease(1, operations=10), lease(2, operations=1000))
    lines = lease_lines(sample(lease(3, operations=5), lease(2, operations=1010), at_s=101), before)
    assert [line.operations_per_s for line in lines] == [None, 10.0]
    assert [line.operations_per_s for line in lease_lines(before, None)] == [None, None]


def test_what_is_missing_is_nothing() -> None:
    (line,) = lease_lines(sample({"lease_id": "1", "more": {}}), None)
    assert (line.tenant, line.card, line.state, line.used_bytes, line.copies_per_s, line.left_s) == (None,) * 6


def test_what_ends_a_lease_is_told_with_its_state() -> None:
    (line,) = lease_lines(sample(lease(1, state="draining", cause="revoked")), None)
    assert (line.state, line.card, line.left_s, line.ttl_s) == ("draining revoked", 0, 1.0, 10.0)


def test_a_drain() -> None:
    left = [sample(cards=[CARD | more]).drain_left_s for more in ({}, {"drain_left_ms": None}, {"drain_left_ms": 1500})]
    assert left == [None, None, 1.5]


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from([*CARD, *lease(1), "drain_left_ms", "warm_wanted", "warm_contexts", "exclusive", "copies"])
reports = st.lists(st.dictionaries(keys, anything, max_size=8) | anything, max_size=4) | anything


@given(reports, reports, reports, st.integers(0, 90), st.integers(0, 12))
def test_whatever_is_reported_is_a_screen(cards: Any, leases: Any, before: Any, width: int, height: int) -> None:
    scene = ScreenSamples(Sample.of(101.0, cards, leases), Sample.of(100.0, cards, before))
    lines = frame(View(2.0), scene, "unix:/a", 102.0, width, height)
    assert len(lines) == height
    assert all(text.isprintable() for line in lines for text, _ in line)
    assert all(line.isprintable() for line in plain(View(2.0), scene, "unix:/a", width).split("\n"))
