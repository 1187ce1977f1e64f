"""The records of a fleet in etcd: their keys, and their values as JSON objects.

    /gpulease/v1/nodes/NODE              NodeRecord: a node's membership, rewritten with each heartbeat
    /gpulease/v1/inventories/NODE        InventoryRecord: what a node has, written when it has changed
    /gpulease/v1/names/NAME              ClaimRecord: which node serves a name; the epoch follows from its mod revision
    /gpulease/v1/held/NODE/NAME          the claim's nonce, written and deleted with the claim, so that one read lists
                                         a node's claims
    /gpulease/v1/held/NODE/TENANT/LEASE  empty; written and deleted with the lease's entry in a quota
    /gpulease/v1/clocks/SLOT             a node's clock, with which members compare the rates of their clocks
    /gpulease/v1/quotas/TENANT/SHARD     a part of a tenant's quota
    /gpulease/v1/quota_default           the quota of each tenant that has none of its own
    /gpulease/v1/fenced/NODE             empty; the node's memberships that began before its mod revision have ended
    /gpulease/v1/generation              the store's generation, created once: a restored backup has an older one
    /gpulease/v1/epochs                  EpochsRecord: the generation in which nodes may claim names, the base of epochs
    /gpulease/v1/joined                  the node that joined last, which it writes: a restored backup has an older one
    /gpulease/v1/compaction              empty; the node that rewrites it removes etcd's history before the last write
    /gpulease/v1/horizon                 seconds after which a silent node's claimed leases have ended, for all nodes

A reader ignores unknown fields, so that nodes of two versions can form one fleet.
"""

from dataclasses import asdict
from hashlib import sha256
from json import dumps
from typing import Annotated, Final

from msgspec import Meta

from gpulease.daemon.fleet.records.fleet_settings import MAX_HORIZON_S, MIN_HORIZON_S
from gpulease.daemon.fleet.records.record_reader import LeaseText, Number, StoredRecord, Text, Unreadable, read_record
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_names import NAME

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
"""Largest epoch base that is accepted, so that epochs fit into 64 bits."""

MAX_GENERATION_BYTES: Final = 128
"""Maximum bytes of a generation that is kept unchanged in the journal and in messages."""

MAX_NODE_ID_BYTES: Final = 255
"""Maximum bytes of a node's id, the same as for a host name (RFC 1035, 2.3.4)."""


def node_key(node_id: str) -> bytes:
    return NODES + node_id.encode()


def fenced_key(node_id: str) -> bytes:
    """Return the key that marks a node as fenced."""
    return FENCED + node_id.encode()


def inventory_key(node_id: str) -> bytes:
    return INVENTORIES + node_id.encode()


def name_key(name: str) -> bytes:
    return NAMES + name.encode()


def held_key(node_id: str, name: str = "") -> bytes:
    """Return the key of a claim in its node's list; without a name, the prefix of that list."""
    return HELD + node_id.encode() + b"/" + name.encode()


def is_quotas(key: bytes, node_id: str) -> bool:
    """Return whether a key in a node's list belongs to a lease's quota entry, not to a name."""
    return b"/" in key.removeprefix(held_key(node_id))


def held_name(key: bytes, node_id: str) -> str | Unreadable:
    """Return the claimed name that a key in a node's list contains."""
    return _name(key.removeprefix(held_key(node_id)))


def node_id_of(key: bytes) -> str | Unreadable:
    """Return the node's id from the key of its record or inventory."""
    node_id = key.removeprefix(NODES).removeprefix(INVENTORIES)
    try:
        return (
            node_id.decode()
            if 0 < len(node_id) <= MAX_NODE_ID_BYTES
            else Unreadable("its key must end with a node's id")
        )
    except UnicodeDecodeError:
        return Unreadable("its key must be UTF-8 text")


def name_of(key: bytes) -> str | Unreadable:
    """Return the name from the key of its claim."""
    return _name(key.removeprefix(NAMES))


def _name(name: bytes) -> str | Unreadable:
    text = name.decode(errors="replace")
    return text if NAME.fullmatch(text) else Unreadable("its key must end with a lease's name")


NodeId = Annotated[str, Meta(min_length=1, max_length=MAX_NODE_ID_BYTES)]
EpochBase = Annotated[int, Meta(ge=0, le=MAX_EPOCH_BASE)]

_HorizonSeconds = Annotated[float, Meta(ge=MIN_HORIZON_S, le=MAX_HORIZON_S)]
"""A horizon within the bounds that the settings have. With a shorter one, all nodes would count as silent."""


@dataclass(frozen=True, slots=True)
class CardRecord:
    """A card in its node's record.

    Attributes:
        capacity_bytes: Bytes of the card's memory that the node can lease out.
        largest_bytes: Largest slice that the node would grant now.
        leases: Number of leases on the card.
        is_partition: Whether the card is a MIG partition.
    """

    uuid: Text
    name: Text
    capacity_bytes: Number
    largest_bytes: Number
    leases: Number
    is_partition: bool


@dataclass(frozen=True, slots=True)
class InventoryRecord(StoredRecord):
    """A node's inventory, for directories.

    Attributes:
        addresses: Addresses for tenants, such as `tls:HOST:PORT`.
        labels: The operator's labels for the node, such as {"zone": "a"}.
        cards: The node's cards.
        is_draining: Whether the node refuses new leases.
        version: The daemon's version.
    """

    addresses: tuple[Text, ...] = ()
    labels: dict[Text, Text] | None = None
    cards: tuple[CardRecord, ...] = ()
    is_draining: bool = False
    version: Text = ""


@dataclass(frozen=True, slots=True)
class _Beat:
    """The fields of a node's record that all versions write."""

    nonce: Text
    boot_ms: Number = 0
    beat: Number = 0


@dataclass(frozen=True, slots=True)
class NodeRecord(_Beat):
    """A node's membership. The record is small, because etcd keeps every heartbeat in its history.

    Attributes:
        nonce: A text by which the writer recognises this write if the answer was lost.
        boot_ms: The node's CLOCK_BOOTTIME at the heartbeat, in milliseconds.
        beat: Number of the heartbeat; 0 if the daemon's version does not number them. The daemon writes the number to
            its journal before the heartbeat, so a journal with a lower number is a copy or an earlier state.
        inventory: The inventory, from older versions of the daemon; None if the inventory has a key of its own.
    """

    inventory: InventoryRecord | None = None

    def encode(self) -> bytes:
        """Encode the record as JSON. The inventory's members are in the same object."""
        members = {"nonce": self.nonce, "boot_ms": self.boot_ms, "beat": self.beat}
        inventory = {} if self.inventory is None else asdict(self.inventory)
        return dumps(members | inventory, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class ClaimRecord(StoredRecord):
    """A claim of a name.

    Attributes:
        node_id: The node that serves the name.
        incarnation: The create revision of that node's record at the time of the claim. The claim is void if the record
            has another one.
        lease_id: The lease's id, in 32 hexadecimal digits.
        tenant: The lease's tenant.
        nonce: A text by which the writer recognises this claim if the answer was lost.
        epoch_base: The claim's epoch is this number plus the claim's mod revision.
    """

    node_id: NodeId
    incarnation: Number
    lease_id: LeaseText
    tenant: Text
    nonce: Text
    epoch_base: EpochBase = 0


@dataclass(frozen=True, slots=True)
class EpochsRecord(StoredRecord):
    """The record with which nodes may claim names under a generation: all earlier leases are over.

    Attributes:
        generation: Text of the generation key.
        base: A claim's epoch is this number plus the claim's mod revision. So epochs rise even if a restored store has
            lower revisions.
    """

    generation: Text
    base: EpochBase


def read_node(value: bytes) -> NodeRecord | Unreadable:
    beat, inventory = read_record(_Beat, value), read_record(InventoryRecord, value)
    if isinstance(beat, Unreadable):
        return beat
    if isinstance(inventory, Unreadable):
        return inventory
    # A daemon that writes its inventory here always writes its labels, so an inventory equal to the default means none.
    return NodeRecord(beat.nonce, beat.boot_ms, beat.beat, None if inventory == InventoryRecord() else inventory)


def read_horizon_s(value: bytes) -> float | Unreadable:
    return read_record(_HorizonSeconds, value)


def read_generation(value: bytes) -> str:
    """Return the store's generation as a short text that differs for each value."""
    # An operator writes this key, so it may have any bytes.
    try:
        text = value.decode() if len(value) <= MAX_GENERATION_BYTES else ""
    except UnicodeDecodeError:
        text = ""
    return text or sha256(value).hexdigest()
