"""Launch graphs as CUDA graphs (CUDA driver API, "Graph Management"), one for each segment.

The nodes of a segment run one after another, in the order of the steps. `bind` changes the executable graph; launches
of the graph that were queued before stay unchanged (cuGraphExecKernelNodeSetParams). A graph that is destroyed while it
runs still runs to its end (cuGraphExecDestroy).

A context that is watched must see each kernel's end, which a CUDA graph does not show. In such a context the steps are
queued one by one.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from cuda.bindings import driver as api

from gpulease.daemon.drivers.interface import (
    SEGMENT_STEPS,
    CopyStep,
    DataStep,
    Dim3,
    DriverKernel,
    KernelStep,
    LaunchRejected,
    Poll,
    Step,
    cooperative_refused,
    keep_waiting,
)

SEGMENT_BYTES: Final = 144 << 10
"""Bytes of the card for an executable graph, whatever it contains. The driver takes them from its own store, and they
go back to that store when the graph is destroyed. 123 KB were measured on an H100 (driver 580.159)."""

NODE_BYTES: Final = 3 << 10
"""Bytes of the card for a node without its parameters: 2 KB were measured."""

PARAMETERS_FACTOR: Final = 2
"""Bytes of the card for each byte of a node's parameters: 2.0 were measured. Checked with 1100 graphs, of launches with
8 to 3080 parameter bytes and of copies: the sum of the three figures was never less than what the graphs took of the
card. For launches it was a seventh more."""


def device_bytes_of(steps: Sequence[Step]) -> int:
    """Return the maximum number of bytes of the card that the graph of these steps takes."""
    # Three figures, measured separately: the segment, its nodes, their parameters.
    segments = -(-len(steps) // SEGMENT_STEPS)
    params = sum(len(step.params) for step in steps if isinstance(step, KernelStep))
    return segments * SEGMENT_BYTES + len(steps) * NODE_BYTES + PARAMETERS_FACTOR * params


@dataclass(slots=True, eq=False)
class _KernelNode:
    """A kernel's node, and the memory that the driver reads for the node's parameters.

    Attributes:
        node: The CUgraphNode.
        node_params: The CUDA_KERNEL_NODE_PARAMS.
        params: The parameter buffer.
        pointers: The address of each parameter in that buffer.
    """

    node: Any
    node_params: Any
    params: Any
    pointers: Any


@dataclass(slots=True, eq=False)
class _Segment:
    """An executable graph, the graph from which it was made, and its launches by step."""

    graph: Any
    launches: dict[int, _KernelNode] = field(default_factory=dict)
    executable: Any = None


class GraphContext(Protocol):
    """The parts of a context that its graphs use to replay."""

    @property
    def is_watched(self) -> bool:
        """Whether the context must see each kernel's end."""

    @property
    def stream(self) -> Any:
        """The selected stream, as cuda-bindings takes it."""

    def launch(self, kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None: ...

    def mem_write(self, address: int, data: memoryview, poll: Poll) -> None: ...

    def write_pinned(self, address: int, data: memoryview, poll: Poll) -> None: ...

    def read_pinned(self, address: int, into: memoryview, poll: Poll) -> None: ...

    def replayed(self, tag: int, kernels: Sequence[str]) -> None:
        """Record that a graph of these kernels was queued."""

    def show_replayed(self, kernels: Sequence[str]) -> None:
        """Record that native code has queued and counted a graph of these kernels."""

    def retire(self, pinned: "PinnedBytes") -> None:
        """Keep bytes until the queued copies that may still read them have ended."""

    def failure(self, code: Any) -> Exception:
        """Return the error for a driver call that failed."""


class CudaGraph:
    """A `gpulease.daemon.drivers.interface.DriverGraph` on a CUDA card."""

    # Kernels are compiled with all optimisations when their image is loaded.
    due: Sequence[DriverKernel] = ()

    def __init__(self, context: GraphContext, steps: Sequence[Step]) -> None:
        """Raise LaunchRejected for a launch that the driver refuses, or DriverError."""
        self._context = context
        self._steps = list(steps)
        self.device_bytes = device_bytes_of(steps)
        self._kernels = [step.kernel.name for step in steps if isinstance(step, KernelStep)]
        # By step: the parameter buffer that `bind` gave it.
        self._bound: dict[int, bytes] = {}
        self._segments: list[_Segment] = []
        # Constant data is put in pinned memory once, so that each replay's copies are fast.
        data = [step.data for step in steps if isinstance(step, DataStep)]
        self._pinned = PinnedBytes(data) if data else None
        self._data_at = self._pinned.address if self._pinned else 0
        # A failure in any segment destroys those made before.
        try:
            for first in range(0, len(steps), SEGMENT_STEPS):
                self._add_segment(first, steps[first : first + SEGMENT_STEPS])
        except BaseException:
            self.close()
            raise

    def bind(self, step: int, params: bytes) -> None:
        """Change the parameters in the executable graph."""
        # Remember the parameters in Python too, for a watched context, which queues steps one by one.
        self._bound[step] = params
        segment = self._segments[step // SEGMENT_STEPS]
        launch = segment.launches[step]
        # The driver reads the buffer during the call, then keeps its own copy.
        ctypes.memmove(launch.params, params, len(params))
        self._check(api.cuGraphExecKernelNodeSetParams(segment.executable, launch.node, launch.node_params))

    def replay(self, tag: int, poll: Poll, next_segment: Poll = keep_waiting) -> None:
        """Queue one CUDA graph after another, or one step after another if the context is watched."""
        if self._context.is_watched:
            self._replay_one_by_one(tag, poll, next_segment)
            return
        # Launch each segment. The lease is checked between segments.
        stream = self._context.stream
        for number, segment in enumerate(self._segments):
            if number:
                poll()
                next_segment()
            self._check(api.cuGraphLaunch(segment.executable, stream))
        self._context.replayed(tag, self._kernels)

    @property
    def native(self) -> int:
        """The CUgraphExec of the only segment; 0 for several segments, and in a watched context.

        The lease is checked between segments, so several segments need `replay`.
        """
        return int(self._segments[0].executable) if len(self._segments) == 1 and not self._context.is_watched else 0

    def replayed(self) -> None:
        self._context.show_replayed(self._kernels)

    def close(self) -> None:
        """Destroy the CUDA graphs; the context keeps the bytes that queued copies may still read."""
        for segment in self._segments:
            # This fails only in a context that is lost, together with its graphs.
            if segment.executable is not None:
                api.cuGraphExecDestroy(segment.executable)
            api.cuGraphDestroy(segment.graph)
        self._segments.clear()
        self._steps.clear()
        if self._pinned is not None:
            self._context.retire(self._pinned)
            self._pinned = None

    def _replay_one_by_one(self, tag: int, poll: Poll, next_segment: Poll) -> None:
        context = self._context
        for number, step in enumerate(self._steps):
            if number and number % SEGMENT_STEPS == 0:
                poll()
                next_segment()
            if isinstance(step, KernelStep):
                params = self._bound.get(number, step.params)
                context.launch(step.kernel, step.grid, step.block, step.shared_bytes, params, tag)
            elif isinstance(step, DataStep):
                context.mem_write(step.address, memoryview(step.data), poll)
            elif step.to_device:
                context.write_pinned(step.address, step.memory, poll)
            else:
                context.read_pinned(step.address, step.memory, poll)

    # --- construction ---

    def _add_segment(self, first: int, steps: Sequence[Step]) -> None:
        # Make each node depend on the previous one, because a graph must run its steps in order.
        segment = _Segment(self._check(api.cuGraphCreate(0)))
        self._segments.append(segment)
        before: list[Any] = []
        for number, step in enumerate(steps, first):
            if isinstance(step, KernelStep):
                launch = self._add_kernel(segment.graph, before, step, follows_kernel=number - 1 in segment.launches)
                segment.launches[number] = launch
                before = [launch.node]
            else:
                before = [self._add_copy(segment.graph, before, step)]
        # Instantiation takes memory of the card, and can fail for a kernel that does not fit.
        segment.executable = self._check(api.cuGraphInstantiate(segment.graph, 0))

    def _add_kernel(self, graph: Any, before: list[Any], step: KernelStep, *, follows_kernel: bool) -> _KernelNode:
        # The driver reads parameters through an array of pointers, each into the buffer.
        params = ctypes.create_string_buffer(step.params, max(1, len(step.params)))
        start = ctypes.addressof(params)
        addresses = [start + parameter.offset for parameter in step.kernel.parameters]
        pointers = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        # Make the checks that a launch makes: for cooperative kernels, and for dynamic shared memory.
        kernel: Any = step.kernel
        if kernel.is_cooperative:
            raise cooperative_refused(kernel.name)
        kernel.shared.allow(kernel.name, step.shared_bytes)
        # The node's description keeps addresses of `pointers` and `params`, so all of them must outlive the graph.
        node_params = api.CUDA_KERNEL_NODE_PARAMS()
        node_params.func = api.CUfunction(kernel.function)
        node_params.gridDimX, node_params.gridDimY, node_params.gridDimZ = step.grid
        node_params.blockDimX, node_params.blockDimY, node_params.blockDimZ = step.block
        node_params.sharedMemBytes = step.shared_bytes
        node_params.kernelParams = ctypes.addressof(pointers) if addresses else 0
        # A kernel that waits for its predecessor by itself may start while the kernel before it ends, but not during a
        # copy.
        starts_early = kernel.waits and follows_kernel
        full = [] if starts_early else before
        error, node = api.cuGraphAddKernelNode(graph, full, len(full), node_params)
        if error == api.CUresult.CUDA_ERROR_INVALID_VALUE:
            raise self._rejected(step, "invalid argument")
        self._check((error,))
        if starts_early:
            self._check(_add_early_start(graph, before[0], node))
        return _KernelNode(node, node_params, params, pointers)

    def _add_copy(self, graph: Any, before: list[Any], step: DataStep | CopyStep) -> Any:
        # A copy of constant data takes the next part of the pinned memory.
        if isinstance(step, DataStep):
            host, size, to_device = self._data_at, len(step.data), True
            self._data_at += size
        else:
            host, size = ctypes.addressof(ctypes.c_char.from_buffer(step.memory)), len(step.memory)
            to_device = step.to_device
        # cuGraphAddMemcpyNode only takes three-dimensional copies, so describe one of a single row of `size` bytes.
        kinds = api.CUmemorytype
        copy = api.CUDA_MEMCPY3D()
        if to_device:
            copy.srcMemoryType, copy.srcHost = kinds.CU_MEMORYTYPE_HOST, host
            copy.dstMemoryType, copy.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, step.address
        else:
            copy.srcMemoryType, copy.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, step.address
            copy.dstMemoryType, copy.dstHost = kinds.CU_MEMORYTYPE_HOST, host
        copy.WidthInBytes, copy.Height, copy.Depth = size, 1, 1
        current = self._check(api.cuCtxGetCurrent())
        return self._check(api.cuGraphAddMemcpyNode(graph, before, len(before), copy, current))

    def _rejected(self, step: KernelStep, problem: str) -> LaunchRejected:
        return LaunchRejected(
            f"{step.kernel.name}: {problem}",
            hint="Check that grid, block and shared memory are within the kernel's limits.",
        )

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """Return the value from a driver call's answer. Raises the call's error."""
        if answer[0]:
            raise self._context.failure(answer[0])
        return answer[1] if len(answer) > 1 else None


def _add_early_start(graph: Any, before: Any, node: Any) -> tuple[Any, ...]:
    """Let a kernel's node start as soon as each block of the kernel before it has permitted that, or has ended."""
    edge = api.CUgraphEdgeData()
    edge.type = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    edge.from_port = api.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    # In CUDA 12 the function that takes edges with data has another name.
    add: Any = getattr(api, "cuGraphAddDependencies_v2", api.cuGraphAddDependencies)
    answer: tuple[Any, ...] = add(graph, [before], [node], [edge], 1)
    return answer


class ChainRecord(ctypes.Structure):
    """A chain for launch.ll.

    executable  The CUgraphExec.
    count       Number of launches.
    nodes       Address of `count` pairs: a CUgraphNode, and the address of its CUDA_KERNEL_NODE_PARAMS.
    """

    _fields_ = (("executable", ctypes.c_uint64), ("count", ctypes.c_uint64), ("nodes", ctypes.c_uint64))


class ChainGraph(CudaGraph):
    """A `gpulease.daemon.drivers.interface.NativeChain`: a graph of kernels, replayed by native code."""

    def __init__(self, context: GraphContext, steps: Sequence[KernelStep]) -> None:
        super().__init__(context, steps)
        (segment,) = self._segments
        # launch.ll reads the nodes as pairs of 64-bit numbers.
        self._nodes = (ctypes.c_uint64 * (2 * len(steps)))()
        launches = [segment.launches[number] for number in range(len(steps))]
        for number, launch in enumerate(launches):
            self._nodes[2 * number : 2 * number + 2] = [int(launch.node), int(launch.node_params.getPtr())]
        self._record = ChainRecord(int(segment.executable), len(steps), ctypes.addressof(self._nodes))
        self.record = ctypes.addressof(self._record)
        self.params = [ctypes.addressof(launch.params) for launch in launches]
        # Keep these alive: the driver reads them when a chain's parameters change.
        self._launches = launches


class PinnedBytes:
    """The bytes that a graph's copies read, one after another, in pinned memory."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        data = b"".join(parts)
        self._map = mmap.mmap(-1, len(data))
        self._map[:] = data
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # If the driver refuses, the copies are still correct, but slower.
        (error,) = api.cuMemHostRegister(self.address, len(data), 0)
        self._is_pinned = not error

    def release(self) -> None:
        """Unpin the memory. No queued copy may still read it."""
        if self._is_pinned:
            api.cuMemHostUnregister(self.address)
            self._is_pinned = False
