"""Sessions of the asyncio API. Tasks may share a session; their operations take turns."""

import asyncio
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from gpulease.client.aio.arrays import Array, make
from gpulease.client.aio.driver import AsyncOpening, LoopLock, drive, undisturbed
from gpulease.client.aio.graphs import Recorder
from gpulease.client.aio.idle_frees import free_when_idle
from gpulease.client.aio.kernels import ElementwiseKernel, Kernel
from gpulease.client.aio.lease import GpuLease, GpuSharedLease
from gpulease.client.aio.modules import Module
from gpulease.client.aio.regions import Region
from gpulease.client.aio.streams import Stream, fence
from gpulease.client.core.arrays import new, upload
from gpulease.client.core.elementwise import ElementwiseOperation
from gpulease.client.core.launch import KernelArguments, LaunchAttributes
from gpulease.client.core.lease import by_assignment, by_token, state_of
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import SessionCore, SessionView
from gpulease.client.core.streams import PrintedCallback, PrintedText
from gpulease.client.core.tokens import Grant, GrantPair, token_of
from gpulease.client.core.waits import MaybePending, Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.fork_guard import register
from gpulease.client.handles import BorrowedBuffer, Buffer, ModuleHandle
from gpulease.client.kernels.cuda_c import ptx_of
from gpulease.client.kernels.elementwise_source import ElementwiseSource
from gpulease.client.kernels.function_kernels import kernel_of
from gpulease.client.kernels.numba_kernel import Signature
from gpulease.client.kernels.toolchain import checked_version

T = TypeVar("T")

SPIN_NS: Final = 20_000
"""How long to poll for a reply before the event loop runs other tasks, in nanoseconds: no longer than a callback may
take."""


class GpuSession(SessionView):
    """A lease's isolated context on its card; `close` or the lease's end ends it.

    An operation is done when its call returns. The exceptions are `launch`, `mem_free` and `mem_write` of up to 64 KiB,
    which are only queued. The worker executes these in order; when one fails, it skips those queued after it. The next
    operation that waits raises that failure and is itself not executed. A session holds a reference to its lease.

    Leaving its `async with` block waits, as `sync` does, for unfinished work, and raises any failure. It waits at most
    for the time that the lease had left when the block ended; then it raises TimedOut, unless the lease has ended. A
    block left by an exception does not wait, and `close` does not wait either. A session that was opened by a token and
    has loaded no module waits only for its own requests. It does not wait for kernels of other sessions, and does not
    report their failures.

    A failure of one operation is an OperationFailed, and the session continues. GpuSessionFailed means that the session
    is lost.

    `async with GpuSession(lease) as session:` or `session = await GpuSession(lease)` opens it.
    """

    def __init__(
        self, lease: GpuLease | GpuSharedLease, *, grant: Grant | GrantPair | None = None, shared_memory: bool = True
    ) -> None:
        """Describe a session, which `await` or `async with` opens.

        Args:
            lease: The lease that the session uses.
            grant: A token of the lease. The session may do what the token permits, until the token expires. A token
                opens one session.
            shared_memory: Whether to share memory with the worker; if not, all data goes through the socket.

        Opening it raises InvalidRequest for a grant of another lease, Denied if its token fails a check.
        """
        self.lease = lease
        lock = LoopLock()
        self._set_session(SessionCore(state_of(lease), lock, grant=grant, shared_memory=shared_memory, spin_ns=SPIN_NS))
        self._closing: Callable[[], object] | None = None
        register(self)

    @classmethod
    def attach(
        cls,
        token: bytes | str | Grant | None = None,
        address: str | None = None,
        *,
        name: str | None = None,
        shared_memory: bool = True,
    ) -> AsyncOpening[Self]:
        """Open a session on another tenant's lease; it may do what the token permits until the token expires.

        A token opens one session. Without a token, this opens a session on the lease that `gpulease run` or a cluster
        acquired for this program: GPULEASE_LEASE_ID names it, or it is one of the container's (GPULEASE_LEASES).

        Args:
            token: The token, in any of the forms in which tokens are passed on; None for a lease that was acquired for
                this program.
            address: The node's address; GPULEASE_ADDRESS or the default socket if None.
            name: Which of a container's leases, if it has several: `REQUEST`, `CLAIM/REQUEST` or
                `CLAIM/REQUEST/NUMBER`.
            shared_memory: As in `GpuSession`.

        Raises:
            Denied: The token failed a check, which the message names.
            InvalidRequest: No token was given, and no lease, or more than one, was acquired for this program.

        Use `await` or `async with`.
        """
        return AsyncOpening(cls._attached(token, address, name, shared_memory))

    @classmethod
    async def _attached(
        cls, token: bytes | str | Grant | None, address: str | None, name: str | None, shared_memory: bool
    ) -> Self:
        # Make a connection for the lease, which presents the token or asks for the lease of `gpulease run`.
        server, lock = address_of(address), LoopLock()
        state = await drive(
            by_assignment(server, lock, name) if token is None else by_token(server, token_of(token), lock)
        )
        try:
            return await cls(GpuSharedLease(state), shared_memory=shared_memory)
        except BaseException:
            # Close the connection, because nothing else refers to it yet.
            state.channel.close()
            raise

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def mem_alloc(self, size_bytes: int) -> Buffer:
        """Allocate device memory, set to zero. Raises AllocFailed if the slice has no room.

        If there is no room, Python's garbage is collected first, and buffers that only garbage refers to are freed.
        """
        return await self._run(self._session.resources.alloc(size_bytes))

    async def mem_free(self, buffer: Buffer) -> None:
        """Free a buffer now instead of with its last reference. The call does not wait."""
        await self._begin(lambda: self._session.resources.free(buffer))

    async def keep(self, buffer: Buffer, name: str) -> None:
        """Let the lease keep a buffer beyond the end of this session, until it is freed or taken, or the lease ends.

        The buffer can be used here as before. Dropping its last reference no longer frees it; `mem_free` does. To keep
        an array, pass its `buffer`.

        Args:
            buffer: The buffer.
            name: The name under which any session of the lease finds the buffer. Keeping the buffer again under another
                name renames it.

        Raises:
            InvalidRequest: Another buffer is kept under that name.
            Busy: The lease keeps the maximum number of buffers.
            Unsupported: The session's daemon is too old.
        """
        await self._run(self._session.kept.keep(buffer, name))

    async def kept(self, name: str) -> BorrowedBuffer:
        """Find a buffer that the lease keeps. It stays kept: dropping the result frees nothing, `mem_free` does.

        Raises InvalidHandle if no buffer is kept under that name, Unsupported if the session's daemon is too old.
        """
        return await self._run(self._session.kept.find(name))

    async def kept_names(self) -> dict[str, int]:
        """Return the sizes in bytes of all kept buffers, by name. Raises Unsupported if the daemon is too old."""
        return await self._run(self._session.kept.names())

    async def take(self, name: str) -> Buffer:
        """Make a kept buffer this session's own again: it is freed with its last reference or with the session.

        Raises InvalidHandle if no buffer is kept under that name, Unsupported if the session's daemon is too old.
        """
        return await self._run(self._session.kept.take(name))

    async def reset(self) -> int:
        """Wait as `sync` does, then free all memory that no open session holds. Returns the number of bytes freed.

        This frees the buffers that the lease keeps, the memory that ended sessions left, and the reserved parts of
        ended regions.

        Raises Denied unless the session may read and write memory and launch; Unsupported if the daemon is too old.
        """
        return await self._run(self._session.kept.reset())

    async def array(self, values: Any, dtype: Any = None) -> Array:
        """Copy a numpy array, or anything that numpy converts to one, into a new array on the card.

        Args:
            values: The elements.
            dtype: The dtype to convert the elements to; if None, they are not converted. "bfloat16" and "float8_..."
                come from ml_dtypes.

        Raises:
            InvalidRequest: The values are not an array of numbers, or have more than 8 dimensions.
            AllocFailed: The slice has no room.
            Unsupported: The dtype needs ml_dtypes, which is not installed.
        """
        return await make(self, upload(self, Array, values, dtype))

    async def zeros(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Make an array of zeros on the card. Raises the errors of `array`."""
        return await make(self, new(self, Array, shape, dtype, "zeros"))

    async def empty_device(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Make an array on the card for a kernel to fill.

        Its memory is zeroed: no lease can read another lease's bytes.

        Raises the errors of `array`.
        """
        return await make(self, new(self, Array, shape, dtype, "empty_device"))

    def stream(self) -> AsyncOpening[Stream]:
        """Make a stream for launches and copies, in addition to the default one: use `await` or `async with`.

        Raises Busy beyond MAX_STREAMS.
        """
        return AsyncOpening(self._run(self._session.streams.create(Stream)))

    @property
    def default_stream(self) -> Stream:
        """The stream of launches and copies that name no stream. A copy in it is done when its call returns."""
        return self._session.streams.default(Stream)

    async def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: Stream | None = None) -> None:
        """Copy bytes from any Python buffer into a device buffer.

        `data` may be changed as soon as this returns, except an array of `empty` that is copied in a stream: leave that
        alone until the stream has been waited for (`Stream`). Up to 64 KiB are queued without waiting. If such a copy
        fails, for example because a kernel before it faulted, the next operation that waits raises the failure, as for
        a launch.

        Args:
            buffer: Target.
            offset: First byte to write in the target.
            data: Bytes, memoryview, numpy array or other buffer. One that is not contiguous is copied in C order.
            stream: The stream to copy in; the default stream if None.

        Raises InvalidHandle if the bytes are not all inside the buffer, or if the buffer is freed or another session's.
        """
        await self._begin(lambda: self._copies.write(buffer, offset, data, stream))

    @overload
    async def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: None = None, stream: Stream | None = None
    ) -> bytes: ...

    @overload
    async def mem_read(self, buffer: Buffer, offset: int, nbytes: int, into: T, stream: Stream | None = None) -> T: ...

    async def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: Stream | None = None
    ) -> Any:
        """Copy bytes from a device buffer.

        Args:
            buffer: Source.
            offset: First byte to read in the source.
            nbytes: Number of bytes.
            into: A writable, C-contiguous object that receives the bytes: an array of any dtype, a bytearray, a
                memoryview.
            stream: The stream to copy in; the default stream if None. An array from `empty` contains the bytes only
                after a wait for the stream (`Stream`).

        Returns:
            `into`, or new bytes if `into` is None.

        Raises:
            InvalidHandle: The bytes are not all inside the buffer, or the buffer is freed or another session's.
        """
        return await self._run(self._copies.read(buffer, offset, nbytes, into, stream))

    async def module_load(self, image: bytes | bytearray | memoryview | str) -> Module:
        """Load PTX text or a cubin. Raises LoadFailed, with the compiler's log, if the driver rejects it."""
        return await self._run(self._session.resources.load(image, Module))

    async def compile(self, source: str, *, options: Sequence[str] = (), arch: int | None = None) -> Module:
        """Compile CUDA C with NVRTC (the extra `cuda-c`) and load it, as `module_load` does.

        Args:
            source: The source text. Kernels are `extern "C" __global__`, or have C++'s mangled names.
            options: NVRTC's options, for example `--use_fast_math`.
            arch: The compute capability to compile for, 90 for 9.0; if None, the card's, or 80 on the embedded driver.

        Raises:
            LoadFailed: The source does not compile: `log` and `line` say where and why.
            Unsupported: NVRTC is not installed.

        The compiler runs in a thread; the event loop continues.
        """
        # Compile in a thread, because that takes seconds, and the event loop must not be blocked.
        ptx = await asyncio.to_thread(ptx_of, source, options, arch or self._arch)
        return await self.module_load(checked_version(ptx, self.cuda_version))

    def kernel(
        self, function: Any, types: Mapping[str, str] | Signature | None = None, *, arch: int | None = None
    ) -> Kernel:
        """Wrap a Triton or numba function; each call compiles it for the arguments' types, if needed, and launches it.

        Call a Triton function as `await kernel[grid](...)` and a numba function as `await kernel[blocks,
        threads](...)`. Triton also caches compiled kernels on disk.

        Args:
            function: What `@triton.jit` or `@numba.cuda.jit` made, or a plain function for numba.
            types: Triton: the pointer types of parameters that get plain buffers, `{"x": "*fp32"}`; arrays have
                separate types. Numba: the signature, such as "void(float32, float32[:])"; if None, it follows from each
                call's arguments.
            arch: As in `compile`.

        Raises Unsupported if the compiler is not installed, InvalidRequest for anything but such a function.
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
        """Define an operation that each call applies to every element of arrays, as CuPy's `ElementwiseKernel` does.

        A call compiles CUDA C for the types of its arguments, once per combination, with NVRTC (the extra `cuda-c`).

        Args:
            in_params: Inputs: "float32 x, T y, raw T z". A single letter is any type. The operation indexes `raw`
                arrays itself. An `ElementwiseKernel` of an installed CuPy replaces this and the other texts.
            out_params: Outputs, in the same form.
            operation: CUDA C that uses these names; `i` is the element's index.
            name: The kernel's name.
            preamble: CUDA C to put before the kernel.
            options: As in `compile`.
            arch: As in `compile`.

        Raises InvalidRequest if a parameter list can't be parsed.
        """
        source = ElementwiseSource(in_params, out_params, operation, name, preamble)
        return ElementwiseKernel(self, ElementwiseOperation(source, options, arch))

    async def module_unload(self, module: ModuleHandle) -> None:
        """Unload a module now instead of with its last reference."""
        await self._run(self._session.resources.unload(module))

    async def launch(
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
        """Start a kernel, and do not wait for it.

        Args:
            module: The module that has the kernel.
            kernel: The kernel's name.
            grid: The number of blocks in one to three dimensions.
            block: The number of threads in one to three dimensions.
            args: KernelArgs, packed bytes, or a list of buffers, device arrays and numpy scalars, such as `[buffer,
                np.uint32(n), np.float32(2)]`. If the image is PTX, which declares the parameters' types, the list may
                hold Python numbers too, including an int for a float.
            arg_sizes: Each argument's size in bytes, if `args` are bytes.
            shared_bytes: Dynamic shared memory per block, in bytes.
            stream: The stream to launch in; the default stream if None.
            regions: The regions that the kernel uses. It starts only if none of them has ended or is cancelled;
                otherwise the next operation that waits raises a RegionFailed.
            position: Any number up to 2**64 - 1; RegionFailed and ForwardRevoked report it.
            cooperative: Run all blocks at the same time, so that they may wait for each other. Only on a card.
            cluster: Number of blocks that run together, in one to three dimensions. Needs compute capability 9.0.

        Returns:
            The launch's number; a later error names it in `failure.failed_request_id`.

        Raises:
            LaunchFailed: The kernel can't be started, as far as the client can check: for example a float is given
                where the PTX declares an integer.
        """
        # As in `_begin`, the lock is released here if the launch was sent, otherwise by `_finish`.
        await self._lock.acquire()
        number: MaybePending[int] = 0
        try:
            # There are three kinds of launches, as in the blocking API: with attributes, plain, and in regions.
            if cooperative or cluster is not None:
                attributes = LaunchAttributes(cooperative, cluster)
                number = self._launches.launch_with(
                    attributes, regions, position, module, kernel, grid, block, args, arg_sizes, shared_bytes, stream
                )
            elif regions is None:
                number = self._launches.launch(module, kernel, grid, block, args, arg_sizes, shared_bytes, stream)
            else:
                number = self._launches.launch_in(
                    regions, position, module, kernel, grid, block, args, arg_sizes, shared_bytes, stream
                )
        finally:
            if isinstance(number, int):
                self._lock.release()
        return number if isinstance(number, int) else await undisturbed(self._finish(number))

    async def region_set(self, regions: Iterable[Region]) -> RegionSet:
        """Make a set of the regions that many launches use.

        Pass the result as `launch(..., regions=...)`.

        Args:
            regions: 1 to 256 regions of this session's lease.

        Raises Unsupported if the session has no regions.
        """
        return await self._run(self._session.region_sets.make(regions))

    def record(self) -> Recorder:
        """Record a launch graph: `async with session.record() as graph:`, then `await graph.launch()`.

        In the block, `launch`, `mem_write` and `mem_read` are checked and recorded, not executed. A copy from or to an
        array of `empty` records the array's memory: every launch of the graph reads or writes the bytes that are there
        at that time. `mem_write` of an immutable object, such as `bytes`, records those bytes. Anything else raises
        InvalidRequest. So does `stream`: a graph runs in the stream that its launch names. If the block is left by an
        error, the recording is discarded; otherwise its end makes the graph, and raises the error of any mistake.

        Between a launch of the graph and the next `sync`, of the session or of the launch's stream, leave the graph's
        arrays alone. Arguments pushed with `KernelArgs.push_parameter` can get new values at each launch. While a
        session records, other tasks can't use it.
        """
        return Recorder(self)

    async def printed(self) -> PrintedText:
        """Wait as `sync` does, and return what kernels have printed with printf since the last call.

        Up to 1 MiB is kept between calls; `is_lost` is True if there was more. Only this session receives its text.

        Raises the errors of `sync`, or Unsupported if the session's daemon is too old.
        """
        return await self._run(self._session.streams.printed())

    async def sync(self) -> None:
        """Wait until all streams have finished. Raises SyncFailed or LaunchFailed, naming the kernel that failed."""
        # With a callback, PRINTED takes the place of SYNC: it waits in the same way and returns the text.
        if self._on_printed is not None:
            await self._pass_printed(self._on_printed)
            return
        await self._run(self._session.streams.sync())

    async def _pass_printed(self, callback: PrintedCallback) -> None:
        output = await self.printed()
        if output.text or output.is_lost:
            callback(output)

    async def close(self) -> None:
        """End the session; an operation that waits in another task fails. The lease continues."""
        # The session was not opened, or is closed already.
        if self._closing is None:
            return
        # If another task's operation holds the lock and waits, wake it, so that it fails and releases the lock.
        if self._lock.locked():
            self._session.attachment.wake()
        async with self._lock:
            self._closing()

    async def __aenter__(self) -> Self:
        if self._closing is None:
            try:
                # Do not use `undisturbed`: cancelling the opening closes the connection, which ends the session.
                await drive(self._session.attach())
            except BaseException:
                self._session.attachment.give_up()
                raise
            # From here on the finalizer ends the session when its last reference is dropped.
            self._closing = weakref.finalize(self, self._session.operations.close)
            free_when_idle(self._session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            # If the block raised an error, do not wait: the work may never end.
            if kind is None:
                if self._on_printed is not None:
                    await self._pass_printed(self._on_printed)
                await fence(self._session.streams)
        finally:
            await self.close()

    async def _run(self, procedure: Procedure[T]) -> T:
        return await undisturbed(self._drive(procedure))

    async def _drive(self, procedure: Procedure[T]) -> T:
        # This is a method, so that a task that continues in the background keeps the session from being dropped.
        return await drive(procedure)

    async def _begin(self, operation: Callable[[], MaybePending[None]]) -> None:
        await self._lock.acquire()
        remaining = None
        try:
            # Try the operation at once, under the lock. Only if it has to wait does it become a task, which keeps the
            # lock.
            remaining = operation()
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # as `drive` does
        finally:
            if remaining is None:
                self._lock.release()
        if remaining is not None:
            await undisturbed(self._finish(remaining))

    async def _finish(self, remaining: Procedure[T]) -> T:
        # The caller has acquired the lock, so that no other operation comes between the part of the operation that the
        # caller executed and the rest.
        try:
            return await drive(remaining)
        finally:
            self._lock.release()
