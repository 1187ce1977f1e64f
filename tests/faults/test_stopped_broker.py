"""A broker hangs, here because of SIGSTOP: its leases end nevertheless, and it then reports the right causes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import GpuLeaseError, GpuSession
from helpers import audit_log
from helpers.daemon import Daemon
from helpers.kernels import start_endless
from helpers.processes import is_running, process_info, stop_process
from helpers.waiting import wait_until

LONG_S = 60.0
"""Limit in seconds for an end that is due in some seconds, because the host may be slow."""

GRACE_S = 4
"""Seconds from the revocation to the end of the worker. The broker is stopped within this time."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not_kept"])
def test_endless_kernels_end_while_the_broker_is_stopped(
    start_daemon: Callable[..., Daemon], tmp_path: Path, keeps: bool
) -> None:
    """One kernel ends at its lease's deadline, the other at its own time limit."""
    state = f'state = "{tmp_path / "state"}"\n' if keeps else ""
    daemon = start_daemon(config=state + audit_log.config(tmp_path / "audit"))
    free_bytes = daemon.available_bytes()
    wishes = {
        "expired": daemon.builder().lease_secs(4),
        "kernel_timeout": daemon.builder(seconds=300).max_kernel_secs(3),
    }
    leases = {cause: wish.acquire() for cause, wish in wishes.items()}
    workers = [daemon.worker_pid(lease.lease_id) for lease in leases.values()]
    sessions = [GpuSession(lease) for lease in leases.values()]
    kept = [start_endless(session) for session in sessions]
    stop_process(daemon.process.pid)
    try:
        wait_until(lambda: not any(map(is_running, workers)), "their workers are gone", LONG_S)
        stopped = process_info(daemon.process.pid)
        assert stopped is not None
        assert stopped.state == "T"
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    for cause, lease in leases.items():
        daemon.wait_for_end(lease.lease_id)
        assert daemon.query(lease.lease_id)["cause"] == cause
    for session in sessions:
        with pytest.raises(GpuLeaseError):
            session.sync()
    assert daemon.available_bytes() == free_bytes
    del kept
    audit_log.stop(daemon)
    told = [one["data"]["cause"] for one in audit_log.records(tmp_path / "audit") if one["kind"] == "end"]
    assert sorted(told) == sorted(leases)


def test_a_lease_that_was_revoked_ends_though_the_broker_stops_before_the_kill(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    config = f"[limits.grace_ms]\nrevoked = {GRACE_S * 1000}\n"
    daemon = start_daemon(config=audit_log.config(tmp_path / "audit") + config)
    lease = daemon.builder(seconds=600).acquire()
    worker = daemon.worker_pid(lease.lease_id)
    session = GpuSession(lease)
    kept = start_endless(session)
    begun_at = time.monotonic()
    revoke = threading.Thread(target=daemon.revoke, args=(lease.lease_id,))
    revoke.start()
    wait_until(lambda: daemon.query(lease.lease_id)["state"] == "draining", "its end has begun")
    stop_process(daemon.process.pid)
    try:
        assert is_running(worker), "the broker was stopped too late"
        wait_until(lambda: not is_running(worker), "its worker is gone", LONG_S)
        assert time.monotonic() - begun_at >= GRACE_S
        stopped = process_info(daemon.process.pid)
        assert stopped is not None
        assert stopped.state == "T"
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    revoke.join()
    assert daemon.query(lease.lease_id)["state"] == "torndown"
    with pytest.raises(GpuLeaseError):
        session.sync()
    del kept
    audit_log.stop(daemon)
    told = [one["data"]["cause"] for one in audit_log.records(tmp_path / "audit") if one["kind"] == "end"]
    assert told == ["revoked"]
