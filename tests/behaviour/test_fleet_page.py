"""The web page of a real node in a fleet: its membership, and the names that it serves."""

import re
from pathlib import Path
from typing import Any, Final

import httpx

from gpulease.daemon.fleet.records.fleet_records import GENERATION
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_rig import HORIZON_S, FleetNode
from helpers.waiting import wait_until

TOKEN: Final = "0123456789abcdef0123456789ABCDEF"


def shown(node: FleetNode, token: str = "") -> dict[str, Any]:
    found = re.search(r"serves its web page at (http[^\s\"]+)", node.now.log())
    assert found is not None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(found[1] + "api/v1/state", headers=headers, timeout=60, trust_env=False)
    fleet: dict[str, Any] = answer.json()["fleet"]
    return fleet


def test_a_node_shows_its_fleet(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with EtcdCluster(tmp_path / "etcd") as cluster:
        cluster.control("put", GENERATION.decode(), "made by the test")
        node = FleetNode(cluster, "node-0")
        node.config = f'http = "127.0.0.1:0"\nhttp_token_file = "{token}"\n{node.config}'
        try:
            node.start()
            node.wait_until_joined()
            wait_until(lambda: shown(node)["horizon_left_s"], "the page knows it, too")
            joined = shown(node)
            assert (joined["node"], joined["fenced"], joined["served"]) == ("node-0", 0, 0)
            assert 0 < joined["horizon_left_s"] <= HORIZON_S
            with node.builder("model-a").acquire() as lease:
                served = [{"name": "model-a", "epoch": lease.epoch}]
                wait_until(lambda: shown(node, TOKEN)["names"] == served, "the name is shown to the operator")
                assert (shown(node)["served"], "names" in shown(node)) == (1, False)
                cluster.pause(cluster.members[0])
                wait_until(lambda: shown(node)["horizon_left_s"] == 0, "it is cut off", seen=lambda: shown(node))
                cluster.resume(cluster.members[0])
                wait_until(lambda: shown(node)["horizon_left_s"] > 0, "it is in again", seen=lambda: shown(node))
        finally:
            node.stop()
