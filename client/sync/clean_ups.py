"""Threads that give back what interrupted calls have made (`core.clean_ups`): no Ctrl-C reaches them.

The interrupted call waits for its thread, and the end of a program for all of them, at most CLEAN_UP_S each.
"""

import atexit
import os
import time
from _thread import start_new_thread
from collections.abc import Callable
from typing import Final, TypeVar

from gpulease.client.core.clean_ups import CLEAN_UP_S, Owed
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import drive

T = TypeVar("T")
R = TypeVar("R")

_POLL_S: Final = 0.001
"""Pause between two checks whether something was given back, in seconds."""

due: Final[dict[Owed, None]] = {}
"""What threads are giving back. The handler of an interrupt adds to it before it starts the thread."""


def drive_owing(owed: Owed, procedure: Procedure[T], made: Callable[[T], R]) -> R:
    """Drive a procedure and return what `made` makes of its result; a thread settles what an interrupted call owes."""
    try:
        result = made(drive(procedure))
        owed.is_settled = True
        return result
    except GpuLeaseError:
        owed.is_settled = True
        raise
    except BaseException:
        # No interrupt can come between this and the thread's start: see `core.clean_ups`.
        due[owed] = None
        owed.is_due = True
        start_new_thread(settle, (owed,))
        # The next call finds it given back. Another interrupt ends this wait, and nothing else.
        _wait(lambda: owed in due)
        raise


def give_back(owed: Owed) -> None:
    """Have a thread give back what the program has dropped. For finalizers, in which Python discards interrupts."""
    due[owed] = None
    owed.is_due = True
    start_new_thread(settle, (owed,))


def settle(owed: Owed) -> None:
    """Give back what is owed; runs in a thread of its own."""
    try:
        drive(owed.settle())
    finally:
        due.pop(owed, None)


def nothing(_: object) -> None:
    """What is made of a result that is not needed."""


def _wait(is_unsettled: Callable[[], bool]) -> None:
    last = time.monotonic() + CLEAN_UP_S
    while is_unsettled() and time.monotonic() < last:
        time.sleep(_POLL_S)


atexit.register(_wait, lambda: bool(due))
# The threads stay with the parent process.
os.register_at_fork(after_in_child=due.clear)
