"""A daemon with leases that outlive it is killed, stopped, upgraded or wrongly configured: sessions continue."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease.client import (
    Denied,
    Disconnected,
    GpuBuilder,
    GpuLease,
    GpuSession,
    GpuSessionFailed,
    InvalidRequest,
    LeaseExpired,
    Revoked,
    aio,
    keep_alive,
)
from gpulease.client.core import lease as renewal
from gpulease.client.core import operations
from gpulease.protocol import Exclusivity, Failure, Opcode, Reply, Status
from gpulease.protocol.capabilities import SESSION_PERMISSIONS
from helpers import audit_log
from helpers.daemon import Daemon, Faults
from helpers.kernels import check_main_job, start_endless
from helpers.lasting import LastingDaemon
from helpers.processes import is_running, stop_process
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.remote import Pki
from helpers.submits import check_scaled, scaling
from helpers.waiting import wait_until
from helpers.working import working

StartLasting = Callable[..., LastingDaemon]


@contextmanager
def back_in(lasting: LastingDaemon, seconds: float) -> Iterator[None]:
    """Kill the daemon. It is restarted after `seconds`, while the block runs."""
    lasting.kill()
    timer = threading.Timer(seconds, lasting.start)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.parametrize(
    "shared_memory", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["ring", "socket"]
)
def test_a_session_does_not_notice_that_the_broker_is_killed(lasting: LastingDaemon, shared_memory: bool) -> None:
    with lasting.now.builder().acquire() as lease, working(lease, shared_memory=shared_memory) as work:
        lasting.kill()
        work.check_goes_on()
        lasting.start()
        work.check_goes_on()
        assert lease.query()["state"] == "active"
        lease.renew(90)
        assert lease.generation == 2
        report = lasting.now.query(lease.lease_id)
        assert (report["generation"], report["tenant"]) == (2, f"uid:{os.getuid()}")
    lasting.check_idle()


@pytest.mark.exhaustive
def test_a_lease_whose_session_was_never_opened_takes_submits_after_it_too(lasting: LastingDaemon) -> None:
    with lasting.now.builder().acquire() as lease:
        check_scaled(scaling(lease).launch())
        lasting.restart()
        check_scaled(scaling(lease).launch())
        GpuSession(lease).close()
        lasting.restart()
        with pytest.raises(InvalidRequest, match="its session was opened"):
            scaling(lease).launch()
    lasting.check_idle()


@pytest.mark.exhaustive
def test_nor_does_a_remote_one(start_lasting: StartLasting, tmp_path: Path) -> None:
    pki = Pki.make(tmp_path)
    lasting = start_lasting(tls=True, config=pki.settings())
    with pki.builder(lasting.now.tls_address, pki.ann).acquire() as lease, working(lease) as work:
        lasting.kill()
        work.check_goes_on()
        lasting.start()
        work.check_goes_on()
        assert lasting.now.query(lease.lease_id)["tenant"] == "ann"
        lasting.now.revoke(lease.lease_id)
        with pytest.raises(Revoked):
            work.neighbour.check()
        work.error = None
    lasting.check_idle()


@pytest.mark.exhaustive
def test_what_may_be_asked_again_waits_for_the_daemon(lasting: LastingDaemon) -> None:
    lease = lasting.now.builder().acquire()
    with back_in(lasting, 0.3):
        lease.renew(50)
        assert lease.query()["generation"] == 2
    with back_in(lasting, 0.3):
        with pytest.raises(Disconnected):
            lasting.now.builder().acquire()
        lease.free()
    lasting.check_idle()


@pytest.mark.exhaustive
def test_so_do_coroutines(lasting: LastingDaemon) -> None:
    async def scenario() -> None:
        async with await aio.GpuBuilder(lasting.address).min_vram(1 << 20).acquire() as lease:
            async with aio.GpuSession(lease) as session:
                with back_in(lasting, 0.3):
                    buffer = await session.mem_alloc(64)
                    await lease.renew(50)
                await session.mem_write(buffer, 0, bytes(64))
            assert lease.generation == 2

    asyncio.run(scenario())
    lasting.check_idle()


@pytest.mark.exhaustive
def test_a_lease_is_kept_alive_over_it(lasting: LastingDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "RENEW_AT", 0.01)
    lease = lasting.now.builder(seconds=30).acquire()
    lasting.kill()
    generation = lease.generation
    with keep_alive(lease) as keeper:
        time.sleep(0.5)
        assert (lease.generation, keeper.loss) == (generation, None)
        lasting.start()
        wait_until(lambda: lease.generation > generation, "it is renewed")
        assert keeper.loss is None
    lease.free()


@pytest.mark.exhaustive
def test_an_endless_kernel_ends_with_its_lease_though_nobody_is_there(
    lasting: LastingDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:

    def three(lease: GpuLease) -> tuple[GpuSession, list[GpuSession], object, list[int]]:
        session = GpuSession(lease)
        kept = start_endless(session)
        others = [GpuSession(lasting.now.builder(seconds=lease.remaining_s).acquire()) for _ in range(2)]
        leases = [lease, *(other.lease for other in others)]
        workers = [lasting.worker_pid(one.lease_id) for one in leases]
        # A stopped worker can't report its end: the zygote waits .02 s for that, and a busy host is slower.
        stop_process(workers[-1])
        lasting.kill()
        # On a busy host, the leases may have ended before the kill.
        if min(one.remaining_s for one in leases) < 0.2:
            lasting.start()
            raise KeyError("too late")
        return session, others, kept, workers

    lease, (session, others, kept, workers) = lasting.short_lease(three)
    with pytest.raises(LeaseExpired):
        session.sync()
    wait_until(lambda: not any(is_running(worker) for worker in workers), "their workers are gone")
    # The idle worker may have sent the reason before it was killed; else the client knows the lease's deadline.
    # It reads that its connection has ended even if it has no time left to wait for a reply.
    for other, margin_s in zip(others, (operations.EXPIRY_MARGIN_S, 0.0), strict=True):
        monkeypatch.setattr(operations, "EXPIRY_MARGIN_S", margin_s)
        with pytest.raises(LeaseExpired):
            other.sync()
    lasting.start()
    with pytest.raises(LeaseExpired):
        lease.renew(10)
    assert lasting.now.query(lease.lease_id)["cause"] == "expired"
    del kept
    lasting.check_idle()


def test_an_adopted_lease_can_be_revoked_and_stays_so(lasting: LastingDaemon) -> None:
    lease = lasting.now.builder().acquire()
    session = GpuSession(lease)
    lasting.restart()
    lasting.now.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        session.sync()
    for _ in range(2):
        assert lasting.now.query(lease.lease_id)["cause"] == "revoked"
        with pytest.raises(Revoked):
            lease.renew(10)
        lasting.restart()
    lasting.check_idle()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_usage_counts_a_lease_once_over_its_daemons(start_lasting: StartLasting, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "audit"
    lasting = start_lasting(config='on_stop = "keep"\n' + audit_log.config(folder))
    begun = time.monotonic()
    lease = lasting.now.builder(seconds=60).acquire()
    granted = time.monotonic()
    if how == "stopped":
        audit_log.stop(lasting.now)
    else:
        wait_until(lambda: "grant" in audit_log.kinds(folder), "the grant is on the disk")
        lasting.kill()
    time.sleep(0.3)
    lasting.start()
    freeing = time.monotonic()
    lease.free()
    freed = time.monotonic()
    lasting.now.process.send_signal(signal.SIGINT)
    assert lasting.now.wait_for_exit() == 0
    assert audit_log.kinds(folder).count("adopt") == 1
    audit_log.check_whole(folder)
    (used,) = audit_log.usage(folder).values()
    assert used["leases"] == 1
    assert (freeing - granted) * 1e6 <= used["lease_us"] <= (freed - begun) * 1e6
    assert used["byte_us"] == used["lease_us"] << 20


@pytest.mark.exhaustive
def test_a_guest_stays_too_and_its_token_is_good_for_one_connection(lasting: LastingDaemon) -> None:
    with lasting.now.builder().exclusivity(Exclusivity.SHARED).acquire() as lease:
        grant = lease.issue(SESSION_PERMISSIONS, ttl_secs=60)
        with GpuSession.attach(grant, lasting.address) as guest:
            lasting.restart()
            check_main_job(guest)
            with pytest.raises(Denied, match="replayed nonce"):
                GpuSession.attach(grant, lasting.address)
            # The next daemon knows that the renewal is of the same lease, so it ends earlier tokens.
            lease.renew(30)
            with pytest.raises(Denied):
                guest.sync()


@pytest.mark.exhaustive
def test_workers_that_died_meanwhile_are_told_of_with_the_reason(lasting: LastingDaemon) -> None:
    killed, orphaned = (lasting.now.builder().acquire() for _ in range(2))
    lasting.kill()
    os.kill(lasting.worker_pid(killed.lease_id), signal.SIGKILL)
    lasting.start()
    with pytest.raises(GpuSessionFailed, match="worker died"):
        killed.renew(10)
    orphaned.renew(10)
    lasting.kill()
    (zygote,) = lasting.zygotes()
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not lasting.workers(), "its workers die with it")
    lasting.start()
    with pytest.raises(GpuSessionFailed, match="worker died"):
        orphaned.renew(10)
    lasting.check_idle()


@pytest.mark.exhaustive
def test_stopping_can_leave_sessions_to_the_next_daemon(start_lasting: StartLasting) -> None:
    lasting = start_lasting(config='on_stop = "keep"\n')
    lease = lasting.now.builder().acquire()
    with working(lease) as work, RawPeer(lasting.address).hello() as waiter:
        _, frame = waiter.connection.send_request(Opcode.LEASE_ALLOC, lease_alloc(6 << 30, wait_ms=60_000))
        waiter.sock.sendall(frame)
        # A later request is answered, so the daemon has read that one.
        lasting.now.available_bytes()
        lasting.now.process.terminate()
        assert lasting.now.wait_for_exit() == 0
        refused = waiter.next_event()
        assert isinstance(refused, Reply)
        assert isinstance(refused.result, Failure)
        assert refused.result.status is Status.BUSY
        assert "restarted" in refused.result.message
        assert not lasting.now.socket_path.exists()
        work.check_goes_on()
        lasting.start()
        lease.renew(30)
        work.check_goes_on()
    # Ctrl-C ends all sessions nevertheless.
    lasting.now.process.send_signal(signal.SIGINT)
    assert lasting.now.wait_for_exit() == 0
    wait_until(lambda: not lasting.processes(), "everything has ended")
    with pytest.raises(Disconnected):
        lease.renew(30)


@pytest.mark.exhaustive
def test_stopping_ends_sessions_unless_told_otherwise(lasting: LastingDaemon) -> None:
    session = GpuSession(lasting.now.builder().acquire())
    lasting.now.process.terminate()
    assert lasting.now.wait_for_exit() == 0
    with pytest.raises(Disconnected, match=r"shut down|stopping"):
        session.sync()
    wait_until(lambda: not lasting.processes(), "everything has ended")
    lasting.start()
    lasting.check_idle()


def refusal_of(daemon: Daemon) -> tuple[int, str]:
    """Return the exit status and the log of a daemon that can't start."""
    return daemon.wait_for_exit(), daemon.log()


@pytest.mark.exhaustive
def test_a_second_daemon_on_the_same_state_does_not_start(lasting: LastingDaemon) -> None:
    with lasting.now.builder().acquire() as lease, working(lease) as work:
        second = Daemon(config=lasting.config)
        try:
            status, said = refusal_of(second)
            assert status == 69, said
            assert str(lasting.state) in said
        finally:
            second.discard()
        work.check_goes_on()


@pytest.mark.exhaustive
def test_a_daemon_that_can_not_start_leaves_sessions_alone(lasting: LastingDaemon) -> None:
    with lasting.now.builder().acquire() as lease, working(lease) as work:
        lasting.kill()
        # The daemon takes all sessions over, and then finds that it can't listen.
        refused = Daemon(config=lasting.config + 'listen = ["unix:/proc/none/d.sock"]\n', listens=False)
        try:
            status, said = refusal_of(refused)
            assert status == 78, said
            assert "can't listen" in said
        finally:
            refused.discard()
        work.check_goes_on()
        lasting.start()
        lease.renew(30)
        work.check_goes_on()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "other", [{"workers.zygote_client:VERSION": "0.0.2"}, {"host.version:DIGEST_BYTES": 8}], ids=["version", "build"]
)
def test_another_version_goes_on_with_the_sessions_and_makes_its_own(
    lasting: LastingDaemon, other: dict[str, object]
) -> None:
    faults = Faults(constants={f"gpulease.daemon.{name}": value for name, value in other.items()})
    with lasting.now.builder().acquire() as old, working(old) as work:
        lasting.restart(faults)
        assert len(lasting.zygotes()) == 2
        with lasting.now.builder().acquire() as new, GpuSession(new) as session:
            check_main_job(session)
        old.renew(30)
        work.check_goes_on()
    wait_until(lambda: len(lasting.zygotes()) == 1, "the old zygote ends with its last worker")


@pytest.mark.exhaustive
def test_a_version_that_can_not_take_them_over_does_not_start(lasting: LastingDaemon) -> None:
    with lasting.now.builder().acquire() as lease, working(lease) as work:
        lasting.kill()
        status, said = refusal_of(
            lasting.begin(Faults(constants={"gpulease.daemon.workers.zygote_discovery:HANDOVER": 99}))
        )
        assert status == 69, said
        assert "can't take over" in said
        assert f"kill {lasting.zygotes()[0]}" in said
        work.check_goes_on()
        lasting.start()
        work.check_goes_on()


def check_another_takes_its_place(lasting: LastingDaemon) -> None:
    (zygote,) = lasting.zygotes()
    with lasting.now.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        stop_process(zygote)
        with pytest.raises(GpuSessionFailed, match=r"worker died|with its zygote"):
            wait_until(lambda: session.mem_alloc(256) is None, "the session ends with it")
    wait_until(lambda: lasting.zygotes() not in ([], [zygote]), "there is another")
    lasting.check_idle()


@pytest.mark.exhaustive
def test_a_zygote_that_is_stopped_under_its_daemon_is_killed(lasting: LastingDaemon) -> None:
    beats = {
        "gpulease.daemon.workers.helper_process:BEAT_S": 0.1,
        # Longer than a busy host keeps a zygote from answering.
        "gpulease.daemon.workers.zygote_client:HUNG_AFTER_S": 6.0,
    }
    soon = {"gpulease.daemon.workers.zygote_client:RESTART_DELAY_S": 0.1}
    daemon = lasting.restart(Faults(constants=beats | soon))
    daemon.allowed_trouble += ["does not answer; it is killed", "the zygote died"]
    check_another_takes_its_place(lasting)
    # The first zygote was taken over from an earlier daemon. The second is the daemon's own.
    check_another_takes_its_place(lasting)


@pytest.mark.exhaustive
def test_a_zygote_that_hangs_is_killed_and_its_leases_are_over(lasting: LastingDaemon) -> None:
    lease = lasting.now.builder().acquire()
    (zygote,) = lasting.zygotes()
    lasting.kill()
    stop_process(zygote)
    daemon = lasting.start(Faults(constants={"gpulease.daemon.workers.zygote_discovery:ANSWER_TIMEOUT_S": 0.3}))
    daemon.allowed_trouble.append("does not answer; it is killed")
    with pytest.raises(GpuSessionFailed, match="worker died"):
        lease.renew(10)
    lasting.check_idle()


@pytest.mark.exhaustive
def test_a_worker_whose_zygote_can_not_be_found_is_ended(lasting: LastingDaemon) -> None:
    lease = lasting.now.builder().acquire()
    worker = lasting.worker_pid(lease.lease_id)
    (lost,) = lasting.zygotes()
    lasting.kill()
    # Stop the zygote: else it would create its socket again, on a slow host before the next daemon looks for it.
    stop_process(lost)
    (path,) = (lasting.state / "zygotes").iterdir()
    path.unlink()
    lasting.start()
    assert not is_running(worker)
    with pytest.raises(GpuSessionFailed, match="worker died"):
        lease.renew(10)
    os.kill(lost, signal.SIGKILL)
    lasting.check_idle()


def can_be_connected(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(str(path)) == 0


@pytest.mark.exhaustive
def test_sessions_outlive_whoever_read_what_the_daemon_says(lasting: LastingDaemon) -> None:
    """The daemon's output goes to a terminal or a pipe, which is closed."""
    lasting.now.process.terminate()
    lasting.now.wait_for_exit()
    reader, writer = os.pipe()
    process = lasting.begin(stderr=writer).process
    os.close(writer)
    os.close(reader)
    wait_until(lambda: can_be_connected(lasting.now.socket_path), "it listens")
    with GpuBuilder(lasting.address).min_vram(1 << 20).acquire() as lease, working(lease) as work:
        process.kill()
        process.wait()
        work.check_goes_on()
        lasting.start()
        work.check_goes_on()
