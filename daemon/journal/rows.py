"""What is kept, as rows: a kind, a key and a value. Values are JSON, by the names of the fields."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from gpulease.daemon.core import Cause, KeptCard, KeptLease, KeptWarm, LeaseSnapshot, LeaseState
from gpulease.protocol.opcodes import Exclusivity, Waiting

LEASE_ID_BYTES: Final = 16
DRAIN_KEY: Final = b""
"""Of the one row there is of its kind."""

_LATER: Final[dict[str, object]] = {"submit_bytes": 0, "orphan_ms": 0}
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


class Change(NamedTuple):
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


_text: Final = json.JSONEncoder().encode


def encode(content: Kept) -> bytes:
    """A row's value."""
    if isinstance(content, KeptLease):
        return _lease(content)
    if isinstance(content, LeaseSnapshot):
        return _tombstone(content)
    if isinstance(content, int):
        return b"%d" % content
    return json.dumps({name: getattr(content, name) for name in content.__slots__}, separators=(",", ":")).encode()


def _lease(kept: KeptLease) -> bytes:
    """By hand, as the next: most of what is written, and json takes five times as long."""
    return (
        f'{{"lease_id":{kept.lease_id},"tenant":{_text(kept.tenant)},"card_uuid":{_text(kept.card_uuid)},'
        f'"size_bytes":{kept.size_bytes},"charge_bytes":{kept.charge_bytes},"exclusivity":{kept.exclusivity:d},'
        f'"generation":{kept.generation},"state":{_member(kept.state)},"cause":{_member(kept.cause)},'
        f'"reason":{_text(kept.reason)},"fault":{_text(kept.fault)},"created_ns":{kept.created_ns},'
        f'"deadline_ns":{_number(kept.deadline_ns)},"ended_ns":{_number(kept.ended_ns)},"ttl_ms":{kept.ttl_ms},'
        f'"max_kernel_ms":{kept.max_kernel_ms},"waiting":{_number(kept.waiting)},"worker_pid":{kept.worker_pid}'
        f"{_later('submit_bytes', kept.submit_bytes)}{_later('orphan_ms', kept.orphan_ms)}}}"
    ).encode()


def _tombstone(lease: LeaseSnapshot) -> bytes:
    return (
        f'{{"lease_id":{lease.lease_id},"tenant":{_text(lease.tenant)},"card_uuid":{_text(lease.card_uuid)},'
        f'"size_bytes":{lease.size_bytes},"exclusivity":{lease.exclusivity:d},"generation":{lease.generation},'
        f'"state":{_member(lease.state)},"cause":{_member(lease.cause)},"reason":{_text(lease.reason)},'
        f'"fault":{_text(lease.fault)},"created_ns":{lease.created_ns},"deadline_ns":{_number(lease.deadline_ns)},'
        f'"ended_ns":{_number(lease.ended_ns)},"ttl_ms":{lease.ttl_ms}}}'
    ).encode()


def _later(name: str, number: int) -> str:
    return "" if number == _LATER[name] else f',"{name}":{number}'


def _number(number: int | None) -> str:
    return "null" if number is None else f"{number:d}"


def _member(member: Enum | None) -> str:
    return "null" if member is None else _text(member.value)


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


def _read(shape: type[Shape], value: bytes) -> Shape:
    members = json.loads(value)
    names = set(shape.__annotations__)
    if not isinstance(members, dict) or not names - _LATER.keys() <= members.keys() <= names:
        raise ValueError(f"it is no {shape.__name__}")
    for name, kind in _ENUMS.items():
        if members.get(name) is not None:
            members[name] = kind(members[name])
    return shape(**members)
