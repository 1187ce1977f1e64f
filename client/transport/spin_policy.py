"""How long a session looks for an answer before its caller sleeps: a wake-up costs tens of microseconds."""

import os
from dataclasses import dataclass
from typing import Final

from gpulease.protocol.opcodes import Waiting

MIN_SPIN_CORES: Final = 4
"""Cores this process must have for it to spin unasked; on fewer it would take the worker's."""

_HAS_CORES: Final = len(os.sched_getaffinity(0)) >= MIN_SPIN_CORES


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """One session's.

    Attributes:
        spin_ns: How long to look, 0 for not at all.
        yields: Whether others may run between two looks.
    """

    spin_ns: int = 0
    yields: bool = False


def spin_policy_of(waiting: Waiting | None, spin_ns: int) -> SpinPolicy:
    """As its lease's tenant chose, for a face that looks for `spin_ns` at most."""
    match waiting:
        case None:
            return SpinPolicy(spin_ns if _HAS_CORES else 0)
        case Waiting.BLOCK:
            return SpinPolicy()
    return SpinPolicy(spin_ns, yields=waiting is Waiting.YIELD)
