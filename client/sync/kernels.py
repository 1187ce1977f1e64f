"""Triton, numba and elementwise kernels in a blocking session."""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from gpulease.client.core.elementwise import ElementwiseOperation
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.session import SessionView
from gpulease.client.kernels.prepared_launch import (
    MAX_VARIANTS,
    NOTHING_LAUNCHED,
    CompiledKernel,
    FunctionKernel,
    configuration_missing,
)
from gpulease.client.kernels.toolchain import checked_version
from gpulease.client.sync.arrays import Array, make
from gpulease.client.sync.modules import Module
from gpulease.client.sync.streams import Stream


class KernelSession(Protocol):
    """The session of a kernel: it loads compiled variants and starts launches."""

    @property
    def cuda_version(self) -> int: ...

    def module_load(self, image: bytes | str) -> Module: ...

    @property
    def launch(self) -> Callable[..., int]: ...


class Kernel:
    """A Triton or numba function in a session; made by `GpuSession.kernel` and called as in Triton or numba."""

    def __init__(self, session: KernelSession, kernel: FunctionKernel) -> None:
        self._session, self._kernel = session, kernel
        self._modules: dict[CompiledKernel, Module] = {}

    def __getitem__(self, place: Any) -> "KernelInPlace":
        # Nothing is compiled yet: the types of the arguments are known only at the call.
        return KernelInPlace(self, place)

    def __call__(self, *args: Any, **keywords: Any) -> NoReturn:
        """Refuse a call without brackets: a launch needs its configuration. Raises LaunchFailed."""
        raise configuration_missing(self._kernel.name)

    def launch(
        self,
        place: Any,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
    ) -> int:
        """Compile the function for these arguments if needed, load it, and start it; do not wait.

        Args:
            place: The value in the brackets: Triton's grid, or numba's `blocks, threads`.
            args: Positional arguments of the kernel.
            keywords: Keyword arguments of the kernel.
            stream: As in `GpuSession.launch`.
            regions: As in `GpuSession.launch`.
            position: As in `GpuSession.launch`.

        Returns:
            The launch's number; 0 for an empty Triton grid, for which nothing is launched.
        """
        # Compile the variant, or find it among the compiled ones, and pack the arguments.
        ready = self._kernel.prepared(place, args, keywords)
        if ready.is_empty:
            return NOTHING_LAUNCHED
        # Each compiled variant is loaded into the session once.
        compiled = ready.compiled
        module = self._modules.get(compiled)
        if module is None:
            # Drop all loaded variants at once. A program that exceeds the limit compiles a variant for each call, so it
            # would not help to keep some.
            if len(self._modules) >= MAX_VARIANTS:
                self._modules.clear()
            module = self._modules[compiled] = self._session.module_load(
                checked_version(compiled.image, self._session.cuda_version)
            )
        # Use a stream in the brackets, which numba allows, only if the call names none.
        put = (stream or ready.stream, regions, position)
        return self._session.launch(*ready.on(module), *put, cooperative=compiled.is_cooperative)


class KernelInPlace:
    """A kernel with its launch configuration: `kernel[grid]` in Triton, `kernel[blocks, threads]` in numba."""

    def __init__(self, kernel: Kernel, place: Any) -> None:
        self._kernel, self._place = kernel, place

    def __call__(
        self,
        *args: Any,
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
        **keywords: Any,
    ) -> int:
        """Start the kernel; do not wait.

        Args:
            args: Arrays, numpy scalars, Python numbers, and buffers if `GpuSession.kernel` was given their types.
            stream: The stream to launch in; the default stream if None.
            regions: The regions that the kernel uses, as in `GpuSession.launch`.
            position: Any number, as in `GpuSession.launch`.
            keywords: In Triton: arguments, constants, num_warps and num_stages by name.

        Returns:
            The launch's number, as `GpuSession.launch` does; 0 for an empty Triton grid.
        """
        return self._kernel.launch(self._place, args, keywords, stream, regions, position)


class ElementwiseKernel:
    """An operation on each element of arrays; made by `GpuSession.elementwise`."""

    def __init__(self, session: SessionView, operation: ElementwiseOperation) -> None:
        self._session, self._operation = session, operation

    def __call__(
        self,
        *args: Any,
        size: int | None = None,
        stream: Stream | None = None,
        regions: RegionSet | None = None,
        position: int = 0,
    ) -> Any:
        """Start the operation on arrays; do not wait.

        Args:
            args: Inputs: numbers, and arrays with shapes that broadcast by numpy's rules. Then all outputs, or none of
                them.
            size: Number of elements, if only raw arrays are given.
            stream: The stream to run in; the default stream if None.
            regions: As in `GpuSession.launch`.
            position: As in `GpuSession.launch`.

        Returns:
            The output array, or a tuple of several; new arrays if none were given.

        Raises:
            LaunchFailed: An argument does not fit; the message names the parameter.
            LoadFailed: The operation does not compile for the types of these arguments.
        """
        # Where the operation launches its kernel. Copies and allocations go through the session.
        place = (stream, regions, position)
        return make(self._session, self._operation.called(self._session, Array, args, size, place))
