"""Submits on contexts that were made ahead: they differ from others only in the time that a context takes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    Disconnected,
    Drained,
    GpuLease,
    GpuSession,
    LeaseExpired,
    SyncFailed,
    TimedOut,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty
from helpers.daemon import Daemon, Faults
from helpers.daemon import running as running_daemon
from helpers.kernels import FAULTS, Neighbour
from helpers.leaks import SHARED_PROCESSES
from helpers.processes import is_running, stop_process
from helpers.submits import (
    ENDS,
    ROOM,
    Running,
    check_scaled,
    endless,
    running,
    scaling,
    stray,
    wait_until_warm,
    workers_of,
)
from helpers.waiting import wait_until

MIB = 1 << 20
CONTEXT_BYTES = 100 * MIB
COSTLY = {"gpulease.daemon.gpus.emulated_cards:CONTEXT_BYTES": CONTEXT_BYTES}
TEN = 10


def with_pool(adopt_timeout_s: int) -> Daemon:
    """Return a daemon with a card of 1 GiB, contexts of 100 MiB, and a pool of one context.

    Args:
        adopt_timeout_s: Time limit for a context to be taken by a lease.
    """
    config = f"warm_contexts = 1\n[limits]\nadopt_timeout_s = {adopt_timeout_s}\n"
    return Daemon(vram=("1GiB",), config=config, faults=Faults(COSTLY))


def lent_pool(daemon: Daemon) -> Iterator[Daemon]:
    """Lend a test a daemon with a full pool. Afterwards no submit is left."""
    wait_until_warm(daemon)
    yield daemon
    wait_until(lambda: not daemon.leases(), "no lease is left", seen=daemon.leases)
    wait_until(lambda: not workers_of(daemon.processes), "no submit is left", seen=daemon.processes)
    card = daemon.inventory().details[0]
    assert (card["held_bytes"], card["fenced_bytes"]) == (0, 0)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Daemon]:
    with running_daemon(with_pool(60)) as daemon:
        SHARED_PROCESSES.add(daemon.process.pid)
        yield daemon
        SHARED_PROCESSES.remove(daemon.process.pid)


@pytest.fixture
def pool(shared_pool: Daemon) -> Iterator[Daemon]:
    yield from lent_pool(shared_pool)


@pytest.fixture
def impatient_pool() -> Iterator[Daemon]:
    """A pool of one test alone: a context that a lease has not taken after a second counts as one that hangs."""
    with running_daemon(with_pool(1)) as daemon:
        yield from lent_pool(daemon)


@pytest.fixture
def gpu(pool: Daemon) -> Iterator[GpuLease]:
    """Yield a lease with memory for submits."""
    with pool.builder().submits(ROOM).acquire() as lease:
        wait_until_warm(pool)
        yield lease


def test_a_submit_takes_a_context_and_the_pool_fills_up_again(pool: Daemon, gpu: GpuLease) -> None:
    used: list[int] = []
    for _ in range(2):
        (made,) = wait_until_warm(pool)
        with running(pool, gpu) as work:
            assert workers_of(pool.processes) == [made]
            card = pool.inventory().details[0]
            assert card["held_bytes"] == gpu.size_bytes + 2 * CONTEXT_BYTES
            os.kill(made, signal.SIGKILL)
        assert isinstance(work.error, Disconnected)
        assert made not in used
        used.append(made)
        wait_until(lambda: not workers_of(pool.processes), "its context is gone")
    wait_until(lambda: gpu.query()["last_submit"]["number"] == 1, "both are known to be gone", seen=gpu.query)
    assert gpu.query()["launches"] == 0


@pytest.mark.exhaustive
def test_all_that_is_kept_for_submits_can_be_had_and_no_more(pool: Daemon, gpu: GpuLease) -> None:
    with GpuSession(gpu) as session:
        neighbour = Neighbour(session)
        fill = gpu.submit("fill_u32", FAULTS).block([2]).out(ROOM).arg(np.uint32(2)).arg(np.uint32(7))
        (output,) = fill.launch()
        assert output[:8] == np.array([7, 7], np.uint32).tobytes()
        assert not any(output[8:])
        wait_until_warm(pool)
        with pytest.raises(AllocFailed, match="submits"):
            gpu.submit("fill_u32", FAULTS).block([2]).out(ROOM + 1).arg(np.uint32(2)).arg(np.uint32(7)).launch()
        wait_until_warm(pool)
        with pytest.raises(SyncFailed, match="stray_store"):
            stray(gpu).launch()
        neighbour.check()
        wait_until_warm(pool)
        check_scaled(scaling(gpu).launch())


def drain(daemon: Daemon, lease: GpuLease) -> None:
    ask(Opcode.DRAIN, Drain(200), daemon.address)


@pytest.mark.exhaustive
def test_it_ends_with_its_lease_whatever_ends_that(pool: Daemon) -> None:
    for what, (end, kind) in [*ENDS.items(), ("drained", (drain, Drained))]:
        (made,) = wait_until_warm(pool)
        lease = pool.builder().submits(ROOM).acquire()
        (made,) = wait_until_warm(pool)
        with running(pool, lease) as work:
            assert workers_of(pool.processes) == [made]
            end(pool, lease)
        assert isinstance(work.error, kind), (what, work.error)
        pool.wait_for_end(lease.lease_id)
    ask(Opcode.DRAIN_CANCEL, Empty(), pool.address)


@pytest.mark.exhaustive
def test_its_worker_is_killed_or_its_kernel_runs_for_too_long(pool: Daemon, gpu: GpuLease) -> None:
    with running(pool, gpu) as work:
        os.kill(workers_of(pool.processes)[0], signal.SIGKILL)
    assert isinstance(work.error, Disconnected)
    check_scaled(scaling(gpu).launch())
    with pool.builder().submits(ROOM).max_kernel_secs(0.3).acquire() as lease:
        wait_until_warm(pool)
        with pytest.raises(TimedOut):
            endless(lease).launch()
        assert lease.query()["state"] == "active"


@pytest.mark.exhaustive
def test_a_context_that_dies_or_hangs_as_it_is_taken_is_replaced(impatient_pool: Daemon) -> None:
    pool = impatient_pool
    with pool.builder().submits(ROOM).acquire() as gpu:
        wait_until_warm(pool)
        (made,) = wait_until_warm(pool)
        stop_process(made)
        work = Running(scaling(gpu))
        wait_until(lambda: gpu.query().get("submit", {}).get("state") == "starting", "it takes it")
        os.kill(made, signal.SIGKILL)
        work.wait()
        assert work.outputs is not None, work.error
        check_scaled(work.outputs)
        (made,) = wait_until_warm(pool)
        stop_process(made)
        begun = time.monotonic()
        check_scaled(scaling(gpu).launch())
        assert time.monotonic() - begun >= 1
        assert not is_running(made)


@pytest.mark.exhaustive
def test_its_lease_expires_while_it_takes_one(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config="warm_contexts = 1\n[limits]\nadopt_timeout_s = 30\n")
    wait_until_warm(daemon)

    def taking(lease: GpuLease) -> tuple[Running, int]:
        (made,) = wait_until_warm(daemon)
        stop_process(made)
        work = Running(scaling(lease))
        wait_until(
            lambda: work.is_over or daemon.query(lease.lease_id).get("submit", {}).get("state") == "starting",
            "it takes it",
        )
        if work.error is not None:
            raise work.error
        return work, made

    lease, (work, made), _ = daemon.short_lease(taking, submit_bytes=ROOM)
    work.wait()
    assert isinstance(work.error, LeaseExpired)
    daemon.wait_for_end(lease.lease_id)
    assert not is_running(made)


@pytest.mark.exhaustive
def test_many_leave_nothing(pool: Daemon, gpu: GpuLease) -> None:
    files = len(pool.open_files())
    for _ in range(TEN):
        check_scaled(scaling(gpu, 64).launch(), 64)
    # Two submits at the same time, with one context.
    wait_until_warm(pool)
    with pool.builder().submits(ROOM).acquire() as other, ThreadPoolExecutor(2) as threads:
        for outputs in threads.map(lambda lease: scaling(lease).launch(), (gpu, other)):
            check_scaled(outputs)
    wait_until(lambda: not workers_of(pool.processes), "all are gone")
    wait_until_warm(pool)
    wait_until(lambda: len(pool.open_files()) <= files, "nothing is left open", seen=pool.open_files)
