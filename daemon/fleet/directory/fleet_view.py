"""A directory's view of a fleet: nodes and claims as they were read from etcd, with no clock and no network.

The view trusts no record. A record that can't be read, or whose members have other types, is counted and left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.fleet_records import (
    NAMES,
    NODES,
    BadRecord,
    CardRecord,
    ClaimRecord,
    NodeRecord,
    name_of,
    node_id_of,
    read_claim,
    read_node,
)
from gpulease.protocol.address import parse_address
from gpulease.protocol.limits import MAX_NODE_ADDRESSES, MAX_TEXT_BYTES

MAX_NODES: Final = 50_000
"""Most nodes of a view, some 2 KiB each. Stops whoever can write to etcd from filling the directory's memory."""

MAX_NAMES: Final = 500_000
"""Most claims of a view, some 500 bytes each; the reason is that of MAX_NODES."""


class SeenNode(NamedTuple):
    """A node as the view has it.

    Attributes:
        record: Its record.
        incarnation: The record's create revision: another one is another membership.
        changed_s: When the view last saw the record change, on the reader's monotonic clock.
        largest_bytes: Largest slice that any of its cards would grant.
    """

    record: NodeRecord
    incarnation: int
    changed_s: float
    largest_bytes: int


class SeenClaim(NamedTuple):
    """A claim as the view has it; `epoch` is its mod revision."""

    record: ClaimRecord
    epoch: int


class FleetView:
    """Nodes by id, and claims by name.

    Attributes:
        nodes: The nodes.
        claims: The claims.
        ids: The nodes' ids in a list, from which some can be drawn at random.
        bad_records: Records that were left out since the view began.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, SeenNode] = {}
        self.claims: dict[str, SeenClaim] = {}
        self.ids: list[str] = []
        self.bad_records = 0
        self._index: dict[str, int] = {}

    def replace(self, found: Iterable[KeyValue], now_s: float) -> None:
        """Take the whole store's nodes and names in place of what the view has.

        A node whose record is the one that the view had keeps its time: reading anew makes no silent node fresh.
        """
        before = self.nodes
        self.nodes, self.claims, self.ids, self._index = {}, {}, [], {}
        for item in found:
            self.put(item, now_s)
        for node_id, seen in self.nodes.items():
            old = before.get(node_id)
            if old is not None and (old.record, old.incarnation) == (seen.record, seen.incarnation):
                self.nodes[node_id] = old

    def put(self, item: KeyValue, now_s: float) -> None:
        """Take a key's new value; a value that can't be read is as good as none."""
        try:
            if item.key.startswith(NODES):
                record = _sound_node(item.value)
                largest_bytes = max((card.largest_bytes for card in record.cards), default=0)
                self._put_node(node_id_of(item.key), SeenNode(record, item.create_revision, now_s, largest_bytes))
            elif item.key.startswith(NAMES):
                self._put_claim(name_of(item.key), SeenClaim(_sound_claim(item.value), item.mod_revision))
        except BadRecord:
            self.bad_records += 1
            self.delete(item.key)

    def delete(self, key: bytes) -> None:
        """Forget a key's value."""
        if key.startswith(NAMES):
            self.claims.pop(name_of(key), None)
        elif key.startswith(NODES):
            self._delete_node(node_id_of(key))

    def _delete_node(self, node_id: str) -> None:
        if self.nodes.pop(node_id, None) is not None:
            # The last id takes the place of this one, so that no list of thousands is moved.
            place, last = self._index.pop(node_id), self.ids.pop()
            if last != node_id:
                self.ids[place] = last
                self._index[last] = place

    def holder_of(self, name: str, silent_before_s: float) -> str | None:
        """Return the id of the node that serves a name; None if nobody does, or a node that is gone or silent."""
        claim = self.claims.get(name)
        node = None if claim is None else self.nodes.get(claim.record.node_id)
        if claim is None or node is None or node.incarnation != claim.record.incarnation:
            return None
        return None if node.changed_s <= silent_before_s else claim.record.node_id

    def _put_node(self, node_id: str, seen: SeenNode) -> None:
        if node_id not in self.nodes:
            if len(self.nodes) >= MAX_NODES or len(node_id.encode()) > MAX_TEXT_BYTES:
                raise BadRecord("the view has no room for it")
            self._index[node_id] = len(self.ids)
            self.ids.append(node_id)
        self.nodes[node_id] = seen

    def _put_claim(self, name: str, seen: SeenClaim) -> None:
        if name not in self.claims and len(self.claims) >= MAX_NAMES:
            raise BadRecord("the view has no room for it")
        self.claims[name] = seen


def _sound_node(value: bytes) -> NodeRecord:
    record = read_node(value)
    labels = {} if record.labels is None else record.labels
    texts: list[Any] = [record.nonce, record.version, *record.addresses]
    if not isinstance(labels, Mapping) or not all(isinstance(text, str) for text in (*texts, *labels.values())):
        raise BadRecord("a member is no text")
    if type(record.is_draining) is not bool or not all(map(_is_sound_card, record.cards)):
        raise BadRecord("a member has another type")
    addresses = tuple(filter(_is_address, record.addresses))[:MAX_NODE_ADDRESSES]
    return NodeRecord(
        record.nonce, addresses, dict(labels), record.cards, record.is_draining, record.boot_ms, record.version
    )


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
    if not all(isinstance(text, str) for text in texts) or type(record.incarnation) is not int:
        raise BadRecord("a member has another type")
    return record
