"""A directory's view: what it takes from etcd, what it forgets, and what it does not believe."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.fleet.directory.fleet_placement import PlaceQuery, place
from gpulease.daemon.fleet.directory.fleet_view import FleetView
from gpulease.daemon.fleet.directory.node_index import Room
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import (
    HORIZON,
    NODES,
    QUOTAS,
    CardRecord,
    ClaimRecord,
    InventoryRecord,
    NodeRecord,
    inventory_key,
    name_key,
    node_key,
)
from gpulease.daemon.leases.devices import PlacementOrder

CARD = CardRecord("GPU-1", "a card", 80 << 30, 40 << 30, 1, False)
INVENTORY = InventoryRecord(("tls:gpu.example:7443",), {"zone": "a"}, (CARD,))
NODE = NodeRecord("n", inventory=INVENTORY)
CLAIM = ClaimRecord("n1", 3, "0" * 32, "ann", "n")


def of(key: bytes, value: bytes, *, create: int = 3, mod: int = 9) -> KeyValue:
    return KeyValue(key, value, create, mod)


def changed(**members: Any) -> bytes:
    return json.dumps(json.loads(NODE.encode()) | members).encode()


def test_a_view_holds_what_it_was_told_last() -> None:
    view = FleetView()
    for node_id in ("n1", "n2", "n3"):
        view.put(of(node_key(node_id), NODE.encode()), 1.0)
    view.put(of(name_key("model-a"), CLAIM.encode(), mod=12), 1.0)
    assert view.nodes["n1"].record == NODE
    assert view.nodes["n1"].changed_s == 1.0
    assert view.claims["model-a"].epoch == 12
    assert view.holder_of("model-a", 0.0) == "n1"
    view.delete(node_key("n1"))
    view.delete(node_key("n1"))
    assert sorted(view.nodes) == ["n2", "n3"]
    assert view.holder_of("model-a", 0.0) is None
    view.delete(name_key("model-a"))
    assert view.claims == {}


def test_reading_anew_makes_no_silent_node_fresh() -> None:
    view = FleetView()
    view.replace([of(node_key("n1"), NODE.encode()), of(node_key("n2"), NODE.encode())], 1.0)
    view.replace([of(node_key("n1"), NODE.encode()), of(node_key("n3"), NODE.encode(), mod=10)], 50.0)
    assert {node_id: node.changed_s for node_id, node in view.nodes.items()} == {"n1": 1.0, "n3": 50.0}
    view.replace([of(node_key("n1"), NODE.encode(), mod=11)], 60.0)
    assert view.nodes["n1"].changed_s == 60.0


@pytest.mark.parametrize("keys", [(inventory_key, node_key), (node_key, inventory_key)])
def test_an_inventory_has_a_key_of_its_own(keys: tuple[Callable[[str], bytes], ...]) -> None:
    view = FleetView()
    values = {inventory_key("n1"): INVENTORY.encode(), node_key("n1"): NodeRecord("n").encode()}
    for key in keys:
        view.put(of(key("n1"), values[key("n1")]), 1.0)
    assert view.nodes["n1"].inventory == INVENTORY
    assert "n1" in (view.index.with_labels({"zone": "a"}) or ())
    view.put(of(node_key("n1"), NodeRecord("m").encode(), mod=10), 2.0)
    assert (view.nodes["n1"].inventory, view.nodes["n1"].changed_s) == (INVENTORY, 2.0)
    view.delete(inventory_key("n1"))
    assert view.nodes["n1"].inventory.addresses == ()
    assert "n1" in view.index.unreachable


def test_another_inventory_makes_no_silent_node_fresh() -> None:
    view = FleetView()
    view.put(of(node_key("n1"), NodeRecord("n").encode()), 1.0)
    view.settle(10.0)
    view.put(of(inventory_key("n1"), INVENTORY.encode()), 20.0)
    assert (view.nodes["n1"].changed_s, view.nodes["n1"].inventory) == (1.0, INVENTORY)
    assert view.index.silent == {"n1"}
    assert not view.index.with_room(Room.ANY, 1)
    view.put(of(node_key("n1"), NodeRecord("m").encode(), mod=10), 21.0)
    assert view.index.with_room(Room.ANY, 1)


def test_a_record_of_before_inventories_had_keys_is_read_and_counts_before_them() -> None:
    older = (
        b'{"nonce":"8f-1","addresses":["tls:gpu.example:7443"],"labels":{"zone":"a"},"cards":[{"uuid":"GPU-1",'
        b'"name":"a card","capacity_bytes":85899345920,"largest_bytes":42949672960,"leases":1,"is_partition":false}],'
        b'"is_draining":false,"boot_ms":7,"version":"0.1.0"}'
    )
    view = FleetView()
    # Upgraded, gone back to the older version, and upgraded again.
    view.put(of(inventory_key("n1"), InventoryRecord(("tls:gpu.example:1",)).encode()), 1.0)
    view.put(of(node_key("n1"), older), 2.0)
    assert view.nodes["n1"].inventory == replace(INVENTORY, version="0.1.0")
    view.put(of(inventory_key("n1"), InventoryRecord(("tls:gpu.example:2",)).encode()), 3.0)
    assert view.nodes["n1"].inventory.version == "0.1.0"
    view.put(of(node_key("n1"), NodeRecord("n").encode()), 4.0)
    assert view.nodes["n1"].inventory.addresses == ("tls:gpu.example:2",)


def test_an_inventory_that_can_t_be_read_is_counted_and_the_node_is_without_an_address() -> None:
    view = FleetView()
    view.put(of(inventory_key("n1"), INVENTORY.encode()), 1.0)
    view.put(of(node_key("n1"), NodeRecord("n").encode()), 1.0)
    view.put(of(inventory_key("n1"), b'{"addresses":7}'), 2.0)
    assert (view.nodes["n1"].inventory.addresses, view.bad_records) == ((), 1)


def test_keys_of_others_are_not_looked_at() -> None:
    view = FleetView()
    view.put(of(QUOTAS + b"ann/1", b"no JSON"), 1.0)
    view.put(of(node_key("n1"), NODE.encode()), 1.0)
    view.delete(QUOTAS + b"ann/1")
    view.delete(b"n1")
    assert list(view.nodes) == ["n1"]
    assert view.bad_records == 0


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[1]",
        b"\xff",
        b'{"addresses":["tls:a:1"]}',
        changed(labels=["zone"]),
        changed(labels={"zone": 7}),
        changed(addresses=[7]),
        changed(addresses=7),
        changed(is_draining="no"),
        changed(cards=7),
        changed(cards=[{"uuid": 1}]),
        changed(cards=[asdict(CARD) | {"largest_bytes": "all"}]),
        changed(cards=[asdict(CARD) | {"leases": -1}]),
    ],
)
def test_a_record_that_can_t_be_read_is_counted_and_left_out(value: bytes) -> None:
    view = FleetView()
    view.put(of(node_key("n1"), NODE.encode()), 1.0)
    view.put(of(node_key("n1"), value), 2.0)
    assert (list(view.nodes), view.bad_records) == ([], 1)


def test_a_claim_that_can_t_be_read_is_left_out() -> None:
    view = FleetView()
    values = (b"", b"{}", json.dumps(json.loads(CLAIM.encode()) | {"incarnation": "3"}).encode())
    for number, value in enumerate(values):
        for _ in range(2):
            view.put(of(name_key("model-a"), value, mod=number), 1.0)
    assert (view.claims, view.bad_records) == ({}, 3)


def test_a_horizon_that_can_t_be_read_leaves_the_one_before() -> None:
    view = FleetView()
    for value, horizon_s in ((b"120", 120), (b"1e999", 120), (b"0.001", 120), (b"30", 30)):
        view.put(of(HORIZON, value), 1.0)
        assert (view.horizon_s, view.unreadable.sentence() == "") == (horizon_s, horizon_s == float(value))
    view.delete(HORIZON)
    assert view.horizon_s is None


def test_what_can_t_be_read_is_shown_until_it_is_gone() -> None:
    view = FleetView()
    found = [of(node_key(name), b"?", mod=number) for number, name in enumerate(("n1", "n2", "n3"))]
    view.replace(found, 1.0)
    view.replace(found, 2.0)
    assert (view.bad_records, view.unreadable.sentence()[:8]) == (3, "3 values")
    view.put(of(node_key("n1"), NODE.encode()), 3.0)
    view.delete(node_key("n2"))
    assert view.unreadable.sentence().startswith("1 value in etcd can't be read: /gpulease/v1/nodes/n3 ")
    view.replace(found[:1], 4.0)
    assert view.unreadable.sentence().startswith("1 value in etcd can't be read: /gpulease/v1/nodes/n1 ")


def test_members_of_later_versions_are_no_fault() -> None:
    view = FleetView()
    view.put(of(node_key("n1"), changed(rack=12)), 1.0)
    assert view.nodes["n1"].record == NODE


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(["nonce", "boot_ms", *InventoryRecord.__slots__, "other"]), ANY_JSON),
    st.sampled_from(list(PlacementOrder)),
)
def test_no_record_stops_a_placement(members: dict[str, Any], order: PlacementOrder) -> None:
    view = FleetView()
    view.put(of(node_key("good"), NODE.encode()), 5.0)
    view.put(of(NODES + b"any", changed(**members)), 5.0)
    answer = place(view, PlaceQuery(1, labels={"zone": "a"}), order, Random(1), silent_before_s=1.0)
    assert "good" in {candidate.node_id for candidate in answer.candidates}
