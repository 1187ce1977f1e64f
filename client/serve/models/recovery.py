"""Rules for failed leases and batches: the pause before the next lease, and the errors that requests get. No I/O."""

import random
from collections.abc import Callable
from typing import Final

from gpulease.client import LeaseEvent, Phase, errors
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.failures import lease_end
from gpulease.protocol.rpc import CallErrorCode

FIRST_PAUSE_S: Final = 0.05
"""First pause in seconds before a lease is requested again. It doubles with each failure until a batch succeeds."""

MAX_PAUSE_S: Final = 5.0

PRESSURE_PAUSE_S: Final = 0.5
"""Minimum pause in seconds after a refusal for lack of room, because other tenants' leases usually last for seconds."""

_BROKEN: Final = (errors.LoadFailed, errors.AllocFailed, errors.Denied, errors.Unsupported)


class RestartPause:
    """The growing, randomised pause before a lease is requested again.

    Args:
        uniform: Draws random numbers from 0 to 1.
    """

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self._uniform = uniform
        self._failures = 0

    def after(self, error: errors.GpuLeaseError) -> float:
        """Return the seconds to wait after this error, and count it as a failure."""
        # A lack of room, or a broken model, lasts for longer than milliseconds, so do not retry that soon.
        has_no_room = isinstance(error, errors.CapacityExceeded)
        least_s = PRESSURE_PAUSE_S if has_no_room or is_broken(error) else 0.0
        pause_s = back_off_s(self._failures, FIRST_PAUSE_S, MAX_PAUSE_S)
        # Only a batch that succeeds resets this, not a granted lease, because a model may fail on every lease.
        self._failures += 1
        # Half of the pause is random, so that models that failed together do not all retry together.
        return max(least_s, pause_s * (0.5 + self._uniform() / 2))

    def succeeded(self) -> None:
        self._failures = 0


def is_broken(error: errors.GpuLeaseError) -> bool:
    """Return whether the model or its settings are at fault, so that waiting would not help."""
    return isinstance(error, _BROKEN) or type(error) is errors.InvalidRequest


def lease_end_of(event: LeaseEvent) -> errors.GpuLeaseError | None:
    """Return the error that an event means for the lease; None if the event does not end the lease."""
    if event.phase in (Phase.ACTIVE, Phase.WARNING):
        return None
    kind = errors.error_class(lease_end(event.cause).status)
    return kind(f"the lease ended: {event.reason or event.cause}")


def code_of(error: errors.GpuLeaseError) -> CallErrorCode:
    """Return the error code for the requests of a batch that failed with this error."""
    if isinstance(error, errors.GpuSessionFailed | errors.OperationFailed):
        return CallErrorCode.KERNEL_FAILED
    return CallErrorCode.LEASE_LOST
