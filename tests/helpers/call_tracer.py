"""Records which of our modules run, in this process and in the Python processes that it starts."""

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

FOLDER: Final = "GPULEASE_TEST_CALLS"

UNTRACED: Final = frozenset({"Runtime._report", "CardTimes._on_timer", "Zygote._become_worker"})
"""Functions that are left out, with all that they call: the broker's report about an event to the log, the metrics and
the subscribers, after the event's effects; its samples of the cards' time, the next of which follows an acquire at
once; and a worker's life, from its fork on."""

_BEGINNING: Final = "import sys; sys.path.append({tests!r}); from helpers.call_tracer import trace; trace()"


class CallTracer:
    """Traces this process and all Python processes that are started from now on, in periods.

    Args:
        folder: An empty folder. It has the number of the period, 0 between periods, and a file for each process.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._number = 0
        self._period = folder / "period"
        self._period.write_bytes(b"\0")
        # Python imports this module at each start of a process.
        (folder / "sitecustomize.py").write_text(_BEGINNING.format(tests=str(Path(__file__).parents[1])))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        monkeypatch.setenv(FOLDER, str(folder))

    @contextmanager
    def traced(self) -> Iterator[set[str]]:
        """Yield a set, which contains the modules that ran during the block once the block has ended."""
        modules: set[str] = set()
        self._number += 1
        self._set_period(self._number)
        fd = trace()
        try:
            yield modules
        finally:
            sys.setprofile(None)
            os.close(fd)
            self._set_period(0)
        for path in self._folder.glob("calls-*"):
            lines = [line.split() for line in path.read_text().splitlines()]
            modules |= {module for period, module in lines if int(period) == self._number}

    def _set_period(self, number: int) -> None:
        with self._period.open("r+b") as file:
            file.write(bytes([number]))


def trace() -> int:
    """Trace the calls of this thread from now on. Returns the descriptor of the process's file."""
    folder = Path(os.environ[FOLDER])
    fd = os.open(folder / f"calls-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    with (folder / "period").open("rb") as file:
        period = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    untraced: FrameType | None = None
    written: set[tuple[int, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal untraced
        if untraced is not None:
            if event == "return" and frame is untraced:
                untraced = None
            return
        if event != "call" or not (number := period[0]):
            return
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if function in UNTRACED:
            untraced = frame
        elif "/gpulease/" in path and (number, path) not in written:
            written.add((number, path))
            os.write(fd, f"{number} {path.rpartition('/gpulease/')[2]}\n".encode())

    sys.setprofile(note)
    return fd
