"""The records of a fleet in etcd: their keys, and their values as JSON objects.

    /gpulease/v1/nodes/NODE     NodeRecord: a node's membership, rewritten with each beat
    /gpulease/v1/inventories/NODE  InventoryRecord: what a node has, written with a beat when it has changed
    /gpulease/v1/names/NAME     ClaimRecord: who serves a name; its mod revision is the epoch
    /gpulease/v1/held/NODE/NAME  the claim's nonce, written and deleted with the claim: a node's own claims by one read
    /gpulease/v1/clocks/SLOT    a node's clock: members compare their clocks' rates by it
    /gpulease/v1/held/NODE/TENANT/LEASE  empty, written and deleted with the lease's entry in a quota
    /gpulease/v1/quotas/TENANT/SHARD    a part of a tenant's quota
    /gpulease/v1/quota_default  the quota of each tenant that has none by name
    /gpulease/v1/fenced/NODE    empty: the node's memberships of before this key's mod revision are over
    /gpulease/v1/generation     the store's generation key, made once: a restored backup has an older one
    /gpulease/v1/epochs         EpochsRecord: names are given out under that generation, with that base of epochs
    /gpulease/v1/joined         the node that joined last, written by each: a restored backup has an older one
    /gpulease/v1/compaction     empty; whoever rewrites it takes away etcd's history before its last write
    /gpulease/v1/horizon        seconds after which a silent node's claimed leases have ended, the same for all nodes

A reader ignores members that it does not know, so that nodes of two versions make one fleet.
"""

from dataclasses import asdict, dataclass
from json import JSONDecodeError, dumps, loads
from math import isfinite, nan
from typing import Any, Final, NamedTuple

PREFIX: Final = b"/gpulease/v1/"
NODES: Final = PREFIX + b"nodes/"
INVENTORIES: Final = PREFIX + b"inventories/"
NAMES: Final = PREFIX + b"names/"
HELD: Final = PREFIX + b"held/"
CLOCKS: Final = PREFIX + b"clocks/"
QUOTAS: Final = PREFIX + b"quotas/"
QUOTA_DEFAULT: Final = PREFIX + b"quota_default"
FENCED: Final = PREFIX + b"fenced/"
COMPACTION: Final = PREFIX + b"compaction"
GENERATION: Final = PREFIX + b"generation"
HORIZON: Final = PREFIX + b"horizon"
EPOCHS: Final = PREFIX + b"epochs"
JOINED: Final = PREFIX + b"joined"

MAX_EPOCH_BASE: Final = 1 << 62
"""Largest base of epochs that is read. Stops a foreign writer from letting epochs outgrow 64 bits."""

MAX_RECORD_BYTES: Final = 64 << 10
"""Largest record that is read. An inventory of 16 cards has 2 KiB. Stops a foreign writer from filling memory."""


class BadRecord(ValueError):
    """Raised for a value in etcd that is none of a fleet's records; the text says which and why."""


def node_key(node_id: str) -> bytes:
    """Return the key of a node's record."""
    return NODES + node_id.encode()


def fenced_key(node_id: str) -> bytes:
    """Return the key of the mark that a node's fence leaves."""
    return FENCED + node_id.encode()


def inventory_key(node_id: str) -> bytes:
    """Return the key of a node's inventory."""
    return INVENTORIES + node_id.encode()


def name_key(name: str) -> bytes:
    """Return the key of a name's claim."""
    return NAMES + name.encode()


def held_key(node_id: str, name: str = "") -> bytes:
    """Return the key of a claim among those of its node; without a name the prefix of all of them."""
    return HELD + node_id.encode() + b"/" + name.encode()


def held_name(key: bytes, node_id: str) -> str | None:
    """Return the name whose claim has that key among those of its node; None: it is a lease's entry in a quota."""
    name = key.removeprefix(held_key(node_id)).decode(errors="replace")
    return None if "/" in name else name


def node_id_of(key: bytes) -> str:
    """Return the id of the node whose record or inventory has that key."""
    return key.removeprefix(NODES).removeprefix(INVENTORIES).decode(errors="replace")


def name_of(key: bytes) -> str:
    """Return the name whose claim has that key."""
    return key.removeprefix(NAMES).decode(errors="replace")


class CardRecord(NamedTuple):
    """A card in its node's record.

    Attributes:
        capacity_bytes: Bytes that the node leases of it.
        largest_bytes: Largest slice that would be granted now.
        leases: Number of leases on it.
        is_partition: The card is a MIG partition.
    """

    uuid: str
    name: str
    capacity_bytes: int
    largest_bytes: int
    leases: int
    is_partition: bool


@dataclass(frozen=True, slots=True)
class InventoryRecord:
    """What a node has, for directories.

    Attributes:
        addresses: Where tenants reach the node, as `tls:HOST:PORT` and the like.
        labels: What the operator says of the node, such as {"zone": "a"}.
        cards: Its cards.
        is_draining: It admits nobody.
        version: The daemon's version.
    """

    addresses: tuple[str, ...] = ()
    labels: dict[str, str] | None = None
    cards: tuple[CardRecord, ...] = ()
    is_draining: bool = False
    version: str = ""

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return dumps(self.to_members(), separators=(",", ":")).encode()

    def to_members(self) -> dict[str, Any]:
        """Return the members of the record's JSON object."""
        return asdict(self) | {"cards": [card._asdict() for card in self.cards]}


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node's membership: as small as can be, for etcd keeps each beat until it compacts.

    Attributes:
        nonce: Tells one write from every other, so that a writer finds its own again after a lost answer.
        boot_ms: The node's clock (CLOCK_BOOTTIME) at the beat.
        beat: Number of the beat, which the daemon's journal had reached before: a journal that has a lower one is a
            copy, or an earlier state; 0: a version that does not count.
        inventory: What the node has, where its daemon is of a version that writes it with each beat; None: it has a key
            of its own.
    """

    nonce: str
    boot_ms: int = 0
    beat: int = 0
    inventory: InventoryRecord | None = None

    def encode(self) -> bytes:
        """Encode the record as JSON; its inventory, if it has one, lies in the same object."""
        members = {"nonce": self.nonce, "boot_ms": self.boot_ms, "beat": self.beat}
        inventory = {} if self.inventory is None else self.inventory.to_members()
        return dumps(members | inventory, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """A claim of a name.

    Attributes:
        node_id: The node that serves the name.
        incarnation: The create revision of that node's record when it claimed: the claim is void under another.
        lease_id: The lease, in 32 hexadecimal digits.
        tenant: Whose lease it is.
        nonce: Tells one claim from every other, so that a claimer finds its own again after a lost answer.
        epoch_base: The claim's epoch is the sum of this and its mod revision.
    """

    node_id: str
    incarnation: int
    lease_id: str
    tenant: str
    nonce: str
    epoch_base: int = 0

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class EpochsRecord:
    """Says that all leases of before a generation are over, so that names are given out under it.

    Attributes:
        generation: Text of the generation key.
        base: A claim's epoch is the sum of this and its revision, so epochs rise though a restored store's revisions
            have fallen.
    """

    generation: str
    base: int

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return dumps(asdict(self), separators=(",", ":")).encode()


def read_node(value: bytes) -> NodeRecord:
    """Read a node's record. Raises BadRecord."""
    members = _members(value)
    # Every daemon that writes its inventory here names its addresses.
    inventory = _inventory(members) if "addresses" in members else None
    try:
        return NodeRecord(**_known(("nonce", "boot_ms", "beat"), members), inventory=inventory)
    except TypeError as error:
        raise BadRecord(f"it is no node's record: {error}") from None


def read_inventory(value: bytes) -> InventoryRecord:
    """Read what a node has. Raises BadRecord."""
    return _inventory(_members(value))


def _inventory(members: dict[str, Any]) -> InventoryRecord:
    try:
        cards = tuple(CardRecord(**_known(CardRecord._fields, card)) for card in members.get("cards", ()))
        known = _known(InventoryRecord.__slots__, members)
        return InventoryRecord(**known | {"addresses": tuple(members.get("addresses", ())), "cards": cards})
    except (TypeError, AttributeError) as error:
        raise BadRecord(f"it is no inventory: {error}") from None


def read_claim(value: bytes) -> ClaimRecord:
    """Read a claim. Raises BadRecord."""
    try:
        return ClaimRecord(**_known(ClaimRecord.__slots__, _members(value)))
    except TypeError as error:
        raise BadRecord(f"it is no claim: {error}") from None


def read_epochs(value: bytes) -> EpochsRecord:
    """Read since when names are given out. Raises BadRecord."""
    members = _members(value)
    generation, base = members.get("generation"), members.get("base")
    if not isinstance(generation, str) or type(base) is not int or not 0 <= base <= MAX_EPOCH_BASE:
        raise BadRecord("it has no generation with a base of epochs")
    return EpochsRecord(generation, base)


def read_horizon_s(value: bytes) -> float:
    """Read the fleet's horizon, in seconds. Raises BadRecord."""
    try:
        horizon_s = float(value.decode())
    except ValueError:
        horizon_s = nan
    if not (isfinite(horizon_s) and horizon_s > 0):
        raise BadRecord("is no number of seconds")
    return horizon_s


def _members(value: bytes) -> dict[str, Any]:
    if len(value) > MAX_RECORD_BYTES:
        raise BadRecord(f"it has {len(value)} bytes; a record has at most {MAX_RECORD_BYTES}")
    try:
        members = loads(value)
    except (JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise BadRecord("it is no JSON") from None
    if not isinstance(members, dict):
        raise BadRecord("it is no JSON object")
    return members


def _known(names: tuple[str, ...], members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name in names}
