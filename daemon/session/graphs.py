"""A session's launch graphs: made once, each node checked as the operation itself is, and queued as a whole.

What a node needs of the session can go: a module, an allocation. The ledger tells then, and the graph is void at once:
nothing of it is kept but why. So a replay has nothing to check but what its own values name.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import CopyStep, DataStep, Graph, KernelStep, Step
from gpulease.daemon.session.launches import Plan, Planner
from gpulease.daemon.session.ledger import Operations, Refused, SessionResources, invalid_handle
from gpulease.daemon.session.memory import ArenaOperations
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure
from gpulease.protocol.fastpath import HANDLE, parse_fixed, parse_graph_launch, parse_mem_write
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, MAX_GRAPH_BYTES
from gpulease.protocol.messages import GraphCreate, GraphNode, GraphParameter, GraphPlace, Handle
from gpulease.protocol.opcodes import Opcode, ParameterKind, Status

MAX_GRAPHS: Final = 256
"""Most graphs of a session. Stops a loop that records and never closes: each has objects of the driver's."""

MAX_SESSION_PARTS: Final = 32_768
"""Most nodes, buffers, parameters and places of all of them. A few bytes each on the wire, a kilobyte here: stops a
tenant from making so much of them."""

MAX_SESSION_GRAPH_BYTES: Final = 16 << 20
"""Most bytes of the GRAPH_CREATEs they came in: host memory, which no slice bounds."""

NODES_PER_LOOK: Final = 64
"""Nodes checked between two looks at the lease: some milliseconds."""

RECENT: Final = 2048
"""Replays remembered, to name the operation of one whose kernel fails: more than the queue of a driver that can say
which it was holds of launches."""

BUFFER_BYTES: Final = 8
"""Of an argument that is a device pointer."""

_PLACE: Final = Struct("<QQ")
"""A buffer among the values of a GRAPH_LAUNCH: its handle, and an offset in it."""


@dataclass(slots=True, eq=False)
class _Parameter:
    """One parameter, where its value is in a GRAPH_LAUNCH, and where it goes.

    Attributes:
        places: (step, where in its argument bytes) of each.
        value: What stands in its places, None if that is not known.
    """

    name: str
    is_buffer: bool
    start: int
    end: int
    places: list[tuple[int, int]] = field(default_factory=list)
    value: bytes | None = None


@dataclass(slots=True, eq=False)
class _Launch:
    """A launch among the steps, and its argument bytes as they are now."""

    plan: Plan
    args: bytearray


@dataclass(slots=True, eq=False)
class _Built:
    """The nodes of a GRAPH_CREATE as steps, on their way to a graph.

    Attributes:
        launches: By step.
        step_of: By the number of a node that is a launch.
        allocations: What they name, `modules` likewise.
        copies: How many nodes are copies.
        copied_bytes: What those copy, all together.
    """

    steps: list[Step] = field(default_factory=list)
    launches: dict[int, _Launch] = field(default_factory=dict)
    step_of: dict[int, int] = field(default_factory=dict)
    allocations: set[int] = field(default_factory=set)
    modules: set[int] = field(default_factory=set)
    copies: int = 0
    copied_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Recorded:
    """A graph that was made.

    Attributes:
        void: What it used and is gone; None while all is there.
        latest: The values of the latest GRAPH_LAUNCH, if they can't have become wrong since.
    """

    graph: Graph
    built: _Built
    parameters: list[_Parameter]
    part_count: int
    payload_bytes: int
    void: str | None = None
    latest: bytes | None = None


class GraphOperations(Operations):
    """See Operations.

    Attributes:
        recent: Request ids of the latest replays.
    """

    def __init__(self, holdings: SessionResources, planner: Planner, arena: ArenaOperations) -> None:
        super().__init__(holdings)
        self._planner = planner
        self._arena = arena
        self.recent: deque[int] = deque(maxlen=RECENT)
        self._graphs: dict[int, _Recorded] = {}
        self._last_number = 0
        self._part_count = 0
        self._payload_bytes = 0

    def create(self, frame: Frame) -> bytes:
        """GRAPH_CREATE."""
        size_bytes = len(frame.payload)
        if size_bytes > MAX_GRAPH_BYTES:
            raise BodyError(f"a GRAPH_CREATE of {size_bytes} bytes; at most {MAX_GRAPH_BYTES} are allowed")
        body = parse_body(GraphCreate, frame.payload)
        part_count = len(body.nodes) + len(body.buffers) + len(body.parameters) + len(body.places)
        self._check_room(part_count, size_bytes)
        built, parameters = self._checked(body)
        self._holdings.may_have_grown = True
        graph = self._context.graph(built.steps, self._ledger.check_graph, self._check_lease)
        self._last_number += 1
        number = self._last_number
        self._graphs[number] = recorded = _Recorded(graph, built, parameters, part_count, size_bytes)
        self._ledger.add_graph(graph.device_bytes)
        self._part_count += recorded.part_count
        self._payload_bytes += size_bytes

        def void(what: str) -> None:
            self._void(number, recorded, what)

        for handle in built.allocations:
            self._ledger.allocation_uses.add(handle, number, void)
        for module in built.modules:
            self._ledger.module_uses.add(module, number, void)
        self._count()
        return done(frame, Handle(number))

    def launch(self, frame: Frame) -> bytes:
        """GRAPH_LAUNCH."""
        number, args = parse_graph_launch(memoryview(frame.payload))
        recorded = self._graphs.get(number)
        if recorded is None:
            raise _no_graph(number)
        if recorded.void is not None:
            raise invalid_handle(f"graph {number} uses {recorded.void}")
        if args != recorded.latest:
            self._bind(recorded, args)
        self.recent.append(frame.request_id)
        recorded.graph.replay(frame.request_id, self._check_lease)
        built = recorded.built
        self._counters[Counter.LAUNCHES] += len(built.launches)
        self._counters[Counter.COPIES] += built.copies
        self._counters[Counter.COPIED_BYTES] += built.copied_bytes
        return empty(frame)

    def destroy(self, frame: Frame) -> bytes:
        """GRAPH_DESTROY."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        recorded = self._graphs.pop(number, None)
        if recorded is None:
            raise _no_graph(number)
        if recorded.void is None:
            self._let_go(number, recorded)
        self._part_count -= recorded.part_count
        self._payload_bytes -= recorded.payload_bytes
        self._count()
        return empty(frame)

    def close(self) -> None:
        """Let go of all of them."""
        for number, recorded in self._graphs.items():
            if recorded.void is None:
                self._let_go(number, recorded)
        self._graphs.clear()

    # --- making one ---

    def _check_room(self, part_count: int, size_bytes: int) -> None:
        if (
            len(self._graphs) >= MAX_GRAPHS
            or self._part_count + part_count > MAX_SESSION_PARTS
            or self._payload_bytes + size_bytes > MAX_SESSION_GRAPH_BYTES
        ):
            message = (
                f"the session has {len(self._graphs)} graphs of {self._part_count} nodes, buffers, parameters and "
                f"places in {self._payload_bytes} bytes; at most {MAX_GRAPHS}, {MAX_SESSION_PARTS} and "
                f"{MAX_SESSION_GRAPH_BYTES} are allowed"
            )
            raise Refused(Failure(Status.ALLOC_FAILED, message, hint="Close graphs that are no longer needed."))

    def _checked(self, body: GraphCreate) -> tuple[_Built, list[_Parameter]]:
        """All of it checked, and what the first launches of its kernels take charged; or neither."""
        kept_bytes = self._ledger.kept_bytes
        try:
            built = _Built()
            if not body.nodes:
                raise BodyError("a graph has at least one node")
            for number, node in enumerate(body.nodes):
                if number % NODES_PER_LOOK == 0:
                    self._check_lease()
                self._add(built, number, node)
            if not built.steps:
                raise BodyError("the graph's copies have no bytes: it does nothing")
            for handle in body.buffers:
                self._ledger.check_allocation(handle)
            built.allocations.update(body.buffers)
            return built, _parameters(body, built)
        except (Refused, BodyError):
            self._ledger.keep_again(kept_bytes)
            # Their kernels' first launches are to be charged again.
            self._planner.forget()
            raise
        finally:
            self._planner.has_new_kernel = False

    def _add(self, built: _Built, number: int, node: GraphNode) -> None:
        try:
            self._add_node(built, number, node)
        except Refused as error:
            failure = error.failure
            raise Refused(replace(failure, message=f"node {number}: {failure.message}")) from None
        except BodyError as error:
            raise BodyError(f"node {number}: {error}", error.status) from None

    def _add_node(self, built: _Built, number: int, node: GraphNode) -> None:
        payload = memoryview(node.body)
        match node.op:
            case Opcode.LAUNCH:
                plan, args = self._planner.plan(payload)
                built.step_of[number] = len(built.steps)
                built.launches[len(built.steps)] = _Launch(plan, bytearray(args))
                built.modules.add(*HANDLE.unpack_from(payload))
                params = plan.lay_out(args)
                built.steps.append(KernelStep(plan.kernel, plan.grid, plan.block, plan.shared_bytes, params))
            case Opcode.MEM_WRITE:
                handle, offset, data = parse_mem_write(payload)
                address = self._ledger.locate(handle, offset, len(data))
                built.allocations.add(handle)
                built.copies += 1
                built.copied_bytes += len(data)
                if data:
                    built.steps.append(DataStep(address, bytes(data)))
            case Opcode.ARENA_WRITE | Opcode.ARENA_READ:
                to_device = node.op == Opcode.ARENA_WRITE
                pieces = list(self._arena.pieces(payload))
                built.copies += 1
                built.copied_bytes += sum(len(memory) for _, memory in pieces)
                built.steps += [CopyStep(*piece, to_device) for piece in pieces]
                built.allocations.add(*HANDLE.unpack_from(payload))
            case _:
                raise BodyError(f"operation {node.op:#06x} can't be a node of a graph", Status.UNSUPPORTED)

    # --- launching one ---

    def _bind(self, recorded: _Recorded, args: bytes) -> None:
        """Put a GRAPH_LAUNCH's values where they belong, once all are known to be right."""
        parameters = recorded.parameters
        wanted_bytes = parameters[-1].end if parameters else 0
        if len(args) != wanted_bytes:
            raise BodyError(f"{len(args)} bytes of values; the graph's parameters have {wanted_bytes}")
        values = [self._value(parameter, args) for parameter in parameters]
        recorded.latest = None
        built, changed = recorded.built, set()
        for parameter, value in zip(parameters, values, strict=True):
            if value == parameter.value:
                continue
            # Not known until the driver has it, too.
            parameter.value = None
            for step, at in parameter.places:
                built.launches[step].args[at : at + len(value)] = value
                changed.add(step)
        for step in changed:
            launch = built.launches[step]
            recorded.graph.bind(step, launch.plan.lay_out(bytes(launch.args)))
        for parameter, value in zip(parameters, values, strict=True):
            parameter.value = value
        if not any(parameter.is_buffer for parameter in parameters):
            recorded.latest = args

    def _value(self, parameter: _Parameter, args: bytes) -> bytes:
        """The bytes that belong into its places. Raises Refused."""
        value = args[parameter.start : parameter.end]
        if not parameter.is_buffer:
            return value
        handle, offset = _PLACE.unpack(value)
        try:
            address = self._ledger.locate(handle, offset, 0)
        except Refused as error:
            failure = error.failure
            raise Refused(replace(failure, message=f"parameter {parameter.name!r}: {failure.message}")) from None
        return address.to_bytes(BUFFER_BYTES, "little")

    # --- the end of one ---

    def _void(self, number: int, recorded: _Recorded, what: str) -> None:
        """Something that it uses is gone, so nothing of it may be queued again, nor kept."""
        recorded.void = what
        self._let_go(number, recorded)

    def _let_go(self, number: int, recorded: _Recorded) -> None:
        built, recorded.built = recorded.built, _Built()
        for handle in built.allocations:
            self._ledger.allocation_uses.remove(handle, number)
        for module in built.modules:
            self._ledger.module_uses.remove(module, number)
        recorded.parameters = []
        self._ledger.remove_graph(recorded.graph.device_bytes)
        recorded.graph.close()


def _parameters(body: GraphCreate, built: _Built) -> list[_Parameter]:
    """What the graph's launches say anew. Raises BodyError."""
    parameters: list[_Parameter] = []
    end = 0
    for given in body.parameters:
        start = end
        end += _checked_size(given)
        parameters.append(_Parameter(given.name, given.kind == ParameterKind.BUFFER, start, end))
    if end > MAX_ARGUMENT_BYTES:
        raise BodyError(f"parameters of {end} bytes; at most {MAX_ARGUMENT_BYTES} are allowed")
    # By step: each argument's place and size that no parameter has yet.
    free: dict[int, dict[int, int]] = {}
    for place in body.places:
        step = _checked_place(body, built, place, free)
        parameters[place.parameter].places.append((step, place.at))
    return parameters


def _checked_size(given: GraphParameter) -> int:
    """How many bytes its value has in a GRAPH_LAUNCH."""
    if given.kind == ParameterKind.BUFFER and given.size_bytes == BUFFER_BYTES:
        return _PLACE.size
    if given.kind == ParameterKind.VALUE and given.size_bytes:
        return given.size_bytes
    raise BodyError(f"parameter {given.name!r}: kind {given.kind} of {given.size_bytes} bytes")


def _checked_place(body: GraphCreate, built: _Built, place: GraphPlace, free: dict[int, dict[int, int]]) -> int:
    """The step it is in."""
    step = built.step_of.get(place.node)
    if place.parameter >= len(body.parameters) or step is None:
        raise BodyError(f"a place of parameter {place.parameter} in node {place.node}: no such parameter, or no launch")
    if step not in free:
        free[step] = {}
        start = 0
        for argument in built.launches[step].plan.kernel.parameters:
            free[step][start] = argument.size
            start += argument.size
    size_bytes = body.parameters[place.parameter].size_bytes
    if free[step].pop(place.at, 0) != size_bytes:
        raise BodyError(f"node {place.node}: no argument of {size_bytes} bytes that is nobody's begins at {place.at}")
    return step


def _no_graph(number: int) -> Refused:
    return invalid_handle(f"{number} is not a graph of this session")
