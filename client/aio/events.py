"""A lease's events for asyncio: an async iterator, and a task that calls back on a warning."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from gpulease.client.aio.driver import drive, task_of
from gpulease.client.engine.events import EventStream, LeaseEvent, warnings
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.events import OnWarning


class LeaseEvents(AsyncIterator[LeaseEvent]):
    """What a lease goes through: `async for event in lease.events():`. See gpulease.client.LeaseEvents."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._is_open = False
        weakref.finalize(self, stream.close)

    async def __anext__(self) -> LeaseEvent:
        if not self._is_open:
            self._is_open = True
            await drive(self._stream.open())
        event = await drive(self._stream.next())
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """Hear no more; a task that waits for an event stops."""
        self._stream.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stream.wake()
        self._stream.close()


class WarningWatch:
    """Calls back from a task whenever a lease is warned of its end; see gpulease.client.WarningWatch."""

    def __init__(self, stream: EventStream, on_warning: OnWarning) -> None:
        self.error: GpuLeaseError | None = None
        self._stream = stream
        self._task = task_of(self._run(on_warning))

    async def stop(self) -> None:
        """Call back no more."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()  # raises what `on_warning` raised

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()

    async def _run(self, on_warning: OnWarning) -> None:
        try:
            await drive(warnings(self._stream, on_warning))
        except GpuLeaseError as error:
            self.error = error
