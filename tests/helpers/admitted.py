"""Compares the memory that a card reports for a session with what the daemon has admitted for it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpulease.client import GpuSession
from helpers.daemon import Daemon
from helpers.nvml import Cards


@dataclass
class Watched:
    """A session, and a thread that samples how much memory the card reports for the session's worker.

    Attributes:
        admitted: Bytes that the daemon holds on the card for the session.
        peak: The most bytes that the card has reported for the worker's process.
    """

    session: GpuSession
    admitted: int
    figure: Callable[[], int]
    peak: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.over.is_set():
            self.peak = max(self.peak, self.figure())
            time.sleep(0.0002)


@contextmanager
def watched(daemon: Daemon, cards: Cards, size_bytes: int) -> Iterator[Watched]:
    """Yield a session of that size. Fails if the card ever reports more bytes for it than were admitted."""
    with daemon.builder(size_bytes).device(0).acquire() as lease, GpuSession(lease) as session:
        pid = daemon.worker_pid(lease.lease_id)
        seen = Watched(session, daemon.inventory().details[0]["held_bytes"], lambda: cards.process_bytes(0, pid))
        thread = threading.Thread(target=seen.watch)
        thread.start()
        try:
            yield seen
            assert lease.query()["state"] == "active", lease.query()
        finally:
            seen.over.set()
            thread.join()
        assert 0 < seen.peak <= seen.admitted
