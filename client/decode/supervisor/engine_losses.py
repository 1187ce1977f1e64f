"""Losses of a whole engine: which errors mean a loss, its possible causes, and when to request the next engine. Pure.

The decoder requests another engine for as long as it is open, whatever the refusal: a daemon that is down comes back,
and an operator may permit a lease that the daemon has refused. Only the pauses grow, up to a limit.

An error of an unknown kind counts as a loss, too. A request may have caused a fault of the context; `fault_isolation`
finds out which.
"""

from typing import Final

from gpulease.client.core.lease import LEASE_OVER
from gpulease.client.errors import GpuLeaseError, GpuSessionFailed, SyncFailed, error_class
from gpulease.protocol.back_off import back_off_s

LEASE_ENDS: Final = tuple(error_class(status) for status in LEASE_OVER)
"""Errors that mean that the lease has ended. The computation is not the cause."""

CONTEXT_FAULTS: Final = (GpuSessionFailed, SyncFailed)
"""Errors that mean that the context is lost. The computation may be the cause."""

FIRST_PAUSE_S: Final = 0.1
"""Pause in seconds after the first attempt to open an engine or a region; each further attempt doubles it."""

MAX_PAUSE_S: Final = 5.0
"""Longest pause in seconds between two attempts, so that a daemon that returns is used soon."""

MAX_PAUSE_OF_LOSSES_S: Final = 60.0
"""Longest pause in seconds before the next engine after several losses in a row. Each engine must load the model."""

LASTED_S: Final = 60.0
"""Seconds after which an engine counts as working even if it has not computed a step."""

TRIES_LOGGED: Final = 8
"""This many first attempts to open an engine are all logged."""

TRIES_PER_LINE: Final = 12
"""After the first TRIES_LOGGED attempts, one attempt in TRIES_PER_LINE is logged: with pauses of MAX_PAUSE_S, one per
minute.
"""

REPLAY_WAIT_S: Final = 300.0
"""Seconds for which requests wait for another engine after a loss. Callers must not wait forever."""


def shows_loss(error: BaseException) -> bool:
    """Return whether an error's class shows that the engine is lost."""
    return isinstance(error, LEASE_ENDS + CONTEXT_FAULTS)


def is_kill(error: BaseException) -> bool:
    """Return whether the context's process was killed from outside, according to the daemon."""
    return isinstance(error, GpuLeaseError) and error.failure.is_kill


def is_fault(error: BaseException) -> bool:
    """Return whether the computation may be the cause of a loss."""
    # An unknown error counts as a fault: suspecting an innocent request costs a replay, but missing a guilty one costs
    # an engine.
    return not isinstance(error, LEASE_ENDS) and not is_kill(error)


def pause_s(attempt: int) -> float:
    """Return the pause in seconds after an attempt, counted from 0."""
    return back_off_s(attempt, FIRST_PAUSE_S, MAX_PAUSE_S)


def pause_before_engine_s(losses: int) -> float:
    """Return the pause in seconds before the next engine, after `losses` >= 1 losses without a step in between."""
    # The first loss is answered at once; pause only after an engine that was lost without computing a step.
    return 0.0 if losses <= 1 else back_off_s(losses - 2, FIRST_PAUSE_S, MAX_PAUSE_OF_LOSSES_S)


def is_logged(tries: int) -> bool:
    """Return whether this attempt in a row, counted from 1, to open an engine or a region is logged."""
    # The first attempts show how the recovery proceeds; later, one line a minute shows that it continues.
    return tries <= TRIES_LOGGED or tries % TRIES_PER_LINE == 0
