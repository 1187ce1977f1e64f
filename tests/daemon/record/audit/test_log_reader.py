"""What people read of a log."""

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

from gpulease.daemon.record.audit.log_reader import found_text
from helpers.audit_log import gpulease_audit

NOBODY: Final = 65534


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"torn": {"offset": 3919, "size_bytes": 177, "sha256": "6b"}},
            "its last 177 bytes, from byte 3919 of its newest file, are not a complete line",
        ),
        ({"head": "it is missing", "unanchored": 4}, "its head: it is missing; 4 records are after its head"),
        (
            {"lost": {"first": 5, "last": 7}, "edited": 7},
            "records 5 to 7 are missing; record 7 was changed after it was written",
        ),
    ],
)
def test_what_was_found_is_failures_as_sentences(found: dict[str, Any], said: str) -> None:
    assert found_text(found) == said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("command", ["verify", "show", "usage", "head"])
@pytest.mark.parametrize("folder_mode", [0o711, 0o700])
def test_a_log_of_another_user_has_the_status_of_a_log_that_can_not_be_read(command: str, folder_mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        log = Path(name) / "audit-0000000000000001.jsonl"
        log.write_bytes(b"")
        log.chmod(0o600)
        Path(name).chmod(folder_mode)
        user = os.geteuid()
        os.seteuid(NOBODY)
        try:
            # The log's head is a file, too: `head` reads no other.
            done = gpulease_audit(command, log, *(("--head-file", log) if command == "head" else ()))
        finally:
            os.seteuid(user)
    assert (done.exit_code, done.stdout) == (66, "")
    assert done.stderr == f"gpulease audit: {log}: Permission denied\n"
