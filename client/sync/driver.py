"""How the blocking face waits: poll for sockets, sleep for pauses, a re-entrant lock for turns."""

import math
import select
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gpulease.client.engine.steps import Locked, Procedure, Sleep, Step, Wait
from gpulease.client.errors import GpuLeaseError
from gpulease.client.transport.channel import Channel

T = TypeVar("T")

MAX_POLL_S: Final = 3600.0
"""Longest single poll; its milliseconds must fit a C int. Longer waits poll again."""


def drive(procedure: Procedure[T]) -> T:
    """Run a procedure to its end in this thread. The traceback of what it raises begins here."""
    try:
        step = procedure.send(None)
        while True:
            try:
                answer = _WAYS[type(step)](step)
            except BaseException as error:
                step = procedure.throw(error)
            else:
                step = procedure.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result
    except GpuLeaseError as error:
        raise error.with_traceback(None)  # noqa: B904  # the same error, without the procedure's frames


def _wait(step: Wait) -> bool:
    channel = step.channel
    if not channel.doze(for_room=step.for_room):
        return True
    timeout_ms = math.ceil(min(step.timeout_s, MAX_POLL_S) * 1000)
    if step.for_room and channel.waits_for_room:
        both = select.poll()
        both.register(channel.sock, select.POLLIN | select.POLLOUT)
        return bool(both.poll(timeout_ms))
    if channel.waiter is None:
        channel.waiter = _incoming(channel)
    return bool(channel.waiter(timeout_ms))


def _incoming(channel: Channel) -> Callable[[int], Any]:
    incoming = select.poll()
    incoming.register(channel.sock, select.POLLIN)
    return incoming.poll


def _sleep(step: Sleep) -> None:
    if step.until is None:
        time.sleep(step.seconds)
    else:
        step.until.wait(step.seconds)


def _locked(step: Locked) -> Any:
    with step.lock:
        return drive(step.procedure)


_WAYS: Final[dict[type[Step], Callable[[Any], Any]]] = {Wait: _wait, Sleep: _sleep, Locked: _locked}
