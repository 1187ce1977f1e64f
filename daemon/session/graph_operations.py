"""A session's launch graphs: each node is checked once, like the operation itself; the graph is replayed as a whole.

A graph depends on modules and allocations, which the tenant may release. When it does, the ledger notifies the graph,
which becomes void at once and keeps only the reason. So a replay has to check only the values of its own parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import (
    CopyStep,
    DataStep,
    DriverError,
    DriverGraph,
    ImageMismatch,
    KernelStep,
    Step,
)
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.launches import Plan, Planner
from gpulease.daemon.session.ledger import invalid_handle
from gpulease.daemon.session.memory_operations import ArenaOperations
from gpulease.daemon.session.native.graph_records import GraphRecords, RecentReplays
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.region_operations import MappedRegion, RegionGate, no_set
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fastpath import HANDLE, parse_fixed, parse_graph_launch, parse_mem_write, split_regions
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, MAX_GRAPH_BYTES
from gpulease.protocol.messages import GraphCreate, GraphNode, GraphParameter, GraphPlace, Handle
from gpulease.protocol.opcodes import Opcode, ParameterKind, Status

MAX_GRAPHS: Final = 256
"""Maximum number of graphs of a session. Stops a loop that records graphs and never closes them: each graph has objects
in the driver."""

MAX_SESSION_PARTS: Final = 32_768
"""Maximum number of nodes, buffers, parameters and places of parameters' values, in all graphs of a session together.
Each takes a few bytes on the wire and a kilobyte here, so without this bound a tenant could fill the host's memory.
"""

MAX_SESSION_GRAPH_BYTES: Final = 16 << 20
"""Maximum number of bytes of the GRAPH_CREATE requests of a session's live graphs. They take host memory, which no
slice bounds."""

NODES_PER_CHECK: Final = 64
"""Number of nodes checked between two checks of the lease; checking that many takes some milliseconds."""

POINTER_BYTES: Final = 8
"""Size of an argument that is a device pointer."""

_BUFFER_VALUE: Final = Struct("<QQ")
"""A buffer in the values of a GRAPH_LAUNCH: the allocation's handle, and an offset within it."""


@dataclass(slots=True, eq=False)
class _Parameter:
    """A parameter of a graph.

    Attributes:
        start: Offset of its value in the values of a GRAPH_LAUNCH; `end` is the offset after the value.
        places: (step, offset in that step's argument bytes) of each place that the value goes to.
        value: The bytes that these places contain now; None if they are not known.
    """

    name: str
    is_buffer: bool
    start: int
    end: int
    places: list[tuple[int, int]] = field(default_factory=list)
    value: bytes | None = None


@dataclass(slots=True, eq=False)
class _LaunchStep:
    """The plan of a step that is a launch, and its current argument bytes."""

    plan: Plan
    args: bytearray


@dataclass(slots=True, eq=False)
class _Steps:
    """The nodes of a GRAPH_CREATE as steps of a graph.

    Attributes:
        steps: All of them, in order. A copy without bytes is not a step; a copy in the arena may be several.
        launches: The launches, by step number.
        step_of: The step number of each node that is a launch, by the node's number.
        allocations: Handles of all allocations that the nodes name.
        modules: Numbers of all modules that the nodes name.
        copies: Number of nodes that are copies.
        copied_bytes: Number of bytes that these copies move together.
    """

    steps: list[Step] = field(default_factory=list)
    launches: dict[int, _LaunchStep] = field(default_factory=dict)
    step_of: dict[int, int] = field(default_factory=dict)
    allocations: set[int] = field(default_factory=set)
    modules: set[int] = field(default_factory=set)
    copies: int = 0
    copied_bytes: int = 0


@dataclass(slots=True, eq=False)
class _SessionGraph:
    """A graph of the session.

    Attributes:
        part_count: Its nodes, buffers, parameters and places, as MAX_SESSION_PARTS counts them.
        payload_bytes: Size of its GRAPH_CREATE.
        void: Description of the object that it used and that has been released; None while it can be replayed.
        latest_values: The values of the latest GRAPH_LAUNCH; None if they may no longer match the graph.
        regions: All regions that its nodes name.
        holder: The holder for which it was made.
        payload: Its GRAPH_CREATE, if the session is parkable: another process may have to make the graph again.
    """

    graph: DriverGraph
    steps: _Steps
    parameters: list[_Parameter]
    part_count: int
    payload_bytes: int
    void: str | None = None
    latest_values: bytes | None = None
    regions: tuple[MappedRegion, ...] = ()
    holder: Holder | None = None
    payload: bytes = b""


class GraphOperations(OperationHandler):
    """The GRAPH operations.

    Attributes:
        recent_replays: Request ids of the latest replays.
        records: The graphs that native code may replay.
    """

    def __init__(
        self,
        resources: SessionResources,
        planner: Planner,
        arena: ArenaOperations,
        gate: RegionGate,
    ) -> None:
        super().__init__(resources)
        self._planner = planner
        self._gate, self._needs_set = gate, resources.options.regions_required
        self._arena = arena
        self.recent_replays = RecentReplays()
        self.records = GraphRecords()
        self._graphs: dict[int, _SessionGraph] = {}
        self._last_number = 0
        self._part_count = 0
        self._payload_bytes = 0

    @serves(Opcode.GRAPH_CREATE)
    def create(self, frame: Frame) -> bytes:
        size_bytes = len(frame.payload)
        if size_bytes > MAX_GRAPH_BYTES:
            raise BodyError(f"the GRAPH_CREATE has {size_bytes} bytes; at most {MAX_GRAPH_BYTES} are allowed")
        body = parse_body(GraphCreate, frame.payload)
        part_count = _part_count(body)
        # Check everything before the driver makes an object, so that a refused graph leaves nothing behind.
        self._check_room(part_count, size_bytes)
        steps, parameters = self._checked(body)
        self._resources.may_have_grown = True
        # The driver may optimise kernels now that have run for long (`DriverKernel.is_due`).
        with self._resources.compiling():
            graph = self._context.graph(steps.steps, self._ledger.check_graph, self._check_lease)
        # The driver has made the graph: count it, record what it depends on, and charge it.
        self._last_number += 1
        number = self._last_number
        self._graphs[number] = session_graph = _SessionGraph(graph, steps, parameters, part_count, size_bytes)
        session_graph.regions = self._gate.regions_at(steps.allocations)
        session_graph.holder = self._ledger.holder
        if self._resources.shows_pages:
            session_graph.payload = bytes(frame.payload)
        self._ledger.add_graph(graph.device_bytes)
        self._part_count += part_count
        self._payload_bytes += size_bytes
        self._add_dependent(number, session_graph)
        self._record_usage()
        return done(frame, Handle(number))

    @serves(Opcode.GRAPH_LAUNCH)
    def launch(self, frame: Frame) -> bytes:
        """Serve GRAPH_LAUNCH. Regions that the graph's nodes name by their addresses must be active, as for a copy."""
        if self._needs_set:
            raise no_set()
        number, session_graph, values = self._graph_of(memoryview(frame.payload))
        # If the values equal those of the last launch, and the request is quiet, native code can serve the following
        # launches with these values.
        is_repeated = (
            self.records.is_read and frame.flags and values == session_graph.latest_values and not session_graph.regions
        )
        reply = self._replay(frame, number, session_graph, values)
        if is_repeated:
            steps = session_graph.steps
            self.records.show(number, frame, session_graph.graph, len(steps.launches), steps.copies, steps.copied_bytes)
        return reply

    @serves(Opcode.GRAPH_LAUNCH_IN)
    def launch_in(self, frame: Frame) -> bytes:
        """Serve GRAPH_LAUNCH_IN: check its set's regions once, then do a GRAPH_LAUNCH.

        The steps are not checked one by one. The regions that the graph itself names are checked as well, whether or
        not they are in the set.
        """
        body, region_set, position = split_regions(memoryview(frame.payload))
        number, session_graph, values = self._graph_of(body)
        # If the graph has only one kernel, a refusal names it.
        kernels = session_graph.steps.launches
        kernel = next(iter(kernels.values())).plan.kernel.name if len(kernels) == 1 else ""
        self._gate.admit(region_set, position, kernel)
        return self._replay(frame, number, session_graph, values, kernel, position)

    def _graph_of(self, payload: memoryview) -> tuple[int, _SessionGraph, bytes]:
        """Return the graph of a GRAPH_LAUNCH, by its number, and the values for it. Raises BodyError or Refused."""
        number, values = parse_graph_launch(payload)
        session_graph = self._graphs.get(number)
        if session_graph is None:
            raise _no_graph(number)
        # Optimise the graph before any check of regions, because optimising takes time.
        if due := session_graph.graph.due:
            self._planner.optimise(due)
        return number, session_graph, values

    def _replay(
        self,
        frame: Frame,
        number: int,
        session_graph: _SessionGraph,
        values: bytes,
        kernel: str = "",
        position: int | None = None,
    ) -> bytes:
        # Before a replay: the graph must not be void, its values are bound, its regions must be active.
        if session_graph.void is not None:
            raise invalid_handle(f"graph {number} uses {session_graph.void}")
        if values != session_graph.latest_values:
            self.records.hide(number)
            self._bind(session_graph, values)
        # A region may end after its set was checked. This second check must then name the same launch in its refusal.
        if session_graph.regions:
            self._gate.admit_named(session_graph.regions, kernel, position)
        # Record the request id before the replay, because a fault may name it at once.
        self.recent_replays.add(frame.request_id)
        session_graph.graph.replay(frame.request_id, self._check_lease, self._resources.admit_next)
        steps = session_graph.steps
        self._counters[Counter.LAUNCHES] += len(steps.launches)
        self._counters[Counter.COPIES] += steps.copies
        self._counters[Counter.COPIED_BYTES] += steps.copied_bytes
        return empty(frame)

    @serves(Opcode.GRAPH_DESTROY)
    def destroy(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        if number not in self._graphs:
            raise _no_graph(number)
        self._destroy(number)
        self._record_usage()
        return empty(frame)

    @property
    def last_number(self) -> int:
        """The highest number that a graph ever had."""
        return self._last_number

    def recorded(self) -> list[tuple[int, bytes, Holder]] | None:
        """Return number, GRAPH_CREATE and holder of all graphs; None if one of them can no longer be replayed."""
        if any(
            session_graph.void is not None or session_graph.holder is None for session_graph in self._graphs.values()
        ):
            return None
        return [
            (number, session_graph.payload, session_graph.holder)
            for number, session_graph in self._graphs.items()
            if session_graph.holder is not None
        ]

    def restore(self, number: int, payload: bytes) -> None:
        """Recreate, for `ledger.holder`, a graph that the session had in another process. Raises ImageMismatch."""
        self._last_number = number - 1
        self._gate.is_restoring = True
        try:
            body = parse_body(GraphCreate, payload)
            # If one of its regions ended while the session was parked, the graph is void, as if the region had ended
            # before.
            if void := next(filter(None, map(self._gate.end_at, _handles_of(body))), ""):
                self._restore_void(body, payload, void)
            else:
                self.create(Frame(Opcode.GRAPH_CREATE, 0, Status.OK, 1, 0, memoryview(payload)))
        except (Refused, BodyError, DriverError) as error:
            raise ImageMismatch(f"graph {number} can't be created again: {error}") from None
        finally:
            self._gate.is_restoring = False

    def _restore_void(self, body: GraphCreate, payload: bytes, void: str) -> None:
        graph = self._context.graph([], self._ledger.check_graph, self._check_lease)
        graph.close()
        self._last_number += 1
        self._graphs[self._last_number] = session_graph = _SessionGraph(
            graph, _Steps(), [], _part_count(body), len(payload), void, holder=self._ledger.holder
        )
        self._part_count += session_graph.part_count
        self._payload_bytes += session_graph.payload_bytes

    def restore_last_number(self, number: int) -> None:
        """Set the highest number that a graph had in another process, so that no number is given out twice."""
        self._last_number = max(self._last_number, number)

    def give_back(self, holder: Holder) -> None:
        """Destroy all graphs of a holder. Replays that were queued run to their end."""
        for number in [number for number, session_graph in self._graphs.items() if session_graph.holder is holder]:
            self._destroy(number)

    def _destroy(self, number: int) -> None:
        session_graph = self._graphs.pop(number)
        if session_graph.void is None:
            self._release(number, session_graph)
        self._part_count -= session_graph.part_count
        self._payload_bytes -= session_graph.payload_bytes

    def close(self) -> None:
        for number, session_graph in self._graphs.items():
            if session_graph.void is None:
                self._release(number, session_graph)
        self._graphs.clear()

    # --- creating ---

    def _check_room(self, part_count: int, size_bytes: int) -> None:
        # Check the three bounds together, so that the message names all of them.
        if (
            len(self._graphs) >= MAX_GRAPHS
            or self._part_count + part_count > MAX_SESSION_PARTS
            or self._payload_bytes + size_bytes > MAX_SESSION_GRAPH_BYTES
        ):
            message = (
                f"the session has {len(self._graphs)} graphs with {self._part_count} parts (nodes, "
                f"buffers, parameters, places) in {self._payload_bytes} bytes; at most {MAX_GRAPHS} "
                f"graphs, {MAX_SESSION_PARTS} parts and {MAX_SESSION_GRAPH_BYTES} bytes are allowed"
            )
            raise Refused(Failure(Status.ALLOC_FAILED, message, hint="Close graphs that are no longer needed."))

    def _checked(self, body: GraphCreate) -> tuple[_Steps, list[_Parameter]]:
        """Check a whole GRAPH_CREATE. Only if all is valid, charge what its kernels' first launches take."""
        kept_bytes = self._ledger.kept_bytes
        try:
            steps = _Steps()
            if not body.nodes:
                raise BodyError("a graph must have at least one node")
            # A large graph takes milliseconds to check, so check the lease from time to time.
            for number, node in enumerate(body.nodes):
                if number % NODES_PER_CHECK == 0:
                    self._check_lease()
                self._add(steps, number, node)
            if not steps.steps:
                raise BodyError("the graph does nothing: none of its copies has any bytes")
            # Buffers that only the parameters name are dependencies as well.
            for handle in body.buffers:
                self._ledger.check_allocation(handle)
            steps.allocations.update(body.buffers)
            return steps, _parameters(body, steps)
        except (Refused, BodyError):
            self._ledger.restore_kept(kept_bytes)
            # Drop the plans, so that their kernels are charged again at the next first launch.
            self._planner.forget()
            raise
        finally:
            self._planner.has_new_kernel = False

    def _add(self, steps: _Steps, number: int, node: GraphNode) -> None:
        # Add the node's number to each error.
        try:
            self._add_node(steps, number, node)
        except Refused as error:
            failure = error.failure
            raise Refused(replace(failure, message=f"node {number}: {failure.message}")) from None
        except BodyError as error:
            raise BodyError(f"node {number}: {error}", error.status) from None

    def _add_node(self, steps: _Steps, number: int, node: GraphNode) -> None:
        # Check each node exactly as the operation would be checked outside a graph.
        payload = memoryview(node.body)
        match node.op:
            case Opcode.LAUNCH:
                plan, args = self._planner.find(payload)
                steps.step_of[number] = len(steps.steps)
                steps.launches[len(steps.steps)] = _LaunchStep(plan, bytearray(args))
                steps.modules.add(*HANDLE.unpack_from(payload))
                params = plan.lay_out(args)
                steps.steps.append(KernelStep(plan.kernel, plan.grid, plan.block, plan.shared_bytes, params))
            case Opcode.MEM_WRITE:
                handle, offset, data = parse_mem_write(payload)
                address = self._ledger.locate(handle, offset, len(data))
                steps.allocations.add(handle)
                steps.copies += 1
                steps.copied_bytes += len(data)
                # A copy of no bytes counts as an operation, but makes no step.
                if data:
                    steps.steps.append(DataStep(address, bytes(data)))
            case Opcode.ARENA_WRITE | Opcode.ARENA_READ:
                to_device = node.op == Opcode.ARENA_WRITE
                pieces = list(self._arena.pieces(payload))
                steps.copies += 1
                steps.copied_bytes += sum(len(memory) for _, memory in pieces)
                steps.steps += [CopyStep(*piece, to_device) for piece in pieces]
                steps.allocations.add(*HANDLE.unpack_from(payload))
            case _:
                raise BodyError(f"operation {node.op:#06x} can't be a node of a graph", Status.UNSUPPORTED)

    # --- replaying ---

    def _bind(self, session_graph: _SessionGraph, values: bytes) -> None:
        """Put a GRAPH_LAUNCH's values into their places, once all of them are checked."""
        # Step 1: check all values before anything changes.
        parameters = session_graph.parameters
        wanted_bytes = parameters[-1].end if parameters else 0
        if len(values) != wanted_bytes:
            raise BodyError(
                f"the values must have {wanted_bytes} bytes, the size of the graph's parameters, not {len(values)}"
            )
        checked = [self._value(parameter, values) for parameter in parameters]
        # Step 2: put them into the argument bytes; a value that did not change costs nothing.
        session_graph.latest_values = None
        steps, changed = session_graph.steps, set()
        for parameter, value in zip(parameters, checked, strict=True):
            if value == parameter.value:
                continue
            # Mark the value as unknown until the driver has it too: an error in between must not leave a wrong record.
            parameter.value = None
            for step, at in parameter.places:
                steps.launches[step].args[at : at + len(value)] = value
                changed.add(step)
        # Update only steps with changed arguments in the driver.
        for step in changed:
            launch = steps.launches[step]
            session_graph.graph.bind(step, launch.plan.lay_out(bytes(launch.args)))
        for parameter, value in zip(parameters, checked, strict=True):
            parameter.value = value
        # A buffer may be freed, so only plain values allow the next identical replay to skip the check.
        if not any(parameter.is_buffer for parameter in parameters):
            session_graph.latest_values = values

    def _value(self, parameter: _Parameter, values: bytes) -> bytes:
        """Return the bytes for a parameter's places. Raises Refused."""
        value = values[parameter.start : parameter.end]
        if not parameter.is_buffer:
            return value
        # A buffer is given as a handle and an offset; the kernel receives the address.
        handle, offset = _BUFFER_VALUE.unpack(value)
        try:
            address = self._ledger.locate(handle, offset, 0)
        except Refused as error:
            failure = error.failure
            raise Refused(replace(failure, message=f"parameter {parameter.name!r}: {failure.message}")) from None
        return address.to_bytes(POINTER_BYTES, "little")

    # --- releasing ---

    def _add_dependent(self, number: int, session_graph: _SessionGraph) -> None:
        """Make the graph void as soon as an allocation or a module that it names is released."""

        def void(reason: str) -> None:
            session_graph.void = reason
            self._release(number, session_graph)

        for handle in session_graph.steps.allocations:
            self._ledger.allocation_dependents.add(handle, number, void)
        for module in session_graph.steps.modules:
            self._ledger.module_dependents.add(module, number, void)

    def _release(self, number: int, session_graph: _SessionGraph) -> None:
        self.records.hide(number)
        # Drop the steps first: after that, the graph references nothing of the tenant's.
        steps, session_graph.steps = session_graph.steps, _Steps()
        for handle in steps.allocations:
            self._ledger.allocation_dependents.remove(handle, number)
        for module in steps.modules:
            self._ledger.module_dependents.remove(module, number)
        session_graph.parameters = []
        self._ledger.remove_graph(session_graph.graph.device_bytes)
        session_graph.graph.close()


def _part_count(body: GraphCreate) -> int:
    return len(body.nodes) + len(body.buffers) + len(body.parameters) + len(body.places)


def _handles_of(body: GraphCreate) -> Iterator[int]:
    """Yield the handles of the allocations and regions that a graph names."""
    yield from body.buffers
    for node in body.nodes:
        if node.op == Opcode.MEM_WRITE:
            yield parse_mem_write(memoryview(node.body))[0]
        elif node.op != Opcode.LAUNCH:
            yield from HANDLE.unpack_from(node.body)


def _parameters(body: GraphCreate, steps: _Steps) -> list[_Parameter]:
    """Return the graph's parameters and their places. Raises BodyError."""
    parameters: list[_Parameter] = []
    end = 0
    # In a GRAPH_LAUNCH the values have the order of the parameters, without gaps.
    for parameter in body.parameters:
        start = end
        end += _value_bytes(parameter)
        parameters.append(_Parameter(parameter.name, parameter.kind == ParameterKind.BUFFER, start, end))
    if end > MAX_ARGUMENT_BYTES:
        raise BodyError(f"the parameters have {end} bytes; at most {MAX_ARGUMENT_BYTES} are allowed")
    # By step number: the offset and size of each argument that has no parameter yet.
    free: dict[int, dict[int, int]] = {}
    for place in body.places:
        step = _checked_place(body, steps, place, free)
        parameters[place.parameter].places.append((step, place.at))
    return parameters


def _value_bytes(parameter: GraphParameter) -> int:
    """Return the size of a parameter's value in a GRAPH_LAUNCH. Raises BodyError."""
    if parameter.kind == ParameterKind.BUFFER and parameter.size_bytes == POINTER_BYTES:
        return _BUFFER_VALUE.size
    if parameter.kind == ParameterKind.VALUE and parameter.size_bytes:
        return parameter.size_bytes
    raise BodyError(f"parameter {parameter.name!r} can't have kind {parameter.kind} with {parameter.size_bytes} bytes")


def _checked_place(body: GraphCreate, steps: _Steps, place: GraphPlace, free: dict[int, dict[int, int]]) -> int:
    """Return the step that contains a place, and take the argument there from `free`. Raises BodyError."""
    step = steps.step_of.get(place.node)
    if place.parameter >= len(body.parameters) or step is None:
        raise BodyError(
            f"place of parameter {place.parameter} in node {place.node}: the parameter does not exist, or "
            "the node is not a launch"
        )
    # At first use, list the arguments of this launch as they are on the wire.
    if step not in free:
        free[step] = {}
        start = 0
        for argument in steps.launches[step].plan.kernel.parameters:
            free[step][start] = argument.size
            start += argument.size
    size_bytes = body.parameters[place.parameter].size_bytes
    if free[step].pop(place.at, 0) != size_bytes:
        raise BodyError(f"node {place.node}: no unassigned argument of {size_bytes} bytes begins at {place.at}")
    return step


def _no_graph(number: int) -> Refused:
    return invalid_handle(f"{number} is not a graph of this session")
