"""The vectors are what the code makes, and what they say of it holds."""

import json
from typing import Any

import pytest

from gpulease.daemon.record.audit.log_reader import find_log
from gpulease.daemon.record.audit.usage import UsageSum, Used

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
