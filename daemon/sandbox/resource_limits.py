"""The limits on one worker's use of the host (setrlimit(2)), each with the attack that it stops.

RLIMIT_AS is not among them: CUDA maps about 15 GiB of addresses for each context, and the embedded driver maps many
times its slice.
"""

import resource
from pathlib import Path
from typing import Final

from gpulease.daemon.sandbox.measures import SandboxNeeds
from gpulease.protocol.fast_dataclass import dataclass

MAX_DESCRIPTORS: Final = 4096
"""Maximum number of open descriptors, so that a worker can't open all that the host has. A context has about 45, a
connection 2 or 3."""

MAX_FILE_BYTES: Final = 1 << 30
"""Maximum size of a file, so that no file fills the host's memory or disk. An arena is a file in memory, so this also
limits arenas."""

MAX_LOCKED_BYTES: Final = 64 << 10
"""Maximum number of bytes that a worker may lock in memory, where they can't be swapped out. The driver pins memory for
copies in another way, which the arena's size limits."""

MAX_THREADS_OF_USER: Final = 32_768
"""Maximum number of threads, so that a worker can't use up the host's process ids. The kernel counts all threads of the
workers' user, so one worker can use up the others' share. The filter keeps workers from starting processes."""

OUT_OF_MEMORY_SCORE: Final = 500
"""Added to the score by which the kernel chooses a process to kill when the host runs out of memory
(proc_pid_oom_score_adj(5)). Files in memory have no common limit, so a worker that takes all memory must be killed
before the daemon."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    name: str
    resource: int
    most: int


def limits_for(needs: SandboxNeeds) -> tuple[ResourceLimit, ...]:
    limits = [
        # No core files, because they would put the session's memory on the host's disk.
        ResourceLimit("core", resource.RLIMIT_CORE, 0),
        ResourceLimit("descriptors", resource.RLIMIT_NOFILE, MAX_DESCRIPTORS),
        ResourceLimit("file bytes", resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        ResourceLimit("locked bytes", resource.RLIMIT_MEMLOCK, MAX_LOCKED_BYTES),
        ResourceLimit("threads of the user", resource.RLIMIT_NPROC, MAX_THREADS_OF_USER),
        # No message queues, because their kernel memory outlives the process, and no real-time threads, because they
        # need never yield their core.
        ResourceLimit("message queues", resource.RLIMIT_MSGQUEUE, 0),
        ResourceLimit("real-time priority", resource.RLIMIT_RTPRIO, 0),
        ResourceLimit("raised priority", resource.RLIMIT_NICE, 0),
    ]
    if needs.private_bytes is not None:
        # A compiler that processes a hostile image must not take all of the host's memory.
        limits.append(ResourceLimit("private bytes", resource.RLIMIT_DATA, needs.private_bytes))
    return tuple(limits)


def impose(limits: tuple[ResourceLimit, ...]) -> None:
    """Set the limits, each at most to this process's present hard limit. Raises OSError and ValueError."""
    for limit in limits:
        # An unprivileged process can't raise its hard limit, so the smaller of the two is set.
        _, hard_limit = resource.getrlimit(limit.resource)
        most = limit.most if hard_limit == resource.RLIM_INFINITY else min(limit.most, hard_limit)
        resource.setrlimit(limit.resource, (most, most))


def prefer_oom_kill() -> None:
    """Make the kernel kill this process before others when memory runs out. Raises OSError."""
    # Never lower the score: an operator may have set a higher one.
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text()) < OUT_OF_MEMORY_SCORE:
        score.write_text(str(OUT_OF_MEMORY_SCORE))


def in_words(limits: tuple[ResourceLimit, ...]) -> str:
    """Return the limits as text for the report."""
    return ", ".join(f"{limit.name} {limit.most}" for limit in limits)
