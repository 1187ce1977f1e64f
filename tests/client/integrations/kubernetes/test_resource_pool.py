"""Writes that bring a pool's slices to what the cards are: from any state, in one round, and none after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.models.resource_v1 import ResourceSlice

from gpulease.client.integrations.kubernetes.kubernetes_objects import parse_quantity
from gpulease.client.integrations.kubernetes.resource_pool import (
    MAX_SLICE_DEVICES,
    ApiWrite,
    Owner,
    PublishedCard,
    Trouble,
    Verb,
    device_of,
    quantity_text,
    slice_name,
    writes_to,
)
from helpers.kubernetes_api import canonical, check_type

OWNER = Owner("node-a", "uid-1")
GIB = 1 << 30


def devices_of(count: int, size_bytes: int = 80 * GIB, *troubles: Trouble) -> list[dict[str, Any]]:
    return [device_of(PublishedCard(f"GPU-{number}", "H200", "cuda", size_bytes, troubles)) for number in range(count)]


def applied(writes: Sequence[ApiWrite], stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a server has after these writes. Each must be possible in its turn."""
    found = {one["metadata"]["name"]: dict(one) for one in stored}
    for write in writes:
        match write.verb:
            case Verb.DELETE:
                del found[write.name]
            case Verb.CREATE:
                assert write.name not in found
                found[write.name] = write.slice | {"metadata": write.slice["metadata"] | {"resourceVersion": "1"}}
            case Verb.REPLACE:
                assert write.slice["metadata"]["resourceVersion"] == found[write.name]["metadata"]["resourceVersion"]
                found[write.name] = write.slice
    return [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("-")[2]))]


def is_complete(stored: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the scheduler uses the pool: all slices of one generation, as many as they say."""
    return {(one["spec"]["pool"]["generation"], one["spec"]["pool"]["resourceSliceCount"]) for one in stored} == {
        (stored[0]["spec"]["pool"]["generation"], len(stored))
    }


@given(
    before=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 130), st.sampled_from(["uid-0", "uid-1"])), max_size=3),
    names=st.lists(st.integers(0, 5), unique=True, max_size=3),
    count=st.integers(0, 3 * MAX_SLICE_DEVICES),
    data=st.data(),
)
def test_from_any_state_one_round_of_writes_suffices(
    before: list[tuple[int, int, str]], names: list[int], count: int, data: st.DataObject
) -> None:
    stored: list[dict[str, Any]] = []
    for number, (generation, devices, uid) in zip(names, before, strict=False):
        (made, *_) = writes_to(devices_of(min(devices, 64)), [], Owner("node-a", uid), {})
        made.slice["metadata"] |= {"name": slice_name("node-a", number), "resourceVersion": "7"}
        made.slice["spec"]["pool"] |= {"generation": generation, "resourceSliceCount": data.draw(st.integers(1, 3))}
        stored.append(made.slice)
    wanted = devices_of(count)
    writes = writes_to(wanted, stored, OWNER, {})
    after = applied(writes, stored)
    assert is_complete(after)
    assert [device for one in after for device in one["spec"]["devices"]] == wanted
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == "uid-1" for one in after)
    assert writes_to(wanted, after, OWNER, {}) == []
    # A reader that has seen a generation never meets an older one.
    newest = max((one["spec"]["pool"]["generation"] for one in stored), default=0)
    assert all(write.slice["spec"]["pool"]["generation"] >= newest for write in writes if write.verb is not Verb.DELETE)
    for write in writes:
        if write.verb is not Verb.DELETE:
            check_type(write.slice, ResourceSlice)


def test_one_changed_slice_keeps_the_generation_and_several_get_a_new_one() -> None:
    stored = applied(writes_to(devices_of(100), [], OWNER, {}), [])
    changed = devices_of(100)
    changed[70] = device_of(PublishedCard("GPU-70", "H200", "cuda", 10 * GIB))
    (write,) = writes_to(changed, stored, OWNER, {})
    assert (write.verb, write.slice["spec"]["pool"]["generation"]) == (Verb.REPLACE, 1)
    changed[3] = device_of(PublishedCard("GPU-3", "H200", "cuda", 10 * GIB))
    assert [write.slice["spec"]["pool"]["generation"] for write in writes_to(changed, stored, OWNER, {})] == [2, 2]


def test_a_taint_that_stays_keeps_the_time_at_which_it_was_added() -> None:
    stored = applied(writes_to(devices_of(1, GIB, Trouble.DRAINED), [], OWNER, {}), [])
    stored[0]["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-11-28T12:00:00Z"
    assert writes_to(devices_of(1, GIB, Trouble.DRAINED), stored, OWNER, {}) == []
    (write,) = writes_to(devices_of(1, GIB, Trouble.DRAINED, Trouble.SICK), stored, OWNER, {})
    times = [taint.get("timeAdded") for taint in write.slice["spec"]["devices"][0]["taints"]]
    assert times == ["2026-11-28T12:00:00Z", None]


@pytest.mark.parametrize(
    ("free", "troubles", "value", "keys"),
    [
        (80 * GIB, (), "80Gi", []),
        (80 * GIB + 5, (), "80Gi", []),
        (GIB // 2, (), "512Mi", []),
        (0, (), "1Mi", ["gpulease.internal/full"]),
        (0, (Trouble.FENCED,), "1Mi", ["gpulease.internal/fenced"]),
        (80 * GIB, (Trouble.DRAINED, Trouble.SICK), "80Gi", ["gpulease.internal/drained", "gpulease.internal/sick"]),
    ],
)
def test_a_card_offers_whole_steps_and_says_what_is_wrong(
    free: int, troubles: tuple[Trouble, ...], value: str, keys: list[str]
) -> None:
    device = device_of(PublishedCard("GPU-0123", "NVIDIA H200", "cuda", free, troubles))
    assert device["name"] == "gpu-0123"
    assert device["capacity"]["vram"]["value"] == value
    assert [taint["key"] for taint in device.get("taints", [])] == keys


@given(st.integers(1, 2**62))
def test_a_size_is_written_in_the_form_in_which_the_server_stores_it(size_bytes: int) -> None:
    assert parse_quantity(quantity_text(size_bytes)) == size_bytes
    if size_bytes % 1024 == 0:
        assert canonical(quantity_text(size_bytes)) == quantity_text(size_bytes)


def test_slices_of_nodes_with_long_names_have_names_of_their_own() -> None:
    long = "a" * 250
    names = {slice_name(node, number) for node in (long, long + "b", "a") for number in range(3)}
    assert len(names) == 9
    assert max(map(len, names)) <= 253
