"""The later handling of requests that have waited in the table: for a session's return, for room, or for a submit.

Another event causes it. If it fails, which is a bug, the effects of that event must still be executed. The request must
be answered here, too, because the table has already forgotten it.
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
