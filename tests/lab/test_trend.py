"""The trend of a series depends on its second half."""

import pytest

from .trend import trend_of


@pytest.mark.parametrize(
    ("values", "growth"),
    [
        ([7, 7, 7], 0),
        ([1, 2, 3], 2),
        ([5, 4, 3], -2),
        # During the first half, tables fill.
        ([0, 50, 100, 150, 200, 200, 200, 200], 0),
        ([0, 0, 0, 0, 0, 1, 2, 3], 3),
        # Values that go up and down do not grow.
        ([9, 9, 9, 9, 9, 1, 0, 9, 0, 1], 0),
    ],
)
def test_the_second_half_counts(values: list[float], growth: float) -> None:
    trend = trend_of(range(len(values)), values, 1)
    assert trend.growth == pytest.approx(growth)
    assert trend.is_flat == (growth <= 1)


@pytest.mark.parametrize(("at_s", "values"), [([0, 1], [0, 1]), ([0, 1, 2], [0, 1])])
def test_too_little_is_no_trend(at_s: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="three points"):
        trend_of(at_s, values, 1)


def test_looks_at_one_moment_have_no_slope() -> None:
    assert trend_of([3, 3, 3], [1, 2, 3], 1).growth == 0
