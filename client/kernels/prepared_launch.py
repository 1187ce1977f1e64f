"""A call of a Python function, prepared as a launch. All compilers of Python functions return a PreparedLaunch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpulease.client.errors import LaunchFailed
from gpulease.client.handles import Module
from gpulease.client.kernel_args import KernelArgs
from gpulease.protocol import Failure, Status

MAX_VARIANTS: Final = 256
"""Maximum number of compiled variants of one kernel in memory, so that a constant that differs in every call can't fill
memory. When there are more, all are dropped, and compiled again or found on disk."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel compiled for one signature.

    Attributes:
        image: The kernel's PTX.
        name: The kernel's name in the PTX.
        threads: Threads per block if the compiler chooses them; else 0.
        shared_bytes: Dynamic shared memory per block, in bytes, if the compiler chooses it.
        is_cooperative: Whether its blocks wait for each other.
    """

    image: str
    name: str
    threads: int = 0
    shared_bytes: int = 0
    is_cooperative: bool = False


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A call, ready for the session to launch.

    Attributes:
        compiled: The kernel.
        grid: Number of blocks per dimension.
        block: Number of threads per dimension.
        args: The packed arguments.
        shared_bytes: Dynamic shared memory per block, in bytes.
        stream: The stream that the call's brackets name; None if they name none.
        is_empty: True if there is nothing to launch, because the grid is one for which the compiler's own launcher does
            nothing.
    """

    compiled: CompiledKernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: KernelArgs
    shared_bytes: int
    stream: Any = None
    is_empty: bool = False

    def on(self, module: Module) -> tuple[Module, str, tuple[int, ...], tuple[int, ...], KernelArgs, None, int]:
        """Return the first arguments of the session's `launch`; `module` is the loaded image."""
        return module, self.compiled.name, self.grid, self.block, self.args, None, self.shared_bytes


class FunctionKernel(Protocol):
    """A Python function for one of the compilers."""

    name: str
    """The function's name."""

    def prepared(self, place: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> PreparedLaunch:
        """Compile for the types of a call's arguments, unless that was done before, and pack the arguments.

        Args:
            place: The value in the call's brackets.
            args: Positional arguments.
            keywords: Arguments by name.

        Raises LaunchFailed, LoadFailed or Unsupported.
        """


NOTHING_LAUNCHED: Final = 0
"""The result of a call with an empty grid: no launch has this number."""


def launch_failed(name: str, reason: str, hint: str = "") -> LaunchFailed:
    """Return the error for a call that does not fit its function.

    Args:
        name: The kernel's name.
        reason: What is wrong.
        hint: What to do.
    """
    message = f"launch of {name!r}: {reason}"
    return LaunchFailed(message, hint, Failure(Status.LAUNCH_FAILED, message, hint, kernel=name))


def configuration_missing(name: str) -> LaunchFailed:
    """Return the error for a call of a kernel without brackets."""
    hint = "Write kernel[blocks, threads](...) for a function of numba's, and kernel[grid](...) for one of Triton's"
    return launch_failed(name, "the launch configuration is missing", hint)
