"""Contexts that serve their tenant's next lease: the same process, which contains nothing of the lease before."""

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    GpuBuilder,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    InvalidHandle,
    KernelArgs,
    LeaseFreed,
    SyncFailed,
    my_audience,
)
from gpulease.client.sync.driver import ask
from gpulease.client.verify.claims import SECRET_BYTES, send_and_fetch
from gpulease.client.verify.faulty_kernels import count_set, fill, rule_breakers
from gpulease.client.verify.memory_search import count_in_process
from gpulease.protocol import Exclusivity, Opcode
from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission
from gpulease.protocol.messages import CapabilityPresent, Empty
from helpers import audit_log
from helpers.daemon import Daemon, Faults
from helpers.kernels import FAULTS, check_main_job, start_endless, start_stray_store
from helpers.lasting import LastingDaemon
from helpers.processes import is_running, stop_process
from helpers.raw_peer import RawPeer
from helpers.recycling import PATIENT, SETTINGS, SLOW_SCRUBS, shared, wait_until_full
from helpers.waiting import PATIENCE_S, wait_until
from helpers.working import working

MIB = 1 << 20
SIZES = (32, 100, 1000, 5000, 70_000, 300_000, 2 * MIB)


def card(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.inventory().details[0])


@pytest.fixture(scope="module")
def shared_recycling() -> Iterator[Daemon]:
    """The daemon of several tests. The context of one test's last lease may serve the next one's first."""
    yield from shared(Daemon(config=SETTINGS, tcp=True, faults=PATIENT))


@pytest.fixture
def recycling(shared_recycling: Daemon) -> Daemon:
    wait_until_full(shared_recycling)
    return shared_recycling


def freed(daemon: Daemon, lease: GpuLease) -> int:
    """Free a lease. Returns the id of the process that served it."""
    pid = daemon.worker_pid(lease.lease_id)
    lease.free()
    return pid


@pytest.mark.exhaustive
def test_the_same_process_serves_the_tenants_next_lease(recycling: Daemon) -> None:
    first = recycling.builder(8 * MIB).acquire()
    session = GpuSession(first)
    check_main_job(session)
    pid = freed(recycling, first)
    assert is_running(pid)
    assert (card(recycling)["recycled_contexts"], card(recycling)["held_bytes"]) == (1, 0)
    with pytest.raises(LeaseFreed):
        session.sync()
    for size in (MIB, 16 * MIB):
        with recycling.builder(size).acquire() as lease, GpuSession(lease) as again:
            assert recycling.worker_pid(lease.lease_id) == pid
            assert lease.query()["operations"] <= 1
            assert lease.query()["allocated_bytes"] == 0
            check_main_job(again)
            again.mem_free(again.mem_alloc(size))
            with pytest.raises(AllocFailed):
                again.mem_alloc(size + 1)
    with pytest.raises(LeaseFreed):
        GpuSession(first)


@pytest.mark.exhaustive
def test_nothing_of_a_lease_is_left_for_the_next(recycling: Daemon) -> None:
    """Neither kernels nor any writable byte of the process contain it, however it was brought in."""
    secret = secrets.token_bytes(SECRET_BYTES)
    lease = recycling.builder(16 * MIB).acquire()
    pid = recycling.worker_pid(lease.lease_id)
    with GpuSession(lease) as session:
        kept = send_and_fetch(session, secret)
        for size in SIZES:
            data = (secret * (size // SECRET_BYTES + 1))[:size]
            buffer = session.mem_alloc(size)
            session.mem_write(buffer, 0, data)
            assert bytes(session.mem_read(buffer, 0, size)) == data
        module = session.module_load(rule_breakers())
        everything = session.mem_alloc(MIB)
        fill(session, module, everything, MIB // 4, 0xA5A5A5A5)
        session.sync()
        assert count_in_process(pid, secret)
        del kept
    lease.free()
    assert count_in_process(pid, secret) == 0
    with recycling.builder(16 * MIB).acquire() as lease, GpuSession(lease) as session:
        assert recycling.worker_pid(lease.lease_id) == pid
        for handle in (buffer, everything):
            with pytest.raises(InvalidHandle):
                session.mem_read(handle, 0, 4)
        with pytest.raises(GpuLeaseError):
            session.launch(module, "fill", [1], [1], KernelArgs().push_buffer(session.mem_alloc(4)))
        module = session.module_load(rule_breakers())
        assert not session.empty(4 * MIB, np.uint8).any()
        buffers = [session.mem_alloc(size) for size in (*SIZES, 8 * MIB)]
        assert not sum(count_set(session, module, one, one.size_bytes // 4) for one in buffers)
        assert count_in_process(pid, secret) == 0


def guest(session: GpuSession, lease: GpuLease, daemon: Daemon) -> None:
    grant = lease.issue(SESSION_PERMISSIONS, my_audience(daemon.tcp_address))
    with GpuSession.attach(grant, daemon.tcp_address) as other:
        other.sync()


def untold_fault(session: GpuSession, lease: GpuLease, daemon: Daemon) -> None:
    start_stray_store(session, session.module_load(FAULTS), session.mem_alloc(4))


def fault(session: GpuSession, lease: GpuLease, daemon: Daemon) -> None:
    untold_fault(session, lease, daemon)
    with pytest.raises(SyncFailed):
        session.sync()


def hang(session: GpuSession, lease: GpuLease, daemon: Daemon) -> None:
    stop_process(daemon.worker_pid(lease.lease_id))


IN_DOUBT: dict[str, Callable[[GpuSession, GpuLease, Daemon], object]] = {
    "a fault": fault,
    "a fault nobody was told of": untold_fault,
    "a kernel that goes on": lambda session, lease, daemon: start_endless(session),
    "a stranger was let in": guest,
    "it hangs": hang,
}


@pytest.fixture(scope="module")
def doubting() -> Iterator[Daemon]:
    """The daemon of all leases in doubt, whose scrubs have the usual time. Contexts serve again as above."""
    yield from shared(Daemon(config=SETTINGS, tcp=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", IN_DOUBT)
def test_whatever_is_in_doubt_ends_as_ever(doubting: Daemon, what: str) -> None:
    daemon = doubting
    wait_until_full(daemon)
    lease = daemon.builder(seconds=3 * PATIENCE_S).exclusivity(Exclusivity.SHARED).acquire()
    with GpuSession(lease) as session:
        IN_DOUBT[what](session, lease, daemon)
        if "fault" in what or "kernel" in what:
            # If the lease ended before the launch, the launch would be refused and leave nothing. So wait for it.
            wait_until(lambda: lease.query()["launches"] == 1, "it was launched")
        started = time.monotonic()
        pid = freed(daemon, lease)
    assert time.monotonic() - started < PATIENCE_S, "long before the lease's own end"
    assert not is_running(pid)
    assert card(daemon)["recycled_contexts"] == 0
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


@pytest.mark.exhaustive
def test_a_lease_that_the_bearer_of_a_token_gives_back(recycling: Daemon) -> None:
    """The context is not used again, because the lease's tenant may still be using it."""
    daemon = recycling
    lease = daemon.builder().acquire()
    pid = daemon.worker_pid(lease.lease_id)
    token = lease.issue(Permission.LEASE_FREE, my_audience(daemon.tcp_address)).token
    with RawPeer(daemon.tcp_address).hello() as peer:
        peer.request(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token))
        peer.free(lease.lease_id)
    assert not is_running(pid)


@pytest.mark.exhaustive
def test_a_card_that_shows_more_than_before(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    inflated = tmp_path / "inflated"
    daemon = start_daemon(config=SETTINGS, faults=Faults(constants=SLOW_SCRUBS, inflate_while=inflated))
    wait_until_full(daemon)
    lease = daemon.builder().acquire()
    inflated.touch()
    assert not is_running(freed(daemon, lease))
    inflated.unlink()
    wait_until(lambda: "the card reports" in daemon.log(), "the log says it", seen=daemon.log)


@pytest.mark.exhaustive
def test_it_ends_if_its_tenant_does_not_return(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config=SETTINGS.replace("600", "1"), faults=PATIENT)
    wait_until_full(daemon)
    pid = freed(daemon, daemon.builder().acquire())
    wait_until(lambda: not is_running(pid), "it has ended")
    wait_until(lambda: card(daemon)["recycled_contexts"] == 0, "it is not counted any more")
    metrics = ask(Opcode.METRICS, Empty(), daemon.address).exposition.splitlines()
    (recycled,) = [line for line in metrics if line.startswith("gpulease_warm_contexts_recycled_total{")]
    assert recycled.endswith(" 1.0")


@pytest.mark.exhaustive
def test_another_tenant_never_gets_it(recycling: Daemon) -> None:
    daemon = recycling
    pid = freed(daemon, daemon.builder().acquire())
    lease = GpuBuilder(daemon.tcp_address).min_vram(MIB).lease_secs(60).acquire()
    GpuSession(lease).close()
    assert is_running(pid)
    others = daemon.worker_pid(lease.lease_id)
    assert others != pid
    # A context of an unauthenticated peer is never used again, not even for the same peer.
    lease.free()
    assert not is_running(others)


def test_each_lease_has_its_records(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(config=audit_log.config(tmp_path / "audit") + SETTINGS, faults=PATIENT)
    wait_until_full(daemon)
    pids = {freed(daemon, daemon.builder().acquire()) for _ in range(3)}
    assert len(pids) == 1

    def kinds() -> list[int]:
        found = [record["kind"] for record in audit_log.records(tmp_path / "audit")]
        return [found.count(kind) for kind in ("grant", "over", "end")]

    wait_until(lambda: kinds() == [3, 3, 3], "all is written down", seen=kinds)


@pytest.mark.exhaustive
def test_a_lease_on_one_survives_the_broker(start_lasting: Callable[..., LastingDaemon]) -> None:
    lasting = start_lasting(config=SETTINGS, faults=PATIENT)
    wait_until_full(lasting.now)
    pid = freed(lasting.now, lasting.now.builder().acquire())
    with lasting.now.builder(seconds=30).acquire() as lease, working(lease) as work:
        assert lasting.worker_pid(lease.lease_id) == pid
        lasting.kill()
        work.check_goes_on()
        lasting.start(PATIENT)
        work.check_goes_on()
        lease.renew(60)
        assert lasting.now.query(lease.lease_id)["state"] == "active"
    # The context belongs to the earlier daemon, so it is not used again.
    wait_until(lambda: not is_running(pid), "it has ended")
    # A context that waits is ended by the next daemon.
    wait_until_full(lasting.now)
    with lasting.now.builder().acquire() as lease:
        pid = lasting.worker_pid(lease.lease_id)
    assert card(lasting.now)["recycled_contexts"] == 1
    lasting.restart()
    wait_until(lambda: not is_running(pid), "it has ended")
