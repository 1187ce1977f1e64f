"""The columns of leases: their cells, their order, and which of them a narrow terminal leaves out."""

from collections.abc import Callable, Sequence
from typing import Final

from gpulease.client.cli.top.sample import LeaseLine
from gpulease.client.console.reports import REGION_MARK
from gpulease.client.console.tables import MISSING, pad, seconds_text, shown, size_text
from gpulease.protocol.fast_dataclass import dataclass

SHORT_ID: Final = 8
"""Number of digits of a lease id if there is no room for all 32: enough to distinguish the leases of one node."""

GAP: Final = 1
"""Number of cells between columns."""

MAX_BAR: Final = 24
"""Maximum number of cells of the bar of remaining time; longer bars are not easier to read."""

MIN_BAR: Final = 6
"""Minimum number of cells of that bar; shorter bars show nothing."""

_SCALES: Final = (("G", 1e9), ("M", 1e6), ("k", 1e3))

Figure = str | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of leases.

    Attributes:
        title: The column's head.
        key: The key that sorts by this column.
        width: Number of cells, with room for the mark of the sorted column.
        value: Returns the value by which a line is sorted.
        text: Returns the text of a line's cell.
    """

    title: str
    key: str
    width: int
    value: Callable[[LeaseLine], Figure]
    text: Callable[[LeaseLine], str]
    is_right: bool = True


def rate_text(rate: float | None) -> str:
    """A rate per second in at most six characters, for any rate that a machine can reach."""
    if rate is None:
        return MISSING
    # Use the largest unit that the rate reaches, with three digits, and powers of ten for a rate beyond all units.
    for unit, scale in _SCALES:
        if rate >= scale:
            return f"{rate / scale:.3g}{unit}" if rate < 1e3 * scale else f"{rate / scale:.0e}{unit}"
    return f"{rate:.3g}"


def _size(size_bytes: float | None) -> str:
    return MISSING if size_bytes is None else size_text(int(size_bytes))


def _left(line: LeaseLine) -> str:
    return MISSING if line.left_s is None else seconds_text(line.left_s)


def _percent(line: LeaseLine) -> str:
    # The daemon samples once a second, so a single refresh may show somewhat more than 100 %.
    return MISSING if line.gpu_share is None else f"{100 * min(1.0, line.gpu_share):.0f}"


def _tenant_text(line: LeaseLine) -> str:
    # Mark regions in this column and not before the id, because the id's column has no spare cell.
    return (REGION_MARK if line.parent else "") + (line.tenant or MISSING)


COLUMNS: Final = (
    Column("LEASE", "N", SHORT_ID, lambda line: line.lease_id, lambda line: line.lease_id, is_right=False),
    Column("TENANT", "U", 12, lambda line: line.tenant, _tenant_text, is_right=False),
    Column("GPU", "G", 4, lambda line: line.card, lambda line: MISSING if line.card is None else str(line.card)),
    Column("STATE", "A", 14, lambda line: line.state, lambda line: line.state or MISSING, is_right=False),
    Column("SLICE", "S", 9, lambda line: line.size_bytes, lambda line: _size(line.size_bytes)),
    Column("USED", "M", 9, lambda line: line.used_bytes, lambda line: _size(line.used_bytes)),
    Column("GPU%", "P", 5, lambda line: line.gpu_share, _percent),
    Column("LAUNCH/S", "L", 9, lambda line: line.launches_per_s, lambda line: rate_text(line.launches_per_s)),
    Column("COPY/S", "C", 7, lambda line: line.copies_per_s, lambda line: rate_text(line.copies_per_s)),
    Column("OP/S", "O", 6, lambda line: line.operations_per_s, lambda line: rate_text(line.operations_per_s)),
    Column("LEFT", "T", 11, lambda line: line.left_s, _left),
)

BY_TITLE: Final = {column.title: column for column in COLUMNS}

_KEPT: Final = ("LEASE", "LEFT", "TENANT", "USED", "GPU%", "LAUNCH/S", "SLICE", "STATE", "COPY/S", "OP/S", "GPU")
"""Columns by importance. A terminal that is too narrow for all shows the first ones."""


def offered(lines: Sequence[LeaseLine]) -> list[Column]:
    """Return the columns that have something to show. Older daemons count neither copies nor the card's time."""
    missing = set()
    if all(line.copies_per_s is None for line in lines):
        missing.add("COPY/S")
    if all(line.gpu_share is None for line in lines):
        missing.add("GPU%")
    return [column for column in COLUMNS if column.title not in missing]


def fitting(width: int, columns: Sequence[Column]) -> tuple[list[Column], dict[str, int], int]:
    """Return the columns that fit into `width` cells, their widths by title, and the width of the bar after them."""
    names = {column.title for column in columns}
    chosen: list[str] = []
    used = -GAP
    # Take columns in order of importance, as long as they fit.
    for title in _KEPT:
        if title in names and used + GAP + BY_TITLE[title].width <= width:
            chosen.append(title)
            used += GAP + BY_TITLE[title].width
        elif title in names:
            break
    widths = {title: BY_TITLE[title].width for title in chosen}
    # If no column fits, show only ids, truncated to the width.
    if not chosen:
        chosen, widths, used = ["LEASE"], {"LEASE": width}, width
    spare = width - used
    # Use spare room first for complete ids, then for the bar.
    if spare >= (longer := 32 - SHORT_ID) + GAP + MIN_BAR:
        widths["LEASE"] += longer
        spare -= longer
    bar = min(MAX_BAR, spare - GAP) if spare - GAP >= MIN_BAR and "LEFT" in widths else 0
    return [column for column in columns if column.title in chosen], widths, bar


def cell(column: Column, line: LeaseLine, width: int) -> str:
    """A cell's text in exactly `width` cells, escaped for a terminal."""
    # Cut an id at its end, because its first digits distinguish leases.
    text = column.text(line)
    if column.title == "LEASE" and len(text) > width:
        text = text[:width]
    return pad(shown(text), width, right=column.is_right)


def bar_text(share: float | None, width: int) -> str:
    """Draw a share from 0 to 1 as a bar of `width` cells, including its brackets."""
    if share is None or width < 3:
        return " " * width
    # Two cells are for the brackets, and the rest for the share.
    full = round(max(0.0, min(1.0, share)) * (width - 2))
    return "[" + "|" * full + " " * (width - 2 - full) + "]"


def time_share(line: LeaseLine) -> float | None:
    """The share of a lease's time that is left, 0 to 1; None if unknown."""
    if line.left_s is None or not line.ttl_s:
        return None
    return max(0.0, min(1.0, line.left_s / line.ttl_s))


_LARGEST_FIRST: Final = ("SLICE", "USED", "GPU%", "LAUNCH/S", "COPY/S", "OP/S")
"""Columns sorted by descending value; all others are ascending."""


def arranged(lines: Sequence[LeaseLine], title: str, *, is_reversed: bool) -> list[LeaseLine]:
    """Sort lines by a column.

    Lines without a value are last in either order. Lines with equal values are ordered by id, so that they keep their
    places.
    """
    column = BY_TITLE[title]
    with_value = [line for line in lines if column.value(line) is not None]
    unknown = [line for line in lines if column.value(line) is None]
    for part in (with_value, unknown):
        part.sort(key=lambda line: line.lease_id)

    def figure(line: LeaseLine) -> tuple[float, str]:
        # Texts and numbers can't be compared with each other, so each has its own part of the key.
        value = column.value(line)
        return (0.0, value) if isinstance(value, str) else (value or 0.0, "")

    with_value.sort(key=figure, reverse=(title in _LARGEST_FIRST) != is_reversed)
    return with_value + unknown
