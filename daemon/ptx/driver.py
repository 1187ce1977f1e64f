"""The embedded driver, as the daemon sees it (the interface's `Driver`)."""

from functools import partial

from gpulease.daemon.drivers.interface import Context, DriverError, Opening
from gpulease.daemon.native.code_cache import keep_for_workers
from gpulease.daemon.ptx.architecture import SM_90, Architecture
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import forget_code, ready_to_look_up
from gpulease.daemon.ptx.native.library import bind_library
from gpulease.daemon.ptx.stream import host_threads, stream_code
from gpulease.daemon.sandbox.measures import Needs


class CpuDriver:
    """Computes on the host. Any card's UUID will do: it has no cards, only slices of the host's memory."""

    def __init__(self, architecture: Architecture = SM_90, shuffle: int | None = None) -> None:
        self._open = partial(CpuContext, architecture=architecture, shuffle=shuffle)

    @property
    def name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def preload(self) -> None:
        """Compile the driver's own native code, which forked workers then share. Starts no thread.

        Raises DriverError for a setting that can't be used, before any worker would.
        """
        host_threads()
        stream_code()
        bind_library()
        ready_to_look_up()

    def needs(self) -> Needs:
        """No file at all."""
        return Needs()

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """Make the workers' own folder in the operator's folder for compiled code."""
        folder = keep_for_workers(owner)
        return () if folder is None else (folder,)

    def open_context(self, card: str, slice_bytes: int) -> CpuContext:
        """A context with room for that many bytes. Raises DriverError if the host has no address space for it."""
        return self._open(slice_bytes)

    def rewind(self, context: Context) -> Opening:
        """Another context: nothing of the first is of use but the code and the pages it made this process touch."""
        context.close()
        return self._open

    def recycle(self, context: Context) -> Opening:
        """Another context: all memory that kernels could reach goes back to the host. Their code goes too."""
        context.close()
        if not isinstance(context, CpuContext) or not context.is_closed:
            raise DriverError("a kernel goes on")
        forget_code()
        return self._open
