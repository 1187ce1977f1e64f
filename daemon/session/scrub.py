"""The scrub after a freed lease: release and overwrite all that it left, so that its context may serve another lease.

Anything that can't be undone ends the attempt: a fault, a kernel that goes on, memory that the driver keeps for good, a
module with variables, memory that something still has a view of. The broker then kills the worker, as it does any
other.
"""

import select
import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.drivers.interface import Context, Driver, DriverError, Opening
from gpulease.daemon.host.heap import is_heap_wiped
from gpulease.daemon.session.operations import LeaseOver
from gpulease.daemon.session.session import Session

BUSY_S: Final = 0.1
"""Time for which kernels may still run. The tenant has freed the lease, so as a rule none does."""

_STDERR: Final = 2


class NotScrubbed(Exception):
    """Something of the lease is left, or may be left; the message says what."""


def scrub(session: Session, context: Context, driver: Driver) -> Opening:
    """Leave nothing of a session behind; returns the opening that makes its context anew. Raises NotScrubbed."""
    if not is_heap_wiped():
        raise NotScrubbed("this process does not overwrite what it frees")
    if not _has_log_reader():
        raise NotScrubbed("it has said more than is logged of one process: of the next lease nothing would be")
    try:
        session.release(_until(time.monotonic() + BUSY_S))
        opening = driver.recycle(context)
        session.release_memory()
    except (DriverError, LeaseOver, BufferError) as error:
        raise NotScrubbed(str(error) or type(error).__name__) from None
    return opening


def _has_log_reader() -> bool:
    """Return whether a process reads this one's stderr: poll(2) gives POLLERR for a pipe without a reader (pipe(7))."""
    poll = select.poll()
    poll.register(_STDERR, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _until(end_s: float) -> Callable[[], None]:
    def poll() -> None:
        if time.monotonic() > end_s:
            raise DriverError(f"what it launched has not ended after {BUSY_S:g} s")

    return poll
