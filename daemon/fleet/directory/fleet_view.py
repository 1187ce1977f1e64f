"""A directory's view of a fleet: nodes and claims as they were read from etcd, with no clock and no network.

The view trusts no record. A record that can't be read, or whose members have other types, is counted and left out.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final, NamedTuple

from gpulease.daemon.fleet.directory.node_index import NodeIndex, SeenNode, rooms_of
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.fleet_records import (
    HORIZON,
    INVENTORIES,
    NAMES,
    NODES,
    BadRecord,
    CardRecord,
    ClaimRecord,
    InventoryRecord,
    NodeRecord,
    name_of,
    node_id_of,
    read_claim,
    read_horizon_s,
    read_inventory,
    read_node,
)
from gpulease.protocol.address import parse_address
from gpulease.protocol.limits import MAX_NODE_ADDRESSES, MAX_TEXT_BYTES

MAX_NODES: Final = 50_000
"""Most nodes of a view, some 6 KiB each. Stops whoever can write to etcd from filling the directory's memory."""

MAX_NAMES: Final = 500_000
"""Most claims of a view, some 500 bytes each; the reason is that of MAX_NODES."""

_NO_INVENTORY: Final = InventoryRecord()
"""The inventory of a node that has not written one, or one that can't be read: it is without an address."""


class SeenClaim(NamedTuple):
    """A claim as the view has it, and its epoch."""

    record: ClaimRecord
    epoch: int


class FleetView:
    """Nodes by id, and claims by name.

    Attributes:
        nodes: The nodes.
        claims: The claims.
        index: The nodes by what a placement asks for.
        horizon_s: The horizon that the nodes have agreed on; None before the first node has joined.
        bad_records: Records that were left out since the view began.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, SeenNode] = {}
        self.claims: dict[str, SeenClaim] = {}
        self.index = NodeIndex()
        self.horizon_s: float | None = None
        self.bad_records = 0
        self._inventories: dict[str, InventoryRecord] = {}
        """Those that have keys of their own, with or without a node."""
        self._names_of: dict[str, set[str]] = {}
        self._settled_s = -inf
        self._is_indexing = True
        """False while all nodes are read anew: the index is made once, in the order of their changes."""

    def replace(self, found: Iterable[KeyValue], now_s: float) -> None:
        """Take the whole store's records in place of what the view has.

        A node whose record is the one that the view had keeps its time: reading anew makes no silent node fresh.
        """
        before = self.nodes
        self.nodes, self.claims, self._names_of, self.horizon_s = {}, {}, {}, None
        self._inventories = {}
        self._is_indexing = False
        for item in found:
            self.put(item, now_s)
        for node_id, seen in self.nodes.items():
            old = before.get(node_id)
            if old is not None and (old.incarnation, old.revision) == (seen.incarnation, seen.revision):
                self.nodes[node_id] = seen._replace(changed_s=old.changed_s)
        self._index_anew()

    def put(self, item: KeyValue, now_s: float) -> None:
        """Take a key's new value; a value that can't be read is as good as none."""
        try:
            if item.key.startswith(NODES):
                self._put_node(node_id_of(item.key), _sound_node(item.value), item, now_s)
            elif item.key.startswith(INVENTORIES):
                self._put_inventory(node_id_of(item.key), _sound_inventory(read_inventory(item.value)))
            elif item.key.startswith(NAMES):
                claim = _sound_claim(item.value)
                self._put_claim(name_of(item.key), SeenClaim(claim, claim.epoch_base + item.mod_revision))
            elif item.key == HORIZON:
                self.horizon_s = read_horizon_s(item.value)
        except BadRecord:
            self.bad_records += 1
            self.delete(item.key)

    def delete(self, key: bytes) -> None:
        """Forget a key's value."""
        if key.startswith(NAMES):
            self._delete_claim(name_of(key))
        elif key.startswith(NODES):
            node_id = node_id_of(key)
            if (old := self.nodes.pop(node_id, None)) is not None:
                self.index.remove(node_id, old)
        elif key.startswith(INVENTORIES):
            node_id = node_id_of(key)
            if self._inventories.pop(node_id, None) is not None:
                self._show(node_id, _NO_INVENTORY)
        elif key == HORIZON:
            self.horizon_s = None

    def settle(self, silent_before_s: float) -> None:
        """Leave out of the index the nodes whose record last changed at this time or earlier."""
        if silent_before_s < self._settled_s:
            # The horizon is a longer one now.
            self._index_anew()
        self._settled_s = silent_before_s
        self.index.settle(silent_before_s)

    def names_of(self, tenant: str) -> Collection[str]:
        """Return the names whose claims are of a tenant's leases."""
        return self._names_of.get(tenant, ())

    def holder_of(self, name: str, silent_before_s: float) -> str | None:
        """Return the id of the node that serves a name; None if nobody does, or a node that is gone or silent."""
        claim = self.claims.get(name)
        node = None if claim is None else self.nodes.get(claim.record.node_id)
        if claim is None or node is None or node.incarnation != claim.record.incarnation:
            return None
        return None if node.changed_s <= silent_before_s else claim.record.node_id

    def _put_node(self, node_id: str, record: NodeRecord, item: KeyValue, now_s: float) -> None:
        old = self.nodes.get(node_id)
        self._check_room(node_id, self.nodes)
        # A daemon of an older version has its inventory here, also where a later one left another in its own key.
        inventory = record.inventory or self._inventories.get(node_id, _NO_INVENTORY)
        is_known = old is not None and old.inventory is inventory
        rooms = old.rooms if old is not None and is_known else rooms_of(*inventory.cards)
        seen = SeenNode(record, inventory, item.create_revision, item.mod_revision, now_s, rooms)
        self.nodes[node_id] = seen
        if self._is_indexing:
            self.index.put(node_id, seen, old)

    def _put_inventory(self, node_id: str, inventory: InventoryRecord) -> None:
        self._check_room(node_id, self._inventories)
        self._inventories[node_id] = inventory
        self._show(node_id, inventory)

    def _show(self, node_id: str, inventory: InventoryRecord) -> None:
        """Show a node with the inventory that is in its own key now."""
        old = self.nodes.get(node_id)
        if old is None or old.record.inventory is not None:
            return
        self.nodes[node_id] = old._replace(inventory=inventory, rooms=rooms_of(*inventory.cards))
        if self._is_indexing:
            self.index.put(node_id, self.nodes[node_id], old)

    def _check_room(self, node_id: str, known: Collection[str]) -> None:
        if node_id not in known and (len(known) >= MAX_NODES or len(node_id.encode()) > MAX_TEXT_BYTES):
            raise BadRecord("the view has no room for it")

    def _index_anew(self) -> None:
        self._is_indexing = True
        self.index = NodeIndex()
        for node_id, seen in sorted(self.nodes.items(), key=lambda node: node[1].changed_s):
            self.index.put(node_id, seen, None)

    def _put_claim(self, name: str, seen: SeenClaim) -> None:
        if name not in self.claims and len(self.claims) >= MAX_NAMES:
            raise BadRecord("the view has no room for it")
        self._delete_claim(name)
        self.claims[name] = seen
        self._names_of.setdefault(seen.record.tenant, set()).add(name)

    def _delete_claim(self, name: str) -> None:
        if (old := self.claims.pop(name, None)) is not None:
            tenant = old.record.tenant
            self._names_of[tenant].discard(name)
            if not self._names_of[tenant]:
                del self._names_of[tenant]


def _sound_node(value: bytes) -> NodeRecord:
    record = read_node(value)
    nonce: Any = record.nonce
    if not isinstance(nonce, str):
        raise BadRecord("a member is no text")
    return record if record.inventory is None else replace(record, inventory=_sound_inventory(record.inventory))


def _sound_inventory(record: InventoryRecord) -> InventoryRecord:
    labels = {} if record.labels is None else record.labels
    texts: list[Any] = [record.version, *record.addresses]
    if not isinstance(labels, Mapping) or not all(isinstance(text, str) for text in (*texts, *labels.values())):
        raise BadRecord("a member is no text")
    if type(record.is_draining) is not bool or not all(map(_is_sound_card, record.cards)):
        raise BadRecord("a member has another type")
    addresses = tuple(filter(_is_address, record.addresses))[:MAX_NODE_ADDRESSES]
    return replace(record, addresses=addresses, labels=dict(labels))


def _is_sound_card(card: CardRecord) -> bool:
    numbers = (card.capacity_bytes, card.largest_bytes, card.leases)
    return (
        isinstance(card.uuid, str)
        and isinstance(card.name, str)
        and all(type(number) is int and number >= 0 for number in numbers)
        and type(card.is_partition) is bool
    )


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except ValueError:
        return False
    return True


def _sound_claim(value: bytes) -> ClaimRecord:
    record = read_claim(value)
    texts: tuple[Any, ...] = (record.node_id, record.lease_id, record.tenant, record.nonce)
    if not all(isinstance(text, str) for text in texts) or {type(record.incarnation), type(record.epoch_base)} != {int}:
        raise BadRecord("a member has another type")
    return record
