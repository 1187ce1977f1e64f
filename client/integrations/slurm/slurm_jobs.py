"""Reads Slurm's information about a job from the scripts' environment, from squeue and from the accounting."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

import click

from gpulease.client.console.exit_status import MissingPrerequisite

MIB: Final = 1 << 20

COMMAND_LIMIT_S: Final = 20.0
"""Maximum seconds for a command of Slurm, in case slurmctld hangs."""

MAX_CARDS: Final = 64
"""Maximum number of cards of one job on one node. job_submit.lua does not accept more."""

_MARK: Final = re.compile(r"\[vram_mib=([0-9]{1,12})(?: cards=([1-9][0-9]?))?(?: type=([A-Za-z0-9_.-]{1,64}))?\]$")
"""The mark that job_submit.lua appends to the comment of a job that requests vram. The user writes the text before the
mark, so only a mark at the end counts."""

_OVER: Final = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PENDING", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""States of a job that does not run (squeue(1), JOB STATE CODES). A job that is pending again was requeued, and its
next start runs a prolog again."""

_UNKNOWN_JOB: Final = b"Invalid job id"
_NO_ACCOUNTING: Final = b"accounting storage is disabled"


class JobState(Enum):
    """Whether a job still runs, according to slurmctld."""

    LIVES = "lives"
    OVER = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job's request on each of its nodes.

    Attributes:
        size_bytes: Bytes on each card.
        cards: The number of its leases, each on a different card.
        card_type: The type of its cards, a part of their names as in gres.conf; "" for any card.
    """

    size_bytes: int
    cards: int = 1
    card_type: str = ""

    def fits(self, name: str) -> bool:
        """Return whether a card of that name is of the type, by the rule of gres.conf(5), AutoDetect=nvml."""
        return self.card_type.lower() in name.lower().replace(" ", "_")


def request_of_job(environment: Mapping[str, str]) -> JobRequest | None:
    """Return the memory that the job requests, from the prolog's environment; None if it requests no vram."""
    mark = _MARK.search(environment.get("SLURM_JOB_COMMENT", ""))
    if mark is None:
        return None
    # Slurm counts only sums, so the requested vram is the sum of the job's leases on the node.
    size_bytes, cards = int(mark[1]) * MIB, int(mark[2] or 1)
    if not size_bytes or cards > MAX_CARDS:
        return None
    return JobRequest(size_bytes // cards, cards, mark[3] or "")


def job_id(environment: Mapping[str, str]) -> str:
    """Return the job's number. Raises MissingPrerequisite without one."""
    job = environment.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[1-9][0-9]{0,9}", job):
        raise MissingPrerequisite(
            f"SLURM_JOB_ID must be a job's number, not {job[:32]!r}: Slurm runs this, as Prolog, TaskProlog or Epilog"
        )
    return job


def number_in(environment: Mapping[str, str], name: str, default: str = "") -> int:
    """Return a number of the environment. Raises MissingPrerequisite."""
    text = environment.get(name, default)
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise MissingPrerequisite(f"{name} must be a number, not {text[:32]!r}")
    return int(text)


def state_of_job(job: str, node: str) -> JobState:
    """Request a job's state on a node from slurmctld. Prologs and epilogs must not call this, because it may wait.

    Args:
        job: The job's number.
        node: The node's name in Slurm; "" if it is not known. A job that slurmctld has started again on other nodes has
            ended on this node.
    """
    node_filter = [f"--nodelist={node}"] if node else []
    result = _run("squeue", "--noheader", "--states=all", f"--jobs={job}", *node_filter, "--format=%T")
    if isinstance(result, JobState):
        return result
    # There is one line for a job. slurmctld forgets a job some minutes after its end, and then there is none.
    states = result.split()
    if not states:
        return JobState.OVER
    return JobState.OVER if _OVER.issuperset(states) else JobState.LIVES


def admin_comment(job: str) -> str | JobState:
    """Return the AdminComment of a job that has ended, from Slurm's accounting.

    Returns OVER if this cluster has no accounting, and UNKNOWN if the accounting does not answer or does not have the
    job yet.
    """
    result = _run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=AdminComment")
    if isinstance(result, JobState):
        return result
    # There is one line for a job, about its latest start, and none for an unknown job.
    lines = result.splitlines()
    return lines[-1] if lines else JobState.UNKNOWN


def set_admin_comment(job: str, text: str) -> None:
    """Replace the AdminComment of a job that has ended. Failures are ignored."""
    # scontrol can't change a job that has ended, so change the accounting.
    _run("sacctmgr", "--immediate", "modify", "job", "where", f"jobid={job}", "set", f"AdminComment={text}")


def _run(*command: str) -> str | JobState:
    """Return the output of a command of Slurm; OVER if Slurm has no record of the job, UNKNOWN after other failures."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=COMMAND_LIMIT_S, check=False)
    except FileNotFoundError:
        _log_missing(command[0])
        return JobState.UNKNOWN
    except (OSError, subprocess.SubprocessError):
        return JobState.UNKNOWN
    if result.returncode:
        # slurmctld forgets a job some minutes after its end. Any other failure does not show the job's state.
        is_over = any(text in result.stderr for text in (_UNKNOWN_JOB, _NO_ACCOUNTING))
        return JobState.OVER if is_over else JobState.UNKNOWN
    return result.stdout.decode("utf-8", errors="replace")


@cache
def _log_missing(command: str) -> None:
    """Log that a command of Slurm is missing, once per process."""
    click.echo(
        f"gpulease-slurm: {command} is not in PATH, so the service can't see that a job is over: add the folder of"
        " Slurm's commands with Environment=PATH=... in a drop-in (systemctl edit gpulease-slurm)",
        err=True,
    )
