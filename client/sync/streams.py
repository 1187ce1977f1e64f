"""Streams of a blocking session."""

from types import TracebackType
from typing import Self

from gpulease.client.core.streams import EventHandle, StreamHandle, Streams
from gpulease.client.sync.driver import drive


class Event(EventHandle):
    """The time at which a stream had run all that it held; made by `Stream.event`. The last reference frees it."""

    __slots__ = ()

    def elapsed_ms(self, end: EventHandle) -> float:
        """Wait for this event and a later one; the milliseconds between, by the card's clock.

        Raises InvalidRequest if `end` came first, and the failure of a kernel before it.
        """
        return drive(self._streams.elapsed_ms(self, end))


class Stream(StreamHandle):
    """An order of launches and copies; made by `GpuSession.stream`, passed to `launch`, `mem_write` and `mem_read`.

    A stream runs its launches and copies in the order in which they were put there. Only `wait_for` orders two streams.
    So copies and kernels in different streams may run at the same time.
    `GpuSession.sync` waits for all streams, and so does `module_unload`. The session's next operation that has a reply
    raises a failure in any stream.

    A copy of an array of `GpuSession.empty` in a stream has only begun when the call returns: leave the array alone
    until the stream is waited for. A copy of any other memory waits for that stream and is done when its call returns.

    Dropping the last reference frees a stream, like a buffer; the work it holds still runs. Leaving its `with` block
    waits for that work and raises what failed, as leaving a session's does. A block left by an exception waits for
    nothing.
    """

    __slots__ = ()

    def sync(self) -> None:
        """Wait until all that it holds has ended. Raises SyncFailed or LaunchFailed, naming the kernel."""
        streams = self.streams("sync")
        with streams.attachment.lock:
            rest = streams.sync_one_at_once(self)
            if rest is not None:
                drive(rest)

    def wait_for(self, other: StreamHandle | None) -> None:
        """Put what comes next behind all that `other` holds now; None is the default stream. The call does not wait."""
        drive(self.streams("wait_for").wait_for(self, other))

    def event(self) -> Event:
        """Take the time at which it will have run all that it holds now. The call does not wait.

        At most MAX_EVENTS in a session, or the next operation that waits raises Busy.
        """
        return drive(self.streams("event").record(self, Event))

    def close(self) -> None:
        """Free it now; the work it holds still runs, and `GpuSession.sync` still waits for that."""
        if self.owner is not None:
            drive(self.streams("close").destroy(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None and self.owner is not None:
                fence(self.streams("sync"), self)
        finally:
            self.drop()


def fence(streams: Streams, stream: Stream | None = None) -> None:
    """Wait for a session's last work, or for one stream's, and raise what failed in it (`GpuSession`)."""
    limit = streams.operations.fence_limit()
    if limit is None:
        return
    lock = streams.attachment.lock
    if not lock.acquire(timeout=max(0.0, limit.remaining_s())):
        raise limit.error()
    try:
        drive(streams.fence(limit, stream))
    finally:
        lock.release()
