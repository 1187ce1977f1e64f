"""The CUDA context of a worker's process, which one thread uses, and its scrub between two leases."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgpack
import pycuda.driver as cuda
from cuda.bindings import driver as api

from gpulease.daemon.drivers.cuda.cubin_footprint import Weight
from gpulease.daemon.drivers.cuda.graphs import ChainGraph, CudaGraph, PinnedBytes, device_bytes_of
from gpulease.daemon.drivers.cuda.images import CudaModule, load_image, unload
from gpulease.daemon.drivers.cuda.jit_cache import Compiled
from gpulease.daemon.drivers.cuda.launch_attributes import attributes_refused, launch_with
from gpulease.daemon.drivers.cuda.launch_code import Launcher
from gpulease.daemon.drivers.cuda.mapped_pages import MappedPages
from gpulease.daemon.drivers.cuda.memory import (
    HEAP_BYTES,
    MAX_CACHED_BLOCKS,
    MAX_CACHED_BYTES,
    PAGE_BYTES,
    PRINT_BYTES,
    Blocks,
    LocalMemory,
    block_bytes,
)
from gpulease.daemon.drivers.cuda.module_history import ModuleHistory
from gpulease.daemon.drivers.cuda.refused_memory import MemoryRefused, take_if_shown, take_once_given
from gpulease.daemon.drivers.cuda.region_pages import CudaRegions
from gpulease.daemon.drivers.cuda.slice_pages import SlicePages
from gpulease.daemon.drivers.cuda.streams import CudaStreams, Markers, StreamTicket, TimedEvent, streams_bytes
from gpulease.daemon.drivers.interface import (
    MAX_MARKS,
    AdmitGraph,
    AdmitModule,
    AdoptedEvent,
    CardProgress,
    Dim3,
    DriverError,
    DriverEvent,
    DriverLaunchAttributes,
    DriverModule,
    ImageMismatch,
    ImageRejected,
    KernelFault,
    LaunchRejected,
    NativeLaunch,
    PageMove,
    Poll,
    RegionReturn,
    Step,
    Ticket,
    admit_all,
    admit_any,
    cooperative_refused,
    keep_waiting,
)
from gpulease.daemon.host.copy_ring import CopyRing, RingEnd
from gpulease.daemon.host.heap_wipe import is_heap_wiped

SPIN_S: Final = 200e-6
"""Time for which a sync spins on the card before it sleeps between two polls. Most waits end within this time."""

COPY_SPIN_BYTES_PER_S: Final = 10e9
"""A wait spins on a pinned copy for as long as the copy would take at this rate, which any bus exceeds: a sleep
would be coarse in comparison."""

MAX_AHEAD_OF_COPY: Final = 512
"""Maximum number of launches that may be queued when a copy is put after them without a wait."""

MAX_VARIABLE_BYTES: Final = 32 << 20
"""Maximum number of bytes of modules' variables of a session that leaves its process: their bytes are part of its
image, and are copied without the speed of pinned memory."""

MAX_SLEEP_S: Final = 1e-3
"""Longest sleep between two polls of card and lease."""

_Taken = TypeVar("_Taken")


class CudaContext:
    """A `gpulease.daemon.drivers.interface.Context` on a CUDA card.

    Attributes:
        compiled: The machine code of its images, which may outlive the context.
    """

    page_bytes = PAGE_BYTES

    def __init__(
        self,
        context: Any,
        local: LocalMemory,
        stream: Any = None,
        compiled: Compiled | None = None,
        *,
        has_chains: bool = True,
    ) -> None:
        # The context is current in the one thread that uses it, so no call names it.
        self._context = context
        self._has_chains = has_chains
        self._local = local
        self.compiled = Compiled() if compiled is None else compiled
        # Records of the objects that the driver gave this context.
        self._blocks = Blocks()
        self._pages = MappedPages(api, self.failure, self._await)
        self._regions = CudaRegions(self._pages, self._await)
        # The allocations of a parkable session; any other session uses cuMemAlloc.
        self._slice: SlicePages | None = None
        self._streams = CudaStreams(stream)
        # The selected stream, looked up only when the selection changes, not for each launch.
        self._stream = self._streams[0]
        # Whether only stream 0 exists.
        self._has_one_stream = True
        # Whether all memory that was passed to `pin` is pinned, so that copies may continue after their call has
        # returned.
        self._can_begin_copies = True
        # Whether a loaded module had kernels that may have left data in memory that a scrub can't reach.
        self._leaves_traces = False
        # Whether the driver got a module that calls those of its functions that make the context take memory.
        self._needs_driver_memory = False
        # The loaded modules, each with its number in the history.
        self._modules: dict[CudaModule, int] = {}
        self._history = ModuleHistory()
        # Bytes of modules' variables that come from another process, by address, until they are written.
        self._contents: list[tuple[int, bytes]] = []
        self._wipes_memory = is_heap_wiped()
        self._markers: Markers | None = None
        # An event with a known time on the host's clock, once events leave the process or come from another.
        self._anchor: tuple[TimedEvent, int] | None = None
        self._launcher = Launcher(self._stream.handle)
        # The events after work under a limit of time (CardProgress), once there was a limit.
        self._marks: list[Any] = []
        self._spin_s = SPIN_S
        # Memory that was passed to `pin`. It must outlive its registration, or the driver would mistake new memory at
        # its address for it.
        self._pinned: list[memoryview] = []
        # Addresses that were passed to `pin_host`.
        self._pinned_host: set[int] = set()
        # Bytes that replays of closed graphs may still read.
        self._retired: list[PinnedBytes] = []
        # The fault that ended the context, and the name of the last kernel, to report with it; "" if not known.
        self._fault: KernelFault | None = None
        self._last_kernel = ""
        self._yields = False

    @classmethod
    def open(cls, *, has_chains: bool = True) -> "CudaContext":
        """Call cuInit and make a context on the one card that this process sees. Raises DriverError."""
        # Step 1: cuInit and a context. CUDA_VISIBLE_DEVICES leaves this process one card, number 0.
        try:
            cuda.init()
            device = cuda.Device(0)
            context = device.make_context()
            # Step 2: set limits before any module is loaded: the first module that needs these buffers makes the driver
            # allocate them.
            cuda.Context.set_limit(cuda.limit.MALLOC_HEAP_SIZE, HEAP_BYTES)
            cuda.Context.set_limit(cuda.limit.PRINTF_FIFO_SIZE, PRINT_BYTES)
            # Step 3: compute what local memory will cost, from figures that never change for this card.
            local = LocalMemory(
                stack_bytes=cuda.Context.get_limit(cuda.limit.STACK_SIZE),
                threads=device.multiprocessor_count * device.max_threads_per_multiprocessor,
                buffers_bytes=HEAP_BYTES + PRINT_BYTES,
            )
            return cls(context, local, has_chains=has_chains)
        except cuda.Error as error:
            raise DriverError(f"no CUDA context can be made: {error}") from None

    def renew(self, compiled: Compiled | None = None) -> "CudaContext":
        """Return the card's context and stream with new records; all allocations and modules must have been released.

        Raises DriverError if there were regions, because their addresses are never reused.
        """
        # Keep the CUDA context, and drop only the records of the last lease.
        self._refuse_regions()
        self.unpin()
        self.trim(0)
        if self._slice is not None:
            self._slice.close()
        while self._marks:
            api.cuEventDestroy(self._marks.pop())
        return CudaContext(self._context, self._local, self._stream, compiled, has_chains=self._has_chains)

    def scrub(self) -> None:
        """Unpin all memory, and overwrite the data that the driver's buffers keep.

        Raises DriverError if data remains in the driver's pages.
        """
        # Step 1: refuse a context with data that a scrub can't reach. Such a context ends with its process.
        if self._leaves_traces:
            raise DriverError("a module had variables, or called driver functions")
        if len(self._streams) > 1:
            raise DriverError("other streams existed")
        self._refuse_regions()
        # Step 2: make sure that nothing of the lease still runs, and that the card can't write the lease's host memory.
        self.sync()
        self.unpin()
        # Step 3: overwrite the driver's buffers by copies of our own, then release the copies' memory.
        address = self.mem_alloc(STAGING_BYTES)
        self._call(_scrub_driver_buffers, address, self._stream)
        self.sync()
        self.mem_free(address)

    def _refuse_regions(self) -> None:
        if self._regions.reserved_bytes:
            raise DriverError("it had regions, whose addresses no other lease may use")

    @property
    def compute_capability(self) -> int:
        major, minor = cuda.Context.get_device().compute_capability()
        return int(10 * major + minor)

    @property
    def cuda_version(self) -> int:
        return int(cuda.get_driver_version())

    @property
    def rounding_bytes(self) -> int:
        """Bytes that allocations take in addition to their sizes, as the driver places them (memory.py)."""
        return self._blocks.rounding_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of freed blocks that are cached (memory.py)."""
        return self._blocks.cached_bytes

    def mem_alloc(self, size_bytes: int, spare_bytes: int = MAX_CACHED_BYTES, poll: Poll = keep_waiting) -> int:
        """Return a cached block or a new one, zeroed before everything that is put in any stream from now on.

        The driver zeroes memory that another process had, not memory that this process had.
        """
        # A cached block needs no driver call; its old bytes are zeroed like a new block's.
        cached = self._blocks.reuse(size_bytes)
        address = self._new_block(size_bytes, spare_bytes, poll) if cached is None else cached
        # The memset may go into several streams; a watched context must count each.
        for number in self._call(self._streams.zero, address, block_bytes(size_bytes), cached is not None):
            self._mark(number)
        return address

    def _new_block(self, size_bytes: int, spare_bytes: int, poll: Poll) -> int:
        # The driver may refuse memory that its own figures show as free: see refused_memory.py.
        def take() -> Any:
            try:
                if self._slice is not None:
                    return self._slice.take(block_bytes(size_bytes))
                return cuda.mem_alloc(block_bytes(size_bytes))
            except cuda.MemoryError:
                raise MemoryRefused(
                    f"the card can't provide {size_bytes} bytes in one piece now",
                    hint="Free something, or request less.",
                ) from None
            except cuda.Error as error:
                raise self._error(error) from None

        allocation = self._take(take, block_bytes(size_bytes), spare_bytes, poll)
        self._blocks.add(int(allocation), size_bytes, allocation)
        return int(allocation)

    def _take(self, take: Callable[[], _Taken], size_bytes: int, spare_bytes: int, poll: Poll) -> _Taken:
        """Take memory of the card for which the cached blocks make room. Raises MemoryRefused."""
        # First reduce the cache to the session's bound, then try. Only a refusal costs the whole cache.
        self.trim(spare_bytes, poll)
        try:
            return take_if_shown(take, size_bytes, self._pages.free_bytes)
        except MemoryRefused:
            # The cached blocks may be all that is missing, or fragment the room for one large piece.
            self.trim(0, poll)
        return take_once_given(take, size_bytes, self._pages.free_bytes, poll)

    def mem_free(self, address: int, poll: Poll = keep_waiting) -> None:
        """Cache the block, without any wait.

        Launches queued before may continue to use it: the next allocation that gets it has it zeroed after everything
        that any stream holds now.
        """
        if self._blocks.may_cache(address):
            # The usual way: no wait. Streams remember to order the next user of the block after their work.
            self._call(self._streams.reuse_behind_all)
            self._blocks.cache(address)
            return
        # The cache is full: wait, then free.
        self.sync(poll)
        self._blocks.cache(address)
        # Drop half of the blocks, so that many frees wait for the card only once.
        self._drop(MAX_CACHED_BYTES // 2, MAX_CACHED_BLOCKS // 2)

    def mem_reuse(self, address: int, size_bytes: int, poll: Poll = keep_waiting) -> None:
        """Zero the block as if it had been cached in between."""
        self._make_room(poll)
        self._call(self._streams.reuse_behind_all)
        for number in self._call(self._streams.zero, address, size_bytes, True):
            self._mark(number)

    def trim(self, most_bytes: int, poll: Poll = keep_waiting) -> None:
        """Release cached blocks to the driver, those freed first before the others."""
        if self._blocks.cached_bytes > most_bytes:
            self.sync(poll)
            self._drop(most_bytes, MAX_CACHED_BLOCKS)

    def _drop(self, most_bytes: int, most_blocks: int) -> None:
        """Free cached blocks. Nothing may be in progress: the driver waits for it, and that wait can't be ended."""
        blocks, dropped = self._blocks, list[tuple[Any, int]]()
        while blocks.cached_bytes > most_bytes or blocks.cached_blocks > most_blocks:
            dropped.append(blocks.drop_oldest())
        # Zeroing changes parts of shared pages that are not released.
        if dropped:
            self._pages.forget_ahead()
        # The driver may pass parts of their pages unchanged to this process's next lease, so they are zeroed first.
        for allocation, size_bytes in dropped if self._wipes_memory else ():
            self._call(cuda.memset_d8_async, int(allocation), 0, size_bytes, self._streams[0])
        # A free of cuMemAlloc's waits for the memsets; one of mapped pages does not.
        if self._slice is not None and self._wipes_memory:
            self._call(self._streams[0].synchronize)
        for allocation, _ in dropped:
            self._call(allocation.free)

    def mem_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy pageable memory. When the driver returns, it has read the bytes ("API synchronization behavior")."""
        # `_await` waits for the card first, because `poll` can end that wait; the driver's wait can't be ended.
        self._empty(poll)
        self._call(cuda.memcpy_htod_async, address, data, self._stream)

    def mem_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy to pageable memory, complete on return ("API synchronization behavior")."""
        self._empty(poll)
        # The stream is empty, so the copy starts at once.
        self._call(cuda.memcpy_dtoh_async, into, address, self._stream)

    def pin(self, memory: memoryview) -> None:
        """Lock the memory's pages and register them with the card (CUDA driver API, cuMemHostRegister).

        If the driver refuses, for lack of memory for example, copies are correct, and as slow as from any other memory.
        """
        # "API synchronization behavior": only copies of pinned memory are asynchronous.
        (error,) = api.cuMemHostRegister(_address_of(memory), len(memory), 0)
        # Memory that is not pinned is copied before the driver returns, after it has waited for the stream.
        self._can_begin_copies = self._can_begin_copies and not error
        if not error:
            self._pinned.append(memory[:])

    def pin_host(self, memory: memoryview) -> None:
        """Register the memory (CUDA driver API, cuMemHostRegister); copies of memory that is refused are slower."""
        address = _address_of(memory)
        (error,) = api.cuMemHostRegister(address, len(memory), 0)
        if not error:
            self._pinned_host.add(address)

    def unpin_host(self, memory: memoryview) -> None:
        address = _address_of(memory)
        if address in self._pinned_host:
            self._pinned_host.remove(address)
            (error,) = api.cuMemHostUnregister(address)
            if error:
                raise self.failure(error)

    def write_pinned(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """Queue the copy after what its stream holds, and wait for all of it."""
        self._make_room(poll)
        self._call(cuda.memcpy_htod_async, address, data, self._stream)
        self._await_copy(len(data), poll)

    def begin_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Queue the copy after what is queued in the selected stream."""
        if self._can_begin_copies:
            self._make_room(poll)
            self._call(cuda.memcpy_htod_async, address, data, self._stream)
        else:
            self.mem_write(address, data, poll)
        return self._ticket()

    def begin_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Queue the copy after what is queued in the selected stream."""
        if self._can_begin_copies:
            self._make_room(poll)
            self._call(cuda.memcpy_dtoh_async, into, address, self._stream)
        else:
            self.mem_read(address, into, poll)
        return self._ticket()

    def _make_room(self, poll: Poll) -> None:
        """Empty a full stream first: beyond about 1,000 calls the driver blocks, and that wait can't be ended."""
        if self._streams.is_full or (self._has_one_stream and self._launcher.queued > MAX_AHEAD_OF_COPY):
            self._empty(poll)
        self._streams.count_copy()

    def _ticket(self) -> Ticket:
        self._mark(self._streams.selected)
        return self._record(self._stream)

    def _record(self, stream: Any) -> Ticket:
        event = self._call(cuda.Event, cuda.event_flags.DISABLE_TIMING)
        self._call(event.record, stream)
        return StreamTicket(event)

    def read_pinned(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Queue the copy after what its stream holds, and wait for all of it."""
        self._make_room(poll)
        self._call(cuda.memcpy_dtoh_async, into, address, self._stream)
        self._await_copy(len(into), poll)

    def _await_copy(self, nbytes: int, poll: Poll) -> None:
        # Spin while the copy must still be in progress, then wait as for a kernel.
        is_done = self._stream.is_done
        deadline_s = time.monotonic() + nbytes / COPY_SPIN_BYTES_PER_S
        while not self._call(is_done):
            if time.monotonic() > deadline_s:
                self._empty(poll)
        self._emptied()

    def _mark(self, number: int) -> None:
        """Mark an operation, other than a kernel, that was put in a stream, if the context is watched."""
        if self._markers is not None:
            # An event after the operation; the broker's watchdog sees a stream advance by these.
            self._markers.make_room()
            self._call(self._markers.add_other, number, self._streams[number])

    @property
    def region_granule_bytes(self) -> int:
        """Size of the card's pages (region_pages.py)."""
        return self._regions.granule_bytes

    def region_open(self, size_bytes: int, spare_bytes: int = MAX_CACHED_BYTES, poll: Poll = keep_waiting) -> int:
        # As for an allocation, cached blocks make room.
        return self._take(lambda: self._regions.open(size_bytes), size_bytes, spare_bytes, poll)

    def region_kept_bytes(self, size_bytes: int) -> int:
        """Return the size of the scratch (region_pages.py)."""
        return self._regions.kept_bytes(size_bytes)

    def region_wipe(self, address: int) -> None:
        """Queue a memset of the scratch (region_pages.py)."""
        self._regions.wipe(address)

    def region_is_zeroed(self) -> bool:
        """Poll the stream of the memsets (region_pages.py)."""
        return self._regions.is_zeroed()

    def region_end(self, address: int, poll: Poll = keep_waiting) -> RegionReturn:
        """Unmap the memory except the scratch (region_pages.py)."""
        return self._regions.end(address, poll)

    def region_release(self, address: int) -> None:
        self._regions.release(address)

    def make_parkable(self, slice_bytes: int) -> None:
        """Give the session pages of its own (slice_pages.py), and its regions addresses that stay (region_pages.py)."""
        self._slice = SlicePages(self._pages, slice_bytes)
        self._regions.use_range(*self._slice.regions_range)

    @property
    def pages_bytes(self) -> int:
        return self._pages.held_bytes

    def park(self, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting) -> PageMove:
        """Move the pages to host memory (mapped_pages.py)."""
        self._await(self._pages.is_zeroed, poll)
        try:
            return self._pages.park(host, ready, poll)
        except DriverError as error:
            raise self._torn(error) from None

    def copy_ahead(self, host: memoryview, end: int) -> bool:
        """Begin a step of the copy, in the stream of the pages (mapped_pages.py)."""
        return self._pages.copy_ahead(host, end)

    @property
    def ahead_bytes(self) -> int:
        return self._pages.ahead_bytes

    def forget_ahead(self) -> None:
        self._pages.forget_ahead()

    def unpark(self, poll: Poll = keep_waiting) -> PageMove:
        """Take new pages for the bytes (mapped_pages.py).

        Try again while the driver refuses memory that the card shows free.
        """
        pages, began_ns = self._pages, time.monotonic_ns()
        try:
            take_once_given(pages.take_again, pages.held_bytes, pages.free_bytes, poll)
            mapped_ns = time.monotonic_ns()
            # Memory that came from another process is not pinned in this one.
            pages.copy_back(poll, is_pinned=bool(self._pinned_host))
            self._restore_variables()
        except DriverError as error:
            raise self._torn(error) from None
        return PageMove(pages.held_bytes, time.monotonic_ns() - mapped_ns, mapped_ns - began_ns)

    # --- leaving the process ---

    def can_lend(self) -> bool:
        return self._slice is not None and self._pages.can_lend()

    def lend_pages(
        self, most: int, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting
    ) -> list[int]:
        """Export large pages (mapped_pages.py)."""
        self._await(self._pages.is_zeroed, poll)
        return self._pages.lend(most, host, ready, poll)

    def lend_ring(self, ring: CopyRing) -> RingEnd:
        """Lend all pages through a ring (mapped_pages.py)."""
        return self._pages.fill_ring(ring)

    def why_stays(self) -> str:
        if self._needs_driver_memory:
            return "a module calls malloc, free or assert, and their heap and state belong to the context"
        return self._history.why_elsewhere() or self._regions.why_stays()

    def parked_state(self) -> bytes:
        """Return, packed, where the parked or lent memory belongs, and the contents of the modules' variables.

        The variables are copied from the card now.
        """
        if self._slice is None or not (self._pages.is_parked or self._pages.is_lent):
            raise DriverError("the session's memory is neither parked nor lent")
        if why := self.why_stays():
            raise DriverError(why)
        variables = [place for module in self._modules for place in module.variables()]
        size_bytes = sum(size for _, size in variables)
        if size_bytes > MAX_VARIABLE_BYTES:
            raise DriverError(
                f"its modules' variables have {size_bytes} bytes; at most {MAX_VARIABLE_BYTES} are allowed"
            )
        contents: list[tuple[int, bytes]] = []
        for address, size in variables:
            data = bytearray(size)
            self._call(cuda.memcpy_dtoh, data, address)
            contents.append((address, bytes(data)))
        # Add the regions only if the session ever opened one: contexts of an earlier version can adopt only a state
        # without them.
        regions = self._regions.state()
        fields = (self._slice.range, self._slice.saved(), self._blocks.live(), contents)
        packed: bytes = msgpack.packb((*fields, *([] if regions is None else [regions])))
        return packed

    def parked_regions(self) -> dict[int, tuple[int, int]]:
        return self._regions.parked()

    def module_place(self, module: DriverModule) -> tuple[int, ...]:
        """Return the addresses of the variables, in the order of their names."""
        if not isinstance(module, CudaModule):
            raise DriverError("this module is another driver's")
        return tuple(address for address, _ in module.variables())

    def adopt_parked(
        self, state: bytes, host: memoryview, pages: Sequence[int] = (), ring: CopyRing | None = None
    ) -> None:
        self._pages.adopt(host, pages, ring)
        try:
            where, saved, sizes, contents, *regions = msgpack.unpackb(
                state, use_list=False, strict_map_key=False, max_bin_len=MAX_VARIABLE_BYTES
            )
            if self._slice is None or where != self._slice.range:
                (parked_at, _), own_at = where, self._slice and hex(self._slice.range[0])
                raise ImageMismatch(
                    f"the parked slice begins at {parked_at:#x}, but this context's would begin at {own_at}"
                )
            # Step 1: record the pieces and where they were mapped. `unpark` takes memory of the card for them later.
            blocks = {address: block_bytes(size) for address, size in sizes.items()}
            for address, allocation in self._slice.adopt(saved, blocks).items():
                self._blocks.add(address, sizes[address], allocation)
            # Step 2: restore the regions, if the session has ever had any.
            if regions:
                self._regions.adopt(regions[0])
            self._pages.assign_lent()
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ImageMismatch(f"what is parked can't be read: {error}") from None
        self._contents = list(contents)

    def module_code(self, module: DriverModule) -> bytes:
        return module.code if isinstance(module, CudaModule) else b""

    def adopt_module(self, image: bytes, place: tuple[int, ...], code: bytes = b"") -> CudaModule:
        try:
            module = self.module_load(image, code=code)
            module_place = self.module_place(module)
        except ImageRejected as error:
            raise ImageMismatch(str(error)) from None
        if module_place != place:
            moved = next(
                (f"{was:#x} is at {now:#x}" for was, now in zip(place, module_place, strict=False) if was != now), ""
            )
            raise ImageMismatch(f"a module's variable that was at {moved or 'an address is missing'}")
        return module

    def _restore_variables(self) -> None:
        """Write the bytes of variables that came from another process."""
        for address, data in self._contents:
            self._call(cuda.memcpy_htod, address, data)
        self._contents = []

    def _torn(self, error: DriverError) -> DriverError:
        """Return the error of a failed move of the pages: the fault that ends the context if some are unmapped."""
        return self._lost(f"parking failed: {error}") if self._pages.is_broken else error

    def free_bytes(self) -> int:
        return self._pages.free_bytes()

    def mark(self, stream: int) -> Ticket:
        return self._record(self._streams[stream])

    def event(self, stream: int) -> TimedEvent:
        """Record an event with its time (cuEventRecord)."""
        event = TimedEvent(self._call(cuda.Event))
        self._call(event.event.record, self._streams[stream])
        self._mark(stream)
        return event

    def event_wait(self, events: Sequence[DriverEvent], poll: Poll = keep_waiting) -> None:
        """Wait for one event after another. After a fault all events are done, and `elapsed_ns` reports the fault."""
        for event in events:
            self._await(event.is_done, poll)

    def elapsed_ns(self, start: DriverEvent, end: DriverEvent) -> int:
        """Query the driver, with a resolution of half a microsecond (cuEventElapsedTime)."""
        if isinstance(start, TimedEvent) and isinstance(end, TimedEvent):
            return self._between_ns(start, end)
        start_ns, end_ns = self.event_times_ns([start, end])
        return end_ns - start_ns

    def _between_ns(self, start: TimedEvent, end: TimedEvent) -> int:
        return round(float(self._call(start.event.time_till, end.event)) * 1e6)

    def event_times_ns(self, events: Sequence[DriverEvent]) -> list[int]:
        """Return times on the host's monotonic clock, each by its distance from the event before it.

        The driver rounds a distance to 24 bits (cuEventElapsedTime): the longer it is, the less exact.
        """
        if not events:
            return []
        anchor, time_ns = self._anchor_events()
        # Step 1: sort the events by their rounded distances from the anchor.
        distances = {event: self._between_ns(anchor, event) for event in events if isinstance(event, TimedEvent)}
        # Step 2: add up the distances from each event to the next.
        times_ns, before = dict[DriverEvent, int](), anchor
        for event in sorted(distances, key=distances.__getitem__):
            time_ns += self._between_ns(before, event)
            times_ns[event], before = time_ns, event
        times_ns |= {event: event.time_ns for event in events if isinstance(event, AdoptedEvent)}
        if len(times_ns) < len(set(events)):
            raise DriverError("these events belong to another driver")
        return [times_ns[event] for event in events]

    def adopt_event(self, time_ns: int) -> AdoptedEvent:
        """Keep the time, and have an anchor for the events to come."""
        self._anchor_events()
        return AdoptedEvent(time_ns)

    def _anchor_events(self) -> tuple[TimedEvent, int]:
        """Return an event, and the time on the host's monotonic clock right before it was recorded."""
        if self._anchor is None:
            # Read the host's time first, so that no event that another process recorded after its own anchor appears to
            # be later.
            event, time_ns = TimedEvent(self._call(cuda.Event)), time.monotonic_ns()
            self._call(event.event.record, self._streams[0])
            self._await(event.is_done, keep_waiting)
            self._anchor = event, time_ns
        return self._anchor

    def streams_bytes(self, count: int) -> int:
        """Bytes of the card for `count` streams (streams.py)."""
        return streams_bytes(count)

    def stream_create(self) -> int:
        """Return an empty stream that was destroyed before, if there is one; otherwise a new stream."""
        # Once anything was zeroed, a new stream must be ordered after it.
        number: int = self._call(self._streams.create, has_zeroed=bool(self._launcher.state.zeroed))
        self._has_one_stream = False
        self._history.add_stream()
        self._launcher.show_streams(self._streams.handles)
        self._mark(number)
        return number

    def stream_destroy(self, stream: int) -> None:
        """Keep the stream for a later `stream_create`."""
        self._streams.destroy(stream)

    def stream_select(self, stream: int) -> None:
        """Select the stream for Python and for native code."""
        self._streams.selected = stream
        self._stream = self._streams[stream]
        # Native code launches into the stream of the shared state.
        self._launcher.state.stream = self._stream.handle

    def stream_wait(self, stream: int, other: int) -> None:
        """Order the streams by an event (CUDA driver API, cuStreamWaitEvent)."""
        self._call(self._streams.wait, stream, other)
        self._mark(stream)

    def stream_sync(self, stream: int, poll: Poll = keep_waiting) -> None:
        self._await(self._streams[stream].is_done, poll)
        self._streams.emptied(stream)
        # The launcher counts the launches of all streams, so it is idle only if this is the only stream.
        if self._has_one_stream:
            self._launcher.ended()

    def _empty(self, poll: Poll) -> None:
        self._await(self._stream.is_done, poll)
        self._emptied()

    def _emptied(self) -> None:
        """Record that the selected stream holds nothing."""
        self._streams.emptied(self._streams.selected)
        if self._has_one_stream:
            self._launcher.ended()

    def _await(self, is_done: Callable[[], bool], poll: Poll) -> None:
        """Wait for the card. Spin for a while, then sleep longer and longer, so that a long kernel occupies no core."""
        # State 1, up to `_spin_s`: spin, because most waits are short. State 2: sleep a sixteenth of the time so far.
        started = time.monotonic()
        while not self._call(is_done):
            waited = time.monotonic() - started
            if waited > self._spin_s:
                poll()
                time.sleep(min(waited / 16, MAX_SLEEP_S))
            elif self._yields:
                os.sched_yield()

    def module_load(self, image: bytes, admit: AdmitModule = admit_all, code: bytes = b"") -> CudaModule:
        """Load PTX or a cubin, measured before the driver gets it. `code`: the PTX's machine code, if that is known."""
        # A lost context reports its fault again, instead of a load that failed.
        if self._fault is not None:
            raise self._fault
        keeps_code = self._slice is not None
        module = load_image(image, admit, self._local, self.compiled, self._on_weighed, code, keeps_code=keeps_code)
        self._modules[module] = self._history.add(
            module.device_bytes, has_variables=bool(module.names), calls_driver=module.calls_driver
        )
        return module

    def compile_kernel(self, kernel: Any, threads: int) -> bool:
        """Return False: an image is compiled when it is loaded."""
        return False

    def forget_earlier(self) -> None:
        """Drop the machine code of all images, and keep none from now on."""
        self.compiled.close()

    def _on_weighed(self, weight: Weight) -> None:
        self._leaves_traces = self._leaves_traces or weight.leaves_traces
        # The driver may keep something of an image that it refuses, too.
        self._needs_driver_memory = self._needs_driver_memory or weight.needs_driver_memory

    def module_unload(self, module: Any, poll: Poll = keep_waiting) -> None:
        """Unload the module once everything launched before has ended."""
        # No launch queued before may still use the module.
        self.sync(poll)
        if (number := self._modules.pop(module, None)) is not None:
            self._history.remove(number)
        unload(module.loaded)

    def launch(self, kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        """Queue a launch; the driver gets the parameter buffer unchanged."""
        if kernel.is_cooperative:
            raise cooperative_refused(kernel.name)
        if self._markers is not None:
            self._markers.make_room()
        self._launched(kernel, self._launcher.launch(kernel, grid, block, shared_bytes, params, tag))

    def _launched(
        self, kernel: Any, result: int, refused: Callable[[int], LaunchRejected | None] = lambda result: None
    ) -> None:
        """Record a launch that was queued. If it was not, raise the reason, as `refused` words it if it can."""
        if result:
            error = self._launcher.text_of(result)
            # A launch's error is the launch's own, or the sticky error of an earlier kernel.
            if not self._is_usable():
                raise self._lost(error) from None
            hint = "Check that grid, block and shared memory are within the kernel's limits."
            raise refused(result) or LaunchRejected(f"{kernel.name}: {error}", hint=hint) from None
        if self._markers is not None:
            self._call(self._markers.add_kernel, self._streams.selected, self._stream)
        self._last_kernel = kernel.name

    def launch_with(
        self,
        kernel: Any,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        params: bytes,
        tag: int,
        attributes: DriverLaunchAttributes,
    ) -> None:
        if kernel.is_cooperative and not attributes.is_cooperative:
            raise cooperative_refused(kernel.name)
        if self._markers is not None:
            self._markers.make_room()
        # More than 48 KiB of dynamic shared memory must be allowed once per kernel (cuFuncSetAttribute).
        kernel.shared.allow(kernel.name, shared_bytes)
        result = launch_with(self._stream.handle, kernel, grid, block, shared_bytes, params, attributes)
        if not result:
            self._launcher.count(tag)
        self._launched(kernel, result, partial(attributes_refused, kernel, grid, block, shared_bytes, attributes))

    def set_spinning(self, *, spins: bool, yields: bool) -> None:
        """Choose whether waits spin on the card, and whether they yield the core between polls."""
        self._spin_s = SPIN_S if spins else 0.0
        self._yields = yields

    def native(self) -> NativeLaunch:
        """Return the functions of launch.ll. Their SYNC does not spin where waits yield: native code can't yield."""
        spin_s = 0.0 if self._yields else self._spin_s
        chain = partial(ChainGraph, self) if self._has_chains else None
        return self._launcher.native(self._on_launched, int(spin_s * 1e9), chain)

    def progress(self) -> CardProgress:
        return self._launcher.progress(self._make_marks)

    def _make_marks(self) -> None:
        # Make events without timing, which would make each record slower.
        while len(self._marks) < MAX_MARKS:
            error, event = api.cuEventCreate(api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            if error:
                raise self.failure(error)
            self._marks.append(event)
        self._launcher.show_events([int(event) for event in self._marks])

    def _on_launched(self, kernel: Any) -> None:
        self._last_kernel = kernel.name

    def graph(self, steps: Sequence[Step], admit: AdmitGraph = admit_any, poll: Poll = keep_waiting) -> CudaGraph:
        admit(device_bytes_of(steps))
        # Closed graphs may have left bytes that queued replays still read. After a wait, nothing reads them.
        if self._retired:
            self.sync(poll)
            while self._retired:
                self._retired.pop().release()
        return CudaGraph(self, steps)

    def sync(self, poll: Poll = keep_waiting) -> None:
        if self._has_one_stream:
            self._empty(poll)
            return
        # Wait for one stream after another, because a synchronisation of the whole context could not be interrupted.
        for number in range(len(self._streams)):
            self.stream_sync(number, poll)
        self._launcher.ended()

    def flush_printed(self) -> None:
        """Have the driver write output (CUDA C++ Programming Guide, "Formatted Output": cuCtxSynchronize flushes)."""
        self._call(cuda.Context.synchronize)

    def watch(self, poll: Poll) -> None:
        """Put an event after each operation in a stream from now on."""
        self._markers = Markers(poll)

    def running(self) -> dict[int, int]:
        """Return the running streams, by their events; none after a fault."""
        return {} if self._markers is None else self._markers.running()

    def close(self) -> None:
        """Do nothing: the end of the process ends the context, whatever state it is in."""

    # --- for this context's graphs ---

    @property
    def is_watched(self) -> bool:
        """Return whether the context must see each kernel's end."""
        return self._markers is not None

    @property
    def stream(self) -> Any:
        """The selected stream, as cuda-bindings takes it."""
        return api.CUstream(self._stream.handle)

    def replayed(self, tag: int, kernels: Sequence[str]) -> None:
        """Record that a graph of these kernels was queued."""
        self._launcher.count(tag)
        self.show_replayed(kernels)

    def show_replayed(self, kernels: Sequence[str]) -> None:
        """Remember the name of a queued graph's kernel, to report with a fault; "" for a graph of several kernels."""
        self._last_kernel = kernels[0] if len(kernels) == 1 else ""

    def retire(self, memory: PinnedBytes) -> None:
        """Keep bytes that queued copies may still read, until the next graph is made."""
        self._retired.append(memory)

    def unpin(self) -> None:
        """Unpin all memory; no queued copy may use it. Raises DriverError."""
        # Replays read the retired bytes, so the caller has waited for all of them.
        while self._retired:
            self._retired.pop().release()
        while self._pinned:
            with self._pinned.pop() as memory:
                (error,) = api.cuMemHostUnregister(_address_of(memory))
            if error:
                raise self.failure(error)

    def failure(self, error: Any) -> DriverError:
        """Return the error of a failed call through cuda-bindings."""
        _, text = api.cuGetErrorString(error)
        return self._error(DriverError(f"the driver's call failed: {text.decode()}"))

    # --- failed calls ---
    # Errors are sticky (CUDA driver API, "Error handling"): after a kernel has faulted, every call in the context fails
    # with the same error, and only the end of the process makes the card usable again. The driver does not report which
    # launch it was.

    def fault(self) -> KernelFault | None:
        """Return the fault that an earlier call found.

        This does not query the card, which takes microseconds: the next call finds a new fault anyway.
        """
        return self._fault

    def _call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except cuda.Error as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> DriverError:
        """Return a failed call's error: the call's own, or the fault that ended the context."""
        return DriverError(str(error)) if self._is_usable() else self._lost(error)

    def _is_usable(self) -> bool:
        """Return whether the context works. After a sticky error every call fails; any other error fails only one."""
        # After a sticky error this call (cuStreamQuery) fails like every other.
        try:
            self._stream.is_done()
        except cuda.Error:
            return False
        return True

    def _lost(self, error: Exception | str) -> KernelFault:
        """Return the fault that ended the context, with the launch as precisely as CUDA permits."""
        # Keep the first fault: later errors only repeat it.
        if self._fault is None:
            reason = str(error).rpartition("failed: ")[2]
            launches = self._launcher.state.launches
            # CUDA does not say which launch it was. If there was one launch since the last sync, that was it; of
            # several, only the last is known.
            work_text = "no launch was waiting for its end"
            if launches == 1:
                work_text = f"kernel {self._last_kernel}" if self._last_kernel else "a kernel of a graph"
            elif launches:
                last = self._last_kernel or "a graph's"
                work_text = f"one of the {launches} launches since the last sync, of which the last is {last}"
            self._fault = KernelFault(
                f"{reason} ({work_text}); the context is lost",
                tag=self._launcher.state.tag if launches == 1 else 0,
                kernel=self._last_kernel if launches == 1 else "",
                context_lost=True,
                hint="Free the lease and acquire another. To find the access, run the kernel under compute-sanitizer.",
            )
        return self._fault


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- scrubbing the driver's buffers ---
# Copies of memory that is not pinned go through buffers of the driver in this process's memory. Kernels' parameters and
# small copies go to the card with the commands, in another buffer. The bytes stay in these buffers until they are
# overwritten, and kernels can read them. None of this is documented. On an H100 (driver 580.159) the copies below left
# nothing of either kind; they did not reach the bytes of modules of less than about 100 KB.

STAGING_BYTES: Final = 2 << 20
"""Size of the driver's buffers for copies to the card, and of those from it: 2 MiB each were found."""

SMALL_SIZES: Final = (*range(64, 1025, 64), 2048, 4096)
"""Sizes of copies from the card that take another path, each from the start of a buffer. Copies of up to 256 bytes were
found to do so, copies of 1024 bytes not."""

INLINE_BYTES: Final = 64 << 10
"""Largest copy to the card that goes with the commands (CUDA driver API, "API synchronization behavior")."""

INLINE_COPIES: Final = 96
"""Number of copies that fill the driver's ring of command buffers one and a half times: 4 MiB were found."""

# Make these once: a process that overwrites what it frees would take a millisecond for them at each scrub.
_ZEROS: Final = memoryview(bytes(STAGING_BYTES))
_SINK: Final = memoryview(bytearray(STAGING_BYTES))


def _scrub_driver_buffers(address: int, stream: Any) -> None:
    """Overwrite the driver's buffers; the caller then waits for the stream. Raises cuda.Error.

    Args:
        address: `STAGING_BYTES` zero bytes of the card.
        stream: The stream that the copies go into.
    """
    # The staging buffers of both directions, over their whole size.
    cuda.memcpy_htod_async(address, _ZEROS, stream)
    cuda.memcpy_dtoh_async(_SINK, address, stream)
    # Small copies from the card take another path.
    for size_bytes in SMALL_SIZES:
        cuda.memcpy_dtoh_async(_SINK[:size_bytes], address, stream)
    # Small copies to the card travel with the commands: fill the command buffer, and half as much again.
    for _ in range(INLINE_COPIES):
        cuda.memcpy_htod_async(address, _ZEROS[:INLINE_BYTES], stream)
