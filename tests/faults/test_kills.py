"""Processes die or stop at a bad moment: none outlives its purpose, and all others continue."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from gpulease.client import Disconnected, GpuLease, GpuLeaseError, GpuSession, GpuSessionFailed, LeaseExpired, Revoked
from gpulease.protocol import Failure, Opcode, Reply, RevokeOutcome, Status
from helpers.daemon import Daemon
from helpers.kernels import Neighbour, check_main_job, start_endless
from helpers.lasting import LastingDaemon
from helpers.processes import is_running, stop_process
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import PATIENCE_S, wait_until

ZYGOTE_DIED = "the zygote died"


def wait_for_log(daemon: Daemon, text: str, times: int) -> None:
    wait_until(lambda: daemon.log().count(text) == times, f"the daemon logs {text!r}", seen=daemon.log)


def test_a_worker_is_killed(daemon: Daemon) -> None:
    with daemon.builder().acquire() as healthy, GpuSession(healthy) as session:
        neighbour = Neighbour(session)
        free = daemon.available_bytes()
        lease = daemon.builder(1 << 30).acquire()
        doomed = GpuSession(lease)
        os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)
        with pytest.raises(GpuSessionFailed, match="SIGKILL"):
            doomed.sync()
        wait_until(lambda: daemon.available_bytes() == free, "its bytes are free")
        report = daemon.query(lease.lease_id)
        assert (report["state"], report["cause"]) == ("torndown", "worker_died")
        with pytest.raises(GpuSessionFailed, match="process died"):
            lease.renew(60)
        neighbour.check()


def test_a_worker_is_killed_while_its_tenant_waits_for_a_kernel(daemon: Daemon) -> None:
    lease = daemon.builder(seconds=60).acquire()
    session = GpuSession(lease)
    kept = start_endless(session)
    os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)
    with pytest.raises(GpuSessionFailed):
        session.sync()
    del kept


@pytest.mark.parametrize("end", ["expire", "revoke", "free"])
def test_a_stopped_worker_still_ends(daemon: Daemon, end: str) -> None:
    def stopped(lease: GpuLease) -> tuple[GpuSession, int]:
        session, worker = GpuSession(lease), daemon.worker_pid(lease.lease_id)
        stop_process(worker)
        return session, worker

    if end == "expire":
        lease, (session, worker), _ = daemon.short_lease(stopped)
    else:
        lease = daemon.builder().acquire()
        session, worker = stopped(lease)
    if end == "revoke":
        assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    elif end == "free":
        lease.free()
    wait_until(lambda: not is_running(worker), "the stopped worker is gone")
    error = {"expire": LeaseExpired, "revoke": Revoked, "free": GpuLeaseError}[end]
    with pytest.raises(error):
        session.sync()


@pytest.mark.exhaustive
def test_the_zygote_is_killed(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    daemon.allowed_trouble.append(ZYGOTE_DIED)
    leases = [daemon.builder().acquire() for _ in range(3)]
    sessions = [GpuSession(lease) for lease in leases]
    kept = start_endless(sessions[0])
    workers = [daemon.worker_pid(lease.lease_id) for lease in leases]
    zygote = daemon.zygote_pid()
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not any(is_running(worker) for worker in workers), "its workers end with it")
    for session in sessions:
        with pytest.raises(GpuSessionFailed, match="zygote"):
            session.sync()
    # The broker starts another zygote. Until then leases may be refused with a reason; in the end they work.
    failures: list[GpuLeaseError] = []

    def works() -> bool:
        try:
            with daemon.builder().acquire() as lease, GpuSession(lease) as session:
                check_main_job(session)
        except GpuLeaseError as error:
            failures.append(error)
            return False
        return True

    wait_until(works, "new leases work")
    assert all(isinstance(error, GpuSessionFailed) for error in failures), failures
    assert daemon.zygote_pid() != zygote
    daemon.check_idle(len(daemon.open_files()))
    del kept


@pytest.mark.exhaustive
def test_the_zygote_is_killed_twice(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    daemon.allowed_trouble.append(ZYGOTE_DIED)
    files = len(daemon.open_files())
    for times in (1, 2):
        os.kill(daemon.zygote_pid(), signal.SIGKILL)
        wait_for_log(daemon, "the zygote runs again", times)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    daemon.check_idle(files)


@pytest.mark.exhaustive
def test_the_zygote_is_killed_while_it_makes_a_worker(lasting: LastingDaemon) -> None:
    daemon = lasting.now
    daemon.allowed_trouble.append(ZYGOTE_DIED)
    lease = daemon.builder().acquire()
    (zygote,) = lasting.zygotes()
    with GpuSession(lease) as session, RawPeer(daemon.address).hello() as peer:
        check_main_job(session)
        stop_process(zygote)
        _, frame = peer.connection.send_request(Opcode.LEASE_ALLOC, lease_alloc())
        peer.sock.sendall(frame)
        wait_until(lambda: len(daemon.leases()) == 2, "it waits for its worker")
        os.kill(zygote, signal.SIGKILL)
        reply = peer.next_event()
        assert isinstance(reply, Reply)
        assert isinstance(reply.result, Failure)
        assert reply.result.status is Status.SESSION_FAILED
        assert "the zygote died before it could start the worker" in reply.result.message
        with pytest.raises(GpuSessionFailed, match="zygote"):
            session.sync()
    daemon.wait_for_end(lease.lease_id)
    assert daemon.query(lease.lease_id)["cause"] == "worker_died"
    wait_for_log(daemon, "the zygote runs again", 1)
    # The next daemon still knows that the lease ended, and its own leases work.
    again = lasting.restart()
    assert again.query(lease.lease_id)["cause"] == "worker_died"
    with again.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    lasting.check_idle()


@pytest.mark.exhaustive
def test_the_broker_is_killed(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    leases = [daemon.builder().acquire() for _ in range(3)]
    sessions = [GpuSession(lease) for lease in leases]
    kept = start_endless(sessions[0])
    stop_process(daemon.worker_pid(leases[1].lease_id))
    assert len(daemon.processes()) == 5
    daemon.kill()
    daemon.check_nothing_is_left()
    for session in sessions:
        with pytest.raises(Disconnected):
            session.sync()
    with pytest.raises(Disconnected, match="Is gpuleased running"):
        daemon.builder().acquire()
    del kept


@pytest.mark.exhaustive
def test_a_daemon_stops_with_leases_alive(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    kept = start_endless(session)
    daemon.process.terminate()
    assert daemon.wait_for_exit() == 0
    daemon.check_nothing_is_left()
    with pytest.raises(GpuLeaseError):
        session.sync()
    del kept


@pytest.mark.exhaustive
def test_a_stopped_worker_does_not_hold_up_a_shutdown(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    lease = daemon.builder().acquire()
    stop_process(daemon.worker_pid(lease.lease_id))
    daemon.process.terminate()
    assert daemon.wait_for_exit() == 0
    lease._state.channel.close()


def sync_until(end: float, session: GpuSession) -> None:
    while time.monotonic() < end:
        session.sync()


@pytest.mark.exhaustive
def test_a_stopped_broker_holds_no_expiry_up(daemon: Daemon) -> None:
    """The worker reads the deadline itself, so a broker that hangs gives a tenant no more time."""

    def stopped(lease: GpuLease) -> GpuSession:
        session = GpuSession(lease)
        check_main_job(session)
        return session

    lease, session, _ = daemon.short_lease(stopped)
    stop_process(daemon.process.pid)
    try:
        wait_until(lambda: lease.remaining_s == 0, "its time is over")
        # The client counts from the arrival of the grant, so its deadline is a little before or after the worker's.
        with pytest.raises(LeaseExpired):
            sync_until(time.monotonic() + PATIENCE_S, session)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: daemon.query(lease.lease_id)["state"] == "torndown", "the broker catches up")


def test_who_waits_for_room_is_told_when_the_daemon_stops(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with RawPeer(daemon.address).hello() as owner, RawPeer(daemon.address).hello() as waiting:
        owner.acquire(lease_alloc(6 << 30))
        _, frame = waiting.connection.send_request(Opcode.LEASE_ALLOC, lease_alloc(wait_ms=60_000))
        waiting.sock.sendall(frame)
        assert daemon.available_bytes() == 0
        daemon.process.terminate()
        reply = waiting.next_event()
        assert isinstance(reply, Reply)
        assert isinstance(reply.result, Failure)
        assert reply.result.status is Status.DISCONNECTED
        assert "shutting down" in reply.result.message
        for peer in (owner, waiting):
            assert peer.goodbye().status is Status.DISCONNECTED
    assert daemon.wait_for_exit() == 0
