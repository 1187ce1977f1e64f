"""The Python interface of launch.ll, which launches and copies for native code, and keeps counts that Python reads."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from gpulease.daemon.drivers import cuda
from gpulease.daemon.drivers.interface import (
    CardProgress,
    Dim3,
    DriverKernel,
    KernelStep,
    LaunchRejected,
    NativeChain,
    NativeLaunch,
    too_much_shared,
)
from gpulease.daemon.native.code_cache import load_ir
from gpulease.daemon.native.compiler import NativeCode

LIBRARY: Final = "libcuda.so.1"

DEFAULT_SHARED_BYTES: Final = 48 << 10
"""Shared memory of a block, static and dynamic, that a function may have unless it opts in to more (CUDA C++
Programming Guide, "Technical Specifications per Compute Capability")."""

_LAUNCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
)


class LaunchState(ctypes.Structure):
    """A context's state as native code reads and writes it; launch.ll repeats the offsets, eight bytes a field.

    launch_kernel  Address of cuLaunchKernel.
    stream_query   Address of cuStreamQuery.
    stream         The CUstream that launches go into.
    other_streams  Number of other streams of the context. If there are any, native code leaves waits for all to Python.
    launches       Number of launches since all launches were last known to have ended.
    tag            The last launch's tag.
    copy_in        Address of cuMemcpyHtoDAsync.
    copy_out       Address of cuMemcpyDtoHAsync.
    memset         Address of cuMemsetD8Async.
    zeroed         Number of allocations that native code has zeroed since all operations were last known to have ended.
    set_params     Address of cuGraphExecKernelNodeSetParams.
    graph_launch   Address of cuGraphLaunch.
    streams        Address of the context's CUstreams, of which there are `other_streams` + 1.
    events         Address of MAX_MARKS CUevents; 0 before they are needed.
    event_record   Address of cuEventRecord.
    event_query    Address of cuEventQuery.
    """

    _fields_ = (
        ("launch_kernel", ctypes.c_uint64),
        ("stream_query", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("other_streams", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("copy_in", ctypes.c_uint64),
        ("copy_out", ctypes.c_uint64),
        ("memset", ctypes.c_uint64),
        ("zeroed", ctypes.c_uint64),
        ("set_params", ctypes.c_uint64),
        ("graph_launch", ctypes.c_uint64),
        ("streams", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("event_record", ctypes.c_uint64),
        ("event_query", ctypes.c_uint64),
    )


class LaunchRecord(ctypes.Structure):
    """A kernel's launch without its parameters; launch.ll repeats the offsets.

    function      The CUfunction.
    grid          Blocks in x, y, z.
    block         Threads of each block in x, y, z.
    shared_bytes  Dynamic shared memory of each block.
    reserved      Unused.
    """

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class DynamicSharedMemory:
    """Dynamic shared memory that launches of one function may request.

    Most functions never need more than the default, so a function opts in when a launch first requests more.

    Args:
        static_bytes: Shared memory that the function's variables take.
        card_bytes: Maximum number of bytes that a block may have on the card, if it opts in.
        opt_in: Lets the function have that many bytes of dynamic shared memory; False if the driver refuses. The
          launch then fails by itself, with the driver's reason.
    """

    __slots__ = ("_allowed_bytes", "_most_bytes", "_opt_in", "_static_bytes")

    def __init__(self, static_bytes: int, card_bytes: int, opt_in: Callable[[int], bool]) -> None:
        self._static_bytes = static_bytes
        self._allowed_bytes = DEFAULT_SHARED_BYTES - static_bytes
        self._most_bytes = max(DEFAULT_SHARED_BYTES, card_bytes) - static_bytes
        self._opt_in = opt_in

    @property
    def most_dynamic_bytes(self) -> int:
        return self._most_bytes

    def allow(self, kernel: str, size_bytes: int) -> None:
        """Let a launch have `size_bytes`. Raises LaunchRejected for more than a block may have on the card."""
        # This is the usual case, which needs no driver call.
        if size_bytes <= self._allowed_bytes:
            return
        if size_bytes > self._most_bytes:
            raise too_much_shared(kernel, size_bytes, self._static_bytes, self._most_bytes + self._static_bytes)
        # Opt in once, for as much as any later launch may have.
        if self._opt_in(self._most_bytes):
            self._allowed_bytes = self._most_bytes


@cache
def launching_code() -> NativeCode:
    """Return the code of launch.ll, compiled once per process; starts no thread."""
    return load_ir(files(cuda).joinpath("launch.ll").read_text("ascii"))


def record_of(kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int) -> bytes:
    """Return the bytes of a LaunchRecord with shared memory that the function may have. Raises LaunchRejected.

    All numbers fit, because on the wire they are u32 too.
    """
    kernel.shared.allow(kernel.name, shared_bytes)
    return bytes(LaunchRecord(kernel.function, grid, block, shared_bytes))


def _native_record(kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int) -> bytes | None:
    """Return a record for native code; None for a launch that `CudaContext.launch` refuses."""
    if kernel.is_cooperative:
        return None
    try:
        return record_of(kernel, grid, block, shared_bytes)
    except LaunchRejected:
        return None


class Launcher:
    """Launches in the current context, for Python and for native code. Both call launch.ll, which counts all launches.

    Args:
        stream: The CUstream to launch in.
        library: The driver API's library.

    Attributes:
        state: The state that Python and native code share.
    """

    def __init__(self, stream: int, library: str = LIBRARY) -> None:
        # cuda-bindings hides these addresses, so they come from the library; suffixes are the ABI's versions.
        self._driver = ctypes.CDLL(library)
        self.state = LaunchState(
            launch_kernel=_address(self._driver.cuLaunchKernel),
            stream_query=_address(self._driver.cuStreamQuery),
            stream=stream,
            copy_in=_address(self._driver.cuMemcpyHtoDAsync_v2),
            copy_out=_address(self._driver.cuMemcpyDtoHAsync_v2),
            memset=_address(self._driver.cuMemsetD8Async),
            set_params=_address(self._driver.cuGraphExecKernelNodeSetParams_v2),
            graph_launch=_address(self._driver.cuGraphLaunch),
            event_record=_address(self._driver.cuEventRecord),
            event_query=_address(self._driver.cuEventQuery),
        )
        self.show_streams([stream])
        self._events: ctypes.Array[ctypes.c_uint64] | None = None
        self._state_address = ctypes.addressof(self.state)
        self._launch: Callable[[int, int, bytes, int, int], int] = _LAUNCH(launching_code().address("launch"))
        # Python's last launch, and its record: the next launch often has the same shape.
        self._shape: tuple[int, Dim3, Dim3, int] | None = None
        self._record = LaunchRecord()
        self._record_address = ctypes.addressof(self._record)

    def native(
        self,
        launched: Callable[[DriverKernel], None],
        spin_ns: int,
        chain: Callable[[Sequence[KernelStep]], NativeChain] | None,
    ) -> NativeLaunch:
        """Return the functions for native code; the arguments are NativeLaunch's."""
        code = launching_code()
        names = ("launch", "query", "copy_in", "copy_out", "zero", "replay", "replay_graph")
        launch, query, copy_in, copy_out, zero, replay, replay_graph = map(code.address, names)
        return NativeLaunch(
            self._state_address,
            launch,
            query,
            spin_ns,
            _native_record,
            launched,
            copy_in,
            copy_out,
            zero,
            replay,
            chain,
            replay_graph,
        )

    def show_streams(self, streams: Sequence[int]) -> None:
        """Give native code all streams of the context, beginning with stream 0."""
        # Set the new array's address before the old array is freed, because native code reads it.
        array = (ctypes.c_uint64 * len(streams))(*streams)
        self.state.streams = ctypes.addressof(array)
        self.state.other_streams = len(streams) - 1
        self._streams = array

    def show_events(self, events: Sequence[int]) -> None:
        """Give native code MAX_MARKS events for its marks."""
        self._events = (ctypes.c_uint64 * len(events))(*events)
        self.state.events = ctypes.addressof(self._events)

    def progress(self, prepare: Callable[[], None]) -> CardProgress:
        """Return the functions of launch.ll that show what has ended; `prepare` makes the events."""
        idle, mark, reached = map(launching_code().address, ("idle", "mark", "reached"))
        return CardProgress(self._state_address, idle, mark, reached, prepare, sleeps=True)

    def launch(self, kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> int:
        """Queue a launch; return the CUresult, 0 if it was queued. Raises LaunchRejected."""
        shape = (kernel.function, grid, block, shared_bytes)
        # A launch of the same shape reuses the record.
        if shape != self._shape:
            record = record_of(kernel, grid, block, shared_bytes)
            ctypes.memmove(self._record_address, record, len(record))
            self._shape = shape
        return self._launch(self._state_address, self._record_address, params, len(params), tag)

    def ended(self) -> None:
        self.state.launches = self.state.zeroed = 0

    @property
    def queued(self) -> int:
        """Number of operations in stream 0 that may not have ended, except those that Python counts."""
        return int(self.state.launches + self.state.zeroed)

    def count(self, tag: int) -> None:
        """Count a launch that another function put in the stream."""
        self.state.launches += 1
        self.state.tag = tag

    def text_of(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(result, ctypes.byref(text))
        return f"cuLaunchKernel failed: {(text.value or b'unknown error').decode()}"


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
