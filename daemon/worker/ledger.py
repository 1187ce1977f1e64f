"""What a session owns: allocations counted against the slice, modules, and the numbers a tenant knows them by.

Numbers are never reused for modules; a device pointer is one again only when the driver gives the same address. A
number another session owns is just unknown here: there is one ledger a process.
"""

from dataclasses import dataclass
from typing import Final

from gpulease.daemon.drivers.interface import Module
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

MAX_ALLOCATIONS: Final = 65_536
"""Most live allocations of a session. Stops a loop of one-byte allocations, each of which costs the driver far more."""

MAX_MODULES: Final = 1024
"""Most loaded modules of a session: their code lives outside the slice."""

MAX_IMAGE_BYTES: Final = 256 << 20
"""Most bytes of images loaded at a time, for the same reason."""


class Refused(Exception):
    """An operation that can't be done, and the failure that says so."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid_handle(message: str) -> Refused:
    """The handle is not one of this session's, or the range is not in it."""
    return Refused(Failure(Status.INVALID_HANDLE, message, hint="Use handles this session gave out and has not freed."))


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A module and what it weighs."""

    module: Module
    image_bytes: int


class Ledger:
    """The session's allocations and modules."""

    def __init__(self, slice_bytes: int) -> None:
        self.slice_bytes = slice_bytes
        self.used_bytes = 0
        self._allocations: dict[int, int] = {}
        self._modules: dict[int, LoadedModule] = {}
        self._image_bytes = 0
        self._last_module = 0

    def check_alloc(self, size_bytes: int) -> None:
        """Raises Refused unless the slice has room for `size_bytes` more."""
        if size_bytes == 0:
            raise Refused(Failure(Status.ALLOC_FAILED, "0 bytes can't be allocated", hint="Ask for at least 1 byte."))
        if len(self._allocations) >= MAX_ALLOCATIONS:
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"the session has {MAX_ALLOCATIONS} allocations, the most allowed",
                    hint="Free some, or allocate fewer and larger ones.",
                )
            )
        free_bytes = self.slice_bytes - self.used_bytes
        if size_bytes > free_bytes:
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"{size_bytes} bytes were asked for; {free_bytes} of the slice's {self.slice_bytes} bytes are free",
                    hint="Free something, or acquire a lease with more min_vram.",
                )
            )

    def add_allocation(self, address: int, size_bytes: int) -> None:
        """The driver gave this allocation."""
        self._allocations[address] = size_bytes
        self.used_bytes += size_bytes

    def locate(self, handle: int, offset: int, length: int) -> int:
        """The device address of a range that lies inside an allocation. Raises Refused."""
        size_bytes = self._size_of(handle)
        if offset + length > size_bytes:
            raise invalid_handle(
                f"bytes {offset} to {offset + length} are outside the allocation {handle:#x} of {size_bytes} bytes"
            )
        return handle + offset

    def check_allocation(self, handle: int) -> None:
        """Raises Refused unless the handle is a live allocation."""
        self._size_of(handle)

    def remove_allocation(self, handle: int) -> None:
        """The driver freed it."""
        self.used_bytes -= self._allocations.pop(handle)

    def check_load(self, image_bytes: int) -> None:
        """Raises Refused if one module more is one too many."""
        if len(self._modules) >= MAX_MODULES or self._image_bytes + image_bytes > MAX_IMAGE_BYTES:
            raise Refused(
                Failure(
                    Status.LOAD_FAILED,
                    f"the session has {len(self._modules)} modules from {self._image_bytes} bytes of images; "
                    f"at most {MAX_MODULES} and {MAX_IMAGE_BYTES} bytes are allowed",
                    hint="Unload modules that are no longer needed.",
                )
            )

    def add_module(self, module: Module, image_bytes: int) -> int:
        """A number for a loaded module."""
        self._last_module += 1
        self._modules[self._last_module] = LoadedModule(module, image_bytes)
        self._image_bytes += image_bytes
        return self._last_module

    def module(self, number: int) -> Module:
        """The module of that number. Raises Refused."""
        loaded = self._modules.get(number)
        if loaded is None:
            raise invalid_handle(f"{number} is not a loaded module of this session")
        return loaded.module

    def remove_module(self, number: int) -> None:
        """It was unloaded."""
        self._image_bytes -= self._modules.pop(number).image_bytes

    def _size_of(self, handle: int) -> int:
        size_bytes = self._allocations.get(handle)
        if size_bytes is None:
            raise invalid_handle(f"{handle:#x} is not a live allocation of this session")
        return size_bytes
