"""Keeps a SIGHUP to the whole process group from ending a process that has just started."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sighup_blocked() -> Iterator[None]:
    """Block SIGHUP in this thread, so that a process started in the block begins with the signal blocked.

    Such a process can ignore the signal only after its imports, which take a second. A SIGHUP that comes meanwhile
    reaches this process when the block ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        # Do not restore the earlier mask: starts of several processes overlap.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
