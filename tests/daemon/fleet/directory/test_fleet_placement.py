"""Placement: which nodes a directory names, in which order, and why it names none."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.fleet.directory.fleet_placement import PlaceQuery, place
from gpulease.daemon.fleet.directory.fleet_view import FleetView
from gpulease.daemon.fleet.directory.node_index import NodeView
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import (
    CardRecord,
    ClaimRecord,
    InventoryRecord,
    NodeRecord,
    inventory_key,
    name_key,
    node_key,
)
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.protocol.messages import Placement
from gpulease.protocol.opcodes import Exclusivity

GIB = 1 << 30
NOW_S = 1000.0
SILENT_BEFORE_S = NOW_S - 15.0
INCARNATION = 7


def card(free_gib: int, leases: int = 1, uuid: str = "GPU-1", *, is_partition: bool = False) -> CardRecord:
    return CardRecord(uuid, "a card", 80 * GIB, free_gib * GIB, leases, is_partition)


def node(*free_gib: int, **members: Any) -> NodeRecord:
    cards = tuple(card(free, uuid=f"GPU-{index}") for index, free in enumerate(free_gib))
    inventory = InventoryRecord(("tls:gpu.example:7443",), {}, cards)
    return NodeRecord("n", inventory=replace(inventory, **members))


def fleet(nodes: dict[str, NodeRecord], *, changed_s: float = NOW_S, names: dict[str, str] | None = None) -> FleetView:
    view = FleetView()
    for node_id, record in nodes.items():
        view.put(KeyValue(node_key(node_id), record.encode(), INCARNATION, 9), changed_s)
    for name, node_id in (names or {}).items():
        claim = ClaimRecord(node_id, INCARNATION, "0" * 32, "ann", "n")
        view.put(KeyValue(name_key(name), claim.encode(), 5, 5), changed_s)
    return view


def placed(
    view: FleetView,
    order: PlacementOrder = PlacementOrder.PACK,
    seed: int = 1,
    *,
    tells_holder: bool = True,
    **wanted: Any,
) -> Placement:
    asked = PlaceQuery(**{"size_bytes": 8 * GIB} | wanted)
    return place(view, asked, order, Random(seed), silent_before_s=SILENT_BEFORE_S, tells_holder=tells_holder)


def ids(placement: Placement) -> list[str]:
    return [candidate.node_id for candidate in placement.candidates]


def test_packing_asks_the_fullest_that_fits_first_and_spreading_the_emptiest() -> None:
    view = fleet({"half": node(40), "full": node(4), "tight": node(9), "empty": node(80)})
    assert ids(placed(view, PlacementOrder.PACK)) == ["tight", "half", "empty"]
    assert ids(placed(view, PlacementOrder.SPREAD)) == ["empty", "half", "tight"]
    assert placed(view).nodes == 4


def test_a_node_of_several_cards_counts_by_the_one_that_the_lease_would_take() -> None:
    view = fleet({"mixed": node(9, 80), "even": node(40, 40)})
    assert ids(placed(view, PlacementOrder.PACK)) == ["mixed", "even"]
    assert ids(placed(view, PlacementOrder.SPREAD)) == ["mixed", "even"]
    assert ids(placed(view, PlacementOrder.SPREAD, device="0")) == ["even", "mixed"]


@pytest.mark.parametrize(
    ("record", "wanted", "why"),
    [
        (node(80, is_draining=True), {}, "1 draining"),
        (node(80, addresses=()), {}, "1 without an address"),
        (node(80, addresses=("http://a",)), {}, "1 without an address"),
        (node(7), {}, "1 without room"),
        (node(80), {"tried": frozenset({"n1"})}, "1 asked already"),
        (node(80, labels={"zone": "b"}), {"labels": {"zone": "a"}}, "1 without these labels"),
        (node(80), {"device": "GPU-1"}, "1 without this card"),
        (node(80), {"device": "3"}, "1 without this card"),
        (node(80), {"exclusivity": Exclusivity.DEVICE_EXCLUSIVE}, "1 without room"),
        (node(80), {"exclusivity": Exclusivity.PARTITION_EXCLUSIVE}, "1 without room"),
    ],
)
def test_a_node_that_does_not_fit_is_left_out_and_the_reason_told(
    record: NodeRecord, wanted: dict[str, Any], why: str
) -> None:
    answer = placed(fleet({"n1": record}), **wanted)
    assert (ids(answer), answer.why) == ([], why)


def test_a_node_whose_record_stands_still_is_left_out() -> None:
    view = fleet({"n1": node(80)}, changed_s=SILENT_BEFORE_S)
    assert (ids(placed(view)), placed(view).why) == ([], "1 silent")
    view.put(KeyValue(node_key("n1"), node(80).encode(), INCARNATION, 10), NOW_S)
    assert ids(placed(view)) == ["n1"]


def test_exclusive_leases_go_where_no_other_lease_is() -> None:
    alone = node(80, cards=(card(80, leases=0),))
    part = node(10, cards=(card(10, leases=0, is_partition=True),))
    view = fleet({"alone": alone, "part": part, "shared": node(80)})
    assert set(ids(placed(view, exclusivity=Exclusivity.DEVICE_EXCLUSIVE))) == {"alone", "part"}
    assert ids(placed(view, exclusivity=Exclusivity.PARTITION_EXCLUSIVE)) == ["part"]


def test_labels_choose_nodes() -> None:
    view = fleet({"a": node(80, labels={"zone": "a", "tier": "gold"}), "b": node(80, labels={"zone": "b"})})
    assert ids(placed(view, labels={"zone": "a"})) == ["a"]
    assert set(ids(placed(view))) == {"a", "b"}
    assert placed(view, labels={"zone": "b", "tier": "gold"}).why == "2 without these labels"


def test_a_name_that_lives_leads_to_its_node() -> None:
    view = fleet({"n1": node(0), "n2": node(80)}, names={"model-a": "n1"})
    answer = placed(view, name="model-a")
    assert (ids(answer), answer.holder) == (["n1"], "n1")
    # It was asked and refused: its lease may have ended since.
    again = placed(view, name="model-a", tried=frozenset({"n1"}))
    assert (ids(again), again.holder) == (["n2"], "n1")
    assert (ids(placed(view, name="model-b")), placed(view, name="model-b").holder) == (["n2"], None)


def test_whoever_may_not_know_where_a_name_lives_is_sent_there_first_untold() -> None:
    view = fleet({"n1": node(0)} | {f"m{number}": node(80) for number in range(20)}, names={"model-a": "n1"})
    answer = placed(view, name="model-a", tells_holder=False)
    assert answer.holder is None
    assert (ids(answer)[0], len(set(ids(answer)))) == ("n1", 8)
    again = placed(view, name="model-a", tells_holder=False, tried=frozenset({"n1"}))
    assert (again.holder, "n1" in ids(again), len(ids(again))) == (None, False, 8)


def test_a_name_of_a_node_that_is_gone_silent_or_another_incarnation_is_free_to_ask_for() -> None:
    gone = fleet({"n2": node(80)}, names={"model-a": "n1"})
    silent = fleet({"n1": node(80)}, changed_s=SILENT_BEFORE_S, names={"model-a": "n1"})
    silent.put(KeyValue(node_key("n2"), node(80).encode(), INCARNATION, 9), NOW_S)
    anew = fleet({"n1": node(0), "n2": node(80)}, names={"model-a": "n1"})
    anew.put(KeyValue(node_key("n1"), node(0).encode(), INCARNATION + 1, 9), NOW_S)
    for view in (gone, silent, anew):
        answer = placed(view, name="model-a")
        assert (ids(answer), answer.holder) == (["n2"], None)


def test_the_reasons_of_several_nodes_are_counted() -> None:
    view = fleet({"a": node(1), "b": node(1), "c": node(80, is_draining=True), "d": node(80)})
    assert placed(view, tried=frozenset({"d"})).why == "1 asked already, 1 draining, 2 without room"
    assert placed(FleetView()).why == "the fleet has no node"


def test_eight_of_many_are_drawn_and_not_the_same_eight() -> None:
    view = fleet({f"n{number}": node(80) for number in range(50)})
    drawn = [frozenset(ids(placed(view, seed=seed))) for seed in range(40)]
    assert {len(one) for one in drawn} == {8}
    # 40 draws of 8 of 50 leave out one given node with a chance of 0.1 %; with these seeds none is left out.
    assert frozenset().union(*drawn) == set(view.nodes)


def test_the_last_place_of_a_large_fleet_is_found() -> None:
    full = node(0).encode()
    view = FleetView()
    for number in range(1_200):
        view.put(KeyValue(node_key(f"n{number}"), full, INCARNATION, 9), NOW_S)
    for last in ("n0", "n1199"):
        view.put(KeyValue(node_key(last), node(80).encode(), INCARNATION, 9), NOW_S)
        assert all(ids(placed(view, seed=seed)) == [last] for seed in range(5))
        view.put(KeyValue(node_key(last), full, INCARNATION, 9), NOW_S)
    assert placed(view).why == "1200 without room"


@given(
    st.lists(st.tuples(st.integers(0, 80), st.booleans(), st.booleans()), max_size=30),
    st.integers(0, 80),
    st.sampled_from(list(PlacementOrder)),
    st.integers(0, 2**32),
)
def test_whoever_is_named_fits_and_nobody_who_fits_is_missed(
    nodes: list[tuple[int, bool, bool]], size_gib: int, order: PlacementOrder, seed: int
) -> None:
    records = {f"n{at}": node(free, is_draining=draining) for at, (free, draining, _) in enumerate(nodes)}
    tried = frozenset(f"n{at}" for at, (_, _, was_tried) in enumerate(nodes) if was_tried)
    fitting = {
        f"n{at}"
        for at, (free, draining, was_tried) in enumerate(nodes)
        if free >= size_gib and not draining | was_tried
    }
    view = fleet(records)
    answer = placed(view, order, seed, size_bytes=size_gib * GIB, tried=tried)
    named = ids(answer)
    assert set(named) <= fitting
    assert len(named) == len(set(named)) == min(8, len(fitting))
    free = [view.nodes[node_id].inventory.cards[0].largest_bytes for node_id in named]
    assert free == sorted(free, reverse=order is PlacementOrder.SPREAD)
    assert bool(answer.why) is not bool(named)


class CountedNodes(dict[str, NodeView]):
    """Nodes of a view, and how many of them were looked at."""

    looks = 0

    def __getitem__(self, node_id: str) -> NodeView:
        self.looks += 1
        return super().__getitem__(node_id)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"size_bytes": 1 << 62}, "300 without room"),
        ({"labels": {"zone": "b"}}, "300 without these labels"),
        ({"labels": {"zone": "a", "rack": "7", "tier": "gold"}}, "300 without these labels"),
        ({"device": "GPU-none"}, "300 without this card"),
        ({"device": "2"}, "300 without this card"),
        ({"device": "1", "size_bytes": 60 * GIB}, "300 without room"),
        ({"exclusivity": Exclusivity.DEVICE_EXCLUSIVE}, "300 without room"),
        ({"size_bytes": 1 << 62, "labels": {"rack": "7"}, "device": "1"}, "299 without these labels, 1 without room"),
    ],
)
def test_who_asks_for_what_nobody_has_costs_no_look_at_the_nodes(wanted: dict[str, Any], why: str) -> None:
    view = fleet({f"n{number}": node(80, 40, labels={"zone": "a", "rack": str(number)}) for number in range(300)})
    view.nodes = CountedNodes(view.nodes)
    assert placed(view, **wanted).why == why
    assert view.nodes.looks == 0


def test_silent_and_draining_nodes_are_not_looked_at() -> None:
    view = fleet({f"n{number}": node(80) for number in range(300)}, changed_s=SILENT_BEFORE_S)
    for number in range(300, 600):
        view.put(KeyValue(node_key(f"n{number}"), node(80, is_draining=True).encode(), INCARNATION, 9), NOW_S)
    view.nodes = CountedNodes(view.nodes)
    assert placed(view).why == "300 silent, 300 draining"
    assert view.nodes.looks == 0


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.none()
        | st.builds(
            lambda free, leases, zone, drains, addresses: NodeRecord(
                "n",
                inventory=InventoryRecord(
                    addresses, zone, tuple(card(one, leases, f"GPU-{one}") for one in free), drains
                ),
            ),
            st.lists(st.integers(0, 3), max_size=3),
            st.integers(0, 1),
            st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}]),
            st.booleans(),
            st.sampled_from([(), ("tls:gpu.example:7443",)]),
        ),
        st.integers(0, 20),
        st.sampled_from(["inside", "beside", "without a beat"]),
    ),
    max_size=20,
)


@given(
    CHANGES,
    st.integers(0, 3),
    st.sampled_from([{}, {"zone": "a"}]),
    st.sampled_from([None, "0", "GPU-2"]),
    st.sampled_from(list(Exclusivity)),
)
def test_an_index_that_lived_through_changes_answers_as_a_look_at_each_node(
    changes: list[tuple[str, NodeRecord | None, int, str]],
    size_gib: int,
    labels: dict[str, str],
    device: str | None,
    exclusivity: Exclusivity,
) -> None:
    view, now_s = FleetView(), NOW_S
    for node_id, record, passed_s, where in changes:
        now_s += passed_s
        if record is None:
            view.delete(node_key(node_id))
            view.delete(inventory_key(node_id))
        elif where == "inside":
            view.put(KeyValue(node_key(node_id), record.encode(), INCARNATION, 9), now_s)
        else:
            assert record.inventory is not None
            view.put(KeyValue(inventory_key(node_id), record.inventory.encode(), INCARNATION, 9), now_s)
            if where == "beside":
                view.put(KeyValue(node_key(node_id), NodeRecord("n").encode(), INCARNATION, 9), now_s)
        view.settle(now_s - 15.0)
    wanted = PlaceQuery(size_gib * GIB, exclusivity, labels=labels, device=device)
    answer = place(view, wanted, PlacementOrder.PACK, Random(1), silent_before_s=now_s - 15.0)
    fitting = {node_id for node_id, seen in view.nodes.items() if fits(seen, wanted, now_s - 15.0)}
    assert set(ids(answer)) == fitting
    counted = [int(part.split()[0]) for part in answer.why.split(", ")] if answer.why and view.nodes else []
    assert sum(counted) == (0 if fitting else len(view.nodes))


def fits(seen: NodeView, wanted: PlaceQuery, silent_before_s: float) -> bool:
    """Say by the node's record alone whether it may be asked."""
    record = seen.inventory
    cards = [one for at, one in enumerate(record.cards) if wanted.device in (None, str(at), one.uuid)]
    if wanted.exclusivity in (Exclusivity.DEVICE_EXCLUSIVE, Exclusivity.PARTITION_EXCLUSIVE):
        cards = [one for one in cards if not one.leases]
    if wanted.exclusivity is Exclusivity.PARTITION_EXCLUSIVE:
        cards = [one for one in cards if one.is_partition]
    is_up = seen.changed_s > silent_before_s and not record.is_draining and bool(record.addresses)
    has_labels = all((record.labels or {}).get(key) == value for key, value in (wanted.labels or {}).items())
    return is_up and has_labels and any(one.largest_bytes >= wanted.size_bytes for one in cards)
