"""Processes, by /proc: their children, names and open descriptors, and how to stop one."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.waiting import wait_until

_HAS_CHILDREN_FILES = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
"""Whether /proc/PID/task/TID/children (proc(5)) is there, as some kernels and sandboxes have it not."""


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
    found = (process_info(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [info for info in found if info is not None]


def process_info(pid: int) -> ProcessInfo | None:
    # No Path: to make one takes longer than to read the file, and all processes of the host are read again and again.
    try:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return ProcessInfo(pid, int(parent), state, name)


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    info = process_info(pid)
    return info is not None and not info.is_zombie


def stop_process(pid: int) -> None:
    """Stop a process by SIGSTOP; returns once none of its threads runs, or it is gone.

    One thread takes the signal and stops the others: on a busy host they go on for as long as it waits for a processor.
    Raises ProcessLookupError if there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _thread_states(pid) <= set("TtZX"), "it is stopped", seen=lambda: _thread_states(pid))


def _thread_states(pid: int) -> set[str]:
    """The states of a process's threads, as proc(5) names them: none if the process is gone."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.add(stat.read_text().rpartition(") ")[2][0])
    return states


def descendants(pid: int) -> list[ProcessInfo]:
    """Children, their children and so on, zombies too."""
    found = (process_info(child) for child in _descendant_ids(pid))
    return [info for info in found if info is not None]


def own_descendants() -> frozenset[int]:
    """This process's children, their children and so on, zombies too, by id."""
    return _descendant_ids(os.getpid())


def _descendant_ids(pid: int) -> frozenset[int]:
    """Without the files of children, every process of the host is read."""
    found: set[int] = set()
    everybody = [] if _HAS_CHILDREN_FILES else processes()
    unread = [pid]
    while unread:
        pid = unread.pop()
        children = _children(pid) if _HAS_CHILDREN_FILES else [info.pid for info in everybody if info.parent == pid]
        found.update(children)
        unread += children
    return frozenset(found)


def _children(pid: int) -> list[int]:
    """Children of a process; none of one that is gone."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def marked(mark: str) -> list[ProcessInfo]:
    """The running processes that were started with `mark` in their environment, and their descendants.

    Only root can read a worker's environment: without root, this finds processes with a parent that was started so.
    """
    wanted = mark.encode()
    everybody = processes()
    found = {info.pid for info in everybody if wanted in _environment(info.pid)}
    return [info for info in everybody if info.pid in found or info.parent in found]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status (proc_pid_status(5))."""
    with open(f"/proc/{pid}/status") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


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
