"""Leases from a fleet: real daemons, real directories and a real etcd. The test writes the nodes' records."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease.client import CapacityExceeded, Disconnected, GpuBuilder, GpuSession, InvalidRequest, aio
from gpulease.client.core import exchange
from gpulease.client.sync.driver import ask
from gpulease.daemon.fleet.records.fleet_records import inventory_key, node_key
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, DrainStatus, Empty
from helpers.daemon import Daemon
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_directory import Directory, put_daemon, put_node, record_of
from helpers.kernels import check_main_job
from helpers.processes import stop_process
from helpers.waiting import wait_until

MIB = 1 << 20


Start = Callable[..., Daemon]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("fleet") / "etcd") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_directory(cluster: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory_at(cluster, tmp_path_factory.mktemp("directory")) as directory:
        yield directory


@pytest.fixture
def directory(cluster: EtcdCluster, shared_directory: Directory) -> Iterator[Directory]:
    """Yield a directory of a fleet without nodes."""
    yield shared_directory
    cluster.control("del", "--prefix", node_key("").decode())
    cluster.control("del", "--prefix", inventory_key("").decode())
    nodes_known(shared_directory, 0)


@pytest.fixture
def own_directory(cluster: EtcdCluster, directory: Directory, tmp_path: Path) -> Iterator[Directory]:
    """Yield another directory of the same fleet, of this test alone."""
    with directory_at(cluster, tmp_path / "own") as own:
        yield own


@contextmanager
def directory_at(cluster: EtcdCluster, folder: Path) -> Iterator[Directory]:
    with Directory(cluster, folder) as directory:
        directory.wait_for("view of its fleet is current")
        yield directory


def fleet_builder(*directories: Directory, size_bytes: int = MIB) -> GpuBuilder:
    address = "fleet:" + ",".join(directory.address for directory in directories)
    return GpuBuilder(address).min_vram(size_bytes).lease_secs(60)


def nodes_known(directory: Directory, count: int) -> None:
    """Wait until a directory knows this number of nodes."""
    from gpulease.client.core.fleet_acquire import ask_directories
    from gpulease.client.core.lease_request import fleet_of
    from gpulease.client.sync.driver import drive

    def seen() -> bool:
        fleet = fleet_of(f"fleet:{directory.address}")
        assert fleet is not None
        return len(drive(ask_directories(fleet, Opcode.FLEET_LIST, Empty())).report["nodes"]) == count

    wait_until(seen, f"the directory sees {count} nodes")


def test_the_ten_lines_work_on_a_fleet_s_address(
    cluster: EtcdCluster, directory: Directory, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_daemon(cluster, "n1", daemon)
    nodes_known(directory, 1)
    monkeypatch.setenv("GPULEASE_ADDRESS", f"fleet:{directory.address}")
    with GpuBuilder().min_vram(64 * MIB).lease_secs(60).acquire() as lease:
        assert lease.address == daemon.address
        lease.renew(90)
        with GpuSession(lease) as session:
            check_main_job(session)
    assert daemon.leases() == []


def test_the_asyncio_face_acquires_and_reacquires_in_a_fleet(
    cluster: EtcdCluster, directory: Directory, daemon: Daemon
) -> None:
    put_daemon(cluster, "n1", daemon)
    nodes_known(directory, 1)

    async def run() -> None:
        builder = aio.GpuBuilder(f"fleet:{directory.address}").min_vram(MIB).lease_secs(60)
        async with builder.acquire() as lease:
            assert lease.address == daemon.address
            await lease.free()
            # The next lease must come from the fleet again, not from the node of the last one.
            put_node(cluster, "n1", record_of(free_bytes=4 << 30))
            await asyncio.to_thread(wait_until, lambda: "n1" not in str(_placeable(directory)), "the node is nowhere")
            with pytest.raises(CapacityExceeded, match="1 without an address"):
                await lease.reacquire()

    asyncio.run(run())


def _placeable(directory: Directory) -> list[str]:
    from gpulease.client.core.fleet_acquire import ask_directories
    from gpulease.client.core.lease_request import fleet_of
    from gpulease.client.sync.driver import drive
    from gpulease.protocol.messages import Place

    fleet = fleet_of(f"fleet:{directory.address}")
    assert fleet is not None
    answer = drive(ask_directories(fleet, Opcode.PLACE, Place(MIB, 1, "", (), None, ())))
    return [candidate.node_id for candidate in answer.candidates]


def test_a_node_that_is_full_drains_or_is_gone_is_not_the_end(
    cluster: EtcdCluster, directory: Directory, start_daemon: Start, tmp_path: Path
) -> None:
    full, draining, free = (start_daemon(vram=["1GiB"]) for _ in range(3))
    with full.builder(full.available_bytes()).acquire():
        status: DrainStatus = ask(Opcode.DRAIN, Drain(600_000), draining.address)
        assert status.left_ms is not None
        # The records are old: according to them every node has room. The only suitable node is tried last.
        for node_id, addresses, room in (
            ("full", (full.address,), 1),
            ("draining", (draining.address,), 2),
            ("gone", (f"unix:{tmp_path}/nobody.sock",), 3),
            ("free", (f"unix:{tmp_path}/nobody.sock", free.address), 4),
        ):
            put_node(cluster, node_id, record_of(*addresses, free_bytes=room << 30))
        nodes_known(directory, 4)
        with fleet_builder(directory, size_bytes=64 * MIB).acquire() as lease:
            assert lease.address == free.address
        with free.builder(free.available_bytes()).acquire(), pytest.raises(CapacityExceeded) as refused:
            fleet_builder(directory, size_bytes=64 * MIB).acquire()
    told = str(refused.value)
    assert "4 of the fleet's 4 nodes were asked" in told
    reasons = ("full: .* was requested", "draining: .*drained", "gone: .*can't connect", "free: .* was requested")
    for reason in reasons:
        assert any(re.search(reason, part) for part in told.split("; ")), (reason, told)
    ask(Opcode.DRAIN_CANCEL, Empty(), draining.address)


@pytest.mark.exhaustive
def test_room_that_comes_free_elsewhere_ends_the_wait(
    cluster: EtcdCluster, directory: Directory, start_daemon: Start
) -> None:
    daemons = [start_daemon(vram=["1GiB"]) for _ in range(2)]
    size_bytes = min(daemon.available_bytes() for daemon in daemons)
    for number, daemon in enumerate(daemons):
        put_daemon(cluster, f"n{number}", daemon)
    nodes_known(directory, 2)
    waiting = fleet_builder(directory, size_bytes=size_bytes).timeout(60)
    with daemons[0].builder(size_bytes).acquire(), daemons[1].builder(size_bytes).lease_secs(1).acquire():
        lease = waiting.acquire()
    with lease:
        assert lease.address == daemons[1].address


@pytest.mark.exhaustive
def test_who_waits_at_a_daemon_that_is_stopped_goes_on_at_another(
    cluster: EtcdCluster, directory: Directory, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PING_AFTER_S", 0.05)
    stopped, other = (start_daemon(vram=["1GiB"]) for _ in range(2))
    size_bytes = min(daemon.available_bytes() for daemon in (stopped, other))
    # The fullest node that has room is tried first. It does not reply, so the client waits there.
    for room, daemon in enumerate((stopped, other), 1):
        put_node(cluster, f"n{room}", record_of(daemon.address, free_bytes=room << 30))
    nodes_known(directory, 2)
    own, others = (daemon.builder(size_bytes).acquire() for daemon in (stopped, other))
    with ThreadPoolExecutor() as pool, own:
        waiting = pool.submit(fleet_builder(directory, size_bytes=size_bytes).timeout(600).acquire)
        wait_until(lambda: "waits in the queue" in stopped.log(), "the acquire waits at the node that is to be stopped")
        stop_process(stopped.process.pid)
        try:
            others.free()
            with waiting.result() as lease:
                assert lease.address == other.address
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
    # The stopped daemon must not keep a lease for the request that it reads so late.
    assert stopped.leases() == []


def test_a_dead_directory_is_passed_over_and_the_last_one_s_death_is_told(
    cluster: EtcdCluster, own_directory: Directory, daemon: Daemon, tmp_path: Path
) -> None:
    directory = own_directory
    put_daemon(cluster, "n1", daemon)
    with directory_at(cluster, tmp_path / "e") as other:
        nodes_known(directory, 1)
        other.kill()
        for _ in range(6):
            # The nodes are tried in random order. With six tries, the dead node is first at least once, except in one
            # of 64 runs.
            with fleet_builder(directory, other).acquire() as lease:
                assert lease.address == daemon.address
    directory.kill()
    with pytest.raises(Disconnected, match="none of the fleet's 2 directories can answer"):
        fleet_builder(directory, other).acquire()
    with pytest.raises(Disconnected, match="can't connect"):
        fleet_builder(directory).acquire()


def test_a_directory_without_etcd_says_whose_fault_it_is(
    cluster: EtcdCluster, own_directory: Directory, daemon: Daemon
) -> None:
    directory = own_directory
    put_daemon(cluster, "n1", daemon)
    nodes_known(directory, 1)
    cluster.pause(cluster.members[0])
    directory.wait_for("etcd has not answered for too long")
    with pytest.raises(Disconnected, match="this directory has not reached etcd for") as refused:
        fleet_builder(directory).acquire()
    assert "operator should check etcd" in refused.value.hint
    cluster.resume(cluster.members[0])
    directory.wait_for("view of its fleet is current", times=2)
    with fleet_builder(directory).acquire() as lease:
        assert lease.address == daemon.address


def test_the_wrong_kind_of_address_is_told(cluster: EtcdCluster, directory: Directory, daemon: Daemon) -> None:
    with pytest.raises(Exception, match="this must be sent to a directory of a fleet, not to a node") as as_directory:
        GpuBuilder(f"fleet:{daemon.address}").min_vram(MIB).acquire()
    assert "without fleet:" in str(as_directory.value)
    with pytest.raises(Exception, match="this is a fleet's directory, not a node") as as_node:
        GpuBuilder(directory.address).min_vram(MIB).acquire()
    assert "as fleet:" in str(as_node.value)
    with pytest.raises(InvalidRequest, match="is a fleet's address; use the address of a single daemon"):
        ask(Opcode.GET_INVENTORY, Empty(), f"fleet:{directory.address}")
