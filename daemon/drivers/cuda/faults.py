"""Failed calls of the driver, and the fault that ends a context.

Errors are sticky (CUDA driver API, "Error handling"): after a kernel has faulted, every call of the context fails with
the same error, and only the end of the process makes the card usable again. The driver does not say which launch it
was.
"""

from typing import Any

import pycuda.driver as cuda

from gpulease.daemon.drivers.cuda.native import Launcher
from gpulease.daemon.drivers.interface import DriverError, KernelFault


class Faults:
    """The part of a context that calls the driver and keeps the fault that ended the context."""

    _stream: Any
    _launcher: Launcher

    def __init__(self) -> None:
        self._fault: KernelFault | None = None
        self._last_kernel = ""

    def fault(self) -> KernelFault | None:
        """The fault that an earlier call found. Asking the card takes microseconds; the next call finds it anyway."""
        return self._fault

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except cuda.Error as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> DriverError:
        """A failed call's error: the call's own, or the fault that ended the context."""
        return DriverError(str(error)) if self._is_usable() else self._lost(error)

    def _is_usable(self) -> bool:
        """Return whether the context works: after a sticky error every call fails, after any other only one did."""
        try:
            self._stream.is_done()
        except cuda.Error:
            return False
        return True

    def _lost(self, error: Exception | str) -> KernelFault:
        """The fault that ended the context, with the launch as precisely as CUDA lets us tell."""
        if self._fault is None:
            reason = str(error).rpartition("failed: ")[2]
            launches = self._launcher.state.launches
            which = "no launch was waiting for its end"
            if launches == 1:
                which = f"kernel {self._last_kernel}" if self._last_kernel else "a kernel of a graph"
            elif launches:
                last = self._last_kernel or "a graph's"
                which = f"one of {launches} launches since the last sync, the last of them {last}"
            self._fault = KernelFault(
                f"{reason} ({which}); the context is lost",
                tag=self._launcher.state.tag if launches == 1 else 0,
                kernel=self._last_kernel if launches == 1 else "",
                context_lost=True,
                hint="Free the lease and acquire another; run the kernel under compute-sanitizer to find the access.",
            )
        return self._fault
