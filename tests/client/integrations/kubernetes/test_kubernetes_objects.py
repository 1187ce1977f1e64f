"""Kubernetes' objects: what the DRA driver reads from them, and what it refuses."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.integrations.kubernetes.kubelet_plugin import ClaimRef
from gpulease.client.integrations.kubernetes.kubernetes_objects import (
    UnusableClaim,
    parse_claim,
    parse_quantity,
)
from helpers.kubelet import DRIVER, NODE, POD_USER, Claim

CLAIM = Claim({"gpu": ("cpu-0", "4Gi")})
REF = ClaimRef(CLAIM.namespace, CLAIM.uid, CLAIM.name)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4Gi", 4 << 30),
        ("1.5Gi", 3 << 29),
        (".5Ki", 512),
        ("4G", 4 * 10**9),
        ("12k", 12_000),
        ("1e9", 10**9),
        ("2E3", 2_000),
        ("1500m", 2),
        ("64Mi", 64 << 20),
        (7, 7),
    ],
)
def test_a_quantity_is_whole_bytes_rounded_up(text: object, size: int) -> None:
    assert parse_quantity(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "4GiB", "4 Gi", "1e99", "9Ei9", "1_000", "8Ei", "nan", None, True, 1.5]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(UnusableClaim):
        parse_quantity(text)


def test_another_driver_s_devices_are_not_looked_at() -> None:
    found = CLAIM.as_object()
    other = {"request": "nic", "driver": "nic.example", "pool": "elsewhere", "device": "x"}
    found["status"]["allocation"]["devices"]["results"].append(other)
    found["status"]["allocation"]["devices"]["config"].append({"opaque": {"driver": "nic.example", "parameters": 3}})
    want = parse_claim(found, REF, DRIVER, NODE)
    assert [(device.request, device.size_bytes) for device in want.devices] == [("gpu", 4 << 30)]
    assert [device.user for device in want.devices] == [POD_USER]


def test_a_claim_s_own_parameters_come_after_its_class_s() -> None:
    found = replace(CLAIM, parameters={"leaseSeconds": 5}).as_object()
    of_class = replace(CLAIM, parameters={"user": 7, "leaseSeconds": 9}).as_object()
    configs = [one["status"]["allocation"]["devices"]["config"] for one in (of_class, found)]
    found["status"]["allocation"]["devices"]["config"] = [*configs[0], *configs[1]]
    want = parse_claim(found, REF, DRIVER, NODE)
    assert [(device.user, device.lease_s) for device in want.devices] == [(7, 5)]


def test_devices_of_another_node_and_too_many_are_refused() -> None:
    with pytest.raises(UnusableClaim, match="this node is node-b"):
        parse_claim(CLAIM.as_object(), REF, DRIVER, "node-b")
    for count in (0, 33):
        claim = replace(CLAIM, parts={f"gpu-{number}": ("cpu-0", "1Mi") for number in range(count)})
        with pytest.raises(UnusableClaim, match=f"not {count}"):
            parse_claim(claim.as_object(), REF, DRIVER, NODE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(found=JSON, at=st.sampled_from(["status", "allocation", "devices", "results", "config", "one", "opaque"]))
def test_any_object_is_read_or_refused(found: Any, at: str) -> None:
    whole = CLAIM.as_object()
    allocation = whole["status"]["allocation"]
    devices = allocation["devices"]
    holder, name = {
        "status": (whole, "status"),
        "allocation": (whole["status"], "allocation"),
        "devices": (allocation, "devices"),
        "results": (devices, "results"),
        "config": (devices, "config"),
        "one": (devices["results"], 0),
        "opaque": (devices["config"][0], "opaque"),
    }[at]
    holder[name] = found
    with suppress(UnusableClaim):
        assert parse_claim(whole, REF, DRIVER, NODE).devices
