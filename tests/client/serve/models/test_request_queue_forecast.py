"""Predicted durations, and the requests that are refused because of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.serve.models.request_queue import HALF_LIFE_S, Estimate, Forecast


def test_an_estimate_is_at_least_what_it_was_made_of_and_settles() -> None:
    estimate = Estimate()
    assert estimate.seconds(0.0) == 0.0
    estimate.add(0.2, 1.0)
    assert estimate.seconds(1.0) > 0.2
    for _ in range(200):
        estimate.add(0.1, 2.0)
    assert 0.1 <= estimate.seconds(2.0) < 0.11


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 100))
def test_an_estimate_halves_while_nothing_is_measured(times: list[float], age_s: float) -> None:
    estimate = Estimate()
    for took_s in times:
        estimate.add(took_s, 5.0)
    now = estimate.seconds(5.0)
    assert now >= 0
    assert estimate.seconds(5.0 + age_s) <= now
    assert estimate.seconds(5.0 + HALF_LIFE_S) == pytest.approx(now / 2)


@pytest.mark.parametrize(
    ("forecast", "items", "left_s", "said"),
    [
        (Forecast(0, 8, False, 0.0, 0.0, None), 1, 0.001, ""),  # nothing is known yet
        (Forecast(0, 8, False, 0.1, 0.0, 10.0), 8, 0.15, ""),
        (Forecast(0, 8, False, 0.1, 0.0, 10.0), 1, 0.05, "it would take 0.100 s, but must be finished in 0.050 s"),
        (Forecast(0, 8, True, 0.1, 0.0, 10.0), 1, 0.15, "it would take 0.200 s"),
        (Forecast(8, 8, True, 0.1, 0.0, 10.0), 1, 0.25, "it would take 0.300 s"),
        (Forecast(7, 8, False, 0.1, 0.0, 10.0), 1, 0.15, ""),
        (Forecast(0, 8, False, 0.1, 0.2, None), 1, 0.25, "it would take 0.300 s"),
        (Forecast(0, 8, False, 0.1, 0.0, 0.05), 1, 1.0, "the lease ends in 0.050 s"),
    ],
)
def test_refusals(forecast: Forecast, items: int, left_s: float, said: str) -> None:
    refusal = forecast.refusal(items, left_s)
    assert said in refusal
    assert bool(refusal) == bool(said)
