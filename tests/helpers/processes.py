"""Processes, read from /proc: their children, names and open descriptors, and how to stop one."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helpers.waiting import wait_until

_HAS_CHILDREN_FILES = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
"""Whether the files /proc/PID/task/TID/children (proc(5)) exist. Some kernels and sandboxes lack them."""

_CHUNK_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    parent: int
    state: str
    name: str

    @property
    def is_zombie(self) -> bool:
        """Whether the process has ended and its parent has not yet waited for it."""
        return self.state == "Z"


def processes() -> list[ProcessInfo]:
    found = (process_info(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [info for info in found if info is not None]


def process_info(pid: int) -> ProcessInfo | None:
    try:
        text = _content(f"/proc/{pid}/stat").decode()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return ProcessInfo(pid, int(parent), state, name)


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    info = process_info(pid)
    return info is not None and not info.is_zombie


def stop_process(pid: int) -> None:
    """Stop a process with SIGSTOP. Returns when none of its threads runs, or the process is gone.

    One thread receives the signal and stops the others. On a busy host that thread may wait for a processor; meanwhile
    the others continue. Raises ProcessLookupError if there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _thread_states(pid) <= set("TtZX"), "it is stopped", seen=lambda: _thread_states(pid))


def continue_process(pid: int) -> None:
    """Continue a stopped process. Has no effect if it is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _thread_states(pid: int) -> set[str]:
    """Return the states of a process's threads, as proc(5) names them; none if the process is gone."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.add(stat.read_text().rpartition(") ")[2][0])
    return states


def descendants(pid: int) -> list[ProcessInfo]:
    """Return children, their children and so on, zombies included."""
    found = (process_info(child) for child in _descendant_ids(pid))
    return [info for info in found if info is not None]


def own_descendants() -> frozenset[int]:
    """Return the ids of this process's children, their children and so on, zombies included."""
    return _descendant_ids(os.getpid())


def _descendant_ids(pid: int) -> frozenset[int]:
    """Return the ids of all descendants. Without the children files, this reads every process of the host."""
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
    """Return a process's children; none if the process is gone."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _content(f"/proc/{pid}/task/{thread}/children").split())
    return found


def marked(mark: str) -> list[ProcessInfo]:
    """Return the running processes that have `mark` in their environment, and their children, zombies included.

    Only root can read a worker's environment. Without root, workers are found as descendants of their parents.
    """
    wanted = mark.encode()
    found = {int(entry) for entry in os.listdir("/proc") if entry.isdigit() and wanted in _environment(entry)}
    # Reading a process's state takes longer than reading its environment, so read only the states of these.
    for pid in tuple(found):
        found.update(
            _children(pid) if _HAS_CHILDREN_FILES else (info.pid for info in processes() if info.parent == pid)
        )
    return [info for info in map(process_info, sorted(found)) if info is not None]


def _environment(pid: str) -> list[bytes]:
    try:
        return _content(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return []


def _content(path: str) -> bytes:
    """Return the content of a file in /proc.

    Reads it with system calls, because `open` and Path take longer than they do, and the leak check reads a file for
    each thread of each daemon before and after every test.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = chunk = os.read(fd, _CHUNK_BYTES)
        # The kernel returns at most a page in each call. Only an empty chunk is the end.
        while chunk:
            chunk = os.read(fd, _CHUNK_BYTES)
            content += chunk
        return content
    finally:
        os.close(fd)


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status (proc_pid_status(5))."""
    with open(f"/proc/{pid}/status") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def open_files(pid: int | str = "self") -> dict[int, str]:
    """Return what each file descriptor of a process refers to."""
    files = {}
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        try:
            files[int(entry)] = os.readlink(f"{folder}/{entry}")
        except FileNotFoundError:
            continue  # The descriptor with which the folder itself was read.
    return files


def own_threads() -> dict[int, str]:
    """Return the names of this process's threads by kernel id, including threads that native code started."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return {int(entry): names.get(int(entry), "not Python's") for entry in os.listdir("/proc/self/task")}


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in user and system mode.

    Reads the process's CPU clock, whose id is computed like that of clock_getcpuclockid(3).
    """
    return time.clock_gettime(~pid << 3 | 2)
