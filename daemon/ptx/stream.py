"""Queue launches for native threads: a ring that the caller fills and one thread empties, with helpers beside it.

The stream's thread never needs Python's lock, so a caller that computes or spins in Python does not hold it up. The
caller writes a slot, then posts a semaphore; a counter in shared memory tells it the progress.

Helpers share the blocks of a launch, and sleep while there is nothing to share. The stream's thread wakes them if a
launch takes longer than waking does. It goes by how long the kernel's blocks took the last time, and by the blocks it
has run itself meanwhile (native/team.ll).
"""

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from gpulease.daemon.drivers.interface import DriverError, Poll
from gpulease.daemon.native.code_cache import load_ir
from gpulease.daemon.native.compiler import NativeCode, bind_symbol
from gpulease.daemon.ptx import native
from gpulease.daemon.ptx.limits import (
    CLOSE_WAIT_S,
    HELPER_YIELDS,
    IDLE_SPINS,
    MAX_HOST_THREADS,
    MAX_PARAMETER_BYTES,
    POLL_INTERVAL_NS,
    QUEUE_DEPTH,
    SPIN_S,
    STREAM_STACK_BYTES,
    WAKE_NS,
)
from gpulease.daemon.ptx.memory import Mapping
from gpulease.daemon.ptx.native.structures import PARAMETERS_OFFSET, StreamState, Team
from gpulease.protocol.time_units import NS_PER_S

# How many host threads run a worker's blocks, at most; an operator's setting.
THREADS_VARIABLE = "GPULEASE_CPU_THREADS"

_LIBC = ctypes.CDLL(None)

# No less than sizeof(pthread_attr_t) on any machine: 56 on x86-64, 64 on AArch64.
_ATTRIBUTES_BYTES = 128


def host_threads() -> int:
    """Return how many threads may run blocks: this process's cores, or fewer by the operator's or the driver's limit.

    Raises DriverError for a setting that is no number of threads.
    """
    cores = len(os.sched_getaffinity(0))
    allowed = os.environ.get(THREADS_VARIABLE) or str(cores)
    if not allowed.isdecimal() or int(allowed) == 0:
        raise DriverError(
            f"{THREADS_VARIABLE} is {allowed!r}, which is no number of threads",
            hint="Set it to 1 or more, or to nothing for as many as there are cores.",
        )
    return min(cores, int(allowed), MAX_HOST_THREADS)


class NativeThread:
    """A thread that runs a native function of one argument, and that Python knows nothing of.

    Python's own are detached, so glibc keeps the stack of the last one that ended, with whatever kernels left there,
    for the next. That of a joined one goes back to the host where glibc keeps none (see daemon/host/heap_wipe.py).

    Raises:
        RuntimeError: The host gives this process no more threads.
    """

    def __init__(self, code: NativeCode, function: str, argument: int) -> None:
        # For as long as it may run.
        self._code = code
        self._handle = ctypes.c_ulong()
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _LIBC.pthread_attr_init(attributes)
        # Room for a kernel's calls.
        _LIBC.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STREAM_STACK_BYTES))
        begin = ctypes.c_void_p(code.address(function))
        error = _LIBC.pthread_create(ctypes.byref(self._handle), attributes, begin, ctypes.c_void_p(argument))
        _LIBC.pthread_attr_destroy(attributes)
        if error:
            raise RuntimeError(os.strerror(error))

    def join(self) -> None:
        """Wait for its end; once. One that is never joined keeps no process from ending."""
        _LIBC.pthread_join(self._handle, None)


class Helpers:
    """The helpers of one stream; none is there until `start`.

    Args:
        places: Address of the environments that blocks run in.
        hosts: How many threads are to run blocks, the stream's among them.
    """

    def __init__(self, places: int, hosts: int) -> None:
        self._count = hosts - 1
        self._threads: list[NativeThread] = []
        self.team = Team(places=places, wake_ns=WAKE_NS, idle_yields=HELPER_YIELDS)
        self.address = ctypes.addressof(self.team)
        self._work = ctypes.c_void_p(self.address + Team.work.offset)
        self._done = ctypes.c_void_p(self.address + Team.done.offset)

    def start(self, code: NativeCode) -> None:
        """Start them unless they are there; no launch has been queued yet that they could take part in."""
        if self._threads or not self._count:
            return
        self.team.ending = self.team.idle = 0
        for semaphore in (self._work, self._done):
            _LIBC.sem_init(semaphore, 0, 0)
        for _ in range(self._count):
            try:
                thread = NativeThread(code, "run_helper", self.address)
            except RuntimeError:
                # The host gives this process no more threads: those there are will do.
                break
            self._threads.append(thread)
        self.team.helpers = len(self._threads)

    def end(self) -> None:
        """End them, if they are there. The stream's thread has ended before."""
        self.team.ending = 1
        for _ in self._threads:
            _LIBC.sem_post(self._work)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.team.helpers = 0


SLOT_BYTES = PARAMETERS_OFFSET + MAX_PARAMETER_BYTES

# The launch that has no entry.
_END = bytes(PARAMETERS_OFFSET)

# Words of StreamState, for the caller's view of it.
_COMPLETED = StreamState.completed.offset // 8
_FAULTED = StreamState.faulted.offset // 8
_WAITING = StreamState.waiting.offset // 8
_SUBMITTED = StreamState.submitted.offset // 8


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Calls through _LIBC let other Python threads run meanwhile; those through _QUICK are too short for that to pay.

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
        if self._thread is None:
            # Before the launch counts as queued: nobody would ever run it if the host gives no thread.
            self._thread = NativeThread(stream_code(), "run_stream", ctypes.addressof(self.state))
            self.state.has_thread = 1
        start = (number % QUEUE_DEPTH) * SLOT_BYTES
        self._slots[start : start + len(record)] = record
        words[_SUBMITTED] = number + 1
        self._post()

    def wait(self, poll: Poll | None = None) -> None:
        """Return once all that was queued has run or been skipped; `poll` may raise to give up."""
        submitted = self._words[_SUBMITTED]
        if self._words[_COMPLETED] != submitted:
            self._wait_for(submitted, poll)

    def progress(self) -> tuple[int, int]:
        """Return how many launches were queued, and how many the loop has finished."""
        return self._words[_SUBMITTED], self._words[_COMPLETED]

    @property
    def has_fault(self) -> bool:
        """Say whether a launch has faulted and nobody has taken the fault."""
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
        _LIBC.sem_clockwait(self._done_at, time.CLOCK_MONOTONIC, ctypes.byref(_Timespec(*divmod(until, NS_PER_S))))


def _give_up_after(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
