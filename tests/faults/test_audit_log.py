"""The audit log on a disk that is full, slow or missing: the daemon does what its settings demand."""

import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import Busy, GpuSession
from gpulease.daemon.contract.control_page import PAGE_BYTES
from gpulease.daemon.record.audit.files import log_files
from helpers.audit_log import check_whole, config, kinds, records, stop
from helpers.daemon import Daemon, Faults
from helpers.kernels import Neighbour, check_main_job
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

NO_FOLDER = Path("/sys/kernel/gpulease")
"""A folder that nobody can create, not even root (sysfs(5))."""

CAN_NOT_BE_WRITTEN = "the audit log can't be written"


class Disk:
    """A daemon's disk, which a test fills by a limit on the size of files."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self._daemon = daemon
        self._pid = daemon.process.pid
        self._folder = folder
        _, self._hard = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        """Let no file become larger than the log plus a few bytes, so that the next record is written incompletely."""
        size = log_files(self._folder)[-1].stat().st_size
        self._daemon.shorten_log()
        assert size > 2 * PAGE_BYTES, "the broker's other files, pages for workers, must still fit"
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (size + 100, self._hard))

    def empty(self) -> None:
        """Remove the limit, so that there is room again."""
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (self._hard, self._hard))


def use(daemon: Daemon, leases: int = 1) -> None:
    for _ in range(leases):
        with daemon.builder().acquire():
            pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize("warm_contexts", ["0", "1"])
def test_a_full_disk_under_a_log_that_is_required(
    start_daemon: Callable[..., Daemon], folder: Path, warm_contexts: str
) -> None:
    daemon = start_daemon(config=config(folder, required=True, warm_contexts=warm_contexts))
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    use(daemon, 8)
    disk = Disk(daemon, folder)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        # The attach's record is written after the session's reply. Wait for it, so that the grant's record below is the
        # first one that finds the disk full.
        wait_until(lambda: "attach" in kinds(folder), "the attach is on record", seen=lambda: kinds(folder))
        disk.fill()
        # The first acquire detects the full disk, and its grant is undone. The next one is refused at once.
        for _ in range(2):
            with pytest.raises(Busy, match="audit log can't be written: File too large"):
                daemon.builder().acquire()
        neighbour.check()
        lease.renew(60)
        wait_until(lambda: len(daemon.leases()) == 1, "what was not told is torn down", seen=daemon.leases)
        disk.empty()
        wait_until(lambda: "can be written again" in daemon.log(), "the log goes on", seen=daemon.log)
        use(daemon)
        neighbour.check()
    stop(daemon)
    check_whole(folder)
    assert kinds(folder).count("resume") == 1
    told = [record["data"] for record in records(folder)]
    assert "attach" in kinds(folder)
    assert any("can't be written" in data.get("reason", "") for data in told), "a grant that was never told is revoked"
    assert sum(data.get("reason") == "refused" for data in told) == 1


def test_a_full_disk_under_a_log_that_is_not(start_daemon: Callable[..., Daemon], folder: Path) -> None:
    daemon = start_daemon(config=config(folder))
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    use(daemon, 8)
    # Wait until all records are written: one that is written after `fill` reads the log's size would use up the few
    # bytes that are left.
    wait_until(lambda: kinds(folder).count("end") == 8, "no record is due")
    disk = Disk(daemon, folder)
    disk.fill()
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    wait_until(lambda: CAN_NOT_BE_WRITTEN in daemon.log(), "it says so", seen=daemon.log)
    disk.empty()
    wait_until(lambda: "can be written again" in daemon.log(), "the log goes on", seen=daemon.log)
    stop(daemon)
    check_whole(folder)
    # No record is missing: they waited in the daemon.
    assert [kinds(folder).count(kind) for kind in ("grant", "over", "end")] == [9, 9, 9]
    (resume,) = [record["data"] for record in records(folder) if record["kind"] == "resume"]
    assert (resume["problem"], resume["torn"]["size_bytes"]) == ("File too large", 100)


def test_what_found_no_room_is_counted(start_daemon: Callable[..., Daemon], folder: Path, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    bounds = {"MAX_QUEUED": 12, "MAX_QUEUED_MINOR": 12}
    constants = {f"gpulease.daemon.record.audit.record_writer:{name}": bound for name, bound in bounds.items()}
    daemon = start_daemon(config=config(folder), faults=Faults(constants, hang_syncs_while=hang))
    hang.touch()
    use(daemon)
    # Now the log's thread waits for the disk with the first record, and the queue fills.
    use(daemon, 10)
    hang.unlink()
    wait_until(lambda: "gap" in kinds(folder), "the gap is told")
    use(daemon)
    stop(daemon)
    check_whole(folder)
    dropped = dict.fromkeys(("grant", "over", "end"), 0)
    for record in records(folder):
        for kind, count in record["data"].get("dropped", {}).items():
            dropped[kind] += count
    assert sum(dropped.values()) > 3
    assert all(kinds(folder).count(kind) + count == 12 for kind, count in dropped.items())
    assert "records were dropped" in daemon.log()


def test_a_slow_disk_under_a_log_that_is_required(
    start_daemon: Callable[..., Daemon], folder: Path, tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    constants = {
        "gpulease.daemon.record.group_commit:MAX_WAIT_S": 0.6,
        "gpulease.daemon.record.group_commit:STALLED_AFTER_S": 0.3,
    }
    daemon = start_daemon(config=config(folder, required=True), faults=Faults(constants, hang_syncs_while=hang))
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        hang.touch()
        began = time.monotonic()
        with pytest.raises(Busy, match="a write has lasted for more than"):
            daemon.builder().acquire()
        assert time.monotonic() - began > 0.5
        # The broker does not wait for the disk, and only grants are held back.
        daemon.leases()
        neighbour.check()
        lease.renew(60)
        with pytest.raises(Busy):
            daemon.builder().acquire()
        wait_until(lambda: len(daemon.leases()) == 1, "what was not told is torn down", seen=daemon.leases)
        hang.unlink()
        wait_until(lambda: can_be_had(daemon), "leases are granted again")
    stop(daemon)
    check_whole(folder)
    # The second one was refused before it was granted. The log contains the outcome of both.
    told = [record["data"] for record in records(folder)]
    assert sum("a write has lasted" in data.get("reason", "") for data in told) == 2
    assert sum(data.get("reason") == "refused" for data in told) >= 1
    assert "resume" not in kinds(folder)


def can_be_had(daemon: Daemon) -> bool:
    try:
        use(daemon)
    except Busy:
        return False
    return True


def test_a_grant_waits_for_its_record(start_daemon: Callable[..., Daemon], folder: Path, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    daemon = start_daemon(config=config(folder, required=True), faults=Faults(hang_syncs_while=hang))
    use(daemon)
    hang.touch()
    began = time.monotonic()
    timer = threading.Timer(0.5, hang.unlink)
    timer.start()
    use(daemon)
    assert time.monotonic() - began > 0.5
    timer.join()


@pytest.mark.parametrize("required", [True, False])
def test_a_folder_that_can_not_be_made(required: bool) -> None:
    daemon = Daemon(config=config(NO_FOLDER, required=required))
    daemon.allowed_trouble += [CAN_NOT_BE_WRITTEN, "its last records are not in the audit log"]
    try:
        if required:
            assert daemon.wait_for_exit() == os.EX_UNAVAILABLE
            assert daemon.log().rstrip().endswith(f"{NO_FOLDER}: Operation not permitted.")
        else:
            daemon.wait_until_it_answers()
            wait_until(lambda: CAN_NOT_BE_WRITTEN in daemon.log(), "the log says it", seen=daemon.log)
            use(daemon)
    finally:
        daemon.stop()


def test_somebody_cuts_the_log_while_it_is_written(start_daemon: Callable[..., Daemon], folder: Path) -> None:
    daemon = start_daemon(config=config(folder))
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    use(daemon, 2)
    wait_until(lambda: kinds(folder).count("end") == 2, "all is written")
    os.truncate(log_files(folder)[-1], 700)
    use(daemon)
    wait_until(lambda: "can be written again" in daemon.log(), "the log goes on", seen=daemon.log)
    stop(daemon)
    (resume,) = [record["data"] for record in records(folder) if record["kind"] == "resume"]
    assert "not as the last daemon left it" in resume["problem"]
    assert resume["lost"]["last"] == 7
    with pytest.raises(AssertionError, match="are missing before it"):
        check_whole(folder)
