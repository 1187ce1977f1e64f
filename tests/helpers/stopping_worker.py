"""A zygote whose workers each stop themselves once, at one step of parking, as if by SIGSTOP.

As a program, it takes a zygote's arguments and the path of a file. Each worker stops at the step that the file names
when the worker is forked, if it names one.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.host.copy_ring import RingEnd
from gpulease.daemon.ptx import parked_memory
from gpulease.daemon.ptx.memory import MemoryArena
from gpulease.daemon.ptx.parked_memory import ParkedMemory
from gpulease.daemon.session import server
from gpulease.daemon.session.image import SessionParts
from gpulease.daemon.session.parking import SessionParking
from gpulease.daemon.session.server import SessionServer
from gpulease.daemon.zygote import __main__ as zygote

PARK_STEPS: Final = ("ordered", "copying", "copied", "moved")
RETURN_STEPS: Final = ("wanted", "returning", "copying back", "returned")
STEPS: Final = (*PARK_STEPS, *RETURN_STEPS)
LEAVE_STEPS: Final = ("leaving", "imaged")
RING_STEP: Final = "copying through a ring"
ARRIVE_STEPS: Final = ("arriving", "adopting", "adopted", "returned")
LEND_STEPS: Final = ("ordered", "moved", "lending", "leaving", "imaged")
"""Steps of a direct move in the worker that lends its pages."""
BORROW_STEPS: Final = ("arriving", "adopting", "adopted", "copying back", "returned")
"""Steps of a direct move in the worker to which the pages are lent."""

# The broker's state changes only with a worker's messages, and what a dead worker held goes with it. So a worker's end
# has the same effect in all steps between two messages. Of these, one is here.
KILL_STEPS: Final = ("copying", "moved", "wanted", "copying back")
LEND_KILL_STEPS: Final = ("ordered", "lending", "imaged")
BORROW_KILL_STEPS: Final = ("arriving", "adopted", "returned")
MOVE_KILL_STEPS: Final = ("leaving", "imaged", "arriving", "returned")
"""Of LEAVE_STEPS and ARRIVE_STEPS."""


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_around(of: Any, name: str, *, before: bool) -> None:
    """Make a function of a class or module stop its process at its first call, before or after its work."""
    method: Callable[..., Any] = getattr(of, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        setattr(of, name, method)
        if before:
            stop()
        answer = method(*arguments, **options)
        if not before:
            stop()
        return answer

    setattr(of, name, stopping)


def stop_in_copy(name: str) -> None:
    """Make a method of the parked memory stop the process when half of its copies are done."""
    method, steps = getattr(ParkedMemory, name), parked_memory._steps

    def copying(*arguments: Any, **options: Any) -> Any:
        setattr(ParkedMemory, name, method)
        copies = 0

        def stopping(size_bytes: int) -> Iterator[tuple[int, int]]:
            nonlocal copies
            copies += 1
            if copies == 2:
                stop()
            yield from steps(size_bytes)

        parked_memory._steps = stopping
        try:
            return method(*arguments, **options)
        finally:
            parked_memory._steps = steps

    setattr(ParkedMemory, name, copying)


def stop_at(step: str) -> None:
    match step:
        case "ordered":
            stop_around(SessionParking, "_park", before=True)
        case "copying":
            stop_in_copy("park")
        case "copied":
            stop_around(MemoryArena, "discard_all", before=True)
        case "moved":
            stop_around(SessionParking, "_enter", before=True)
        case "lending":
            stop_in_copy("lend")
        case "leaving":
            stop_around(server, "send_image", before=True)
        case "imaged":
            stop_around(server, "send_image", before=False)
        case "arriving":
            stop_around(SessionServer, "_adopt", before=True)
        case "adopting":
            stop_around(SessionParts, "restore", before=True)
        case "adopted":
            stop_around(SessionServer, "_take_over", before=False)
        case "wanted":
            stop_around(SessionParking, "want", before=False)
        case "returning":
            stop_around(SessionParking, "bring_back", before=True)
        case "copying back":
            stop_in_copy("unpark")
        case "copying through a ring":
            stop_around(RingEnd, "advance", before=False)
        case "returned":
            stop_around(ParkedMemory, "unpark", before=False)


if __name__ == "__main__":
    named = Path(sys.argv.pop())
    os.register_at_fork(after_in_child=lambda: stop_at(named.read_text()))
    sys.exit(zygote.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:])))
