"""Launch graphs of the blocking face: `with session.record() as graph:`, then `graph.launch()`."""

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpulease.client.engine.graphs import GraphHandle
from gpulease.client.engine.recording import Recording
from gpulease.client.sync.driver import drive
from gpulease.client.sync.streams import Stream

if TYPE_CHECKING:
    from gpulease.client.sync.session import GpuSession


class Graph(GraphHandle):
    """A sequence of launches and copies, recorded once, that one request does again; made by GpuSession.record."""

    __slots__ = ()

    def launch(self, /, *, stream: Stream | None = None, **values: Any) -> int:
        """Start all of it, in its order, behind what was started before; do not wait.

        Args:
            stream: What to put it in; the default stream if None.
            values: Those of its parameters that are to have another value than they were recorded with, in this launch.
                A buffer, or a buffer and an offset in it, for what was recorded as one.

        Returns:
            The launch's number, which a later error's `failure.failed_request_id` names.

        Raises:
            InvalidHandle: It is closed, or a buffer or module that it needs is gone.
            InvalidRequest: A value is not of its parameter's kind, or there is no such parameter.
        """
        state = self.session("launch of a graph")
        with state.lock:
            number = state.launch_graph(self, values, stream)
            return number if isinstance(number, int) else drive(number)

    def close(self) -> None:
        """Free it now rather than when its last reference goes; launches of it that were started run to their end."""
        drive(self.session("close").close_graph(self))


class Recorder:
    """The block in which a session records; see GpuSession.record."""

    def __init__(self, session: "GpuSession") -> None:
        self._session = session
        self._graph: Graph
        self._recording: Recording

    def __enter__(self) -> Graph:
        session = self._session
        with session._lock:
            session._state = self._recording = Recording(session._state, threading.get_ident)
        self._graph = Graph()
        return self._graph

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        state = self._session._state = self._recording.stop()
        self._graph.discarded()
        if kind is None:
            drive(state.make_graph(self._graph, self._recording.recorded()))
