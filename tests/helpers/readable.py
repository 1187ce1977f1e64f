"""Reads records of etcd that must be valid."""

from typing import TypeVar

from gpulease.daemon.fleet.records.record_reader import Unreadable

R = TypeVar("R")


def readable(record: R | Unreadable) -> R:
    """Return what a reader returned for a value. Fails if it could not read the value."""
    assert not isinstance(record, Unreadable), record.reason
    return record
