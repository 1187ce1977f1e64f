"""What /proc says about processes: their children, names and open descriptors."""

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    parent: int
    state: str
    name: str

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and its parent has not waited for it."""
        return self.state == "Z"


def processes() -> list[ProcessInfo]:
    found = (process_info(int(entry)) for entry in os.listdir(_PROC) if entry.isdigit())
    return [info for info in found if info is not None]


def process_info(pid: int) -> ProcessInfo | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return ProcessInfo(pid, int(parent), state, name)


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    info = process_info(pid)
    return info is not None and not info.is_zombie


def descendants(pid: int) -> list[ProcessInfo]:
    """Children, their children and so on, zombies too."""
    everybody = processes()
    found: list[ProcessInfo] = []
    parents = {pid}
    while children := [info for info in everybody if info.parent in parents]:
        found += children
        parents = {info.pid for info in children}
    return found


def own_descendants() -> frozenset[int]:
    """This process's children, their children and so on, zombies too, by id.

    /proc/PID/task/TID/children (proc(5)) costs a read a thread; without it, as in some kernels and sandboxes, every
    process of the host is looked at.
    """
    found: set[int] = set()
    unread = [os.getpid()]
    try:
        while unread:
            pid = unread.pop()
            with suppress(ProcessLookupError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                        children = [int(child) for child in file.read().split()]
                    found.update(children)
                    unread += children
    except FileNotFoundError:
        return frozenset(info.pid for info in descendants(os.getpid()))
    return frozenset(found)


def marked(mark: str) -> list[ProcessInfo]:
    """The running processes that were started with `mark` in their environment, and their descendants.

    Only root can read a worker's environment: without root, this finds processes whose parent was started so.
    """
    wanted = mark.encode()
    everybody = processes()
    found = {info.pid for info in everybody if wanted in _environment(info.pid)}
    return [info for info in everybody if info.pid in found or info.parent in found]


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def open_files(pid: int | str = "self") -> dict[int, str]:
    """The file descriptors of a process, each with what it leads to."""
    files = {}
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        try:
            files[int(entry)] = os.readlink(f"{folder}/{entry}")
        except FileNotFoundError:
            continue  # the one the folder itself was read by
    return files


def own_threads() -> dict[int, str]:
    """The threads of this process by their kernel id, those that native code started too."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return {int(entry): names.get(int(entry), "not Python's") for entry in os.listdir("/proc/self/task")}


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used, user's and system's: its CPU clock, as clock_getcpuclockid(3) makes its id."""
    return time.clock_gettime(~pid << 3 | 2)
