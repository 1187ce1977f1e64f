"""One CUDA context with one stream, in the only thread that uses it.

Errors are sticky (CUDA driver API, "Error handling"): after a kernel faulted, every call of this context fails with the
same error, and only the end of the process makes the card usable again. The driver does not say which launch it was.
"""

import ctypes
import time
from typing import Any, Final

import pycuda.driver as cuda
from cuda.bindings import driver as api

from gpulease.daemon.drivers.cuda.images import CudaModule, load_image
from gpulease.daemon.drivers.cuda.local import LocalMemory
from gpulease.daemon.drivers.cuda.markers import Markers
from gpulease.daemon.drivers.cuda.pages import PAGE_BYTES, Pages
from gpulease.daemon.drivers.interface import (
    Admit,
    Dim3,
    DriverError,
    KernelFault,
    LaunchRejected,
    OutOfMemory,
    Poll,
    admit_all,
    keep_waiting,
)

SPIN_S: Final = 200e-6
"""How long a sync asks the card again and again before it sleeps between two looks: most waits end in it."""

COPY_SPIN_BYTES_PER_S: Final = 10e9
"""A pinned copy is asked after for as long as it would take at this rate, which any bus exceeds: a sleep is coarse
beside it."""

MAX_SLEEP_S: Final = 1e-3
"""Longest sleep between two looks at card and lease."""

HEAP_BYTES: Final = 8 << 20
"""What kernels may malloc, all together. The driver takes it when the first module with a malloc is loaded, so it is a
part of every session's allowance; a kernel that asks for more gets a null pointer."""

PRINT_BYTES: Final = 1 << 20
"""What kernels may print between two syncs; the oldest lines are lost beyond that. Taken with the heap."""


class CudaContext:
    """See `gpulease.daemon.drivers.interface.Context`."""

    page_bytes = PAGE_BYTES

    def __init__(self, context: Any, local: LocalMemory, stream: Any = None) -> None:
        self._context = context
        self._local = local
        self._pages = Pages()
        self._stream = stream or cuda.Stream()
        self._allocations: dict[int, Any] = {}
        self._fault: KernelFault | None = None
        self._markers: Markers | None = None
        self._launches = 0
        self._last_tag = 0
        self._last_kernel = ""

    @classmethod
    def open(cls) -> "CudaContext":
        """CuInit and a context on the one card this process sees. Raises DriverError."""
        try:
            cuda.init()
            device = cuda.Device(0)
            context = device.make_context()
            cuda.Context.set_limit(cuda.limit.MALLOC_HEAP_SIZE, HEAP_BYTES)
            cuda.Context.set_limit(cuda.limit.PRINTF_FIFO_SIZE, PRINT_BYTES)
            local = LocalMemory(
                stack_bytes=cuda.Context.get_limit(cuda.limit.STACK_SIZE),
                threads=device.multiprocessor_count * device.max_threads_per_multiprocessor,
                buffers_bytes=HEAP_BYTES + PRINT_BYTES,
            )
            return cls(context, local)
        except cuda.Error as error:
            raise DriverError(f"no CUDA context can be made: {error}") from None

    def begin_again(self) -> "CudaContext":
        """The same context and stream with new books; all that was allocated and loaded must have been released."""
        return CudaContext(self._context, self._local, self._stream)

    @property
    def rounding_bytes(self) -> int:
        """As the driver places allocations (see pages.py)."""
        return self._pages.rounding_bytes

    def mem_alloc(self, size_bytes: int) -> int:
        """Memory of the card, zeroed: the driver zeroes what other processes had, not what this one had."""
        try:
            allocation = cuda.mem_alloc(size_bytes)
        except cuda.MemoryError:
            raise OutOfMemory(
                f"the card can't give {size_bytes} bytes in one piece now", hint="Free something or ask for less."
            ) from None
        except cuda.Error as error:
            raise self._error(error) from None
        self._call(cuda.memset_d8_async, int(allocation), 0, size_bytes, self._stream)
        address = int(allocation)
        self._allocations[address] = allocation
        self._pages.add(address, size_bytes)
        return address

    def mem_free(self, address: int, poll: Poll = keep_waiting) -> None:
        """Once everything launched before has ended."""
        self.sync(poll)
        self._call(self._allocations.pop(address).free)
        self._pages.remove(address)

    def mem_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """From pageable memory the driver has taken the bytes when it returns ("API synchronization behavior")."""
        # Waiting for the card is left to `sync`, which can give up; the driver's own wait for room can't.
        self.sync(poll)
        self._call(cuda.memcpy_htod_async, address, data, self._stream)

    def mem_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Complete on return ("API synchronization behavior")."""
        self.sync(poll)
        # The stream is empty, so the copy starts at once; into pageable memory it is complete when the call returns.
        self._call(cuda.memcpy_dtoh_async, into, address, self._stream)

    def pin(self, memory: memoryview) -> None:
        """Lock its pages and tell the card of them (CUDA driver API, cuMemHostRegister).

        Where the driver refuses, for want of memory say, copies are as right and as slow as from any other memory.
        """
        api.cuMemHostRegister(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), 0)

    def write_pinned(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """The card reads the bytes while the call returns: wait until it has."""
        self.mem_write(address, data, poll)
        self._await_copy(len(data), poll)

    def read_pinned(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """The card writes the bytes while the call returns: wait until it has."""
        self.mem_read(address, into, poll)
        self._await_copy(len(into), poll)

    def _await_copy(self, nbytes: int, poll: Poll) -> None:
        until = time.monotonic() + nbytes / COPY_SPIN_BYTES_PER_S
        while not self._call(self._stream.is_done):
            if time.monotonic() > until:
                self.sync(poll)

    def module_load(self, image: bytes, admit: Admit = admit_all) -> CudaModule:
        """PTX or a cubin, weighed before the card sees it."""
        if self._fault is not None:
            raise self._fault
        return load_image(image, admit, self._local)

    def module_unload(self, module: Any, poll: Poll = keep_waiting) -> None:
        """Once everything launched before has ended; the driver unloads it with the last reference."""
        self.sync(poll)

    def launch(self, kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        """Queue a launch: the parameter buffer goes to the driver as it is."""
        if self._markers is not None:
            self._markers.make_room()
        try:
            kernel.function._launch_kernel(grid, block, params, shared_bytes, self._stream)
        except cuda.Error as error:
            if not self._is_usable():
                raise self._lost(error) from None
            raise LaunchRejected(
                f"{kernel.name}: {error}", hint="Check grid, block and shared memory against what the kernel can take."
            ) from None
        if self._markers is not None:
            self._call(self._markers.add)
        self._launches += 1
        self._last_tag = tag
        self._last_kernel = kernel.name

    def sync(self, poll: Poll = keep_waiting) -> None:
        """Spin for a bounded time, then sleep longer and longer between looks, so that a long kernel costs no core."""
        started = time.monotonic()
        is_done = self._stream.is_done
        while not self._call(is_done):
            waited = time.monotonic() - started
            if waited > SPIN_S:
                poll()
                time.sleep(min(waited / 16, MAX_SLEEP_S))
        self._launches = 0

    def watch(self, poll: Poll) -> None:
        """Mark each launch with an event from now on."""
        self._markers = Markers(self._stream, poll)

    def progress(self) -> tuple[int, int]:
        """What the events say; after a fault nothing runs."""
        if self._markers is None:
            return 0, 0
        return self._markers.progress()

    def fault(self) -> KernelFault | None:
        """What an earlier call found; asking the card costs microseconds, and the next real call finds it anyway."""
        return self._fault

    def close(self) -> None:
        """Leave the context to the end of the process, which ends it whatever state it is in."""

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except cuda.Error as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> DriverError:
        """What a failed call was: of that call alone, or the context's end."""
        return DriverError(str(error)) if self._is_usable() else self._lost(error)

    def _is_usable(self) -> bool:
        """A sticky error is given again by every call; any other was the failed call's own."""
        try:
            self._stream.is_done()
        except cuda.Error:
            return False
        return True

    def _lost(self, error: Exception) -> KernelFault:
        """The context's sticky fault, told as well as CUDA lets us."""
        if self._fault is None:
            reason = str(error).rpartition("failed: ")[2]
            which = "no launch was waiting for its end"
            if self._launches == 1:
                which = f"kernel {self._last_kernel}"
            elif self._launches:
                which = f"one of {self._launches} launches since the last sync, the last of them {self._last_kernel}"
            self._fault = KernelFault(
                f"{reason} ({which}); the context is lost",
                tag=self._last_tag if self._launches == 1 else 0,
                kernel=self._last_kernel if self._launches == 1 else "",
                context_lost=True,
                hint="Free the lease and acquire another; run the kernel under compute-sanitizer to find the access.",
            )
        return self._fault
