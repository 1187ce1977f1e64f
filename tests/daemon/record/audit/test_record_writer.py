"""The thread between the broker and the disk; a full disk is a limit on file sizes that a child sets itself."""

import errno
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.daemon.record.audit.files import AuditLog, LogSettings
from gpulease.daemon.record.audit.log_reader import find_log
from gpulease.daemon.record.audit.record_writer import AuditWriter
from gpulease.daemon.record.audit.records import AuditRecord, ChainEnd, RecordKind
from gpulease.daemon.record.audit.verification import Verifier
from helpers.daemon import python_environment
from helpers.waiting import wait_until

from .chains import BOOT

GRANTS = 200


def opener(folder: Path, max_file_bytes: int = 1 << 20, keep_files: int = 0) -> Callable[[ChainEnd], AuditLog]:
    settings = LogSettings(folder, folder / "head.json", max_file_bytes, keep_files)
    return lambda known: AuditLog(settings, BOOT, known)


def records_of(folder: Path) -> list[AuditRecord]:
    source = find_log([folder])
    assert source.head is not None
    verifier = Verifier(source.head.end)
    records = [verifier.take(*line) for line in source.lines()]
    verdict = verifier.finish()
    assert verdict.is_whole, verdict.findings
    return [record for record in records if record is not None]


def test_what_is_put_is_written_in_order(tmp_path: Path) -> None:
    told = threading.Event()
    writer = AuditWriter(opener(tmp_path / "log"), {"version": "1"}, told.set)
    writer.start(must_work=True)
    tickets = [writer.put(RecordKind.GRANT, {"number": number}) for number in range(GRANTS)]
    wait_until(lambda: writer.is_durable(tickets[-1]), "all is durable")
    assert told.is_set()
    assert not writer.is_durable(0)
    assert writer.problem() == ""
    assert writer.stop({"omitted": []})
    start, *grants, stop = records_of(tmp_path / "log")
    assert (start.kind, start.data) == ("start", {"format": 1, "version": "1"})
    assert [record.data["number"] for record in grants] == list(range(GRANTS))
    assert stop.kind == "stop"
    assert writer.figures() == {"waiting": 0, "durable": GRANTS + 1, "dropped": 0}


def test_the_next_life_tells_of_the_last(tmp_path: Path) -> None:
    for _ in range(2):
        writer = AuditWriter(opener(tmp_path / "log"), {}, lambda: None)
        writer.start(must_work=True)
        assert writer.stop({})
    _, stop, start, _ = records_of(tmp_path / "log")
    assert start.data["previous"]["boot"] == BOOT
    assert start.data["previous"]["alive_us"] >= stop.mono_us - 1


def test_files_beyond_those_to_be_kept_are_removed(tmp_path: Path) -> None:
    writer = AuditWriter(opener(tmp_path / "log", max_file_bytes=2000, keep_files=3), {}, lambda: None)
    writer.start(must_work=True)
    for number in range(60):
        ticket = writer.put(RecordKind.GRANT, {"number": number})
        wait_until(lambda ticket=ticket: writer.is_durable(ticket), "it is durable")  # type: ignore[misc]
    writer.stop({})
    assert len(list((tmp_path / "log").glob("audit-*"))) == 3
    assert {"number": 59} in [record.data for record in records_of(tmp_path / "log")]


def test_a_log_that_must_work_and_does_not(tmp_path: Path) -> None:
    writer = AuditWriter(opener(tmp_path / "no" / "log"), {}, lambda: None)
    with pytest.raises(FileNotFoundError):
        writer.start(must_work=True)
    assert "No such file" in writer.problem()


def test_one_that_need_not_is_begun_when_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.record.group_commit.RETRY_S", 0.01)
    writer = AuditWriter(opener(tmp_path / "no" / "log"), {}, lambda: None)
    writer.start(must_work=False)
    writer.put(RecordKind.GRANT, {"number": 1})
    (tmp_path / "no").mkdir()
    wait_until(lambda: not writer.problem(), "it is written")
    assert writer.stop({})
    assert [record.kind for record in records_of(tmp_path / "no" / "log")] == ["start", "grant", "stop"]


@pytest.mark.parametrize("is_head_taken_too", [True, False])
def test_what_is_taken_away_under_it_shows_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_head_taken_too: bool
) -> None:
    monkeypatch.setattr("gpulease.daemon.record.group_commit.RETRY_S", 0.01)
    folder = tmp_path / "log"
    writer = AuditWriter(opener(folder), {}, lambda: None)
    writer.start(must_work=True)
    (folder / "audit-0000000000000001.jsonl").rename(tmp_path / "elsewhere")
    if is_head_taken_too:
        (folder / "head.json").unlink()
    ticket = writer.put(RecordKind.GRANT, {"number": 1})
    wait_until(lambda: writer.is_durable(ticket), "it goes on")
    assert writer.stop({})
    (file,) = folder.glob("audit-*")
    told = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [(record["seq"], record["kind"]) for record in told] == [(2, "resume"), (3, "grant"), (4, "stop")]
    assert told[0]["data"]["lost"] == {"first": 1, "last": 1}


def test_a_fault_of_ours_is_a_problem_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.record.group_commit.RETRY_S", 0.01)
    writer = AuditWriter(opener(tmp_path / "log"), {}, lambda: None)
    writer.start(must_work=True)
    with monkeypatch.context() as patch:
        patch.setattr("gpulease.daemon.record.audit.files.seal", None)
        ticket = writer.put(RecordKind.GRANT, {"number": 1})
        wait_until(writer.problem, "it is said")
    wait_until(lambda: writer.is_durable(ticket), "it goes on")
    assert writer.stop({})
    assert [record.kind for record in records_of(tmp_path / "log")] == ["start", "resume", "grant", "stop"]


def test_what_a_failed_sync_left_is_not_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.record.group_commit.RETRY_S", 0.01)
    writer = AuditWriter(opener(tmp_path / "log"), {}, lambda: None)
    writer.start(must_work=True)
    file = tmp_path / "log" / "audit-0000000000000001.jsonl"
    failures: list[int] = []

    def fail(fd: int) -> None:
        failures.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("gpulease.daemon.record.audit.files.os.fdatasync", fail)
        ticket = writer.put(RecordKind.GRANT, {"number": 1})
        wait_until(lambda: len(failures) > 3, "it tries again")
        assert b'"number":1' in file.read_bytes()
        assert not writer.is_durable(ticket)
        assert writer.problem() == "Input/output error"
    wait_until(lambda: writer.is_durable(ticket), "the disk works")
    assert writer.stop({})
    told = [record.kind for record in records_of(tmp_path / "log")]
    # Every try that was written stays, each record of what happened once.
    assert [kind for kind in told if kind != "resume"] == ["start", "grant", "stop"]
    assert writer.figures() == {"waiting": 0, "durable": 2, "dropped": 0}


FULL_DISK = """
import json, resource, sys
from pathlib import Path
from gpulease.daemon.record import group_commit
from gpulease.daemon.record.audit.record_writer import AuditWriter
from gpulease.daemon.record.audit.records import RecordKind
from gpulease.daemon.record.audit.files import AuditLog, LogSettings
from helpers.waiting import wait_until

group_commit.RETRY_S = 0.02
folder, limit, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = LogSettings(folder, folder / "head.json", 1 << 20)
writer = AuditWriter(lambda known: AuditLog(settings, "0" * 32, known), {}, lambda: None)
writer.start(must_work=True)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
tickets = [writer.put(RecordKind.GRANT, {"number": number}) for number in range(count)]
problem = wait_until(writer.problem, "the disk refuses")
assert not writer.is_durable(tickets[-1])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
wait_until(lambda: writer.is_durable(tickets[-1]), "it goes on")
assert writer.problem() == ""
assert writer.stop({})
print(json.dumps(problem))
"""


@pytest.mark.parametrize("limit", [1000, 2000, 2077, 10_000])
def test_a_disk_that_is_full_in_the_middle_of_a_line(tmp_path: Path, limit: int) -> None:
    """Every record is there once, in order, and the log says what happened."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "log"), str(limit), str(GRANTS)]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "File too large"
    records = records_of(tmp_path / "log")
    assert [record.data["number"] for record in records if record.kind == "grant"] == list(range(GRANTS))
    (resume,) = [record for record in records if record.kind == "resume"]
    assert resume.data["problem"] == "File too large"
    assert resume.data["torn"]["size_bytes"] > 0
