"""A fleet whose etcd has no space left: leases with names end within the horizon, and all else continues."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease.client import GpuLeaseError, GpuSession
from helpers.etcd_cluster import SMALLEST_QUOTA_BYTES, EtcdCluster
from helpers.fleet_rig import FleetNode, Worker, claims
from helpers.waiting import wait_until

NAME = "model-a"


def fill(cluster: EtcdCluster) -> None:
    """Write until etcd reports that it has no space left."""

    def is_full() -> bool:
        for number in range(8):
            cluster.try_control("put", f"/filler/{number}", "x" * 60_000)
        return "NOSPACE" in cluster.control("alarm", "list")

    wait_until(is_full, "etcd raises its alarm")


def make_room(cluster: EtcdCluster) -> None:
    """Remove old values, as an operator would."""
    status = cluster.control("endpoint", "status", "--write-out=json")
    cluster.compact(max(int(part.split(",")[0].strip("}")) for part in status.split('"revision":')[1:]))
    cluster.control("defrag")
    cluster.control("alarm", "disarm")


@pytest.mark.exhaustive
def test_without_space_in_etcd_names_end_and_the_rest_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(EtcdCluster(tmp_path, quota_bytes=SMALLEST_QUOTA_BYTES))
        node = FleetNode(cluster, "node-0", isolated="serve")
        stack.callback(node.stop)
        node.start()
        node.wait_until_joined()
        named = Worker(node.acquire(NAME))
        named.wait_until_working()
        with node.builder().acquire() as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(4096)
            session.mem_write(buffer, 0, bytes(range(16)))
            fill(cluster)
            # The node can't write its beats, so the lease with a name ends within the horizon.
            named.wait_for_end()
            node.wait_until_isolated()
            told = "refuses this node's record: etcd has no space left: compact and defragment it"
            assert told in node.fleet_check()["detail"]
            with pytest.raises(GpuLeaseError, match="no space left"):
                node.builder(NAME).acquire()
            lease.renew(700)
            assert session.mem_read(buffer, 0, 16) == bytes(range(16))
            with node.builder().acquire():
                pass
            make_room(cluster)
            node.wait_until_joined()
            assert session.mem_read(buffer, 0, 16) == bytes(range(16))
        with node.acquire(NAME):
            assert list(claims(cluster)) == [NAME]
        wait_until(lambda: not claims(cluster), "no claim is orphaned", seen=lambda: claims(cluster))
