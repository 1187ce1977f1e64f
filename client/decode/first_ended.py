"""Waits for the first of several awaitables, such as the computation of a request and the caller's disconnection."""

import asyncio
from collections.abc import Awaitable
from typing import Any


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
