"""`python -m tests.lab.placement_refusals NODES USED ORDER`: simulates a fleet's refusals, as JSON.

Leases of 1 to 40 GiB begin and end on nodes of 8 cards of 80 GiB, for HOLDS mean lives. The directory's function
`place` chooses candidates by a view that is up to VIEW_S old. Each node decides by its current free memory. ORDER,
"pack" or "spread", applies to both. USED is the part of all memory that tenants request, for example 0.9.
"""

import heapq
import json
import sys
import time
from dataclasses import dataclass, field
from random import Random
from typing import Final

from gpulease.daemon.fleet.directory.fleet_placement import PlaceQuery, place
from gpulease.daemon.fleet.directory.fleet_view import FleetView
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import CardRecord, InventoryRecord, NodeRecord, inventory_key, node_key
from gpulease.daemon.leases.devices import PlacementOrder

CARDS: Final = 8
GIB: Final = 1 << 30
CARD_GIB: Final = 80
SIZES_GIB: Final = (1, 2, 4, 8, 16, 40)
VIEW_S: Final = 10.0
"""Seconds between two records of a node. The view of a node is five seconds old on average."""

HOLD_S: Final = 240.0
"""Mean life of a lease in seconds. With 10,000 nodes and 90 % of the memory, that means 2,000 grants per second."""

HOLDS: Final = 2.0
"""Duration of the simulation, in mean lives of a lease. The figures are those of the second half."""

TRIES: Final = 2
"""Maximum number of queries that a tenant sends to the directory for one lease. The second names the nodes that
refused."""

FILL_CHOICES: Final = 8


@dataclass
class SimulatedFleet:
    """Nodes, leases, and a directory's view, in simulated time.

    Attributes:
        free_gib: The free GiB of each card, by node.
        used_gib: The number of GiB that are leased.
    """

    nodes: int
    order: PlacementOrder
    draw: Random
    free_gib: list[list[int]] = field(init=False)
    used_gib: int = 0
    view: FleetView = field(default_factory=FleetView)
    ends: list[tuple[float, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_gib = [[CARD_GIB] * CARDS for _ in range(self.nodes)]
        self._known: list[list[int] | None] = [None] * self.nodes
        for node in range(self.nodes):
            # Each node is a member from the start. `publish` adds its cards.
            self.view.put(KeyValue(node_key(f"{node}"), NodeRecord("n").encode(), 1, 1), 0.0)

    @property
    def total_gib(self) -> int:
        return self.nodes * CARDS * CARD_GIB

    def publish(self, node: int) -> None:
        """Write a node's current state into the directory's view."""
        free = self.free_gib[node]
        # Like a real node, write a record only if it has changed.
        if self._known[node] != free:
            self._known[node] = list(free)
            cards = tuple(
                CardRecord(f"GPU-{number}", "simulated", CARD_GIB * GIB, gib * GIB, 0, False)
                for number, gib in enumerate(free)
            )
            record = InventoryRecord(("tls:h:1",), None, cards)
            self.view.put(KeyValue(inventory_key(f"{node}"), record.encode(), 1, 1), 0.0)

    def grant(self, node: int, size_gib: int, now_s: float) -> bool:
        """Grant a lease on the node's card that the order prefers. Returns False if no card has room."""
        free = self.free_gib[node]
        fitting = [(gib, number) for number, gib in enumerate(free) if gib >= size_gib]
        if not fitting:
            return False
        # The node knows its free bytes; the directory's view may be older.
        _, card = max(fitting) if self.order is PlacementOrder.SPREAD else min(fitting)
        free[card] -= size_gib
        self.used_gib += size_gib
        # Lives are distributed exponentially, so the end of a lease does not depend on its age.
        heapq.heappush(self.ends, (now_s + self.draw.expovariate(1 / HOLD_S), node, card, size_gib))
        return True

    def end_until(self, now_s: float) -> None:
        while self.ends and self.ends[0][0] <= now_s:
            _, node, card, size_gib = heapq.heappop(self.ends)
            self.free_gib[node][card] += size_gib
            self.used_gib -= size_gib

    def fill(self, target_gib: float) -> None:
        """Grant leases, each on the best of a few random nodes, until `target_gib` are leased."""
        sign = 1 if self.order is PlacementOrder.PACK else -1
        while self.used_gib < target_gib:
            size_gib = self.draw.choice(SIZES_GIB)
            nodes = [self.draw.randrange(self.nodes) for _ in range(FILL_CHOICES)]
            rooms = [
                (min(sign * gib for gib in self.free_gib[node] if gib >= size_gib), node)
                for node in nodes
                if max(self.free_gib[node]) >= size_gib
            ]
            # If none of these nodes has room, draw again.
            if rooms:
                self.grant(min(rooms)[1], size_gib, 0.0)
        for node in range(self.nodes):
            self.publish(node)

    def ask(self, size_gib: int, now_s: float) -> int:
        """Place one lease as a client does. Returns the number of nodes that were tried, 0 if the lease is refused."""
        # Try each candidate in turn, then send a second query that names the nodes that refused.
        tried: list[str] = []
        for _ in range(TRIES):
            wanted = PlaceQuery(size_gib * GIB, tried=frozenset(tried))
            for candidate in place(self.view, wanted, self.order, self.draw, silent_before_s=-1.0).candidates:
                tried.append(candidate.node_id)
                if self.grant(int(candidate.node_id), size_gib, now_s):
                    return len(tried)
        return 0


def simulate(nodes: int, used: float, order: PlacementOrder, seed: int = 7) -> dict[str, float]:
    """Return the share of refused leases, the share that needed a second node, and the mean leased memory."""
    draw = Random(seed)
    fleet = SimulatedFleet(nodes, order, draw)
    began_s = time.perf_counter()
    # Begin with as much leased memory as the arrivals will sustain, because reaching it would take many lives.
    fleet.fill(used * fleet.total_gib)
    mean_gib = sum(SIZES_GIB) / len(SIZES_GIB)
    # Little's law: the number of leases is the arrivals per second times the mean life.
    rate = used * fleet.total_gib / (mean_gib * HOLD_S)
    now_s, published = 0.0, 0
    asked = refused = again = 0
    used_gib = 0
    while now_s < HOLDS * HOLD_S:
        # Leases arrive at random, with a constant mean rate.
        now_s += draw.expovariate(rate)
        fleet.end_until(now_s)
        # Nodes publish in turn, each every VIEW_S seconds.
        while published * VIEW_S / nodes < now_s:
            fleet.publish(published % nodes)
            published += 1
        # Count only the second half, when most of the initial leases have ended.
        tries = fleet.ask(draw.choice(SIZES_GIB), now_s)
        if now_s > HOLDS * HOLD_S / 2:
            asked += 1
            refused += tries == 0
            again += tries > 1
            used_gib += fleet.used_gib
    return {
        "nodes": nodes,
        "asked_part": used,
        "grants_per_s": round(rate, 1),
        "asked": asked,
        "refused_percent": round(100 * refused / asked, 3),
        "asked_again_percent": round(100 * again / asked, 3),
        "used_percent": round(100 * used_gib / asked / fleet.total_gib, 2),
        "took_s": round(time.perf_counter() - began_s, 1),
    }


def main() -> None:
    """Run the simulation that the command line describes, and print the figures."""
    nodes, used, order = sys.argv[1:4]
    print(json.dumps({"order": order} | simulate(int(nodes), float(used), PlacementOrder(order))))


if __name__ == "__main__":
    main()
