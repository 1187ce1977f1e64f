"""Tables and sizes for people."""

from collections.abc import Sequence
from typing import Final

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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; those whose cells all start with a digit are flushed right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    is_number = [bool(rows) and all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
