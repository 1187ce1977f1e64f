"""What is kept, as rows: a kind, a key and a value. Values are JSON, by the names of the fields."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeVar

from gpulease.daemon.core import Cause, KeptCard, KeptLease, KeptWarm, LeaseSnapshot, LeaseState
from gpulease.protocol.opcodes import Exclusivity, Waiting

LEASE_ID_BYTES: Final = 16
DRAIN_KEY: Final = b""
"""Of the one row there is of its kind."""

_LATER: Final[dict[str, object]] = {"submit_bytes": 0}
"""Members that came later, and what it means that there is none: so rows without news are what they were before."""

_WARM_ID_BYTES: Final = 24
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class KeptRelay:
    """A remote tenant's relay, which lives on for as long as its session's worker does.

    Attributes:
        started_ticks: When the process was started: see `processes.started_ticks`.
        tenant: Whose it is.
        serial: Of the certificate that was shown, in hexadecimal.
    """

    pid: int
    started_ticks: int
    tenant: str
    serial: str


Kept = KeptLease | KeptWarm | KeptCard | KeptRelay | LeaseSnapshot | int


class RowKind(IntEnum):
    """What a row tells of. The numbers are the file's format."""

    LEASE = 1
    WARM = 2
    TOMBSTONE = 3
    REVOKED = 4
    SPENT = 5
    CARD = 6
    DRAIN = 7
    RELAY = 8
    REVOKED_TOKEN = 9
    CLEARED = 10


@dataclass(frozen=True, slots=True)
class Change:
    """One row's new content, or that it is gone (None)."""

    kind: RowKind
    key: bytes
    content: Kept | None

    def value(self) -> bytes | None:
        """The row's value, None if it is to be gone."""
        return None if self.content is None else encode(self.content)


def lease_key(lease_id: int) -> bytes:
    """Of a lease's row."""
    return lease_id.to_bytes(LEASE_ID_BYTES, "big")


def warm_key(warm_id: int) -> bytes:
    """Of a warm context's row: its numbers begin where those of leases end."""
    return warm_id.to_bytes(_WARM_ID_BYTES, "big")


def number_key(number: int) -> bytes:
    """Of a tombstone's row, by its place among them, a revoked or cleared id's, by its mark, a relay's, by its pid."""
    return number.to_bytes(_NUMBER_BYTES, "big")


def spent_key(lease_id: int, nonce: bytes) -> bytes:
    """Of the row of a token that was used, or revoked."""
    return lease_key(lease_id) + nonce


def digest_of(kind: int, key: bytes, value: bytes) -> int:
    """What a row adds to the sum over all of them (mod 2^128): a row changed, lost, doubled or forged shows in it."""
    data = b"%d %d %b%b" % (kind, len(key), key, value)
    return int.from_bytes(blake2b(data, digest_size=16).digest(), "big")


def encode(content: Kept) -> bytes:
    """A row's value."""
    if isinstance(content, int):
        return b"%d" % content
    values = {item: getattr(content, item) for item in content.__slots__}
    for name, meaning in _LATER.items():
        if values.get(name) == meaning:
            del values[name]
    return _encode(values).encode()


def read_lease(value: bytes) -> KeptLease:
    """Raises ValueError, KeyError or TypeError for what `encode` did not write; so do the other readers."""
    return _read(KeptLease, value)


def read_tombstone(value: bytes) -> LeaseSnapshot:
    """As above."""
    return _read(LeaseSnapshot, value)


def read_warm(value: bytes) -> KeptWarm:
    """As above."""
    return _read(KeptWarm, value)


def read_card(value: bytes) -> KeptCard:
    """As above."""
    return _read(KeptCard, value)


def read_relay(value: bytes) -> KeptRelay:
    """As above."""
    return _read(KeptRelay, value)


Shape = TypeVar("Shape", KeptLease, KeptWarm, KeptCard, KeptRelay, LeaseSnapshot)

_ENUMS: Final[dict[str, Callable[[Any], Enum]]] = {
    "exclusivity": Exclusivity,
    "state": LeaseState,
    "cause": Cause,
    "waiting": Waiting,
}


def _plain(value: Enum) -> Any:
    return value.value


_encode: Final = partial(json.dumps, default=_plain, separators=(",", ":"))


def _read(shape: type[Shape], value: bytes) -> Shape:
    members = json.loads(value)
    names = {item.name for item in fields(shape)}
    if not isinstance(members, dict) or not names - _LATER.keys() <= members.keys() <= names:
        raise ValueError(f"it is no {shape.__name__}")
    for name, kind in _ENUMS.items():
        if members.get(name) is not None:
            members[name] = kind(members[name])
    return shape(**members)
