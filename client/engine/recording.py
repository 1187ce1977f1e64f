"""A session that records: launches and copies are checked as usual and written down, all else is refused.

It stands in for the session's state from the begin of a recording to its end, so that a session that does not record
pays nothing for being able to.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpulease.client.engine import copies
from gpulease.client.engine.graphs import Recorded, check_parameters, needed
from gpulease.client.engine.launch import KernelArguments, in_order, launch_frame
from gpulease.client.engine.session import SessionCore
from gpulease.client.engine.steps import Procedure
from gpulease.client.engine.streams import S, not_recorded
from gpulease.client.errors import InvalidRequest, error_of
from gpulease.client.handles import Buffer, Module, StreamHandle
from gpulease.client.kernel_args import BoundParameter, KernelArgs, ParameterName
from gpulease.protocol import Opcode
from gpulease.protocol.fastpath import ARENA_COPY, mem_write_prefix
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.limits import (
    MAX_GRAPH_HANDLES,
    MAX_GRAPH_NODE_BYTES,
    MAX_GRAPH_NODES,
    MAX_GRAPH_PARAMETERS,
    MAX_GRAPH_PLACES,
    MAX_PARAMETER_NAME_BYTES,
)
from gpulease.protocol.messages import GraphCreate, GraphNode, GraphParameter, GraphPlace
from gpulease.protocol.opcodes import ParameterKind

MAX_WRITE_BYTES: Final = MAX_GRAPH_NODE_BYTES - 20
"""Data of one recorded write: what a node's body has room for behind handle, offset and length."""


class Recording(SessionCore):
    """See SessionCore, whose place it takes; what it does not know of a session it asks that."""

    def __init__(self, state: SessionCore, whose_turn: Callable[[], object]) -> None:
        """Begin. Raises InvalidRequest if the session records already, or what it ended of.

        Args:
            state: The session.
            whose_turn: Names the thread or task that calls.
        """
        self._real = state
        self._whose_turn = whose_turn
        self._owner = whose_turn()
        self._nodes: list[GraphNode] = []
        self._buffers: dict[int, Buffer] = {}
        self._used: set[int] = set()
        self._modules: dict[int, Module] = {}
        self._arrays: list[Any] = []
        self._parameters: dict[ParameterName, BoundParameter] = {}
        self._places: list[GraphPlace] = []
        over = state.end or state.lease.over
        if over is not None:
            raise error_of(over, "record")
        if isinstance(state, Recording) or state.recorder is not None:
            raise InvalidRequest("record: the session is recording already", "One graph is recorded at a time")
        state.recorder = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def stop(self) -> SessionCore:
        """Record no more; the session."""
        self._real.recorder = None
        return self._real

    def recorded(self) -> Recorded:
        """What was recorded. Raises InvalidRequest if it can't be a graph."""
        if not self._nodes:
            raise InvalidRequest("record: nothing was recorded", "Launch or copy something in the block")
        if len(self._used) > MAX_GRAPH_HANDLES:
            raise InvalidRequest(f"record: {len(self._used)} buffers; a graph has at most {MAX_GRAPH_HANDLES}")
        check_parameters(self._parameters)
        parameters = tuple(
            GraphParameter(
                name, ParameterKind.BUFFER if found.kind == "buffer" else ParameterKind.VALUE, found.argument_bytes
            )
            for name, found in self._parameters.items()
        )
        body = GraphCreate(tuple(self._nodes), tuple(sorted(self._used)), parameters, tuple(self._places))
        return Recorded(body, self._parameters, needed(self._buffers, self._modules), tuple(self._arrays))

    # --- what is recorded ---

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> int:
        """Record a launch: its node's number."""
        self._check_turn("launch")
        _check_stream(stream, "launch")
        args = in_order(module, kernel, args)
        _, frame = launch_frame(self._real, module, kernel, grid, block, args, arg_sizes, shared_bytes)
        number = len(self._nodes)
        if isinstance(args, KernelArgs):
            self._add_parameters(kernel, number, args)
        self._add(Opcode.LAUNCH, frame[HEADER_BYTES:])
        self._modules[id(module)] = module
        if isinstance(args, KernelArgs):
            rebound = {id(bound.buffer) for _, _, bound in args.parameters}
            self._buffers |= {id(buffer): buffer for buffer in args.buffers}
            self._used |= {buffer.handle for buffer in args.buffers if id(buffer) not in rebound}
        return number

    def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None = None) -> None:
        """Record a copy to the device."""
        self._check_turn("mem_write")
        _check_stream(stream, "mem_write")
        self._real._check(buffer, Buffer, "mem_write")
        view = copies.readable_bytes(data, "mem_write")
        copies.check_total(buffer, offset, len(view), "mem_write")
        if not view:
            return
        if not memoryview(data).readonly:
            self._add_arena_copy(Opcode.ARENA_WRITE, buffer, offset, data, len(view))
        elif len(view) > MAX_WRITE_BYTES:
            raise InvalidRequest(
                f"mem_write: {len(view)} bytes can't be recorded; at most {MAX_WRITE_BYTES}",
                "Copy from an array of session.empty(), whose bytes are taken at each launch of the graph",
            )
        else:
            head = mem_write_prefix(buffer.handle, offset, len(view), request_id=1, session_id=0, quiet=True)
            self._add(Opcode.MEM_WRITE, head[HEADER_BYTES:] + bytes(view))
            self._buffers[id(buffer)] = buffer

    def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: StreamHandle | None = None
    ) -> Procedure[Any]:
        """Record a copy from the device."""
        self._check_turn("mem_read")
        _check_stream(stream, "mem_read")
        self.read_promptly(buffer, offset, nbytes, into)
        return _done(into)

    def read_promptly(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> None:
        """The same; it is done."""
        self._check_turn("mem_read")
        self._real._check(buffer, Buffer, "mem_read")
        copies.check_total(buffer, offset, nbytes, "mem_read")
        if into is None:
            raise InvalidRequest("mem_read: a graph has nowhere to put the bytes", "Give an array of session.empty()")
        copies.writable_bytes(into, nbytes, "mem_read")
        if nbytes:
            self._add_arena_copy(Opcode.ARENA_READ, buffer, offset, into, nbytes)

    # --- what is refused ---

    def mem_alloc(self, size_bytes: int) -> Procedure[Buffer]:
        """Refused."""
        raise self._refusal("mem_alloc")

    def alloc_promptly(self, size_bytes: int) -> Procedure[Buffer]:
        """Refused."""
        raise self._refusal("mem_alloc")

    def mem_free(self, buffer: Buffer) -> Procedure[None]:
        """Refused."""
        raise self._refusal("mem_free")

    def module_load(self, image: Any) -> Procedure[Module]:
        """Refused."""
        raise self._refusal("module_load")

    def module_unload(self, module: Module) -> Procedure[None]:
        """Refused."""
        raise self._refusal("module_unload")

    def stream_create(self, kind: type[S]) -> Procedure[S]:
        """Refused."""
        raise self._refusal("stream")

    def sync(self) -> Procedure[None]:
        """Refused."""
        raise self._refusal("sync")

    def sync_promptly(self) -> Procedure[None] | None:
        """Refused."""
        raise self._refusal("sync")

    # --- what is the session's own ---

    def default_stream(self, kind: type[S]) -> S:
        """See Streamed."""
        return self._real.default_stream(kind)

    def unsettled(self) -> None:
        """Nothing is waited for while it records."""

    def disown(self) -> Any:
        """See Attached."""
        return self._real.disown()

    def wake(self) -> None:
        """See Attached."""
        self._real.wake()

    def close(self) -> None:
        """See Attached."""
        self._real.close()

    # --- how ---

    def _check_turn(self, doing: str) -> None:
        over = self._real.end or self._real.lease.over
        if over is not None:
            raise error_of(over, doing)
        if self._whose_turn() != self._owner:
            raise InvalidRequest(
                f"{doing}: another thread or task records a launch graph in this session",
                "Wait until it has left its `with` block",
            )

    def _refusal(self, doing: str) -> InvalidRequest:
        self._check_turn(doing)
        return not_recorded(doing)

    def _add(self, op: Opcode, body: bytes) -> None:
        if len(self._nodes) >= MAX_GRAPH_NODES:
            raise InvalidRequest(f"{op.name.lower()}: a graph has at most {MAX_GRAPH_NODES} nodes", "Record several")
        self._nodes.append(GraphNode(op, body))

    def _add_arena_copy(self, op: Opcode, buffer: Buffer, offset: int, data: Any, nbytes: int) -> None:
        """A copy from or to an array of the arena. Raises InvalidRequest if it is none."""
        arena, place = self._real.arena, None
        if arena is not None:
            try:
                place = arena.offset_of(memoryview(data))
            except (TypeError, ValueError):
                place = None  # not in one piece
        if place is None:
            writes = op is Opcode.ARENA_WRITE
            raise InvalidRequest(
                f"{'mem_write' if writes else 'mem_read'}: the array's memory is not shared with the session, so a "
                "graph can't copy it at each launch",
                "Use an array of session.empty(), in a session that shares memory"
                + ("; or give bytes(array), to record its bytes as they are now" if writes else ""),
            )
        self._add(op, ARENA_COPY.pack(buffer.handle, offset, place, nbytes))
        self._buffers[id(buffer)] = buffer
        self._arrays.append(data)

    def _add_parameters(self, kernel: str, node: int, args: KernelArgs) -> None:
        added = dict(self._parameters)
        for name, _, bound in args.parameters:
            if len(name.encode()) > MAX_PARAMETER_NAME_BYTES:
                raise InvalidRequest(f"launch of {kernel!r}: a name of over {MAX_PARAMETER_NAME_BYTES} bytes")
            known = added.setdefault(name, bound)
            if (known.kind, known.value) != (bound.kind, bound.value):
                raise InvalidRequest(
                    f"launch of {kernel!r}: parameter {name!r} is {bound}, and {known} in a launch before it",
                    "Give it the same kind and value everywhere, or another name",
                )
        if len(added) > MAX_GRAPH_PARAMETERS or len(self._places) + len(args.parameters) > MAX_GRAPH_PLACES:
            raise InvalidRequest(
                f"launch of {kernel!r}: a graph has at most {MAX_GRAPH_PARAMETERS} parameters "
                f"in {MAX_GRAPH_PLACES} places"
            )
        self._parameters = added
        numbers = {name: number for number, name in enumerate(added)}
        self._places += [GraphPlace(numbers[name], node, sum(args.sizes[:index])) for name, index, _ in args.parameters]


def _check_stream(stream: StreamHandle | None, doing: str) -> None:
    """Raises InvalidRequest if what is to be recorded names a stream."""
    if stream is not None:
        raise InvalidRequest(
            f"{doing}: what is recorded has no stream of its own; a graph's launch runs in one",
            "Give the stream to graph.launch(stream=...)",
        )


def _done(result: Any) -> Procedure[Any]:
    """A procedure that has nothing to do."""
    return result
    yield  # makes this a procedure
