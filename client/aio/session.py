"""Sessions of the asyncio face. Tasks may share a session; they take turns."""

import asyncio
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from gpulease.client.aio.arrays import Array, make
from gpulease.client.aio.driver import Opening, drive, undisturbed
from gpulease.client.aio.graphs import Recorder
from gpulease.client.aio.idle_frees import look_after
from gpulease.client.aio.kernels import ElementwiseKernel, Kernel
from gpulease.client.aio.lease import GpuLease, GpuSharedLease
from gpulease.client.aio.modules import Module
from gpulease.client.aio.regions import Region
from gpulease.client.aio.streams import Stream, fence
from gpulease.client.core.arrays import new, upload
from gpulease.client.core.elementwise import ElementwiseOperation
from gpulease.client.core.launch import KernelArguments, LaunchAttributes
from gpulease.client.core.lease import by_environment, by_token, state_of
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import Session, SessionView
from gpulease.client.core.streams import PrintedCallback, PrintedText
from gpulease.client.core.tokens import Grant, token_of
from gpulease.client.core.waits import Begun, Procedure
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
"""Longest time that a reply is looked for before the event loop gets a turn: no longer than a callback may take."""


class GpuSession(SessionView):
    """A lease's isolated context on its card, like `gpulease.client.GpuSession`.

    `async with GpuSession(lease) as session:` or `session = await GpuSession(lease)` opens it. Tasks may share it; they
    take turns.
    """

    def __init__(
        self, lease: GpuLease | GpuSharedLease, *, grant: Grant | None = None, shared_memory: bool = True
    ) -> None:
        """Make a session that `await` or `async with` opens; arguments as of `gpulease.client.GpuSession`."""
        self.lease = lease
        lock = asyncio.Lock()
        self._set_session(Session(state_of(lease), lock, grant=grant, shared_memory=shared_memory, spin_ns=SPIN_NS))
        self._closing: Callable[[], object] | None = None
        register(self)

    @classmethod
    def attach(
        cls, token: bytes | str | Grant | None = None, address: str | None = None, *, shared_memory: bool = True
    ) -> Opening[Self]:
        """Open another tenant's session by a token, or `gpulease run`'s, like `gpulease.client.GpuSession.attach`."""
        return Opening(cls._attached(token, address, shared_memory))

    @classmethod
    async def _attached(cls, token: bytes | str | Grant | None, address: str | None, shared_memory: bool) -> Self:
        where, lock = address_of(address), asyncio.Lock()
        state = await drive(by_environment(where, lock) if token is None else by_token(where, token_of(token), lock))
        try:
            return await cls(GpuSharedLease(state), shared_memory=shared_memory)
        except BaseException:
            state.channel.close()
            raise

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def mem_alloc(self, size_bytes: int) -> Buffer:
        """Allocate device memory, zeroed, like `gpulease.client.GpuSession.mem_alloc`."""
        return await self._run(self._session.resources.alloc(size_bytes))

    async def mem_free(self, buffer: Buffer) -> None:
        """Give a buffer back now, like `gpulease.client.GpuSession.mem_free`."""
        await self._begin(lambda: self._session.resources.free(buffer))

    async def keep(self, buffer: Buffer, name: str) -> None:
        """Have the lease keep a buffer beyond this session's end, like `gpulease.client.GpuSession.keep`."""
        await self._run(self._session.kept.keep(buffer, name))

    async def kept(self, name: str) -> BorrowedBuffer:
        """Find a buffer that the lease keeps, like `gpulease.client.GpuSession.kept`."""
        return await self._run(self._session.kept.find(name))

    async def kept_names(self) -> dict[str, int]:
        """Ask for the buffers that the lease keeps, like `gpulease.client.GpuSession.kept_names`."""
        return await self._run(self._session.kept.names())

    async def take(self, name: str) -> Buffer:
        """Make a kept buffer this session's own, like `gpulease.client.GpuSession.take`."""
        return await self._run(self._session.kept.take(name))

    async def reset(self) -> int:
        """Free all memory that no open session holds, like `gpulease.client.GpuSession.reset`."""
        return await self._run(self._session.kept.reset())

    async def array(self, values: Any, dtype: Any = None) -> Array:
        """Copy an array of numpy's to a new array on the card, like `gpulease.client.GpuSession.array`."""
        return await make(self, upload(self, Array, values, dtype))

    async def zeros(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Make an array of zeros on the card, like `gpulease.client.GpuSession.zeros`."""
        return await make(self, new(self, Array, shape, dtype, "zeros"))

    async def empty_device(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Make an array on the card for a kernel to fill, like `gpulease.client.GpuSession.empty_device`."""
        return await make(self, new(self, Array, shape, dtype, "empty_device"))

    def stream(self) -> Opening[Stream]:
        """Make a stream for launches and copies, like `gpulease.client.GpuSession.stream`."""
        return Opening(self._run(self._session.streams.create(Stream)))

    @property
    def default_stream(self) -> Stream:
        """The stream of launches and copies that name none, like `gpulease.client.GpuSession.default_stream`."""
        return self._session.streams.default(Stream)

    async def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: Stream | None = None) -> None:
        """Copy any buffer's bytes to byte `offset`, like `gpulease.client.GpuSession.mem_write`."""
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
        """Copy `nbytes` from byte `offset`, like `gpulease.client.GpuSession.mem_read`."""
        return await self._run(self._copies.read(buffer, offset, nbytes, into, stream))

    async def module_load(self, image: bytes | bytearray | memoryview | str) -> Module:
        """Load PTX text or a cubin, like `gpulease.client.GpuSession.module_load`."""
        return await self._run(self._session.resources.load(image, Module))

    async def compile(self, source: str, *, options: Sequence[str] = (), arch: int | None = None) -> Module:
        """Compile CUDA C and load it, like `gpulease.client.GpuSession.compile`; the loop goes on meanwhile."""
        ptx = await asyncio.to_thread(ptx_of, source, options, arch or self._arch)
        return await self.module_load(checked_version(ptx, self.cuda_version))

    def kernel(
        self, function: Any, types: Mapping[str, str] | Signature | None = None, *, arch: int | None = None
    ) -> Kernel:
        """Take a function: `await kernel[grid](...)`, like `gpulease.client.GpuSession.kernel`."""
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
        """Take an operation on elements: `await kernel(x, y)`, like `gpulease.client.GpuSession.elementwise`."""
        source = ElementwiseSource(in_params, out_params, operation, name, preamble)
        return ElementwiseKernel(self, ElementwiseOperation(source, options, arch))

    async def module_unload(self, module: ModuleHandle) -> None:
        """Unload a module now, like `gpulease.client.GpuSession.module_unload`."""
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
        """Start a kernel; do not wait for it. Like `gpulease.client.GpuSession.launch`."""
        await self._lock.acquire()
        number: Begun[int] = 0
        try:
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
        finally:
            if isinstance(number, int):
                self._lock.release()
        return number if isinstance(number, int) else await undisturbed(self._finish(number))

    async def region_set(self, regions: Iterable[Region]) -> RegionSet:
        """Name the regions that launches will touch, like `gpulease.client.GpuSession.region_set`."""
        return await self._run(self._session.region_sets.make(regions))

    def record(self) -> Recorder:
        """Record a launch graph: `async with session.record() as graph:`, then `await graph.launch()`.

        The block is that of `gpulease.client.GpuSession.record`. While a session records, other tasks can't use it.
        """
        return Recorder(self)

    async def printed(self) -> PrintedText:
        """Wait for all streams, and take what kernels have printed, like `gpulease.client.GpuSession.printed`."""
        return await self._run(self._session.streams.printed())

    async def sync(self) -> None:
        """Wait until all streams have ended what they hold, like `gpulease.client.GpuSession.sync`."""
        if self._on_printed is not None:
            await self._tell_printed(self._on_printed)
            return
        await self._run(self._session.streams.sync())

    async def _tell_printed(self, callback: PrintedCallback) -> None:
        found = await self.printed()
        if found.text or found.is_lost:
            callback(found)

    async def close(self) -> None:
        """End the session; an operation that waits in another task fails. The lease goes on."""
        if self._closing is None:
            return
        if self._lock.locked():
            self._session.attachment.wake()
        async with self._lock:
            self._closing()

    async def __aenter__(self) -> Self:
        if self._closing is None:
            try:
                await drive(self._session.attach())
            except BaseException:
                self._session.attachment.give_up()
                raise
            self._closing = weakref.finalize(self, self._session.operations.close)
            look_after(self._session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._on_printed is not None:
                    await self._tell_printed(self._on_printed)
                await fence(self._session.streams)
        finally:
            await self.close()

    async def _run(self, procedure: Procedure[T]) -> T:
        return await undisturbed(self._drive(procedure))

    async def _drive(self, procedure: Procedure[T]) -> T:
        # A method, because a task that goes on must keep the session from being dropped under it.
        return await drive(procedure)

    async def _begin(self, operation: Callable[[], Begun[None]]) -> None:
        await self._lock.acquire()
        rest = None
        try:
            rest = operation()
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # as `drive` does
        finally:
            if rest is None:
                self._lock.release()
        if rest is not None:
            await undisturbed(self._finish(rest))

    async def _finish(self, rest: Procedure[T]) -> T:
        # Its caller acquired the lock for it, so that nothing gets between.
        try:
            return await drive(rest)
        finally:
            self._lock.release()
