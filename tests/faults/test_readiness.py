"""What the daemon reports to monitoring programs when something that it needs breaks, and when it works again."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import Busy
from gpulease.client.sync.driver import ask
from gpulease.daemon.record.audit.files import log_files
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.audit_log import config
from helpers.daemon import Daemon, Faults
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive


def failing(daemon: Daemon) -> dict[str, str]:
    """Return the details of the checks that fail. Fails unless `ready` in the report agrees."""
    report = ask(Opcode.HEALTH, Empty(), daemon.address).report
    found = {check["check"]: check["detail"] for check in report["checks"] if not check["ok"]}
    assert report["ready"] is not bool(found)
    return found


def metrics(daemon: Daemon) -> list[str]:
    return list(ask(Opcode.METRICS, Empty(), daemon.address).exposition.splitlines())


def test_the_zygote_is_killed_and_comes_back(start_daemon: Callable[..., Daemon]) -> None:
    # Long enough that the test sees the check fail, even on a busy host.
    daemon = start_daemon(faults=Faults({"gpulease.daemon.workers.zygote_client:RESTART_DELAY_S": 2.0}))
    daemon.allowed_trouble.append("the zygote died")
    assert failing(daemon) == {}
    os.kill(daemon.zygote_pid(), signal.SIGKILL)
    wait_until(lambda: "zygote" in failing(daemon), "it can start no worker", seen=daemon.log)
    wait_until(lambda: not failing(daemon), "it can again", seen=daemon.log)
    assert "gpulease_ready 1.0" in metrics(daemon)


def test_an_audit_log_that_is_demanded_and_can_not_be_written(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    daemon = start_daemon(config=config(folder, required=True))
    daemon.allowed_trouble.append("the audit log can't be written")
    for _ in range(8):
        daemon.builder().acquire().free()
    assert {"gpulease_audit_writable 1.0", "gpulease_audit_records_dropped_total 0.0"} <= set(metrics(daemon))
    room = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    # The disk is full: no file may become larger than the log.
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (log_files(folder)[-1].stat().st_size + 100, room[1]))
    with pytest.raises(Busy, match="audit log can't be written"):
        daemon.builder().acquire()
    assert failing(daemon) == {"audit": "File too large"}
    assert {"gpulease_audit_writable 0.0", "gpulease_ready 0.0", 'gpulease_check{check="audit"} 0.0'} <= set(
        metrics(daemon)
    )
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, room)
    wait_until(lambda: not failing(daemon), "it is written again", seen=daemon.log)
    assert "gpulease_audit_writable 1.0" in metrics(daemon)
