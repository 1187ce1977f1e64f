"""Indexes a view's nodes by what a request for a lease may ask for: room, labels and cards.

With the index, a directory of ten thousand nodes answers a request without visiting each node, even if no node fits. A
heartbeat without other changes only moves its node in the order by age.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from gpulease.daemon.fleet.records.fleet_records import CardRecord, InventoryRecord, NodeRecord

MAX_CARDS: Final = 64
"""Maximum number of cards of one node that are indexed by UUID and index. No node has more."""


class Room(IntEnum):
    """Kinds of room: on any card, on a card without leases, on a partition without leases."""

    ANY = 0
    EMPTY = 1
    EMPTY_PARTITION = 2


Rooms = tuple[int, ...]
"""For each kind of Room, the largest slice that one of the node's cards could grant; -1 if no card has that kind."""


class NodeView(NamedTuple):
    """A node in the view.

    Attributes:
        record: The node's record.
        inventory: The node's inventory, from the record or from the inventory's own key.
        incarnation: The record's create revision, which is different for each membership.
        revision: The record's mod revision, which is different for each heartbeat.
        changed_s: When the view last saw the record change, in seconds of the directory's monotonic clock.
        rooms: The largest slices that the node's cards would grant.
    """

    record: NodeRecord
    inventory: InventoryRecord
    incarnation: int
    revision: int
    changed_s: float
    rooms: Rooms


def rooms_of(*cards: CardRecord) -> Rooms:
    """Return the largest slices that one of these cards would grant."""
    rooms = [-1] * len(Room)
    for card in cards:
        # An empty partition is also an empty card, and an empty card also counts for any card.
        kinds = Room.ANY if card.leases else Room.EMPTY_PARTITION if card.is_partition else Room.EMPTY
        for kind in range(kinds + 1):
            rooms[kind] = max(rooms[kind], card.largest_bytes)
    return tuple(rooms)


class NodeIndex:
    """Nodes by room, label and card.

    Attributes:
        silent: Nodes that were silent at the last call of `settle`.
        draining: Draining nodes, including silent ones.
        unreachable: Nodes without an address or inventory, including silent and draining ones.
    """

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.draining: set[str] = set()
        self.unreachable: set[str] = set()
        self._by_room: tuple[list[tuple[int, str]], ...] = tuple([] for _ in Room)
        self._listed: dict[str, Rooms] = {}
        """The rooms with which each node is in these lists."""
        self._by_label: dict[tuple[str, str], set[str]] = {}
        self._by_card: dict[str, dict[str, Rooms]] = {}
        self._changes: OrderedDict[str, float] = OrderedDict()
        """`changed_s` of each node that is not silent, oldest first."""

    def put(self, node_id: str, node: NodeView, old: NodeView | None) -> None:
        """Replace a node. Nodes must come in the order of their heartbeats.

        A new inventory without a heartbeat does not change whether a node is silent.
        """
        # Step 1: update labels and cards. Most calls are heartbeats, which change neither.
        record = node.inventory
        before = None if old is None else old.inventory
        if before is None or before.labels != record.labels:
            self._put_labels(node_id, _labels(before), _labels(record))
        if before is None or before.cards != record.cards:
            self._put_cards(node_id, _cards(before), _cards(record))
        for nodes, is_in in ((self.draining, record.is_draining), (self.unreachable, not record.addresses)):
            (nodes.add if is_in else nodes.discard)(node_id)
        # Step 2: after a heartbeat, move the node to the end of the order by age.
        if old is None or old.changed_s != node.changed_s:
            self.silent.discard(node_id)
            self._changes[node_id] = node.changed_s
            self._changes.move_to_end(node_id)
        # Step 3: update the lists of rooms. Nodes that can't be candidates are in no list.
        is_out = record.is_draining or not record.addresses or node_id in self.silent
        self._list(node_id, () if is_out else node.rooms)

    def remove(self, node_id: str, old: NodeView) -> None:
        self._put_labels(node_id, _labels(old.inventory), set())
        self._put_cards(node_id, _cards(old.inventory), {})
        for nodes in (self.draining, self.unreachable, self.silent):
            nodes.discard(node_id)
        self._changes.pop(node_id, None)
        self._list(node_id, ())

    def settle(self, silent_before_s: float) -> None:
        """Remove silent nodes, whose record last changed at `silent_before_s` or earlier, from the lists of rooms.

        `silent_before_s` must not be less than in an earlier call.
        """
        # The oldest nodes come first, so the work is proportional to the number of nodes that became silent.
        while self._changes:
            node_id, changed_s = next(iter(self._changes.items()))
            if changed_s > silent_before_s:
                return
            del self._changes[node_id]
            self.silent.add(node_id)
            self._list(node_id, ())

    def with_room(self, room: Room, size_bytes: int) -> list[tuple[int, str]]:
        """Return largest slice and id of each node with room for a slice of this size, sorted by largest slice."""
        nodes = self._by_room[room]
        return nodes[bisect_left(nodes, (size_bytes, "")) :]

    def with_labels(self, labels: Mapping[str, str]) -> set[str] | None:
        """Return the ids of nodes with all these labels, read-only; None if every node qualifies."""
        return _intersection([self._by_label.get(label, set()) for label in labels.items()])

    def with_card(self, device: str | None) -> Mapping[str, Rooms] | None:
        """Return, by node, the rooms of the card with that UUID or index, read-only; None for any card."""
        return None if device is None else self._by_card.get(device, {})

    def _put_labels(self, node_id: str, before: set[tuple[str, str]], after: set[tuple[str, str]]) -> None:
        for label in before - after:
            self._by_label[label].discard(node_id)
            if not self._by_label[label]:
                del self._by_label[label]
        for label in after - before:
            self._by_label.setdefault(label, set()).add(node_id)

    def _put_cards(self, node_id: str, before: dict[str, Rooms], after: dict[str, Rooms]) -> None:
        for text in before.keys() - after.keys():
            del self._by_card[text][node_id]
            if not self._by_card[text]:
                del self._by_card[text]
        for text, rooms in after.items():
            self._by_card.setdefault(text, {})[node_id] = rooms

    def _list(self, node_id: str, rooms: Rooms) -> None:
        # Each kind of room has a sorted list. Remove the old entry and insert the new one.
        before = self._listed.pop(node_id, ())
        if rooms:
            self._listed[node_id] = rooms
        if before == rooms:
            return
        for room, nodes in zip(Room, self._by_room, strict=True):
            old, new = before[room] if before else -1, rooms[room] if rooms else -1
            if old != new and old >= 0:
                del nodes[bisect_left(nodes, (old, node_id))]
            if old != new and new >= 0:
                insort(nodes, (new, node_id))


def _intersection(sets: Iterable[set[str]]) -> set[str] | None:
    """Return the intersection of the sets; None if there are no sets. The work is proportional to the smallest set."""
    by_size = sorted(sets, key=len)
    return by_size[0].intersection(*by_size[1:]) if by_size else None


def _labels(record: InventoryRecord | None) -> set[tuple[str, str]]:
    return set() if record is None or not record.labels else set(record.labels.items())


def _cards(record: InventoryRecord | None) -> dict[str, Rooms]:
    """Return the rooms of the node's cards, by UUID and by index."""
    by_card: dict[str, Rooms] = {}
    for index, card in enumerate(() if record is None else record.cards[:MAX_CARDS]):
        rooms = rooms_of(card)
        for text in (card.uuid, str(index)):
            by_card[text] = tuple(map(max, by_card[text], rooms)) if text in by_card else rooms
    return by_card
