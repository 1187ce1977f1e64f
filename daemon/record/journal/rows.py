"""What is kept, as rows: a kind, a key and a value. Values are JSON, by the names of the fields.

The table of rows, many rows at a time.

A statement lets go of the interpreter at each step (sqlite3), and has it back when the broker's thread pauses: a commit
of hundreds of statements would last for as long as the broker is busy. So each takes many rows, and gives one at most.

What is in a journal when it is opened, and what the host's restart changes in it.
"""

import json
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from gpulease.daemon.leases import Cause, KeptCard, KeptLease, KeptWarm, LeaseSnapshot, LeaseState, LeaseTerms, Past
from gpulease.protocol.opcodes import Exclusivity, Waiting

LEASE_ID_BYTES: Final = 16
DRAIN_KEY: Final = b""
"""Of the one row there is of its kind."""

_LATER: Final[dict[str, int]] = {"submit_bytes": 0, "orphan_ms": 0}
"""Members that came later, and what it means that there is none: so rows without news are what they were before."""

_LEASE_NAMES: Final = frozenset(KeptLease._fields) - {"terms"} | frozenset(LeaseTerms._fields)
"""Members of a lease's row: its terms lie among the others."""

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
    terms = kept.terms
    return (
        f'{{"lease_id":{kept.lease_id},"tenant":{_text(kept.tenant)},"card_uuid":{_text(kept.card_uuid)},'
        f'"size_bytes":{terms.size_bytes},"charge_bytes":{kept.charge_bytes},"exclusivity":{terms.exclusivity:d},'
        f'"generation":{kept.generation},"state":{_member(kept.state)},"cause":{_member(kept.cause)},'
        f'"reason":{_text(kept.reason)},"fault":{_text(kept.fault)},"created_ns":{kept.created_ns},'
        f'"deadline_ns":{_number(kept.deadline_ns)},"ended_ns":{_number(kept.ended_ns)},"ttl_ms":{terms.ttl_ms},'
        f'"max_kernel_ms":{terms.max_kernel_ms},"waiting":{_number(terms.waiting)},"worker_pid":{kept.worker_pid}'
        f"{_later('submit_bytes', terms.submit_bytes)}{_later('orphan_ms', terms.orphan_ms or 0)}}}"
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
    members = _members(value, _LEASE_NAMES, KeptLease.__name__)
    terms = {name: members.pop(name) for name in LeaseTerms._fields if name in members}
    return KeptLease(terms=LeaseTerms(**{**_LATER, **terms}), **members)


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


Shape = TypeVar("Shape", KeptWarm, KeptCard, KeptRelay, LeaseSnapshot)

_ENUMS: Final[dict[str, Callable[[Any], Enum]]] = {
    "exclusivity": Exclusivity,
    "state": LeaseState,
    "cause": Cause,
    "waiting": Waiting,
}


def _read(shape: type[Shape], value: bytes) -> Shape:
    return shape(**_members(value, frozenset(shape.__annotations__), shape.__name__))


def _members(value: bytes, names: frozenset[str], shape: str) -> dict[str, Any]:
    """A row's members by name, enumerations read; `names`: those it may have."""
    members = json.loads(value)
    if not isinstance(members, dict) or not names - _LATER.keys() <= members.keys() <= names:
        raise ValueError(f"it is no {shape}")
    for name, kind in _ENUMS.items():
        if members.get(name) is not None:
            members[name] = kind(members[name])
    return members


SCHEMA: Final = (
    "CREATE TABLE entry (kind INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (kind, key))"
    " WITHOUT ROWID"
)

MAX_ROWS: Final = 256
"""In one statement, a power of two: 768 parameters, of which any SQLite takes 999 (sqlite.org/limits.html)."""

_Part = TypeVar("_Part")


def put(connection: sqlite3.Connection, changes: Iterable[Change]) -> int:
    """Write changes in a transaction, of each row the last; by how much the sum over all rows changes.

    Raises sqlite3.Error, or ValueError if what is there was not written here.
    """
    latest = {(change.kind, change.key): change for change in changes}
    keys: defaultdict[RowKind, list[bytes]] = defaultdict(list)
    gone: defaultdict[RowKind, list[bytes]] = defaultdict(list)
    there: list[tuple[int, bytes, bytes]] = []
    for (kind, key), change in latest.items():
        keys[kind].append(key)
        if (value := change.value()) is None:
            gone[kind].append(key)
        else:
            there.append((int(kind), key, value))
    more = -sum(digest_of(kind, key, value) for kind, key, value in _present(connection, keys))
    for kind, some in gone.items():
        for part in _parts(some):
            connection.execute(_delete(len(part)), (int(kind), *part))
    for rows in _parts(there):
        connection.execute(_insert(len(rows)), [value for row in rows for value in row])
    return more + sum(digest_of(*row) for row in there)


def _present(
    connection: sqlite3.Connection, keys: defaultdict[RowKind, list[bytes]]
) -> Iterator[tuple[int, bytes, bytes]]:
    """Those of these rows that there are."""
    for kind, some in keys.items():
        for part in _parts(some):
            ((text,),) = connection.execute(_select(len(part)), (int(kind), *part))
            found = [bytes.fromhex(piece) for piece in text.split(" ")] if text is not None else []
            for key, value in zip(found[::2], found[1::2], strict=True):
                yield int(kind), key, value


def _parts(rows: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """Powers of two of them, so that few statements are ever compiled: the last row fills up, which changes nothing."""
    for start in range(0, len(rows), MAX_ROWS):
        part = rows[start : start + MAX_ROWS]
        missing = (1 << (len(part) - 1).bit_length()) - len(part)
        yield [*part, *[part[-1]] * missing]


@cache
def _select(count: int) -> str:
    return (
        "SELECT group_concat(hex(key) || ' ' || hex(value), ' ') FROM entry"
        f" WHERE kind = ? AND key IN ({_places('?', count)})"
    )


@cache
def _delete(count: int) -> str:
    return f"DELETE FROM entry WHERE kind = ? AND key IN ({_places('?', count)})"


@cache
def _insert(count: int) -> str:
    return f"INSERT OR REPLACE INTO entry VALUES {_places('(?, ?, ?)', count)}"


def _places(one: str, count: int) -> str:
    return ", ".join([one] * count)


Spent = tuple[int, bytes, int]
"""A token that was used, or revoked: its lease, its nonce, and until when no token of that nonce can be valid
(monotonic ms)."""


@dataclass(slots=True)
class Contents:
    """The rows, read.

    Attributes:
        drain_ns: When a drain ends what is left; None if the node is not drained.
        next_tombstone: The place of the tombstone that comes next.
    """

    leases: list[KeptLease] = field(default_factory=list)
    warm: list[KeptWarm] = field(default_factory=list)
    tombstones: list[LeaseSnapshot] = field(default_factory=list)
    revoked: "array[int]" = field(default_factory=lambda: array("Q"))
    cleared: "array[int]" = field(default_factory=lambda: array("Q"))
    spent: list[Spent] = field(default_factory=list)
    revoked_tokens: list[Spent] = field(default_factory=list)
    cards: dict[str, KeptCard] = field(default_factory=dict)
    drain_ns: int | None = None
    relays: dict[int, KeptRelay] = field(default_factory=dict)
    next_tombstone: int = 0

    def take(self, kind: int, key: bytes, value: bytes) -> None:
        """One row, in the order of kinds and keys. Raises ValueError, KeyError or TypeError if it makes no sense."""
        match RowKind(kind):
            case RowKind.REVOKED:
                self.revoked.append(int.from_bytes(key, "big"))
            case RowKind.CLEARED:
                self.cleared.append(int.from_bytes(key, "big"))
            case RowKind.LEASE:
                self.leases.append(read_lease(value))
            case RowKind.WARM:
                self.warm.append(read_warm(value))
            case RowKind.TOMBSTONE:
                self.tombstones.append(read_tombstone(value))
                self.next_tombstone = int.from_bytes(key, "big") + 1
            case RowKind.SPENT:
                self.spent.append(_spent(key, value))
            case RowKind.REVOKED_TOKEN:
                self.revoked_tokens.append(_spent(key, value))
            case RowKind.CARD:
                card = read_card(value)
                self.cards[card.uuid] = card
            case RowKind.DRAIN:
                self.drain_ns = int(value)
            case RowKind.RELAY:
                relay = read_relay(value)
                self.relays[relay.pid] = relay

    def past(self) -> Past:
        """What needs no doing."""
        return Past(tuple(self.tombstones), self.revoked, self.cleared, tuple(self.warm), self.drain_ns)

    def cross_boot(self) -> list[Change]:
        """The host was restarted: what that ended, in these contents and as changes to the rows.

        Nothing of another boot runs, and its times mean nothing now; what is fenced stays so until an operator says
        otherwise, and so does a drain: nothing is left for it to end. Tokens of another boot verify with no key.
        """
        changes: list[Change] = []
        for lease in self.leases:
            changes.append(Change(RowKind.LEASE, lease_key(lease.lease_id), None))
            if lease.state is LeaseState.FENCED:
                deadline_ns = None if lease.deadline_ns is None else 0
                fenced = lease._replace(created_ns=0, deadline_ns=deadline_ns, ended_ns=0, worker_pid=0)
                changes[-1] = changes[-1]._replace(content=fenced)
            else:
                self.tombstones.append(_ended_with_host(lease))
                changes.append(Change(RowKind.TOMBSTONE, number_key(self.next_tombstone), self.tombstones[-1]))
                self.next_tombstone += 1
        changes += [Change(RowKind.CARD, uuid.encode(), None) for uuid in self.cards]
        changes += [Change(RowKind.RELAY, number_key(pid), None) for pid in self.relays]
        for kind, tokens in ((RowKind.SPENT, self.spent), (RowKind.REVOKED_TOKEN, self.revoked_tokens)):
            changes += [Change(kind, spent_key(lease_id, nonce), None) for lease_id, nonce, _ in tokens]
            tokens.clear()
        if self.drain_ns is not None:
            self.drain_ns = 0
            changes.append(Change(RowKind.DRAIN, DRAIN_KEY, self.drain_ns))
        self.leases = [c.content for c in changes if isinstance(c.content, KeptLease)]
        self.cards.clear()
        self.relays.clear()
        return changes


def _spent(key: bytes, value: bytes) -> Spent:
    return int.from_bytes(key[:LEASE_ID_BYTES], "big"), key[LEASE_ID_BYTES:], int(value)


def _ended_with_host(lease: KeptLease) -> LeaseSnapshot:
    return LeaseSnapshot(
        lease.lease_id,
        lease.tenant,
        lease.card_uuid,
        lease.terms.size_bytes,
        lease.terms.exclusivity,
        lease.generation,
        LeaseState.TORNDOWN,
        lease.cause or Cause.WORKER_DIED,
        lease.reason or "the host was restarted",
        lease.fault,
        created_ns=0,
        deadline_ns=0,
        ended_ns=0,
        ttl_ms=lease.terms.ttl_ms,
    )
