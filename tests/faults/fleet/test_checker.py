"""The checker of a fleet's history finds every kind of violation, and none in a correct history."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.fleet_checker import Act, Claim, History, HorizonSet, Served, check

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Disables hypothesis' time limits, because data generation is slow on a busy host."""

HORIZONS = tuple(HorizonSet(node, at, at + 30) for node in ("a", "b") for at in range(0, 100, 5))

GOOD = History(
    served=(Served("x", "a", 5, 10, 20), Served("x", "b", 9, 20, 40), Served("y", "a", 7, 15, 60)),
    acts=(Act("x", "a", 5, 11, 12), Act("x", "b", 9, 21, 22), Act("x", "b", 9, 22, 25), Act("y", "a", 7, 16, 17)),
    horizons=HORIZONS,
    claims=(Claim("y", "a", 7),),
    live={"a": {"y": 7}, "b": {}},
)


def test_a_good_history_is_good() -> None:
    verdict = check(GOOD)
    assert verdict.broken == ()
    assert (verdict.leases, verdict.acts) == (3, 4)
    assert str(verdict).startswith("leases 3, operations 4: overlaps 0, stale acts 0")
    assert check(History()).broken == ()


@pytest.mark.parametrize(
    ("second", "is_overlap"),
    [
        (Served("x", "b", 9, 19, 30), True),
        (Served("x", "b", 9, 20, 30), False),
        (Served("x", "a", 9, 12, 13), True),
        (Served("y", "b", 9, 12, 13), False),
        (Served("x", "b", 9, 12, 12), False),
    ],
    ids=["one moment", "right after", "on one node", "another name", "of no length"],
)
def test_two_live_leases_of_a_name_overlap(second: Served, is_overlap: bool) -> None:
    history = History(served=(second, Served("x", "a", 5, 10, 20)), horizons=HORIZONS)
    assert len(check(history).overlaps) == is_overlap


def test_a_long_lease_overlaps_with_all_after_it() -> None:
    served = (Served("x", "a", 5, 10, 50), Served("x", "b", 6, 12, 14), Served("x", "b", 7, 45, 46))
    assert len(check(History(served=served, horizons=HORIZONS)).overlaps) == 2


@pytest.mark.parametrize("epoch", [4, 5])
def test_a_later_lease_without_a_higher_epoch_is_found(epoch: int) -> None:
    served = (Served("x", "a", 5, 10, 20), Served("x", "b", epoch, 30, 40))
    verdict = check(History(served=served, horizons=HORIZONS))
    assert len(verdict.falling_epochs) == 1
    assert verdict.overlaps == ()


@pytest.mark.parametrize(("sent_ns", "is_stale"), [(23, True), (22, False), (20, False)])
def test_an_operation_under_an_older_epoch_is_found(sent_ns: int, is_stale: bool) -> None:
    acts = (Act("x", "b", 9, 21, 22), Act("x", "a", 5, sent_ns, 30), Act("x", "b", 9, 30, 31))
    assert len(check(History(acts=acts, horizons=HORIZONS)).stale_acts) == is_stale


def test_the_newest_epoch_counts_however_long_ago() -> None:
    acts = (Act("x", "b", 9, 1, 2), Act("x", "a", 5, 3, 4), Act("x", "a", 6, 5, 6))
    assert len(check(History(acts=acts, horizons=HORIZONS)).stale_acts) == 2


@pytest.mark.parametrize(("at_ns", "is_outside"), [(39, False), (40, True), (4, True)])
def test_what_begins_outside_a_horizon_is_found(at_ns: int, is_outside: bool) -> None:
    horizons = (HorizonSet("a", 5, 35), HorizonSet("a", 10, 40), HorizonSet("b", 0, 100))
    lease = History(served=(Served("x", "a", 5, at_ns, at_ns + 1),), horizons=horizons)
    assert len(check(lease).outside) == is_outside
    act = History(acts=(Act("x", "a", 5, at_ns, at_ns),), horizons=horizons)
    assert len(check(act).outside) == is_outside


def test_a_horizon_that_was_set_later_excuses_nothing_before_it() -> None:
    horizons = (HorizonSet("a", 5, 35), HorizonSet("a", 60, 90))
    assert len(check(History(served=(Served("x", "a", 5, 50, 70),), horizons=horizons)).outside) == 1


@pytest.mark.parametrize("live", [{}, {"a": {}}, {"a": {"y": 6}}, {"b": {"y": 7}}])
def test_a_claim_that_its_node_does_not_serve_is_an_orphan(live: dict[str, dict[str, int]]) -> None:
    assert len(check(replace(GOOD, live=live)).orphans) == 1


@UNHURRIED
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 12)), max_size=8))
def test_overlaps_are_those_that_every_pair_shows(drawn: list[tuple[str, int, int]]) -> None:
    served = tuple(
        Served("x", node, epoch, begin, begin + for_ns) for epoch, (node, begin, for_ns) in enumerate(drawn, 1)
    )
    pairs = [
        (one, other)
        for one in served
        for other in served
        if one.epoch != other.epoch and max(one.from_ns, other.from_ns) < min(one.to_ns, other.to_ns)
    ]
    assert bool(check(History(served=served)).overlaps) == bool(pairs)


@UNHURRIED
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 4)), max_size=8))
def test_stale_operations_are_those_that_every_pair_shows(drawn: list[tuple[int, int, int]]) -> None:
    acts = tuple(Act("x", "a", epoch, sent, sent + for_ns) for sent, for_ns, epoch in drawn)
    stale = [act for act in acts if any(other.done_ns < act.sent_ns and other.epoch > act.epoch for other in acts)]
    assert len(check(History(acts=acts)).stale_acts) == len(stale)
