"""Records a launch graph: it checks and records launches and copies, and refuses any other operation.

While it lasts, a recording replaces the session's launches and copies (`LaunchCommands`, `CopyCommands`) in the API. So
recording costs nothing in a session that does not record.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpulease.client.core.copies import CopyCommands, check_range
from gpulease.client.core.graphs import GraphContents
from gpulease.client.core.launch import KernelArguments, LaunchAttributes, LaunchCommands, packed_if_listed
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import SessionCore
from gpulease.client.core.streams import StreamHandle, not_recorded
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import InvalidRequest
from gpulease.client.handles import Buffer, Module
from gpulease.client.kernel_args import BoundParameter, KernelArgs, ParameterName
from gpulease.client.memory_views import flattened, readable_view, view_of, writable_bytes
from gpulease.protocol import Opcode
from gpulease.protocol.fastpath import ARENA_COPY, mem_write_prefix
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.limits import (
    MAX_ARGUMENT_BYTES,
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
"""Maximum size of the data of one recorded write, in bytes: a node's body also holds handle, offset and length."""


class Recording(LaunchCommands, CopyCommands):
    """The launches and copies of one graph, while they are recorded."""

    def __init__(self, session: SessionCore, caller: Callable[[], object]) -> None:
        """Prepare a recording, which `begin` starts.

        Args:
            session: The session.
            caller: Returns the calling thread or task; the one that started the recording owns it.
        """
        self._session = session
        self._attachment = session.attachment
        # The thread or task that records. While the recording lasts, operations of any other are refused.
        self._caller = caller
        self._owner = caller()
        # The graph's nodes, in the form of its message, and the objects that it must keep.
        self._nodes: list[GraphNode] = []
        self._buffers: dict[int, Buffer] = {}
        self._used: set[int] = set()
        self._modules: dict[int, Module] = {}
        self._arrays: list[Any] = []
        self._parameters: dict[ParameterName, BoundParameter] = {}
        self._places: list[GraphPlace] = []
        self._kernels: list[str] = []

    def begin(self) -> None:
        """Start recording. Raises InvalidRequest if the session is recording already, or the error of its end."""
        self._attachment.check_open("record")
        if self._attachment.recording is not None:
            raise InvalidRequest("record: the session is already recording", "Record one graph at a time")
        self._attachment.recording = self

    def stop(self) -> None:
        """Stop recording. A second call is harmless, even after another recording has started."""
        if self._attachment.recording is self:
            self._attachment.recording = None

    def refusal(self, operation: str) -> InvalidRequest:
        """Return the error for an operation that a graph can't contain. Raises the errors of `_check_caller`."""
        self._check_caller(operation)
        return not_recorded(operation)

    def record(self) -> GraphContents:
        """Return the finished recording. Raises InvalidRequest if it can't become a graph."""
        # Check the limits of the whole graph. Each node was checked when it was recorded.
        if not self._nodes:
            raise InvalidRequest("record: nothing was recorded", "Launch or copy something within the block")
        if len(self._used) > MAX_GRAPH_HANDLES:
            raise InvalidRequest(f"record: a graph has at most {MAX_GRAPH_HANDLES} buffers, not {len(self._used)}")
        total_bytes = sum(len(parameter.value) for parameter in self._parameters.values())
        if total_bytes > MAX_ARGUMENT_BYTES:
            raise InvalidRequest(
                f"record: a graph's parameters have at most {MAX_ARGUMENT_BYTES} bytes, not {total_bytes}"
            )
        # On the wire, mark the parameters that are buffers: the worker checks their handles at each launch.
        parameters = tuple(
            GraphParameter(
                name,
                ParameterKind.BUFFER if declared.kind == "buffer" else ParameterKind.VALUE,
                declared.argument_bytes,
            )
            for name, declared in self._parameters.items()
        )
        body = GraphCreate(tuple(self._nodes), tuple(sorted(self._used)), parameters, tuple(self._places))
        # The graph holds its buffers and modules. If it has only one kernel, errors name it by `kernel`.
        handles = (*self._buffers.values(), *self._modules.values())
        kernel = self._kernels[0] if len(self._kernels) == 1 else ""
        return GraphContents(body, self._parameters, handles, tuple(self._arrays), kernel)

    # --- launches and copies ---

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
        """Record a launch; returns the number of its node."""
        self._check_caller("launch")
        _check_stream(stream, "launch")
        args = packed_if_listed(module, kernel, args)
        _, frame = self._session.launches.frame(module, kernel, grid, block, args, arg_sizes, shared_bytes)
        number = len(self._nodes)
        # `_add_parameters` may raise, so call it before anything is recorded: a refused launch must leave nothing
        # behind.
        if isinstance(args, KernelArgs):
            self._add_parameters(kernel, number, args)
        self._add(Opcode.LAUNCH, frame[HEADER_BYTES:])
        self._kernels.append(kernel)
        self._modules[id(module)] = module
        if isinstance(args, KernelArgs):
            # The client keeps every buffer alive while the graph exists. In the worker, the graph uses only the buffers
            # that no parameter can replace.
            replaceable = {id(bound.buffer) for _, _, bound in args.parameters}
            self._buffers |= {id(buffer): buffer for buffer in args.buffers}
            self._used |= {buffer.handle for buffer in args.buffers if id(buffer) not in replaceable}
        return number

    def launch_in(self, regions: RegionSet, position: int, *launch: Any) -> int:
        """Refuse: the launch of a graph names the regions, and they apply to the whole graph."""
        self._check_caller("launch")
        raise InvalidRequest(
            "launch: a recorded launch can't have its own regions; the launch of the graph sets them for all of it",
            "Give the set to graph.launch(regions=...)",
        )

    def launch_with(self, attributes: LaunchAttributes, *launch: Any) -> int:
        """Refuse: graphs don't support cooperative launches and clusters."""
        self._check_caller("launch")
        raise InvalidRequest(
            "launch: cooperative launches and clusters can't be recorded", "Launch it outside of the recording"
        )

    def write(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None = None) -> None:
        """Record a copy to the device: the bytes of an immutable object, or the offset of an array in the arena."""
        self._check_caller("mem_write")
        _check_stream(stream, "mem_write")
        self._session.operations.check(buffer, Buffer, "mem_write")
        view = readable_view(data, "mem_write")
        check_range(buffer, offset, view.nbytes, "mem_write")
        if not view.nbytes:
            return
        # Each launch of the graph copies mutable memory again, from the arena. Immutable bytes become part of the
        # graph.
        if not view.readonly:
            self._add_arena_copy(Opcode.ARENA_WRITE, buffer, offset, data, view.nbytes)
        elif view.nbytes > MAX_WRITE_BYTES:
            raise InvalidRequest(
                f"mem_write: at most {MAX_WRITE_BYTES} bytes can be recorded, not {view.nbytes}",
                "Copy from an array of session.empty(): each launch of the graph then copies the array's current bytes",
            )
        else:
            head = mem_write_prefix(buffer.handle, offset, view.nbytes, request_id=1, session_id=0, quiet=True)
            self._add(Opcode.MEM_WRITE, head[HEADER_BYTES:] + bytes(flattened(view)))
            self._buffers[id(buffer)] = buffer

    def read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: StreamHandle | None = None
    ) -> Procedure[Any]:
        """Record a copy from the device into `into`, an array in the arena; returns `into`."""
        self._check_caller("mem_read")
        _check_stream(stream, "mem_read")
        self.read_at_once(buffer, offset, nbytes, into)
        return _done(into)

    def read_at_once(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> None:
        """Record a copy from the device into `into`, an array in the arena."""
        self._check_caller("mem_read")
        self._session.operations.check(buffer, Buffer, "mem_read")
        check_range(buffer, offset, nbytes, "mem_read")
        if into is None:
            raise InvalidRequest(
                "mem_read: a graph needs an array into which it can copy", "Pass an array from session.empty()"
            )
        writable_bytes(into, nbytes, "mem_read")
        if nbytes:
            self._add_arena_copy(Opcode.ARENA_READ, buffer, offset, into, nbytes)

    # --- nodes ---

    def _check_caller(self, operation: str) -> None:
        """Raise the error of the session's end, or InvalidRequest if another thread or task owns the recording."""
        # If the session has ended since `begin`, raise that error, which is more helpful.
        self._attachment.check_open(operation)
        if self._caller() != self._owner:
            raise InvalidRequest(
                f"{operation}: another thread or task is recording a launch graph in this session",
                "Wait until it has left its `with` block",
            )

    def _add(self, op: Opcode, body: bytes) -> None:
        if len(self._nodes) >= MAX_GRAPH_NODES:
            raise InvalidRequest(f"{op.name.lower()}: a graph has at most {MAX_GRAPH_NODES} nodes", "Record several")
        self._nodes.append(GraphNode(op, body))

    def _add_arena_copy(self, op: Opcode, buffer: Buffer, offset: int, data: Any, nbytes: int) -> None:
        """Add a copy from or to an array. Raises InvalidRequest if the array is not in the arena."""
        arena, place = self._attachment.arena, None
        if arena is not None:
            try:
                place = arena.offset_of(view_of(data))
            except (TypeError, ValueError):
                place = None  # not contiguous
        if place is None:
            writes = op is Opcode.ARENA_WRITE
            raise InvalidRequest(
                f"{'mem_write' if writes else 'mem_read'}: the array's memory is not shared with the session, so a "
                "graph can't copy it at each launch",
                "Use an array of session.empty(), in a session that shares memory"
                + ("; or pass bytes(array), which records its current bytes" if writes else ""),
            )
        self._add(op, ARENA_COPY.pack(buffer.handle, offset, place, nbytes))
        self._buffers[id(buffer)] = buffer
        self._arrays.append(data)

    def _add_parameters(self, kernel: str, node: int, args: KernelArgs) -> None:
        # Work on a copy, because a refused launch must leave the recording as it was.
        added = dict(self._parameters)
        for name, _, bound in args.parameters:
            if len(name.encode()) > MAX_PARAMETER_NAME_BYTES:
                raise InvalidRequest(
                    f"launch of {kernel!r}: a parameter's name must have at most {MAX_PARAMETER_NAME_BYTES} bytes, "
                    f"not {len(name.encode())}"
                )
            # Several arguments may share a name. They must agree, because a launch of the graph without
            # a value for the name uses the recorded one.
            earlier = added.setdefault(name, bound)
            if (earlier.kind, earlier.value) != (bound.kind, bound.value):
                raise InvalidRequest(
                    f"launch of {kernel!r}: parameter {name!r} is {bound}, but {earlier} in an earlier launch",
                    "Give it the same kind and value everywhere, or another name",
                )
        if len(added) > MAX_GRAPH_PARAMETERS or len(self._places) + len(args.parameters) > MAX_GRAPH_PLACES:
            raise InvalidRequest(
                f"launch of {kernel!r}: a graph has at most {MAX_GRAPH_PARAMETERS} parameters "
                f"in {MAX_GRAPH_PLACES} places"
            )
        self._parameters = added
        # Where each parameter's value goes: the node, and the value's offset from the node's first argument.
        numbers = {name: number for number, name in enumerate(added)}
        self._places += [GraphPlace(numbers[name], node, sum(args.sizes[:index])) for name, index, _ in args.parameters]


def _check_stream(stream: StreamHandle | None, operation: str) -> None:
    """Raise InvalidRequest for a launch or copy that names a stream."""
    if stream is not None:
        raise InvalidRequest(
            f"{operation}: recorded operations can't choose a stream; launch the graph in one",
            "Give the stream to graph.launch(stream=...)",
        )


def _done(result: Any) -> Procedure[Any]:
    """Return a procedure that ends immediately, with that result."""
    return result
    yield  # makes this a procedure
