"""Waits for the answer of another process."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from gpulease.daemon.host.cancellation import cancel_all

T = TypeVar("T")


async def answer_within(answer: Awaitable[T], within_s: float) -> T:
    """Return an answer. Raises TimeoutError if there is none after `within_s`; then the answer has been cancelled.

    If this process is late, an answer that came in time is read in the same turn of the event loop in which the time
    is over. `asyncio.timeout` would discard it.
    """
    # A coroutine runs in a task of its own: the message that completes it wakes it before the time limit wakes this
    # function.
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait((task,), timeout=within_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            await cancel_all((task,))
