"""Threads that copy memory: one core copies 9 to 13 GB/s on a host whose bus takes 55."""

import ctypes
import os
import threading
from queue import Empty, SimpleQueue
from typing import Any, Final

MAX_COPIERS: Final = 4
"""Most threads of a session that copy: with four, an H100's host copies faster than the card takes it from the
worker's hands."""

CORES_PER_COPIER: Final = 4
"""Cores this process must have for each: on fewer they would take the worker's, or the tenant's."""

PART_BYTES: Final = 512 << 10
"""What a thread takes at a time: so many share the first piece of a copy, and its last."""

_Job = tuple[int, int, int, list[Any]]
"""Target, source, bytes, and as many items as parts of the copy are left: the token, and None for each other one."""

_COUNT: Final = min(MAX_COPIERS, len(os.sched_getaffinity(0)) // CORES_PER_COPIER)


class Copiers:
    """Copies memory, in threads where the host has cores for them, else in the call.

    Attributes:
        most: How many jobs are worth having under way.
    """

    def __init__(self, count: int = _COUNT) -> None:
        self.most = 4 if count else 1
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[Any] = SimpleQueue()
        # Daemons, because a session that nobody closed must not keep its program from ending.
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs, self._done), name="gpulease-copier", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def copy(self, target: int, source: int, nbytes: int, token: Any) -> None:
        """Begin to copy from one address to another; both must stay valid until `done` gives the token, not None."""
        if not self._threads:
            ctypes.memmove(target, source, nbytes)
            self._done.put(token)
            return
        starts = range(0, nbytes, PART_BYTES)
        left = [token] + [None] * (len(starts) - 1)
        for at in starts:
            self._jobs.put((target + at, source + at, min(PART_BYTES, nbytes - at), left))

    def done(self) -> Any:
        """The token of a copy that is complete.

        Until there is one, this thread copies too: waking the others takes as long as a part or two, and so would its
        own sleep.
        """
        while self._done.empty():
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                _do(job, self._done)
        return self._done.get()

    def close(self) -> None:
        """End the threads, once all copies are complete that were begun."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads.clear()


def _work(jobs: "SimpleQueue[_Job | None]", done: "SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        _do(job, done)


def _do(job: _Job, done: "SimpleQueue[Any]") -> None:
    target, source, nbytes, left = job
    ctypes.memmove(target, source, nbytes)  # without the interpreter's lock
    # A list's pop is atomic: the token comes to whoever ends the last part, and to nobody else.
    token = left.pop()
    if token is not None:
        done.put(token)
