"""One-shot submits on a real card, each in its own context, next to a session on the same lease."""

import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gpulease.client import Disconnected, GpuLease, GpuSession, LaunchFailed, Revoked, SyncFailed, TimedOut
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, Neighbour, start_stray_store
from helpers.nvml import Cards
from helpers.submits import Running, check_scaled, endless, running, scaling, stray, workers_of
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROOM = 256 * MIB
TEN = 10


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    """Yield another tenant's session. Its results must be correct during the whole test."""
    with daemon.builder(64 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        neighbour.check()
        yield neighbour
        neighbour.check()


@pytest.fixture
def gpu(daemon: Daemon, neighbour: Neighbour) -> Iterator[GpuLease]:
    with daemon.builder(64 * MIB).device(0).submits(ROOM).acquire() as lease:
        yield lease


def test_a_submit_and_a_session_side_by_side(gpu: GpuLease, neighbour: Neighbour) -> None:
    with GpuSession(gpu) as session:
        own = Neighbour(session)
        for factor in range(1, 4):
            work = Running(scaling(gpu, factor=factor))
            while not work.is_over:
                own.check()
                neighbour.check()
            work.wait()
            assert work.outputs is not None, work.error
            check_scaled(work.outputs, factor=factor)


def test_all_that_is_kept_for_it_can_be_had_and_comes_back(
    daemon: Daemon, cards: Cards, gpu: GpuLease, neighbour: Neighbour
) -> None:
    used = cards.used_bytes()
    words = 4 * MIB
    fill = gpu.submit("fill_u32", FAULTS).grid([words // 256]).block([256])
    work = Running(fill.out(4 * words).arg(np.uint32(words)).arg(np.uint32(7)).arg(np.uint32(0)))
    work.wait()
    # The launch has one argument more than the kernel.
    assert isinstance(work.error, LaunchFailed)
    fill = gpu.submit("fill_u32", FAULTS).grid([words // 256]).block([256])
    (output,) = fill.out(4 * words).arg(np.uint32(words)).arg(np.uint32(7)).launch()
    assert (np.frombuffer(output, np.uint32) == 7).all()
    wait_until(lambda: "submit" not in gpu.query(), "its memory is proved free")
    cards.check_back_to(used)
    neighbour.check()


def faults_counted(daemon: Daemon) -> float:
    """Return the number of faults of all tenants."""
    text = str(ask(Opcode.METRICS, Empty(), daemon.address).exposition)
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("gpu_session_fault_total{"))


def test_a_fault_stays_in_its_own_context(daemon: Daemon, gpu: GpuLease, neighbour: Neighbour) -> None:
    """On a card a fault destroys the context: that of the session, or that of the submit, but never the other one."""
    with GpuSession(gpu) as session:
        own, counted = Neighbour(session), faults_counted(daemon)
        own.check()
        with pytest.raises(SyncFailed) as caught:
            stray(gpu).launch()
        assert caught.value.kernel in ("", "stray_store")
        assert faults_counted(daemon) == counted + 1
        own.check()
        neighbour.check()
        module, buffer = session.module_load(FAULTS), session.mem_alloc(4)
        start_stray_store(session, module, buffer)
        with pytest.raises(SyncFailed):
            session.sync()
        check_scaled(scaling(gpu).launch())
        neighbour.check()


def test_an_endless_kernel_ends_with_its_time(daemon: Daemon, gpu: GpuLease, neighbour: Neighbour) -> None:
    with pytest.raises(TimedOut):
        endless(gpu).timeout_secs(1).launch()
    neighbour.check()
    check_scaled(scaling(gpu).launch())


def revoke(daemon: Daemon, lease: GpuLease) -> None:
    daemon.revoke(lease.lease_id)


def kill(daemon: Daemon, lease: GpuLease) -> None:
    (pid,) = workers_of(daemon.processes)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("end", "kind"), [(revoke, Revoked), (kill, Disconnected)], ids=["revoked", "killed"])
def test_an_endless_kernel_is_ended(
    daemon: Daemon,
    cards: Cards,
    neighbour: Neighbour,
    end: Callable[[Daemon, GpuLease], None],
    kind: type[Exception],
) -> None:
    used = cards.used_bytes()
    with daemon.builder(64 * MIB).device(0).submits(ROOM).acquire() as lease:
        with running(daemon, lease) as work:
            neighbour.check()
            end(daemon, lease)
        assert isinstance(work.error, kind), work.error
    daemon.wait_for_end(lease.lease_id)
    cards.check_back_to(used)


def test_ten_in_a_row_leave_nothing(daemon: Daemon, cards: Cards, gpu: GpuLease) -> None:
    used = cards.used_bytes()
    for _ in range(TEN):
        check_scaled(scaling(gpu).launch())
    wait_until(lambda: "submit" not in gpu.query(), "the last is proved gone")
    cards.check_back_to(used)
