"""Reads the events of a daemon's JSON log."""

import json
from typing import Any, Final

from gpulease.daemon.log.catalogue import LogEvent

Record = dict[str, Any]

COMMON: Final = ["time", "monotonic_ns", "level", "event", "message", "process", "pid"]
"""What every record begins with."""

_FIELDS: Final = {event.value.name: set(event.value.fields) for event in LogEvent}


def records_of(log: str) -> list[Record]:
    """Every line is a record, and each record has what the table of events says, and nothing else."""
    records = [json.loads(line) for line in log.splitlines()]
    for record in records:
        assert list(record)[: len(COMMON)] == COMMON, record
        assert set(record) - set(COMMON) <= _FIELDS[record["event"]], record
    return records


def story_of(log: str, lease_id: int) -> list[Record]:
    return [record for record in records_of(log) if record.get("lease_id") == f"{lease_id:032x}"]
