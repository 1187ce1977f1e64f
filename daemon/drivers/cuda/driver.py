"""What libcuda opens once a process is shut in: as strace(1) showed it on an H100, driver 580, from cuInit on.

Making the one context of a worker's process.
"""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulease.daemon.drivers.cuda.compiled import Compiled
from gpulease.daemon.drivers.cuda.context import CudaContext
from gpulease.daemon.drivers.cuda.native import launching_code
from gpulease.daemon.drivers.interface import Context, DriverError, Opening
from gpulease.daemon.sandbox.measures import Needs

CACHE_VARIABLE: Final = "CUDA_CACHE_PATH"
"""Where the driver keeps what it compiled, an operator's setting (CUDA C++ Programming Guide, "CUDA Environment
Variables"). Without it nothing is kept: what one worker writes there the next one runs."""

MAX_PRIVATE_BYTES: Final = 16 << 30
"""What a worker may take of the host's memory for itself: it has 130 MiB, and what its images' compilation takes.
Stops an image that makes the compiler take all of the host's."""

_FILES: Final = (
    "/etc/ld.so.cache",
    "/etc/nvidia",
    "/usr/share/nvidia",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/meminfo",
    "/proc/sys/vm",
    "/proc/driver/nvidia",
    "/proc/driver/nvidia-uvm",
    "/proc/driver/nvidia-caps",
    "/sys/devices/system/cpu",
    "/sys/devices/system/memory/block_size_bytes",
    "/sys/devices/system/node",
)
_CARDS: Final = Path("/proc/driver/nvidia/gpus")
_PCI: Final = Path("/sys/bus/pci/devices")
_LIBRARY_NAMES: Final = ("libcuda*.so*", "libnvidia*.so*")


def paths_of_driver() -> Needs:
    """Of libcuda, which must be mapped."""
    cache = os.environ.get(CACHE_VARIABLE)
    return Needs(
        readable=(*map(Path, _FILES), *_libraries(), *_cards()),
        devices=tuple(_devices()),
        own_process=True,
        writable=(Path(cache),) if cache else (),
        private_bytes=MAX_PRIVATE_BYTES,
    )


def _libraries() -> Iterator[Path]:
    """The driver's own, beside libcuda: the compiler of PTX is one, and is loaded with the first image."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
    for folder in {Path(path).parent for path in mapped}:
        for name in _LIBRARY_NAMES:
            yield from sorted(folder.glob(name))


def _cards() -> Iterator[Path]:
    """The cards' folders below /sys: which node's memory is near them."""
    if _CARDS.is_dir():
        yield from (_PCI / card.name.lower() for card in sorted(_CARDS.iterdir()))


def _devices() -> Iterator[Path]:
    """Their nodes, and the folder of those that MIG partitions are opened by."""
    yield from (node for node in sorted(Path("/dev").glob("nvidia*")) if node.is_char_device())
    yield Path("/dev/nvidia-caps")


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
