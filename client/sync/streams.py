"""Streams of a blocking session."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpulease.client.handles import StreamHandle
from gpulease.client.sync.driver import drive

if TYPE_CHECKING:
    from gpulease.client.engine.streams import Streamed


class Stream(StreamHandle):
    """An order of launches and copies; made by `GpuSession.stream`, passed to `launch`, `mem_write` and `mem_read`.

    What is put in one stream runs in that order. Between two streams there is no order but what `wait_for` makes, so
    copies and kernels in different streams may run at the same time. `GpuSession.sync` waits for all streams, and so
    does `module_unload`. A failure in any stream is told by the session's next operation that has an
    answer, whichever that is.

    A copy of an array of `GpuSession.empty` in a stream is only begun when the call returns: leave the array alone
    until the stream is waited for. Of any other memory it is done when it returns, and waits for that stream first.

    It goes with its last reference, like a buffer: what it holds still runs. Leaving its `with` block waits for what it
    holds and raises what failed, as leaving a session's does; left by an exception, it waits for nothing.
    """

    __slots__ = ()

    def sync(self) -> None:
        """Wait until all that it holds has ended. Raises SyncFailed or LaunchFailed, naming the kernel."""
        session = self.session("sync")
        with session.lock:
            rest = session.stream_sync_promptly(self)
            if rest is not None:
                drive(rest)

    def wait_for(self, other: StreamHandle | None) -> None:
        """Put what comes next behind all that `other` holds now; None is the default stream. Waits for nothing here."""
        drive(self.session("wait_for").stream_wait(self, other))

    def close(self) -> None:
        """Let go of it now; what it holds still runs, and `GpuSession.sync` still waits for it."""
        if self.owner is not None:
            drive(self.session("close").stream_destroy(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None and self.owner is not None:
                fence(self.session("sync"), self)
        finally:
            self.drop()


def fence(state: "Streamed", stream: Stream | None = None) -> None:
    """Wait for a session's last work, or a stream's, and raise what failed in it; see GpuSession."""
    limit = state.unsettled()
    if limit is None:
        return
    if not state.lock.acquire(timeout=max(0.0, limit.remaining_s())):
        raise limit.error()
    try:
        drive(state.fence(limit, stream))
    finally:
        state.lock.release()
