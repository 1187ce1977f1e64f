"""Reading records of etcd that must be valid."""

from typing import TypeVar

from gpulease.daemon.fleet.records.record_reader import Unreadable

R = TypeVar("R")


def readable(record: R | Unreadable) -> R:
    """Return what a reader made of a value; fail if it could not read it."""
    assert not isinstance(record, Unreadable), record.reason
    return record
