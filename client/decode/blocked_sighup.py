"""Keeps a SIGHUP to the whole process group from ending a process that has only just been started."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sighup_blocked() -> Iterator[None]:
    """Block SIGHUP in this thread, so that a process that is started in the block begins with it blocked.

    Its imports take a second, before which it can't ignore the signal. This process receives a SIGHUP that was blocked
    a moment later.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        # Do not restore the earlier mask: starts of several processes overlap.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
