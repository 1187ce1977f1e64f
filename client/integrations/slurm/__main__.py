"""`gpulease-slurm`: Slurm's prolog, task prolog and epilog. A job's `--gres=vram:N` is a lease of N MiB.

The job's user is the lease's tenant: prolog and epilog run as root, and call the daemon as that user. The lease ends
with the job, or after the job's time limit if the epilog never runs. An epilog that can't prove the memory free fails,
and Slurm drains the node.
"""

import hashlib
import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import click

from gpulease.client.console.exit_status import CannotStart, failures_as_sentences
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE, milliseconds
from gpulease.client.integrations.proved_end import free_and_prove, report_of
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.lease_options import ORPHAN, REQUEST_ID
from gpulease.protocol.messages import LeaseAlloc, LeaseRenew
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE

GRES: Final = "vram"
MIB: Final = 1 << 20

FIRST_LEASE_S: Final = 30.0
"""Life of a lease until its record is on the disk. If the prolog is killed before that, the lease ends by itself."""

MARGIN_S: Final = 60.0
"""Seconds that a lease lasts beyond its job's time limit, in which Slurm first warns and then kills the job."""

MAX_LEASE_S: Final = 86_400.0
"""Longest lease, a daemon's default limit. The lease of a longer job ends before the job."""

WAIT_S: Final = 10.0
"""Seconds to wait for room, because the previous job may have just ended. A prolog that fails drains its node."""

PROOF_LIMIT_S: Final = 60.0
"""Seconds to wait until the memory is proved free, well within Slurm's PrologEpilogTimeout."""

SQUEUE_LIMIT_S: Final = 20.0

_JOB_ID: Final = re.compile(r"[1-9]\d{0,9}")
_LISTED: Final = re.compile(r"^(\d+)\|", re.MULTILINE)
_ASKED: Final = re.compile(rf"gres[:/]{GRES}(?:[:=]\s*\+?(\d{{1,12}})([KMGTPkmgtp]?))?")
_SCALE: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}

_folder = click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("/run/gpulease-slurm"), show_default=True
)
_daemon = click.option(
    "--daemon", "address", default=DEFAULT_ADDRESS, show_default=True, envvar=ADDRESS_VARIABLE, help="unix:PATH."
)


@click.group()
def main() -> None:
    """Serve Slurm's jobs with leases. client/integrations/slurm/README.md is the guide."""


@main.command()
@_folder
@_daemon
def prolog(folder: Path, address: str) -> None:
    """Acquire the job's lease. For slurm.conf's Prolog, with PrologFlags=Alloc."""
    job, user = _job_id(os.environ), _number(os.environ, "SLURM_JOB_UID")
    size_bytes = size_of_job(_asked_of_jobs(job), job)
    # The job requested no vram, so it gets no lease.
    if not size_bytes:
        return
    path, restarts = folder / f"{job}.json", _number(os.environ, "SLURM_JOB_RESTART_COUNT", "0")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    record = _read(path)
    if record is not None:
        if _serves(record, restarts):
            # Slurm may run a prolog again, for the job's further steps.
            return
        _end(path, record)
    # Step 1: a short lease, so that a prolog that is killed before step 2 leaves nothing behind for long. A repeated
    # prolog sends the same request id, and gets the same lease.
    first_ms = milliseconds(FIRST_LEASE_S, "the first time", least_ms=1)
    wait_ms = milliseconds(WAIT_S, "the wait", least_ms=0)
    again = REQUEST_ID.parameter(request_id(os.environ, job, restarts).hex())
    parameters = (ORPHAN.parameter(0), again)
    request = LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, first_ms, wait_ms, None, parameters)
    lease_id = as_user(user, lambda: str(LeaseId(ask(Opcode.LEASE_ALLOC, request, address).lease_id)))
    # Step 2: the record, from which the epilog frees the lease.
    record = {"lease_id": lease_id, "user": user, "address": address, "restarts": restarts, "is_ready": False}
    _write(path, record)
    # Step 3: extend the lease to the job's time, and mark the record as ready.
    renew = LeaseRenew(lease_id_of(lease_id), milliseconds(_left_s(os.environ), "the lease's time", least_ms=1))
    as_user(user, lambda: str(ask(Opcode.LEASE_RENEW, renew, address).generation))
    _write(path, record | {"is_ready": True})


@main.command("task-prolog")
@_folder
def task_prolog(folder: Path) -> None:
    """Print the variables that Slurm adds to the environment of the job's tasks. For slurm.conf's TaskProlog."""
    record = _read(folder / f"{_job_id(os.environ)}.json")
    if record is not None:
        click.echo(f"export {ADDRESS_VARIABLE}={record['address']}\nexport {LEASE_ID_VARIABLE}={record['lease_id']}")


@main.command()
@_folder
def epilog(folder: Path) -> None:
    """Free the job's lease and wait for the proof. For slurm.conf's Epilog; a failure drains the node."""
    path = folder / f"{_job_id(os.environ)}.json"
    record = _read(path)
    if record is not None:
        _end(path, record)


def _serves(record: Mapping[str, object], restarts: int) -> bool:
    """Return whether a record's lease belongs to this start of the job, was extended to its time, and is active."""
    if not record["is_ready"] or record["restarts"] != restarts:
        return False
    user, lease_id, address = int(str(record["user"])), lease_id_of(str(record["lease_id"])), str(record["address"])
    return as_user(user, lambda: str(report_of(lease_id, address)["state"])) == "active"


def _end(path: Path, record: Mapping[str, object]) -> None:
    """Free a record's lease, wait for the proof, and delete the record."""
    user, lease_id, address = int(str(record["user"])), lease_id_of(str(record["lease_id"])), str(record["address"])
    as_user(user, lambda: _free(lease_id, address))
    path.unlink()


def _free(lease_id: LeaseId, address: str) -> str:
    free_and_prove(lease_id, address, PROOF_LIMIT_S, lambda said: click.echo(f"gpulease-slurm: {said}", err=True))
    return ""


# --- reports of Slurm ---


def size_of_job(listed: str, job: str) -> int:
    """Return the bytes per node that a job requests, 0 if it requests no vram. Of several, Slurm counts the last.

    Args:
        listed: The output of `squeue -o "%A|%b"`. Slurm allows no "|" in a job's request.
        job: The job's number. The first job of an array is listed with the others.
    """
    _, *found = _LISTED.split(listed)
    size_bytes = 0
    for entry in dict(zip(found[::2], found[1::2], strict=True)).get(job, "").split(","):
        asked = _ASKED.fullmatch(entry.strip())
        if asked:
            size_bytes = int(asked[1] or 1) * _SCALE[(asked[2] or "").lower()] * MIB
    return size_bytes


def request_id(environment: Mapping[str, str], job: str, restarts: int) -> bytes:
    """Return the request id, 16 bytes, by which a daemon recognises the request of a prolog that runs again."""
    # A requeued job is a new request, so its number of restarts is part of the id.
    cluster, node = (environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME"))
    return hashlib.sha256(json.dumps(["gpulease slurm 1", cluster, node, job, restarts]).encode()).digest()[:16]


def _asked_of_jobs(job: str) -> str:
    """Return squeue's list of the requests of a job and of others of its array. No field in it is free text."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%A|%b"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotStart(f"squeue does not describe job {job}: {error}") from None


def _job_id(environment: Mapping[str, str]) -> str:
    job = environment.get("SLURM_JOB_ID", "")
    if not _JOB_ID.fullmatch(job):
        raise CannotStart(f"SLURM_JOB_ID is {job[:32]!r}: Slurm runs this, as slurm.conf's Prolog or Epilog")
    return job


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not re.fullmatch(r"\d{1,10}", text):
        raise CannotStart(f"{name} must be a number, not {text[:32]!r}")
    return int(text)


def _left_s(environment: Mapping[str, str]) -> float:
    """Return the seconds of the job's lease. Slurm provides the end in wall-clock time; older versions do not."""
    if not environment.get("SLURM_JOB_END_TIME"):
        return MAX_LEASE_S
    left_s = _number(environment, "SLURM_JOB_END_TIME") - time.time() + MARGIN_S
    return min(max(left_s, MARGIN_S), MAX_LEASE_S)


# --- records, and other users ---


def _read(path: Path) -> dict[str, object] | None:
    try:
        found = json.loads(path.read_text())
        return {name: found[name] for name in ("lease_id", "user", "address", "restarts", "is_ready")}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise CannotStart(f"{path}: {error}. Was it changed?") from None


def _write(path: Path, record: Mapping[str, object]) -> None:
    # Write a new file and rename it, so that a killed prolog never leaves half a record.
    new = path.with_suffix(".new")
    with new.open("w") as file:
        file.write(json.dumps(record))
        file.flush()
        os.fsync(file.fileno())
    new.chmod(0o644)
    new.replace(path)


def as_user(user: int, action: Callable[[], str]) -> str:
    """Return the text of an action that a child process runs as that user. Raises CannotStart with the child's error.

    The child has the user's groups, so a user who may not write to the daemon's socket gets no lease.
    """
    reading, writing = os.pipe()
    child = os.fork()
    # In the child: drop root for good, run the action, and send its text or error through the pipe. It must not return
    # into the parent's code.
    if child == 0:
        status = 1
        try:
            if os.geteuid() != user:
                known = pwd.getpwuid(user)
                os.initgroups(known.pw_name, known.pw_gid)
                # Groups before the user, because only root may change groups.
                os.setresgid(known.pw_gid, known.pw_gid, known.pw_gid)
                os.setresuid(user, user, user)
            said, status = action(), 0
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:4096])
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    if os.waitpid(child, 0)[1] != 0:
        raise CannotStart(f"as user {user}: {said}")
    return said


def run() -> None:
    """Run the command that the command line names."""
    with failures_as_sentences():
        sys.exit(main(prog_name="gpulease-slurm", standalone_mode=True))


if __name__ == "__main__":
    run()
