"""The vectors are what the code makes, and what they say of it holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.record.audit.log_reader import find_log
from gpulease.daemon.record.audit.usage import UsageSum, Used
from helpers.audit_log import gpulease_audit

from .chains import verdict_of
from .generate_vectors import FOLDER, documents

WHOLE = find_log([FOLDER / "whole"])
FILES = {path.name: path.read_bytes() for path in WHOLE.files}


def test_the_files_are_what_the_code_makes() -> None:
    expected = documents()
    assert sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.json*")) == sorted(expected)
    for path, data in expected.items():
        assert (FOLDER / path).read_bytes() == data, path


def test_the_whole_one_is_whole() -> None:
    assert WHOLE.head is not None
    verdict = verdict_of(FILES, WHOLE.head.end)
    assert verdict.is_whole, verdict.findings
    assert (verdict.records, len(verdict.notes)) == (11, 1)


def test_its_sums() -> None:
    total = UsageSum()
    for record in WHOLE.records():
        total.take(record)
    assert total.finish(WHOLE.head) == {
        "uid:1000": Used(1, 2_000_000, 2_000_000_000),
        "uid:1001": Used(1, 9_000_000, 9_000_000 << 20),
    }


@pytest.mark.parametrize("case", json.loads((FOLDER / "broken.json").read_bytes()), ids=lambda case: str(case["what"]))
def test_a_broken_one_shows_where(case: dict[str, Any]) -> None:
    assert WHOLE.head is not None
    found = verdict_of(FILES | {case["file"]: bytes.fromhex(case["hex"])}, WHOLE.head.end).findings[0]
    assert {"file": found.file, "offset_bytes": found.offset_bytes, "seq": found.seq} == case["found"]


def test_what_is_not_a_record_is_not_skipped_silently(tmp_path: Path) -> None:
    whole = gpulease_audit("show", FOLDER / "whole")
    assert (whole.exit_code, whole.stdout.count("\n"), whole.stderr) == (0, 11, "")
    # A part of a log has only records.
    last = gpulease_audit("show", WHOLE.files[-1])
    assert (last.exit_code, last.stderr) == (0, "")
    assert last.stdout
    assert whole.stdout.endswith(last.stdout)
    other = tmp_path / "other"
    other.write_text("a file\nof another kind\n")
    done = gpulease_audit("show", other)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == ("gpulease audit: 1 place has bytes that are not a record; see `gpulease audit verify`\n")
    # A piece of a line at the end is what a daemon is writing.
    other.write_bytes(WHOLE.files[-1].read_bytes()[:-5])
    assert gpulease_audit("show", other).exit_code == 0
