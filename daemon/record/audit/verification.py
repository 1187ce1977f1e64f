"""Verifies that a log is unchanged since it was written. Takes lines, and returns findings.

The verifier finds every edited, inserted, removed, repeated or moved record. It finds missing records at the end if the
head names a later record, and missing first records unless the daemon removed them. It can't detect that a log was
rewritten from some record on, together with its head. Keep heads where the log's writer can't reach them.
"""

import hashlib
from dataclasses import field
from typing import Any, Final

from gpulease.daemon.record.audit.records import (
    FORMAT,
    AuditRecord,
    ChainEnd,
    NotARecord,
    RecordKind,
    hash_of,
    read_record,
)
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass

MAX_FINDINGS: Final = 100
"""Maximum number of findings that are listed. Further ones are counted. A file that is not a log has one for each line.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that was found in a log.

    Attributes:
        file: The file; "" if the problem is not in a file.
        offset_bytes: The offset of the line.
        seq: The sequence number of the record there, or of the record that should be there; 0 if unknown.
        problem: The problem, as a sentence.
    """

    file: str
    offset_bytes: int
    seq: int
    problem: str

    def __str__(self) -> str:
        location = f"{self.file}, byte {self.offset_bytes}" if self.file else "the log"
        return f"{location}, record {self.seq}: {self.problem}" if self.seq else f"{location}: {self.problem}"


@dataclass(slots=True)
class Verdict:
    """The result of a verification.

    Attributes:
        findings: Problems, at most `MAX_FINDINGS`; empty if the log is intact.
        omitted: Number of problems that are not listed.
        notes: Facts for the reader that are not problems.
        unreadable: Number of places with bytes that are neither a record nor described by one.
        records: Number of records.
        end: The last record.
    """

    findings: list[Finding] = field(default_factory=list)
    omitted: int = 0
    notes: list[str] = field(default_factory=list)
    unreadable: int = 0
    records: int = 0
    end: ChainEnd = field(default_factory=ChainEnd)

    @property
    def is_whole(self) -> bool:
        return not self.findings


@dataclass(slots=True)
class _TornBytes:
    """Bytes that are not a record, such as a crash leaves."""

    file: str
    offset_bytes: int
    seq: int
    problem: str
    size_bytes: int = 0
    newline: bytes = b""
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, data: bytes) -> None:
        """Add bytes. The last newline does not count, because the writer adds it before it continues."""
        self.digest.update(self.newline)
        self.size_bytes += len(self.newline)
        body = data.removesuffix(b"\n")
        self.newline = data[len(body) :]
        self.digest.update(body)
        self.size_bytes += len(body)


class Verifier:
    """Takes the lines of a log, file by file, oldest first.

    Args:
        head: The record that the log must reach, if that is known.
    """

    def __init__(self, head: ChainEnd | None = None) -> None:
        self.verdict = Verdict()
        self._head = head
        self._is_head_reached = head is None or head.seq == 0
        self._before: ChainEnd | None = None
        self._removed: set[ChainEnd] = set()
        self._torn_bytes: _TornBytes | None = None

    def take(self, file: str, offset_bytes: int, line: bytes) -> AuditRecord | None:
        """Check one line, with its newline if it has one. Returns its record, or None if it is not a record."""
        # Step 1: read the record. Collect bytes that are not a record, because the next record may describe them.
        try:
            if not line.endswith(b"\n"):
                raise NotARecord("it has no newline: it was truncated, or is being written")
            record = read_record(line[:-1])
        except NotARecord as error:
            self._collect_torn_bytes(file, offset_bytes, line, str(error))
            return None
        # Step 2: check the record's description of the bytes before it, and its place in the chain.
        self._check_torn_bytes(record, file, offset_bytes)
        self._check_place(record, file, offset_bytes)
        # Step 3: note removed files and torn bytes for later checks.
        if record.kind == RecordKind.PRUNE:
            last, last_hash = record.data.get("last"), record.data.get("hash")
            if isinstance(last, int) and isinstance(last_hash, str):
                self._removed.add(ChainEnd(last, last_hash))
        if record.kind == RecordKind.START and record.data.get("format") != FORMAT:
            self._find(file, offset_bytes, record.seq, f"its format must be {FORMAT}")
        # Step 4: continue the chain after this record, even if it was wrong, so that one fault is reported once.
        self.verdict.end = ChainEnd(record.seq, hash_of(line[:-1]))
        self.verdict.records += 1
        self._check_head(file, offset_bytes)
        return record

    def finish(self) -> Verdict:
        """Make the checks that need the whole log, and return the verdict. Call this once, after the last line."""
        verdict = self.verdict
        # No record describes a piece of a line at the log's end.
        self._check_torn_bytes(None, "", 0)
        # First records may be missing only if a `prune` record describes their removal.
        if self._before is not None and self._before.seq and self._before not in self._removed:
            self._find(
                "",
                0,
                0,
                f"it begins with record {self._before.seq + 1}, and no record reports the removal of earlier ones",
            )
        # Compare with the head. A shorter log was cut. A longer log is normal while a daemon writes.
        if not self._is_head_reached and self._head is not None:
            if verdict.end.seq < self._head.seq:
                self._find(
                    "",
                    0,
                    0,
                    f"it ends with record {verdict.end.seq}, but its head is {self._head.seq}: records at "
                    "the end were removed",
                )
            else:
                self._find("", 0, 0, f"it has no record {self._head.seq} with the hash in its head")
        elif self._head is not None and verdict.end.seq > self._head.seq:
            verdict.notes.append(
                f"{counted(verdict.end.seq - self._head.seq, 'record follows', 'records follow')} the head"
            )
        return verdict

    def _check_place(self, record: AuditRecord, file: str, offset_bytes: int) -> None:
        end, seq = self.verdict.end, record.seq
        # This is the first record of the files. `finish` checks whether the daemon removed the records before it.
        if not self.verdict.records:
            self._before = ChainEnd(seq - 1, record.prev)
            if seq == 1 and record.prev != ChainEnd().hash:
                self._find(file, offset_bytes, seq, "the first record refers to an earlier one")
            return
        # There are three possible faults: a number that is too high, one that is too low, or a wrong hash.
        if seq > end.seq + 1:
            self._find(file, offset_bytes, seq, f"records {end.seq + 1} to {seq - 1} are missing before it")
        elif seq <= end.seq:
            self._find(file, offset_bytes, seq, f"it follows record {end.seq}: it was moved or repeated")
        elif record.prev != end.hash:
            self._find(
                file, offset_bytes, seq, f"it does not have the hash of record {end.seq}: one of the two was edited"
            )

    def _check_head(self, file: str, offset_bytes: int) -> None:
        head, end = self._head, self.verdict.end
        # Compare with the head's record here, because the log may continue after it.
        if head is not None and not self._is_head_reached and end.seq == head.seq:
            self._is_head_reached = end.hash == head.hash
            if not self._is_head_reached:
                self._find(file, offset_bytes, end.seq, "it is not the record that the head refers to")
                # This is reported here, so `finish` must not report it again.
                self._is_head_reached = True

    # --- bytes that are not a record ---

    def _collect_torn_bytes(self, file: str, offset_bytes: int, line: bytes, problem: str) -> None:
        # A record can describe only bytes of its own file. So bytes at the end of the previous file are a finding.
        if self._torn_bytes is not None and self._torn_bytes.file != file:
            self._check_torn_bytes(None, "", 0)
        if self._torn_bytes is None:
            self._torn_bytes = _TornBytes(file, offset_bytes, self.verdict.end.seq + 1, problem)
        self._torn_bytes.add(line)

    def _check_torn_bytes(self, record: AuditRecord | None, file: str, offset_bytes: int) -> None:
        """Report bytes that are not a record, unless the record after them describes them."""
        # A `torn` member without such bytes, or such bytes without a `torn` member, is a finding.
        torn_bytes, self._torn_bytes = self._torn_bytes, None
        torn = None if record is None else record.data.get("torn")
        if torn_bytes is None:
            if torn is not None and record is not None:
                self._find(file, offset_bytes, record.seq, "it refers to a torn line that does not exist")
            return
        sha256 = torn_bytes.digest.hexdigest()
        expected = {"offset": torn_bytes.offset_bytes, "size_bytes": torn_bytes.size_bytes, "sha256": sha256}
        if torn == expected and torn_bytes.file == file:
            self.verdict.notes.append(
                f"{file}, byte {torn_bytes.offset_bytes}: {torn_bytes.size_bytes} bytes of a torn line, as recorded"
            )
            return
        if record is None and not torn_bytes.newline and self._is_head_reached:
            # The log ends with these bytes. No durable record is lost, and the daemon's next start will describe them.
            self.verdict.notes.append(
                f"{torn_bytes.file}, byte {torn_bytes.offset_bytes}: it ends in the middle of a line"
            )
            return
        self.verdict.unreadable += 1
        self._find(
            torn_bytes.file, torn_bytes.offset_bytes, torn_bytes.seq, f"this is not a record: {torn_bytes.problem}"
        )

    def _find(self, file: str, offset_bytes: int, seq: int, problem: str) -> None:
        if len(self.verdict.findings) < MAX_FINDINGS:
            self.verdict.findings.append(Finding(file, offset_bytes, seq, problem))
        else:
            self.verdict.omitted += 1
