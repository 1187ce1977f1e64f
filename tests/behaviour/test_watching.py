"""Kernels that run for too long, and workers that do not respond, end their lease. Nobody else is affected."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease.client import GpuSession, GpuSessionFailed, KernelArgs
from helpers.daemon import Daemon, Faults
from helpers.kernels import FAULTS, Neighbour, launch_for_ever, start_endless
from helpers.processes import stop_process
from helpers.waiting import wait_until


@pytest.mark.exhaustive
@pytest.mark.parametrize("then", ["idle", "sync", "launches"])
def test_a_kernel_that_runs_for_too_long_ends_its_lease(daemon: Daemon, then: str) -> None:
    with daemon.builder().acquire() as other, GpuSession(other) as beside:
        neighbour = Neighbour(beside)
        lease = daemon.builder(seconds=30).max_kernel_secs(0.3).acquire()
        session = GpuSession(lease)
        module, flag = start_endless(session)
        started = time.monotonic()
        if then == "sync":
            with pytest.raises(GpuSessionFailed, match="a kernel ran for"):
                session.sync()
        if then == "launches":
            with pytest.raises(GpuSessionFailed, match="a kernel ran for"):
                launch_for_ever(session, module, flag)
        wait_until(lambda: neighbour.check() and daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
        assert time.monotonic() - started >= 0.3
        report = daemon.query(lease.lease_id)
        assert (report["cause"], report["reason"]) == ("kernel_timeout", "a kernel ran for more than 0.3 s")
        with pytest.raises(GpuSessionFailed, match=r"a kernel ran for more than 0\.3 s"):
            session.sync()


def test_many_short_kernels_may_run_for_longer(daemon: Daemon) -> None:
    # The bound is longer than a busy host takes for one of them.
    with daemon.builder(seconds=60).max_kernel_secs(2).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(FAULTS)
        out = session.mem_alloc(4)
        started = time.monotonic()
        while time.monotonic() - started < 4:
            for _ in range(50):
                session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(out).push_u32(500_000))
            session.sync()
        assert lease.query()["state"] == "active"


@pytest.mark.exhaustive
def test_a_stopped_worker_is_found(start_daemon: Callable[..., Daemon]) -> None:
    quick = {
        "gpulease.daemon.workers.monitors:UNRESPONSIVE_AFTER_S": 10.0,
        "gpulease.daemon.workers.monitors:ROUND_S": 0.05,
    }
    daemon = start_daemon(faults=Faults(quick))
    with daemon.builder(seconds=60).acquire() as other, GpuSession(other) as beside:
        neighbour = Neighbour(beside)
        lease = daemon.builder(seconds=60).acquire()
        session = GpuSession(lease)
        stop_process(daemon.worker_pid(lease.lease_id))
        # The neighbour works all the time, because a sleeping worker shows that it responds only every few seconds.
        wait_until(lambda: neighbour.check() and daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
        with pytest.raises(GpuSessionFailed, match="stopped responding"):
            session.sync()
        assert daemon.query(lease.lease_id)["cause"] == "unresponsive"
        neighbour.check()


LOOKED_S = 0.3


@pytest.mark.exhaustive
@pytest.mark.parametrize("grows_by", ["load", "first launch"])
def test_a_session_that_holds_more_than_was_admitted_ends(
    start_daemon: Callable[..., Daemon], tmp_path: Path, grows_by: str
) -> None:
    inflated = tmp_path / "inflated"
    daemon = start_daemon(faults=Faults(inflate_while=inflated))
    lease = daemon.builder(seconds=60).acquire()
    session = GpuSession(lease)
    module, out = session.module_load(FAULTS), session.mem_alloc(4)
    session.sync()
    # The daemon checks after a load when it has time. After this pause it has.
    time.sleep(LOOKED_S)
    inflated.touch()
    if grows_by == "load":
        # The daemon checks while the reply is on its way, so either may be first.
        with suppress(GpuSessionFailed):
            session.module_load(FAULTS)
    else:
        session.launch(module, "fill_u32", [1], [1], KernelArgs().push_buffer(out).push_u32(1).push_u32(7))
    daemon.wait_for_end(lease.lease_id)
    assert daemon.query(lease.lease_id)["cause"] == "over_slice"
    with pytest.raises(GpuSessionFailed, match="held more of the card than was leased"):
        session.sync()
