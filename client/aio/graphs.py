"""Launch graphs of the asyncio face: `async with session.record() as graph:`, then `await graph.launch()`."""

import asyncio
from types import TracebackType
from typing import Any

from gpulease.client.aio.driver import drive, drive_holding, undisturbed
from gpulease.client.aio.streams import Stream
from gpulease.client.core.graphs import GraphHandle
from gpulease.client.core.recorder import Recording
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import SessionView
from gpulease.client.core.waits import Begun


class Graph(GraphHandle):
    """A sequence of launches and copies, recorded once, that one request repeats, like `gpulease.client.Graph`."""

    __slots__ = ()

    async def launch(
        self, /, *, stream: Stream | None = None, regions: RegionSet | None = None, position: int = 0, **values: Any
    ) -> int:
        """Start all of it, in its order, behind everything that was started before; do not wait.

        Arguments, result and errors are those of `gpulease.client.Graph.launch`.
        """
        graphs = self.graphs("launch of a graph")
        lock = graphs.attachment.lock
        await lock.acquire()
        number: Begun[int] = 0
        try:
            number = graphs.launch(self, values, stream, regions, position)
        finally:
            if isinstance(number, int):
                lock.release()
        return number if isinstance(number, int) else await undisturbed(drive_holding(lock, number))

    async def close(self) -> None:
        """Free it now rather than when its last reference goes, like `gpulease.client.Graph.close`."""
        await undisturbed(drive(self.graphs("close").close(self)))


class Recorder:
    """The block in which a session records: `GpuSession.record`."""

    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._graph: Graph
        self._recording: Recording | None = None

    async def __aenter__(self) -> Graph:
        session = self._session
        graph = self._graph = Graph()
        try:
            async with session._lock:
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
            self._end()  # interrupted: a session must not go on recording
            raise
        self._graph.discarded()
        recording = self._recording
        if kind is None and recording is not None:
            session = self._session._session
            await undisturbed(drive(session.graphs.make(self._graph, recording.record())))

    def __del__(self) -> None:
        # An interrupt may come before the block's end has begun to run.
        self._end()

    def _end(self) -> None:
        """Record no more; again is harmless."""
        recording = getattr(self, "_recording", None)  # it may be half-built
        if recording is not None and self._session._launches is recording:
            self._session._set_commands(self._session._session.launches, self._session._session.copies)
        if recording is not None:
            recording.stop()
