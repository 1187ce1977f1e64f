"""What one worker may take of the host: setrlimit(2), each with the attack it stops.

Not RLIMIT_AS: CUDA maps some 15 GiB of addresses for each context, and the embedded driver a slice's many times over.
"""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulease.daemon.sandbox.measures import Needs

MAX_DESCRIPTORS: Final = 4096
"""A worker that opens until the host has no more for others. A context has some 45, each connection two or three."""

MAX_FILE_BYTES: Final = 1 << 30
"""A file that fills the host's memory or disk: memory that a client maps counts as one, an arena at most so large."""

MAX_LOCKED_BYTES: Final = 64 << 10
"""Memory that can't be swapped out. What the driver pins for copies it pins by its own means, bounded by the arena."""

MAX_THREADS_OF_USER: Final = 32_768
"""Threads until the host has no process ids left. Counted over all processes of the workers' user, so it stops no
worker from crowding out others; that it makes no processes is the filter's part."""

OUT_OF_MEMORY_SCORE: Final = 500
"""Added to what the kernel chooses by whom to end when the host is out of memory (proc_pid_oom_score_adj(5)). All files
in memory together have no limit, so a worker that takes all there is must go before the daemon."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One resource and the most of it."""

    name: str
    resource: int
    most: int


def limits_for(needs: Needs) -> tuple[Limit, ...]:
    """The limits of a driver's workers."""
    limits = [
        # The session's memory in a file on the host's disk.
        Limit("core", resource.RLIMIT_CORE, 0),
        Limit("descriptors", resource.RLIMIT_NOFILE, MAX_DESCRIPTORS),
        Limit("file bytes", resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        Limit("locked bytes", resource.RLIMIT_MEMLOCK, MAX_LOCKED_BYTES),
        Limit("threads of the user", resource.RLIMIT_NPROC, MAX_THREADS_OF_USER),
        # Kernel memory in queues that outlive the process, and a thread that no other gets the core from.
        Limit("message queues", resource.RLIMIT_MSGQUEUE, 0),
        Limit("real-time priority", resource.RLIMIT_RTPRIO, 0),
        Limit("raised priority", resource.RLIMIT_NICE, 0),
    ]
    if needs.private_bytes is not None:
        # A compiler that an image makes take all the host's memory.
        limits.append(Limit("private bytes", resource.RLIMIT_DATA, needs.private_bytes))
    return tuple(limits)


def impose(limits: tuple[Limit, ...]) -> None:
    """Never more than this process may have already. Raises OSError and ValueError."""
    for limit in limits:
        _, hard = resource.getrlimit(limit.resource)
        most = limit.most if hard == resource.RLIM_INFINITY else min(limit.most, hard)
        resource.setrlimit(limit.resource, (most, most))


def be_first_to_go() -> None:
    """Have the kernel end this process before others for want of memory; while it may still say so. Raises OSError."""
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text()) < OUT_OF_MEMORY_SCORE:
        score.write_text(str(OUT_OF_MEMORY_SCORE))


def in_words(limits: tuple[Limit, ...]) -> str:
    """For the report."""
    return ", ".join(f"{limit.name} {limit.most}" for limit in limits)
