"""Modules of an asyncio session."""

from collections.abc import Mapping

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.core.resources import LoadedModule
from gpulease.client.handles import Variable
from gpulease.protocol.messages import KernelFigures


class Module(LoadedModule):
    """Loaded code, like `gpulease.client.Module`. Made by `session.module_load`."""

    __slots__ = ()

    async def variable(self, name: str) -> Variable:
        """Find a `__constant__` or `__device__` variable, like `gpulease.client.Module.variable`."""
        return await undisturbed(drive(self._resources.variable(self, name)))

    async def kernel_figures(self) -> Mapping[str, KernelFigures]:
        """Ask for the kernels' resources, like `gpulease.client.Module.kernel_figures`."""
        return await undisturbed(drive(self._resources.figures(self)))
