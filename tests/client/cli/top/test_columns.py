"""Columns: their choice by width, their texts and their order."""

import pytest

from gpulease.client.cli.top.columns import (
    BY_TITLE,
    COLUMNS,
    arranged,
    bar_text,
    cell,
    fitting,
    offered,
    rate_text,
    time_share,
)
from gpulease.client.cli.top.sample import lease_lines
from helpers.node_reports import lease, sample


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.5, "0.5"),
        (999.4, "999"),
        (1234.0, "1.23k"),
        (250_000.0, "250k"),
        (2**64, "2e+10G"),
    ],
)
def test_rates(rate: float | None, text: str) -> None:
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("share", "width", "bar"),
    [(0.5, 6, "[||  ]"), (0.0, 5, "[   ]"), (1.0, 5, "[|||]"), (7.0, 5, "[|||]"), (None, 3, "   "), (0.5, 2, "  ")],
)
def test_bars(share: float | None, width: int, bar: str) -> None:
    assert bar_text(share, width) == bar


@pytest.mark.parametrize(
    ("width", "titles", "bar"),
    [
        (5, "LEASE", False),
        (20, "LEASE LEFT", False),
        (33, "LEASE TENANT LEFT", False),
        (80, "LEASE TENANT STATE SLICE USED LAUNCH/S LEFT", False),
        (100, "LEASE TENANT GPU STATE SLICE USED LAUNCH/S OP/S LEFT", True),
        (160, "LEASE TENANT GPU STATE SLICE USED LAUNCH/S OP/S LEFT", True),
    ],
)
def test_what_fits(width: int, titles: str, bar: bool) -> None:
    columns, widths, bar_cells = fitting(width, offered(lease_lines(sample(lease(1)), None)))
    assert " ".join(column.title for column in columns) == titles
    assert bool(bar_cells) == bar
    used = sum(widths.values()) + len(columns) - 1 + (bar_cells + 1 if bar_cells else 0)
    assert used <= width
    assert widths["LEASE"] == (32 if width == 160 else min(8, width))


@pytest.mark.parametrize("left_ms", [59_999, 3_599_999, 86_399_999])
def test_time_left_is_not_cut(left_ms: int) -> None:
    (line,) = lease_lines(sample(lease(1, remaining_ms=left_ms)), None)
    column = BY_TITLE["LEFT"]
    assert column.text(line) == cell(column, line, column.width).strip()


def test_copies_have_a_column_if_they_are_counted() -> None:
    before, after = lease(1, copies=0, gpu_seconds=0), lease(1, copies=10, gpu_seconds=0.5)
    counted = lease_lines(sample(after, at_s=101), sample(before))
    assert [column.title for column in offered(counted)] == [column.title for column in COLUMNS]
    assert (counted[0].copies_per_s, counted[0].gpu_share) == (10, 0.5)
    # An older daemon's leases have neither.
    older = lease_lines(sample(lease(1), at_s=101), sample(lease(1)))
    assert {column.title for column in COLUMNS} - {column.title for column in offered(older)} == {"COPY/S", "GPU%"}


@pytest.mark.parametrize(
    ("title", "order"), [("LEFT", [1, 2, 3]), ("USED", [2, 1, 3]), ("TENANT", [1, 2, 3]), ("LEASE", [1, 2, 3])]
)
def test_order(title: str, order: list[int]) -> None:
    # The third lacks a figure in all but its id; it comes last either way.
    lines = lease_lines(sample({"lease_id": f"{3:08x}"}, lease(2), lease(1)), None)
    assert [int(line.lease_id[:8], 16) for line in arranged(lines, title, is_reversed=False)] == order
    backwards = [*reversed(order[:2]), 3] if title != "LEASE" else order[::-1]
    assert [int(line.lease_id[:8], 16) for line in arranged(lines, title, is_reversed=True)] == backwards


def test_time_left_is_a_share() -> None:
    lines = lease_lines(sample(lease(5), lease(1, ttl_ms=0), lease(20)), None)
    assert [time_share(line) for line in lines] == [0.5, None, 1.0]
