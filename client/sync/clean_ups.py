"""Threads that give back the objects of interrupted calls (`core.clean_ups`). No Ctrl-C reaches these threads.

The interrupted call waits for its thread, and a program's exit waits for all of them, for at most CLEAN_UP_S each.
"""

import atexit
import os
import time
from _thread import start_new_thread
from collections.abc import Callable
from typing import Final, TypeVar

from gpulease.client.core.clean_ups import CLEAN_UP_S, CleanUp
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import drive

T = TypeVar("T")
R = TypeVar("R")

_POLL_S: Final = 0.001
"""Pause between two checks whether an object was given back, in seconds."""

due: Final[dict[CleanUp, None]] = {}
"""The objects that threads are giving back. The handler of an interrupt adds to it before it starts the thread."""


def drive_with_clean_up(clean_up: CleanUp, procedure: Procedure[T], make_result: Callable[[T], R]) -> R:
    """Drive a procedure, and return `make_result(result)`. If the call is interrupted, a thread settles `clean_up`."""
    try:
        result = make_result(drive(procedure))
        clean_up.is_settled = True
        return result
    except GpuLeaseError:
        clean_up.is_settled = True
        raise
    except BaseException:
        # No interrupt can come between these lines (`core.clean_ups`).
        due[clean_up] = None
        clean_up.is_due = True
        start_new_thread(settle, (clean_up,))
        # Wait, so that the object is given back before the next call. Another interrupt ends only this wait.
        _wait(lambda: clean_up in due)
        raise


def clean_up_in_thread(clean_up: CleanUp) -> None:
    """Give back an object that the program has dropped, in a thread.

    This is for finalizers, in which Python discards interrupts.
    """
    due[clean_up] = None
    clean_up.is_due = True
    start_new_thread(settle, (clean_up,))


def settle(clean_up: CleanUp) -> None:
    """Give back an object. Runs in a separate thread."""
    try:
        drive(clean_up.settle())
    finally:
        due.pop(clean_up, None)


def nothing(_: object) -> None:
    """The `make_result` of `drive_with_clean_up` for a result that is not needed."""


def _wait(is_unsettled: Callable[[], bool]) -> None:
    last = time.monotonic() + CLEAN_UP_S
    while is_unsettled() and time.monotonic() < last:
        time.sleep(_POLL_S)


atexit.register(_wait, lambda: bool(due))
# A child process has no such threads; those of its parent go on.
os.register_at_fork(after_in_child=due.clear)
