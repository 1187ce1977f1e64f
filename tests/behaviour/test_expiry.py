"""A lease ends on time without its client, which sleeps, is killed, or runs an endless kernel.

Its neighbour is not affected.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpulease.client import Buffer, Disconnected, GpuLease, GpuLeaseError, GpuSession, LeaseExpired
from helpers.daemon import Daemon, python_environment
from helpers.kernels import Neighbour, start_endless
from helpers.processes import stop_process
from helpers.waiting import wait_until

LATEST_S = 60.0
"""Seconds. Far more than an expiry is ever late: this only shows that the lease ends, even on a busy host."""

SIZE = 1 << 30

CHILD = """
import sys
from gpulease.client import GpuBuilder, GpuSession
from helpers.kernels import start_endless
lease = GpuBuilder(sys.argv[1]).min_vram(1 << 30).lease_secs(float(sys.argv[2])).acquire()
session = GpuSession(lease)
kept = start_endless(session) if sys.argv[3] == "endless" else session.mem_alloc(1 << 20)
print(lease.lease_id_text, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ends_on_time(
    daemon: Daemon, neighbour: Neighbour, record_property: Callable[[str, object], None]
) -> Callable[[int, int], None]:
    """Return a function that waits for a lease's end while the neighbour works, and checks that nothing of the lease is
    left.

    It takes the lease's id and its worker's process id. There must be no other lease besides the neighbour's.
    """
    free_before = daemon.available_bytes()

    def check(lease_id: int, worker: int) -> None:
        within_s = daemon.query(lease_id)["remaining_ms"] / 1000 + LATEST_S
        wait_until(
            lambda: neighbour.check() and daemon.query(lease_id)["state"] == "torndown", "the lease is gone", within_s
        )
        report = daemon.query(lease_id)
        assert report["cause"] == "expired"
        late_s = report["ended_after_deadline_us"] / 1e6
        record_property("late_s", late_s)
        assert 0 <= late_s < LATEST_S
        assert not os.path.exists(f"/proc/{worker}")
        assert daemon.available_bytes() == free_before

    return check


@contextlib.contextmanager
def tenant_process(daemon: Daemon, seconds: float, what: str) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Yield the lease id and the process of a tenant in a separate process."""
    command = [sys.executable, "-P", "-c", CHILD, daemon.address, str(seconds), what]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=python_environment()
    )
    with process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline(), 16), process
        finally:
            process.kill()


def test_client_asleep(daemon: Daemon, ends_on_time: Callable[[int, int], None]) -> None:
    def set_up(lease: GpuLease) -> tuple[GpuSession, Buffer]:
        session = GpuSession(lease)
        return session, session.mem_alloc(1 << 20)

    lease, (session, buffer), worker = daemon.short_lease(set_up, SIZE)
    ends_on_time(lease.lease_id, worker)
    with pytest.raises(LeaseExpired):
        session.mem_read(buffer, 0, 4)
    assert not session.is_alive
    assert not buffer.is_alive


def test_client_that_never_opened_its_session(daemon: Daemon, ends_on_time: Callable[[int, int], None]) -> None:
    lease, _, worker = daemon.short_lease(lambda lease: None, SIZE)
    ends_on_time(lease.lease_id, worker)
    with pytest.raises(LeaseExpired):
        GpuSession(lease)


@pytest.mark.exhaustive
@pytest.mark.parametrize("doing", ["nothing", "endless"])
def test_client_killed(daemon: Daemon, ends_on_time: Callable[[int, int], None], doing: str) -> None:
    with tenant_process(daemon, 4, doing) as (lease_id, process):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert daemon.query(lease_id)["state"] == "active"
        ends_on_time(lease_id, daemon.worker_pid(lease_id))


@pytest.mark.exhaustive
def test_client_stopped(daemon: Daemon, ends_on_time: Callable[[int, int], None]) -> None:
    with tenant_process(daemon, 4, "endless") as (lease_id, process):
        stop_process(process.pid)
        ends_on_time(lease_id, daemon.worker_pid(lease_id))


def test_endless_kernel(daemon: Daemon, ends_on_time: Callable[[int, int], None]) -> None:
    def set_up(lease: GpuLease) -> tuple[GpuSession, object]:
        session = GpuSession(lease)
        return session, start_endless(session)

    lease, (session, kept), worker = daemon.short_lease(set_up, SIZE)
    ends_on_time(lease.lease_id, worker)
    with pytest.raises(LeaseExpired):
        session.sync()
    del kept


@pytest.mark.parametrize("waits_in", ["sync", "mem_read"])
def test_client_that_waits_for_an_endless_kernel(
    daemon: Daemon, ends_on_time: Callable[[int, int], None], waits_in: str
) -> None:
    def set_up(lease: GpuLease) -> tuple[GpuSession, Buffer]:
        session = GpuSession(lease)
        return session, start_endless(session)[1]

    lease, (session, flag), worker = daemon.short_lease(set_up, SIZE)
    ended: list[tuple[GpuLeaseError, float]] = []

    def wait() -> None:
        try:
            if waits_in == "sync":
                session.sync()
            else:
                session.mem_read(flag, 0, 4)
        except GpuLeaseError as error:
            ended.append((error, lease.remaining_s))

    waiting = threading.Thread(target=wait)
    waiting.start()
    ends_on_time(lease.lease_id, worker)
    waiting.join(LATEST_S)
    assert not waiting.is_alive()
    ((error, remaining_s),) = ended
    assert isinstance(error, LeaseExpired)
    assert remaining_s == 0


def test_expired_lease_can_not_be_used_renewed_or_freed(daemon: Daemon) -> None:
    lease = daemon.builder(seconds=0.2).acquire()
    daemon.wait_for_end(lease.lease_id)
    for use in (lambda: lease.renew(60), lease.free, lambda: GpuSession(lease)):
        with pytest.raises(LeaseExpired) as caught:
            use()
        assert caught.value.host_code == -2
        assert caught.value.hint
    assert not lease.is_alive
    # Leaving the `with` block of an expired lease raises no error.
    with lease:
        pass


def test_a_lease_lives_until_its_deadline(daemon: Daemon) -> None:
    asked_at = time.monotonic()
    lease, session, _ = daemon.short_lease(GpuSession)
    granted_s = daemon.query(lease.lease_id)["remaining_ms"] / 1000

    def use() -> None:
        while time.monotonic() < asked_at + granted_s + LATEST_S:
            session.sync()

    with pytest.raises(LeaseExpired):
        use()
    assert time.monotonic() >= asked_at + granted_s


def test_many_leases_expire_together(daemon: Daemon, neighbour: Neighbour) -> None:
    free_before = daemon.available_bytes()
    leases = [daemon.builder(64 << 20, seconds=1.0).acquire() for _ in range(12)]
    ids = [lease.lease_id for lease in leases]
    wait_until(
        lambda: neighbour.check() and all(daemon.query(number)["state"] == "torndown" for number in ids),
        "all leases are gone",
    )
    assert max(daemon.query(number)["ended_after_deadline_us"] for number in ids) < LATEST_S * 1e6
    assert daemon.available_bytes() == free_before


def test_an_idle_client_is_told_why(daemon: Daemon) -> None:
    lease, session, _ = daemon.short_lease(GpuSession)
    daemon.wait_for_end(lease.lease_id)
    with pytest.raises(LeaseExpired) as caught:
        session.sync()
    assert not isinstance(caught.value, Disconnected)
