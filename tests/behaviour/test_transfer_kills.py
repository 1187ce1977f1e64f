"""kill -9 of the broker, or of a worker, while a session moves from one worker to another.

Before a record says that it has moved, both workers live, and each of them has or had the session. The next broker
continues it in the worker that served it last. While its bytes pass through a ring, the former worker has all of them.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease.client import GpuLease, GpuLeaseError, GpuSession
from helpers.audit_log import records
from helpers.daemon import Faults
from helpers.lasting import LastingDaemon
from helpers.parking import row
from helpers.stopping_worker import RING_STEP
from helpers.waiting import wait_until

MIB = 1 << 20
CONFIG = """
audit = "{audit}"
[limits]
park_memory = "256MiB"
park_stay_ms = 0
parks_per_minute = 1000000
"""


def workers_of(node: LastingDaemon, lease: GpuLease) -> list[int]:
    name = f"gpul-{lease.lease_id:032x}"[:15]
    return [info.pid for info in node.processes() if info.name == name]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    "step",
    ["arrived", *(pytest.param(step, marks=pytest.mark.exhaustive) for step in ("arriving", "arrived, and died"))],
)
def test_a_killed_broker_finds_both_workers(
    start_lasting: Callable[..., LastingDaemon], tmp_path: Path, step: str
) -> None:
    audit, hang, stops_at = tmp_path / "audit", tmp_path / "hang", tmp_path / "step"
    # The journal does not get the record for which the kill of the former worker waits.
    constants = {"gpulease.daemon.record.group_commit:MAX_WAIT_S": 600.0}
    faults = Faults(constants, hang_commits_while=hang, stops_workers_at=stops_at)
    stops_at.write_text("")
    node = start_lasting(vram=("256MiB", "256MiB"), config=CONFIG.format(audit=audit), faults=faults)
    cards = [card["uuid"] for card in node.now.inventory().details]
    lease = node.now.builder(32 * MIB).lease_secs(600).timeout(60).parkable().device("0").acquire()
    with GpuSession(lease) as session:
        buffer = session.mem_alloc(4)
        session.mem_write(buffer, 0, b"left")
        session.sync()
        (former,) = workers_of(node, lease)
        # A parked session moves through the host's memory. Its former worker is killed only after the record is stored.
        lease.park()
        hang.write_text("")
        stops_at.write_text("arriving" if step == "arriving" else "")
        moving = threading.Thread(target=move, args=(lease,))
        moving.start()
        wait_until(lambda: len(workers_of(node, lease)) == 2, "the next worker is there", seen=node.processes)
        (following,) = set(workers_of(node, lease)) - {former}
        if step == "arriving":
            wait_until(lambda: state_of(following) == "T", "the next worker stops")
            stops_at.write_text("")
        else:
            session.mem_write(buffer, 0, b"came")
            session.sync()
        assert workers_of(node, lease).count(former), "the former worker is there"
        # In the second case, the next worker dies while no broker runs.
        node.kill()
        if step == "arrived, and died":
            os.kill(following, signal.SIGKILL)
        hang.unlink()
        node.start()
        moving.join()
        if step == "arrived, and died":
            wait_until(lambda: row(node.address, lease)["state"] == "torndown", "the lease has ended")
            assert row(node.address, lease)["cause"] == "worker_died"
            with pytest.raises(GpuLeaseError):
                session.mem_read(buffer, 0, 4)
        else:
            card, mark, pid = (0, b"left", former) if step == "arriving" else (1, b"came", following)
            assert session.mem_read(buffer, 0, 4) == mark
            assert row(node.address, lease)["card_uuid"] == cards[card]
            wait_until(lambda: workers_of(node, lease) == [pid], "the other worker has ended", seen=node.processes)
            # The session is complete: it can move again.
            lease.move(1 - card)
            assert session.mem_read(buffer, 0, 4) == mark
    with suppress(GpuLeaseError):
        lease.free()
    wait_until(lambda: not node.now.leases(), "the lease has ended")
    wait_until(lambda: ends_in(audit), "the end is in the audit log")
    assert ends_in(audit) == [f"{lease.lease_id:032x}"]


@pytest.mark.parametrize(
    "dies", ["former", "following", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("broker", "lease"))]
)
def test_what_dies_while_the_bytes_pass_through_a_ring_leaves_one_whole_session_or_none(
    start_lasting: Callable[..., LastingDaemon], tmp_path: Path, dies: str
) -> None:
    audit, stops_at = tmp_path / "audit", tmp_path / "step"
    stops_at.write_text(RING_STEP if dies == "former" else "")
    config = CONFIG.format(audit=audit) + "direct_moves = false\n"
    node = start_lasting(vram=("256MiB", "256MiB"), config=config, faults=Faults(stops_workers_at=stops_at))
    # More than the ring has room for.
    lease = node.now.builder(192 * MIB).lease_secs(600).timeout(60).parkable().device("0").acquire()
    first = row(node.address, lease)["card_uuid"]
    with GpuSession(lease) as session:
        buffer = session.mem_alloc(160 * MIB)
        session.mem_write(buffer, 159 * MIB, b"last")
        session.sync()
        (former,) = workers_of(node, lease)
        stops_at.write_text("" if dies == "former" else RING_STEP)
        moving = threading.Thread(target=move, args=(lease,))
        moving.start()
        wait_until(lambda: len(workers_of(node, lease)) == 2, "the next worker is there", seen=node.processes)
        (following,) = set(workers_of(node, lease)) - {former}
        stopped = former if dies == "former" else following
        wait_until(lambda: state_of(stopped) == "T", "the worker stops in the middle of the copy")
        stops_at.write_text("")
        match dies:
            case "broker":
                node.kill()
                node.start()
            case "lease":
                node.now.revoke(lease.lease_id)
            case _:
                os.kill(stopped, signal.SIGKILL)
        moving.join()
        if dies in {"former", "lease"}:
            # Only the former worker had all bytes.
            wait_until(lambda: row(node.address, lease)["state"] == "torndown", "the lease has ended")
            assert row(node.address, lease)["cause"] == ("worker_died" if dies == "former" else "revoked")
            with pytest.raises(GpuLeaseError):
                session.mem_read(buffer, 0, 4)
            wait_until(lambda: not workers_of(node, lease), "both workers have ended", seen=node.processes)
        else:
            assert bytes(session.mem_read(buffer, 159 * MIB, 4)) == b"last"
            assert row(node.address, lease)["card_uuid"] == first
            wait_until(lambda: workers_of(node, lease) == [former], "the other worker is gone", seen=node.processes)
            # The session is complete: it can move again.
            lease.move(1)
            assert bytes(session.mem_read(buffer, 159 * MIB, 4)) == b"last"
    with suppress(GpuLeaseError):
        lease.free()
    wait_until(lambda: not node.now.leases(), "the lease has ended")
    wait_until(lambda: ends_in(audit), "the end is in the audit log")
    assert ends_in(audit) == [f"{lease.lease_id:032x}"]


def ends_in(audit: Path) -> list[str]:
    return [record["data"]["lease"] for record in records(audit) if record["kind"] == "end"]


def move(lease: GpuLease) -> None:
    # The broker is killed before it has replied.
    with suppress(GpuLeaseError):
        lease.move(1)
