"""A tenant's quota across all nodes: real daemons on a real etcd, which are killed and cut off."""

import os
import signal
import threading
from pathlib import Path

import pytest

from gpulease.client import GpuLease, GpuLeaseError, GpuSession, Revoked
from gpulease.client.errors import Denied
from helpers.fleet_rig import FLEET_PROCESS, FleetNode, Worker, claims, counted_bytes, fleet, quota
from helpers.processes import stop_process
from helpers.waiting import wait_until

MIB = 1 << 20
COUNTED = "[tenants.default]\nfleet_quota = true\n"


def refused(node: FleetNode, name: str = "") -> Denied:
    """Return the error of a lease that exceeds the quota."""
    with pytest.raises(Denied) as error:
        node.builder(name).acquire()
    return error.value


def fill(*nodes: FleetNode) -> list[GpuLease]:
    """Acquire a lease of 1 MiB at each node."""
    return [node.builder().acquire() for node in nodes]


def test_a_quota_holds_over_two_nodes_and_comes_back_with_the_lease(tmp_path: Path) -> None:
    with fleet(tmp_path, tenants=COUNTED) as (cluster, (first, second)):
        error = refused(first)
        assert "has no fleet quota" in str(error)
        assert "`gpulease fleet quota`" in error.hint
        quota(cluster, "default", "3MiB")
        leases = fill(first, first, second)
        for node, name in ((first, ""), (second, ""), (second, "model-a")):
            error = refused(node, name)
            assert f"has a fleet quota of {3 * MIB} bytes (3.0 MiB): 0 bytes" in str(error)
            assert "Free a lease on any node" in error.hint
        tenant = f"uid:{os.getuid()}"
        told = quota(cluster, tenant)
        assert told.startswith(f"{tenant}: {3 * MIB} bytes (3.0 MiB) by default, of which 3 leases use")
        assert all(f"{count * MIB} bytes ({count}.0 MiB) on node-{2 - count}" in told for count in (1, 2)), told
        freeing = threading.Timer(0.5, leases.pop(0).free)
        freeing.start()
        leases.append(second.builder("model-a").timeout(60).acquire())
        freeing.join()
        assert counted_bytes(cluster) == {"node-0": MIB, "node-1": 2 * MIB}
        assert f"has {4 * MIB} bytes (4.0 MiB) in the fleet; leases use {3 * MIB} bytes" in quota(
            cluster, tenant, "4MiB"
        )
        leases += fill(first)
        refused(second)
        for lease in leases:
            lease.free()
        wait_until(lambda: not counted_bytes(cluster), "all bytes came back")
        assert cluster.control("get", "--prefix", "--keys-only", "/gpulease/v1/held/").strip() == ""


@pytest.mark.exhaustive
def test_restarts_lose_no_bytes_and_count_none_twice(tmp_path: Path) -> None:
    """A restarted fleet process of a running daemon waits for a horizon before it frees bytes that it does not know.

    Daemons start sooner.
    """
    with fleet(tmp_path, nodes=1, horizon_s=30, tenants=COUNTED) as (cluster, (node,)):
        node.now.allowed_trouble.append("fleet process died")
        quota(cluster, "default", "3MiB")
        leases = fill(node, node, node)
        work = Worker(leases[0])
        work.wait_until_working()
        stop_process(node.fleet_pid())
        # The stopped fleet process is not told of this lease's end. The next one must find it.
        leases.pop().free()
        killed = node.fleet_pid()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: node.workers().get(FLEET_PROCESS, killed) != killed, "another runs")
        wait_until(lambda: counted_bytes(cluster) == {"node-0": 2 * MIB}, "the ended lease's bytes came back")
        node.restart()
        node.wait_until_joined()
        leases += fill(node)
        assert counted_bytes(cluster) == {"node-0": 3 * MIB}
        refused(node)
        count = len(work.spans)
        wait_until(lambda: len(work.spans) > count or work.error, "the session goes on")
        assert work.error is None, (work.error, node.logs())
        work.stop()
        for lease in leases:
            lease.free()
        wait_until(lambda: not counted_bytes(cluster), "all bytes came back")


@pytest.mark.exhaustive
def test_a_dead_nodes_bytes_come_back_when_its_leases_have_ended(tmp_path: Path) -> None:
    with fleet(tmp_path, tenants=COUNTED) as (cluster, (first, second)):
        quota(cluster, "default", "1MiB")
        before = Worker(fill(first)[0])
        before.wait_until_working()
        first.kill()
        with second.builder().timeout(120).acquire() as lease:
            after = Worker(lease)
            after.wait_until_working()
            before.wait_for_end()
            after.stop()
            assert max(end for _, end in before.spans) < min(begin for begin, _ in after.spans)
            assert counted_bytes(cluster) == {"node-1": MIB}


def test_a_node_that_is_cut_off_ends_counted_leases_and_grants_none(tmp_path: Path) -> None:
    """This also holds if the setting lets the node serve other leases while it is cut off."""
    with fleet(tmp_path, nodes=1, isolated="serve", tenants=COUNTED) as (cluster, (node,)):
        quota(cluster, "default", "2MiB")
        work = Worker(fill(node)[0])
        work.wait_until_working()
        cluster.pause(cluster.members[0])
        assert isinstance(work.wait_for_end(), Revoked)
        node.wait_until_isolated()
        with pytest.raises(GpuLeaseError, match="cut off from its fleet"):
            node.builder().acquire()
        cluster.resume(cluster.members[0])
        node.wait_until_joined()
        wait_until(lambda: not counted_bytes(cluster), "the ended lease's bytes came back")
        for lease in fill(node, node):
            lease.free()


@pytest.mark.exhaustive
def test_a_name_that_was_claimed_before_a_fence_is_not_served_once_bytes_come_free(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1, tenants=COUNTED) as (cluster, (node,)):
        node.now.allowed_trouble.append("the fleet has declared this node dead")
        quota(cluster, "default", "1MiB")
        # Keep the object: a lease object that is garbage collected frees its lease.
        (held,) = fill(node)
        errors: list[GpuLeaseError] = []

        def ask() -> None:
            try:
                node.builder("model-a").timeout(300).acquire()
            except GpuLeaseError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: "model-a" in claims(cluster), "the name is claimed, and its bytes are awaited")
        cluster.control("del", "/gpulease/v1/nodes/node-0")
        asking.join()
        assert "the fleet has declared this node dead" in str(errors[0])
        assert node.now.query(held.lease_id)["cause"] == "isolated"
        node.wait_until_joined()
        wait_until(lambda: not claims(cluster) and not counted_bytes(cluster), "all claims are gone")
        with node.builder("model-a").acquire():
            pass


@pytest.mark.exhaustive
def test_who_has_no_quota_does_not_wait_for_etcd(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1, horizon_s=300) as (cluster, (node,)):
        cluster.pause(cluster.members[0])
        with node.builder().acquire() as lease, GpuSession(lease) as session:
            session.mem_alloc(4096)
        cluster.resume(cluster.members[0])
