"""Processes and threads of the daemon: prctl(2), pidfd_open(2), /proc, and the start of a thread."""

import contextlib
import ctypes
import io
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Final

from gpulease.daemon.host.cannot_start import CannotStart

# Options of prctl(2), by their names in linux/prctl.h.
PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
"""Loaded once, because a worker sets its name for each lease, and loading takes six times as long as the call."""


def prctl(option: int, *arguments: int | bytes) -> int:
    """Change or query this process's attributes (prctl(2)). Raises OSError."""
    # Give each argument its type: ctypes would pass a plain int as 32 bits, and the upper half would be undefined.
    # prctl(2) demands zeros for the arguments that an option does not use.
    values = (
        ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
        for value in (*arguments, 0, 0, 0, 0)[:4]
    )
    result: int = _LIBC.prctl(option, *values)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
    return result


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies. Exits at once if the parent is already dead."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before the call, no signal comes.
    if os.getppid() != parent_pid:
        # Do not use sys.exit: nothing that belongs to the parent may be flushed or cleaned up here.
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants when their own parent dies, so that this process can reap them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def gain_no_privileges() -> None:
    """Let no exec of this process or its children gain privileges (no_new_privs)."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def never_dump() -> None:
    """Leave no core file, and let no other process of the same user trace this one or open its memory.

    A change of user and an exec undo it (prctl(2), PR_SET_DUMPABLE). Raises OSError.
    """
    prctl(PR_SET_DUMPABLE, 0)


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the hard limit. The default, 1024, is for select(2), which nothing here uses."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def set_name(name: str) -> None:
    """Name this process for ps(1) and top(1), which show at most 15 bytes."""
    prctl(PR_SET_NAME, name.encode()[:15])


def exit_text(status: int) -> str:
    """Return how a process ended, by its wait(2) status, as a clause after its name: "was killed by SIGKILL"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def reaped_children() -> Iterator[tuple[int, int]]:
    """Reap all children that have ended: yields each one's process id and wait(2) status.

    One SIGCHLD may stand for several children, so this ends only when no further child has ended.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Return whether a process has ended, or ends within the time: its pidfd then becomes readable (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def name_of(pid: int) -> str:
    """Return a process's name, as ps(1) shows it; "" if no such process exists."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def started_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since the host's boot (proc_pid_stat(5), field 22).

    Process id and start together identify one process of a boot. Returns 0 if no such process exists.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Field 3 begins after the name, which may hold spaces and parentheses.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ProcessLookupError):
        return 0


MIN_POLL_CORES: Final = 4
"""Number of cores that a process needs to poll for another process's messages. With fewer, it would take the other's
core."""


def has_cores_to_poll() -> bool:
    """Return whether this process may poll for a moment, instead of sleeping, until another process sends."""
    return len(os.sched_getaffinity(0)) >= MIN_POLL_CORES


_PF_EXITING: Final = 0x4
"""Flag of a process that is in exit(2), as in the kernel's include/linux/sched.h."""


def is_exiting(pid: int) -> bool:
    """Return whether a process is ending (proc_pid_stat(5), field 9): a driver may take seconds to free its memory."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & _PF_EXITING)
    except (OSError, ProcessLookupError):
        return False


class _LossyText(io.TextIOBase):
    """Writes text to a descriptor, and drops it if the reader is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # A file's name may have bytes that are not UTF-8: escape them rather than lose the message.
        data = memoryview(text.encode(errors="backslashreplace"))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            pass
        # Lost bytes count as written, because the caller would otherwise try again.
        return len(text)


def survive_stderr() -> None:
    """When the terminal or pipe is gone, drop what this process writes to standard error, instead of failing."""
    sys.stderr = _LossyText(2)


HINT: Final = (
    "Raise its limits: TasksMax= and LimitNPROC= of its service, `ulimit -u`, pids.max of its control "
    "group, or memory for the threads' stacks."
)


class NoThread(CannotStart):
    """A thread that the daemon needs can't be started; a later start of the daemon may succeed."""

    def __init__(self) -> None:
        super().__init__("this host does not allow the daemon to start more threads", HINT)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; the host's refusal (RuntimeError or MemoryError) becomes NoThread, with a hint."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise NoThread from None
