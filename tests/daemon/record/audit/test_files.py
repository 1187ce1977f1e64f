"""A log on a real disk: found again after every way of being left."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.record.audit.files import (
    AuditLog,
    FolderInUse,
    LastRecords,
    LogDisturbed,
    LogSettings,
    Tail,
    last_records,
    log_files,
    tail_of,
)
from gpulease.daemon.record.audit.log_reader import CannotRead, find_log
from gpulease.daemon.record.audit.records import HEAD_BYTES, ChainEnd, Draft, RecordKind, hash_of, seal
from gpulease.daemon.record.audit.verification import Verdict, Verifier

from .chains import BOOT, OTHER_BOOT, a_life, draft, sealed, text_of

Open = Callable[..., AuditLog]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def open_log(folder: Path) -> Iterator[Open]:
    """Opens it, closing what was open before."""
    opened: list[AuditLog] = []

    def open_it(keep_files: int = 0, max_file_bytes: int = 1 << 20, boot: str = BOOT) -> AuditLog:
        for log in opened:
            log.close()
        opened[:] = [AuditLog(LogSettings(folder, folder / "head.json", max_file_bytes, keep_files), boot)]
        return opened[0]

    yield open_it
    for log in opened:
        log.close()


def newest(folder: Path) -> Path:
    return log_files(folder)[-1]


def verdict(folder: Path) -> Verdict:
    source = find_log([folder])
    verifier = Verifier(source.head.end if source.head else None)
    for file, offset, line in source.lines():
        verifier.take(file, offset, line)
    return verifier.finish()


def begin_again(log: AuditLog) -> Verdict:
    """What a daemon does as it starts."""
    log.append([draft(RecordKind.START, 9, format=1, **log.findings)], 10)
    return verdict(log._settings.folder)


def test_a_new_log(open_log: Open, folder: Path) -> None:
    log = open_log()
    assert (log.end, log.findings, log.previous) == (ChainEnd(), {}, None)
    log.append(a_life(), 7)
    lines, end = sealed(a_life())
    assert [path.name for path in log_files(folder)] == ["audit-0000000000000001.jsonl"]
    assert newest(folder).read_bytes() == text_of(lines)
    assert log.end == end
    for path in (newest(folder), folder / "head.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert verdict(folder).is_whole


def test_the_chain_goes_on(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    log = open_log(boot=OTHER_BOOT)
    assert log.findings == {}
    assert log.previous is not None
    assert (log.previous.boot, log.previous.alive_us, log.previous.end) == (BOOT, 7, log.end)
    assert begin_again(log).is_whole
    assert verdict(folder).records == 8


def test_nobody_else_may_write_it(open_log: Open, folder: Path) -> None:
    open_log()
    with pytest.raises(FolderInUse, match="another gpuleased"):
        AuditLog(LogSettings(folder, folder / "head.json", 1 << 20), BOOT)


@pytest.mark.parametrize("size", [1, 50, 290])
def test_a_torn_line(open_log: Open, folder: Path, size: int) -> None:
    open_log().append(a_life(), 7)
    piece = sealed([draft(RecordKind.GRANT, tenant="x" * 400)], sealed(a_life())[1])[0][0][:size]
    whole = newest(folder).stat().st_size
    with newest(folder).open("ab") as file:
        file.write(piece)
    assert "in the middle of a line" in verdict(folder).notes[0]
    log = open_log()
    torn = {"offset": whole, "size_bytes": size, "sha256": hashlib.sha256(piece).hexdigest()}
    assert log.findings == {"torn": torn}
    found = begin_again(log)
    assert found.is_whole, found.findings
    assert f"{size} bytes of a torn line, as recorded" in found.notes[0]


def test_a_torn_line_and_then_another(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    with newest(folder).open("ab") as file:
        file.write(b"{torn")
    log = open_log()
    # The record that tells of it is torn as well.
    told = draft(RecordKind.START, 9, format=1, **log.findings)
    log.close()
    with newest(folder).open("ab") as file:
        file.write(b"\n" + seal(told, log.end, BOOT)[0][:-5])
    assert begin_again(open_log()).is_whole


def test_zeros_that_a_power_failure_left(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    with newest(folder).open("ab") as file:
        file.write(b"\0" * 100_000)
    assert begin_again(open_log()).is_whole


def test_a_record_that_lacks_its_newline_only(open_log: Open, folder: Path) -> None:
    log = open_log()
    log.append(a_life(), 7)
    (line,), end = sealed([draft(RecordKind.GRANT)], log.end)
    with newest(folder).open("ab") as file:
        file.write(line)
    log = open_log()
    assert (log.end, log.findings) == (end, {"unanchored": 1})
    assert begin_again(log).is_whole


def test_a_crash_before_the_head_was_written(open_log: Open, folder: Path) -> None:
    log = open_log()
    log.append(a_life()[:3], 7)
    before = (folder / "head.json").read_bytes()
    log.append(a_life()[3:], 8)
    (folder / "head.json").write_bytes(before)
    log = open_log()
    assert (log.end.seq, log.findings) == (7, {"unanchored": 4})
    assert begin_again(log).is_whole


@pytest.mark.parametrize(
    ("data", "said"), [(None, "it is missing"), (b"", "it is missing"), (b"x" * HEAD_BYTES, "it can't be read")]
)
def test_a_head_that_is_gone(open_log: Open, folder: Path, data: bytes | None, said: str) -> None:
    open_log().append(a_life(), 7)
    (folder / "head.json").unlink()
    if data is not None:
        (folder / "head.json").write_bytes(data)
    log = open_log()
    assert log.end.seq == 7
    assert said in log.findings["head"]
    assert begin_again(log).is_whole


def test_a_cut_that_was_made_meanwhile_shows_for_ever(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    lines, _ = sealed(a_life())
    newest(folder).write_bytes(text_of(lines[:4]))
    log = open_log()
    assert log.findings == {"lost": {"first": 5, "last": 7}}
    (found,) = begin_again(log).findings
    assert (found.seq, found.problem) == (8, "records 5 to 7 are missing before it")


def test_an_edit_of_the_last_record(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    lines, _ = sealed(a_life())
    forged, _ = sealed([draft(RecordKind.STOP, 1)], ChainEnd(6, hash_of(lines[5])))
    newest(folder).write_bytes(text_of([*lines[:6], *forged]))
    log = open_log()
    assert log.findings == {"edited": 7}
    (found,) = begin_again(log).findings
    assert found.seq == 8


def test_all_of_it_is_gone(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    newest(folder).unlink()
    log = open_log()
    assert log.findings == {"lost": {"first": 1, "last": 7}}
    assert newest(folder).name == "audit-0000000000000008.jsonl"
    assert "begins with record 8" in begin_again(log).findings[0].problem


# --- while it is open ---


def append_something(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x\n")


def replace_it(path: Path) -> None:
    data = path.read_bytes()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(data)


@pytest.mark.parametrize("disturb", [append_something, replace_it, Path.unlink, lambda path: os.truncate(path, 9)])
def test_somebody_else_touches_it(open_log: Open, folder: Path, disturb: Callable[[Path], Any]) -> None:
    log = open_log()
    log.append(a_life(), 7)
    disturb(newest(folder))
    with pytest.raises(LogDisturbed):
        log.append([draft(RecordKind.GRANT)], 8)
    log = open_log()
    assert log.end.seq == 7
    assert begin_again(log).end.seq == 8


# --- rotation ---


def grants(count: int) -> list[Draft]:
    return [draft(RecordKind.GRANT, number, lease=f"{number:032x}") for number in range(count)]


def test_rotation_keeps_the_chain(open_log: Open, folder: Path) -> None:
    log = open_log(max_file_bytes=1000)
    for one in grants(12):
        log.append([one], 7)
    names = [path.name for path in log_files(folder)]
    assert len(names) == 3
    assert all(path.stat().st_size <= 1000 for path in log_files(folder))
    assert verdict(folder).records == 12
    log = open_log(max_file_bytes=1000)
    assert (log.end.seq, log.findings) == (12, {})
    assert begin_again(log).is_whole
    log_files(folder)[1].unlink()
    assert "are missing before it" in verdict(folder).findings[0].problem


def test_a_file_that_was_begun_and_nothing_more(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    (folder / "audit-0000000000000008.jsonl").touch(mode=0o600)
    log = open_log()
    assert (log.end.seq, log.findings) == (7, {})
    assert begin_again(log).is_whole
    assert newest(folder).stat().st_size > 0


def test_superfluous_files_are_told_of_and_then_removed(open_log: Open, folder: Path) -> None:
    log = open_log(keep_files=2, max_file_bytes=1000)
    for one in grants(30):
        log.append([one], 7)
        while (superfluous := log.superfluous()) is not None:
            path, told = superfluous
            log.append([draft(RecordKind.PRUNE, **told)], 7)
            assert verdict(folder).is_whole
            log.remove(path)
    assert len(log_files(folder)) == 2
    found = verdict(folder)
    assert found.is_whole, found.findings
    assert found.end.seq > 30
    oldest, _ = log_files(folder)
    oldest.unlink()
    assert "no record reports the removal of" in verdict(folder).findings[0].problem


def test_the_last_record_of_any_bytes() -> None:
    lines, _ = sealed(a_life())
    text = text_of(lines)
    assert tail_of(text).end.seq == 7
    assert tail_of(text[:-1]) == Tail(tail_of(text).end, len(text) - 1)
    assert (tail_of(text[:-2]).end.seq, tail_of(text[:-2]).end_bytes) == (6, len(text_of(lines[:6])))
    assert tail_of(b"\n\n\nnothing").end == ChainEnd()
    assert tail_of(b"").end_bytes == 0


@pytest.mark.parametrize("name", ["nothing", "empty", "a file"])
def test_what_is_no_log(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CannotRead):
        list(find_log([tmp_path / name]).lines())


def test_a_head_that_can_not_be_read(open_log: Open, folder: Path) -> None:
    open_log().append(a_life(), 7)
    with pytest.raises(CannotRead, match=r"the head .* does not exist"):
        find_log([folder], folder / "none")
    (folder / "head.json").write_bytes(b"x")
    with pytest.raises(CannotRead, match="is not a head"):
        find_log([folder])


def test_what_the_last_records_tell(open_log: Open, folder: Path) -> None:
    log = open_log()
    assert last_records(folder, BOOT) == LastRecords()
    one, two = f"{1:032x}", f"{2:032x}"
    log.append(
        [
            draft(RecordKind.GRANT, 5, lease=one),
            draft(RecordKind.GRANT, 6, lease=two),
            draft(RecordKind.END, 7, lease=two),
        ],
        8,
    )
    kinds = {one: RecordKind.GRANT, two: RecordKind.END}
    assert last_records(folder, BOOT) == LastRecords(kinds, 7)
    assert last_records(folder, OTHER_BOOT) == LastRecords(kinds)
    log.append([draft(RecordKind.STOP, 9)], 10)
    assert last_records(folder, BOOT) == LastRecords(kinds)
