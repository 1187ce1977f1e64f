"""The embedded driver's implementation of the interface's `Driver`."""

from functools import partial

from gpulease.daemon.drivers.interface import Context, DriverError, Opening
from gpulease.daemon.native.code_cache import keep_for_workers
from gpulease.daemon.ptx.architecture import SM_90, Architecture
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import forget_code, ready_to_look_up
from gpulease.daemon.ptx.native.library import bind_library
from gpulease.daemon.ptx.stream import host_threads, stream_code
from gpulease.daemon.sandbox.measures import SandboxNeeds


class CpuDriver:
    """Runs kernels on the host. It accepts any card's UUID: it has no cards, only slices of the host's memory."""

    def __init__(self, architecture: Architecture = SM_90, shuffle: int | None = None) -> None:
        self._open = partial(CpuContext, architecture=architecture, shuffle=shuffle)

    @property
    def name(self) -> str:
        return "cpu"

    def preload(self) -> None:
        """Compile the driver's own native code, which forked workers then share. Starts no thread.

        Raises UnusableSetting, before any worker is forked.
        """
        host_threads()
        stream_code()
        bind_library()
        ready_to_look_up()

    def needs(self) -> SandboxNeeds:
        return SandboxNeeds()

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """Make the workers' own folder in the operator's folder for compiled code."""
        folder = keep_for_workers(owner)
        return () if folder is None else (folder,)

    def open_context(self, card: str, slice_bytes: int) -> CpuContext:
        """Open a context with room for `slice_bytes`. Raises DriverError if the host has no address space for it."""
        return self._open(slice_bytes)

    def rewind(self, context: Context) -> Opening:
        """Close a warmed-up context. The next context reuses its code and touched pages: they belong to the process."""
        context.close()
        return self._open

    def recycle(self, context: Context) -> Opening:
        """Close a lease's context. Its code, and the memory that its kernels could reach, are returned to the host."""
        # A context that can't close has a running kernel, so this process must not serve another lease.
        context.close()
        if not isinstance(context, CpuContext) or not context.is_closed:
            raise DriverError("a kernel still runs")
        forget_code()
        return self._open
