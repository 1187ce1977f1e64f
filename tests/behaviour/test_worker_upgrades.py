"""Upgrades of the daemon: workers of the new version continue the sessions of workers of the earlier version."""

import json
import os
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client import Busy, GpuLease, GpuSession
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import LeaseMove
from helpers.audit_log import records
from helpers.daemon import Faults
from helpers.lasting import LastingDaemon
from helpers.parking import row
from helpers.pointers import POINTERS, count_args
from helpers.waiting import wait_until
from helpers.working import working

MIB = 1 << 20
SLICE = 64 * MIB
OTHER = Faults(constants={"gpulease.daemon.workers.zygote_client:VERSION": "99.0"})
"""Faults with which the next daemon has another version than the one before."""
UNREADABLE = Faults(
    constants={**OTHER.constants, "gpulease.daemon.workers.session_images:IMAGE_VERSIONS": [0]},
)
"""The same, and the next daemon's workers can read no image that an earlier worker writes."""

StartLasting = Callable[..., LastingDaemon]


def start(start_lasting: StartLasting, folder: Path) -> LastingDaemon:
    limits = '[limits]\npark_memory = "2GiB"\novercommit = 4.0\npark_stay_ms = 0\nparks_per_minute = 1000000\n'
    return start_lasting(vram=("512MiB",), config=f'audit = "{folder}"\n{limits}')


def parkable(node: LastingDaemon) -> GpuLease:
    return node.now.builder(SLICE).lease_secs(120).parkable().acquire()


def run(node: LastingDaemon, *arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, list(arguments), env={ADDRESS_VARIABLE: node.address})
    return found.exit_code, found.stdout


def upgraded(node: LastingDaemon) -> dict[str, dict[str, Any]]:
    _, printed = run(node, "upgrade-workers", "--json", "--pause", "0")
    return {one["lease_id"]: one for one in json.loads(printed)}


def test_the_sessions_of_the_earlier_version_continue_in_workers_of_the_next(
    start_lasting: StartLasting, tmp_path: Path
) -> None:
    node = start(start_lasting, tmp_path)
    with parkable(node) as busy, working(busy) as work, parkable(node) as idle, GpuSession(idle) as session:
        module, counted = session.module_load(POINTERS), session.mem_alloc(8)
        session.launch(module, "count", [1], [1], count_args(counted))
        session.sync()
        idle.park()
        with node.now.builder(MIB).acquire() as fixed, GpuSession(fixed):
            before = {lease.lease_id: node.worker_pid(lease.lease_id) for lease in (busy, idle, fixed)}
            node.restart(OTHER)
            _, listed = run(node, "leases")
            assert "upgrade-workers" in listed
            assert "upgrade-workers" in run(node, "health")[1]
            assert row(node.address, busy)["earlier_version"] not in ("", "99.0")
            outcomes = upgraded(node)
            # A session that is not parkable stays in its worker, and the report gives the reason.
            assert [outcomes[str(one.lease_id)]["outcome"] for one in (busy, idle, fixed)] == [
                "upgraded",
                "upgraded",
                "stays",
            ]
            assert "parkable" in outcomes[str(fixed.lease_id)]["reason"]
            assert run(node, "upgrade-workers")[0] == 1
            work.check_goes_on()
            for one in (busy, idle):
                assert row(node.address, one)["earlier_version"] == ""
                assert node.worker_pid(one.lease_id) != before[one.lease_id]
            # The session that was parked is parked again. Its next operation finds everything.
            wait_until(lambda: row(node.address, idle)["park"]["phase"] == "parked", "it is parked again")
            session.launch(module, "count", [1], [1], count_args(counted))
            session.sync()
            assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (7,)
        wait_until(lambda: len(node.zygotes()) == 1, "the old zygote ends with its last worker")
        assert json.loads(run(node, "upgrade-workers", "--json")[1]) == []
        kept = [record["data"] for record in records(tmp_path) if record["kind"] == "upgrade"]
        assert sorted(one["lease"] for one in kept) == sorted(f"{one.lease_id:032x}" for one in (busy, idle))
        assert all(one["from_version"] for one in kept)


@pytest.mark.parametrize("faults", [UNREADABLE], ids=["an image of an unknown version"])
def test_a_session_that_can_not_be_taken_over_stays_in_its_worker(
    start_lasting: StartLasting, tmp_path: Path, faults: Faults
) -> None:
    node = start(start_lasting, tmp_path)
    with parkable(node) as lease, working(lease) as work:
        before = node.worker_pid(lease.lease_id)
        node.restart(faults)
        outcome = upgraded(node)[str(lease.lease_id)]
        assert (outcome["outcome"], "version" in outcome["reason"]) == ("stays", True)
        work.check_goes_on()
        assert node.worker_pid(lease.lease_id) == before
        assert "version" in run(node, "leases")[1]


@pytest.mark.parametrize("step", ["returning", pytest.param("returned", marks=pytest.mark.exhaustive)])
def test_a_new_worker_that_is_killed_gives_the_session_back(
    start_lasting: StartLasting, tmp_path: Path, step: str
) -> None:
    node, stops_at = start(start_lasting, tmp_path / "audit"), tmp_path / "step"
    with parkable(node) as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(MIB)
        session.mem_write(buffer, 0, b"weights")
        region, other = lease.region(MIB, ttl_secs=60), lease.region(MIB)
        session.mem_write(region, 0, b"in a region")
        session.sync()
        before = node.worker_pid(lease.lease_id)
        stops_at.write_text(step)
        node.restart(Faults(constants=OTHER.constants, stops_workers_at=stops_at))
        refused: list[Busy] = []

        def upgrade() -> None:
            try:
                ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, "0"), node.address)
            except Busy as error:
                refused.append(error)

        asking = threading.Thread(target=upgrade)
        asking.start()
        wait_until(lambda: stopped_workers(node, before), "the new worker stops", seen=node.processes)
        (killed,) = stopped_workers(node, before)
        os.kill(killed, signal.SIGKILL)
        asking.join()
        # The session has its bytes in its former worker, and can be upgraded later.
        assert refused
        assert session.mem_read(buffer, 0, 7) == b"weights"
        # The page with the regions' words, which the new worker had received, is still valid.
        other.free()
        assert session.mem_read(region, 0, 11) == b"in a region"
        assert row(node.address, lease)["earlier_version"]
        assert node.worker_pid(lease.lease_id) == before
        stops_at.write_text("")
        assert upgraded(node)[str(lease.lease_id)]["outcome"] == "upgraded"
        assert session.mem_read(buffer, 0, 7) == b"weights"


def stopped_workers(node: LastingDaemon, before: int) -> list[int]:
    """Return the workers that are stopped, without the one that had the session before."""
    workers = [info.pid for info in node.processes() if info.name.startswith("gpul-") and info.pid != before]
    return [pid for pid in workers if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"]
