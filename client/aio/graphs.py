"""Launch graphs of the asyncio API: `async with session.record() as graph:`, then `await graph.launch()`."""

import asyncio
from types import TracebackType
from typing import Any

from gpulease.client.aio.driver import drive, drive_at_once, undisturbed
from gpulease.client.aio.streams import Stream
from gpulease.client.core.graphs import GraphHandle
from gpulease.client.core.recorder import Recording
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import SessionView


class Graph(GraphHandle):
    """A recorded sequence of launches and copies that one request repeats; made by `GpuSession.record`."""

    __slots__ = ()

    async def launch(
        self, /, *, stream: Stream | None = None, regions: RegionSet | None = None, position: int = 0, **values: Any
    ) -> int:
        """Start the whole graph, in its recorded order, after everything that was started before; do not wait.

        Args:
            stream: The stream to run in; the default stream if None.
            regions: The regions that it uses, as in `GpuSession.launch`. The regions are checked once, before the graph
                starts.
            position: Any number, as in `GpuSession.launch`.
            values: New values of its parameters, for this launch only. A parameter that was recorded as a buffer takes
                a buffer, or a buffer and an offset in it.

        Returns:
            The launch's number; a later error names it in `failure.failed_request_id`.

        Raises:
            InvalidHandle: The graph is closed, or a buffer or module that it uses was freed.
            InvalidRequest: The graph has no such parameter, or a value does not fit its parameter's kind.
        """
        graphs = self.graphs("launch of a graph")
        return await drive_at_once(
            graphs.attachment.lock, lambda: graphs.launch(self, values, stream, regions, position)
        )

    async def close(self) -> None:
        """Free the graph now instead of with its last reference. Launches of it that have started run to their end.

        Does nothing if it is closed already, or if its session or lease is known here to have ended.
        """
        if self.is_closed:
            return
        await undisturbed(drive(self.graphs("close").close(self)))


class Recorder:
    """The block in which a session records; made by `GpuSession.record`."""

    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._graph: Graph
        self._recording: Recording | None = None

    async def __aenter__(self) -> Graph:
        session = self._session
        graph = self._graph = Graph()
        try:
            # Take the lock, because another task's operation may be in the middle of sending.
            async with session._lock:
                # Until the block ends, the session's launches and copies go to the recording instead of the worker.
                self._recording = Recording(session._session, asyncio.current_task)
                self._recording.begin()
                session._set_commands(self._recording, self._recording)
            return graph
        except BaseException:
            self._end()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._end()
        except BaseException:
            self._end()  # interrupted: the session must not go on recording
            raise
        # If an error left the block, the graph stays discarded; otherwise `make` below gives it a handle.
        self._graph.discarded()
        recording = self._recording
        if kind is None and recording is not None:
            session = self._session._session
            await undisturbed(drive(session.graphs.make(self._graph, recording.record())))

    def __del__(self) -> None:
        # An interrupt may come before `__aexit__` begins.
        self._end()

    def _end(self) -> None:
        """Stop recording and route launches and copies to the worker again. Calling it twice is harmless."""
        recording = getattr(self, "_recording", None)  # it may be half-built
        if recording is not None and self._session._launches is recording:
            self._session._set_commands(self._session._session.launches, self._session._session.copies)
        if recording is not None:
            recording.stop()
