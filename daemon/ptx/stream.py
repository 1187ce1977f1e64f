"""A queue of launches for native threads: a ring that the caller fills and one thread empties, with helper threads.

The stream's thread never needs Python's lock, so a caller that computes or spins in Python does not delay it. The
caller writes a slot and posts a semaphore. It reads the progress from a counter in shared memory.

Helpers share the blocks of a launch, and sleep while there is nothing to share. The stream's thread wakes them if the
launch takes longer than the wake-up. It estimates this from the time that the kernel's blocks took at the last launch,
and from the blocks that it has run itself since the launch began (native/team.ll).
"""

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from gpulease.daemon.drivers.interface import MAX_MARKS, Poll, UnusableSetting
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

# The operator's setting for the number of host threads that may run a worker's blocks.
THREADS_VARIABLE = "GPULEASE_CPU_THREADS"

_LIBC = ctypes.CDLL(None)

# At least sizeof(pthread_attr_t) on every machine, which is 56 on x86-64 and 64 on AArch64.
_ATTRIBUTES_BYTES = 128


def host_threads() -> int:
    """Return how many threads may run blocks: one for each core, or fewer by the operator's or the driver's limit.

    Raises UnusableSetting if the operator's limit is not a positive number.
    """
    cores = len(os.sched_getaffinity(0))
    allowed = os.environ.get(THREADS_VARIABLE) or str(cores)
    if not allowed.isdecimal() or int(allowed) == 0:
        raise UnusableSetting(
            f"{THREADS_VARIABLE} must be a number of threads, not {allowed!r}",
            hint="Set it to 1 or more, or leave it empty for one thread per core.",
        )
    return min(cores, int(allowed), MAX_HOST_THREADS)


class NativeThread:
    """A thread, unknown to Python, that runs a native function with one argument.

    Python's own threads are detached, so glibc keeps the stack of the last thread that ended, with the data that
    kernels left there, for the next thread. The stack of a joined thread is returned to the host if glibc caches no
    stacks (see daemon/host/heap_wipe.py).

    Raises:
        RuntimeError: The host gives this process no more threads.
    """

    def __init__(self, code: NativeCode, function: str, argument: int) -> None:
        # Keeps the code alive for as long as the thread may run it.
        self._code = code
        self._handle = ctypes.c_ulong()
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _LIBC.pthread_attr_init(attributes)
        # Device functions' calls use this stack; translate/functions.py checks that they fit.
        _LIBC.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STREAM_STACK_BYTES))
        begin = ctypes.c_void_p(code.address(function))
        error = _LIBC.pthread_create(ctypes.byref(self._handle), attributes, begin, ctypes.c_void_p(argument))
        _LIBC.pthread_attr_destroy(attributes)
        if error:
            raise RuntimeError(os.strerror(error))

    def join(self) -> None:
        """Wait until the thread has ended. Call this only once. An unjoined thread does not keep the process alive."""
        _LIBC.pthread_join(self._handle, None)


class Helpers:
    """The helper threads of one stream. None runs until `start`.

    Args:
        environments: Address of the environments in which blocks run.
        hosts: Number of threads that run blocks, including the stream's thread.
    """

    def __init__(self, environments: int, hosts: int) -> None:
        self._count = hosts - 1
        self._threads: list[NativeThread] = []
        self.team = Team(environments=environments, wake_ns=WAKE_NS, idle_yields=HELPER_YIELDS)
        self.address = ctypes.addressof(self.team)
        self._work = ctypes.c_void_p(self.address + Team.work.offset)
        self._done = ctypes.c_void_p(self.address + Team.done.offset)

    def start(self, code: NativeCode) -> None:
        """Start the helpers if none run. Call it before a launch that they could share is queued."""
        if self._threads or not self._count:
            return
        # Reset counts and posts that remain from an earlier start.
        self.team.ending = self.team.idle = 0
        for semaphore in (self._work, self._done):
            _LIBC.sem_init(semaphore, 0, 0)
        for _ in range(self._count):
            try:
                thread = NativeThread(code, "run_helper", self.address)
            except RuntimeError:
                # The host gives this process no more threads, so continue with those that run.
                break
            self._threads.append(thread)
        self.team.helpers = len(self._threads)

    def end(self) -> None:
        """End the helpers. The stream's thread must have ended first."""
        # Each helper wakes once, reads `ending` and returns.
        self.team.ending = 1
        for _ in self._threads:
            _LIBC.sem_post(self._work)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.team.helpers = 0


SLOT_BYTES = PARAMETERS_OFFSET + MAX_PARAMETER_BYTES

# A launch without an entry ends the stream's thread.
_END = bytes(PARAMETERS_OFFSET)

# Indices of words of StreamState, for the caller's view of the structure.
_COMPLETED = StreamState.completed.offset // 8
_FAULTED = StreamState.faulted.offset // 8
_WAITING = StreamState.waiting.offset // 8
_SUBMITTED = StreamState.submitted.offset // 8


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Calls through _LIBC release Python's lock; calls through _QUICK are too short for that to be worthwhile.

_QUICK = ctypes.PyDLL(None)


@cache
def stream_code() -> NativeCode:
    """Return the native loops, compiled once per process. Starts no thread."""
    # The loops call libc by these names, which must be registered, because the linker of generated code does not search
    # libc.
    for name in ("sem_wait", "sem_trywait", "sem_post", "sched_yield"):
        bind_symbol(f"gpulease_{name}", getattr(_LIBC, name))
    texts = [files(native).joinpath(name).read_text("ascii") for name in ("team.ll", "stream.ll", "submit.ll")]
    return load_ir("\n".join(texts))


class LaunchQueue:
    """A queue of launches that run in order. Only one thread of the caller uses it.

    Args:
        environments: Address of the environments in which blocks run.
        hosts: Number of threads that run the blocks of a launch.
        prints: Address of the head of the buffer to which kernels print.

    Attributes:
        poll: If set, called before each launch and while a launch waits for room. It may raise.
        spin_s: How long a wait polls the counter before it sleeps.
        yields: Whether other threads may run between two polls.
    """

    def __init__(self, environments: int, hosts: int, prints: int = 0) -> None:
        self._helpers = Helpers(environments, hosts)
        self.poll: Poll | None = None
        self.spin_s = SPIN_S
        self.yields = False
        self._ring = Mapping(QUEUE_DEPTH * SLOT_BYTES)
        self._slots = self._ring.view
        self._thread: NativeThread | None = None
        self._marks = (ctypes.c_uint64 * MAX_MARKS)()
        # The structure must not move, because the native thread keeps its address.
        self.state = StreamState(
            ring=self._ring.address,
            slot_bytes=SLOT_BYTES,
            slot_mask=QUEUE_DEPTH - 1,
            idle_spins=IDLE_SPINS,
            team=self._helpers.address,
            prints=prints,
            marks=ctypes.addressof(self._marks),
        )
        self._words = memoryview(self.state).cast("B").cast("Q")
        for semaphore in (StreamState.queued, StreamState.done):
            _LIBC.sem_init(self._at(semaphore.offset), 0, 0)
        self._done_at = self._at(StreamState.done.offset)
        queued_at = self._at(StreamState.queued.offset)
        # Bind this once, because every launch posts.
        post = _QUICK.sem_post
        self._post: Callable[[], object] = lambda: post(queued_at)

    def submit(self, record: bytes, *, is_shared: bool = False) -> None:
        """Queue a launch's head and parameters. Waits while the queue is full. `is_shared`: helpers may share it."""
        words = self._words
        number = words[_SUBMITTED]
        if self.poll is not None:
            self.poll()
        # Step 1: wait for room. The slot is free when the loop has finished the launch that used it a full ring ago.
        if number - words[_COMPLETED] >= QUEUE_DEPTH:
            self._wait_for(number - QUEUE_DEPTH + 1, self.poll)
        # Step 2: start threads, for the first launch that needs them and again after `rest`.
        if is_shared and not self.state.has_helpers:
            self._helpers.start(stream_code())
            self.state.has_helpers = 1
        if self._thread is None:
            # Start the thread before the launch counts as queued, because without a thread the launch would never run.
            self._thread = NativeThread(stream_code(), "run_stream", ctypes.addressof(self.state))
            self.state.has_thread = 1
        # Step 3: fill the slot, then publish the count, then wake the loop, which must never read a half-written slot.
        start = (number % QUEUE_DEPTH) * SLOT_BYTES
        self._slots[start : start + len(record)] = record
        words[_SUBMITTED] = number + 1
        self._post()

    def wait(self, poll: Poll | None = None) -> None:
        """Wait until everything queued has run or was skipped. `poll` may raise to give up."""
        submitted = self._words[_SUBMITTED]
        if self._words[_COMPLETED] != submitted:
            self._wait_for(submitted, poll)

    def progress(self) -> tuple[int, int]:
        """Return how many launches were queued, and how many of them the loop has finished."""
        return self._words[_SUBMITTED], self._words[_COMPLETED]

    @property
    def has_fault(self) -> bool:
        """Whether a launch has faulted and the fault has not been taken yet."""
        return self._words[_FAULTED] != 0

    def forget_fault(self) -> None:
        """Wait until the launches queued so far have been skipped, and let later ones run."""
        # Wait first: if the flag were cleared early, a launch queued after the fault would run.
        self.wait()
        self._words[_FAULTED] = 0

    def rest(self) -> bool:
        """End the threads until the next launch. Returns False if a kernel still runs after CLOSE_WAIT_S."""
        if self._thread is None:
            return True
        deadline = time.monotonic() + CLOSE_WAIT_S
        try:
            self.wait(lambda: _give_up_after(deadline))
        except TimeoutError:
            return False
        # End the stream's thread first, because it wakes helpers.
        self.submit(_END)
        self._thread.join()
        self._thread = None
        self.state.has_thread = 0
        self._helpers.end()
        self.state.has_helpers = 0
        return True

    def close(self) -> bool:
        """End the threads and unmap the ring. Returns False, having done nothing, if a kernel still runs."""
        if not self.rest():
            return False
        self._words.release()
        self._slots.release()
        self._ring.close()
        return True

    def _at(self, offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self.state) + offset)

    def _wait_for(self, count: int, poll: Poll | None) -> None:
        """Wait until the loop has finished `count` slots: poll for a moment, then sleep and poll in turn."""
        words = self._words
        # Phase 1: spin. A short kernel ends before a sleeping thread would wake.
        deadline = time.perf_counter() + self.spin_s
        while words[_COMPLETED] < count:
            if time.perf_counter() > deadline:
                break
            if self.yields:
                os.sched_yield()
        # Phase 2: sleep. `waiting` requests that the loop post `done`. Read the count again after setting `waiting`, so
        # that a launch that ended in between is not missed.
        words[_WAITING] = 1
        try:
            while words[_COMPLETED] < count:
                self._sleep()
                if poll is not None:
                    poll()
        finally:
            words[_WAITING] = 0

    def _sleep(self) -> None:
        """Sleep until the loop has finished a launch, or for one poll interval."""
        until_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + POLL_INTERVAL_NS
        _LIBC.sem_clockwait(self._done_at, time.CLOCK_MONOTONIC, ctypes.byref(_Timespec(*divmod(until_ns, NS_PER_S))))


def _give_up_after(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
