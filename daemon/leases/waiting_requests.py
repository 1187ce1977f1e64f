"""Handles requests that have waited in the table for a session's return, for room, or for a submit.

Another event causes a request to be handled. If that fails, which is a bug, the effects of that event must still be
executed. The request must also be answered here, because the table has already dropped it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.daemon.leases.events import Effect, RequestFaulted


@contextmanager
def answered(request: int, effects: list[Effect]) -> Iterator[None]:
    """Have a request answered if handling it now raises an error."""
    try:
        yield
    except Exception as error:
        effects.append(RequestFaulted(request, error))
