"""Making the one context of a worker's process."""

import importlib
import os

from gpulease.daemon.drivers.cuda.compiled import Compiled
from gpulease.daemon.drivers.cuda.context import CudaContext
from gpulease.daemon.drivers.cuda.native import launching_code
from gpulease.daemon.drivers.cuda.paths import CACHE_VARIABLE, paths_of_driver
from gpulease.daemon.drivers.interface import Context, DriverError, Opening
from gpulease.daemon.sandbox.needs import Needs


class CudaDriver:
    """NVIDIA cards through the CUDA driver API."""

    name = "cuda"

    def preload(self) -> None:
        """Import and compile; cuInit is left to the workers, because no initialised driver survives a fork."""
        try:
            for module in ("pycuda.driver", "cuda.bindings.driver"):
                importlib.import_module(module)
        except ImportError as error:
            raise DriverError(
                f"the cuda driver can't be loaded: {error}",
                hint="On the GPU host: pip install '.[daemon,cuda]' in gpulease's repository",
            ) from None
        launching_code()

    def needs(self) -> Needs:
        """The driver's devices, libraries and files; none to be written unless the operator named a cache."""
        return paths_of_driver()

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """The driver opens its cache by its path."""
        return ()

    def open_context(self, card: str, slice_bytes: int) -> CudaContext:
        """The context; this process sees that card and no other from here on. Raises DriverError."""
        # Read by cuInit (CUDA C++ Programming Guide, "CUDA Environment Variables").
        os.environ["CUDA_VISIBLE_DEVICES"] = card
        # A listing of kernels must not load them (see images.py).
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
        if not os.environ.get(CACHE_VARIABLE):
            os.environ["CUDA_CACHE_DISABLE"] = "1"
        return CudaContext.open()

    def rewind(self, context: Context) -> Opening:
        """The same context of the card, with new books. Raises DriverError if it is lost."""
        return _begin_again(_checked(context))

    def recycle(self, context: Context) -> Opening:
        """The same, its blocks overwritten before they went back; what it compiled is kept. Raises DriverError."""
        ours = _checked(context)
        ours.scrub()
        return _begin_again(ours, ours.compiled)


def _checked(context: Context) -> CudaContext:
    if not isinstance(context, CudaContext):
        raise DriverError("this context is another driver's")
    return context


def _begin_again(context: CudaContext, compiled: Compiled | None = None) -> Opening:
    context.sync()
    again = context.begin_again(compiled)
    return lambda slice_bytes: again
