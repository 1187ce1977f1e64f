"""The threads that share the blocks of a launch: the stream's, and helpers beside it that stay in native code too.

Helpers sleep while there is nothing to share. The stream's thread wakes them if a launch takes longer than waking does,
going by how long the kernel's blocks took the last time, and by those it has run itself meanwhile (native/team.ll).
"""

import ctypes
import os
import threading

from gpulease.daemon.drivers.cpu.limits import HELPER_YIELDS, MAX_HOST_THREADS, STREAM_STACK_BYTES, WAKE_NS
from gpulease.daemon.drivers.cpu.native.layout import Team
from gpulease.daemon.drivers.interface import DriverError
from gpulease.daemon.native.compiler import NativeCode

# How many host threads run a worker's blocks, at most; an operator's setting.
THREADS_VARIABLE = "GPULEASE_CPU_THREADS"

_LIBC = ctypes.CDLL(None)


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


def start_thread(code: NativeCode, function: str, argument: int, name: str) -> threading.Thread:
    """A thread that runs a native function of one argument, without Python's lock, with room for a kernel's calls."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address(function))
    # A daemon: a kernel that never ends must not keep the process from ending.
    thread = threading.Thread(target=run, args=(argument,), name=name, daemon=True)
    previous = threading.stack_size(STREAM_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(previous)
    return thread


class Helpers:
    """The helpers of one stream; none is there until `start`.

    Args:
        places: Address of the environments that blocks run in.
        hosts: How many threads are to run blocks, the stream's among them.
    """

    def __init__(self, places: int, hosts: int) -> None:
        self._count = hosts - 1
        self._threads: list[threading.Thread] = []
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
        for number in range(self._count):
            try:
                thread = start_thread(code, "run_helper", self.address, f"gpulease-helper-{number}")
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
