"""The reader of every value that a fleet's processes find in etcd: a record, or why it can't be read.

What lies in etcd is foreign: of a daemon of another version, of whoever has one node's certificate, of an operator's
slip. Each kind of record declares its members with their types and bounds, and msgspec checks them while it parses, so
nothing is made of a number or a text that the declaration does not allow. A value that can't be read is as good as none
to whoever wanted it; who counts and reports it is `UnreadableRecords`.
"""

from functools import cache
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

MAX_RECORD_BYTES: Final = 64 << 10
"""Largest record that is read. A node with 16 cards has 2 KiB. Stops a foreign writer from filling memory."""

MAX_TEXT_CHARS: Final = 1024
"""Longest text in a record. Stops texts that no message to tenants or to the broker could carry."""

MAX_NUMBER: Final = (1 << 63) - 1
"""Largest number in a record: etcd's own revisions, times in nanoseconds and every message have 64 bits."""

MAX_QUOTA_BYTES: Final = 1 << 60
"""Most bytes of a quota, an exbibyte. Budgets move between shards, and none leaves the range of numbers by that."""

MAX_REASON_CHARS: Final = 160
"""Longest reason for which a value can't be read. It goes into a log and into health."""

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
QuotaBytes = Annotated[int, Meta(ge=0, le=MAX_QUOTA_BYTES)]
LeaseText = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""A lease's id, in 32 hexadecimal digits."""

R = TypeVar("R")


class Unreadable(NamedTuple):
    """A value that is none of a fleet's records; `reason` says why in a clause."""

    reason: str


def read_record(kind: type[R], value: bytes) -> R | Unreadable:
    """Read a value as JSON of that kind. Raises nothing, whatever the bytes are.

    Members that the kind does not have are ignored, so that nodes of two versions make one fleet.
    """
    if len(value) > MAX_RECORD_BYTES:
        return Unreadable(f"it has {len(value)} bytes; a record has at most {MAX_RECORD_BYTES}")
    try:
        record: R = _decoder(kind).decode(value)  # type: ignore[arg-type]  # types are hashable
    except Exception as error:
        # Not a list of kinds: a parser of foreign bytes fails in ways that nobody has listed.
        return Unreadable(str(error)[:MAX_REASON_CHARS])
    return record


@cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)
