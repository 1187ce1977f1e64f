"""A task of the event loop that calls one function repeatedly."""

import asyncio
from collections.abc import Awaitable, Callable


class PeriodicTask:
    """Calls a function, pauses, and calls it again, until it is stopped. Two calls never overlap.

    Args:
        call: The coroutine function to call.
        pause_s: Seconds from the end of one call to the next, or a function that returns them before each pause.
        on_fault: Called with an exception that `call` raised, while it is being handled. The task continues.
            Without `on_fault` the first exception ends the task.
    """

    def __init__(
        self,
        call: Callable[[], Awaitable[None]],
        pause_s: float | Callable[[], float],
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        self._call = call
        self._pause_s = pause_s
        self._on_fault = on_fault
        self._task: asyncio.Task[None] | None = None

    def start(self, *, at_once: bool = False) -> None:
        """Begin on the running loop, with a pause or, if `at_once`, with a call. A second start does nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(at_once))

    async def stop(self) -> None:
        """Cancel the task and wait until it has ended. Does nothing if the task never started."""
        if self._task is not None:
            self._task.cancel()
            # Raise nothing: the task ends with CancelledError, or has already ended with an exception of `call`.
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, at_once: bool) -> None:
        if at_once:
            await self._call_once()
        while True:
            # Evaluated before each pause, which may be random or depend on the last call.
            await asyncio.sleep(self._pause_s() if callable(self._pause_s) else self._pause_s)
            await self._call_once()

    async def _call_once(self) -> None:
        try:
            await self._call()
        except Exception as error:
            if self._on_fault is None:
                raise
            self._on_fault(error)
