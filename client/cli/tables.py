"""Tables and sizes for people."""

from collections.abc import Collection, Sequence
from typing import Final

from gpulease.client.cli.cells import pad, shown, width_of

MISSING: Final = "-"
"""What a table says of what its daemon does not."""

GAP: Final = "  "
"""Between two columns."""

_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size_text(size_bytes: int) -> str:
    """Bytes, short: "1.5 GiB"."""
    for unit, scale in _UNITS:
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} B"


def seconds_text(seconds: float) -> str:
    """A time span, short: "2 h 05 min", "3 min 20 s", "4.2 s"."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Collection[str] = ()) -> str:
    """Columns as wide as they need to be; those of figures, or "-" where there is none, are flushed right.

    What is not printable in a cell is shown as its escape. `texts` are heads of columns that are never figures,
    whatever their cells begin with: ids, names.
    """
    columns = [[shown(cell) for cell in column] for column in zip(head, *rows, strict=True)]
    widths = [max(width_of(cell) for cell in column) for column in columns]
    is_number = [name not in texts and _are_figures(column[1:]) for name, column in zip(head, columns, strict=True)]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [pad(cell, width, right=right) for cell, width, right in zip(row, widths, is_number, strict=True)]
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)


def _are_figures(cells: Sequence[str]) -> bool:
    return any(cell[:1].isdigit() for cell in cells) and all(cell[:1].isdigit() or cell == MISSING for cell in cells)
