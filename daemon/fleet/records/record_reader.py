"""Reads records from etcd's values. A value that is not a valid record is unreadable.

A daemon of another version, anyone with a node's certificate or an operator may have written a value. So each kind of
record declares types and limits, which msgspec checks. Callers treat an unreadable value as absent; `UnreadableRecords`
counts and reports it.
"""

from dataclasses import asdict
from functools import cache
from json import dumps
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar, cast

import msgspec
from msgspec import Meta

MAX_RECORD_BYTES: Final = 64 << 10
"""Maximum bytes of a record. The record of a node with 16 cards has 2 KiB."""

MAX_TEXT_CHARS: Final = 1024
"""Maximum characters of a text in a record, so that it fits into messages."""

MAX_NUMBER: Final = (1 << 63) - 1
"""Largest number in a record. etcd's revisions, times in nanoseconds and all messages have 64 bits."""

MAX_QUOTA_BYTES: Final = 1 << 60
"""Largest quota, an exbibyte, so that sums of a quota's budgets do not exceed MAX_NUMBER."""

MAX_REASON_CHARS: Final = 160
"""Maximum characters of the reason why a value is unreadable, for the log and health reports."""

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
QuotaBytes = Annotated[int, Meta(ge=0, le=MAX_QUOTA_BYTES)]
LeaseText = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""A lease's id, in 32 hexadecimal digits."""

R = TypeVar("R")


class Unreadable(NamedTuple):
    """A value that is not a valid record; `reason` says why in a clause."""

    reason: str


def read_record(kind: type[R], value: bytes) -> R | Unreadable:
    """Read a value as a JSON object of that kind. Raises nothing.

    Unknown members are ignored, so that nodes of two versions can form one fleet.
    """
    if len(value) > MAX_RECORD_BYTES:
        return Unreadable(f"a record must have at most {MAX_RECORD_BYTES} bytes, not {len(value)}")
    try:
        record: R = _decoder(kind).decode(value)  # type: ignore[arg-type]  # types are hashable
    except Exception as error:
        # Catch every exception, because the bytes may be anything.
        return Unreadable(str(error)[:MAX_REASON_CHARS])
    return record


class StoredRecord:
    """The base of the records that are stored as JSON objects."""

    __slots__ = ()

    @classmethod
    def read(cls, value: bytes) -> Self | Unreadable:
        """Read a value as `read_record` does."""
        return read_record(cls, value)

    def encode(self) -> bytes:
        return dumps(asdict(cast(Any, self)), separators=(",", ":")).encode()


@cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)
