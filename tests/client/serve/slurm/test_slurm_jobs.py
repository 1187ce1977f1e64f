"""Slurm's scripts in Slurm itself, on a real daemon."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulease.client.serve.slurm.__main__ import size_of_job
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
    ("line", "size_bytes"),
    [
        ("JobId=7 TresPerNode=gres:vram:16 Name=x", 16 << 20),
        ("JobId=7 TresPerNode=gres/vram:16 Name=x", 16 << 20),
        ("JobId=7 TresPerNode=gres:gpu:1,gres:vram:2K", 2 << 30),
        ("JobId=7 TresPerNode=gres:gpu:1 Comment=gres:vram:9", 0),
        ("JobId=7 JobName=TresPerNode gres:vram:9", 0),
        ("", 0),
    ],
)
def test_a_job_s_size_is_what_it_asked_slurm_for(line: str, size_bytes: int) -> None:
    assert size_of_job(line) == size_bytes


@pytest.fixture
def folder() -> Iterator[Path]:
    # Munge wants a folder that nobody else can write to, from the root on.
    with tempfile.TemporaryDirectory(prefix="gpul-slurm-", dir="/var/lib") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@needs_slurm
@pytest.mark.slow
def test_a_job_has_a_lease_from_prolog_to_epilog(start_daemon: Callable[..., Daemon], folder: Path) -> None:
    withheld = folder / "withheld"
    limits = "[limits]\nreclaim_timeout_s = 1\n"
    daemon = start_daemon(vram=["64MiB"], config=limits, faults=Faults(withhold_proof_while=withheld))
    cluster = SlurmCluster(folder, daemon.address, 64)
    try:
        paths = python_environment()["PYTHONPATH"]
        (folder / "program.py").write_text(PROGRAM)
        script = f"PYTHONPATH={paths} {sys.executable} -P {folder}/program.py; sleep 2; echo done"
        job = cluster.submit(script, 16)
        wait_until(daemon.leases, "the job has its lease", seen=cluster.logs)
        assert [lease["size_bytes"] for lease in daemon.leases()] == [16 << 20]
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
    finally:
        cluster.stop()
