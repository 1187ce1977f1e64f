"""A time limit for kernels on a real card: one long kernel exceeds it; many short kernels do not, even if they take
long.
"""

import time

import pytest

from gpulease.client import GpuSession, GpuSessionFailed, KernelArgs
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, Neighbour, check_main_job, launch_for_ever, start_endless
from helpers.nvml import Cards
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

BOUND_S = 0.5
LATEST_S = 1.5
"""Seconds beyond the limit: the next check, the end of the process, and the proof that its memory is free."""


@pytest.mark.parametrize("then", ["idle", "sync", "launches"])
def test_a_kernel_that_runs_on_ends_its_lease(daemon: Daemon, cards: Cards, then: str) -> None:
    used = cards.used_bytes()
    with daemon.builder(64 << 20).device(0).acquire() as other, GpuSession(other) as beside:
        neighbour = Neighbour(beside)
        lease = daemon.builder(1 << 30).device(0).max_kernel_secs(BOUND_S).acquire()
        session = GpuSession(lease)
        module, flag = start_endless(session)
        started = time.monotonic()
        if then == "sync":
            with pytest.raises(GpuSessionFailed, match="a kernel ran for"):
                session.sync()
        elif then == "launches":
            with pytest.raises(GpuSessionFailed, match="a kernel ran for"):
                launch_for_ever(session, module, flag)
        wait_until(lambda: neighbour.check() and daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
        assert BOUND_S <= time.monotonic() - started < LATEST_S
        assert daemon.query(lease.lease_id)["cause"] == "kernel_timeout"
        with pytest.raises(GpuSessionFailed, match=r"a kernel ran for more than 0\.5 s"):
            session.sync()
    cards.check_back_to(used)


def test_many_short_kernels_may_run_for_longer(daemon: Daemon) -> None:
    with daemon.builder(64 << 20).max_kernel_secs(BOUND_S).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(FAULTS)
        out = session.mem_alloc(4)
        started = time.monotonic()
        # Each takes about 20 ms. Together they take seconds, but none takes half a second.
        for _ in range(100):
            session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(out).push_u32(1_000_000))
        session.sync()
        assert time.monotonic() - started > 2 * BOUND_S
        check_main_job(session)
