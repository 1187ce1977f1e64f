"""Keeping a lease alive: when to renew, numbers in and numbers out, and the procedure that does it."""

import random
from collections.abc import Callable
from typing import Any, Final

from gpulease.client.core.lease import LeaseView
from gpulease.client.core.steps import Procedure, Sleep
from gpulease.client.errors import PERMANENT_ERRORS, Drained, GpuLeaseError
from gpulease.protocol import Status

RENEW_AT: Final = 0.75
"""Which part of its time a lease has used when it is renewed: early enough for several tries."""

JITTER: Final = 0.10
"""How far each renewal is moved at random, so that leases granted together are not renewed together."""

FIRST_BACKOFF_S: Final = 0.1
"""Pause after the first failure; it doubles with each one that follows."""

MAX_BACKOFF_S: Final = 5.0
"""Longest pause between two tries."""

CUT_SHORT_PART: Final = 0.9
"""A renewal that gives less than this part of what was asked for was cut short: only a drain does that."""

CUT_SHORT_SLACK_S: Final = 0.1
"""What of it the daemon may have taken to answer; leases that short find out by the next renewal."""

LEAST_DELAY_S: Final = 0.01
"""Shortest pause at all, so that a lease of a millisecond does not spin."""


class RenewalSchedule:
    """How long to wait before the next try.

    Args:
        uniform: Random numbers from 0 to 1.
    """

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self._uniform = uniform
        self._failures = 0

    def after_grant(self, remaining_s: float) -> float:
        """Seconds until the renewal of a lease that has `remaining_s` left, just granted or renewed."""
        self._failures = 0
        return max(LEAST_DELAY_S, remaining_s * RENEW_AT * (1 + JITTER * (2 * self._uniform() - 1)))

    def after_failure(self, error: GpuLeaseError, remaining_s: float) -> float | None:
        """Seconds until the next try; None if there is no use: the lease is lost."""
        if isinstance(error, PERMANENT_ERRORS) or remaining_s <= 0:
            return None
        pause_s = min(FIRST_BACKOFF_S * 2.0 ** min(self._failures, 16), MAX_BACKOFF_S)
        self._failures += 1
        # Half of what is left, so that the last tries come closer together instead of too late.
        return max(LEAST_DELAY_S, min(pause_s, remaining_s / 2))


def keep(
    lease: Callable[[], LeaseView | None], schedule: RenewalSchedule, stopped: Any = None
) -> Procedure[GpuLeaseError | None]:
    """Renew a lease for as long as it was granted, again and again; the result is why it was lost.

    Args:
        lease: A weak reference to it: that it is dropped or given back ends this without a loss.
        schedule: When to renew.
        stopped: An event of the face's kind that ends this; None if the face ends it in another way.
    """
    view = lease()
    if view is None:
        return None
    state = view._state
    ttl_s = state.ttl_s
    delay_s = schedule.after_grant(state.remaining_s)
    while True:
        del view
        yield Sleep(delay_s, stopped)
        view = lease()
        if view is None or (stopped is not None and stopped.is_set()):
            return None
        try:
            yield from state.renew(ttl_s, is_patient=False)
            if state.ttl_s < ttl_s * CUT_SHORT_PART - CUT_SHORT_SLACK_S:
                del view
                return Drained(
                    f"keep_alive: the lease's node is being drained: it lasts {state.ttl_s:.1f} s more, and no longer",
                    "Finish what you do, and acquire a lease on another node",
                )
            delay_s = schedule.after_grant(state.remaining_s)
        except GpuLeaseError as error:
            pause_s = schedule.after_failure(error, state.remaining_s)
            if pause_s is None:
                del view  # the error's traceback has this frame, and must not keep the lease
                return None if error.status is Status.LEASE_FREED else error
            delay_s = pause_s
