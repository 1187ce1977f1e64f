"""Spinning: how long a session looks for a reply before its caller sleeps. A wake-up costs tens of microseconds."""

import os
from dataclasses import dataclass
from typing import Final

from gpulease.protocol.opcodes import Waiting

MIN_SPIN_CORES: Final = 4
"""Cores this process must have to spin by default; on fewer it would take the worker's."""

_HAS_CORES: Final = len(os.sched_getaffinity(0)) >= MIN_SPIN_CORES


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """The spinning of one session.

    Attributes:
        spin_ns: Longest time to look for a reply; 0: do not look.
        yields: True to let other threads run between two looks.
    """

    spin_ns: int = 0
    yields: bool = False


def spin_policy_of(waiting: Waiting | None, spin_ns: int) -> SpinPolicy:
    """The policy that the lease's tenant chose, for a face that spins for `spin_ns` at most."""
    match waiting:
        case None:
            return SpinPolicy(spin_ns if _HAS_CORES else 0)
        case Waiting.BLOCK:
            return SpinPolicy()
    return SpinPolicy(spin_ns, yields=waiting is Waiting.YIELD)
