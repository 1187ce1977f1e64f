"""Tests of the statistics of samples."""

import pytest

from gpulease.client.bench.figures import percentile


@pytest.mark.parametrize(
    ("count", "percent", "rank"),
    [(1, 50, 1), (1, 99, 1), (2, 50, 1), (3, 50, 2), (100, 50, 50), (100, 99, 99), (101, 99, 100), (200, 99, 198)],
)
def test_a_percentile_is_the_smallest_sample_that_its_share_does_not_exceed(
    count: int, percent: int, rank: int
) -> None:
    assert percentile([float(number) for number in range(count, 0, -1)], percent) == rank
