"""What Linux offers to make sure that no process outlives what it is for: prctl(2) and pidfd_open(2).

The daemon's threads: all that it ever needs are started when it starts.

A host that lets it have no more (setrlimit(2), RLIMIT_NPROC; a control group's pids.max) would else show itself in the
middle of leases: as a card that can't be looked at, whose sessions nobody weighs and whose memory nobody proves free.
"""

import ctypes
import io
import os
import resource
import select
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies. Exits at once if that has happened already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be reaped here."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def gain_no_privileges() -> None:
    """Let no exec of this process or its children gain privileges (no_new_privs)."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def never_dump() -> None:
    """Leave no core file, and let no other process of the same user trace this one or open its memory."""
    _prctl(PR_SET_DUMPABLE, 0)


def raise_descriptor_limit() -> None:
    """Use all the descriptors this process may have: the default of 1024 is for select(2), which nothing here uses."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_name(name: str) -> None:
    """Name this process for ps(1) and top(1); 15 bytes at most are kept."""
    _prctl(PR_SET_NAME, name.encode()[:15])


def exit_text(status: int) -> str:
    """A wait(2) status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Whether a process has ended, or does in time: its descriptor is readable from then on (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def name_of(pid: int) -> str:
    """What ps(1) calls a process; "" if there is none."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def started_ticks(pid: int) -> int:
    """When a process was started, in clock ticks since the host was (proc_pid_stat(5), field 22); 0 if there is none.

    With its number this tells it from every other process of one boot of the host.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the name, which may hold spaces and parentheses, begins field 3.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ProcessLookupError):
        return 0


class _HeedlessText(io.TextIOBase):
    """Text to a descriptor, lost where nobody takes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = memoryview(text.encode(errors="backslashreplace"))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            pass
        return len(text)


def survive_stderr() -> None:
    """Let what this process says be lost, rather than the process, when the terminal or pipe it says it to is gone."""
    sys.stderr = _HeedlessText(2)


LOOKING_THREADS: Final = 32
"""For what blocks: looks at cards, files read anew. So many looks share one listing of a card's processes; one that
hangs keeps one of them."""

STACK_BYTES: Final = 1 << 20
"""Of each: 32 MiB together, where a host that does not overcommit would count the 8 MiB that are usual 32 times."""

HINT: Final = (
    "Let the daemon have more: TasksMax= and LimitNPROC= of its service, `ulimit -u`, pids.max of its control group,"
    " or memory for their stacks."
)


class NoThread(Exception):
    """A thread that the daemon can't do without can't be started; a later start may find it otherwise.

    Attributes:
        hint: What the operator can do, a sentence.
        status: The exit status.
    """

    def __init__(self) -> None:
        super().__init__("this host lets the daemon start no more threads")
        self.hint = HINT
        self.status = os.EX_UNAVAILABLE


def start_thread(thread: threading.Thread) -> None:
    """Start it. Raises NoThread."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise NoThread from None


def thread_pool(size: int = LOOKING_THREADS) -> ThreadPoolExecutor:
    """A pool whose threads are all there: it never starts another. Raises NoThread."""
    pool = ThreadPoolExecutor(size, "gpulease-look")
    together = threading.Barrier(size)
    usual_bytes = threading.stack_size(STACK_BYTES)
    try:
        # One that waits for the others is not idle, so each has the next one started.
        wait([pool.submit(together.wait) for _ in range(size)])
    except (RuntimeError, MemoryError):
        together.abort()
        pool.shutdown(wait=False)
        raise NoThread from None
    finally:
        threading.stack_size(usual_bytes)
    return pool
