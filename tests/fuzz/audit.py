"""The audit log's readers: daemon/record/audit/verification.py, records.py, usage.py, log_reader.py.

The invariant. Whatever bytes a log and its head consist of:

- verifying, showing and summing raise nothing (an invalid head is NotAHead), and what is shown moves no cursor;
- with its head, a log is reported as whole only if everything that the head lists is there, byte for byte and in order,
  and what follows continues the chain, or is part of a line;
- without its head, a log is reported as whole only if it is an unbroken part of some chain: no record of it was
  changed, moved or repeated;
- a record that was read, written again, gives its own bytes: there is only one way to write it.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise

from gpulease.daemon.record.audit.log_reader import find_log, line_of, usage_map, usage_table
from gpulease.daemon.record.audit.records import (
    MAX_RECORD_BYTES,
    AuditRecord,
    ChainEnd,
    NotAHead,
    NotARecord,
    NotCanonical,
    RecordKind,
    canonical_bytes,
    head_bytes,
    read_head,
    read_record,
    value_of,
)
from gpulease.daemon.record.audit.usage import UsageSum
from gpulease.daemon.record.audit.verification import Verdict, Verifier

from .draws import Draws
from .vector_seeds import VECTORS

MAX_BYTES = 6000
WHOLE = find_log([VECTORS / "audit" / "whole"])
FILES = {path.name: path.read_bytes() for path in WHOLE.files}
NAMES = tuple(FILES)
LINES = tuple(line + b"\n" for data in FILES.values() for line in data.split(b"\n")[:-1])
assert WHOLE.head is not None
HEAD = WHOLE.head


def _record_in(line: bytes) -> AuditRecord | None:
    """Return the record in a line; None for an incomplete line."""
    try:
        return read_record(line[:-1])
    except NotARecord:
        return None


RECORDS = tuple(record for line in LINES if (record := _record_in(line)) is not None)


def check(data: bytes) -> None:
    draws = Draws(data)
    match draws.below(4):
        case 0:
            check_record(draws.rest())
        case 1:
            check_log({"a": draws.rest()})
        case 2:
            check_head(draws.rest())
        case _:
            check_log(changed(draws))


def check_log(files: dict[str, bytes]) -> None:
    """Check the verdicts on a log with and without its head, and its other readers."""
    records = read(files)
    is_same = is_continued(files)
    assert verdict_of(files, HEAD.end).is_whole <= is_same
    if verdict_of(files, None).is_whole:
        for before, after in pairwise(records):
            assert after.seq == before.seq + 1
            assert after.prev == hashlib.sha256(text_of(before)).hexdigest()
    total = UsageSum()
    for record in records:
        assert line_of(record).isprintable()
        total.take(record)
    sums = total.finish(HEAD)
    assert usage_table(sums)
    for used in usage_map(sums).values():
        assert all(count >= 0 for count in used.values())


def is_continued(files: dict[str, bytes]) -> bool:
    """Return whether a log contains everything up to the head unchanged, however it is divided into files."""
    kept = b"".join(files.values())
    known = b"".join(FILES.values())
    size = known.index(b"\n", known.index(text_of(RECORDS[HEAD.end.seq - RECORDS[0].seq]))) + 1
    return kept[:size] == known[:size]


def verdict_of(files: dict[str, bytes], head: ChainEnd | None) -> Verdict:
    verifier = Verifier(head)
    for name, offset, line in lines_of(files):
        verifier.take(name, offset, line)
    return verifier.finish()


def read(files: dict[str, bytes]) -> list[AuditRecord]:
    """Return the records in a log. Checks that each is written in the only valid way."""
    verifier = Verifier()
    records = []
    for name, offset, line in lines_of(files):
        record = verifier.take(name, offset, line)
        if record is not None:
            assert text_of(record) == line[:-1]
            records.append(record)
    verifier.finish()
    return records


def text_of(record: AuditRecord) -> bytes:
    return canonical_bytes({name: getattr(record, name) for name in AuditRecord.__slots__})


def lines_of(files: dict[str, bytes]) -> Iterator[tuple[str, int, bytes]]:
    """Yield lines as a file is read: at most a limited part of a line at a time."""
    for name, data in files.items():
        at = 0
        while at < len(data):
            end = data.find(b"\n", at) + 1 or len(data)
            end = min(end, at + MAX_RECORD_BYTES + 2)
            yield name, at, data[at:end]
            at = end


def check_record(data: bytes) -> None:
    try:
        record = read_record(data)
    except NotARecord:
        pass
    else:
        assert text_of(record) == data
        assert line_of(record).isprintable()
        UsageSum().take(record)
    try:
        value = value_of(data)
    except NotCanonical:
        return
    assert canonical_bytes(value) == data


def check_head(data: bytes) -> None:
    try:
        head = read_head(data)
    except NotAHead:
        return
    # Spaces at the end belong to the file, not to the head.
    assert head_bytes(head) == data


# --- changed logs ---


def changed(draws: Draws) -> dict[str, bytes]:
    """Return the whole log of the vectors after some edits."""
    lines = [[line + b"\n" for line in data.split(b"\n")[:-1]] for data in FILES.values()]
    for _ in range(1 + draws.below(4)):
        file = draws.pick(lines)
        at = draws.below(len(file) + 1)
        edit(file, at, draws)
    files = dict(zip(NAMES, map(b"".join, lines), strict=True))
    if draws.chance(8):
        files = dict(reversed(files.items()))
    if draws.chance(8):
        del files[draws.pick(NAMES)]
    return files


def edit(file: list[bytes], at: int, draws: Draws) -> None:
    """Make one edit in a file, before a line or in it."""
    is_line = at < len(file)
    match draws.below(9):
        case 0 if is_line:
            del file[at]
        case 1:
            file.insert(at, draws.pick(LINES))
        case 2 if is_line:
            other = draws.below(len(file))
            file[at], file[other] = file[other], file[at]
        case 3 if is_line:
            place = draws.number(2) % (len(file[at]) + 1)
            file[at] = file[at][:place] + draws.sized(8) + file[at][place + draws.below(9) :]
        case 4:
            del file[at:]
        case 5:
            file.insert(at, draws.sized(120))
        case 6 if is_line:
            file[at] = file[at][: draws.number(2) % (len(file[at]) + 1)]
        case 7:
            file.insert(at, sealed(draws))
        case _:
            file.extend(file[at : at + 1 + draws.below(3)])


def sealed(draws: Draws) -> bytes:
    """Return a record that continues the chain after a known one, as an attacker could write it."""
    after = draws.pick(RECORDS)
    data: dict[str, object] = {}
    for _ in range(draws.below(4)):
        data[draws.pick(("format", "torn", "last", "hash", "lease", "previous", "dropped", "since_us", "tenant"))] = (
            draws.pick(
                (1, 2, {}, [], None, True, "", "x", after.prev, {"offset": 0}, {"boot": 5}, {"end": 1}, after.seq)
            )
        )
    record = {name: getattr(after, name) for name in AuditRecord.__slots__} | {
        "seq": after.seq + 1,
        "prev": hashlib.sha256(text_of(after)).hexdigest(),
        "kind": draws.pick(tuple(RecordKind)).value,
        "data": data,
    }
    return canonical_bytes(record) + b"\n"


def seeds() -> Iterator[bytes]:
    for line in LINES:
        yield b"\0" + line[:-1]
    yield b"\2" + head_bytes(HEAD)
    for data in FILES.values():
        yield b"\1" + data
    for kind in range(9):
        for file in range(len(NAMES)):
            for at in range(0, len(LINES), 3):
                yield bytes([3, 0, file, at, kind, 2, 0, 30, 4]) + b'"x":'
    for kind in range(len(RecordKind)):
        for name in range(9):
            yield bytes([3, 0, 1, 9, 7, kind, 2, name, kind, name + 1, name, kind])
