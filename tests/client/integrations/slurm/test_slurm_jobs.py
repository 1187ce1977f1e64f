"""Slurm's scripts in Slurm itself, on a real daemon."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.client.integrations.slurm.__main__ import size_of_job
from helpers.daemon import Daemon, Faults, python_environment
from helpers.slurm_cluster import SlurmCluster, missing
from helpers.waiting import wait_until

needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there")

PROGRAM = """
from gpulease.client import GpuSession
with GpuSession.attach() as session:
    buffer = session.mem_alloc(64)
    session.mem_write(buffer, 0, b'from a job')
    print(bytes(session.mem_read(buffer, 0, 10)).decode())
"""


@pytest.mark.parametrize(
    ("told", "size_bytes"),
    [
        ("7|gres:vram:16\n", 16 << 20),
        ("7|gres/vram=16\n", 16 << 20),
        ("7|gres:vram\n", 1 << 20),
        ("7|gres:vram:0\n", 0),
        ("7|gres:vram:+3\n", 3 << 20),
        ("7|gres:vram:\n5\n", 5 << 20),
        ("7|gres:gpu:1,gres:vram:2K\n", 2 << 30),
        ("7|gres:vram:3,gres:vram:5\n", 5 << 20),
        ("7|gres:gpu:1\n", 0),
        ("7|N/A\n", 0),
        ("77|gres:vram:9\n7|gres:vram:2\n8|gres:vram:9\n", 2 << 20),
        ("77|gres:vram:9\n", 0),
        ("7|gres:vramx:9,xgres:vram:9\n", 0),
        ("", 0),
    ],
)
def test_a_job_s_size_is_what_slurm_counts(told: str, size_bytes: int) -> None:
    assert size_of_job(told, "7") == size_bytes


@pytest.fixture
def folder() -> Iterator[Path]:
    # Munge wants a folder that nobody else can write to, from the root on.
    with tempfile.TemporaryDirectory(prefix="gpul-slurm-", dir="/var/lib") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def withheld(folder: Path) -> Path:
    return folder / "withheld"


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon], withheld: Path) -> Daemon:
    limits = "[limits]\nreclaim_timeout_s = 1\n"
    return start_daemon(vram=["64MiB"], config=limits, faults=Faults(withhold_proof_while=withheld))


@pytest.fixture
def cluster(folder: Path, daemon: Daemon) -> Iterator[SlurmCluster]:
    made = SlurmCluster(folder, daemon.address, 64)
    yield made
    made.stop()


@needs_slurm
@pytest.mark.exhaustive
def test_a_job_has_a_lease_from_prolog_to_epilog(
    cluster: SlurmCluster, daemon: Daemon, folder: Path, withheld: Path
) -> None:
    paths = python_environment()["PYTHONPATH"]
    (folder / "program.py").write_text(PROGRAM)
    script = f"PYTHONPATH={paths} {sys.executable} -P {folder}/program.py; sleep 2; echo done"
    # Neither the job's name nor a size that Slurm does not count says how large its lease is.
    job = cluster.submit(script, 16, "--job-name=x TresPerNode=gres:vram:48", "--gres=vram:64,vram:16")
    wait_until(daemon.leases, "the job has its lease", seen=cluster.logs)
    assert [lease["size_bytes"] for lease in daemon.leases()] == [16 << 20]
    assert "JOB_GRES=vram:16 " in cluster.ask("scontrol", "show", "job", "-d", "-o", job)
    wait_until(lambda: "done" in cluster.output(job), "the job ends", seen=lambda: cluster.output(job))
    assert cluster.output(job).startswith("from a job\n")
    wait_until(lambda: not daemon.leases(), "the epilog freed it", seen=cluster.logs)
    wait_until(lambda: not list((folder / "jobs").iterdir()), "the job's record is gone")
    # A job of no vram has no lease, and one whose memory can't be proved free drains the node.
    withheld.touch()
    job = cluster.submit("echo done", 64)
    state = ("sinfo", "-h", "-o", "%T")
    wait_until(lambda: "drain" in cluster.ask(*state), "the node is drained", seen=cluster.logs)
    assert [lease["state"] for lease in daemon.leases()] == ["fenced"] or daemon.available_bytes() == 0
    daemon.allowed_trouble += ["the test withholds the proof", "fence"]


@needs_slurm
@pytest.mark.exhaustive
def test_a_prolog_that_runs_again_looks_at_the_lease(cluster: SlurmCluster, daemon: Daemon, folder: Path) -> None:
    job = cluster.submit("sleep 600", 64)
    path = folder / "jobs" / f"{job}.json"

    def record() -> Any:
        return json.loads(path.read_text()) if path.exists() else {}

    wait_until(lambda: record().get("is_ready"), "the job's lease is ready", seen=cluster.logs)
    first = record()
    cluster.run_prolog(job)
    assert record() == first
    # Killed before it wrote its record: the lease takes the whole card, so another one would have no room.
    path.unlink()
    cluster.run_prolog(job)
    assert record() == first
    # Killed before the lease had its time, or of an earlier start of a job that Slurm requeued.
    for change in ({"is_ready": False}, {"restarts": 1}):
        before = record()["lease_id"]
        path.write_text(json.dumps(record() | change))
        cluster.run_prolog(job)
        assert daemon.query(int(before, 16))["state"] == "torndown"
        assert record()["lease_id"] != before
    # Its lease is over.
    before = record()["lease_id"]
    daemon.revoke(int(before, 16))
    cluster.run_prolog(job)
    assert record()["lease_id"] != before
    assert daemon.query(int(record()["lease_id"], 16))["state"] == "active"
    cluster.ask("scancel", job)
    wait_until(lambda: "idle" in cluster.ask("sinfo", "-h", "-o", "%T"), "the epilog is done", seen=cluster.logs)
    assert not path.exists()
    assert daemon.available_bytes() == 64 << 20
