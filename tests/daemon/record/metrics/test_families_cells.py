import pytest

from gpulease.daemon.record.metrics.families import (
    CARD,
    MAX_LABEL_CHARS,
    OTHERS,
    FamilyKind,
    Histogram,
    MetricFamily,
    TenantLabels,
)

SECONDS = MetricFamily("x_seconds", FamilyKind.HISTOGRAM, "X.", CARD, (0.1, 1.0))


@pytest.mark.parametrize(
    ("value", "counts"),
    [(-1, [1, 0, 0]), (0.1, [1, 0, 0]), (0.10001, [0, 1, 0]), (1.0, [0, 1, 0]), (7, [0, 0, 1])],
)
def test_a_bound_belongs_to_what_it_bounds(value: float, counts: list[int]) -> None:
    histogram = Histogram(SECONDS)
    assert not histogram
    histogram.observe(("a",), value)
    found = histogram.of[("a",)]
    assert (found.counts, found.total, found.count) == (counts, max(0, value), 1)


def test_a_tenant_keeps_its_label() -> None:
    labels = TenantLabels(2)
    assert [labels.of(name) for name in ("ann", "bob", "cid", "ann", "bob", "dan")] == [
        *("ann", "bob", OTHERS, "ann", "bob", OTHERS)
    ]


def test_names_that_are_long_or_no_text() -> None:
    labels = TenantLabels(9)
    assert labels.of("x" * 1000) == "x" * MAX_LABEL_CHARS
    assert labels.of("\udcff") == r"\udcff"
