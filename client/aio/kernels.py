"""Kernels of Triton, numba and CuPy's kind in an asyncio session."""

import asyncio
from typing import TYPE_CHECKING, Any

from gpulease.client.aio.arrays import Array, make
from gpulease.client.aio.modules import Module
from gpulease.client.aio.streams import Stream
from gpulease.client.core.elementwise import ElementwiseOperation
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.kernels.prepared_launch import MAX_VARIANTS, NOTHING_LAUNCHED, CompiledKernel, FunctionKernel
from gpulease.client.kernels.toolchain import checked_version

if TYPE_CHECKING:
    from gpulease.client.aio.session import GpuSession


class Kernel:
    """A function in a session; made by `GpuSession.kernel`, called as Triton's or numba's users do."""

    def __init__(self, session: "GpuSession", kernel: FunctionKernel) -> None:
        self._session, self._kernel = session, kernel
        self._modules: dict[CompiledKernel, Module] = {}

    def __getitem__(self, place: Any) -> "KernelInPlace":
        return KernelInPlace(self, place)

    async def launch(
        self,
        place: Any,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
    ) -> int:
        """Do what `kernel[place](*args, **keywords)` does; the rest is that of `GpuSession.launch`."""
        ready = await asyncio.to_thread(self._kernel.prepared, place, args, keywords)
        if ready.is_empty:
            return NOTHING_LAUNCHED
        made = ready.compiled
        module = self._modules.get(made)
        if module is None:
            if len(self._modules) >= MAX_VARIANTS:
                self._modules.clear()
            module = self._modules[made] = await self._session.module_load(
                checked_version(made.image, self._session.cuda_version)
            )
        put = (stream or ready.stream, regions, position)
        return await self._session.launch(*ready.on(module), *put, cooperative=made.is_cooperative)


class KernelInPlace:
    """A kernel with the place it runs in: `kernel[grid]`, or numba's `kernel[blocks, threads]`."""

    def __init__(self, kernel: Kernel, place: Any) -> None:
        self._kernel, self._place = kernel, place

    async def __call__(
        self,
        *args: Any,
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
        **keywords: Any,
    ) -> int:
        """Start it; do not wait. Returns the launch's number, as `GpuSession.launch`; 0 for Triton's empty grid.

        Args:
            args: Arrays, buffers whose types were told, numpy scalars and Python's numbers.
            stream: The stream to launch in; the default stream if None.
            regions: The regions that it touches.
            position: Any number, as in `GpuSession.launch`.
            keywords: Triton's arguments, constants, num_warps and num_stages by name.
        """
        return await self._kernel.launch(self._place, args, keywords, stream, regions, position)


class ElementwiseKernel:
    """An operation on each element of arrays; made by `GpuSession.elementwise`."""

    def __init__(self, session: "GpuSession", operation: ElementwiseOperation) -> None:
        self._session, self._operation = session, operation

    async def __call__(
        self,
        *args: Any,
        size: int | None = None,
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
    ) -> Any:
        """Run the operation over arrays; do not wait. Like `gpulease.client.sync.kernels.ElementwiseKernel`."""
        place = (stream, regions, position)
        return await make(self._session, self._operation.called(self._session, Array, args, size, place))
