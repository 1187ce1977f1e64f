"""Times of the decode engine's steps on the CUDA driver in this process: no daemon, no lease.

    python -m gpulease.client.bench.decode_direct SHAPE TARGET BATCH,... CONTEXT,...

Kernels, their order, weights and rows are the decode engine's own. Each step is a CUDA graph that was captured from a
stream; two are in progress at a time. Prints one JSON object per figure, or one with the reason if there are none.
"""

import asyncio
import ctypes
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_steps import (
    SEED,
    RowBlocks,
    block_tables,
    decode_rows,
    limits_of,
    numbers_of,
    step_time,
)
from gpulease.client.bench.figures import print_figures
from gpulease.client.decode import ModelConfig, RandomCheckpoint
from gpulease.client.decode.checkpoint.weight_loader import load_weights
from gpulease.client.decode.engine.engine import MAX_STEPS
from gpulease.client.decode.engine.forward_pass import ForwardPass, StepLimits, block_bytes
from gpulease.client.decode.row_records import RESULT, ROW, Results, Rows
from gpulease.client.handles import Buffer, Module
from gpulease.client.kernel_args import KernelArgs
from gpulease.protocol import Opcode

SHARED_BYTES: Final = 48 << 10
"""Dynamic shared memory per block that needs no opt-in (CUDA C++ Programming Guide, Shared Memory)."""


class NoDriver(Exception):
    """The CUDA driver, its bindings, or a card is missing; the message names which."""


class DriverFailed(Exception):
    """A call to the CUDA driver returned an error."""


def cuda_driver() -> Any:
    """Return the CUDA driver's functions, with a context current in this thread. Raises NoDriver."""
    try:
        from cuda.bindings import driver

        _check(driver, driver.cuInit(0))
        # Use the primary context, as programs with the runtime API do.
        card = _check(driver, driver.cuDeviceGet(0))
        _check(driver, driver.cuCtxSetCurrent(_check(driver, driver.cuDevicePrimaryCtxRetain(card))))
    except ImportError as error:
        raise NoDriver(f"cuda-bindings is not installed: {error}") from None
    except (RuntimeError, DriverFailed) as error:
        raise NoDriver(f"no CUDA driver: {error}") from None
    return driver


def _check(api: Any, answer: tuple[Any, ...]) -> Any:
    if answer[0]:
        # Report the driver's text for the error, or the number if it has none.
        name = api.cuGetErrorString(answer[0])[1]
        raise DriverFailed(name.decode() if isinstance(name, bytes) else str(answer[0]))
    return answer[1] if len(answer) > 1 else None


class DirectSession:
    """Implements, directly on the driver, the methods of a session that loading a model and recording a step need.

    A buffer's handle is its address.

    Attributes:
        api: The driver's functions.
        stream: The stream into which launches go.
        dropped: Handles whose Python objects were collected (`client/handles.py` appends them). They are never freed
          one by one; all end with the process.
        is_alive: Always True.
        slice_bytes: Total memory of the card, in bytes.
    """

    def __init__(self, api: Any) -> None:
        self.api = api
        self.stream: Any = 0
        self.dropped: list[tuple[Opcode, int]] = []
        self.is_alive = True
        self.slice_bytes: int = self.call("cuDeviceTotalMem", self.call("cuCtxGetDevice"))
        self._modules: list[Any] = []
        self._early_modules: set[int] = set()
        self._follows_kernel = False
        self._functions: dict[tuple[int, str], Any] = {}

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver by name; returns its result. Raises DriverFailed."""
        return _check(self.api, getattr(self.api, name)(*args))

    async def mem_alloc(self, size_bytes: int) -> Buffer:
        """Allocate device memory and set it to zero, as a session's memory is."""
        address = self.call("cuMemAlloc", size_bytes)
        self.call("cuMemsetD8", address, 0, size_bytes)
        return Buffer(self, int(address), size_bytes)

    async def mem_free(self, buffer: Buffer) -> None:
        """Free a buffer's device memory immediately."""
        self.call("cuMemFree", buffer.handle)

    async def mem_write(self, buffer: Buffer, offset: int, data: Any) -> None:
        """Copy bytes to the card, from byte `offset` of the buffer on."""
        # Make a flat array, because the driver takes an address and a length.
        source = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        self.call("cuMemcpyHtoD", buffer.handle + offset, source.ctypes.data, source.nbytes)

    async def module_load(self, image: bytes) -> Module:
        """Load PTX; the module's handle is an index here."""
        text = ctypes.create_string_buffer(image)
        self._modules.append(self.call("cuModuleLoadData", ctypes.addressof(text)))
        if b"griddepcontrol.wait" in image:
            self._early_modules.add(len(self._modules) - 1)
        return Module(self, len(self._modules) - 1, ())

    async def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArgs,
        arg_sizes: None,
        shared_bytes: int,
    ) -> None:
        """Queue a launch in the current stream: during a capture, in the graph."""
        # The arguments are packed without gaps. The driver takes a pointer to each.
        start = ctypes.create_string_buffer(args.data, len(args.data))
        places = np.cumsum([0, *args.sizes[:-1]], dtype=np.uint64) + np.uint64(ctypes.addressof(start))
        shape = (*grid, *(1,) * (3 - len(grid)), *block)
        function = self._function(module, kernel, shared_bytes)
        # As in the daemon's graphs, a kernel that contains its own wait starts while the kernel before it ends.
        if self._follows_kernel and module.handle in self._early_modules:
            self._launch_early(function, shape, shared_bytes, places.ctypes.data)
        else:
            self.call("cuLaunchKernel", function, *shape, shared_bytes, self.stream, places.ctypes.data, 0)
        self._follows_kernel = True

    def _launch_early(self, function: Any, shape: Sequence[int], shared_bytes: int, places: int) -> None:
        config, early = self.api.CUlaunchConfig(), self.api.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ = shape
        config.sharedMemBytes, config.hStream = shared_bytes, self.stream
        early.id = self.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [early], 1
        self.call("cuLaunchKernelEx", config, function, places, 0)

    def _function(self, module: Module, kernel: str, shared_bytes: int) -> Any:
        function = self._functions.get((module.handle, kernel))
        if function is None:
            function = self.call("cuModuleGetFunction", self._modules[module.handle], kernel.encode())
            # A kernel that uses more than SHARED_BYTES needs this attribute.
            if shared_bytes > SHARED_BYTES:
                max_shared = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.call("cuFuncSetAttribute", function, max_shared, shared_bytes)
            self._functions[module.handle, kernel] = function
        return function

    @contextmanager
    def captured(self, stream: Any) -> Iterator[list[Any]]:
        """Capture the block's calls in a stream; after the block, the list contains the executable graph."""
        graphs: list[Any] = []
        # Launches and copies of the block go into this stream, and so into the graph.
        self.stream, self._follows_kernel = stream, False
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", stream, mode)
        yield graphs
        graphs.append(self.call("cuGraphInstantiate", self.call("cuStreamEndCapture", stream), 0))

    def pinned(self, count: int, dtype: Any) -> "np.typing.NDArray[Any]":
        """An array in pinned host memory, which the driver can copy to and from while the host continues."""
        size = count * dtype.itemsize
        address = self.call("cuMemAllocHost", size)
        return np.frombuffer((ctypes.c_ubyte * size).from_address(int(address)), dtype)


class DirectEngine:
    """A model in this process, with `start` and `finish` as in `DecodeEngine`.

    Attributes:
        blocks: The blocks of keys and values.
    """

    def __init__(self, session: DirectSession, forward: ForwardPass, pool: Buffer, buckets: Sequence[int]) -> None:
        """Prepare the streams and pinned memory; `open` calls this."""
        self.blocks = RowBlocks(pool.handle, pool.size_bytes // block_bytes(forward.weights.config))
        self._session = session
        self._forward = forward
        self._buckets = buckets
        max_rows = forward.limits.max_rows
        # One stream, event, and pair of host arrays for each step in progress.
        self._streams = [session.call("cuStreamCreate", 1) for _ in range(MAX_STEPS)]
        self._events = [session.call("cuEventCreate", 2) for _ in range(MAX_STEPS)]
        self._rows = [session.pinned(max_rows, ROW) for _ in range(MAX_STEPS)]
        self._results = [session.pinned(max_rows, RESULT) for _ in range(MAX_STEPS)]
        self._graphs: dict[tuple[int, int], Any] = {}
        self._steps: deque[tuple[int, int]] = deque()
        self._next = 0

    @classmethod
    async def open(
        cls, api: Any, config: ModelConfig, limits: StepLimits, blocks: int, buckets: Sequence[int], target: str
    ) -> "DirectEngine":
        """Load random weights and the kernels, and capture a graph for each number of rows in `buckets`."""
        # Take the same steps as `DecodeEngine.open`, without lease, regions and session.
        session: Any = DirectSession(api)
        weights = await load_weights(session, RandomCheckpoint(config, SEED), positions=limits.positions)
        forward = ForwardPass(session, weights, limits, target)
        await forward.prepare()
        await session.mem_write(forward.tables, 0, block_tables(limits))
        pool = await session.mem_alloc(blocks * block_bytes(config))
        engine = cls(session, forward, pool, buckets)
        await engine._capture()
        return engine

    async def _capture(self) -> None:
        session, forward = self._session, self._forward
        self._session.call("cuCtxSynchronize")
        # Make a graph for each number of rows in each of the two streams: a graph's copies have fixed addresses.
        for parity, stream in enumerate(self._streams):
            rows_address, results_address = self._rows[parity].ctypes.data, self._results[parity].ctypes.data
            for bucket in self._buckets:
                with session.captured(stream) as graphs:
                    session.call("cuMemcpyHtoDAsync", forward.rows.handle, rows_address, bucket * ROW.itemsize, stream)
                    await forward.launch(bucket)
                    session.call(
                        "cuMemcpyDtoHAsync", results_address, forward.results.handle, bucket * RESULT.itemsize, stream
                    )
                self._graphs[bucket, parity] = graphs[0]

    async def start(self, rows: Rows, pools: Iterable[Any] = ()) -> int:
        """Start a step after those in progress; do not wait for it. `buckets` must contain the number of rows."""
        session, number = self._session, self._next
        parity = number % MAX_STEPS
        stream = self._streams[parity]
        # Put the rows at the place from which the graph copies.
        self._rows[parity][: len(rows)] = rows
        # Order this step after the one before, which may still run in the other stream.
        if self._steps:
            session.call("cuStreamWaitEvent", stream, self._events[1 - parity], 0)
        session.call("cuGraphLaunch", self._graphs[len(rows), parity], stream)
        session.call("cuEventRecord", self._events[parity], stream)
        self._steps.append((parity, len(rows)))
        self._next += 1
        return number

    async def finish(self) -> Results:
        """Wait for the oldest step in progress. Returns RESULT records."""
        parity, rows = self._steps.popleft()
        # Copy the results once the stream has finished, so that the next step can use the array.
        self._session.call("cuStreamSynchronize", self._streams[parity])
        return self._results[parity][:rows].copy()


async def measure(api: Any, shape: str, target: str, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Print the figures of a shape, for each batch and context."""
    config, limits = SHAPES[shape], limits_of(batches, contexts)
    # Enough blocks for the largest batch at the longest context.
    count = max(batches) * limits.table_blocks
    engine = await DirectEngine.open(api, config, limits, count, batches, target)
    for context in contexts:
        for batch in batches:
            step_times = await step_time(engine, decode_rows(engine.blocks, limits, batch, context), ())
            figure = {"figure": "direct", "shape": shape, "batch": batch, "context": context}
            print_figures(figure | {"ms": step_times.took_s * 1e3, "results": step_times.results})


if __name__ == "__main__":
    # Arguments as the parent process passed them.
    shape, target, batches, contexts = sys.argv[1:]
    try:
        # A missing driver is not a failure, because the run's other figures are still worth printing.
        api = cuda_driver()
    except NoDriver as error:
        print_figures({"figure": "direct", "shape": shape, "skipped": str(error)})
    else:
        asyncio.run(measure(api, shape, target, numbers_of(batches), numbers_of(contexts)))
