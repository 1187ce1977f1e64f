"""A lease ends once, whenever the broker is killed: the audit log has one `end`, and all replies say the same cause."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpulease.client import GpuLeaseError, LeaseFreed
from gpulease.client.sync.driver import ask
from gpulease.daemon.record.audit.files import log_files
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.messages import LeaseRef
from helpers import audit_log
from helpers.daemon import Faults
from helpers.lasting import LastingDaemon
from helpers.waiting import wait_until

LEASES = 16
ROUNDS = 2


def free(lasting: LastingDaemon, lease_id: int) -> None:
    ask(Opcode.LEASE_FREE, LeaseRef(lease_id), lasting.address)


def free_all_until_killed(lasting: LastingDaemon, lease_ids: Sequence[int]) -> None:
    """Free all leases at once. The first thread to get a reply kills the broker: then other ends are durable, but the
    zygote does not know them.
    """
    start = threading.Barrier(len(lease_ids))

    def free_one(lease_id: int) -> None:
        start.wait()
        try:
            free(lasting, lease_id)
        except GpuLeaseError:
            return
        lasting.now.process.kill()

    with ThreadPoolExecutor(len(lease_ids)) as pool:
        list(pool.map(free_one, lease_ids))
    lasting.kill()


def ends(audit: Path, lease_ids: Iterable[int]) -> dict[int, list[str]]:
    """Return the causes in the audit log's `end` records of each lease."""
    told = [one["data"] for one in audit_log.records(audit) if one["kind"] == "end"]
    return {number: [one["cause"] for one in told if int(one["lease"], 16) == number] for number in lease_ids}


@pytest.mark.exhaustive
def test_a_lease_that_was_freed_stays_freed(start_lasting: Callable[..., LastingDaemon], tmp_path: Path) -> None:
    lasting = start_lasting(config=audit_log.config(tmp_path / "audit"))
    all_ids: list[int] = []
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(LEASES) as pool:
            leases = list(pool.map(lambda _: lasting.now.builder().acquire(), range(LEASES)))
        lease_ids = [lease.lease_id for lease in leases]
        all_ids += lease_ids
        free_all_until_killed(lasting, lease_ids)
        lasting.start()
        for lease_id in lease_ids:
            # A lease may live on if no reply has reported its end. Free it now.
            with contextlib.suppress(LeaseFreed):
                free(lasting, lease_id)
    lasting.check_idle()
    audit_log.stop(lasting.now)
    assert ends(tmp_path / "audit", all_ids) == {lease_id: ["freed"] for lease_id in all_ids}
    audit_log.check_whole(tmp_path / "audit")


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_long_ago", [False, True], ids=["just_granted", "granted_long_ago"])
def test_an_end_that_was_not_recorded_is_made_up_for(
    start_lasting: Callable[..., LastingDaemon], tmp_path: Path, is_long_ago: bool
) -> None:
    """The audit log's disk hangs, so that a lease's end is only in the journal. Then the broker is killed."""
    flag = tmp_path / "hangs"
    lasting = start_lasting(config=audit_log.config(tmp_path / "audit"), faults=Faults(hang_syncs_while=flag))
    lease = lasting.now.builder().acquire()
    lease_id = lease.lease_id
    wait_until(lambda: "grant" in audit_log.kinds(tmp_path / "audit"), "the grant is recorded")
    if is_long_ago:
        lasting.now.builder().acquire().free()
        wait_until(lambda: "end" in audit_log.kinds(tmp_path / "audit"), "more is recorded behind it")
    flag.touch()
    wait_until(lambda: flag.read_text(), "the log's thread waits for the disk")
    free(lasting, lease_id)
    lasting.kill()
    assert ends(tmp_path / "audit", [lease_id]) == {lease_id: []}
    faults = None
    if is_long_ago:
        # The next broker reads only the end of a log. Here that contains nothing but what follows the lease's own
        # records.
        written = b"".join(path.read_bytes() for path in log_files(tmp_path / "audit"))
        tail_bytes = len(written) - written.rindex(lease_text(lease_id).encode())
        faults = Faults(constants={"gpulease.daemon.record.audit.files:TAIL_BYTES": tail_bytes})
    lasting.start(faults)
    with pytest.raises(LeaseFreed):
        free(lasting, lease_id)
    lasting.restart(faults)
    audit_log.stop(lasting.now)
    assert ends(tmp_path / "audit", [lease_id]) == {lease_id: ["freed"]}
