"""The reader of the daemon's log stops reading: the daemon continues, and later reports how many records it dropped."""

import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpulease.client import GpuSession
from helpers.daemon import Daemon, Faults
from helpers.kernels import check_main_job
from helpers.log_story import records_of
from helpers.processes import stop_process
from helpers.waiting import wait_until

PIPE_BYTES = 4096
WAITING_BYTES = 8192
LEASES = 12
"""Each lease leads to 2 KiB of log, so that together they exceed the pipe and the daemon's queue."""


@pytest.mark.exhaustive
def test_a_reader_that_is_stopped(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    log = tmp_path / "log"
    with log.open("wb") as file:
        reader = subprocess.Popen(["cat"], stdin=read_end, stdout=file)
    faults = Faults(constants={"gpulease.daemon.log.writer:MAX_WAITING_BYTES": WAITING_BYTES})
    daemon = Daemon(stderr=write_end, log_format="json", faults=faults)
    for fd in (read_end, write_end):
        os.close(fd)
    try:
        wait_until(lambda: b"listens on" in log.read_bytes(), "it listens")
        stop_process(reader.pid)
        for _ in range(LEASES):
            with daemon.builder().acquire() as lease, GpuSession(lease) as session:
                check_main_job(session)
        assert daemon.leases() == []
        reader.send_signal(signal.SIGCONT)
        later: list[bytes] = []

        def has_caught_up() -> bool:
            # The records of a lease are dropped, too, until the reader has made room.
            with daemon.builder().acquire() as lease:
                later.append(f"{lease.lease_id:032x}".encode())
            written = log.read_bytes()
            return b"log.dropped" in written and any(lease_id in written for lease_id in later)

        wait_until(has_caught_up, "the log goes on", seen=log.read_text)
        stop_process(reader.pid)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_for_exit() == 0
        daemon.check_nothing_is_left()
    finally:
        reader.send_signal(signal.SIGCONT)
        daemon.discard()
        reader.wait()
    records = records_of(log.read_text())
    dropped = [record for record in records if record["event"] == "log.dropped" and record["process"] == "broker"]
    reclaimed = sum(json.loads(line)["event"] == "lease.reclaimed" for line in log.read_text().splitlines())
    assert sum(record["count"] for record in dropped) > 0
    assert reclaimed < LEASES + len(later)
