"""Modules that an asyncio session has loaded."""

from collections.abc import Mapping

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.core.resources import ModuleBase
from gpulease.client.handles import Variable
from gpulease.protocol.messages import KernelFigures


class Module(ModuleBase):
    """Loaded code; made by `GpuSession.module_load`. Dropping the last reference unloads it.

    `kernels` maps each kernel's name to the sizes of its parameters in bytes and its maximum number of threads per
    block.
    """

    __slots__ = ()

    async def variable(self, name: str) -> Variable:
        """Find a `__constant__` or `__device__` variable: a buffer for `mem_write`, `mem_read` and launches.

        Args:
            name: The variable's name in PTX, which is its CUDA C name outside namespaces. A compiler may drop a
                variable that no kernel uses.

        Raises InvalidHandle if the module has no such variable, Unsupported if the session's daemon is too old.
        """
        # A variable is a buffer inside the module, so it lasts as long as the module.
        return await undisturbed(drive(self._resources.variable(self, name)))

    async def kernel_figures(self) -> Mapping[str, KernelFigures]:
        """Ask how much shared, local and constant memory and how many registers each kernel uses.

        Raises Unsupported if the session's daemon is too old.
        """
        return await undisturbed(drive(self._resources.figures(self)))
