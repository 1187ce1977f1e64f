"""Background tasks that an owner starts, and cancels all together when it ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """The background tasks of one owner. The owner must await `stop`, or tasks would outlive it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task. Nothing awaits it before `stop`, so the coroutine must handle its own errors."""
        task = asyncio.create_task(work)
        # asyncio itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancel the tasks that are running, and wait until they have ended. Their errors are dropped."""
        tasks = list(self._tasks)
        # Cancel all before waiting, so that they end in parallel.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until the tasks have ended by themselves. Their errors are dropped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
