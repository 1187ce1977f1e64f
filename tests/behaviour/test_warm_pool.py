"""Contexts made ahead: leases take them, the pool is refilled, makes room for leases, and survives faults."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client import AllocFailed, CapacityExceeded, GpuLease, GpuSession, GpuSessionFailed, LeaseExpired
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.daemon.session.main import WARM_NAME
from gpulease.protocol import Opcode, Waiting
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import FenceClear
from helpers.daemon import Daemon, Faults, running
from helpers.kernels import check_main_job, start_endless
from helpers.leaks import SHARED_PROCESSES
from helpers.processes import is_running, stop_process
from helpers.waiting import PATIENCE_S, wait_until

MIB = 1 << 20
GIB = 1 << 30
CONTEXT_BYTES = 100 * MIB
COSTLY = {"gpulease.daemon.gpus.emulated_cards:CONTEXT_BYTES": CONTEXT_BYTES}


def ready(daemon: Daemon) -> int:
    return int(daemon.inventory().details[0]["warm_contexts"])


def wait_until_full(daemon: Daemon, wanted: int = 2) -> list[int]:
    """Wait until the pool is full. Returns its process ids."""
    wait_until(lambda: ready(daemon) == wanted, "the pool is full", seen=lambda: daemon.inventory().details)
    pids = warm_pids(daemon)
    assert len(pids) == wanted
    return pids


def warm_pids(daemon: Daemon) -> list[int]:
    return [info.pid for info in daemon.processes() if info.name == WARM_NAME]


def with_pool(adopt_timeout_s: int) -> Daemon:
    """Return a daemon with a card of 1 GiB, contexts of 100 MiB, and a pool of two contexts.

    Args:
        adopt_timeout_s: Time limit for a context to be taken by a lease.
    """
    config = f"warm_contexts = 2\n[limits]\nadopt_timeout_s = {adopt_timeout_s}\n"
    return Daemon(vram=("1GiB",), config=config, faults=Faults(COSTLY))


def lent_pool(daemon: Daemon) -> Iterator[Daemon]:
    """Lend a test a daemon with a full pool. Afterwards no lease is left."""
    wait_until_full(daemon)
    yield daemon
    wait_until(lambda: not daemon.leases(), "no lease is left", seen=daemon.leases)
    card = daemon.inventory().details[0]
    assert (card["held_bytes"], card["fenced_bytes"]) == (0, 0)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Daemon]:
    with running(with_pool(60)) as daemon:
        SHARED_PROCESSES.add(daemon.process.pid)
        yield daemon
        SHARED_PROCESSES.remove(daemon.process.pid)


@pytest.fixture
def pool(shared_pool: Daemon) -> Iterator[Daemon]:
    yield from lent_pool(shared_pool)


@pytest.fixture
def impatient_pool() -> Iterator[Daemon]:
    """A pool of one test alone: a context that a lease has not taken after a second counts as one that hangs."""
    with running(with_pool(1)) as daemon:
        yield from lent_pool(daemon)


@pytest.mark.exhaustive
def test_leases_take_contexts_and_the_pool_fills_up_again(pool: Daemon) -> None:
    card = pool.inventory().details[0]
    assert (card["warm_wanted"], card["warm_bytes"], card["held_bytes"]) == (2, 2 * CONTEXT_BYTES, 0)
    assert card["available_bytes"] == GIB - CONTEXT_BYTES
    shown = CliRunner().invoke(main, ["info"], env={ADDRESS_VARIABLE: pool.address}).stdout
    assert "2 of 2 ready, 200 MiB" in shown
    used: list[int] = []
    for _ in range(3):
        pids = wait_until_full(pool)
        with pool.builder().acquire() as lease, GpuSession(lease) as session:
            worker = pool.worker_pid(lease.lease_id)
            assert worker in pids
            # A context serves one lease, and ends with it.
            assert worker not in used
            used.append(worker)
            check_main_job(session)
        assert not is_running(worker)
    wait_until_full(pool)


@pytest.mark.exhaustive
def test_a_lease_on_a_warm_context_is_like_any_other(pool: Daemon) -> None:
    with pool.builder(MIB).acquire() as lease, GpuSession(lease) as session:
        assert session.slice_bytes == MIB
        session.mem_free(session.mem_alloc(MIB))
        with pytest.raises(AllocFailed):
            session.mem_alloc(MIB + 1)
        assert lease.query()["launches"] == 0
    wait_until_full(pool)

    def endless(lease: GpuLease) -> tuple[GpuSession, object]:
        session = GpuSession(lease)
        return session, start_endless(session)

    lease, (session, kept), _ = pool.short_lease(endless)
    with pytest.raises(LeaseExpired):
        session.sync()
    wait_until_full(pool)
    lease = pool.builder().max_kernel_secs(0.2).waiting(Waiting.BLOCK).acquire()
    session = GpuSession(lease)
    kept = start_endless(session)
    with pytest.raises(GpuSessionFailed, match="a kernel ran for more than"):
        session.sync()
    del kept


@pytest.mark.exhaustive
def test_many_leases_at_once(pool: Daemon) -> None:
    pids = wait_until_full(pool)

    def lease_and_work(_: int) -> GpuLease:
        lease = pool.builder().acquire()
        with GpuSession(lease) as session:
            check_main_job(session)
        return lease

    with ThreadPoolExecutor(6) as threads:
        leases = list(threads.map(lease_and_work, range(6)))
    workers = {pool.worker_pid(lease.lease_id) for lease in leases}
    assert len(workers) == 6
    assert set(pids) < workers
    for lease in leases:
        lease.free()


@pytest.mark.exhaustive
def test_a_lease_that_needs_the_pools_room_gets_it(pool: Daemon) -> None:
    pids = wait_until_full(pool)
    with pool.builder(GIB - CONTEXT_BYTES).acquire() as lease, GpuSession(lease) as session:
        # The lease has one of the contexts. The other one was ended before the grant.
        assert [pid for pid in pids if is_running(pid)] == [pool.worker_pid(lease.lease_id)]
        check_main_job(session)
        card = pool.inventory().details[0]
        assert (card["held_bytes"], card["warm_bytes"]) == (GIB, 0)
        with pytest.raises(CapacityExceeded):
            pool.builder().acquire()
    wait_until_full(pool)
    # The same holds for a lease that waits in the queue.
    first = pool.builder(500 * MIB).acquire()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.builder(GIB - CONTEXT_BYTES).timeout(PATIENCE_S).acquire)
        wait_until(lambda: ready(pool) == 2, "the pool is full")
        first.free()
        with waiting.result() as lease, GpuSession(lease) as session:
            check_main_job(session)


@pytest.mark.exhaustive
def test_a_context_that_dies_or_hangs_is_replaced(impatient_pool: Daemon) -> None:
    pool = impatient_pool
    pids = wait_until_full(pool)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: ready(pool) == 1, "one is missed")
    assert pids[0] not in wait_until_full(pool)
    assert pids[1] in warm_pids(pool)
    # If a context hangs, that is noticed when a lease takes it, and the lease gets another one.
    pids = wait_until_full(pool)
    for pid in pids:
        stop_process(pid)
    started = time.monotonic()
    with pool.builder().acquire() as lease, GpuSession(lease) as session:
        assert time.monotonic() - started >= 1
        assert pool.worker_pid(lease.lease_id) not in pids
        check_main_job(session)
    assert sum(map(is_running, pids)) == 1


@pytest.mark.exhaustive
def test_the_zygote_is_killed(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(
        config="warm_contexts = 2\n", faults=Faults({"gpulease.daemon.workers.zygote_client:RESTART_DELAY_S": 0.1})
    )
    daemon.allowed_trouble.append("the zygote died")
    pids = wait_until_full(daemon)
    os.kill(daemon.zygote_pid(), signal.SIGKILL)
    wait_until(lambda: ready(daemon) == 0, "the contexts went with it")
    assert not set(wait_until_full(daemon)) & set(pids)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


@pytest.mark.exhaustive
def test_a_fenced_card_has_no_pool_until_it_is_cleared(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    withheld = tmp_path / "withheld"
    config = "warm_contexts = 1\n[limits]\nreclaim_timeout_s = 1\n"
    daemon = start_daemon(vram=("1GiB",), config=config, faults=Faults(COSTLY, withhold_proof_while=withheld))
    (pid,) = wait_until_full(daemon, 1)
    withheld.touch()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: daemon.inventory().details[0]["fenced_bytes"] == CONTEXT_BYTES, "its bytes are fenced")
    withheld.unlink()
    assert daemon.inventory().details[0]["available_bytes"] == GIB - 2 * CONTEXT_BYTES
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    assert warm_pids(daemon) == []
    assert ask(Opcode.FENCE_CLEAR, FenceClear(None), daemon.address).count == 1
    wait_until_full(daemon, 1)
