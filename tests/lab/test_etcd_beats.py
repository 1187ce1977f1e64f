"""Heartbeats of simulated nodes to a real etcd, as `fleet_scale` runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster

NODES = 20


@pytest.mark.exhaustive
def test_every_node_beats_and_no_write_fails(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        (member,) = cluster.members
        assert member.process is not None
        words = [member.endpoint, str(member.process.pid), str(NODES), "0.5", "2"]
        command = [sys.executable, "-P", str(Path(__file__).with_name("etcd_beats.py")), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=True)
    found = json.loads(done.stdout)
    assert found["failed"] == 0
    assert found["nodes"] == NODES
    assert found["beats_per_s"] > 0
    assert found["claims_per_s"] > 0
    # How many of the beats are watched within the measured time depends on the host.
    assert found["watched_per_s"] > 0
    assert found["inventory_bytes"] > 1_000
    assert found["etcd_bytes_per_beat"] >= 0
    assert len(found["etcd_cores"]) == len(found["etcd_us_per_write"]) == 1
