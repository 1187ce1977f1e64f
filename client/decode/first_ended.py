"""Waits for the first of several awaitables, such as a request's computation and its caller's disconnection."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def first_ended(*works: Awaitable[Any]) -> list[asyncio.Future[Any] | None]:
    """Wait until at least one has ended, then cancel the others and wait for them to end.

    Returns for each awaitable its future, with its result or exception, or None if it was cancelled here.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task if task in done else None for task in tasks]


async def answer_within(answer: Awaitable[T], within_s: float) -> T:
    """Return the answer of another process. Raises TimeoutError if there is none after `within_s`.

    If this process is late, an answer that came in time is read in the same turn of the event loop in which the time
    is over. `asyncio.timeout` would discard it.
    """
    answered, _ = await first_ended(answer, asyncio.sleep(within_s))
    if answered is None:
        raise TimeoutError
    result: T = answered.result()
    return result
