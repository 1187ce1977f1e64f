"""After a lease or a batch failed: the pause before the next lease, and the error that requests get. No I/O."""

import random
from collections.abc import Callable
from typing import Final

from gpulease.client import LeaseEvent, Phase, errors
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.failures import lease_end
from gpulease.protocol.rpc import CallErrorCode

FIRST_PAUSE_S: Final = 0.05
"""Seconds before a lease is requested again. They double with each failure until a batch succeeds."""

MAX_PAUSE_S: Final = 5.0

PRESSURE_PAUSE_S: Final = 0.5
"""Least pause in seconds after a refusal for want of room: other tenants' leases mostly last for seconds."""

_BROKEN: Final = (errors.LoadFailed, errors.AllocFailed, errors.Denied, errors.Unsupported)


class RestartPause:
    """The pause before a lease is requested again.

    Args:
        uniform: Draws random numbers from 0 to 1.
    """

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self._uniform = uniform
        self._failures = 0

    def after(self, error: errors.GpuLeaseError) -> float:
        """Return the seconds to wait after this error."""
        has_no_room = isinstance(error, errors.CapacityExceeded)
        least_s = PRESSURE_PAUSE_S if has_no_room or is_broken(error) else 0.0
        pause_s = back_off_s(self._failures, FIRST_PAUSE_S, MAX_PAUSE_S)
        self._failures += 1
        return max(least_s, pause_s * (0.5 + self._uniform() / 2))

    def succeeded(self) -> None:
        """Reset the pause after a batch succeeded."""
        self._failures = 0


def is_broken(error: errors.GpuLeaseError) -> bool:
    """Return True if the model or its settings are at fault, so that waiting would not help."""
    return isinstance(error, _BROKEN) or type(error) is errors.InvalidRequest


def lease_end_of(event: LeaseEvent) -> errors.GpuLeaseError | None:
    """Return the error that an event of the lease's end means; None while the lease lives."""
    if event.phase in (Phase.ACTIVE, Phase.WARNING):
        return None
    kind = errors.error_class(lease_end(event.cause).status)
    return kind(f"the lease ended: {event.reason or event.cause}")


def code_of(error: errors.GpuLeaseError) -> CallErrorCode:
    """Return the code that the requests of a failed batch are answered with."""
    if isinstance(error, errors.GpuSessionFailed | errors.OperationFailed):
        return CallErrorCode.KERNEL_FAILED
    return CallErrorCode.LEASE_LOST
