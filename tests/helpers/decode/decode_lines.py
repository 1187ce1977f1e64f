"""The lines that a decoder has logged, as fields."""

import pytest


def lines_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    """Return the fields of each line of an event."""
    records = [record.__dict__["gpulease"] for record in caplog.records if "gpulease" in record.__dict__]
    return [fields for name, fields in records if name == event]
