"""Launch graphs as CUDA graphs (CUDA driver API, "Graph Management"), one for each segment.

The nodes of a segment hang one behind the other, as their order is theirs. Other parameters go into the executable
graph, which leaves launches that were queued before as they were (cuGraphExecKernelNodeSetParams). Destroyed in flight
it runs to its end (cuGraphExecDestroy).

A context that is watched must tell each kernel's end, which a graph does not show: there the steps are queued one by
one.

What a context knows of its launch graphs, and of memory that is locked for the card.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver as api

from gpulease.daemon.drivers.cuda.faults import Faults
from gpulease.daemon.drivers.cuda.streams import Markers
from gpulease.daemon.drivers.interface import (
    SEGMENT_STEPS,
    CopyStep,
    DataStep,
    DriverError,
    KernelStep,
    LaunchRejected,
    Poll,
    Step,
    cooperative_refused,
)

if TYPE_CHECKING:
    from gpulease.daemon.drivers.cuda.context import CudaContext

SEGMENT_BYTES: Final = 144 << 10
"""What an executable graph takes of the card whatever is in it, from the driver's store, which keeps it when the graph
goes. 123 KB were measured on an H100 (driver 580.159)."""

NODE_BYTES: Final = 3 << 10
"""What a node of it takes besides its parameters: 2 KB were measured."""

PARAMETERS_FACTOR: Final = 2
"""Of a node's parameter bytes, so many times: 2.0 were measured. Over 1100 graphs of launches with 8 to 3080 bytes, and
of copies, the sum of these was above what the card showed, by a seventh for launches."""


def device_bytes_of(steps: Sequence[Step]) -> int:
    """What the graph of these takes of the card at most."""
    segments = -(-len(steps) // SEGMENT_STEPS)
    params = sum(len(step.params) for step in steps if isinstance(step, KernelStep))
    return segments * SEGMENT_BYTES + len(steps) * NODE_BYTES + PARAMETERS_FACTOR * params


class PinnedBytes:
    """Bytes that copies of a graph read, one behind the other, locked for the card."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        data = b"".join(parts)
        self._map = mmap.mmap(-1, len(data))
        self._map[:] = data
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Where the driver refuses, the copies are as right, and slower.
        (error,) = api.cuMemHostRegister(self.address, len(data), 0)
        self._is_pinned = not error

    def release(self) -> None:
        """Unlock them: nothing that reads them is queued any more."""
        if self._is_pinned:
            api.cuMemHostUnregister(self.address)
            self._is_pinned = False


@dataclass(slots=True, eq=False)
class _KernelNode:
    """A kernel's node, and what its parameters are read from whenever the driver is told of them."""

    node: Any
    given: Any
    params: Any
    pointers: Any


@dataclass(slots=True, eq=False)
class _Segment:
    """One executable graph, the graph it was made of, and the launches in it by step."""

    graph: Any
    launches: dict[int, _KernelNode] = field(default_factory=dict)
    executable: Any = None


class CudaGraph:
    """See `gpulease.daemon.drivers.interface.Graph`."""

    def __init__(self, context: "CudaContext", steps: Sequence[Step]) -> None:
        """Raises LaunchRejected for a launch that the driver does not take, or DriverError."""
        self._context = context
        self._steps = list(steps)
        self.device_bytes = device_bytes_of(steps)
        self._kernels = [step.kernel.name for step in steps if isinstance(step, KernelStep)]
        # Parameter buffers by step, where they are not those of the step.
        self._bound: dict[int, bytes] = {}
        self._segments: list[_Segment] = []
        data = [step.data for step in steps if isinstance(step, DataStep)]
        self._pinned = PinnedBytes(data) if data else None
        self._data_at = self._pinned.address if self._pinned else 0
        try:
            for first in range(0, len(steps), SEGMENT_STEPS):
                self._add_segment(first, steps[first : first + SEGMENT_STEPS])
        except BaseException:
            self.close()
            raise

    def bind(self, step: int, params: bytes) -> None:
        """See Graph."""
        self._bound[step] = params
        segment = self._segments[step // SEGMENT_STEPS]
        launch = segment.launches[step]
        ctypes.memmove(launch.params, params, len(params))
        self._check(api.cuGraphExecKernelNodeSetParams(segment.executable, launch.node, launch.given))

    def replay(self, tag: int, poll: Poll) -> None:
        """See Graph."""
        if self._context.is_watched:
            self._replay_one_by_one(tag, poll)
            return
        stream = self._context.stream
        for number, segment in enumerate(self._segments):
            if number:
                poll()
            self._check(api.cuGraphLaunch(segment.executable, stream))
        self._context.replayed(tag, self._kernels)

    def close(self) -> None:
        """See Graph."""
        for segment in self._segments:
            # What can fail here is a context that is lost, and all in it with it.
            if segment.executable is not None:
                api.cuGraphExecDestroy(segment.executable)
            api.cuGraphDestroy(segment.graph)
        self._segments.clear()
        self._steps.clear()
        if self._pinned is not None:
            self._context.retire(self._pinned)
            self._pinned = None

    def _replay_one_by_one(self, tag: int, poll: Poll) -> None:
        context = self._context
        for number, step in enumerate(self._steps):
            if number and number % SEGMENT_STEPS == 0:
                poll()
            if isinstance(step, KernelStep):
                params = self._bound.get(number, step.params)
                context.launch(step.kernel, step.grid, step.block, step.shared_bytes, params, tag)
            elif isinstance(step, DataStep):
                context.mem_write(step.address, memoryview(step.data), poll)
            elif step.to_device:
                context.write_pinned(step.address, step.memory, poll)
            else:
                context.read_pinned(step.address, step.memory, poll)

    # --- making ---

    def _add_segment(self, first: int, steps: Sequence[Step]) -> None:
        segment = _Segment(self._check(api.cuGraphCreate(0)))
        self._segments.append(segment)
        before: list[Any] = []
        for number, step in enumerate(steps, first):
            if isinstance(step, KernelStep):
                launch = self._add_kernel(segment.graph, before, step)
                segment.launches[number] = launch
                before = [launch.node]
            else:
                before = [self._add_copy(segment.graph, before, step)]
        segment.executable = self._check(api.cuGraphInstantiate(segment.graph, 0))

    def _add_kernel(self, graph: Any, before: list[Any], step: KernelStep) -> _KernelNode:
        params = ctypes.create_string_buffer(step.params, max(1, len(step.params)))
        start = ctypes.addressof(params)
        places = [start + parameter.offset for parameter in step.kernel.parameters]
        pointers = (ctypes.c_void_p * max(1, len(places)))(*places)
        kernel: Any = step.kernel
        if kernel.is_cooperative:
            raise cooperative_refused(kernel.name)
        given = api.CUDA_KERNEL_NODE_PARAMS()
        given.func = api.CUfunction(kernel.function)
        given.gridDimX, given.gridDimY, given.gridDimZ = step.grid
        given.blockDimX, given.blockDimY, given.blockDimZ = step.block
        given.sharedMemBytes = step.shared_bytes
        given.kernelParams = ctypes.addressof(pointers) if places else 0
        error, node = api.cuGraphAddKernelNode(graph, before, len(before), given)
        if error == api.CUresult.CUDA_ERROR_INVALID_VALUE:
            raise self._rejected(step, "invalid argument")
        self._check((error,))
        return _KernelNode(node, given, params, pointers)

    def _add_copy(self, graph: Any, before: list[Any], step: DataStep | CopyStep) -> Any:
        if isinstance(step, DataStep):
            host, size, to_device = self._data_at, len(step.data), True
            self._data_at += size
        else:
            host, size = ctypes.addressof(ctypes.c_char.from_buffer(step.memory)), len(step.memory)
            to_device = step.to_device
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

    def _rejected(self, step: KernelStep, why: str) -> LaunchRejected:
        return LaunchRejected(
            f"{step.kernel.name}: {why}", hint="Check grid, block and shared memory against what the kernel can take."
        )

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """What a call of the driver gave; raises what went wrong."""
        if answer[0]:
            raise self._context.failure(answer[0])
        return answer[1] if len(answer) > 1 else None


class Replays(Faults):
    """The part of a context that graphs need."""

    _markers: Markers | None

    def __init__(self) -> None:
        super().__init__()
        self._retired: list[PinnedBytes] = []
        self._pinned: list[int] = []

    @property
    def is_watched(self) -> bool:
        """Whether each kernel's end must be seen."""
        return self._markers is not None

    @property
    def stream(self) -> Any:
        """Where launches go, as the driver's API takes it."""
        return api.CUstream(self._stream.handle)

    def replayed(self, tag: int, kernels: Sequence[str]) -> None:
        """A graph of these was queued."""
        self._launcher.state.launches += 1
        self._launcher.state.tag = tag
        self._last_kernel = kernels[0] if len(kernels) == 1 else ""

    def retire(self, memory: PinnedBytes) -> None:
        """Keep what copies that are queued may still read until the next graph is made."""
        self._retired.append(memory)

    def unlock(self) -> None:
        """Let go of all memory that was locked for the card; nothing that is queued uses it. Raises DriverError."""
        while self._retired:
            self._retired.pop().release()
        while self._pinned:
            (error,) = api.cuMemHostUnregister(self._pinned.pop())
            if error:
                raise self.failure(error)

    def failure(self, error: Any) -> DriverError:
        """What a call of the driver's API failed with."""
        _, text = api.cuGetErrorString(error)
        return self._error(DriverError(f"the driver's call failed: {text.decode()}"))
