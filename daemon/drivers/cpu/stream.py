"""The stream: a ring of launches, filled by the caller and emptied by a thread that stays in native code.

The thread never needs Python's lock, so a caller that computes or spins in Python does not hold it up. The caller
writes a slot, then posts a semaphore; it learns of progress from a counter in shared memory.
"""

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from gpulease.daemon.drivers.cpu import native
from gpulease.daemon.drivers.cpu.limits import (
    CLOSE_WAIT_S,
    IDLE_SPINS,
    MAX_PARAMETER_BYTES,
    POLL_INTERVAL_NS,
    QUEUE_DEPTH,
    SPIN_S,
)
from gpulease.daemon.drivers.cpu.mapping import Mapping
from gpulease.daemon.drivers.cpu.native.layout import PARAMETERS_OFFSET, StreamState
from gpulease.daemon.drivers.cpu.team import Helpers, NativeThread
from gpulease.daemon.drivers.interface import Poll
from gpulease.daemon.native.compiler import NativeCode, bind_symbol
from gpulease.daemon.native.kept_code import load_ir

SLOT_BYTES = PARAMETERS_OFFSET + MAX_PARAMETER_BYTES

# The launch that has no entry.
_END = bytes(PARAMETERS_OFFSET)

# Words of StreamState, for the caller's view of it.
_COMPLETED = StreamState.completed.offset // 8
_FAULTED = StreamState.faulted.offset // 8
_WAITING = StreamState.waiting.offset // 8
_SUBMITTED = StreamState.submitted.offset // 8

_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Calls through _LIBC let other Python threads run meanwhile; those through _QUICK are too short for that to pay.
_LIBC = ctypes.CDLL(None)
_QUICK = ctypes.PyDLL(None)


@cache
def stream_code() -> NativeCode:
    """The native loops, compiled once per process. Starts no thread."""
    for name in ("sem_wait", "sem_trywait", "sem_post", "sched_yield"):
        bind_symbol(f"gpulease_{name}", getattr(_LIBC, name))
    texts = [files(native).joinpath(name).read_text("ascii") for name in ("team.ll", "stream.ll", "submit.ll")]
    return load_ir("\n".join(texts))


class Stream:
    """Launches in order. One caller's thread uses it.

    Args:
        places: Address of the environments that blocks run in.
        hosts: How many threads are to run the blocks of a launch.
        prints: Address of the head of what kernels print.

    Attributes:
        poll: Called before each launch and while one waits for room, if there is one; it may raise.
        spin_s: How long a wait looks again and again before it sleeps.
        yields: Whether others may run between two looks.
    """

    def __init__(self, places: int, hosts: int, prints: int = 0) -> None:
        self._helpers = Helpers(places, hosts)
        self.poll: Poll | None = None
        self.spin_s = SPIN_S
        self.yields = False
        self._ring = Mapping(QUEUE_DEPTH * SLOT_BYTES)
        self._slots = self._ring.view
        self._thread: NativeThread | None = None
        self.state = StreamState(
            ring=self._ring.address,
            slot_bytes=SLOT_BYTES,
            slot_mask=QUEUE_DEPTH - 1,
            idle_spins=IDLE_SPINS,
            team=self._helpers.address,
            prints=prints,
        )
        self._words = memoryview(self.state).cast("B").cast("Q")
        for semaphore in (StreamState.queued, StreamState.done):
            _LIBC.sem_init(self._at(semaphore.offset), 0, 0)
        self._done_at = self._at(StreamState.done.offset)
        queued_at = self._at(StreamState.queued.offset)
        post = _QUICK.sem_post
        self._post: Callable[[], object] = lambda: post(queued_at)

    def submit(self, record: bytes, *, is_shared: bool = False) -> None:
        """Queue a launch's head and parameters; waits while the queue is full. `is_shared` says that it has chunks."""
        words = self._words
        number = words[_SUBMITTED]
        if self.poll is not None:
            self.poll()
        if number - words[_COMPLETED] >= QUEUE_DEPTH:
            self._wait_for(number - QUEUE_DEPTH + 1, self.poll)
        if is_shared and not self.state.has_helpers:
            self._helpers.start(stream_code())
            self.state.has_helpers = 1
        start = (number % QUEUE_DEPTH) * SLOT_BYTES
        self._slots[start : start + len(record)] = record
        words[_SUBMITTED] = number + 1
        if self._thread is None:
            self._thread = NativeThread(stream_code(), "run_stream", ctypes.addressof(self.state))
            self.state.has_thread = 1
        self._post()

    def wait(self, poll: Poll | None = None) -> None:
        """Return once all that was queued has run or been skipped; `poll` may raise to give up."""
        submitted = self._words[_SUBMITTED]
        if self._words[_COMPLETED] != submitted:
            self._wait_for(submitted, poll)

    def progress(self) -> tuple[int, int]:
        """How many launches were queued, and how many are behind the loop."""
        return self._words[_SUBMITTED], self._words[_COMPLETED]

    @property
    def has_fault(self) -> bool:
        """Whether a launch has faulted and nobody has taken it."""
        return self._words[_FAULTED] != 0

    def forget_fault(self) -> None:
        """Let launches run again: those queued so far were skipped."""
        self.wait()
        self._words[_FAULTED] = 0

    def rest(self) -> bool:
        """End the threads if they are idle, or are soon, until the next launch; say whether they have ended."""
        if self._thread is None:
            return True
        deadline = time.monotonic() + CLOSE_WAIT_S
        try:
            self.wait(lambda: _give_up_after(deadline))
        except TimeoutError:
            return False
        self.submit(_END)
        self._thread.join()
        self._thread = None
        self.state.has_thread = 0
        self._helpers.end()
        self.state.has_helpers = 0
        return True

    def close(self) -> bool:
        """End the threads and give memory back; False if a kernel goes on and nothing could be done."""
        if not self.rest():
            return False
        self._words.release()
        self._slots.release()
        self._ring.close()
        return True

    def _at(self, offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self.state) + offset)

    def _wait_for(self, count: int, poll: Poll | None) -> None:
        """Wait until so many slots are behind the loop: look for a moment, then sleep with looks in between."""
        words = self._words
        deadline = time.perf_counter() + self.spin_s
        while words[_COMPLETED] < count:
            if time.perf_counter() > deadline:
                break
            if self.yields:
                os.sched_yield()
        words[_WAITING] = 1
        try:
            while words[_COMPLETED] < count:
                self._sleep()
                if poll is not None:
                    poll()
        finally:
            words[_WAITING] = 0

    def _sleep(self) -> None:
        """Until the loop has finished a launch, or for one poll interval."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + POLL_INTERVAL_NS
        _LIBC.sem_clockwait(self._done_at, time.CLOCK_MONOTONIC, ctypes.byref(_Timespec(*divmod(until, _NS_PER_S))))


def _give_up_after(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
