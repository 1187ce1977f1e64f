"""A session's client and worker may wait in several ways: the results are the same, and waiting uses no processor."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from gpulease.client import GpuLeaseError, GpuSession, GpuWaiting, SyncFailed
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, check_main_job, floats, scale_args

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


def test_syncs_by_the_ring_wait_for_all_and_tell_of_failures_and_ends(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.builder().waiting(GpuWaiting.SPIN).acquire() as lease, GpuSession(lease) as session:
        channel, answers = session._session.attachment.channel, list[bool]()
        wait = channel.await_work

        def wait_and_note(number: int) -> bool:
            answers.append(wait(number))
            return answers[-1]

        monkeypatch.setattr(channel, "await_work", wait_and_note)
        module, buffer = session.module_load(TRANSFORM), session.mem_alloc(400)
        session.mem_write(buffer, 0, np.ones(100, np.float32))
        for number in range(1, 100):
            session.launch(module, "scale", [1], [100], scale_args(buffer, 100))
            session.sync()
            assert floats(session.mem_read(buffer, 0, 4)) == [2.0**number]
        # On a busy host the worker may sleep or be late. Then a SYNC does the work.
        assert len(answers) >= 99
        session.launch(module, "scale", [1], [101], scale_args(buffer, 101))
        with pytest.raises(SyncFailed):
            session.sync()
        lease.free()
        with pytest.raises(GpuLeaseError):
            session.sync()


def cpu_s(daemon: Daemon) -> float:
    """Return the processor time that all of the daemon's processes have used so far; see proc_pid_stat(5)."""
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
