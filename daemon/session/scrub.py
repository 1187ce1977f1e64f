"""After a lease that was given back: all that it left is released and overwritten, so that its context may serve again.

Anything that can't be undone ends the attempt: a fault, a kernel that goes on, what the driver keeps for good, modules
with variables, memory that somebody still has a view of. The worker is killed then, as any is.
"""

import select
import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.drivers.interface import Context, Driver, DriverError, Opening
from gpulease.daemon.host.heap import is_heap_wiped
from gpulease.daemon.session.native.launch_fast_path import LeaseOver
from gpulease.daemon.session.session import Session

BUSY_S: Final = 0.1
"""How long what was launched may go on. Its tenant has said that it is done, so it is idle as a rule."""

_STDERR: Final = 2


class NotScrubbed(Exception):
    """Something of the lease is left, or may be; the message says what."""


def scrub(session: Session, context: Context, driver: Driver) -> Opening:
    """Leave nothing of a session behind; the rest of making its context anew. Raises NotScrubbed."""
    if not is_heap_wiped():
        raise NotScrubbed("this process does not overwrite what it frees")
    if not _is_heard():
        raise NotScrubbed("it has said more than is logged of one process: of the next lease nothing would be")
    try:
        session.release(_until(time.monotonic() + BUSY_S))
        opening = driver.recycle(context)
        session.release_memory()
    except (DriverError, LeaseOver, BufferError) as error:
        raise NotScrubbed(str(error) or type(error).__name__) from None
    return opening


def _is_heard() -> bool:
    """Whether somebody reads what this process says: of a pipe that nobody does, the end tells (pipe(7), poll(2))."""
    poll = select.poll()
    poll.register(_STDERR, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _until(end_s: float) -> Callable[[], None]:
    def poll() -> None:
        if time.monotonic() > end_s:
            raise DriverError(f"what it launched has not ended after {BUSY_S:g} s")

    return poll
