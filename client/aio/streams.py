"""Streams of an asyncio session."""

import asyncio
from types import TracebackType
from typing import Self

from gpulease.client.aio.driver import drive, drive_holding, undisturbed
from gpulease.client.core.streams import EventHandle, StreamHandle, Streams


class Event(EventHandle):
    """The time at which a stream had run all that it held, like `gpulease.client.Event`."""

    __slots__ = ()

    async def elapsed_ms(self, end: EventHandle) -> float:
        """Wait for this event and a later one, like `gpulease.client.Event.elapsed_ms`."""
        return await undisturbed(drive(self._streams.elapsed_ms(self, end)))


class Stream(StreamHandle):
    """An order of launches and copies, like `gpulease.client.Stream`. Made by `session.stream()`."""

    __slots__ = ()

    async def sync(self) -> None:
        """Wait until all that it holds has ended, like `gpulease.client.Stream.sync`."""
        await undisturbed(drive(self.streams("sync").sync_one(self)))

    async def wait_for(self, other: StreamHandle | None) -> None:
        """Put what comes next behind all that `other` holds now, like `gpulease.client.Stream.wait_for`."""
        await undisturbed(drive(self.streams("wait_for").wait_for(self, other)))

    async def event(self) -> Event:
        """Take the time at which it will have run all that it holds now, like `gpulease.client.Stream.event`."""
        return await undisturbed(drive(self.streams("event").record(self, Event)))

    async def close(self) -> None:
        """Free it now, like `gpulease.client.Stream.close`."""
        if self.owner is not None:
            await undisturbed(drive(self.streams("close").destroy(self)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.owner is not None:
                await fence(self.streams("sync"), self)
        finally:
            self.drop()


async def fence(streams: Streams, stream: Stream | None = None) -> None:
    """Wait for a session's last work, or for one stream's, and raise what failed in it (`GpuSession`)."""
    limit = streams.operations.fence_limit()
    if limit is None:
        return
    lock = streams.attachment.lock
    try:
        async with asyncio.timeout(limit.remaining_s()):
            await lock.acquire()
    except TimeoutError:
        raise limit.error() from None
    await undisturbed(drive_holding(lock, streams.fence(limit, stream)))
