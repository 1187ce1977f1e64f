"""Compares what a process holds before and after a test: descriptors, threads, child processes, signal handlers."""

import gc
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.remote.relay import SPARE_NAME
from helpers.daemon import FOLDER
from helpers.free_ports import HELD
from helpers.processes import descendants, marked, open_files, own_descendants, own_threads, process_info
from helpers.waiting import wait_until

SETTLE_S = 60.0
"""How long a test's threads may take to end, and its killed child processes to disappear."""

SHARED_FOLDERS: Final[set[Path]] = set()
"""Folders of daemons that several tests restart. A restarted daemon's processes are new, but are no leak."""

SHARED_PROCESSES: Final[set[int]] = set()
"""Processes that several tests share and that start others at any time; a browser starts one for each page."""


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


@dataclass(frozen=True)
class Holdings:
    files: dict[int, str] = field(default_factory=open_files)
    threads: dict[int, str] = field(default_factory=own_threads)
    children: frozenset[int] = field(default_factory=own_descendants)
    handlers: dict[str, Any] = field(default_factory=_handlers)

    def excess_over(self, before: "Holdings") -> str:
        """Describe everything that is held now and was not held before; "" if there is nothing."""
        files = {fd: to for fd, to in self.files.items() if before.files.get(fd) != to and fd not in HELD}
        threads = {number: name for number, name in self.threads.items() if number not in before.threads}
        if any(map(_is_pooled, before.threads.values())):
            # An event loop that a whole file shares may add a thread to its pool at any request.
            threads = {number: name for number, name in threads.items() if not _is_pooled(name)}
        children = {pid for pid in self.children - before.children if not _is_spare(pid, before.children)}
        if children:
            children -= {info.pid for folder in SHARED_FOLDERS for info in marked(f"{FOLDER}={folder}")}
            children -= {info.pid for pid in SHARED_PROCESSES for info in descendants(pid)}
        handlers = {name: handler for name, handler in self.handlers.items() if before.handlers[name] != handler}
        parts = [("descriptors", files), ("threads", threads), ("children", children), ("handlers", handlers)]
        return "; ".join(f"{what} left: {left}" for what, left in parts if left)


def _is_pooled(thread_name: str) -> bool:
    return thread_name.startswith("asyncio_")


def _is_spare(pid: int, before: frozenset[int]) -> bool:
    """Return whether a process is a spare relay of a gate that was running before the test."""
    info = process_info(pid)
    return info is not None and info.name == SPARE_NAME and info.parent in before


def check_for_leaks(before: Holdings) -> None:
    """Fail if this process holds more than before, even after a garbage collection and SETTLE_S.

    A garbage collection takes longer than most tests, so it runs only if more is held.
    """
    if not Holdings().excess_over(before):
        return
    gc.collect()
    left = ""

    def is_clean() -> bool:
        nonlocal left
        left = Holdings().excess_over(before)
        return not left

    try:
        wait_until(is_clean, "back to what was held before the test", SETTLE_S)
    except AssertionError:
        raise AssertionError(f"the test leaks: {left}") from None
