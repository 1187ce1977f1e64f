"""Daemons that recycle contexts, and never end a context because it is late, however busy the host is."""

from collections.abc import Iterator
from typing import Final

from helpers.daemon import Daemon, Faults, running
from helpers.leaks import SHARED_PROCESSES
from helpers.waiting import PATIENCE_S, wait_until

SETTINGS: Final = 'warm_contexts = 1\nrecycle = "same-tenant"\nrecycle_idle_s = 600\n'

SLOW_SCRUBS: Final = {"gpulease.daemon.leases.teardown:SCRUB_TIMEOUT_MS": int(2 * PATIENCE_S * 1000)}
"""The constant that ends a worker whose scrub takes too long, with a value that no test reaches."""

PATIENT: Final = Faults(constants=SLOW_SCRUBS)


def wait_until_full(daemon: Daemon) -> None:
    """Wait until the first card's pool has the one warm context of SETTINGS."""
    wait_until(lambda: daemon.inventory().details[0]["warm_contexts"] == 1, "the pool is full", seen=daemon.inventory)


def shared(daemon: Daemon) -> Iterator[Daemon]:
    """Yield a daemon for several tests. It makes contexts at any time, which are no leak."""
    with running(daemon):
        SHARED_PROCESSES.add(daemon.process.pid)
        yield daemon
        SHARED_PROCESSES.remove(daemon.process.pid)
