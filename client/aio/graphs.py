"""Launch graphs of the asyncio face: `async with session.record() as graph:`, then `await graph.launch()`."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.engine.graphs import GraphHandle
from gpulease.client.engine.recording import Recording
from gpulease.client.engine.session import SessionCore
from gpulease.client.engine.steps import Procedure

if TYPE_CHECKING:
    from gpulease.client.aio import GpuSession, Stream


class Graph(GraphHandle):
    """A sequence of launches and copies, recorded once, that one request does again; see gpulease.client.Graph."""

    __slots__ = ()

    async def launch(self, /, *, stream: "Stream | None" = None, **values: Any) -> int:
        """Start all of it, in its order, behind what was started before; do not wait.

        See gpulease.client.Graph.launch.
        """
        state = self.session("launch of a graph")
        await state.lock.acquire()
        number: int | Procedure[int] = 0
        try:
            number = state.launch_graph(self, values, stream)
        finally:
            if isinstance(number, int):
                state.lock.release()
        return number if isinstance(number, int) else await undisturbed(_finish(state, number))

    async def close(self) -> None:
        """Free it now rather than when its last reference goes; see gpulease.client.Graph.close."""
        await undisturbed(drive(self.session("close").close_graph(self)))


class Recorder:
    """The block in which a session records; see GpuSession.record."""

    def __init__(self, session: "GpuSession") -> None:
        self._session = session
        self._graph: Graph
        self._recording: Recording

    async def __aenter__(self) -> Graph:
        session = self._session
        async with session._lock:
            session._state = self._recording = Recording(session._state, asyncio.current_task)
        self._graph = Graph()
        return self._graph

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        state = self._session._state = self._recording.stop()
        self._graph.discarded()
        if kind is None:
            await undisturbed(drive(state.make_graph(self._graph, self._recording.recorded())))


async def _finish(state: SessionCore, rest: Procedure[int]) -> int:
    # It took over the lock from `launch`, so that nothing gets between.
    try:
        return await drive(rest)
    finally:
        state.lock.release()
