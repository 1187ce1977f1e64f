"""Spinning: how long a session polls for a reply before its caller sleeps. A wake-up takes tens of microseconds."""

import os
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Waiting

MIN_SPIN_CORES: Final = 4
"""Minimum number of cores that this process must have to spin by default. With fewer cores, spinning would take the
worker's core."""

_HAS_CORES: Final = len(os.sched_getaffinity(0)) >= MIN_SPIN_CORES


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """How one session spins.

    Attributes:
        spin_ns: Longest time to poll for a reply, in nanoseconds; 0 for no spinning.
        yields: Whether to let other threads run between two polls.
    """

    spin_ns: int = 0
    yields: bool = False


def spin_policy_of(waiting: Waiting | None, spin_ns: int) -> SpinPolicy:
    """Return the policy that the lease's tenant chose.

    Args:
        waiting: The tenant's choice. If None, spin if this process has enough cores.
        spin_ns: Longest time that this API spins, in nanoseconds.
    """
    match waiting:
        case None:
            return SpinPolicy(spin_ns if _HAS_CORES else 0)
        case Waiting.BLOCK:
            return SpinPolicy()
    return SpinPolicy(spin_ns, yields=waiting is Waiting.YIELD)
