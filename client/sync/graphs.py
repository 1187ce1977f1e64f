"""Launch graphs of the blocking face: `with session.record() as graph:`, then `graph.launch()`."""

import threading
from types import TracebackType
from typing import Any

from gpulease.client.core.graphs import GraphHandle
from gpulease.client.core.recorder import Recording
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import SessionView
from gpulease.client.sync.driver import drive
from gpulease.client.sync.streams import Stream


class Graph(GraphHandle):
    """A sequence of launches and copies, recorded once, that one request repeats; made by GpuSession.record."""

    __slots__ = ()

    def launch(
        self, /, *, stream: Stream | None = None, regions: RegionSet | None = None, position: int = 0, **values: Any
    ) -> int:
        """Start all of it, in its order, behind everything that was started before; do not wait.

        Args:
            stream: The stream to run in; the default stream if None.
            regions: The regions that it touches, as in `GpuSession.launch`; they are looked at once, before it begins.
            position: Any number, as in `GpuSession.launch`.
            values: New values of its parameters, for this launch alone. A parameter that was recorded as a buffer takes
                a buffer, or a buffer and an offset in it.

        Returns:
            The launch's number, which a later error's `failure.failed_request_id` names.

        Raises:
            InvalidHandle: It is closed, or a buffer or module that it needs is gone.
            InvalidRequest: A value is not of its parameter's kind, or there is no such parameter.
        """
        graphs = self.graphs("launch of a graph")
        with graphs.attachment.lock:
            number = graphs.launch(self, values, stream, regions, position)
            return number if isinstance(number, int) else drive(number)

    def close(self) -> None:
        """Free it now rather than when its last reference goes; launches of it that were started run to their end."""
        drive(self.graphs("close").close(self))


class Recorder:
    """The block in which a session records: `GpuSession.record`."""

    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._graph: Graph
        self._recording: Recording | None = None

    def __enter__(self) -> Graph:
        session = self._session
        graph = self._graph = Graph()
        try:
            with session._lock:
                self._recording = Recording(session._session, threading.get_ident)
                self._recording.begin()
                session._set_commands(self._recording, self._recording)
            return graph
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._end()
        except BaseException:
            self._end()  # interrupted: a session must not go on recording
            raise
        self._graph.discarded()
        recording = self._recording
        if kind is None and recording is not None:
            session = self._session._session
            drive(session.graphs.make(self._graph, recording.record()))

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
