"""A session with a thread that computes all the time, and that the test's actions must not affect."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.client import GpuLease, GpuSession
from helpers.kernels import Neighbour
from helpers.waiting import wait_until

BETWEEN_ROUNDS_S = 0.02
"""Pause between rounds, so that other tests get the processor.

It is short compared with anything that affects a session, and long compared with a round.
"""

PAUSE_S = 20.0
"""A time that is longer than any round on a busy host, and shorter than a client's wait for a broker that hangs.

Rounds that end while no broker runs prove more; see `check_goes_on`.
"""


class Working:
    """A session in which a thread computes continuously."""

    def __init__(self, session: GpuSession) -> None:
        self.neighbour = Neighbour(session)
        self.longest_s = 0.0
        self.error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                started = time.monotonic()
                self.neighbour.check()
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                self._stopped.wait(BETWEEN_ROUNDS_S)
        except BaseException as error:
            self.error = error

    def check_goes_on(self) -> None:
        """Fail unless the thread completes more rounds."""
        before = self.neighbour.rounds
        wait_until(lambda: self.neighbour.rounds > before or self.error, "it goes on")
        assert self.error is None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@contextmanager
def working(lease: GpuLease, *, shared_memory: bool = True) -> Iterator[Working]:
    with GpuSession(lease, shared_memory=shared_memory) as session:
        work = Working(session)
        try:
            yield work
        finally:
            work.stop()
        assert work.error is None
        assert work.longest_s < PAUSE_S
