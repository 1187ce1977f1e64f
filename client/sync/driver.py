"""Runs procedures in the calling thread: poll() for sockets, sleep for pauses, a re-entrant lock for taking turns.

If a call is interrupted, a separate thread releases the object that the call may have made (`core.clean_ups`). No
Ctrl-C reaches these threads. The interrupted call waits for its thread, and a program's exit waits for all of them, for
at most CLEAN_UP_S each.
"""

import atexit
import inspect
import math
import os
import select
import time
from _thread import start_new_thread
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gpulease.client.core.clean_ups import CLEAN_UP_S, CleanUp
from gpulease.client.core.exchange import ask_once
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.waits import Locked, Procedure, Sleep, Step, Wait
from gpulease.client.errors import GpuLeaseError
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.spin_policy import spin_policy_of
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body
from gpulease.protocol.time_units import NS_PER_S

T = TypeVar("T")
R = TypeVar("R")

MAX_POLL_S: Final = 3600.0
"""Longest single poll, in seconds, because poll() takes milliseconds as a C int. A longer wait polls again."""

CONTROL_POLL_NS: Final = 2_000_000
"""Longest time to poll a control connection for a reply before the thread sleeps, in nanoseconds. Opening a region,
granting a prepared context and opening a session take less time, and a wake-up costs tens of microseconds."""

_CONTROL_POLL_NS: Final = spin_policy_of(None, CONTROL_POLL_NS).spin_ns

_polled_until_ns: Final = [0]
"""Time until which a thread polls; 0 while none does. Only one polls, because several would only take the interpreter's
lock from each other. This is not a lock: a thread that is interrupted just after it took a lock, or that a fork leaves
behind, would hold it forever."""

_CLEAN_UP_POLL_S: Final = 0.001
"""Pause between two checks that an object was given back, in seconds."""

due: Final[dict[CleanUp, None]] = {}
"""The objects that threads are giving back. An interrupt's handler adds an object before it starts the thread."""


def drive(procedure: Procedure[T]) -> T:
    """Run a procedure to its end in this thread and return its result.

    The traceback of an error starts here, because the procedure's frames do not help the caller, and would keep their
    locals alive.
    """
    answer: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            # A procedure yields a step to wait for. Send the step's result back in, or throw its error.
            step = procedure.send(answer) if thrown is None else procedure.throw(thrown)
            thrown = None
            answer = _WAIT_BY_STEP[type(step)](step)
        except StopIteration as done:
            result: T = done.value
            return result
        except BaseException as error:
            thrown = None  # its traceback refers to this frame
            if inspect.getgeneratorstate(procedure) is inspect.GEN_CLOSED:
                if isinstance(error, GpuLeaseError):
                    raise error.with_traceback(None)  # noqa: B904  # the same error, without the procedure's frames
                raise
            # The wait was interrupted (by a signal, KeyboardInterrupt). The procedure handles that, and may wait again
            # to clean up.
            thrown = error


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
        _wait_for_threads(lambda: clean_up in due)
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


def ask(op: Opcode, body: Body, address: str | None = None, reply_limit_s: float | None = None) -> Any:
    """Send one control request over a separate connection; return the body of the reply.

    Commands call this instead of opening a session, because the imports for sessions would take most of a command's
    time.

    Args:
        op: The opcode.
        body: The body of the request.
        address: The daemon's address; GPULEASE_ADDRESS or the default socket if None.
        reply_limit_s: Longest wait for the reply, in seconds; None for the operation's usual one.

    Raises the error in the daemon's reply, Disconnected or TimedOut.
    """
    return drive(ask_once(address_of(address), op, body, reply_limit_s))


def _wait(step: Wait) -> bool:
    channel = step.channel
    # The channel checks again before it sleeps, because bytes may have come since the procedure decided to wait.
    if not channel.doze(for_room=step.for_room):
        return True
    # Round up: a wait of 0.1 ms must not become a loop of polls that return at once.
    timeout_ms = math.ceil(min(step.timeout_s, MAX_POLL_S) * 1000)
    if step.for_room and channel.waits_for_room:
        poll = select.poll()
        poll.register(channel.sock, select.POLLIN | select.POLLOUT)
        return bool(poll.poll(timeout_ms))
    # Almost every wait is for incoming bytes, so the poll object for that is made once per channel.
    if channel.waiter is None:
        channel.waiter = _incoming(channel)
    if channel.is_polled and _poll(channel.waiter, step.timeout_s):
        return True
    return bool(channel.waiter(timeout_ms))


def _poll(waiter: Callable[[int], Any], timeout_s: float) -> bool:
    """Poll for bytes without sleeping, for a bounded time. Return False if none came, or if another thread polls."""
    now_ns = time.monotonic_ns()
    if not _CONTROL_POLL_NS or now_ns < _polled_until_ns[0]:
        return False
    try:
        until_ns = _polled_until_ns[0] = now_ns + min(_CONTROL_POLL_NS, int(timeout_s * NS_PER_S))
        # Each poll lets the program's other threads run.
        while not waiter(0):
            if time.monotonic_ns() >= until_ns:
                return False
        return True
    finally:
        _polled_until_ns[0] = 0


def _incoming(channel: Channel) -> Callable[[int], Any]:
    incoming = select.poll()
    incoming.register(channel.sock, select.POLLIN)
    return incoming.poll


def _sleep(step: Sleep) -> None:
    if step.until is None:
        time.sleep(step.seconds)
    else:
        # The pause ends as soon as another thread sets the event.
        step.until.wait(step.seconds)


def _locked(step: Locked) -> Any:
    # Drive the inner procedure here, in its own loop, so that an interrupt releases the lock.
    with step.lock:
        return drive(step.procedure)


_WAIT_BY_STEP: Final[dict[type[Step], Callable[[Any], Any]]] = {Wait: _wait, Sleep: _sleep, Locked: _locked}


def _wait_for_threads(is_unsettled: Callable[[], bool]) -> None:
    last = time.monotonic() + CLEAN_UP_S
    while is_unsettled() and time.monotonic() < last:
        time.sleep(_CLEAN_UP_POLL_S)


atexit.register(_wait_for_threads, lambda: bool(due))
# A child process has no such threads; its parent's threads continue.
os.register_at_fork(after_in_child=due.clear)
