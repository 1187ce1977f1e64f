"""Reads audit logs from files, and formats records and sums for people."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.record.audit.files import HEAD_NAME, log_files
from gpulease.daemon.record.audit.records import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    AuditRecord,
    Head,
    NotAHead,
    clean_text,
    read_head,
)
from gpulease.daemon.record.audit.usage import DayOfTenant, DayUse, Used
from gpulease.daemon.record.audit.verification import Verifier
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import US_PER_S


class CannotRead(Exception):
    """The log can't be read; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A log's files, oldest first, and its head, or None without one."""

    files: tuple[Path, ...]
    head: Head | None

    def lines(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield each line with its newline, its file and its offset. A line longer than any record comes in pieces."""
        for path in self.files:
            offset = 0
            try:
                with path.open("rb") as file:
                    # A forged file may have an endless line, so read at most a record's length. The pieces are not
                    # valid records.
                    while line := file.readline(MAX_RECORD_BYTES + 2):
                        yield path.name, offset, line
                        offset += len(line)
            except OSError as error:
                raise CannotRead(f"{path}: {error.strerror}") from None

    def records(self, verifier: Verifier | None = None) -> Iterator[AuditRecord]:
        """Yield every line that is a record. Afterwards `verifier` reports whether the chain is intact."""
        verifier = verifier or Verifier()
        for file, offset, line in self.lines():
            # The verifier reports lines that are not records.
            if (record := verifier.take(file, offset, line)) is not None:
                yield record


def find_log(paths: Sequence[Path], head_path: Path | None = None) -> LogSource:
    """Find the log in a folder, or in files given in their order. Raises CannotRead.

    The head is read before the files. If a daemon is writing, the log may then be longer than the head, but not
    shorter.
    """
    # The head is in a file next to the log, unless the caller names another file.
    folder = paths[0] if _is_folder(paths[0]) else paths[0].parent
    head = _head(head_path or folder / HEAD_NAME, is_expected=head_path is not None)
    files: list[Path] = []
    # Keep the order of the given files. The verifier reports a wrong order.
    for path in paths:
        try:
            files += log_files(path) if _is_folder(path) else [path]
        except OSError as error:
            raise CannotRead(f"{path}: {error.strerror}") from None
    if not files:
        raise CannotRead(f"{folder} has no audit log")
    return LogSource(tuple(files), head)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise CannotRead(f"{path}: {error.strerror}") from None


def _head(path: Path, *, is_expected: bool) -> Head | None:
    try:
        with path.open("rb") as file:
            return read_head(file.read(HEAD_BYTES + 1))
    except FileNotFoundError:
        # A log without a head is legal: an operator may have copied only the files.
        if not is_expected:
            return None
        raise CannotRead(f"the head {path} does not exist") from None
    except OSError as error:
        raise CannotRead(f"{path}: {error.strerror}") from None
    except NotAHead as error:
        raise CannotRead(f"{path} is not a head: {error}") from None


GIB: Final = 1 << 30

_FIRST: Final[tuple[str, ...]] = ("operation", "action", "cause", "reason", "problem")
_OWN_COLUMNS: Final = frozenset({"lease", "tenant", "by"})


def line_of(record: AuditRecord) -> str:
    """Format a record: number, time, kind, tenant, lease and particulars."""
    data = record.data
    # Put the most important particulars first, then the others in the record's order.
    party = data.get("tenant", data.get("by", ""))
    names = [name for name in _FIRST if name in data]
    names += [name for name in data if name not in _FIRST and name not in _OWN_COLUMNS]
    cells = [
        str(record.seq).rjust(8),
        record.at,
        record.kind.ljust(8),
        str(party).ljust(10),
        str(data.get("lease", "")),
    ]
    cells += [f"{name}={_text(data[name])}" for name in names if data[name] not in (None, "")]
    # A forged log may contain any text.
    return "  ".join(clean_text(cell) for cell in cells)


def _text(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text else text


def found_text(details: Mapping[str, Any]) -> str:
    """Describe the problems that were found when a log was opened (`AuditLog.findings`)."""
    parts = []
    if torn := details.get("torn"):
        parts.append(
            f"its last {torn['size_bytes']} bytes, from byte {torn['offset']} of its newest file, are not a "
            "complete line"
        )
    if "head" in details:
        parts.append(f"its head: {details['head']}")
    if unanchored := details.get("unanchored"):
        parts.append(f"{counted(unanchored, 'record is', 'records are')} after its head")
    if lost := details.get("lost"):
        parts.append(f"records {lost['first']} to {lost['last']} are missing")
    if "edited" in details:
        parts.append(f"record {details['edited']} was changed after it was written")
    return "; ".join(parts)


def usage_table(tenants: Mapping[str, Used]) -> str:
    head = ("tenant", "leases", "lease seconds", "GiB seconds", "GPU seconds", "open")
    # Names come from the log, which may be forged, so clean them like everything else that is shown.
    rows = [
        (
            clean_text(name),
            str(used.leases),
            f"{used.lease_us / US_PER_S:.3f}",
            f"{used.byte_us / US_PER_S / GIB:.3f}",
            f"{used.gpu_us / US_PER_S:.3f}",
            str(used.open_leases),
        )
        for name, used in sorted(tenants.items())
    ]
    return table(head, rows)


def usage_map(tenants: Mapping[str, Used]) -> dict[str, dict[str, int]]:
    return {
        name: {
            "leases": used.leases,
            "open_leases": used.open_leases,
            "lease_us": used.lease_us,
            "byte_us": used.byte_us,
            "gpu_us": used.gpu_us,
        }
        for name, used in sorted(tenants.items())
    }


DAY_COLUMNS: Final = ("day", "tenant", "card", "lease_seconds", "byte_seconds", "gpu_seconds")


def days_map(days: Mapping[DayOfTenant, DayUse]) -> list[dict[str, str | int]]:
    """Return the sums of each day, tenant and card, in microseconds, for programs."""
    return [
        {**key._asdict(), "lease_us": use.lease_us, "byte_us": use.byte_us, "gpu_us": use.gpu_us}
        for key, use in sorted(days.items())
    ]


def days_csv(days: Mapping[DayOfTenant, DayUse]) -> str:
    """Return the sums of each day, tenant and card as CSV (RFC 4180), with a heading, in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(DAY_COLUMNS)
    for key, use in sorted(days.items()):
        seconds = (f"{us / US_PER_S:.6f}" for us in (use.lease_us, use.byte_us, use.gpu_us))
        writer.writerow((key.day, _cell(key.tenant), _cell(key.card), *seconds))
    return text.getvalue()


def _cell(text: str) -> str:
    # A spreadsheet evaluates a cell that begins with one of these characters as a formula.
    cleaned = clean_text(text)
    return f"'{cleaned}" if cleaned.startswith(("=", "+", "-", "@")) else cleaned


def days_table(days: Mapping[DayOfTenant, DayUse]) -> str:
    head = ("day", "tenant", "card", "lease seconds", "GiB seconds", "GPU seconds")
    rows = [
        (
            key.day,
            clean_text(key.tenant),
            clean_text(key.card),
            f"{use.lease_us / US_PER_S:.3f}",
            f"{use.byte_us / US_PER_S / GIB:.3f}",
            f"{use.gpu_us / US_PER_S:.3f}",
        )
        for key, use in sorted(days.items())
    ]
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table. Columns of numbers are aligned right."""
    # A column is aligned right if all cells except its heading are numbers.
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    is_number = [bool(rows) and all(cell.replace(".", "").isdigit() for cell in column[1:]) for column in columns]
    lines = []
    for row in (head, *rows):
        cells = zip(row, widths, is_number, strict=True)
        lines.append("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells))
    return "\n".join(line.rstrip() for line in lines)
