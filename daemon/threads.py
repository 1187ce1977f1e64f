"""The daemon's threads: all that it ever needs are started when it starts.

A host that lets it have no more (setrlimit(2), RLIMIT_NPROC; a control group's pids.max) would else show itself in the
middle of leases: as a card that can't be looked at, whose sessions nobody weighs and whose memory nobody proves free.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

LOOKING_THREADS: Final = 32
"""For what blocks: looks at cards, files read anew. So many looks share one listing of a card's processes; one that
hangs keeps one of them."""

STACK_BYTES: Final = 1 << 20
"""Of each: 32 MiB together, where a host that does not overcommit would count the 8 MiB that are usual 32 times."""

HINT: Final = (
    "Let the daemon have more: TasksMax= and LimitNPROC= of its service, `ulimit -u`, pids.max of its control group,"
    " or memory for their stacks."
)


class NoThread(Exception):
    """A thread that the daemon can't do without can't be started; a later start may find it otherwise.

    Attributes:
        hint: What the operator can do, a sentence.
        status: The exit status.
    """

    def __init__(self) -> None:
        super().__init__("this host lets the daemon start no more threads")
        self.hint = HINT
        self.status = os.EX_UNAVAILABLE


def start_thread(thread: threading.Thread) -> None:
    """Start it. Raises NoThread."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise NoThread from None


def thread_pool(size: int = LOOKING_THREADS) -> ThreadPoolExecutor:
    """A pool whose threads are all there: it never starts another. Raises NoThread."""
    pool = ThreadPoolExecutor(size, "gpulease-look")
    together = threading.Barrier(size)
    usual_bytes = threading.stack_size(STACK_BYTES)
    try:
        # One that waits for the others is not idle, so each has the next one started.
        wait([pool.submit(together.wait) for _ in range(size)])
    except (RuntimeError, MemoryError):
        together.abort()
        pool.shutdown(wait=False)
        raise NoThread from None
    finally:
        threading.stack_size(usual_bytes)
    return pool
