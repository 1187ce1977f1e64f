"""Calls of kernels that are functions here, as launches: what every compiler of such functions gives a session."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpulease.client.errors import LaunchFailed
from gpulease.client.handles import Module
from gpulease.client.kernel_args import KernelArgs
from gpulease.protocol import Failure, Status

MAX_VARIANTS: Final = 256
"""Compiled forms of one kernel that are kept. A constant that differs at every call would fill memory otherwise; past
this they are dropped, and compiled or found on the disk again."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel compiled for one signature.

    Attributes:
        image: Its PTX.
        name: Its name there.
        threads: Threads of a block, where the compiler chooses them; else 0.
        shared_bytes: Dynamic shared memory, where the compiler chooses it.
        is_cooperative: Whether its blocks wait for each other.
    """

    image: str
    name: str
    threads: int = 0
    shared_bytes: int = 0
    is_cooperative: bool = False


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A call as a session launches it.

    Attributes:
        compiled: The kernel.
        grid: Numbers of blocks.
        block: Numbers of threads.
        args: The packed arguments.
        shared_bytes: Dynamic shared memory of a block.
        stream: The stream that the call's brackets name; None if they name none.
        is_empty: There is nothing to launch: the compiler's own launcher does nothing for such a grid.
    """

    compiled: CompiledKernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: KernelArgs
    shared_bytes: int
    stream: Any = None
    is_empty: bool = False

    def on(self, module: Module) -> tuple[Module, str, tuple[int, ...], tuple[int, ...], KernelArgs, None, int]:
        """Return the first arguments of the session's `launch`; `module` has the compiled image."""
        return module, self.compiled.name, self.grid, self.block, self.args, None, self.shared_bytes


class FunctionKernel(Protocol):
    """A function that one of the compilers takes."""

    def prepared(self, place: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> PreparedLaunch:
        """Compile for a call's arguments, if none like it was before, and pack them.

        Args:
            place: What stands in the call's brackets.
            args: Positional arguments.
            keywords: Arguments by name.

        Raises LaunchFailed, LoadFailed or Unsupported.
        """


NOTHING_LAUNCHED: Final = 0
"""Number of a call whose grid is empty: no launch has it."""


def launch_failed(name: str, why: str, hint: str = "") -> LaunchFailed:
    """Make the error of a call that does not fit its function."""
    message = f"launch of {name!r}: {why}"
    return LaunchFailed(message, hint, Failure(Status.LAUNCH_FAILED, message, hint, kernel=name))
