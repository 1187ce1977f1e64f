"""Encodes, writes and reads the journal's rows.

A row has a kind, a key and a value. The value is a JSON object with the fields' names as keys.
"""

import json
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from enum import Enum, IntEnum
from functools import cache, lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState, LeaseTerms, RegionState
from gpulease.daemon.leases.persisted import CardRow, LeaseRow, RecoveredState, RegionRow, WarmRow
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_options import KEPT_OPTIONS, ChoiceOption, JournalRow

LEASE_ID_BYTES: Final = 16
DRAIN_KEY: Final = b""
"""The key of the only row about a drain."""

MEMBERSHIP_KEY: Final = b""
"""The key of the only row about the node's membership in its fleet."""

_MEMBERS_WITH_OPTION: Final[dict[str, dict[str, object]]] = {
    "regions_required": {"region_number": 0, "parent_id": 0},
    "name": {"epoch": 0},
    "request_id": {"fleet_bytes": 0},
    "park_idle_ms": {"parked_ns": 0, "wait_ms": 0, "is_cold": False, "misfit": ""},
}
"""Members of the row that belong to a lease option, and their values in rows that lack them."""

_LATER_OPTIONS: Final[dict[str, Any]] = {
    name: option.before for name, option in KEPT_OPTIONS.items() if not isinstance(option.before, JournalRow)
}

_LATER_MEMBERS: Final[dict[str, object]] = {
    **{
        member: before
        for name, value in _LATER_OPTIONS.items()
        for member, before in ({name: value} | _MEMBERS_WITH_OPTION.get(name, {})).items()
    },
    # Members of memberships and other rows that belong to no option.
    "epoch_base": 0,
    "is_restored": False,
    "beat": 0,
    "run": "",
    "entered": "",
    "folder": "",
}
"""Members that the first version did not have, and their default values. A row leaves out a member with its default
value.
"""

_TERMS: Final = frozenset(item.name for item in fields(LeaseTerms))

_LEASE_NAMES: Final = frozenset(LeaseRow._fields) - {"terms"} | _TERMS
"""Names of the members of a lease's row, its terms included."""

_LATER_OF_LEASE: Final = {name: before for name, before in _LATER_MEMBERS.items() if name in _LEASE_NAMES}
"""The later members of a lease's row, in order."""

_later_values = attrgetter(*(f"terms.{name}" if name in _TERMS else name for name in _LATER_OF_LEASE))

_WARM_ID_BYTES: Final = 24
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class RelayRow:
    """A remote tenant's relay process, which runs as long as the worker of its session.

    Attributes:
        started_ticks: When the process was started: `processes.started_ticks`.
        tenant: The tenant's name.
        serial: The serial number of the tenant's certificate, in hexadecimal.
    """

    pid: int
    started_ticks: int
    tenant: str
    serial: str


@dataclass(frozen=True, slots=True)
class MembershipRow:
    """A node's membership in its fleet, with which the next daemon continues.

    Attributes:
        incarnation: The create revision of the node's record in etcd.
        cluster_id: etcd's number of its cluster.
        generation: Text of the store's generation key.
        revision: A revision that the store had reached.
        epoch_base: A claim's epoch is this number plus the claim's revision.
        is_restored: Whether the store was found to have been restored to an earlier state.
        beat: The number of the last heartbeat that was sent.
        run: The instance of the fleet process that sent it.
        entered: The nonce of the record with which that process joined.
        folder: Device and inode of the journal's folder, which differ in a copy.
    """

    incarnation: int = 0
    cluster_id: int = 0
    generation: str = ""
    revision: int = 0
    epoch_base: int = 0
    is_restored: bool = False
    beat: int = 0
    run: str = ""
    entered: str = ""
    folder: str = ""


Kept = MembershipRow | LeaseRow | RegionRow | WarmRow | CardRow | RelayRow | LeaseSnapshot | int


class RowKind(IntEnum):
    """The kind of a row. The numbers are the file's format."""

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
    REGION = 11
    REGION_TOMBSTONE = 12
    EPOCH = 13
    MEMBERSHIP = 14
    CARD_DRAIN = 15


class Change(NamedTuple):
    """A row's new content, or None to remove the row."""

    kind: RowKind
    key: bytes
    content: Kept | None

    def value(self) -> bytes | None:
        """Encode the content; None removes the row."""
        return None if self.content is None else encode(self.content)


def lease_key(lease_id: int) -> bytes:
    """Return the key of a lease's row, or of a region's."""
    # In keys, numbers are big-endian. SQLite compares blobs byte by byte, so rows are sorted by number.
    return lease_id.to_bytes(LEASE_ID_BYTES, "big")


def warm_key(warm_id: int) -> bytes:
    """Return the key of a warm context's row."""
    return warm_id.to_bytes(_WARM_ID_BYTES, "big")


def number_key(number: int) -> bytes:
    """Return the key for a tombstone's number, the mark of a revoked or cleared id, or a relay's pid."""
    return number.to_bytes(_NUMBER_BYTES, "big")


def spent_key(lease_id: int, nonce: bytes) -> bytes:
    """Return the key of a token that was used or revoked."""
    return lease_key(lease_id) + nonce


def digest_of(kind: int, key: bytes, value: bytes) -> int:
    """Return a row's digest. The sum of all rows' digests (mod 2^128) reveals changed, lost and forged rows."""
    # With the key's length, a byte that moves between key and value changes the digest.
    data = b"%d %d %b%b" % (kind, len(key), key, value)
    return int.from_bytes(blake2b(data, digest_size=16).digest(), "big")


KEPT_TEXTS: Final = 1024
"""Maximum number of encoded texts in the cache. Most rows have only names of tenants and cards, states and causes."""


@lru_cache(maxsize=KEPT_TEXTS)
def _text(text: str) -> str:
    return json.dumps(text)


def encode(content: Kept) -> bytes:
    # Check the most frequent kinds first.
    if isinstance(content, LeaseRow):
        return _lease(content)
    if isinstance(content, LeaseSnapshot):
        return _tombstone(content)
    if isinstance(content, RegionRow):
        cause = None if content.cause is None else content.cause.value
        members = content._asdict() | {"state": content.state.value, "cause": cause}
        return json.dumps(members, separators=(",", ":")).encode()
    if isinstance(content, int):
        return b"%d" % content
    return json.dumps({name: getattr(content, name) for name in content.__slots__}, separators=(",", ":")).encode()


def _lease(row: LeaseRow) -> bytes:
    """Encode without `json`, which takes five times as long. Most rows are leases and tombstones."""
    # Members of the first version come first. Later members follow if they differ from their defaults.
    terms = row.terms
    return (
        f'{{"lease_id":{row.lease_id},"tenant":{_text(row.tenant)},"card_uuid":{_text(row.card_uuid)},'
        f'"size_bytes":{terms.size_bytes},"charge_bytes":{row.charge_bytes},"exclusivity":{terms.exclusivity:d},'
        f'"generation":{row.generation},"state":{_member(row.state)},"cause":{_member(row.cause)},'
        f'"reason":{_text(row.reason)},"fault":{_text(row.fault)},"created_ns":{row.created_ns},'
        f'"deadline_ns":{_number(row.deadline_ns)},"ended_ns":{_number(row.ended_ns)},"ttl_ms":{terms.ttl_ms},'
        f'"max_kernel_ms":{terms.max_kernel_ms},"waiting":{_number(terms.waiting)},"worker_pid":{row.worker_pid}'
        f"{_later_members(_later_values(row))}}}"
    ).encode()


@lru_cache(maxsize=KEPT_TEXTS)
def _later_members(values: tuple[Any, ...]) -> str:
    """Encode the later members of a lease's row. Results are cached: a program's leases have the same options."""
    return "".join(map(_later, _LATER_OF_LEASE, values))


def _tombstone(lease: LeaseSnapshot) -> bytes:
    # The form is that of `_lease` without the terms.
    return (
        f'{{"lease_id":{lease.lease_id},"tenant":{_text(lease.tenant)},"card_uuid":{_text(lease.card_uuid)},'
        f'"size_bytes":{lease.size_bytes},"exclusivity":{lease.exclusivity:d},"generation":{lease.generation},'
        f'"state":{_member(lease.state)},"cause":{_member(lease.cause)},"reason":{_text(lease.reason)},'
        f'"fault":{_text(lease.fault)},"created_ns":{lease.created_ns},"deadline_ns":{_number(lease.deadline_ns)},'
        f'"ended_ns":{_number(lease.ended_ns)},"ttl_ms":{lease.ttl_ms}{_later("parent_id", lease.parent_id)}'
        f"{_later('name', lease.name)}{_later('epoch', lease.epoch)}{_later('fleet_bytes', lease.fleet_bytes)}}}"
    ).encode()


def _later(name: str, value: int | str | None) -> str:
    # Only `orphan_ms` may be None, for a lease that was never placed.
    return "" if value is None or value == _LATER_MEMBERS[name] else f',"{name}":{json.dumps(value)}'


def _number(number: int | None) -> str:
    return "null" if number is None else f"{number:d}"


@cache
def _member(member: Enum | None) -> str:
    return "null" if member is None else _text(member.value)


def read_lease(value: bytes) -> LeaseRow:
    """Read a lease. Raises ValueError, KeyError or TypeError for bytes that `encode` did not write."""
    # The terms are a separate object in `LeaseRow`, but not in the row. Options that the row lacks get their defaults.
    members = _members(value, _LEASE_NAMES, LeaseRow.__name__)
    terms = {name: members.pop(name) for name in _TERMS if name in members}
    return LeaseRow(terms=LeaseTerms(**(_LATER_OPTIONS | terms)), **members)


def read_region(value: bytes) -> RegionRow:
    """Read a region. Raises the errors of `read_lease`."""
    return RegionRow(**_members(value, frozenset(RegionRow._fields), RegionRow.__name__, _REGION_ENUMS))


def read_tombstone(value: bytes) -> LeaseSnapshot:
    """Read a tombstone. Raises the errors of `read_lease`."""
    return _read(LeaseSnapshot, value)


Shape = TypeVar("Shape", MembershipRow, WarmRow, CardRow, RelayRow, LeaseSnapshot)

_ENUMS: Final[dict[str, Callable[[Any], Enum]]] = {
    "state": LeaseState,
    "cause": Cause,
    **{name: option.kind for name, option in KEPT_OPTIONS.items() if isinstance(option, ChoiceOption)},
}
_REGION_ENUMS: Final[dict[str, Callable[[Any], Enum]]] = {"state": RegionState, "cause": Cause}


def _read(shape: type[Shape], value: bytes) -> Shape:
    return shape(**_members(value, frozenset(shape.__annotations__), shape.__name__))


def _members(
    value: bytes, names: frozenset[str], shape: str, enums: Mapping[str, Callable[[Any], Enum]] = _ENUMS
) -> dict[str, Any]:
    """Read a row's members by name, and convert its enumerations. `names` has the members that it may have."""
    members = json.loads(value)
    # A valid row has all members of the first version, and no unknown member.
    if not isinstance(members, dict) or not names - _LATER_MEMBERS.keys() <= members.keys() <= names:
        raise ValueError(f"it must be a {shape}")
    # An unknown state or cause raises ValueError.
    for name, kind in enums.items():
        if members.get(name) is not None:
            members[name] = kind(members[name])
    return members


SCHEMA: Final = (
    "CREATE TABLE entry (kind INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (kind, key))"
    " WITHOUT ROWID"
)

MAX_ROWS: Final = 256
"""Maximum number of rows in one statement, a power of two. Every SQLite accepts at least 999 parameters
(sqlite.org/limits.html). This many rows have 768."""

_COLUMNS: Final = 3
"""Number of values of a row: kind, key and value."""

_Part = TypeVar("_Part")


_REWRITTEN: Final = frozenset({RowKind.LEASE, RowKind.REGION})
"""Kinds of rows that change after they were written. There are about as many of them as live leases."""

RowDigests = dict[tuple[RowKind, bytes], int]
"""The digests of rows by kind and key."""


class PutResult(NamedTuple):
    """The result of `put`.

    Attributes:
        sum_change: The change of the sum of all rows' digests.
        digests: The digests of all rows of _REWRITTEN that were written.
        removed: Rows with earlier digests that no longer exist.
    """

    sum_change: int
    digests: RowDigests
    removed: list[tuple[RowKind, bytes]]


def put(connection: sqlite3.Connection, changes: Iterable[Change], digests: RowDigests) -> PutResult:
    """Write the last change of each row, within a transaction.

    `digests` has the digests of rows as they are now. A row without a digest there is read from the database.

    Each statement handles many rows and returns at most one. sqlite3 releases the interpreter lock at each step of a
    statement, and gets it again only when the broker's thread pauses. So hundreds of steps would take as long as the
    broker is busy.

    Raises sqlite3.Error, or ValueError if an existing row was not written by this code.
    """
    # A row may change several times before a commit. Only its last change is written.
    latest = {(change.kind, change.key): change for change in changes}
    keys: defaultdict[RowKind, list[bytes]] = defaultdict(list)
    deleted_keys: defaultdict[RowKind, list[bytes]] = defaultdict(list)
    put_params: list[int | bytes] = []
    digest_change, written, dropped = 0, RowDigests(), []
    # Divide the changes into rows to delete and rows to write. In both cases, subtract the old row's digest from the
    # sum.
    for row, change in latest.items():
        kind, key = row
        if (digest := digests.get(row)) is None:
            keys[kind].append(key)
        else:
            digest_change -= digest
        if (value := change.value()) is None:
            deleted_keys[kind].append(key)
            if digest is not None:
                dropped.append(row)
        else:
            put_params += (int(kind), key, value)
            digest = digest_of(kind, key, value)
            digest_change += digest
            if kind in _REWRITTEN:
                written[row] = digest
    digest_change -= sum(digest_of(kind, key, value) for kind, key, value in _present(connection, keys))
    # Use one statement for many rows of a kind.
    for kind, kind_keys in deleted_keys.items():
        for part in _parts(kind_keys, 1):
            connection.execute(_delete(len(part)), (int(kind), *part))
    for rows in _parts(put_params, _COLUMNS):
        connection.execute(_insert(len(rows) // _COLUMNS), rows)
    return PutResult(digest_change, written, dropped)


def _present(
    connection: sqlite3.Connection, keys: defaultdict[RowKind, list[bytes]]
) -> Iterator[tuple[int, bytes, bytes]]:
    for kind, kind_keys in keys.items():
        for part in _parts(kind_keys, 1):
            # Read all values as one row of text, because sqlite3 releases the interpreter lock for each row.
            ((text,),) = connection.execute(_select(len(part)), (int(kind), *part))
            values = [bytes.fromhex(piece) for piece in text.split(" ")] if text is not None else []
            for key, value in zip(values[::2], values[1::2], strict=True):
                yield int(kind), key, value


def _parts(rows: list[_Part], width: int) -> Iterator[list[_Part]]:
    """Split rows of `width` values into parts of 1, 2, 4, ... rows, so that few different statements are compiled.

    A part that is too short is padded by repeating its last row.
    """
    for start in range(0, len(rows), MAX_ROWS * width):
        part = rows[start : start + MAX_ROWS * width]
        count = len(part) // width
        # Round the size up to a power of two. Repeated rows do not change a statement's result.
        part += part[-width:] * ((1 << (count - 1).bit_length()) - count)
        yield part


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


def _places(placeholder: str, count: int) -> str:
    return ", ".join([placeholder] * count)


Spent = tuple[int, bytes, int]
"""A token that was used or revoked: its lease, its nonce, and the monotonic time in ms at which tokens with this nonce
expire."""


@dataclass(slots=True)
class Contents:
    """The rows of a journal that is opened.

    Attributes:
        drain_ns: When the node's drain ends the remaining leases, in monotonic nanoseconds; None if there is no drain.
        card_drains: When a card's drain ends the card's leases, by the card's UUID.
        epochs: The highest epoch of each name.
        region_tombstones: The regions that ended most recently.
        membership: The node's last membership in a fleet; None if it had none.
        next_tombstone: The number of the next tombstone.
        next_region_tombstone: The number of the next region's tombstone.
    """

    leases: list[LeaseRow] = field(default_factory=list)
    regions: list[RegionRow] = field(default_factory=list)
    warm: list[WarmRow] = field(default_factory=list)
    tombstones: list[LeaseSnapshot] = field(default_factory=list)
    region_tombstones: list[LeaseSnapshot] = field(default_factory=list)
    revoked: "array[int]" = field(default_factory=lambda: array("Q"))
    cleared: "array[int]" = field(default_factory=lambda: array("Q"))
    spent: list[Spent] = field(default_factory=list)
    revoked_tokens: list[Spent] = field(default_factory=list)
    cards: dict[str, CardRow] = field(default_factory=dict)
    drain_ns: int | None = None
    card_drains: dict[str, int] = field(default_factory=dict)
    epochs: list[tuple[str, int]] = field(default_factory=list)
    incarnation: int = 0
    membership: MembershipRow | None = None
    relays: dict[int, RelayRow] = field(default_factory=dict)
    next_tombstone: int = 0
    next_region_tombstone: int = 0

    def take(self, kind: int, key: bytes, value: bytes) -> None:
        """Read one row, in the order of kinds and keys. Raises ValueError, KeyError or TypeError for an invalid one."""
        # RowKind raises ValueError for an unknown kind.
        match RowKind(kind):
            case RowKind.REVOKED:
                self.revoked.append(int.from_bytes(key, "big"))
            case RowKind.CLEARED:
                self.cleared.append(int.from_bytes(key, "big"))
            case RowKind.LEASE:
                self.leases.append(read_lease(value))
            case RowKind.WARM:
                self.warm.append(_read(WarmRow, value))
            case RowKind.TOMBSTONE:
                self.tombstones.append(read_tombstone(value))
                # Rows come in the order of their keys, so the last tombstone has the largest number.
                self.next_tombstone = int.from_bytes(key, "big") + 1
            case RowKind.REGION:
                self.regions.append(read_region(value))
            case RowKind.REGION_TOMBSTONE:
                self.region_tombstones.append(read_tombstone(value))
                self.next_region_tombstone = int.from_bytes(key, "big") + 1
            case RowKind.SPENT:
                self.spent.append(_spent(key, value))
            case RowKind.REVOKED_TOKEN:
                self.revoked_tokens.append(_spent(key, value))
            case RowKind.CARD:
                card = _read(CardRow, value)
                self.cards[card.uuid] = card
            case RowKind.DRAIN:
                self.drain_ns = int(value)
            case RowKind.CARD_DRAIN:
                self.card_drains[key.decode()] = int(value)
            case RowKind.EPOCH:
                self.epochs.append((key.decode(), int(value)))
            case RowKind.MEMBERSHIP:
                self.membership = _read(MembershipRow, value)
            case RowKind.RELAY:
                relay = _read(RelayRow, value)
                self.relays[relay.pid] = relay

    def recovered(self) -> RecoveredState:
        """Return everything for the lease table except live leases."""
        tombstones = (*self.tombstones, *self.region_tombstones)
        return RecoveredState(
            tombstones,
            self.revoked,
            self.cleared,
            tuple(self.warm),
            self.drain_ns,
            tuple(self.epochs),
            tuple(self.card_drains.items()),
        )

    def cross_boot(self) -> list[Change]:
        """Apply a restart of the host to the contents. Returns the changes of rows.

        All processes of the earlier boot have ended, and its monotonic times are invalid. Fences and drains stay until
        an operator ends them. Tokens of the earlier boot are invalid, because its keys are gone. The fleet membership
        is forgotten, because this host may have a copy of another host's disk.
        """
        # End the regions first, while their leases are still known.
        changes = [*self._end_regions(), *self.forget_membership()]
        # A fenced lease keeps its fence, without the times of the earlier boot. Any other lease becomes a tombstone.
        for lease in self.leases:
            changes.append(Change(RowKind.LEASE, lease_key(lease.lease_id), None))
            # Fenced bytes stay fenced, because a restart does not prove for every driver that a card's memory is free.
            if lease.state is LeaseState.FENCED:
                deadline_ns = None if lease.deadline_ns is None else 0
                fenced = lease._replace(created_ns=0, deadline_ns=deadline_ns, ended_ns=0, worker_pid=0, parked_ns=0)
                changes[-1] = changes[-1]._replace(content=fenced)
            else:
                self.tombstones.append(_ended_with_host(lease))
                changes.append(Change(RowKind.TOMBSTONE, number_key(self.next_tombstone), self.tombstones[-1]))
                self.next_tombstone += 1
        # Measurements, relays and tokens belong to the earlier boot.
        changes += [Change(RowKind.CARD, uuid.encode(), None) for uuid in self.cards]
        changes += [Change(RowKind.RELAY, number_key(pid), None) for pid in self.relays]
        for kind, tokens in ((RowKind.SPENT, self.spent), (RowKind.REVOKED_TOKEN, self.revoked_tokens)):
            changes += [Change(kind, spent_key(lease_id, nonce), None) for lease_id, nonce, _ in tokens]
            tokens.clear()
        # 0 is a time that has passed. So the node or card stays drained, and there are no leases to end.
        if self.drain_ns is not None:
            self.drain_ns = 0
            changes.append(Change(RowKind.DRAIN, DRAIN_KEY, self.drain_ns))
        self.card_drains = dict.fromkeys(self.card_drains, 0)
        changes += [Change(RowKind.CARD_DRAIN, uuid.encode(), 0) for uuid in self.card_drains]
        # The remaining leases are the fenced ones.
        self.leases = [c.content for c in changes if isinstance(c.content, LeaseRow)]
        self.cards.clear()
        self.relays.clear()
        return changes

    def forget_membership(self) -> list[Change]:
        """Forget the node's membership in its fleet, but not the fleet. Returns the changes of rows."""
        if self.membership is None:
            return []
        # Cluster, generation and revision stay. By them the node detects that etcd was restored from a backup.
        self.membership = replace(self.membership, incarnation=0, beat=0, run="", entered="", folder="")
        return [Change(RowKind.MEMBERSHIP, MEMBERSHIP_KEY, self.membership)]

    def _end_regions(self) -> list[Change]:
        """End all regions, also those of fenced leases, because their sessions have ended."""
        changes = []
        leases = {lease.lease_id: lease for lease in self.leases}
        for region in self.regions:
            changes.append(Change(RowKind.REGION, lease_key(region.region_id), None))
            # A returned region already has a tombstone.
            if region.state is not RegionState.RETURNED and (lease := leases.get(region.lease_id)) is not None:
                self.region_tombstones.append(_region_ended_with_host(region, lease))
                key = number_key(self.next_region_tombstone)
                changes.append(Change(RowKind.REGION_TOMBSTONE, key, self.region_tombstones[-1]))
                self.next_region_tombstone += 1
        self.regions.clear()
        return changes


def _spent(key: bytes, value: bytes) -> Spent:
    return int.from_bytes(key[:LEASE_ID_BYTES], "big"), key[LEASE_ID_BYTES:], int(value)


def _ended_with_host(lease: LeaseRow) -> LeaseSnapshot:
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
        name=lease.terms.name,
        epoch=lease.terms.epoch,
        fleet_bytes=lease.terms.fleet_bytes,
        weight=lease.terms.weight,
        latency=lease.terms.latency,
    )


def _region_ended_with_host(region: RegionRow, lease: LeaseRow) -> LeaseSnapshot:
    # Copy the lease's tombstone, and replace the members that differ for the region.
    ended = _ended_with_host(lease)._replace(lease_id=region.region_id, tenant=region.tenant, parent_id=lease.lease_id)
    return ended._replace(
        name="",
        epoch=0,
        fleet_bytes=0,
        size_bytes=region.size_bytes,
        generation=region.generation,
        cause=region.cause or Cause.WORKER_DIED,
        reason=region.reason or "the host was restarted",
        fault="",
        ttl_ms=region.ttl_ms,
    )
