import json
import re
from dataclasses import replace
from typing import Any

import pytest

from gpulease.daemon.web.view import Changed, FleetNow, LeaseChange, Pseudonyms, Snapshot, view_of
from helpers.web_rig import CARD, GIB, card, lease

SECRET = b"s" * 32
NAMES = Pseudonyms(SECRET)
LEASES = (
    lease(0xABC, "ann", reason="<b>because</b>", launches=7, allocated_bytes=5, gpu_seconds=2.5),
    {key: value for key, value in lease(2, "bob", state="fenced", cause="revoked").items() if key != "allocated_bytes"},
    lease(3, "ann", state="pending", remaining_ms=0),
)


def snapshot(*leases: dict[str, Any], **changes: Any) -> Snapshot:
    lease_changes = (
        LeaseChange(1, 90.0, f"{0xABC:032x}", "active", "", "", Changed("ann", CARD, GIB, False)),
        LeaseChange(2, 95.5, f"{9:032x}", "ended", "expired", "its time is over"),
    )
    found = card(**changes)
    return Snapshot(
        100.0,
        "gpu1",
        "gpuleased/1",
        [found],
        leases or LEASES,
        {f"{0xABC:032x}": 3.04},
        {CARD: (None, 2.26)},
        lease_changes,
    )


def test_without_the_token_nobody_is_named() -> None:
    view = view_of(snapshot(), NAMES, 100.0, is_named=False)
    said = set(re.findall(r'"([^"]*)"', json.dumps(view)))
    assert not said & {"ann", "bob", "lease_id", "reason", "<b>because</b>", "its time is over", f"{0xABC:032x}"}
    ann, bob, other = view["cards"][0]["slices"]
    assert ann["tenant"] == other["tenant"] == NAMES.of_tenant("ann") != bob["tenant"]
    assert view["events"][1]["tenant"] == ann["tenant"]
    assert view["events"][1]["key"] == ann["key"]


def test_with_the_token_all_are() -> None:
    view = view_of(snapshot(), NAMES, 100.0, is_named=True)
    first = view["cards"][0]["slices"][0]
    assert (first["tenant"], first["lease_id"], first["reason"]) == ("ann", f"{0xABC:032x}", "<b>because</b>")
    assert first["launches_per_s"] == 3.04
    assert view["events"][0] | {"key": ""} == {
        "number": 2,
        "age_s": 4.5,
        "key": "",
        "phase": "ended",
        "cause": "expired",
        "tenant": "",
        "card_uuid": "",
        "size_bytes": None,
        "is_region": False,
        "lease_id": f"{9:032x}",
        "reason": "its time is over",
    }


@pytest.mark.parametrize("is_named", [False, True])
def test_what_both_see(is_named: bool) -> None:
    view = view_of(snapshot(drain_left_ms=5000, card_drain_left_ms=3000), NAMES, 101.5, is_named=is_named)
    assert (view["host"], view["version"], view["named"], view["age_s"]) == ("gpu1", "gpuleased/1", is_named, 1.5)
    assert view["drain_left_s"] == 3.5
    shown = view["cards"][0]
    assert shown["drain_left_s"] == 1.5
    assert (shown["uuid"], shown["capacity_bytes"], shown["launches_per_s"]) == (CARD, 79 * GIB, [None, 2.3])
    ann, bob, other = shown["slices"]
    # What passed since the look is taken off what was left then.
    assert (ann["remaining_s"], ann["ttl_s"], ann["age_s"]) == (58.5, 120.0, 61.5)
    assert (bob["state"], bob["cause"], bob["remaining_s"]) == ("fenced", "revoked", None)
    assert (other["state"], other["remaining_s"]) == ("pending", None)
    # A worker's word: no more than its lease has; unknown where there is no worker.
    assert (ann["allocated_bytes"], bob["allocated_bytes"]) == (5, None)
    # What a lease used of its card is for operators.
    assert [one.get("gpu_s", "unsaid") for one in (ann, bob)] == ([2.5, None] if is_named else ["unsaid"] * 2)
    lying = snapshot(lease(1, "ann", size_bytes=GIB, allocated_bytes=9 * GIB))
    assert view_of(lying, NAMES, 100.0, is_named=is_named)["cards"][0]["slices"][0]["allocated_bytes"] == GIB


@pytest.mark.parametrize("is_named", [False, True])
def test_a_region_stands_under_its_lease_and_is_no_slice_of_the_card(is_named: bool) -> None:
    region = lease(7, "bob", parent=f"{3:032x}", size_bytes=GIB)
    view = view_of(snapshot(*LEASES, region), NAMES, 100.0, is_named=is_named)
    slices = view["cards"][0]["slices"]
    assert [len(one["regions"]) for one in slices] == [0, 0, 1]
    (found,) = slices[2]["regions"]
    assert (found["size_bytes"], found["is_region"], "lease_id" in found) == (GIB, True, is_named)
    assert found["tenant"] == ("bob" if is_named else NAMES.of_tenant("bob"))


def test_a_node_s_fleet_and_the_names_that_it_serves() -> None:
    assert view_of(snapshot(), NAMES, 100.0, is_named=True)["fleet"] is None
    served = lease(1, "ann", name="model-a", epoch=7)
    gone = lease(2, "ann", name="model-b", epoch=8, state="fenced")
    now = replace(snapshot(served, gone, lease(3, "bob")), fleet=FleetNow("node-0", 20.0, 2))
    shown = {"node": "node-0", "horizon_left_s": 18.5, "fenced": 2, "served": 1}
    assert view_of(now, NAMES, 101.5, is_named=False)["fleet"] == shown
    assert "model-a" not in json.dumps(view_of(now, NAMES, 101.5, is_named=False))
    named = view_of(now, NAMES, 101.5, is_named=True)["fleet"]
    assert named == shown | {"names": [{"name": "model-a", "epoch": 7}]}
    assert view_of(now, NAMES, 130.0, is_named=False)["fleet"]["horizon_left_s"] == 0
    outside = replace(now, fleet=FleetNow("node-0", None, 0))
    assert view_of(outside, NAMES, 101.5, is_named=False)["fleet"]["horizon_left_s"] is None


def test_no_time_runs_below_zero() -> None:
    view = view_of(snapshot(lease(1, "ann", remaining_ms=400), drain_left_ms=0), NAMES, 101.0, is_named=False)
    assert view["cards"][0]["slices"][0]["remaining_s"] == 0
    assert view["drain_left_s"] == 0
    assert view_of(snapshot(), NAMES, 99.0, is_named=False)["age_s"] == 0


def test_pseudonyms_are_the_secrets() -> None:
    others = Pseudonyms(b"t" * 32)
    assert NAMES.of_tenant("ann") == Pseudonyms(SECRET).of_tenant("ann") != others.of_tenant("ann")
    assert NAMES.of_lease("1") != others.of_lease("1")
    assert NAMES.of_tenant("1").removeprefix("tenant ") not in NAMES.of_lease("1")
    assert NAMES.of_tenant("\ud800")


@pytest.mark.parametrize("is_named", [False, True])
def test_a_session_that_can_only_be_parked_warm_shows_and_operators_see_why(is_named: bool) -> None:
    park = {"phase": "resident", "parked_for_ms": None}
    leases = (lease(1, "ann", park=park | {"warm_only": "a module calls malloc"}), lease(2, "ann", park=park))
    view = view_of(snapshot(*leases), NAMES, 100.0, is_named=is_named)
    assert [one["is_warm_only"] for one in view["cards"][0]["slices"]] == [True, False]
    assert ("calls malloc" in json.dumps(view)) is is_named
