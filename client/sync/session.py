"""Sessions of the blocking face: each call returns when it is done. Threads may share a session; they take turns."""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from gpulease.client.core.arrays import new, upload
from gpulease.client.core.copies import SMALL_READ_BYTES
from gpulease.client.core.elementwise import ElementwiseOperation
from gpulease.client.core.launch import KernelArguments, LaunchAttributes
from gpulease.client.core.lease import LeaseState, by_environment, by_token, state_of
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import Session, SessionView
from gpulease.client.core.streams import PrintedCallback, PrintedText
from gpulease.client.core.tokens import Grant, token_of
from gpulease.client.fork_guard import register
from gpulease.client.handles import BorrowedBuffer, Buffer, ModuleHandle
from gpulease.client.kernels.cuda_c import ptx_of
from gpulease.client.kernels.elementwise_source import ElementwiseSource
from gpulease.client.kernels.function_kernels import kernel_of
from gpulease.client.kernels.numba_kernel import Signature
from gpulease.client.kernels.toolchain import checked_version
from gpulease.client.sync.arrays import Array, make
from gpulease.client.sync.driver import drive
from gpulease.client.sync.graphs import Recorder
from gpulease.client.sync.idle_frees import look_after
from gpulease.client.sync.kernels import ElementwiseKernel, Kernel
from gpulease.client.sync.lease import GpuLease, GpuSharedLease
from gpulease.client.sync.modules import Module
from gpulease.client.sync.regions import Region
from gpulease.client.sync.streams import Stream, fence

Into = TypeVar("Into")

SPIN_NS: Final = 200_000
"""Longest time that a reply is looked for before its caller sleeps: most come within it, and a wake-up takes tens of
microseconds."""


class GpuSession(SessionView):
    """A lease's isolated context on its card. `GpuSession(lease)` opens it; it ends when closed, or with its lease.

    An operation is done when it returns, except those that are only handed over: `launch`, `mem_free`, and `mem_write`
    of up to 64 KiB. The worker does these in their order, and after one fails it skips those behind it. The next
    operation that waits raises the failure, and is not done itself. A session keeps its lease from being dropped.

    Leaving its `with` block waits for work that nothing has waited for yet, and raises what failed. It waits as `sync`
    does, but no longer than the lease had left when the block was left: then TimedOut, if the lease goes on even so. A
    block that is left by an exception waits for nothing; neither does `close`. A session by token that loaded no module
    asks only about its own requests: it waits for nobody's kernels, and leaves others' failures to them.

    Failures of one operation derive from OperationFailed, and the session goes on. GpuSessionFailed means that it is
    lost.
    """

    def __init__(
        self, lease: GpuLease | GpuSharedLease, *, grant: Grant | None = None, shared_memory: bool = True
    ) -> None:
        """Open a session.

        Args:
            lease: Its lease.
            grant: A token of the lease: the session does what the token permits, until that expires, and no more. A
                token opens one session.
            shared_memory: Whether to share memory with its process; without, everything goes through the socket.

        Raises InvalidRequest for a grant of another lease, Denied if its token fails a check.
        """
        self.lease = lease
        session = Session(state_of(lease), threading.RLock(), grant=grant, shared_memory=shared_memory, spin_ns=SPIN_NS)
        self._set_session(session)
        register(self)
        try:
            drive(session.attach())
            self._closing = weakref.finalize(self, session.operations.close)
            look_after(session)
        except BaseException:
            session.attachment.give_up()
            raise

    @classmethod
    def attach(
        cls, token: bytes | str | Grant | None = None, address: str | None = None, *, shared_memory: bool = True
    ) -> Self:
        """Open another tenant's session, by a token of theirs: it does what the token permits, until that expires.

        A token opens one session. Without a token, open the session of the lease that `gpulease run` took for this
        program, which GPULEASE_LEASE_ID names.

        Raises:
            Denied: The token failed a check, which the message names.
            InvalidRequest: No token was given, and GPULEASE_LEASE_ID is not set.
        """
        where, lock = address_of(address), threading.RLock()
        state: LeaseState | None = None
        try:
            state = drive(by_environment(where, lock) if token is None else by_token(where, token_of(token), lock))
            return cls(GpuSharedLease(state), shared_memory=shared_memory)
        except BaseException:
            # The error keeps its frames, and they the connection, for as long as somebody keeps the error.
            if state is not None:
                state.channel.close()
            raise

    def mem_alloc(self, size_bytes: int) -> Buffer:
        """Allocate device memory, zeroed. Raises AllocFailed if the slice has no room."""
        with self._lock:
            buffer = self._session.resources.alloc_at_once(size_bytes)
            return buffer if isinstance(buffer, Buffer) else drive(buffer)

    def mem_free(self, buffer: Buffer) -> None:
        """Give a buffer back now rather than when its last reference goes; nothing is waited for."""
        with self._lock:
            rest = self._session.resources.free(buffer)
            if rest is not None:
                drive(rest)

    def keep(self, buffer: Buffer, name: str) -> None:
        """Have the lease keep a buffer beyond this session's end: until it is freed or taken, or the lease ends.

        The buffer can be used here as before. Dropping its last reference no longer frees it; `mem_free` does. An
        array is kept by its `buffer`.

        Args:
            buffer: The buffer.
            name: The name by which any session of the lease finds it. A kept buffer gets another name so.

        Raises:
            InvalidRequest: Another buffer is kept by that name.
            Busy: The lease keeps as many as it may.
            Unsupported: The session's daemon is too old.
        """
        drive(self._session.kept.keep(buffer, name))

    def kept(self, name: str) -> BorrowedBuffer:
        """Find a buffer that the lease keeps. It stays kept: dropping it frees nothing, `mem_free` does.

        Raises InvalidHandle if there is none of that name, or Unsupported.
        """
        return drive(self._session.kept.find(name))

    def kept_names(self) -> dict[str, int]:
        """Ask for the buffers that the lease keeps: their sizes in bytes by their names. Raises Unsupported."""
        return drive(self._session.kept.names())

    def take(self, name: str) -> Buffer:
        """Make a buffer that the lease keeps this session's own: it ends with its last reference, or the session.

        Raises InvalidHandle if there is none of that name, or Unsupported.
        """
        return drive(self._session.kept.take(name))

    def reset(self) -> int:
        """Wait as `sync` does, then free all memory that no open session holds; the number of bytes.

        That is what the lease keeps by name, what sessions left that have ended, and the parts of ended regions.

        Raises Denied unless the session may read and write memory and launch, or Unsupported.
        """
        return drive(self._session.kept.reset())

    def array(self, values: Any, dtype: Any = None) -> Array:
        """Copy an array of numpy's, or what numpy makes one of, to a new array on the card.

        Args:
            values: The elements.
            dtype: The type to convert them to; "bfloat16" and the "float8_..." come from ml_dtypes. Theirs if None.

        Raises:
            InvalidRequest: That is no array of numbers, or has over 8 dimensions.
            AllocFailed: The slice has no room.
            Unsupported: The type needs ml_dtypes, which is not installed.
        """
        return make(self, upload(self, Array, values, dtype))

    def zeros(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Make an array of zeros on the card. Raises what `array` does."""
        return make(self, new(self, Array, shape, dtype, "zeros"))

    def empty_device(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Make an array on the card for a kernel to fill. Its memory is zeroed: no lease sees another's bytes."""
        return make(self, new(self, Array, shape, dtype, "empty_device"))

    def stream(self) -> Stream:
        """Make a stream for launches and copies, beside the default one. Raises Busy beyond MAX_STREAMS."""
        return drive(self._session.streams.create(Stream))

    @property
    def default_stream(self) -> Stream:
        """The stream of launches and copies that name none. A copy in it is always done when its call returns."""
        return self._session.streams.default(Stream)

    def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: Stream | None = None) -> None:
        """Copy any buffer's bytes (bytes, memoryview, numpy array) to byte `offset`. Raises InvalidHandle.

        `data` may be changed when this returns. Only an array of `empty` that is copied in a stream must be left alone
        until that stream is waited for (`Stream`). Up to 64 KiB are handed over and not waited for: if such a copy
        fails, because a kernel before it faulted for example, the next operation that waits raises it, as for a launch.

        Args:
            buffer: Target.
            offset: First byte in the buffer.
            data: Any buffer of bytes. One that is not contiguous is copied in C order.
            stream: The stream to copy in; the default stream if None.
        """
        with self._lock:
            rest = self._copies.write(buffer, offset, data, stream)
            if rest is not None:
                drive(rest)

    @overload
    def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: None = None, stream: Stream | None = None
    ) -> bytes: ...

    @overload
    def mem_read(self, buffer: Buffer, offset: int, nbytes: int, into: Into, stream: Stream | None = None) -> Into: ...

    def mem_read(self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: Stream | None = None) -> Any:
        """Copy `nbytes` from byte `offset`.

        Args:
            buffer: Source.
            offset: First byte in the buffer.
            nbytes: How many bytes.
            into: Anything C-contiguous that can be written: an array of any type, a bytearray, a memoryview.
            stream: The stream to copy in; the default stream if None. An array of `empty` then has the bytes once the
                stream was waited for (`Stream`).

        Returns:
            `into`, or new bytes if that is None.

        Raises:
            InvalidHandle: The bytes are not all inside the buffer, or the buffer is freed or another session's.
        """
        if stream is not None:
            return drive(self._copies.read(buffer, offset, nbytes, into, stream))
        target = bytearray(nbytes) if into is None and type(nbytes) is int and 0 < nbytes <= SMALL_READ_BYTES else into
        with self._lock:
            rest = self._copies.read_at_once(buffer, offset, nbytes, target)
            result = None if rest is None else drive(rest)
        return into if into is not None else bytes(target if result is None else result)

    def module_load(self, image: bytes | bytearray | memoryview | str) -> Module:
        """Load PTX text or a cubin. Raises LoadFailed with the compiler's log."""
        return drive(self._session.resources.load(image, Module))

    def compile(self, source: str, *, options: Sequence[str] = (), arch: int | None = None) -> Module:
        """Compile CUDA C and load it: a module as `module_load` returns it, by NVRTC (the extra `cuda-c`).

        Args:
            source: The text. Kernels are `extern "C" __global__`, or have the names that C++ makes of them.
            options: NVRTC's options, `--use_fast_math` for example.
            arch: The compute capability to compile for, 90 for 9.0; the card's if None, 80 on the
                embedded driver.

        Raises:
            LoadFailed: The source does not compile: `log` and `line` say where and why.
            Unsupported: NVRTC is not installed.
        """
        return self.module_load(checked_version(ptx_of(source, options, arch or self._arch), self.cuda_version))

    def kernel(
        self, function: Any, types: Mapping[str, str] | Signature | None = None, *, arch: int | None = None
    ) -> Kernel:
        """Take a function of Triton's or numba's; calling it compiles it for its arguments and launches it.

        Triton's is called as `kernel[grid](...)`, numba's as `kernel[blocks, threads](...)`. Triton keeps compiled
        kernels on the disk, too.

        Args:
            function: What `@triton.jit` or `@numba.cuda.jit` made, or a plain function for numba.
            types: Triton: by parameter, the type that a plain buffer's elements have, `{"x": "*fp32"}`; arrays tell
                theirs. Numba: the signature, "void(float32, float32[:])"; that of each call's arguments if None.
            arch: As in `compile`.

        Raises Unsupported where the compiler is not installed, InvalidRequest for anything but such a function.
        """
        return Kernel(self, kernel_of(function, types, arch or self._arch, self.cuda_version))

    def elementwise(
        self,
        in_params: Any,
        out_params: str = "",
        operation: str = "",
        name: str = "kernel",
        *,
        preamble: str = "",
        options: Sequence[str] = (),
        arch: int | None = None,
    ) -> ElementwiseKernel:
        """Take an operation that a call does for each element of arrays, as CuPy's `ElementwiseKernel` is written.

        Each call compiles CUDA C for its arguments' types, once, by NVRTC (the extra `cuda-c`).

        Args:
            in_params: Inputs: "float32 x, T y, raw T z". A letter is any type; the operation indexes raw arrays itself.
                Or an `ElementwiseKernel` of an installed CuPy, and no other texts.
            out_params: Outputs.
            operation: CUDA C with these names; `i` is the element's index.
            name: The kernel's name.
            preamble: CUDA C ahead of the kernel.
            options: As in `compile`.
            arch: As in `compile`.

        Raises InvalidRequest.
        """
        source = ElementwiseSource(in_params, out_params, operation, name, preamble)
        return ElementwiseKernel(self, ElementwiseOperation(source, options, arch))

    def module_unload(self, module: ModuleHandle) -> None:
        """Unload a module now rather than when its last reference goes."""
        drive(self._session.resources.unload(module))

    def launch(
        self,
        module: ModuleHandle,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None = None,
        shared_bytes: int = 0,
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
        *,
        cooperative: bool = False,
        cluster: Sequence[int] | None = None,
    ) -> int:
        """Start a kernel; do not wait for it.

        Args:
            module: The module that has the kernel.
            kernel: Its name.
            grid: One to three numbers of blocks.
            block: One to three numbers of threads.
            args: KernelArgs, or a list of buffers, arrays on the card and numpy scalars, such as
                `[buffer, np.uint32(n), np.float32(2)]`. The list may have Python numbers, an int for a float too, where
                the image's PTX tells the parameters' types. Or the packed bytes.
            arg_sizes: Each argument's size in bytes, if `args` are bytes.
            shared_bytes: Dynamic shared memory per block.
            stream: The stream to launch in; the default stream if None.
            regions: The regions that it touches: it begins only while all of them go on. If one does not, the next
                operation that waits raises a RegionFailed.
            position: Any number up to 2**64 - 1; that error and ForwardRevoked tell it.
            cooperative: Run all blocks at the same time, so that they may wait for each other. On a card only.
            cluster: Neighbouring blocks that run together, one to three numbers; on cards of 9.0 and newer.

        Returns:
            The launch's number, which a later error's `failure.failed_request_id` names.

        Raises:
            LaunchFailed: The kernel can't be started, as far as can be told here: a float is given where the PTX
                declares an integer, for example.
        """
        with self._lock:
            if cooperative or cluster is not None:
                wanted = LaunchAttributes(cooperative, cluster)
                number = self._launches.launch_with(
                    wanted, regions, position, module, kernel, grid, block, args, arg_sizes, shared_bytes, stream
                )
            elif regions is None:
                number = self._launches.launch(module, kernel, grid, block, args, arg_sizes, shared_bytes, stream)
            else:
                number = self._launches.launch_in(
                    regions, position, module, kernel, grid, block, args, arg_sizes, shared_bytes, stream
                )
            return number if isinstance(number, int) else drive(number)

    def region_set(self, regions: Iterable[Region]) -> RegionSet:
        """Name the regions that launches will touch, once for many launches: `launch(..., regions=that)`.

        1 to 256 of this lease. Raises Unsupported where the session has no regions.
        """
        return drive(self._session.region_sets.make(regions))

    def record(self) -> Recorder:
        """Record a launch graph: `with session.record() as graph:`, then `graph.launch()` as often as wanted.

        In the block, `launch`, `mem_write` and `mem_read` are checked and written down, not done. A copy names the
        memory of an array of `empty`; each launch of the graph reads or writes its bytes anew. `mem_write` of bytes
        that can't change, such as `bytes`, records those bytes. Anything else raises InvalidRequest. So does `stream`:
        all of a graph runs in the stream that its launch names. Leaving the block by an error discards the recording.
        Leaving it otherwise makes the graph, and raises what is wrong with it.

        Between a launch of the graph and the next `sync`, of the session or of the launch's stream, its arrays are the
        graph's. Arguments pushed with `KernelArgs.push_parameter` can be given anew at each launch. While a session
        records, other threads can't use it.
        """
        return Recorder(self)

    def sync(self) -> None:
        """Wait until all streams have ended what they hold. Raises SyncFailed or LaunchFailed, naming the kernel."""
        if self._on_printed is not None:
            self._tell_printed(self._on_printed)
            return
        with self._lock:
            rest = self._session.streams.sync_at_once()
            if rest is not None:
                drive(rest)

    def printed(self) -> PrintedText:
        """Wait as `sync` does, and take what kernels have printed with printf since the last call.

        At most 1 MiB waits to be taken; `is_lost` tells that there was more. Nobody but this session gets it.

        Raises what `sync` raises, or Unsupported if the session's daemon is too old.
        """
        return drive(self._session.streams.printed())

    def _tell_printed(self, callback: PrintedCallback) -> None:
        found = self.printed()
        if found.text or found.is_lost:
            callback(found)

    def close(self) -> None:
        """End the session; an operation that waits in another thread fails. The lease goes on."""
        if self._lock.acquire(blocking=False):
            try:
                self._closing()
            finally:
                self._lock.release()
            return
        self._session.attachment.wake()
        with self._lock:
            self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._on_printed is not None:
                    self._tell_printed(self._on_printed)
                fence(self._session.streams)
        finally:
            self.close()
