"""A simulated driver API for mapped memory, which checks the driver's rules without a card.

The rules are the CUDA driver API's, "Virtual Memory Management".
"""

import ctypes
import os
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar

from gpulease.daemon.drivers.cuda.mapped_pages import MappedPages
from gpulease.daemon.drivers.interface import DriverError, Poll

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
CARD_BYTES = 64 * GIB


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801


class Card:
    """A driver API. Its attributes show the state of the card's memory.

    Attributes:
        reserved: Size of each reserved range, by address.
        mapped: (size, handle, whether accessible) of each mapping, by address.
        sizes: Bytes of each handle that has not been released.
        zeroed: (address, size) of each memset.
        bytes: Contents of memory that was written or read, by handle.
        pinned: Sizes of registered host memory by address; `may_pin` permits it.
        lent: The card and the handle of each exported piece, by the file of its descriptor. All cards share this.
        imported: Handles of pieces that belong to other cards.
        copied_back: Number of bytes that were copied from the host.
        fail_at: Number of the call that fails.
        busy: How many more queries report that the stream is not ready.
    """

    CUresult = Result
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)

    def __init__(self, granularity: int = PAGE) -> None:
        self.granularity = granularity
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int, bool]] = {}
        self.sizes: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.zeroed: list[tuple[int, int]] = []
        self.calls = 0
        self.fail_at = 0
        self.error = Result.CUDA_ERROR_INVALID_VALUE
        self.busy = 0
        self.bytes: dict[int, bytearray] = {}
        self.events = 0
        self.pinned: dict[int, int] = {}
        self.may_pin = True
        self.imported: set[int] = set()
        self.copied_back = 0
        self._next = 1 << 40

    lent: ClassVar[dict[tuple[int, int], tuple["Card", int]]] = {}

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _ok(self) -> Result:
        self.calls += 1
        return self.error if self.calls == self.fail_at else Result.CUDA_SUCCESS

    @property
    def taken(self) -> int:
        """Bytes of this card that are in use, because a handle or a mapping exists for them."""
        held = ({handle for _, handle, _ in self.mapped.values()} | set(self.sizes)) - self.imported
        return sum((self.sizes | self.lost)[handle] for handle in held)

    def cuMemGetAllocationGranularity(self, memory: Any, option: int) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS, self.granularity)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return (self._ok(), CARD_BYTES - self.taken, CARD_BYTES)

    def cuMemCreate(self, size: int, memory: Any, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error, None)
        assert size > 0
        assert size % PAGE == 0
        if self.taken + size > CARD_BYTES:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
        handle = self.calls
        self.sizes[handle] = size
        return (Result.CUDA_SUCCESS, handle)

    def cuMemAddressReserve(self, size: int, alignment: int, at: int, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error, None)
        # The driver uses the preferred address if nothing is reserved there. Otherwise it may use any other one.
        is_free = all(at + size <= start or start + span <= at for start, span in self.reserved.items())
        address = at if at and is_free else self._next
        self._next = max(self._next, address + size)
        self.reserved[address] = size
        return (Result.CUDA_SUCCESS, address)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert not any(address <= at < address + size for at in self.mapped)
        assert self.reserved.pop(address) == size
        return (Result.CUDA_SUCCESS,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert offset == 0
        # A mapping always covers a whole piece, as an H200's driver (580.159) requires.
        if size != self.sizes[handle]:
            return (Result.CUDA_ERROR_NOT_SUPPORTED,)
        assert any(start <= address and address + size <= start + span for start, span in self.reserved.items())
        assert all(address + size <= start or start + span <= address for start, (span, _, _) in self.mapped.items())
        self.mapped[address] = (size, handle, False)
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert (access[0].flags, access[0].location.type, access[0].location.id, count) == (3, 1, 0, 1)
        at = address
        while at < address + size:
            span, handle, _ = self.mapped[at]
            self.mapped[at] = (span, handle, True)
            at += span
        assert at == address + size
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        assert not self.busy, "it is being zeroed"
        assert self.mapped.pop(address)[0] == size
        return (Result.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        self.lost[handle] = self.sizes.pop(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        _, _, is_accessible = self.mapped[address]
        assert is_accessible
        assert value == 0
        self.zeroed.append((address, size))
        return (Result.CUDA_SUCCESS,)

    def _found(self, address: int, size: int) -> tuple[bytearray, int]:
        """Return the contents of the piece that is mapped and accessible at a range, and the range's offset in it."""
        start, (_, handle, is_accessible) = next(
            (at, one) for at, one in self.mapped.items() if at <= address and address + size <= at + one[0]
        )
        assert is_accessible
        if handle not in self.bytes:
            self.bytes[handle] = bytearray(b"?" * (self.sizes | self.lost)[handle])
        return self.bytes[handle], address - start

    def poke(self, address: int, data: bytes) -> None:
        """Write memory, as a kernel would."""
        found, at = self._found(address, len(data))
        found[at : at + len(data)] = data

    def peek(self, address: int, size: int) -> bytes:
        found, at = self._found(address, size)
        return bytes(found[at : at + size])

    def cuMemcpyDtoHAsync(self, host: int, address: int, size: int, stream: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        ctypes.memmove(host, self.peek(address, size), size)
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, address: int, host: int, size: int, stream: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        self.poke(address, ctypes.string_at(host, size))
        self.copied_back += size
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error,)
        self.poke(target, self.peek(source, size))
        return (Result.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error, None)
        assert kind == 1
        fd = os.memfd_create("piece")
        self.lent[_file_of(fd)] = self, handle
        return (Result.CUDA_SUCCESS, fd)

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[Any, ...]:
        if error := self._ok():
            return (error, None)
        assert kind == 1
        card, handle = self.lent[_file_of(fd)]
        own = self.calls
        self.sizes[own] = card.sizes[handle]
        self.bytes[own] = card.bytes.setdefault(handle, bytearray(b"?" * card.sizes[handle]))
        self.imported.add(own)
        return (Result.CUDA_SUCCESS, own)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        if not self.may_pin:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        self.pinned[address] = size
        return (Result.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return (Result.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        self.events += 1
        return (self._ok(), self.events)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return (self._ok(),)

    def cuEventQuery(self, event: int) -> tuple[Any, ...]:
        return self.cuStreamQuery(0)

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        if self.busy:
            self.busy -= 1
            return (Result.CUDA_ERROR_NOT_READY,)
        return (self._ok(),)

    def covered(self, address: int, size: int) -> list[int]:
        """Return the handles that are mapped at a range. Fails if there is a gap, or if a part is not accessible."""
        handles, at = [], address
        while at < address + size:
            span, handle, is_accessible = self.mapped[at]
            assert is_accessible
            handles.append(handle)
            at += span
        assert at == address + size
        return handles


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def wait(is_done: Callable[[], bool], poll: Poll) -> None:
    while not is_done():
        poll()


def pages_on(card: Card) -> MappedPages:
    return MappedPages(card, lambda error: DriverError(f"failed: {error!r}"), wait)
