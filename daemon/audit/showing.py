"""Records and sums for people."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpulease.daemon.audit.records import Record, clean_text
from gpulease.daemon.audit.usage import US_PER_S, Used

GIB: Final = 1 << 30

_FIRST: Final[tuple[str, ...]] = ("operation", "action", "cause", "reason", "problem")
_OWN_COLUMNS: Final = frozenset({"lease", "tenant", "by"})


def line_of(record: Record) -> str:
    """A record: its number, when, what, whose, which lease, and the particulars."""
    data = record.data
    who = data.get("tenant", data.get("by", ""))
    names = [name for name in _FIRST if name in data]
    names += [name for name in data if name not in _FIRST and name not in _OWN_COLUMNS]
    cells = [str(record.seq).rjust(8), record.at, record.kind.ljust(8), str(who).ljust(10), str(data.get("lease", ""))]
    cells += [f"{name}={_text(data[name])}" for name in names if data[name] not in (None, "")]
    # A forged log is somebody else's text like any other.
    return "  ".join(clean_text(cell) for cell in cells)


def _text(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text else text


def found_text(found: Mapping[str, Any]) -> str:
    """What opening a log showed, as `gpulease.daemon.audit.files` has it, in words."""
    parts = []
    if torn := found.get("torn"):
        parts.append(f"its last {torn['size_bytes']} bytes, from byte {torn['offset']} of its newest file, are no line")
    if "head" in found:
        parts.append(f"its head: {found['head']}")
    if behind := found.get("unanchored"):
        parts.append(f"{behind} records are behind its head")
    if lost := found.get("lost"):
        parts.append(f"records {lost['first']} to {lost['last']} are missing")
    if "edited" in found:
        parts.append(f"record {found['edited']} is another than was written")
    return "; ".join(parts)


def usage_table(tenants: Mapping[str, Used]) -> str:
    """A table of sums."""
    head = ("tenant", "leases", "lease seconds", "GiB seconds", "open")
    rows = [
        (
            clean_text(name),
            str(used.leases),
            f"{used.lease_us / US_PER_S:.3f}",
            f"{used.byte_us / US_PER_S / GIB:.3f}",
            str(used.open_leases),
        )
        for name, used in sorted(tenants.items())
    ]
    return table(head, rows)


def usage_map(tenants: Mapping[str, Used]) -> dict[str, dict[str, int]]:
    """The sums as exact integers."""
    return {
        name: {
            "leases": used.leases,
            "open_leases": used.open_leases,
            "lease_us": used.lease_us,
            "byte_us": used.byte_us,
        }
        for name, used in sorted(tenants.items())
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; those of numbers are flushed right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    is_number = [bool(rows) and all(cell.replace(".", "").isdigit() for cell in column[1:]) for column in columns]
    lines = []
    for row in (head, *rows):
        cells = zip(row, widths, is_number, strict=True)
        lines.append("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells))
    return "\n".join(line.rstrip() for line in lines)
