"""What people read of a log."""

from typing import Any

import pytest

from gpulease.daemon.record.audit.log_reader import found_text


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
