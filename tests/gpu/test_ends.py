"""Leases on a real card end always and on time, their memory is free afterwards, and neighbours are not affected."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from gpulease.client import CapacityExceeded, GpuLeaseError, GpuSession, GpuSessionFailed, LeaseExpired, Revoked
from gpulease.protocol import RevokeOutcome
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, Neighbour, check_main_job, start_endless
from helpers.nvml import Cards
from helpers.processes import stop_process
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

GIB = 1 << 30
LATEST_S = 3.0
"""Seconds. To kill and reap a process with an endless kernel takes 0.15 s; this limit only shows that it happens."""


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    with daemon.builder(64 << 20).device(0).acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        neighbour.check()
        yield neighbour
        neighbour.check()


def hold_and_spin(session: GpuSession) -> object:
    """Fill the slice, and launch a kernel that never ends. Returns what the test must keep alive."""
    buffer = session.mem_alloc(session.slice_bytes - (1 << 20))
    session.mem_write(buffer, 0, b"x" * 4096)
    return buffer, start_endless(session)


def wait_for_end(daemon: Daemon, neighbour: Neighbour, lease_id: int, within_s: float) -> None:
    wait_until(
        lambda: neighbour.check() and daemon.query(lease_id)["state"] == "torndown", "the lease is gone", within_s
    )


def test_an_endless_kernel_ends_with_its_lease(
    daemon: Daemon, cards: Cards, neighbour: Neighbour, record_property: Callable[[str, object], None]
) -> None:
    used = cards.used_bytes()
    lease = daemon.builder(2 * GIB, seconds=2.0).device(0).acquire()
    session = GpuSession(lease)
    kept = hold_and_spin(session)
    worker = daemon.worker_pid(lease.lease_id)
    assert cards.used_bytes()[0] >= used[0] + 2 * GIB - (1 << 20)
    wait_for_end(daemon, neighbour, lease.lease_id, 2.0 + LATEST_S)
    # Memory that can be granted again is free already: NVML shows it at this moment, not some time later.
    cards.check_back_to(used)
    assert not os.path.exists(f"/proc/{worker}")
    report = daemon.query(lease.lease_id)
    assert report["cause"] == "expired"
    late_s = report["ended_after_deadline_us"] / 1e6
    record_property("late_s", late_s)
    assert 0 <= late_s < LATEST_S
    with pytest.raises(LeaseExpired):
        session.sync()
    del kept


@pytest.mark.parametrize("waits_in", ["sync", "mem_read"])
def test_a_tenant_that_waits_for_an_endless_kernel_is_revoked(
    daemon: Daemon, neighbour: Neighbour, waits_in: str
) -> None:
    lease = daemon.builder(GIB).device(0).acquire()
    session = GpuSession(lease)
    # A process asks for an image's parameter types once, so that `start_endless` is three operations from here on.
    session.module_load(FAULTS)
    # What the client has queued is served, and counted, before a sync returns.
    session.sync()
    before = lease.query()["operations"]
    module, flag = start_endless(session)
    errors: list[GpuLeaseError] = []

    def wait() -> None:
        try:
            if waits_in == "sync":
                session.sync()
            else:
                session.mem_read(flag, 0, 4)
        except GpuLeaseError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: lease.query()["operations"] == before + 4, "the worker waits for the kernel")
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    waiting.join(LATEST_S)
    assert not waiting.is_alive()
    assert [type(error) for error in errors] == [Revoked]
    neighbour.check()
    del module


def test_a_killed_workers_memory_is_reclaimed(daemon: Daemon, cards: Cards, neighbour: Neighbour) -> None:
    used = cards.used_bytes()
    available = daemon.available_bytes()
    lease = daemon.builder(2 * GIB).device(0).acquire()
    session = GpuSession(lease)
    kept = hold_and_spin(session)
    os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)
    with pytest.raises(GpuSessionFailed, match="SIGKILL"):
        session.sync()
    wait_for_end(daemon, neighbour, lease.lease_id, 10)
    cards.check_back_to(used)
    assert daemon.available_bytes() == available
    assert daemon.query(lease.lease_id)["cause"] == "worker_died"
    del kept


def test_a_stopped_worker_ends_too(daemon: Daemon, neighbour: Neighbour) -> None:
    lease = daemon.builder(GIB, seconds=1.0).device(0).acquire()
    stop_process(daemon.worker_pid(lease.lease_id))
    wait_for_end(daemon, neighbour, lease.lease_id, 1.0 + LATEST_S)


def test_the_whole_slice_again_and_again(daemon: Daemon, cards: Cards) -> None:
    """Each grant of nearly all memory succeeds at once, because the memory of the lease before was proved free."""
    size = daemon.inventory().entries[0].available_bytes - GIB
    for _ in range(4):
        with daemon.builder(size).device(0).acquire() as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(size)
            session.mem_write(buffer, size - 4, b"last")
            assert session.mem_read(buffer, size - 4, 4) == b"last"


def test_over_what_is_leased(daemon: Daemon) -> None:
    with pytest.raises(CapacityExceeded):
        daemon.builder(daemon.inventory().entries[0].capacity_bytes + 1).device(0).acquire()


def test_a_daemon_that_is_killed_leaves_no_worker_and_no_memory(cards: Cards) -> None:
    used = cards.used_bytes()
    daemon = Daemon(driver="cuda", vram=("4GiB",))
    try:
        daemon.wait_until_it_answers()
        lease = daemon.builder(2 * GIB).acquire()
        session = GpuSession(lease)
        kept = hold_and_spin(session)
        daemon.kill()
        daemon.check_nothing_is_left()
        cards.check_back_to(used)
        with pytest.raises(GpuLeaseError):
            session.sync()
        del kept
    finally:
        daemon.discard()


def test_several_tenants_at_once(daemon: Daemon) -> None:
    leases = [daemon.builder(128 << 20).acquire() for _ in range(4)]
    sessions = [GpuSession(lease) for lease in leases]
    for session in sessions * 3:
        check_main_job(session)
    for session, lease in zip(sessions, leases, strict=True):
        session.close()
        lease.free()
