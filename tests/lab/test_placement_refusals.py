"""The simulation of a fleet's refusals: its sums are right, and packing leaves room where spreading does not."""

from random import Random

import pytest

from gpulease.daemon.leases.devices import PlacementOrder

from .placement_refusals import CARD_GIB, CARDS, GIB, SimulatedFleet, simulate


@pytest.mark.parametrize("order", PlacementOrder)
def test_no_byte_is_granted_twice_and_every_lease_ends(order: PlacementOrder) -> None:
    fleet = SimulatedFleet(6, order, Random(1))
    fleet.fill(0.8 * fleet.total_gib)
    for step in range(400):
        fleet.publish(step % 6)
        fleet.ask(8, step / 10)
        held = [[0] * CARDS for _ in range(6)]
        for _, node, card, size_gib in fleet.ends:
            held[node][card] += size_gib
        assert held == [[CARD_GIB - free for free in cards] for cards in fleet.free_gib]
        assert fleet.used_gib == sum(map(sum, held))
    fleet.end_until(1e9)
    assert fleet.used_gib == 0
    assert fleet.free_gib == [[CARD_GIB] * CARDS] * 6


def test_an_old_view_costs_another_try_and_not_the_lease() -> None:
    fleet = SimulatedFleet(3, PlacementOrder.PACK, Random(1))
    for node in range(3):
        fleet.publish(node)
    fleet.free_gib[0] = [0] * CARDS
    fleet.free_gib[1] = [0] * CARDS
    tries = [fleet.ask(40, 0.0) for _ in range(2 * CARDS)]
    assert all(tries)
    assert max(tries) > 1
    assert fleet.ask(40, 0.0) == 0


def test_the_view_has_what_was_published_and_nothing_newer() -> None:
    fleet = SimulatedFleet(1, PlacementOrder.PACK, Random(1))
    fleet.publish(0)
    assert fleet.grant(0, 16, 0.0)
    assert fleet.view.nodes["0"].inventory.cards[0].largest_bytes == CARD_GIB * GIB
    fleet.publish(0)
    assert sorted(card.largest_bytes for card in fleet.view.nodes["0"].inventory.cards)[0] == (CARD_GIB - 16) * GIB


@pytest.mark.exhaustive
def test_packing_refuses_less_than_spreading() -> None:
    pack, spread = (simulate(40, 0.9, order) for order in (PlacementOrder.PACK, PlacementOrder.SPREAD))
    assert pack["refused_percent"] < spread["refused_percent"]
    assert pack["used_percent"] > spread["used_percent"]
