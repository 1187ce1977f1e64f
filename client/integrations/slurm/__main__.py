"""`gpulease-slurm`: Slurm's prolog, task prolog and epilog, and the service that renews the leases of running jobs.

A job with `--gres=vram:N` gets a lease of N MiB on each of its nodes. With `--gres=vram:N,vram_cards:M` it gets M
leases of N / M MiB, on M cards of each node. The leases' tenant is the job's user. The prolog acquires the leases, and
the service renews them while the job runs. The epilog frees them, waits until their memory is proved free, and records
their usage.

If the prolog or the epilog fails, Slurm drains the node. So these fail only if the node is at fault. If the daemon
refuses the job's request, the prolog succeeds, and the task prolog prints the reason and fails the job.
"""

import fcntl
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

import click

from gpulease.client.console.command_group import CommandGroup
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.reports import Report, cards_of, leases_of
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE, milliseconds
from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.other_user import RefusedForUser
from gpulease.client.integrations.proved_end import free_and_prove, report_of
from gpulease.client.integrations.slurm.job_records import JobRecord, JobRecords
from gpulease.client.integrations.slurm.job_usage import GIB
from gpulease.client.integrations.slurm.node_memory import bytes_without_job, countable_mib, lacks_room_by_others
from gpulease.client.integrations.slurm.other_users import as_user
from gpulease.client.integrations.slurm.slurm_jobs import (
    MIB,
    JobRequest,
    JobState,
    admin_comment,
    job_id,
    number_in,
    request_of_job,
    set_admin_comment,
    state_of_job,
)
from gpulease.client.sync.driver import ask
from gpulease.imports import end_imports
from gpulease.interrupts import interrupt_unwinds
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.lease_options import ORPHAN, REQUEST_ID
from gpulease.protocol.messages import Empty, LeaseAlloc, LeaseRenew
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Status

LEASE_S: Final = 600.0
"""Duration of a job's lease in seconds. The service renews it every RENEW_S while the job runs, and may be down for
this time."""

RENEW_S: Final = 60.0

FIRST_LEASE_S: Final = 30.0
"""Duration in seconds of a lease that is not recorded yet. If the prolog is killed, such a lease soon expires."""

WAIT_S: Final = 10.0
"""Maximum seconds to wait for room, in case the previous job has just ended."""

POLL_S: Final = 0.25
"""Seconds between two tries on all cards, for a job that requests several cards or a card type."""

LEASE_IDS_VARIABLE: Final = "GPULEASE_LEASE_IDS"
"""Environment variable of a job's tasks: all leases of the job on this node, separated by commas."""

PROOF_LIMIT_S: Final = 60.0
"""Maximum seconds to wait until memory is proved free, well within Slurm's PrologEpilogTimeout."""

USAGE_RETENTION_S: Final = 86400.0
"""Maximum seconds for which the service tries to report a job's usage to Slurm's accounting. After that it only logs
the usage.
"""

SERVICE_LOCK: Final = "service"
"""The file that the service locks while it runs."""

SERVICE_WAIT_S: Final = 10.0
"""Maximum seconds for which a prolog waits for the service, which systemd restarts two seconds after its end."""

OVERCOUNTED: Final = "Slurm counts more vram than the node's cards can lease: see gpulease-slurm count"

_NODE_FAULTS: Final = frozenset(
    {Status.INTERNAL, Status.DRAINED, Status.FENCED, Status.SESSION_FAILED, Status.UNSUPPORTED}
)
"""Statuses of refusals for which the node is at fault and another node might grant the lease."""

_folder = click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("/run/gpulease-slurm"), show_default=True
)
_daemon = click.option(
    "--daemon", "address", default=DEFAULT_ADDRESS, show_default=True, envvar=ADDRESS_VARIABLE, help="unix:PATH."
)


@click.group(cls=CommandGroup)
def main() -> None:
    """Serve Slurm's jobs with leases. client/integrations/slurm/README.md is the guide."""
    interrupt_unwinds()


@main.command()
@_folder
@_daemon
def prolog(folder: Path, address: str) -> None:
    """Acquire the job's leases. For slurm.conf's Prolog, with PrologFlags=Alloc. Fails only for a fault of the node."""
    job, request = job_id(os.environ), request_of_job(os.environ)
    # The job requested no vram, so it gets no lease.
    if request is None:
        return
    user, restarts = number_in(os.environ, "SLURM_JOB_UID"), number_in(os.environ, "SLURM_JOB_RESTART_COUNT", "0")
    records = JobRecords(folder)
    without_leases = JobRecord(user, restarts, address, node=os.environ.get("SLURMD_NODENAME", ""))
    _check_service(folder)
    with records.locked(job):
        # Slurm may run a prolog again for further steps of the job, or for a new start after it requeued the job.
        record = records.read(job)
        if record is not None:
            if _serves(record, restarts):
                return
            _end_leases(records, job, record)
        try:
            _acquire(records, job, without_leases, request)
        except RefusedForUser as refusal:
            # If the node is at fault, the prolog fails. Otherwise the record has the refusal, with which the task
            # prolog fails the job.
            cause = _cause_in_job(refusal, request, address, records)
            if cause is None:
                raise MissingPrerequisite(str(refusal)) from None
            # Write the cause to slurmd's log for the operator.
            click.echo(f"gpulease-slurm: job {job} has no lease: {cause}", err=True)
            records.write(job, replace(without_leases, refusal=cause))


@main.command("task-prolog")
@_folder
def task_prolog(folder: Path) -> None:
    """Print the variables that Slurm adds to the job's tasks, or fail the job. For slurm.conf's TaskProlog."""
    record = JobRecords(folder).read(job_id(os.environ)) if folder.exists() else None
    if record is None:
        return
    if record.refusal:
        # Slurm copies a line that begins with "print" to the task's output. A failure of the task prolog fails the job
        # and does not drain the node.
        click.echo(f"print gpulease-slurm: the job has no lease: {' '.join(record.refusal.split())}")
        sys.exit(1)
    # Assign the leases to the job's tasks on this node in turn. Each task also gets the list of all leases.
    lease_id = record.lease_ids[number_in(os.environ, "SLURM_LOCALID", "0") % len(record.lease_ids)]
    click.echo(f"export {ADDRESS_VARIABLE}={record.address}\nexport {LEASE_ID_VARIABLE}={lease_id}")
    click.echo(f"export {LEASE_IDS_VARIABLE}={','.join(record.lease_ids)}")


@main.command()
@_folder
def epilog(folder: Path) -> None:
    """Free the job's leases, and wait until their memory is proved free.

    For slurm.conf's Epilog; a failure drains the node.
    """
    job = job_id(os.environ)
    records = JobRecords(folder)
    with records.locked(job):
        record = records.read(job)
        if record is not None:
            _end_leases(records, job, record)


@main.command()
@_folder
def service(folder: Path) -> None:
    """Renew the leases of running jobs, and free those of jobs without an epilog. For systemd, one per node."""
    records = JobRecords(folder)
    with (folder / SERVICE_LOCK).open("ab") as lock_file:
        # This lock shows a prolog that the service runs.
        if not _lock(lock_file):
            raise MissingPrerequisite(f"another gpulease-slurm service already serves {folder}")
        polled_at_s: dict[tuple[str, str], float] = {}
        while True:
            _serve_round(records, polled_at_s)


@main.command()
@click.option(
    "--jobs-per-card", type=click.IntRange(1, 1024), required=True, help="Maximum number of jobs that share a card."
)
@_daemon
def count(jobs_per_card: int, address: str) -> None:
    """Print the counts of this node for slurm.conf and gres.conf. Its cards must be idle.

    A lease also takes the memory of a CUDA context, which Slurm does not count. So the count of vram is the memory that
    the cards can lease, less the contexts of the jobs that share a card.
    """
    cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), address))
    counts = [countable_mib(card, jobs_per_card) for card in cards]
    for card, counted_mib in zip(cards, counts, strict=True):
        click.echo(f"# {card['name']}: {counted_mib} MiB, at most {card['available_bytes'] // MIB} in one job")
    click.echo(f"Name=vram Count={sum(counts)}\nName=vram_cards Count={len(cards)}")


def _serve_round(records: JobRecords, polled_at_s: dict[tuple[str, str], float]) -> None:
    """Renew all leases, then query Slurm about jobs until the round has taken RENEW_S.

    Args:
        records: The node's records.
        polled_at_s: The monotonic time in seconds of the last query of each kind ("state" or "usage") about each job.
            The round updates it.
    """
    until_s = time.monotonic() + RENEW_S
    # Step 1: renew leases, which does not wait for slurmctld, in case slurmctld hangs.
    for job in records.jobs():
        _logged(_renew_job, records, job)
    # Step 2: query Slurm about jobs' states, and report the usage of ended jobs. If Slurm hangs, each query takes
    # COMMAND_LIMIT_S, and a round has no time for all of them. So begin with the queries that were made longest ago.
    steps = {("state", job): _end_finished for job in records.jobs()}
    steps |= {("usage", job): _report_usage for job in records.used()}
    for key in [key for key in polled_at_s if key not in steps]:
        del polled_at_s[key]
    for key in sorted(steps, key=lambda key: polled_at_s.get(key, 0.0)):
        if time.monotonic() >= until_s:
            break
        polled_at_s[key] = time.monotonic()
        _logged(steps[key], records, key[1])
    time.sleep(max(0.0, until_s - time.monotonic()))


def _logged(step: Callable[[JobRecords, str], None], records: JobRecords, job: str) -> None:
    """Run a step of the service for a job. A failure is logged, and the next round tries again."""
    try:
        step(records, job)
    except (MissingPrerequisite, RefusedForUser) as error:
        # If the fault lasts, each round logs it.
        click.echo(f"gpulease-slurm: job {job}: {error}", err=True)


# --- a job's leases ---


def _acquire(records: JobRecords, job: str, record: JobRecord, request: JobRequest) -> None:
    """Acquire a job's leases, each on a different card, and record them.

    If it raises RefusedForUser or MissingPrerequisite, no lease remains.
    """
    until_s = time.monotonic() + WAIT_S
    used_cards: set[str] = set()
    try:
        # Step 1: acquire short leases, and record each before the next. If the prolog is killed, the epilog frees the
        # recorded leases, and the last one soon expires.
        for number in range(request.cards):
            lease_id, card = _acquire_one(job, record, request, number, used_cards, until_s)
            used_cards.add(card)
            record = replace(record, lease_ids=(*record.lease_ids, lease_id))
            records.write(job, record)
        # Step 2: extend them to their full duration, and mark the record as ready.
        _renew(record)
    except RefusedForUser:
        _end_leases(records, job, record)
        raise
    records.write(job, replace(record, is_ready=True))


def _acquire_one(
    job: str, record: JobRecord, request: JobRequest, number: int, used_cards: set[str], until_s: float
) -> tuple[str, str]:
    """Return the id of a job's next lease, and its card's UUID. Raises RefusedForUser, and MissingPrerequisite."""
    # One lease on any card waits for room in the daemon's fair queue. Otherwise try the cards in turn.
    if request == JobRequest(request.size_bytes):
        wait_s = max(0.0, until_s - time.monotonic())
        return _acquire_on(job, record, request.size_bytes, number, None, wait_s)
    while True:
        cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), record.address))
        candidates = [card for card in cards if request.fits(card["name"]) and card["uuid"] not in used_cards]
        of_type = f", of the type {request.card_type}" if request.card_type else ""
        message = f"no card of this node is left for lease {number + 1} of {request.cards}{of_type}"
        refusal = RefusedForUser(message, failure=Failure(Status.CAPACITY_EXCEEDED, message))
        # Try the emptiest card first. Another job may take the room before this request.
        for card in sorted(candidates, key=lambda card: -card["available_bytes"]):
            try:
                return _acquire_on(job, record, request.size_bytes, number, card["uuid"], 0.0)
            except RefusedForUser as error:
                if error.status is not Status.CAPACITY_EXCEEDED:
                    raise
                refusal = error
        if not candidates or time.monotonic() > until_s:
            raise refusal
        time.sleep(POLL_S)


def _acquire_on(
    job: str, record: JobRecord, size_bytes: int, number: int, card: str | None, wait_s: float
) -> tuple[str, str]:
    # A prolog that runs again sends the same request id for a card, and so gets the same lease.
    request_option = REQUEST_ID.parameter(request_id(os.environ, job, record.restarts, number, card or "").hex())
    first_ms = milliseconds(FIRST_LEASE_S, "the first time", least_ms=1)
    wait_ms = milliseconds(wait_s, "the wait", least_ms=0)
    body = LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, first_ms, wait_ms, card, (ORPHAN.parameter(0), request_option))

    def acquire() -> str:
        grant = ask(Opcode.LEASE_ALLOC, body, record.address)
        return f"{LeaseId(grant.lease_id)} {grant.card_uuid}"

    lease_id, _, uuid = as_user(record.user, acquire).partition(" ")
    return lease_id, uuid


def _renew(record: JobRecord) -> None:
    """Renew all of a job's leases. Raises the last refusal, after trying all leases."""
    refusal: RefusedForUser | None = None
    for lease_id in record.lease_ids:
        try:
            as_user(record.user, partial(_renew_one, lease_id, record.address))
        except RefusedForUser as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _renew_one(lease_id: str, address: str) -> str:
    body = LeaseRenew(lease_id_of(lease_id), milliseconds(LEASE_S, "the lease's time", least_ms=1))
    return str(ask(Opcode.LEASE_RENEW, body, address).generation)


def _renew_job(records: JobRecords, job: str) -> None:
    """Renew a job's leases, unless a prolog or an epilog works on them. Raises RefusedForUser, MissingPrerequisite."""
    with records.locked(job, waits=False) as is_free:
        record = records.read(job) if is_free else None
        if record is not None and record.is_ready:
            _renew(record)


def _end_finished(records: JobRecords, job: str) -> None:
    """End a job's leases if slurmctld reports that the job has ended on this node, and no epilog has ended them.

    Raises RefusedForUser, MissingPrerequisite.
    """
    # Ask without the lock, because prologs and epilogs wait for the lock and must not wait for slurmctld.
    record = records.read(job)
    # Do nothing without a definite answer from slurmctld.
    if record is None or state_of_job(job, record.node) is not JobState.OVER:
        return
    with records.locked(job, waits=False) as is_free:
        # Meanwhile the epilog may have ended the leases, or the job may have been started again.
        if is_free and records.read(job) == record:
            _end_leases(records, job, record)


def _serves(record: JobRecord, restarts: int) -> bool:
    """Return whether a record's leases are complete, belong to this start of the job, and are active."""
    if not record.is_ready or record.restarts != restarts:
        return False
    reports = (_report(record, lease_id) for lease_id in record.lease_ids)
    return all(report["state"] == "active" for report in reports)


def _report(record: JobRecord, lease_id: str) -> Report:
    """Return the daemon's report of a job's lease, requested as the job's user."""
    query = lease_id_of(lease_id)
    return dict(json.loads(as_user(record.user, lambda: json.dumps(report_of(query, record.address)))))


def _end_leases(records: JobRecords, job: str, record: JobRecord) -> None:
    """Free a record's leases, wait until their memory is proved free, record the usage, and delete the record."""
    for lease_id in record.lease_ids:
        as_user(record.user, partial(_free, lease_id_of(lease_id), record.address))
    # The usage of a job that was requeued is the sum over its starts.
    usage = records.usage(job)
    for lease_id in record.lease_ids:
        usage = usage.plus(_report(record, lease_id))
    if record.lease_ids:
        records.write_usage(job, usage)
    records.forget(job)


def _free(lease_id: LeaseId, address: str) -> str:
    free_and_prove(lease_id, address, PROOF_LIMIT_S, lambda text: click.echo(f"gpulease-slurm: {text}", err=True))
    return ""


def _report_usage(records: JobRecords, job: str) -> None:
    """Append the usage of a job's leases on this node to the job's AdminComment, for the site's accounting.

    Raises MissingPrerequisite.
    """
    usage = records.usage(job)
    node = socket.gethostname().partition(".")[0]
    mark = f"[gpulease {node} gib_s={usage.byte_seconds / GIB:.1f} gpu_s={usage.gpu_seconds:.1f}]"
    text = admin_comment(job)
    if text is JobState.OVER or records.usage_age_s(job) > USAGE_RETENTION_S:
        # The cluster has no accounting, or the accounting does not have the job. Only log the usage.
        click.echo(f"gpulease-slurm: job {job}: used {mark}", err=True)
        records.forget_usage(job)
    elif isinstance(text, JobState):
        return
    elif mark in text:
        # The comment has this node's usage, so delete the usage. It is not deleted when it is written, because another
        # node of the job may write the comment at the same time and overwrite it.
        records.forget_usage(job)
    else:
        # Replace this node's text from before a requeue of the job. The usage includes the earlier start.
        other_comments = re.sub(rf" ?\[gpulease {re.escape(node)} [^\]]*\]", "", text)
        set_admin_comment(job, f"{other_comments} {mark}".strip())


def _cause_in_job(refusal: RefusedForUser, request: JobRequest, address: str, records: JobRecords) -> str | None:
    """Return why the job must fail; None if the node is at fault, so that another node might run the job."""
    if refusal.status not in {Status.DISCONNECTED, Status.CAPACITY_EXCEEDED}:
        return None if refusal.status in _NODE_FAULTS else str(refusal)
    # Send a request as root. If root gets an answer, the user was refused by the socket's permissions.
    try:
        leases = leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty(), address).report)
        cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), address))
    except GpuLeaseError:
        return None
    if refusal.status is not Status.CAPACITY_EXCEEDED:
        return str(refusal)
    candidates = [card for card in cards if request.fits(card["name"])]
    # Read the records after the leases, so that the leases of other prologs are recorded by then.
    recorded = [record for record in map(records.read, records.jobs()) if record is not None]
    job_leases = {lease_id for record in recorded for lease_id in record.lease_ids}
    if lacks_room_by_others(candidates, bytes_without_job(leases, job_leases), request):
        return None
    # Enough memory is free in all, but not on one card. Slurm counts only the sum.
    if sum(int(card["available_bytes"]) for card in candidates) >= request.size_bytes * request.cards:
        return str(refusal)
    # The job requests more than a card can lease, or jobs' leases fill the cards. The settings are wrong: the count in
    # gres.conf or LARGEST_CARD_MIB includes the memory of contexts.
    return f"{refusal} {OVERCOUNTED}"


def request_id(environment: Mapping[str, str], job: str, restarts: int, number: int, card: str) -> bytes:
    """Return the request id, 16 bytes, by which a daemon recognises the request of a prolog that runs again."""
    # A new start of a requeued job is a new request, so the number of restarts is part of the id.
    cluster, node = (environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME"))
    request = json.dumps(["gpulease slurm 2", cluster, node, job, restarts, number, card])
    return hashlib.sha256(request.encode()).digest()[:16]


# --- the service's lock ---


def _lock(file: IO[bytes], mode: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_service(folder: Path) -> None:
    """Wait until the service runs, without which the lease would expire while its job runs.

    Raises MissingPrerequisite after SERVICE_WAIT_S.
    """
    until_s = time.monotonic() + SERVICE_WAIT_S
    while True:
        # Use a shared lock, because other prologs may check at the same time.
        with (folder / SERVICE_LOCK).open("ab") as file:
            if not _lock(file, fcntl.LOCK_SH):
                return
        if time.monotonic() >= until_s:
            raise MissingPrerequisite("the service does not run on this node: systemctl enable --now gpulease-slurm")
        time.sleep(POLL_S)


def run() -> None:
    """Run the command that the command line names."""
    main(prog_name="gpulease-slurm")


if __name__ == "__main__":
    end_imports()
    run()
