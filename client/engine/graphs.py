"""Launch graphs on this side: what a recorded one knows, and how it is made, launched and closed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from gpulease.client.engine.attachment import Attached
from gpulease.client.engine.steps import Procedure
from gpulease.client.engine.streams import Streamed
from gpulease.client.errors import GpuLeaseError, InvalidHandle, InvalidRequest, error_of
from gpulease.client.handles import Buffer, Handle, Module, StreamHandle
from gpulease.client.kernel_args import BoundParameter, ParameterName, pack_parameter
from gpulease.client.texts import quoted
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.fastpath import HANDLE, MIDDLE_AT, REQUEST_ID_OFFSET, graph_launch_payload
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, MAX_GRAPH_BYTES
from gpulease.protocol.messages import GraphCreate
from gpulease.protocol.messages import Handle as HandleBody
from gpulease.protocol.opcodes import Flag

if TYPE_CHECKING:
    from gpulease.client.engine.session import SessionCore

_LAUNCH: Final = "launch of a graph"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded.

    Attributes:
        body: What the worker is told.
        parameters: By name, in the order of the body's.
        handles: Buffers and modules it needs.
        arrays: Arrays of the arena it copies from and to.
    """

    body: GraphCreate
    parameters: Mapping[ParameterName, BoundParameter]
    handles: tuple[Handle, ...]
    arrays: tuple[Any, ...]


class GraphHandle(Handle):
    """A recorded sequence; what the faces' graphs have in common.

    It holds the buffers, modules and arrays it was recorded with, so they live as long as it does.
    """

    __slots__ = ("_args", "_head", "_middle", "_recorded", "_why_not")

    _free_op = Opcode.GRAPH_DESTROY

    def __init__(self) -> None:
        """One that is yet to be made."""
        self.owner = None
        self.handle = 0
        self._recorded: Recorded | None = None
        self._args = b""
        self._why_not = "is being recorded"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of what `launch` can be given."""
        return () if self._recorded is None else tuple(self._recorded.parameters)

    def made(self, owner: "Graphed", handle: int, recorded: Recorded) -> None:
        """The worker has it."""
        self.owner, self.handle, self._recorded = owner, handle, recorded
        self._args = b"".join(parameter.value for parameter in recorded.parameters.values())
        payload = graph_launch_payload(handle, self._args)
        frame = build_frame(Opcode.GRAPH_LAUNCH, payload, request_id=0, session_id=owner.session_id, flags=Flag.QUIET)
        self._head, self._middle = frame[:REQUEST_ID_OFFSET], frame[MIDDLE_AT : len(frame) - len(self._args)]
        self._why_not = "is closed"

    def discarded(self) -> None:
        """Its recording came to nothing."""
        self._why_not = "was discarded: its recording failed"

    def session(self, doing: str) -> "SessionCore":
        """Its session. Raises InvalidHandle if it has none."""
        if self.owner is None:
            raise InvalidHandle(f"{doing}: the graph {self._why_not}")
        return cast("SessionCore", self.owner)

    def let_go(self) -> tuple[Opcode, int]:
        """See Handle; its arrays are kept for as long as queued copies may use them."""
        self._hold(self.owner)
        return super().let_go()

    def frame(self, owner: "Graphed", values: Mapping[str, Any]) -> tuple[int, bytes]:
        """(number, frame) of a quiet GRAPH_LAUNCH. Raises InvalidHandle or InvalidRequest; nothing is sent then."""
        recorded = self._recorded
        assert recorded is not None
        for handle in recorded.handles:
            if handle.owner is not owner:
                handle.check(owner, _LAUNCH)
        args = self._bound(owner, recorded, values) if values else self._args
        number = owner.channel.link.connection.next_request_id()
        return number, b"".join((self._head, number.to_bytes(8, "big"), self._middle, args))

    def _bound(self, owner: "Graphed", recorded: Recorded, values: Mapping[str, Any]) -> bytes:
        unknown = values.keys() - recorded.parameters.keys()
        if unknown:
            known = ", ".join(recorded.parameters) or "none"
            raise InvalidRequest(
                f"{_LAUNCH}: it has no parameter {quoted(sorted(unknown)[0])}; its parameters: {known}"
            )
        parts = []
        for name, parameter in recorded.parameters.items():
            if name not in values:
                parts.append(parameter.value)
                continue
            bound = pack_parameter(f"{_LAUNCH}: parameter {name!r}", parameter.kind, values[name])
            if bound.buffer is not None:
                bound.buffer.check(owner, f"{_LAUNCH}: parameter {name!r}")
            if len(bound.value) != len(parameter.value):
                raise InvalidRequest(
                    f"{_LAUNCH}: parameter {name!r} has {len(parameter.value)} bytes, not {len(bound.value)}"
                )
            parts.append(bound.value)
        return b"".join(parts)

    def _hold(self, owner: Attached | None) -> None:
        # Copies of it that are queued may still read and write its arrays, whose memory others must not get yet.
        if owner is not None and self._recorded is not None and self._recorded.arrays:
            owner.lent.append(self._recorded.arrays)

    def __del__(self) -> None:
        # See Handle.
        if getattr(self, "owner", None) is not None:
            self._hold(self.owner)
        super().__del__()

    def __repr__(self) -> str:
        if self.owner is None:
            return f"<{type(self).__name__}, which {self._why_not}>"
        return (
            f"<{type(self).__name__} {self.handle} ({', '.join(self.parameters)}){'' if self.is_alive else ', gone'}>"
        )


class Graphed(Streamed):
    """A session's graphs, which go into its streams."""

    def make_graph(self, graph: GraphHandle, recorded: Recorded) -> Procedure[None]:
        """Have the worker check and keep what was recorded."""
        payload = build_body(recorded.body)
        most = min(MAX_GRAPH_BYTES, self._max_payload_bytes)
        if len(payload) > most:
            raise InvalidRequest(f"record: the graph has {len(payload)} bytes; at most {most} are taken")
        reply: HandleBody = yield from self._operation("record", self.ask(Opcode.GRAPH_CREATE, payload))
        graph.made(self, reply.handle, recorded)

    def launch_graph(
        self, graph: GraphHandle, values: Mapping[str, Any], stream: StreamHandle | None = None
    ) -> int | Procedure[int]:
        """Send a graph's launch at once, under the session's lock; see `SessionCore.launch`."""
        over = self.end or self.lease.over
        if over is not None:
            raise error_of(over, _LAUNCH)
        if self.recorder is not None:
            raise InvalidRequest(f"{_LAUNCH}: the session is recording another", "Launch it before or behind the block")
        try:
            number, frame = graph.frame(self, values)
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # it ends at its caller's line, as where a face drives
        return self.hand_over(stream, number, frame, _LAUNCH)

    def close_graph(self, graph: GraphHandle) -> Procedure[None]:
        """Free it; what was queued of it runs to its end."""
        yield from self._operation("close", self.ask(Opcode.GRAPH_DESTROY, HANDLE.pack(graph.handle)))
        graph.let_go()


def check_parameters(parameters: Mapping[ParameterName, BoundParameter]) -> None:
    """Raises InvalidRequest if their values are more than a launch can carry."""
    total = sum(len(parameter.value) for parameter in parameters.values())
    if total > MAX_ARGUMENT_BYTES:
        raise InvalidRequest(f"record: parameters of {total} bytes; at most {MAX_ARGUMENT_BYTES} are taken")


def needed(buffers: Mapping[int, Buffer], modules: Mapping[int, Module]) -> tuple[Handle, ...]:
    """All handles a graph needs, each once."""
    return (*buffers.values(), *modules.values())
