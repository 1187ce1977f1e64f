"""Slurm's information about a job: from the environment of its scripts, and elsewhere from squeue."""

import re
import subprocess
from collections.abc import Mapping
from enum import Enum
from typing import Final

from gpulease.client.console.exit_status import CannotStart

MIB: Final = 1 << 20

SQUEUE_LIMIT_S: Final = 20.0
"""Longest wait for squeue's answer, in seconds, because slurmctld may hang."""

_MARK: Final = re.compile(r"\[vram_mib=([0-9]{1,12})\]$")
"""The mark that job_submit.lua appends to the comment of a job that requests vram. Only the end of the text counts,
because the user writes what is before it."""

_OVER: Final = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PENDING", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""States of a job that does not run (squeue(1), JOB STATE CODES). A pending job was requeued, and its next start has
another prolog."""

_UNKNOWN_JOB: Final = b"Invalid job id"


class JobState(Enum):
    """Whether a job still runs, according to slurmctld."""

    LIVES = "lives"
    OVER = "over"
    UNKNOWN = "unknown"


def size_of_job(environment: Mapping[str, str]) -> int:
    """Return the bytes per node that the job requests, from the prolog's environment; 0 if it requests no vram."""
    mark = _MARK.search(environment.get("SLURM_JOB_COMMENT", ""))
    return int(mark[1]) * MIB if mark else 0


def job_id(environment: Mapping[str, str]) -> str:
    """Return the job's number. Raises CannotStart without one."""
    job = environment.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[1-9][0-9]{0,9}", job):
        raise CannotStart(
            f"SLURM_JOB_ID must be a job's number, not {job[:32]!r}: Slurm runs this, as Prolog, TaskProlog or Epilog"
        )
    return job


def number_in(environment: Mapping[str, str], name: str, default: str = "") -> int:
    """Return a number of the environment. Raises CannotStart."""
    text = environment.get(name, default)
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise CannotStart(f"{name} must be a number, not {text[:32]!r}")
    return int(text)


def state_of_job(job: str) -> JobState:
    """Request a job's state from slurmctld. Not for prologs and epilogs, which must not wait for it."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SQUEUE_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return JobState.UNKNOWN
    if done.returncode:
        # slurmctld forgets a job some minutes after its end. Any other failure proves nothing.
        return JobState.OVER if _UNKNOWN_JOB in done.stderr else JobState.UNKNOWN
    # One line for a job; none for one that slurmctld has just forgotten.
    states = done.stdout.decode("ascii", errors="replace").split()
    if not states:
        return JobState.OVER
    return JobState.OVER if _OVER.issuperset(states) else JobState.LIVES
