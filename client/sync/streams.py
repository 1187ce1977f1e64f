"""Streams and events of a blocking session."""

from types import TracebackType
from typing import Self

from gpulease.client.core.streams import EventHandle, StreamHandle, Streams
from gpulease.client.sync.driver import drive


class Event(EventHandle):
    """The moment at which a stream has finished everything queued before; made by `Stream.event`.

    Dropping the last reference frees it.
    """

    __slots__ = ()

    def elapsed_ms(self, end: EventHandle) -> float:
        """Wait for this event and a later one; returns the milliseconds between them by the card's clock.

        Raises InvalidRequest if `end` came first, and the failure of a kernel before either.
        """
        return drive(self._streams.elapsed_ms(self, end))


class Stream(StreamHandle):
    """A queue of launches and copies; made by `GpuSession.stream`, passed to `launch`, `mem_write` and `mem_read`.

    A stream executes its launches and copies in the order in which they were queued. Only `wait_for` orders two
    streams, so copies and kernels in different streams may run at the same time. `GpuSession.sync` and `module_unload`
    wait for all streams. The session's next operation that waits raises a failure in any stream.

    A copy of an array of `GpuSession.empty` in a stream has only been started when the call returns: leave the array
    alone until a `sync` of the stream or the session. A copy of any other memory waits for the stream, and is done when
    its call returns.

    Dropping the last reference frees a stream, like a buffer; queued work still runs. Leaving its `with` block waits
    for that work and raises any failure, like leaving a session's block. A block left by an exception does not wait.
    """

    __slots__ = ()

    def sync(self) -> None:
        """Wait until the stream has finished. Raises SyncFailed or LaunchFailed, naming the kernel that failed."""
        # Most waits for a stream end while this side still polls; only a longer wait needs `drive`.
        streams = self.streams("sync")
        with streams.attachment.lock:
            remaining = streams.sync_one_at_once(self)
            if remaining is not None:
                drive(remaining)

    def wait_for(self, other: StreamHandle | None) -> None:
        """Make later work of this stream wait for all work now queued in `other`; None is the default stream.

        The call itself does not wait.
        """
        streams = self.streams("wait_for")
        with streams.attachment.lock:
            remaining = streams.wait_for(self, other)
            if remaining is not None:
                drive(remaining)

    def event(self) -> Event:
        """Mark the moment at which the stream will have finished the work that is queued now. The call does not wait.

        A session may have MAX_EVENTS at once; beyond that, the next operation that waits raises Busy.
        """
        return drive(self.streams("event").record(self, Event))

    def close(self) -> None:
        """Free the stream now. Queued work still runs, and `GpuSession.sync` still waits for it.

        Does nothing if it is closed already, or if its session or lease is known here to have ended.
        """
        if self.owner is not None:
            drive(self.streams("close").destroy(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            # A block left by an error does not wait.
            if kind is None and self.owner is not None:
                fence(self.streams("sync"), self)
        finally:
            self.drop()


def fence(streams: Streams, stream: Stream | None = None) -> None:
    """Wait for the last work of a session, or of one stream, within the lease's remaining time. Raises its failure.

    A `with` block of a session or a stream ends with this; `GpuSession` describes when it waits. Raises TimedOut if the
    time is over.
    """
    deadline = streams.operations.block_end_deadline()
    # None means that no work is left, the lease is freed, or the session is recording.
    if deadline is None:
        return
    lock = streams.attachment.lock
    # The wait for the lock, which another thread's operation may hold, counts against the deadline, too.
    if not lock.acquire(timeout=max(0.0, deadline.remaining_s())):
        raise deadline.error()
    try:
        drive(streams.fence(deadline, stream))
    finally:
        lock.release()
