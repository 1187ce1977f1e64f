"""Reads the events of a daemon's JSON log."""

import json
from typing import Any, Final

from gpulease.daemon.log.catalogue import LogEvent

Record = dict[str, Any]

COMMON: Final = ["time", "monotonic_ns", "level", "event", "message", "process", "pid"]
"""The members with which every record begins."""

_FIELDS: Final = {event.value.name: set(event.value.fields) for event in LogEvent}


def records_of(log: str) -> list[Record]:
    """Return the records of a log. Fails if a line lacks a common member, or has one that its event's row lacks."""
    records = [json.loads(line) for line in log.splitlines()]
    for record in records:
        assert list(record)[: len(COMMON)] == COMMON, record
        assert set(record) - set(COMMON) <= _FIELDS[record["event"]], record
    return records


def story_of(log: str, lease_id: int) -> list[Record]:
    return [record for record in records_of(log) if record.get("lease_id") == f"{lease_id:032x}"]
