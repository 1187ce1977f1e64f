"""The threads that share the blocks of a launch: the stream's, and helpers beside it that stay in native code too.

Helpers sleep while there is nothing to share. The stream's thread wakes them if a launch takes longer than waking does,
going by how long the kernel's blocks took the last time, and by those it has run itself meanwhile (native/team.ll).
"""

import ctypes
import os

from gpulease.daemon.drivers.cpu.limits import HELPER_YIELDS, MAX_HOST_THREADS, STREAM_STACK_BYTES, WAKE_NS
from gpulease.daemon.drivers.cpu.native.layout import Team
from gpulease.daemon.drivers.interface import DriverError
from gpulease.daemon.native.compiler import NativeCode

# How many host threads run a worker's blocks, at most; an operator's setting.
THREADS_VARIABLE = "GPULEASE_CPU_THREADS"

_LIBC = ctypes.CDLL(None)

# No less than sizeof(pthread_attr_t) on any machine: 56 on x86-64, 64 on AArch64.
_ATTRIBUTES_BYTES = 128


def host_threads() -> int:
    """How many threads may run blocks: as many as this process has cores, or the operator allows, or are useful.

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
    for the next. That of a joined one goes back to the host where glibc keeps none (see daemon/worker/heap.py).

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
