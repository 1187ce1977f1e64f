"""Launch graphs in the client: their handles; making, launching and closing them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from gpulease.client.core.attachment import Attachment
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.refused_regions import RefusedRegions
from gpulease.client.core.region_sets import RegionSet, regions_named
from gpulease.client.core.streams import StreamHandle, Streams
from gpulease.client.core.waits import MaybePending, Procedure
from gpulease.client.errors import GpuLeaseError, InvalidHandle, InvalidRequest
from gpulease.client.handles import Handle
from gpulease.client.kernel_args import BoundParameter, ParameterName, pack_parameter
from gpulease.client.texts import quoted
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.fastpath import MIDDLE_AT, REGIONS, REQUEST_ID_OFFSET, graph_launch_payload
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_GRAPH_BYTES
from gpulease.protocol.messages import GraphCreate
from gpulease.protocol.opcodes import Flag

_LAUNCH: Final = "launch of a graph"
_BEING_RECORDED: Final = "is being recorded"


@dataclass(frozen=True, slots=True)
class GraphContents:
    """The contents of a finished recording.

    Attributes:
        body: The message that makes the graph.
        parameters: Its parameters by name, in the body's order.
        handles: Buffers and modules that the graph uses.
        arrays: Arrays in the arena that the graph copies from and to.
        kernel: The kernel of its only launch; "" if the graph has several launches, or only copies.
    """

    body: GraphCreate
    parameters: Mapping[ParameterName, BoundParameter]
    handles: tuple[Handle, ...]
    arrays: tuple[Any, ...]
    kernel: str


class GraphHandle(Handle):
    """A recorded sequence of launches and copies; the base of both APIs' graphs.

    It holds references to the buffers, modules and arrays with which it was recorded.
    """

    __slots__ = ("_args", "_contents", "_graphs", "_head", "_head_in", "_middle", "_unusable_reason")

    _free_op = Opcode.GRAPH_DESTROY

    def __init__(self) -> None:
        """Create a graph that is still being recorded; `made` completes it."""
        self.owner = None
        self.handle = 0
        self._graphs: Graphs
        self._contents: GraphContents | None = None
        self._args = b""
        self._unusable_reason = _BEING_RECORDED

    @property
    def is_closed(self) -> bool:
        """True once it was closed, or its recording failed."""
        return self.owner is None and self._unusable_reason != _BEING_RECORDED

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that `launch` accepts."""
        return () if self._contents is None else tuple(self._contents.parameters)

    def made(self, graphs: "Graphs", handle: int, contents: GraphContents) -> Self:
        """Store the worker's handle of the graph, and prepare the launch frame. The graph has no owner yet."""
        # A launch without values sends the recorded ones, in the parameters' order.
        self._graphs = graphs
        self.handle, self._contents = handle, contents
        self._args = b"".join(parameter.value for parameter in contents.parameters.values())
        session_id = graphs.attachment.session_id

        def quiet_frame(op: Opcode, payload: bytes) -> bytes:
            return build_frame(op, payload, request_id=0, session_id=session_id, flags=Flag.QUIET)

        # Build the frame once. A launch inserts the request id between head and middle, and the arguments at the end.
        frame = quiet_frame(Opcode.GRAPH_LAUNCH, graph_launch_payload(handle, self._args))
        self._head, self._middle = frame[:REQUEST_ID_OFFSET], frame[MIDDLE_AT : len(frame) - len(self._args)]
        in_regions = graph_launch_payload(handle, self._args, 0, 0)
        self._head_in = quiet_frame(Opcode.GRAPH_LAUNCH_IN, in_regions)[:REQUEST_ID_OFFSET]
        self._unusable_reason = "is closed"
        return self

    def discarded(self) -> None:
        """Mark the graph as unusable, because its recording failed."""
        self._unusable_reason = "was discarded: its recording failed"

    def graphs(self, operation: str) -> "Graphs":
        """Return its session's graphs. Raises InvalidHandle, naming `operation`, if the graph has no session."""
        if self.owner is None:
            raise InvalidHandle(f"{operation}: the graph {self._unusable_reason}")
        return self._graphs

    def mark_freed(self) -> tuple[Opcode, int]:
        """Mark it as freed (`Handle.mark_freed`). Its arrays' memory is not reused while queued copies may use it."""
        self.lend_arrays()
        return super().mark_freed()

    def frame(
        self, attachment: Attachment, values: Mapping[str, Any], regions: RegionSet | None, position: int
    ) -> tuple[int, bytes, bool]:
        """Return (request id, frame, whether its regions are active) for a quiet launch of this graph.

        Raises InvalidHandle, InvalidRequest or RegionFailed, and nothing is sent.
        """
        contents = self._contents
        assert contents is not None
        # Step 1: check that each buffer and module still exists in this session. Call `check` only for a mismatch,
        # because a call takes longer than the comparison.
        for handle in contents.handles:
            if handle.owner is not attachment:
                handle.check(attachment, _LAUNCH)
        # Step 2: encode the parameters' values; without values, use the recorded bytes.
        args = self._bound(attachment, contents, values) if values else self._args
        # Step 3: build the frame, with the regions at its end if there are any.
        head, trailer, are_active = self._head, b"", True
        if regions is not None:
            head, trailer = self._head_in, REGIONS.pack(*regions_named(regions, position, attachment, _LAUNCH))
            are_active = self._graphs.refused.check_set(regions, position, contents.kernel, _LAUNCH)
        number = attachment.connection.next_request_id()
        return number, b"".join((head, number.to_bytes(8, "big"), self._middle, args, trailer)), are_active

    def _bound(self, attachment: Attachment, contents: GraphContents, values: Mapping[str, Any]) -> bytes:
        unknown = values.keys() - contents.parameters.keys()
        if unknown:
            names = ", ".join(contents.parameters) or "none"
            raise InvalidRequest(
                f"{_LAUNCH}: it has no parameter {quoted(sorted(unknown)[0])}; its parameters: {names}"
            )
        parts = []
        # On the wire the values are in the order of the parameters, each with its recorded size.
        for name, parameter in contents.parameters.items():
            if name not in values:
                parts.append(parameter.value)
                continue
            bound = pack_parameter(f"{_LAUNCH}: parameter {name!r}", parameter.kind, values[name])
            if bound.buffer is not None:
                bound.buffer.check(attachment, f"{_LAUNCH}: parameter {name!r}")
            if len(bound.value) != len(parameter.value):
                raise InvalidRequest(
                    f"{_LAUNCH}: parameter {name!r} has {len(parameter.value)} bytes, not {len(bound.value)}"
                )
            parts.append(bound.value)
        return b"".join(parts)

    def lend_arrays(self) -> None:
        """Lend its arrays while queued copies may use them, so that their memory is not reused."""
        if self.owner is not None and self._contents is not None and self._contents.arrays:
            self._graphs.attachment.lent.lend_to_graph(self._contents.arrays)

    def __del__(self) -> None:
        # The constructor may not have finished, as in `Handle.__del__`.
        if getattr(self, "owner", None) is not None:
            self.lend_arrays()
        super().__del__()

    def __repr__(self) -> str:
        if self.owner is None:
            return f"<{type(self).__name__}, which {self._unusable_reason}>"
        return (
            f"<{type(self).__name__} {self.handle} ({', '.join(self.parameters)}){'' if self.is_alive else ', gone'}>"
        )


class Graphs:
    """Makes, launches and closes the launch graphs of one session.

    Attributes:
        attachment: The session's connection.
        refused: Checks the regions that a launch names.
    """

    def __init__(self, operations: RequestPipeline, streams: Streams, refused: RefusedRegions) -> None:
        self.attachment = operations.attachment
        self.refused = refused
        self._operations = operations
        self._streams = streams

    def make(self, graph: GraphHandle, contents: GraphContents) -> Procedure[None]:
        """Send a recording to the worker, which checks and stores it. Raises InvalidRequest if it is too large."""
        payload = build_body(contents.body)
        # Both the protocol and this daemon limit the size; refuse a larger graph before it is sent.
        most = min(MAX_GRAPH_BYTES, self.attachment.max_payload_bytes)
        if len(payload) > most:
            raise InvalidRequest(
                f"record: the graph must have at most {most} bytes, not {len(payload)}", "Split it into several graphs"
            )
        making = self._operations.make(
            Opcode.GRAPH_CREATE, payload, Opcode.GRAPH_DESTROY, lambda reply: graph.made(self, reply.handle, contents)
        )
        yield from self._operations.do("record", making)

    def launch(
        self,
        graph: GraphHandle,
        values: Mapping[str, Any],
        stream: StreamHandle | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
    ) -> MaybePending[int]:
        """Send a graph's launch immediately, under the session's lock; the result is the launch's number."""
        attachment = self.attachment
        attachment.check_open(_LAUNCH)
        if attachment.recording is not None:
            raise InvalidRequest(
                f"{_LAUNCH}: the session is recording another graph", "Launch it before or after the block"
            )
        # A mistake raises here, before the request is sent.
        try:
            number, frame, are_active = graph.frame(attachment, values, regions, position)
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # so that the traceback begins at the caller's line
        pending = self._streams.hand_over(stream, number, frame, _LAUNCH)
        return pending if are_active else self.refused.confirmed(pending, _LAUNCH)

    def close(self, graph: GraphHandle) -> Procedure[None]:
        """Free a graph. Its queued launches still run to their end."""
        graph.lend_arrays()
        yield from self._operations.free_unless_ended(graph, GraphHandle)
