"""Waits for the answer of another process."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def answer_within(answer: asyncio.Future[T], within_s: float) -> T:
    """Return an answer. Raises TimeoutError, and cancels the future, if there is none after `within_s`.

    If this process is late, an answer that came in time is read in the same turn of the event loop in which the time
    is over. `asyncio.timeout` would discard it.
    """
    done, _ = await asyncio.wait((answer,), timeout=within_s)
    if not done:
        answer.cancel()
        raise TimeoutError
    return answer.result()
