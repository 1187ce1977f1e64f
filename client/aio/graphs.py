"""Launch graphs of the asyncio face: `async with session.record() as graph:`, then `await graph.launch()`."""

import asyncio
from types import TracebackType
from typing import Any

from gpulease.client.aio.driver import drive, drive_holding, undisturbed
from gpulease.client.aio.streams import Stream
from gpulease.client.engine.graphs import GraphHandle
from gpulease.client.engine.recorder import Recording
from gpulease.client.engine.region_sets import RegionSet
from gpulease.client.engine.session import SessionView
from gpulease.client.engine.waits import Begun


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
        self._recording: Recording

    async def __aenter__(self) -> Graph:
        session = self._session
        async with session._lock:
            self._recording = Recording(session._session, asyncio.current_task)
            session._set_commands(self._recording, self._recording)
        self._graph = Graph()
        return self._graph

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        session = self._session._session
        self._recording.stop()
        self._session._set_commands(session.launches, session.copies)
        self._graph.discarded()
        if kind is None:
            await undisturbed(drive(session.graphs.make(self._graph, self._recording.record())))
