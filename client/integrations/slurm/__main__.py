"""`gpulease-slurm`: Slurm's prolog, task prolog and epilog, and the service that keeps the leases of running jobs.

A job's `--gres=vram:N` is a lease of N MiB on each of its nodes; the job's user is its tenant. The prolog acquires it,
the service renews it while the job lives, the epilog frees it and waits for the proof that its memory is free.

The cause of a failure decides what fails. If the daemon refuses this user's request, the job fails: the prolog
succeeds, and the task prolog prints the reason and fails. Only a fault of the node fails the prolog or the epilog,
after which Slurm drains the node.
"""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

import click

from gpulease.client.console.exit_status import CannotStart, failures_as_sentences
from gpulease.client.console.reports import cards_of
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE, milliseconds
from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.proved_end import free_and_prove, report_of
from gpulease.client.integrations.slurm.job_records import JobRecord, JobRecords
from gpulease.client.integrations.slurm.other_users import RefusedForUser, as_user
from gpulease.client.integrations.slurm.slurm_jobs import JobState, job_id, number_in, size_of_job, state_of_job
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.lease_options import ORPHAN, REQUEST_ID
from gpulease.protocol.messages import Empty, LeaseAlloc, LeaseRenew
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Status

LEASE_S: Final = 600.0
"""Seconds of a job's lease, which the service renews every RENEW_S while the job runs. So a lease survives a restart of
the service, and the memory of a node that is gone for good is free after ten minutes."""

RENEW_S: Final = 60.0

FIRST_LEASE_S: Final = 30.0
"""Life of a lease until its record is on the disk. If the prolog is killed before that, the lease ends by itself."""

WAIT_S: Final = 10.0
"""Seconds to wait for room, because the previous job may have just ended."""

PROOF_LIMIT_S: Final = 60.0
"""Seconds to wait until the memory is proved free, well within Slurm's PrologEpilogTimeout."""

SERVICE_LOCK: Final = "service"
"""The file that the service locks while it runs."""

_NODE_FAULTS: Final = frozenset(
    {Status.INTERNAL, Status.DRAINED, Status.FENCED, Status.SESSION_FAILED, Status.UNSUPPORTED}
)
"""Refusals that are the node's fault, so that another node might grant the lease. All others are about the request."""

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
    """Acquire the job's lease. For slurm.conf's Prolog, with PrologFlags=Alloc. Fails only for a fault of the node."""
    job, size_bytes = job_id(os.environ), size_of_job(os.environ)
    # The job requested no vram, so it gets no lease.
    if not size_bytes:
        return
    user, restarts = number_in(os.environ, "SLURM_JOB_UID"), number_in(os.environ, "SLURM_JOB_RESTART_COUNT", "0")
    records = JobRecords(folder)
    _check_service(folder)
    with records.locked(job):
        # Slurm may run a prolog again, for the job's further steps, or for another start of a job that it requeued.
        record = records.read(job)
        if record is not None:
            if _serves(record, restarts):
                return
            _end(records, job, record)
        try:
            _acquire(records, job, JobRecord(user, restarts, address), size_bytes)
        except RefusedForUser as refusal:
            # The node's fault fails the prolog. Otherwise the job is to fail: the task prolog finds the refusal in the
            # record.
            if _is_fault_of_node(refusal, size_bytes, address):
                raise
            records.write(job, JobRecord(user, restarts, address, refusal=str(refusal)))


@main.command("task-prolog")
@_folder
def task_prolog(folder: Path) -> None:
    """Print the variables that Slurm adds to the job's tasks, or fail the job. For slurm.conf's TaskProlog."""
    record = JobRecords(folder).read(job_id(os.environ)) if folder.exists() else None
    if record is None:
        return
    if record.refusal:
        # Slurm copies a line that begins with "print" to the task's output. The exit status ends the job, not the node.
        click.echo(f"print gpulease-slurm: the job has no lease: {' '.join(record.refusal.split())}")
        sys.exit(1)
    click.echo(f"export {ADDRESS_VARIABLE}={record.address}\nexport {LEASE_ID_VARIABLE}={record.lease_id}")


@main.command()
@_folder
def epilog(folder: Path) -> None:
    """Free the job's lease and wait for the proof. For slurm.conf's Epilog; a failure drains the node."""
    job = job_id(os.environ)
    records = JobRecords(folder)
    with records.locked(job):
        record = records.read(job)
        if record is not None:
            _end(records, job, record)


@main.command()
@_folder
def service(folder: Path) -> None:
    """Renew the leases of running jobs, and free those of jobs without an epilog. For systemd, one per node."""
    records = JobRecords(folder)
    with (folder / SERVICE_LOCK).open("ab") as held:
        # The prolog checks this lock, by which it knows that leases are renewed.
        if not _lock(held):
            raise CannotStart(f"another gpulease-slurm service already serves {folder}")
        while True:
            for job in records.jobs():
                try:
                    _keep(records, job)
                except CannotStart as error:
                    # The next round tries again. A lasting fault is logged in each round.
                    click.echo(f"gpulease-slurm: job {job}: {error}", err=True)
            time.sleep(RENEW_S)


# --- a job's lease ---


def _acquire(records: JobRecords, job: str, record: JobRecord, size_bytes: int) -> None:
    """Acquire a job's lease, and record it.

    If it raises RefusedForUser or CannotStart, nothing remains of the lease.
    """
    # Step 1: a short lease, so that a prolog that is killed before step 2 leaves nothing behind for long. A repeated
    # prolog sends the same request id, and gets the same lease.
    again = REQUEST_ID.parameter(request_id(os.environ, job, record.restarts).hex())
    first_ms = milliseconds(FIRST_LEASE_S, "the first time", least_ms=1)
    wait_ms = milliseconds(WAIT_S, "the wait", least_ms=0)
    request = LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, first_ms, wait_ms, None, (ORPHAN.parameter(0), again))
    lease_id = as_user(record.user, lambda: str(LeaseId(ask(Opcode.LEASE_ALLOC, request, record.address).lease_id)))
    # Step 2: the record, from which the epilog frees the lease.
    record = replace(record, lease_id=lease_id)
    records.write(job, record)
    # Step 3: extend the lease to its full time, and mark the record as ready.
    try:
        _renew(record)
    except RefusedForUser:
        _end(records, job, record)
        raise
    records.write(job, replace(record, is_ready=True))


def _renew(record: JobRecord) -> None:
    body = LeaseRenew(lease_id_of(record.lease_id), milliseconds(LEASE_S, "the lease's time", least_ms=1))
    as_user(record.user, lambda: str(ask(Opcode.LEASE_RENEW, body, record.address).generation))


def _keep(records: JobRecords, job: str) -> None:
    """Renew a job's lease, or end it if slurmctld reports that the job is over. Raises CannotStart."""
    with records.locked(job, waits=False) as is_free:
        record = records.read(job) if is_free else None
        # A prolog or an epilog holds the lock, or the job has no lease to renew.
        if record is None or record.refusal or not record.is_ready:
            return
        # Renew before asking slurmctld: if that hangs, no job loses its lease.
        lost: RefusedForUser | None = None
        try:
            _renew(record)
        except RefusedForUser as refusal:
            lost = refusal
        # Only a definite answer ends a lease; a slurmctld that does not answer ends none.
        if state_of_job(job) is JobState.OVER:
            _end(records, job, record)
        elif lost is not None:
            raise lost


def _serves(record: JobRecord, restarts: int) -> bool:
    """Return whether a record's lease belongs to this start of the job, has its full time, and is active."""
    if not record.is_ready or record.restarts != restarts:
        return False
    lease_id, address = lease_id_of(record.lease_id), record.address
    return as_user(record.user, lambda: str(report_of(lease_id, address)["state"])) == "active"


def _end(records: JobRecords, job: str, record: JobRecord) -> None:
    """Free a record's lease, wait for the proof, and delete the record."""
    if record.lease_id:
        lease_id = lease_id_of(record.lease_id)
        as_user(record.user, lambda: _free(lease_id, record.address))
    records.forget(job)


def _free(lease_id: LeaseId, address: str) -> str:
    free_and_prove(lease_id, address, PROOF_LIMIT_S, lambda text: click.echo(f"gpulease-slurm: {text}", err=True))
    return ""


def _is_fault_of_node(refusal: RefusedForUser, size_bytes: int, address: str) -> bool:
    """Return whether the node is at fault: it refused a request that is within the job's and its user's limits."""
    if refusal.status not in {Status.DISCONNECTED, Status.CAPACITY_EXCEEDED}:
        return refusal.status in _NODE_FAULTS
    # Ask as root. If the daemon answers root, it did not answer the user because of the socket's permissions.
    try:
        cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), address))
    except GpuLeaseError:
        return True
    # No room, although a card is large enough: Slurm's count of the node's memory differs from the daemon's.
    has_such_card = any(card["capacity_bytes"] >= size_bytes for card in cards)
    return refusal.status is Status.CAPACITY_EXCEEDED and has_such_card


def request_id(environment: Mapping[str, str], job: str, restarts: int) -> bytes:
    """Return the request id, 16 bytes, by which a daemon recognises the request of a prolog that runs again."""
    # A requeued job is a new request, so its number of restarts is part of the id.
    cluster, node = (environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME"))
    return hashlib.sha256(json.dumps(["gpulease slurm 1", cluster, node, job, restarts]).encode()).digest()[:16]


# --- the service's lock ---


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_service(folder: Path) -> None:
    """Raise CannotStart unless the service runs: without it a lease would end in the middle of its job."""
    with (folder / SERVICE_LOCK).open("ab") as file:
        if _lock(file):
            raise CannotStart("the service does not run on this node: systemctl enable --now gpulease-slurm")


def run() -> None:
    """Run the command that the command line names."""
    with failures_as_sentences():
        sys.exit(main(prog_name="gpulease-slurm", standalone_mode=True))


if __name__ == "__main__":
    run()
