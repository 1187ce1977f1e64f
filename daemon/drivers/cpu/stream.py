"""The stream: a ring of launches, filled by the caller and emptied by one thread that stays in native code.

The thread never needs Python's lock, so a caller that computes or spins in Python does not hold it up. The caller
writes a slot, then posts a semaphore; it learns of progress from a counter in shared memory.
"""

import ctypes
import threading
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
    STREAM_STACK_BYTES,
)
from gpulease.daemon.drivers.cpu.mapping import Mapping
from gpulease.daemon.drivers.cpu.native.compiler import NativeCode, bind_symbol, compile_ir
from gpulease.daemon.drivers.cpu.native.layout import LAUNCH_HEAD, PARAMETERS_OFFSET, StreamState
from gpulease.daemon.drivers.interface import Poll

SLOT_BYTES = PARAMETERS_OFFSET + MAX_PARAMETER_BYTES

# Words of StreamState, for the caller's view of it.
_COMPLETED = StreamState.completed.offset // 8
_FAULTED = StreamState.faulted.offset // 8
_WAITING = StreamState.waiting.offset // 8

_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Calls through _LIBC let other Python threads run meanwhile; those through _QUICK are too short for that to pay.
_LIBC = ctypes.CDLL(None)
_QUICK = ctypes.PyDLL(None)


@cache
def stream_code() -> NativeCode:
    """The native loop, compiled once per process. Starts no thread."""
    for name in ("sem_wait", "sem_trywait", "sem_post"):
        bind_symbol(f"gpulease_{name}", getattr(_LIBC, name))
    return compile_ir(files(native).joinpath("stream.ll").read_text("ascii"))


class Stream:
    """Launches in order, run in the `Environment` at an address. One caller's thread uses it."""

    def __init__(self, environment: int) -> None:
        self._ring = Mapping(QUEUE_DEPTH * SLOT_BYTES)
        self._slots = self._ring.view
        self._queued = 0
        self._thread: threading.Thread | None = None
        self.state = StreamState(
            ring=self._ring.address,
            slot_bytes=SLOT_BYTES,
            slot_mask=QUEUE_DEPTH - 1,
            idle_spins=IDLE_SPINS,
            environment=environment,
        )
        self._words = memoryview(self.state).cast("B").cast("Q")
        for semaphore in (StreamState.queued, StreamState.done):
            _LIBC.sem_init(self._at(semaphore.offset), 0, 0)
        self._done_at = self._at(StreamState.done.offset)
        queued_at = self._at(StreamState.queued.offset)
        post = _QUICK.sem_post
        self._post: Callable[[], object] = lambda: post(queued_at)

    def submit(self, record: bytes) -> None:
        """Queue a launch's head and parameters; waits while the queue is full."""
        number = self._queued
        if number - self._words[_COMPLETED] >= QUEUE_DEPTH:
            self._wait_for(number - QUEUE_DEPTH + 1, None)
        start = (number % QUEUE_DEPTH) * SLOT_BYTES
        self._slots[start : start + len(record)] = record
        self._queued = number + 1
        if self._thread is None:
            self._thread = self._start()
        self._post()

    def wait(self, poll: Poll | None = None) -> None:
        """Return once all that was queued has run or been skipped; `poll` may raise to give up."""
        if self._words[_COMPLETED] != self._queued:
            self._wait_for(self._queued, poll)

    @property
    def has_fault(self) -> bool:
        """Whether a launch has faulted and nobody has taken it."""
        return self._words[_FAULTED] != 0

    def forget_fault(self) -> None:
        """Let launches run again: those queued so far were skipped."""
        self.wait()
        self._words[_FAULTED] = 0

    def rest(self) -> bool:
        """End the thread if it is idle, or is soon, until the next launch; say whether it has ended."""
        if self._thread is None:
            return True
        deadline = time.monotonic() + CLOSE_WAIT_S
        try:
            self.wait(lambda: _give_up_after(deadline))
        except TimeoutError:
            return False
        self.submit(LAUNCH_HEAD.pack(*[0] * 12))
        self._thread.join()
        self._thread = None
        return True

    def close(self) -> bool:
        """End the thread and give memory back; False if a kernel goes on and nothing could be done."""
        if not self.rest():
            return False
        self._words.release()
        self._slots.release()
        self._ring.close()
        return True

    def _at(self, offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self.state) + offset)

    def _start(self) -> threading.Thread:
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(stream_code().address("run_stream"))
        # A daemon: a kernel that never ends must not keep the process from ending.
        thread = threading.Thread(target=run, args=(ctypes.addressof(self.state),), name="gpulease-stream", daemon=True)
        previous = threading.stack_size(STREAM_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(previous)
        return thread

    def _wait_for(self, count: int, poll: Poll | None) -> None:
        """Wait until so many slots are behind the loop: look for a moment, then sleep with looks in between."""
        words = self._words
        deadline = time.perf_counter() + SPIN_S
        while words[_COMPLETED] < count:
            if time.perf_counter() > deadline:
                break
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
