"""A disk that is full, slow or not there under the audit log: what the operator chose is what happens."""

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
"""sysfs(5): nobody can make a folder there, root neither."""

CAN_NOT_BE_WRITTEN = "the audit log can't be written"


class Disk:
    """A daemon's: full or not."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self._daemon = daemon
        self._pid = daemon.process.pid
        self._folder = folder
        _, self._hard = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        """No file grows beyond what the log has, and a few bytes: the next record is torn."""
        size = log_files(self._folder)[-1].stat().st_size
        self._daemon.shorten_log()
        assert size > 2 * PAGE_BYTES, "the broker's other files, pages for workers, must still fit"
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (size + 100, self._hard))

    def empty(self) -> None:
        """There is room again."""
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
        # It is written behind the opening's reply; the grant below has to be the first record that finds the disk full.
        wait_until(lambda: "attach" in kinds(folder), "the attach is on record", seen=lambda: kinds(folder))
        disk.fill()
        # The first acquire finds out, by a grant that is taken back; the next is refused at once.
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
    # A record that came behind the look at the log's size would leave none of the few bytes.
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
    # Nothing is missing: it had waited.
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
    # The thread waits for the disk with the first record.
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
        # Nothing of the broker waits for the disk, and nothing of it holds anything back but grants.
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
    # The second was refused before it was granted; the log says what became of both.
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
    daemon.allowed_trouble += [CAN_NOT_BE_WRITTEN, "the last records are not in the audit log"]
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
