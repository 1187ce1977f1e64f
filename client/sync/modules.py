"""Modules of a blocking session."""

from collections.abc import Mapping

from gpulease.client.core.resources import LoadedModule
from gpulease.client.handles import Variable
from gpulease.client.sync.driver import drive
from gpulease.protocol.messages import KernelFigures


class Module(LoadedModule):
    """Loaded code; made by `GpuSession.module_load`. Dropping the last reference unloads it.

    `kernels` has its kernels by name, each with its parameters' sizes in bytes and the most threads its block may have.
    """

    __slots__ = ()

    def variable(self, name: str) -> Variable:
        """Find a `__constant__` or `__device__` variable: a buffer for `mem_write`, `mem_read` and launches.

        Args:
            name: Its name in PTX; that of CUDA C, where it is in no namespace. A compiler may drop one that no kernel
                uses.

        Raises InvalidHandle if the module has none, Unsupported if the session's daemon is too old.
        """
        return drive(self._resources.variable(self, name))

    def kernel_figures(self) -> Mapping[str, KernelFigures]:
        """Ask for the kernels' shared and local memory, registers and constants; Unsupported as for `variable`."""
        return drive(self._resources.figures(self))
