"""A directory's view of a fleet: nodes and claims as last read from etcd. No clock, no I/O.

Unreadable records are left out, counted and reported.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from gpulease.daemon.fleet.directory.node_index import NodeIndex, NodeView, rooms_of
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import (
    HORIZON,
    INVENTORIES,
    NAMES,
    NODES,
    ClaimRecord,
    InventoryRecord,
    name_of,
    node_id_of,
    read_horizon_s,
    read_node,
)
from gpulease.daemon.fleet.records.record_reader import Unreadable
from gpulease.daemon.fleet.records.unreadable_records import UnreadableRecords
from gpulease.protocol.address import parse_address
from gpulease.protocol.limits import MAX_NODE_ADDRESSES, MAX_TEXT_BYTES
from gpulease.protocol.time_units import NS_PER_S

MAX_NODES: Final = 50_000
"""Maximum number of nodes in a view, to limit the memory that foreign records in etcd may take. Each node takes about 6
KiB."""

MAX_NAMES: Final = 500_000
"""Maximum number of claims in a view, to limit the memory. Each claim takes about 500 bytes."""

NO_ROOM: Final = Unreadable("the directory has no room for another record")

_NO_INVENTORY: Final = InventoryRecord()
"""The inventory of a node without a readable one. It has no address, so the node is never a candidate."""


class ClaimView(NamedTuple):
    """A claim as the view read it, with its epoch."""

    record: ClaimRecord
    epoch: int


class FleetView:
    """Nodes by id, and claims by name.

    Attributes:
        nodes: The nodes.
        claims: The claims.
        index: The nodes by room, labels and cards.
        horizon_s: The fleet's horizon in seconds, after which a silent node's claimed leases have ended; None before
            the first node has joined.
        unreadable: Records that were left out.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.claims: dict[str, ClaimView] = {}
        self.index = NodeIndex()
        self.horizon_s: float | None = None
        self.unreadable = UnreadableRecords()
        self._inventories: dict[str, InventoryRecord] = {}
        """The inventories from nodes' inventory keys, also of nodes without a record."""
        self._names_of: dict[str, set[str]] = {}
        self._settled_s = -inf
        self._is_indexing = True
        """False while all records are read again. After that, the index is built once, in the order of the nodes'
        changes.
        """

    @property
    def bad_records(self) -> int:
        """The number of records left out since the view began."""
        return self.unreadable.count

    def replace(self, items: Iterable[KeyValue], now_s: float) -> None:
        """Replace the view by the whole store's records.

        A node with an unchanged record keeps its `changed_s`.
        """
        # Start with an empty view, because nodes and names without a record are gone.
        previous = self.nodes
        self.nodes, self.claims, self._names_of, self._inventories = {}, {}, {}, {}
        self._is_indexing = has_horizon = False
        for item in items:
            has_horizon |= item.key == HORIZON
            self.put(item, now_s)
        if not has_horizon:
            self.horizon_s = None
        # Keep the time at which an unchanged record was first seen. Otherwise a stopped node would count as alive after
        # each read.
        for node_id, node in self.nodes.items():
            old = previous.get(node_id)
            if old is not None and (old.incarnation, old.revision) == (node.incarnation, node.revision):
                self.nodes[node_id] = node._replace(changed_s=old.changed_s)
        # Unreadable records that were not seen in this read are gone.
        self.unreadable.forget_older(int(now_s * NS_PER_S))
        # Build the index last, and only once.
        self._reindex()

    def put(self, item: KeyValue, now_s: float) -> None:
        """Process a key's new value. An unreadable value counts as absent."""
        # The key's prefix decides the kind of record. A directory does not need other kinds, such as quotas.
        unreadable = None
        if item.key.startswith(NODES):
            unreadable = self._put_node(item, now_s)
        elif item.key.startswith(INVENTORIES):
            unreadable = self._put_inventory(item)
        elif item.key.startswith(NAMES):
            unreadable = self._put_claim(item)
        elif item.key == HORIZON:
            unreadable = self._put_horizon(item)
        # An earlier value of this key may have been unreadable.
        if unreadable is None:
            self.unreadable.forget(item.key)
        else:
            if item.key != HORIZON:
                # An unreadable horizon does not replace the old one, as in the nodes.
                self._drop(item.key)
            self.unreadable.add(item, unreadable.reason, int(now_s * NS_PER_S))

    def delete(self, key: bytes) -> None:
        self.unreadable.forget(key)
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        if key == HORIZON:
            self.horizon_s = None
            return
        # A key without a readable id or name was never added.
        is_claim = key.startswith(NAMES)
        name = name_of(key) if is_claim else node_id_of(key)
        if isinstance(name, Unreadable):
            return
        if is_claim:
            self._delete_claim(name)
        elif key.startswith(NODES) and (old := self.nodes.pop(name, None)) is not None:
            self.index.remove(name, old)
        elif key.startswith(INVENTORIES) and self._inventories.pop(name, None) is not None:
            # The node stays in the view, because it still serves its names. Without an inventory it can't be a
            # candidate.
            self._show(name, _NO_INVENTORY)

    def settle(self, silent_before_s: float) -> None:
        """Remove silent nodes, whose record last changed at `silent_before_s` or earlier, from the index."""
        if silent_before_s < self._settled_s:
            # The fleet's horizon is longer now, so fewer nodes count as silent.
            self._reindex()
        self._settled_s = silent_before_s
        self.index.settle(silent_before_s)

    def names_of(self, tenant: str) -> Collection[str]:
        """Return the names that a tenant's leases claim."""
        return self._names_of.get(tenant, ())

    def holder_of(self, name: str, silent_before_s: float) -> str | None:
        """Return the id of the node that serves a name.

        Returns None if no node claims it, or if the claiming node is gone or silent.
        """
        claim = self.claims.get(name)
        node = None if claim is None else self.nodes.get(claim.record.node_id)
        # A claim is valid only in the membership that made it. A node that has joined again has lost its earlier
        # claims.
        if claim is None or node is None or node.incarnation != claim.record.incarnation:
            return None
        return None if node.changed_s <= silent_before_s else claim.record.node_id

    def _put_node(self, item: KeyValue, now_s: float) -> Unreadable | None:
        node_id, record = node_id_of(item.key), read_node(item.value)
        if isinstance(node_id, Unreadable):
            return node_id
        if isinstance(record, Unreadable):
            return record
        # Refuse a new node if the view is full. A known node may always change.
        old = self.nodes.get(node_id)
        if old is None and len(self.nodes) >= MAX_NODES:
            return NO_ROOM
        if record.inventory is not None:
            # A daemon of an older version has its inventory in the record, which takes precedence over the inventory
            # key.
            record = replace(record, inventory=_usable(record.inventory))
        # Use the inventory in the record, or else from the inventory key.
        inventory = record.inventory or self._inventories.get(node_id, _NO_INVENTORY)
        # Most heartbeats do not change the inventory. Then `rooms` are unchanged too.
        is_known = old is not None and old.inventory is inventory
        rooms = old.rooms if old is not None and is_known else rooms_of(*inventory.cards)
        node = NodeView(record, inventory, item.create_revision, item.mod_revision, now_s, rooms)
        self.nodes[node_id] = node
        if self._is_indexing:
            self.index.put(node_id, node, old)
        return None

    def _put_inventory(self, item: KeyValue) -> Unreadable | None:
        node_id, inventory = node_id_of(item.key), InventoryRecord.read(item.value)
        if isinstance(node_id, Unreadable):
            return node_id
        if isinstance(inventory, Unreadable):
            return inventory
        if node_id not in self._inventories and len(self._inventories) >= MAX_NODES:
            return NO_ROOM
        self._inventories[node_id] = _usable(inventory)
        self._show(node_id, self._inventories[node_id])
        return None

    def _put_horizon(self, item: KeyValue) -> Unreadable | None:
        horizon_s = read_horizon_s(item.value)
        if isinstance(horizon_s, Unreadable):
            return horizon_s
        self.horizon_s = horizon_s
        return None

    def _show(self, node_id: str, inventory: InventoryRecord) -> None:
        """Give a node the inventory from its inventory key."""
        old = self.nodes.get(node_id)
        # A record that contains an inventory comes from an older daemon and takes precedence.
        if old is None or old.record.inventory is not None:
            return
        self.nodes[node_id] = old._replace(inventory=inventory, rooms=rooms_of(*inventory.cards))
        if self._is_indexing:
            self.index.put(node_id, self.nodes[node_id], old)

    def _reindex(self) -> None:
        self._is_indexing = True
        self.index = NodeIndex()
        # Add nodes in the order of their changes, because the index needs times that do not decrease.
        for node_id, view in sorted(self.nodes.items(), key=lambda node: node[1].changed_s):
            self.index.put(node_id, view, None)

    def _put_claim(self, item: KeyValue) -> Unreadable | None:
        name, record = name_of(item.key), ClaimRecord.read(item.value)
        if isinstance(name, Unreadable):
            return name
        if isinstance(record, Unreadable):
            return record
        if name not in self.claims and len(self.claims) >= MAX_NAMES:
            return NO_ROOM
        # The name's earlier claim may have been another tenant's.
        self._delete_claim(name)
        self.claims[name] = ClaimView(record, record.epoch_base + item.mod_revision)
        self._names_of.setdefault(record.tenant, set()).add(name)
        return None

    def _delete_claim(self, name: str) -> None:
        if (old := self.claims.pop(name, None)) is not None:
            tenant = old.record.tenant
            self._names_of[tenant].discard(name)
            if not self._names_of[tenant]:
                del self._names_of[tenant]


def _usable(inventory: InventoryRecord) -> InventoryRecord:
    """Return an inventory without the addresses that tenants can't use."""
    addresses = tuple(filter(_is_address, inventory.addresses))[:MAX_NODE_ADDRESSES]
    return replace(inventory, addresses=addresses, labels=inventory.labels or {})


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except ValueError:
        return False
    return len(text.encode()) <= MAX_TEXT_BYTES
