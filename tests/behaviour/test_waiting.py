"""However a session's ends wait for each other, its work is the same; and what waits costs no core."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease.client import GpuSession, GpuWaiting
from helpers.daemon import Daemon
from helpers.kernels import check_main_job

IDLE_S = 1.0
SESSIONS = 4


@pytest.mark.parametrize("waiting", GpuWaiting)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_main_job(daemon: Daemon, waiting: GpuWaiting, shared_memory: bool) -> None:
    with (
        daemon.builder().waiting(waiting).acquire() as lease,
        GpuSession(lease, shared_memory=shared_memory) as session,
    ):
        for _ in range(3):
            check_main_job(session)


def cpu_s(daemon: Daemon) -> float:
    """What all of its processes have used so far; see proc_pid_stat(5)."""
    ticks = 0
    for info in daemon.processes():
        fields = Path(f"/proc/{info.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.exhaustive
@pytest.mark.parametrize("waiting", [None, *GpuWaiting])
def test_idle_sessions_use_no_core(start_daemon: Callable[..., Daemon], waiting: GpuWaiting | None) -> None:
    daemon = start_daemon()
    with ExitStack() as stack:
        for _ in range(SESSIONS):
            builder = daemon.builder()
            if waiting is not None:
                builder.waiting(waiting)
            session = stack.enter_context(GpuSession(stack.enter_context(builder.acquire())))
            check_main_job(session)
        before = cpu_s(daemon)
        time.sleep(IDLE_S)
        assert cpu_s(daemon) - before < IDLE_S / 10
