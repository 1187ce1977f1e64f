"""Values in etcd that no daemon wrote: a real fleet continues, and reports what it can't read."""

import json
import os
import re
from pathlib import Path

import pytest

from gpulease.client import GpuLeaseError
from gpulease.client.sync.driver import ask
from gpulease.daemon.fleet.records.fleet_records import CLOCKS, EPOCHS, inventory_key, name_key, node_key
from gpulease.daemon.fleet.rules.quota_records import shard_key
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.fleet_rig import FleetNode, fleet, quota
from helpers.waiting import wait_until

COUNTED = "[tenants.default]\nfleet_quota = true\n"
TENANT = f"uid:{os.getuid()}"
HUGE = "9" * 5_000

FOREIGN = {
    CLOCKS + b"zz": '{"instance":"x","revision":1,"low_ns":1e999,"high_ns":1}',
    CLOCKS + b"03": '{"instance":"x","low_ns":1,"high_ns":1,"revision":' + HUGE + "}",
    EPOCHS: '{"generation":"x","base":1e999}',
    inventory_key("foreign"): '{"cards":[{"capacity_bytes":1e999}]}',
    name_key("model-b"): '{"node_id":"n","incarnation":' + HUGE + "}",
    node_key("foreign"): json.dumps({"nonce": "n", "boot_ms": 2**70}),
    node_key("half"): '{"nonce":"\\ud800"}',
}


def unreadable_count(node: FleetNode) -> int:
    """Return the number of unreadable values in the node's metrics."""
    text = ask(Opcode.METRICS, Empty(), node.address).exposition
    found = re.search(r"^gpu_fleet_unreadable_values_total (\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def refusal(node: FleetNode) -> str:
    """Return the node's reason for refusing the name whose claim can't be read."""
    with pytest.raises(GpuLeaseError) as refused:
        node.builder("model-b").acquire()
    return str(refused.value)


def says_so_and_goes_on(node: FleetNode) -> None:
    """Check a node that is a member. One that is cut off reports that as well."""
    wait_until(lambda: "in etcd can't be read" in node.fleet_check()["detail"], "it says so", seen=node.logs)
    wait_until(lambda: "cut off" not in node.fleet_check()["detail"], "it has joined", seen=node.logs)
    # A node that joins while the record of epochs is unreadable refuses all names until a member has written it again.
    unreadable = "claim of model-b can't be read; an operator must delete it"
    wait_until(lambda: unreadable in refusal(node), "the claim is reported", seen=node.logs)
    assert unreadable_count(node) >= 2
    assert "values in the fleet's etcd can't be read, and are treated as missing" in node.logs()


@pytest.mark.exhaustive
def test_no_value_in_etcd_stops_a_fleet(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1, tenants=COUNTED) as (cluster, (first,)):
        quota(cluster, TENANT, "8MiB")
        held = first.acquire("model-a")
        for key, value in FOREIGN.items():
            cluster.control("put", key.decode(), value)
        third = FleetNode(cluster, "node-9", tenants=COUNTED)
        third.start()
        try:
            for node in (first, third):
                says_so_and_goes_on(node)
            shard = shard_key(TENANT, 3).decode()
            sound = cluster.control("get", shard, "--print-value-only").strip()
            for value in ('{"budget":1e999,"used":{},"default":0}', '{"budget":' + HUGE + ',"used":{},"default":0}'):
                cluster.control("put", shard, value)
                with pytest.raises(GpuLeaseError, match="can't be read: an operator of the fleet must repair it"):
                    third.builder().acquire()
            cluster.control("put", shard, sound)
            third.builder().acquire().free()
            assert first.now.query(held.lease_id)["state"] == "active"
            first.kill()
            third.acquire("model-a").free()
        finally:
            third.now.allowed_trouble.append("values in the fleet's etcd can't be read")
            third.stop()
