"""The CUDA driver: its files and devices for the sandbox, and the only context of a worker's process.

The files are those that strace(1) showed from cuInit on (H100, driver 580).
"""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulease.daemon.drivers.cuda.context import CudaContext
from gpulease.daemon.drivers.cuda.jit_cache import CACHE_VARIABLE, Compiled
from gpulease.daemon.drivers.cuda.launch_code import launching_code
from gpulease.daemon.drivers.interface import Context, DriverError, Opening
from gpulease.daemon.host.malloc_arenas import use_one_arena
from gpulease.daemon.sandbox.measures import SandboxNeeds

MAX_PRIVATE_BYTES: Final = 16 << 30
"""Maximum private host memory of a worker. A worker uses 130 MiB, plus the memory for compiling its images. The bound
stops an image that makes the compiler take all of the host's memory."""

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


def paths_of_driver() -> SandboxNeeds:
    """Return the paths and devices that libcuda opens; libcuda must be mapped into this process."""
    cache = os.environ.get(CACHE_VARIABLE)
    return SandboxNeeds(
        # A card's worker also reads the driver's files. A cache is optional, because it would let one tenant's code
        # reach another tenant.
        readable=(*map(Path, _FILES), *_libraries(), *_cards()),
        devices=tuple(_devices()),
        own_process=True,
        writable=(Path(cache),) if cache else (),
        private_bytes=MAX_PRIVATE_BYTES,
    )


def _libraries() -> Iterator[Path]:
    """Yield the driver's libraries next to libcuda. The first image loads one of them, the PTX compiler."""
    with open("/proc/self/maps") as maps:
        # The library's own path shows where the others are, because distributions differ.
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
    for folder in {Path(path).parent for path in mapped}:
        for name in _LIBRARY_NAMES:
            yield from sorted(folder.glob(name))


def _cards() -> Iterator[Path]:
    """Yield the cards' folders below /sys, which contain the memory node near each card."""
    if _CARDS.is_dir():
        yield from (_PCI / card.name.lower() for card in sorted(_CARDS.iterdir()))


def _devices() -> Iterator[Path]:
    """Yield the cards' device nodes, and the folder of the nodes that open MIG partitions."""
    yield from (node for node in sorted(Path("/dev").glob("nvidia*")) if node.is_char_device())
    yield Path("/dev/nvidia-caps")


class CudaDriver:
    """NVIDIA cards through the CUDA driver API."""

    name = "cuda"

    def __init__(self, *, has_chains: bool = True) -> None:
        """`has_chains`: Whether native code may queue several launches by one call."""
        self._has_chains = has_chains

    def preload(self) -> None:
        """Import and compile. Workers call cuInit themselves, because an initialised driver does not survive a fork."""
        try:
            # Imported before the fork, so workers share the modules and need no access to their files.
            for module in ("pycuda.driver", "cuda.bindings.driver"):
                importlib.import_module(module)
        except ImportError as error:
            raise DriverError(
                f"the cuda driver can't be loaded: {error}",
                hint="On the GPU host: pip install '.[daemon,cuda]' in gpulease's repository",
            ) from None
        # Compiled here once, and shared by all forked workers.
        launching_code()

    def needs(self) -> SandboxNeeds:
        """Return the driver's devices, libraries and files; none is writable unless the operator named a cache."""
        return paths_of_driver()

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """Return no descriptors: the driver opens its cache by path."""
        return ()

    def open_context(self, card: str, slice_bytes: int) -> CudaContext:
        """Make the context; this process sees that card and no other from now on. Raises DriverError."""
        # cuInit reads these variables (CUDA C++ Programming Guide, "CUDA Environment Variables"). The broker has obeyed
        # the operator's value of the first: it leases no other cards.
        os.environ["CUDA_VISIBLE_DEVICES"] = card
        # Listing an image's kernels must not load them (images.py).
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
        if not os.environ.get(CACHE_VARIABLE):
            os.environ["CUDA_CACHE_DISABLE"] = "1"
        # A driver thread that got an arena while the context is made would race with the driver's reservations for
        # modules: variables would then have different addresses in different processes (driver 580).
        use_one_arena()
        return CudaContext.open(has_chains=self._has_chains)

    def rewind(self, context: Context) -> Opening:
        """Keep the card's context, with new records. Raises DriverError if it is lost."""
        return _renew(_checked(context))

    def recycle(self, context: Context) -> Opening:
        """Keep the card's context, scrubbed, with new records and its compiled code. Raises DriverError."""
        cuda_context = _checked(context)
        # After the scrub nothing of the lease is left but its compiled code, which `forget_earlier` drops.
        cuda_context.scrub()
        return _renew(cuda_context, cuda_context.compiled)


def _checked(context: Context) -> CudaContext:
    if not isinstance(context, CudaContext):
        raise DriverError("this context belongs to another driver")
    return context


def _renew(context: CudaContext, compiled: Compiled | None = None) -> Opening:
    # Nothing may run in the context while its records are replaced.
    context.sync()
    renewed = context.renew(compiled)
    return lambda slice_bytes: renewed
