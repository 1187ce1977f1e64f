"""A fleet of real daemons on a real etcd: only one node serves a name, whatever is killed, stopped or cut off."""

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulease.client import GpuLeaseError, GpuSession, Revoked
from gpulease.client.sync.driver import ask
from gpulease.daemon.fleet.records.fleet_records import InventoryRecord
from gpulease.protocol import Opcode
from gpulease.protocol.lease_options import REQUEST_ID
from gpulease.protocol.messages import LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_rig import FENCED, HORIZON_S, FleetNode, Worker, claims, fleet
from helpers.lasting_fleet import LastingFleet, lent_fleet, stop_fleets
from helpers.processes import stop_process
from helpers.readable import readable
from helpers.waiting import wait_until

NAME = "model-a"

Fleet = tuple[EtcdCluster, tuple[FleetNode, FleetNode]]


@pytest.fixture(scope="module")
def _fleets() -> Iterator[list[LastingFleet]]:
    yield from stop_fleets()


@pytest.fixture
def pair(_fleets: list[LastingFleet], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    for lasting in lent_fleet(_fleets, tmp_path_factory.mktemp("fleet")):
        yield lasting.cluster, lasting.nodes


def no_overlap(first: Worker, second: Worker) -> bool:
    return max(end for _, end in first.spans) < min(begin for begin, _ in second.spans)


def test_a_name_is_served_by_one_node_at_a_time(pair: Fleet) -> None:
    cluster, (first, second) = pair
    with first.builder(NAME).acquire() as lease:
        assert (lease.name, lease.epoch > 0) == (NAME, True)
        report = first.now.query(lease.lease_id)
        assert (report["name"], report["epoch"]) == (NAME, lease.epoch)
        assert claims(cluster)[NAME]["node_id"] == "node-0"
        for node in (first, second):
            with pytest.raises(GpuLeaseError, match="has the name"):
                node.builder(NAME).acquire()
        lease.renew(700)
        with second.builder("model-b").acquire() as other:
            assert other.epoch > lease.epoch
    wait_until(lambda: not claims(cluster), "the claims are deleted with the leases")
    with second.acquire(NAME) as again:
        assert again.epoch > other.epoch


def kill_daemon(node: FleetNode) -> None:
    node.kill()


def stop_daemon(node: FleetNode) -> None:
    stop_process(node.now.process.pid)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [kill_daemon, stop_daemon])
def test_a_dead_nodes_name_lives_on_elsewhere(pair: Fleet, fault: Callable[[FleetNode], None]) -> None:
    """If the daemon is killed or stopped, no claimed lease runs past its horizon, and no name is served twice."""
    _, (first, second) = pair
    lease = first.acquire(NAME)
    before = Worker(lease)
    before.wait_until_working()
    anonymous = Worker(first.builder().acquire())
    anonymous.wait_until_working()
    fault(first)
    with second.acquire(NAME) as again:
        after = Worker(again)
        after.wait_until_working()
        before.wait_for_end()
        after.stop()
        assert no_overlap(before, after)
        assert again.epoch > lease.epoch
        assert anonymous.error is None
    anonymous.stop()


@pytest.mark.exhaustive
def test_who_has_no_name_feels_nothing_while_etcd_is_away(pair: Fleet) -> None:
    cluster, (holding, other) = pair
    named = Worker(holding.acquire(NAME))
    named.wait_until_working()
    with holding.builder().acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(4096)
        cluster.pause(cluster.members[0])
        assert isinstance(named.wait_for_end(), Revoked)
        holding.wait_until_isolated()
        assert "etcd" in holding.fleet_check()["detail"]
        lease.renew(700)
        session.mem_write(buffer, 0, bytes(4096))
        for name in (NAME, ""):
            with pytest.raises(GpuLeaseError, match="fleet"):
                holding.builder(name).acquire()
        cluster.resume(cluster.members[0])
        holding.wait_until_joined()
        assert session.mem_read(buffer, 0, 4) == bytes(4)
    with other.acquire(NAME):
        pass
    wait_until(lambda: not claims(cluster), "no claim is orphaned")


@pytest.mark.exhaustive
def test_an_operator_may_have_leases_without_a_name_granted_meanwhile(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1, isolated="serve") as (cluster, (node,)):
        cluster.pause(cluster.members[0])
        node.wait_until_isolated()
        with node.builder().acquire() as lease, GpuSession(lease) as session:
            session.mem_alloc(4096)
        with pytest.raises(GpuLeaseError, match="fleet"):
            node.builder(NAME).acquire()
        cluster.resume(cluster.members[0])
        node.wait_until_joined()


@pytest.mark.exhaustive
def test_nothing_is_granted_on_a_claim_whose_result_is_unknown(pair: Fleet) -> None:
    cluster, (first, second) = pair
    cluster.pause(cluster.members[0])
    with pytest.raises(GpuLeaseError) as refused:
        first.builder(NAME).acquire()
    assert "etcd" in str(refused.value) or "fleet" in str(refused.value)
    assert not first.now.leases()
    cluster.resume(cluster.members[0])
    first.wait_until_joined()
    with second.acquire(NAME):
        assert not first.now.leases()


@pytest.mark.exhaustive
def test_a_fleet_process_that_dies_costs_no_lease(tmp_path: Path) -> None:
    """The horizon is long, because a busy host takes seconds to start another fleet process."""
    with fleet(tmp_path, nodes=1, horizon_s=120) as (cluster, (node,)):
        node.now.allowed_trouble.append("fleet process died")
        lease = node.acquire(NAME)
        work = Worker(lease)
        work.wait_until_working()
        killed = node.fleet_pid()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: node.workers().get("gpul-fleet", killed) != killed, "another runs")
        with node.acquire("model-b"):
            assert work.error is None, work.error
            assert claims(cluster)[NAME]["lease_id"] == f"{lease.lease_id:032x}"
        work.stop()
        lease.free()


@pytest.mark.exhaustive
def test_a_restarted_daemon_goes_on_with_its_names(tmp_path: Path) -> None:
    """The horizon is long, because a busy host takes seconds to start a daemon."""
    with fleet(tmp_path, nodes=1, horizon_s=120) as (cluster, (node,)):
        lease = node.acquire(NAME)
        work = Worker(lease)
        work.wait_until_working()
        node.restart()
        node.wait_until_joined()
        count = len(work.spans)
        wait_until(lambda: len(work.spans) > count or work.error, "the session goes on")
        assert work.error is None, (work.error, node.logs())
        assert node.now.query(lease.lease_id)["epoch"] == lease.epoch
        assert NAME in claims(cluster)
        work.stop()
        lease.free()
        wait_until(lambda: not claims(cluster), "the claim ends with the lease")


@pytest.mark.exhaustive
def test_a_node_that_is_stopped_gives_its_names_to_the_others_at_once(pair: Fleet) -> None:
    cluster, (first, second) = pair
    names = [f"model-{number}" for number in range(3)]
    leases = [first.builder(name).acquire() for name in names]
    # Stop as if by Ctrl-C, which ends sessions.
    first.now.process.send_signal(signal.SIGINT)
    assert first.now.wait_for_exit() == 0
    assert claims(cluster) == {}
    nodes = cluster.control("get", "--prefix", "--keys-only", "/gpulease/v1/nodes/")
    assert nodes.split() == ["/gpulease/v1/nodes/node-1"]
    for name in names:
        second.builder(name).acquire().free()
    first.start()
    first.wait_until_joined()
    assert FENCED not in first.now.log()
    with first.builder(names[0]).acquire():
        pass
    del leases


@pytest.mark.exhaustive
def test_leases_that_go_on_without_their_daemon_stay_claimed(tmp_path: Path) -> None:
    """The horizon is long, because a busy host takes seconds to start a daemon."""
    with fleet(tmp_path, nodes=1, horizon_s=120) as (cluster, (node,)):
        node.config = f'on_stop = "keep"\n{node.config}'
        node.restart()
        node.wait_until_joined()
        lease = node.builder(NAME).acquire()
        node.builder("model-b").acquire().free()
        node.now.process.send_signal(signal.SIGTERM)
        assert node.now.wait_for_exit() == 0
        assert list(claims(cluster)) == [NAME]
        assert "node-0" in cluster.control("get", "--prefix", "--keys-only", "/gpulease/v1/nodes/")
        node.start()
        node.wait_until_joined()
        assert node.now.query(lease.lease_id)["epoch"] == lease.epoch
        lease.free()


@pytest.mark.exhaustive
def test_a_node_that_is_cut_off_knows_its_request_ids(pair: Fleet) -> None:
    """A node that was just started, and has not joined, must also know them.

    Else a client that believes its refusal would get a second lease elsewhere.
    """
    cluster, (node, _) = pair
    request_id = LeaseParameter(REQUEST_ID.tag, secrets.token_bytes(16))
    wanted = LeaseAlloc(GPU_RESOURCE_TYPE, 1 << 20, 600_000, 0, None, (request_id,))
    first = ask(Opcode.LEASE_ALLOC, wanted, node.address)
    cluster.pause(cluster.members[0])
    node.restart()
    assert "has not joined" in node.fleet_check()["detail"]
    with pytest.raises(GpuLeaseError, match="has not joined"):
        node.builder().acquire()
    assert ask(Opcode.LEASE_ALLOC, wanted, node.address).lease_id == first.lease_id
    cluster.resume(cluster.members[0])
    node.wait_until_joined()
    assert ask(Opcode.LEASE_ALLOC, wanted, node.address).lease_id == first.lease_id
    assert len(node.now.leases()) == 1
    node.now.revoke(first.lease_id)


@pytest.mark.exhaustive
def test_a_node_without_an_address_for_other_hosts_says_so_and_tells_none(pair: Fleet) -> None:
    cluster, _ = pair
    node = FleetNode(cluster, "alone", addresses=[])
    node.start().allowed_trouble.append("directories can't offer this node")
    try:
        node.wait_until_joined()
        assert "directories can't offer this node to tenants: add a tls: address to listen" in node.logs()
        found = cluster.control("get", "/gpulease/v1/inventories/alone", "--print-value-only")
        assert readable(InventoryRecord.read(found.encode())).addresses == ()
    finally:
        node.stop()


@pytest.mark.exhaustive
def test_a_node_with_another_horizon_stays_out_and_says_why(pair: Fleet) -> None:
    cluster, _ = pair
    other = FleetNode(cluster, "other", horizon_s=HORIZON_S + 1)
    other.start().allowed_trouble.append("fleet")
    try:
        told = f"horizon_s = {HORIZON_S}, but this node has {HORIZON_S + 1}"
        wait_until(lambda: told in other.fleet_check()["detail"], "it is refused", seen=other.logs)
        with pytest.raises(GpuLeaseError, match=told):
            other.builder("alpha").acquire()
    finally:
        other.stop()


@pytest.mark.exhaustive
def test_a_second_daemon_of_one_node_id_stays_out(pair: Fleet) -> None:
    cluster, (node, _) = pair
    lease = node.acquire(NAME)
    work = Worker(lease)
    work.wait_until_working()
    clone = FleetNode(cluster, node.node_id)
    clone.start().allowed_trouble.append("fleet")
    try:
        told = "another daemon uses this node's id"
        wait_until(lambda: told in clone.fleet_check()["detail"], "it is refused", seen=clone.logs)
        with pytest.raises(GpuLeaseError, match=told):
            clone.builder(NAME).acquire()
        assert work.error is None, work.error
        assert claims(cluster)[NAME]["lease_id"] == f"{lease.lease_id:032x}"
    finally:
        clone.stop()
    work.stop()
    lease.free()


@pytest.mark.exhaustive
def test_a_node_that_lost_its_journal_serves_no_name_that_may_live(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1) as (cluster, (node,)):
        before = Worker(node.acquire(NAME))
        before.wait_until_working()
        node.kill()
        # The earlier daemon is killed, but its worker still runs, and another host takes the node's id.
        heir = FleetNode(cluster, node.node_id)
        heir.start().allowed_trouble.append("fleet")
        try:
            with heir.acquire(NAME) as again:
                after = Worker(again)
                after.wait_until_working()
                before.wait_for_end()
                after.stop()
            assert no_overlap(before, after)
        finally:
            heir.stop()
