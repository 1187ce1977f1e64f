"""A worker's context on the embedded driver: memory, modules, the queue of launches, graphs, and the texts of faults.

A graph checks and packs its launches once, and a replay queues the packed records. The caller's thread makes a graph's
copies, after it has waited for the kernels before them.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gpulease.daemon.drivers.interface import (
    SEGMENT_STEPS,
    AdmitGraph,
    AdmitModule,
    AdoptedEvent,
    CardProgress,
    DataStep,
    Dim3,
    DriverError,
    DriverEvent,
    DriverKernel,
    DriverLaunchAttributes,
    DriverModule,
    ImageMismatch,
    ImageRejected,
    KernelFault,
    KernelStep,
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
    too_much_shared,
)
from gpulease.daemon.host.copy_ring import CopyRing, RingEnd
from gpulease.daemon.ptx.architecture import SM_90, Architecture
from gpulease.daemon.ptx.event_stamps import ALL_STAMPS_BYTES, STAMP, STAMP_BYTES, StampedEvent
from gpulease.daemon.ptx.image import CpuKernel, CpuModule, ModulePlace, drop_oldest_code, load, release
from gpulease.daemon.ptx.limits import (
    MAX_ASSERTION_TEXT,
    MAX_BLOCK_DIMS,
    MAX_GRID_DIMS,
    MAX_PARAMETER_BYTES,
    MAX_SHARED_BYTES,
    SPIN_S,
)
from gpulease.daemon.ptx.memory import IN_ORDER, MAX_SLICE_BYTES, PARKABLE_ADDRESS, Areas, MemoryArena
from gpulease.daemon.ptx.native.structures import (
    LAUNCH_HEAD,
    REGION_GRANULE_BYTES,
    Access,
    BlockEnvironment,
    Fault,
    QueuedLaunch,
)
from gpulease.daemon.ptx.parked_memory import ParkedMemory
from gpulease.daemon.ptx.parse.syntax import Space
from gpulease.daemon.ptx.printf import PrintBuffer, joined, print_to_log, print_to_output
from gpulease.daemon.ptx.region_pages import EmbeddedRegions
from gpulease.daemon.ptx.stream import LaunchQueue, host_threads, stream_code
from gpulease.protocol.limits import MAX_EVENTS

_SPACES = tuple(Space)
# The beginning of an error's text, by the kind of access. `{}` stands for the record's `address`.
_EVENTS: dict[int, str] = {
    Access.TRAP: "trap executed",
    Access.BREAKPOINT: "breakpoint without a debugger executed",
    Access.STACK_OVERFLOW: "stack overflow",
    Access.NO_FUNCTION: "call through {:#x}, which is not a function with these parameters,",
    Access.NO_ALLOCATION: "free of {:#x}, which no kernel has allocated,",
    Access.NO_TARGET: "branch by the index {}, which is past its targets,",
    # Faults of threads that wait for one another. The address is a barrier's number or a member mask.
    Access.BARRIER: "barrier {} is never complete: threads it needs have ended or wait elsewhere; waited for",
    Access.BARRIER_OPERAND: "no such barrier or number of threads (barrier {}) used",
    Access.EXCHANGE: "warp operation with member mask {:#010x} is never complete: members wait elsewhere; waited for",
    Access.NO_MEMBER: "warp operation with member mask {:#010x}, which lacks the thread's own lane, executed",
    Access.PART_OF_WARP: "operation that needs a whole warp executed with lanes {:#010x} alone,",
}
# Spaces that an error does not name. For both, CUDA reports "illegal address" without a space.
_UNNAMED = (Space.GENERIC, Space.GLOBAL)


def describe(
    fault: Fault, text_at: Callable[[int], str], miss_text: Callable[[int, int], str], *, kernel: str, tag: int
) -> KernelFault:
    """Return the error that a tenant gets for a fault record.

    Args:
        fault: The record.
        text_at: Returns the null-terminated text at a device address. An assertion's record has such addresses.
        miss_text: Describes the allocation closest to a failed access, given its address and its size in bytes; "" for
            none.
        kernel: The kernel's name.
        tag: The launch's tag.
    """
    place = f"by thread {_triple(fault.thread)} of block {_triple(fault.block)}"
    location = f"{place} in kernel {kernel}, PTX line {fault.line}"
    # Step 1: an assertion. Its record has three addresses of texts and a line number.
    if fault.access == Access.ASSERTION:
        message, file, function = (text_at(fault.assertion[n]) for n in range(3))
        failed = f"assertion failed: {file}:{fault.assertion[3]}: {function}: {message},"
        return KernelFault(f"{failed} {location}", tag=tag, kernel=kernel)
    # Step 2: an event other than a memory access, such as a trap, a barrier, or a call through a bad pointer.
    if fault.access in _EVENTS:
        return KernelFault(f"{_EVENTS[fault.access].format(fault.address)} {location}", tag=tag, kernel=kernel)
    # Step 3: a memory access. A misaligned address outside all allocations is reported as misaligned.
    space = _SPACES[fault.space]
    fault_kind = "misaligned" if fault.address % fault.size else "illegal"
    kind = fault_kind if space in _UNNAMED else f"{fault_kind} {space.value}"
    access = Access(fault.access).name.lower()
    # Only global memory has allocations; shared and local windows have none.
    missed = miss_text(fault.address, fault.size) if fault_kind == "illegal" and space in _UNNAMED else ""
    return KernelFault(
        f"{kind} address {fault.address:#x} ({fault.size}-byte {access}) {location}{missed and ': '}{missed}",
        tag=tag,
        kernel=kernel,
        address=fault.address,
    )


def _triple(numbers: "list[int]") -> str:
    return f"({numbers[0]},{numbers[1]},{numbers[2]})"


# The place of the tag in a packed launch. A replay changes only these bytes.
_TAG_AT: Final = QueuedLaunch.tag.offset
_TAG_END: Final = _TAG_AT + QueuedLaunch.tag.size

_Replay = Callable[[bytes, Poll], None]
"""Queues a launch or makes a copy. The arguments are the tag, as bytes of a packed launch, and the poll."""


class CpuGraph:
    """The embedded driver's `Graph` (drivers/interface.py)."""

    device_bytes = 0
    native = 0

    def __init__(self, context: "CpuContext", steps: Sequence[Step]) -> None:
        """Pack every step. Raises LaunchRejected for a launch that can't run."""
        self._context = context
        self._steps = list(steps)
        self._replays = [self._replay_of(step) for step in steps]
        self._kernels = {step.kernel for step in steps if isinstance(step, KernelStep)}

    @property
    def due(self) -> list[DriverKernel]:
        # The queue runs a kernel's latest code, so packed launches stay valid after a compilation.
        return [kernel for kernel in self._kernels if kernel.is_due]

    def bind(self, step: int, params: bytes) -> None:
        """Set a launch step's parameters for later replays (`DriverGraph.bind`). Raises TypeError for a copy."""
        kernel_step = self._steps[step]
        if not isinstance(kernel_step, KernelStep):
            raise TypeError("only launches have parameters")
        self._replays[step] = self._replay_of(replace(kernel_step, params=params))

    def replay(self, tag: int, poll: Poll, next_segment: Poll = keep_waiting) -> None:
        # Only the tag differs between replays.
        packed = tag.to_bytes(_TAG_END - _TAG_AT, "little")
        for number, step in enumerate(self._replays):
            # Between segments, the poll may end a replay that takes too long.
            if number and number % SEGMENT_STEPS == 0:
                poll()
                next_segment()
            step(packed, poll)

    def replayed(self) -> None:
        """Do nothing: native code queues no graph of this driver."""

    def close(self) -> None:
        """Close the graph. The queue holds copies, so no wait is needed (`Graph.close`)."""
        self._steps.clear()
        self._replays.clear()
        self._kernels.clear()

    def _replay_of(self, step: Step) -> _Replay:
        # Check and pack the launch now, as the bytes before and after the tag.
        context = self._context
        if isinstance(step, KernelStep):
            record, is_shared = context.record(
                step.kernel, step.grid, step.block, step.shared_bytes, step.params, tag=0
            )
            before, tail = record[:_TAG_AT], record[_TAG_END:]
            return lambda tag, _: context.submit(b"".join((before, tag, tail)), is_shared)
        # The caller's thread makes the copy after everything queued before it has run.
        address, memory = step.address, memoryview(step.data) if isinstance(step, DataStep) else step.memory
        if isinstance(step, DataStep) or step.to_device:
            return lambda _, poll: context.mem_write(address, memory, poll)
        return lambda _, poll: context.mem_read(address, memory, poll)


_MAX_X, _MAX_Y, _MAX_Z = MAX_GRID_DIMS
_MAX_BLOCK_X, _MAX_BLOCK_Y, _MAX_BLOCK_Z = MAX_BLOCK_DIMS


class _Complete:
    """The ticket of a copy, which is complete when the call that begins it returns."""

    def is_done(self) -> bool:
        return True


_COMPLETE = _Complete()


class _Position:
    """The ticket of everything that was queued when the ticket was created."""

    def __init__(self, stream: LaunchQueue, queued: int) -> None:
        self._stream = stream
        self._queued = queued

    def is_done(self) -> bool:
        """Return whether everything has run, or was skipped because of a fault."""
        _, ended_count = self._stream.progress()
        return ended_count >= self._queued


class CpuContext:
    """The interface's `Context`. Device addresses are host addresses within the arena.

    Args:
        slice_bytes: Room for allocations.
        hosts: Number of threads that run the blocks of a launch; None for as many as this process may use.
        architecture: The architecture for which images are loaded.
        shuffle: The seed of the order in which warps and blocks run; None for the order of their numbers. With a seed,
            one thread runs all blocks.
    """

    page_bytes = 1
    cuda_version = 0

    def __init__(
        self,
        slice_bytes: int,
        *,
        hosts: int | None = None,
        architecture: Architecture = SM_90,
        shuffle: int | None = None,
    ) -> None:
        self._slice_bytes = slice_bytes
        self._architecture = architecture
        self._shuffle = shuffle
        # Receives the name of a kernel and its output.
        self.printed: Callable[[str, str], None] = print_to_output
        # Receives the name of a region, and a note on it for the operator.
        self.noted: Callable[[str, str], None] = print_to_log
        # Only with a single thread can a shuffled order be repeated.
        self._hosts = (hosts or host_threads()) if shuffle is None else 1
        self._open_memory()
        self._modules: set[CpuModule] = set()
        self._kernel_names: dict[int, str] = {}
        self._next_number = 0
        self._last_stream = 0
        # The kernel that writes an event's time, loaded by the first event, and the addresses of unused stamps.
        self._stamp: CpuKernel | None = None
        self._stamps: list[int] = []
        self._stamps_at = 0
        self._is_closed = False
        # A kernel may still run when the interpreter ends and frees its objects. This reference keeps the kernel's
        # memory until `close`.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _open_memory(self, at: int = 0) -> None:
        """Create the memory and the queue that uses it.

        The memory begins at `at`, unless that is 0 or already in use.
        """
        # Environments have the addresses of the arena, its shadow, the print buffer and the regions, so create these
        # first.
        self._arena = MemoryArena(self._slice_bytes, at)
        self._prints = PrintBuffer()
        self._regions = EmbeddedRegions(self._arena)
        self._parked = ParkedMemory(self._arena, self._regions)
        self._areas = Areas(
            BlockEnvironment(
                arena=self._arena.memory.address,
                shadow=self._arena.shadow.address,
                last_granule=self._arena.last_granule,
                prints=self._prints.address,
                returned=self._regions.address,
            )
        )
        self._stream = LaunchQueue(self._areas.address, self._hosts, self._prints.address)

    def _close_memory(self) -> None:
        self._prints.close()
        self._regions.close()
        self._arena.close()
        self._areas.close()

    @property
    def compute_capability(self) -> int:
        return self._architecture.number

    # --- Memory ------------------------------------------------------------------------------------------------

    @property
    def rounding_bytes(self) -> int:
        """Return 0: the arena rounds addresses, but only touched pages take memory."""
        return 0

    @property
    def cached_bytes(self) -> int:
        """Return 0: freed pages are returned to the host at once."""
        return 0

    def trim(self, max_bytes: int, poll: Poll = keep_waiting) -> None:
        """Do nothing: this driver caches no memory (`Context.trim`)."""

    def mem_alloc(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Allocate at once, because no queued work can use the new address (`Context.mem_alloc`)."""
        return self._arena.allocate(size_bytes)

    def mem_free(self, address: int, poll: Poll = keep_waiting) -> None:
        """Free an allocation after all queued work (`Context.mem_free`)."""
        self.sync(poll)
        self._arena.free(address)

    def mem_reuse(self, address: int, size_bytes: int, poll: Poll = keep_waiting) -> None:
        """Zero the allocation after all queued work (`Context.mem_reuse`)."""
        # A queued kernel may still use the old contents.
        self.sync(poll)
        ctypes.memset(address, 0, size_bytes)

    def mem_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """Write into one allocation (`Context.mem_write`). Raises DriverError for bytes outside it."""
        # Kernels queued before the copy may use the bytes. If one of them has faulted, this raises its fault.
        self.sync(poll)
        source = data.cast("B")
        self._bytes_at(address, source.nbytes)[:] = source

    def mem_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Read from one allocation (`Context.mem_read`). Raises DriverError for bytes outside it."""
        self.sync(poll)
        target = into.cast("B")
        target[:] = self._bytes_at(address, target.nbytes)

    def _bytes_at(self, address: int, size_bytes: int) -> memoryview:
        """Return `size_bytes` of one allocation or region. Raises DriverError if they are not all in one."""
        # Regions come after the allocations, and `_regions` has their sizes.
        owner = self._regions if self._regions.covers(address) else self._arena
        return owner.bytes_at(address, size_bytes)

    def pin(self, memory: memoryview) -> None:
        """Do nothing: host memory needs no pinning (`Context.pin`)."""

    def begin_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Write, complete on return (`Context.begin_write`)."""
        self.mem_write(address, data, poll)
        return _COMPLETE

    def begin_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Read, complete on return (`Context.begin_read`)."""
        self.mem_read(address, into, poll)
        return _COMPLETE

    write_pinned = mem_write
    read_pinned = mem_read

    # --- Parking -----------------------------------------------------------------------------------------------

    def make_parkable(self, slice_bytes: int) -> None:
        """Move the memory, still unused, to the address that it has in every process (`Context.make_parkable`)."""
        spin_s, yields = self._stream.spin_s, self._stream.yields
        if self._stream.close():
            self._close_memory()
            self._open_memory(PARKABLE_ADDRESS)
            self._stream.spin_s, self._stream.yields = spin_s, yields

    @property
    def pages_bytes(self) -> int:
        """Bytes of allocations, modules' variables and regions (`Context.pages_bytes`)."""
        return self._parked.moved_bytes

    def park(self, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting) -> PageMove:
        """Copy to host memory, and return the pages to the host (`Context.park`)."""
        return self._parked.park(host, ready, poll)

    def copy_ahead(self, host: memoryview, end: int) -> bool:
        """Copy one step, complete on return (`Context.copy_ahead`)."""
        return self._parked.copy_ahead(host, end)

    @property
    def ahead_bytes(self) -> int:
        return self._parked.ahead_bytes

    def forget_ahead(self) -> None:
        self._parked.forget_ahead()

    def unpark(self, poll: Poll = keep_waiting) -> PageMove:
        """Copy back; the pages exist when they are touched (`Context.unpark`)."""
        return self._parked.unpark(poll)

    def pin_host(self, memory: memoryview) -> None:
        """Do nothing: host memory needs no pinning (`Context.pin_host`)."""

    def unpin_host(self, memory: memoryview) -> None: ...

    def can_lend(self) -> bool:
        return True

    def lend_pages(
        self, most: int, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting
    ) -> list[int]:
        """Copy everything to memory that another process can map (`Context.lend_pages`)."""
        return self._parked.lend(poll)

    def lend_ring(self, ring: CopyRing) -> RingEnd:
        return self._parked.lend_ring(ring)

    def why_stays(self) -> str:
        """Return "": any process of this driver can have this context's state (`Context.why_stays`)."""
        return ""

    def parked_state(self) -> bytes:
        """Return the place of every allocation, without the events' stamps (`Context.parked_state`)."""
        # Events keep their times when the session leaves, and the next event creates other stamps.
        return self._parked.state(self._stamps_at)

    def parked_regions(self) -> dict[int, tuple[int, int]]:
        """Return the places of the regions' bytes (`Context.parked_regions`)."""
        return self._parked.regions()

    def module_place(self, module: DriverModule) -> tuple[int, ...]:
        """Return addresses of variables and handles of functions (`Context.module_place`)."""
        if not isinstance(module, CpuModule):
            raise DriverError("this module is another driver's")
        return module.place.to_numbers()

    def adopt_parked(
        self, state: bytes, host: memoryview, pages: Sequence[int] = (), ring: CopyRing | None = None
    ) -> None:
        """Take over the state of another context with the same slice size (`Context.adopt_parked`)."""
        self._parked.adopt(state, host, pages, ring)

    def module_code(self, module: DriverModule) -> bytes:
        """Return b"": compiled code has addresses of this process (`Context.module_code`)."""
        return b""

    def adopt_module(self, image: bytes, place: tuple[int, ...], code: bytes = b"") -> CpuModule:
        """Load a module whose variables `adopt_parked` has restored (`Context.adopt_module`)."""
        try:
            saved_place = ModulePlace.from_numbers(place)
            # Use the other context's numbers of kernels, in which unloaded kernels leave gaps.
            self._next_number = saved_place.first_number
            return self._load(image, admit_all, saved_place)
        except (ImageRejected, ValueError, TypeError) as error:
            raise ImageMismatch(str(error)) from None

    # --- Regions -----------------------------------------------------------------------------------------------

    @property
    def region_granule_bytes(self) -> int:
        """Size of a card's pages, although the host's are smaller (`Context.region_granule_bytes`)."""
        return REGION_GRANULE_BYTES

    def region_open(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Open a region at once, because nothing in the queue can use its address (`Context.region_open`)."""
        return self._regions.open(size_bytes)

    def region_kept_bytes(self, size_bytes: int) -> int:
        """Return 0: nothing is in an ended region's place (`Context.region_kept_bytes`)."""
        return 0

    def region_wipe(self, address: int) -> None:
        """Do nothing: nothing is in an ended region's place (`Context.region_wipe`)."""

    def region_is_zeroed(self) -> bool:
        """Return True: the host's new pages are zero (`Context.region_is_zeroed`)."""
        return True

    def region_end(self, address: int, poll: Poll = keep_waiting) -> RegionReturn:
        """End a region; queued kernels run on and read zeros there (`Context.region_end`)."""
        returned = self._regions.end(address)
        if self._parked.is_parked:
            self._parked.drop_region(address)
        return returned

    def region_release(self, address: int) -> None:
        """Make later accesses to a region's addresses fault (`Context.region_release`)."""
        # The count of stray accesses is lost with the region, so report it first.
        self._name_strays()
        self._regions.release(address)

    def free_bytes(self) -> int:
        """Return the unused part of the largest card's memory; only differences count (`Context.free_bytes`)."""
        return MAX_SLICE_BYTES - self._arena.allocated_bytes - self._regions.taken_bytes

    def mark(self, stream: int) -> Ticket:
        """Record how much is queued (`Context.mark`)."""
        queued, _ = self._stream.progress()
        return _Position(self._stream, queued)

    # --- Events --------------------------------------------------------------------------------------------------

    def event(self, stream: int) -> StampedEvent:
        """Queue a kernel that writes the time into a slot (event_stamps.py). Raises DriverError beyond MAX_EVENTS."""
        # The first event loads the kernel and allocates all slots.
        if self._stamp is None:
            first = self._stamps_at = self._arena.allocate(ALL_STAMPS_BYTES)
            self._stamp = self.module_load(STAMP).kernels["stamp"]
            self._stamps.extend(range(first, first + ALL_STAMPS_BYTES, STAMP_BYTES))
        if not self._stamps:
            raise DriverError(f"there are {MAX_EVENTS} events, the most there can be")
        address = self._stamps.pop()
        try:
            self.launch(self._stamp, (1, 1, 1), (1, 1, 1), 0, address.to_bytes(8, "little"), 0)
        # A failed launch must return its slot.
        except BaseException:
            self._stamps.append(address)
            raise
        return StampedEvent(self._stamps, self.mark(stream), address)

    def event_wait(self, events: Sequence[DriverEvent], poll: Poll = keep_waiting) -> None:
        """Wait for the whole queue (`Context.event_wait`)."""
        self.sync(poll)

    def elapsed_ns(self, start: DriverEvent, end: DriverEvent) -> int:
        """Compare two stamps (`Context.elapsed_ns`)."""
        # Both times are nanoseconds of one clock, so their difference needs no rounding.
        return self._time_ns(end) - self._time_ns(start)

    def event_times_ns(self, events: Sequence[DriverEvent]) -> list[int]:
        """Return the stamps, which are also parked (`Context.event_times_ns`)."""
        return [self._time_ns(event) for event in events]

    def _time_ns(self, event: DriverEvent) -> int:
        if isinstance(event, AdoptedEvent):
            return event.time_ns
        if not isinstance(event, StampedEvent):
            raise DriverError("this event is another driver's")
        memory = self._parked if self._parked.is_parked else self._arena
        return int.from_bytes(memory.bytes_at(event.address, STAMP_BYTES), "little")

    def adopt_event(self, time_ns: int) -> AdoptedEvent:
        """Keep the event's time, which is its only state (`Context.adopt_event`)."""
        return AdoptedEvent(time_ns)

    # --- Streams: all in one queue, in the order of the calls -----------------------------------------------------

    def streams_bytes(self, count: int) -> int:
        """Return 0: streams take no device memory (`Context.streams_bytes`)."""
        return 0

    def stream_create(self) -> int:
        """Number a stream; all share one queue (`Context.stream_create`)."""
        self._last_stream += 1
        return self._last_stream

    def stream_destroy(self, stream: int) -> None:
        """Forget a stream, which has no resources (`Context.stream_destroy`)."""

    def stream_select(self, stream: int) -> None:
        """Do nothing: every stream is the same queue (`Context.stream_select`)."""

    def stream_wait(self, stream: int, other: int) -> None:
        """Do nothing: all streams share one queue, which keeps the order (`Context.stream_wait`)."""

    def stream_sync(self, stream: int, poll: Poll = keep_waiting) -> None:
        """Wait for the whole queue (`Context.stream_sync`)."""
        self.sync(poll)

    # --- Modules -----------------------------------------------------------------------------------------------

    def module_load(self, image: bytes, admit: AdmitModule = admit_all) -> CpuModule:
        """Load PTX text (`Context.module_load`). This driver accepts no cubins."""
        return self._load(image, admit)

    def _load(self, image: bytes, admit: AdmitModule, place: ModulePlace | None = None) -> CpuModule:
        module = load(
            image,
            self._arena,
            slice_bytes=self._slice_bytes,
            first_number=self._next_number,
            admit=admit,
            architecture=self._architecture,
            shuffle=self._shuffle,
            place=place,
        )
        # A fault record names its kernel by number, so no number is used twice in a context.
        self._next_number += len(module.kernels)
        self._modules.add(module)
        self._kernel_names.update((kernel.number, kernel.name) for kernel in module.kernels.values())
        return module

    def forget_earlier(self) -> None:
        """Do nothing: `CpuDriver.recycle` has dropped other leases' code, except that in the operator's folder."""

    def module_unload(self, module: DriverModule, poll: Poll = keep_waiting) -> None:
        """Unload a module after all queued work (`Context.module_unload`)."""
        # After the wait, no queued launch uses the module's kernels or variables.
        self.sync(poll)
        if not isinstance(module, CpuModule) or module not in self._modules:
            raise DriverError("this module is not loaded")
        self._modules.discard(module)
        for kernel in module.kernels.values():
            del self._kernel_names[kernel.number]
        release(module.variable_addresses, self._arena)
        # The code that only the module used now counts against the cache's limit.
        drop_oldest_code()

    def compile_kernel(self, kernel: DriverKernel, threads: int) -> bool:
        """Compile a kernel, and those that share functions with it, before a launch (`Context.compile_kernel`)."""
        if not isinstance(kernel, CpuKernel) or kernel.refusal is not None:
            return False
        before = int(kernel.running.entry)
        return kernel.entry_for(threads) != before

    # --- Launches ----------------------------------------------------------------------------------------------

    def launch(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        """Queue a launch; wait only while the queue is full (`Context.launch`)."""
        record, is_shared = self.record(kernel, grid, block, shared_bytes, params, tag)
        self._stream.submit(record, is_shared=is_shared)

    def launch_with(
        self,
        kernel: DriverKernel,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        params: bytes,
        tag: int,
        attributes: DriverLaunchAttributes,
    ) -> None:
        """Raise LaunchRejected, because a block can't wait for other blocks here (`Context.launch_with`)."""
        label = "a cooperative launch" if attributes.is_cooperative else "a launch in clusters"
        raise LaunchRejected(
            f"kernel {kernel.name}: the embedded driver runs blocks one after another, and does not do {label}",
            hint="Run it on a card, or launch one kernel for each part between two waits of the grid.",
        )

    def set_spinning(self, *, spins: bool, yields: bool) -> None:
        """Choose whether a waiting thread spins, yields or sleeps (`Context.set_spinning`)."""
        self._stream.spin_s, self._stream.yields = SPIN_S if spins else 0.0, yields

    def native(self) -> NativeLaunch:
        """Return the native way to launch (`Context.native`)."""
        code, state = stream_code(), ctypes.addressof(self._stream.state)
        spin_ns = 0 if self._stream.yields else int(self._stream.spin_s * 1e9)
        names = ("submit", "query", "copy_in", "copy_out", "zero")
        submit, query, copy_in, copy_out, zero = map(code.address, names)
        return NativeLaunch(state, submit, query, spin_ns, self._record, _pass, copy_in, copy_out, zero)

    def progress(self) -> CardProgress:
        """Return the functions that report how much has run (`Context.progress`)."""
        code = stream_code()
        idle, mark, reached = map(code.address, ("idle", "mark", "reached"))
        # The launch that ends a wait also wakes the waiter.
        return CardProgress(ctypes.addressof(self._stream.state), idle, mark, reached, prepare=_nothing, sleeps=False)

    def _record(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int) -> bytes | None:
        """Return a launch's head and the flag whether threads share its blocks, as bytes for native/submit.ll.

        Returns None if native code can't launch the kernel. `launch` then raises the reason.
        """
        if kernel.parameter_bytes > MAX_PARAMETER_BYTES:
            return None
        try:
            head, is_shared = self._head(kernel, grid, block, shared_bytes, 0)
        except LaunchRejected:
            return None
        return head + is_shared.to_bytes(8, "little")

    def record(
        self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int
    ) -> tuple[bytes, bool]:
        """Check and pack a launch. Returns its record, and whether threads share its blocks. Raises LaunchRejected."""
        head, is_shared = self._head(kernel, grid, block, shared_bytes, tag)
        if len(params) != kernel.parameter_bytes:
            raise LaunchRejected(
                f"kernel {kernel.name} takes {kernel.parameter_bytes} bytes of parameters, not {len(params)}"
            )
        return head + params, is_shared

    def _head(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, tag: int) -> tuple[bytes, bool]:
        """Pack a launch's head. Also returns whether several threads share its blocks. Raises LaunchRejected."""
        # Step 1: check whether this kernel can run here at all.
        if not isinstance(kernel, CpuKernel) or kernel.number not in self._kernel_names:
            raise LaunchRejected("this kernel's module is not loaded")
        if kernel.refusal is not None:
            reason, hint = kernel.refusal
            raise LaunchRejected(f"kernel {kernel.name} can't run on the embedded driver: {reason}", hint=hint)
        if kernel.is_cooperative:
            raise cooperative_refused(kernel.name)
        # Step 2: check the shape and shared memory. Dynamic shared memory begins after the static variables, aligned.
        _check_shape(kernel, grid, block)
        shared = kernel.static_shared_bytes
        if shared_bytes:
            shared = kernel.dynamic_shared_offset + shared_bytes
        if shared_bytes < 0:
            raise LaunchRejected(f"kernel {kernel.name}: shared memory must be 0 or more bytes, not {shared_bytes}")
        if shared > MAX_SHARED_BYTES:
            raise too_much_shared(kernel.name, shared_bytes, kernel.dynamic_shared_offset, MAX_SHARED_BYTES)
        # Step 3: decide how blocks are divided among threads. Usually, a single block runs in the queue's own thread.
        spread = IN_ORDER
        blocks = math.prod(grid)
        if blocks > 1 or kernel.needs.parks:
            spread = self._areas.spread(kernel.needs, blocks, math.prod(block), shared, self._hosts)
        # Step 4: pack the head in the layout of native/structures.py. The parameters follow it in the record.
        head = LAUNCH_HEAD.pack(
            kernel.entry_for(blocks * math.prod(block)),
            blocks,
            kernel.variables,
            tag,
            *grid,
            *block,
            shared,
            kernel.number,
            *spread,
            kernel.running_at,
        )
        return head, spread is not IN_ORDER

    def submit(self, record: bytes, is_shared: bool) -> None:
        self._stream.submit(record, is_shared=is_shared)

    def graph(self, steps: Sequence[Step], admit: AdmitGraph = admit_any, poll: Poll = keep_waiting) -> CpuGraph:
        """Create a graph, which takes no memory of the slice (`Context.graph`)."""
        return CpuGraph(self, steps)

    def flush_printed(self) -> None:
        """Write kernels' output (`Context.flush_printed`). `sync` does so too."""
        self._flush()

    def watch(self, poll: Poll) -> None:
        """Record which launch runs (`Context.watch`)."""
        self._stream.poll = poll

    def running(self) -> dict[int, int]:
        """Return the running launch's number by stream (`Context.running`); all streams share queue 0."""
        queued, ended_count = self._stream.progress()
        return {} if queued == ended_count else {0: ended_count}

    def sync(self, poll: Poll = keep_waiting) -> None:
        self._stream.wait(poll)
        self._flush()
        self._raise_fault()

    def fault(self) -> KernelFault | None:
        """Return the fault and reset it (`Context.fault`). First waits until the launches after it are skipped."""
        if not self._stream.has_fault:
            return None
        # The fault record is complete when the queue has stopped.
        self._stream.wait()
        self._flush()
        # Texts and allocations must be read before `forget_fault` lets launches run again.
        state = self._stream.state
        error = describe(
            Fault.from_address(state.fault),
            self._text_at,
            self._arena.miss_text,
            kernel=self._kernel_names[state.kernel],
            tag=state.tag,
        )
        self._stream.forget_fault()
        return error

    def close(self) -> None:
        """Close the context (`Context.close`). A kernel that still runs keeps the memory until the process ends."""
        # The memory may be unmapped only after the queue's threads have ended.
        if not self._is_closed and self._stream.close():
            self._is_closed = True
            self._flush()
            self._close_memory()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))

    @property
    def is_closed(self) -> bool:
        """Whether `close` has returned the memory; False while a kernel still runs."""
        return self._is_closed

    def rest(self) -> bool:
        """End the stream's threads if they are idle; the next launch starts others. False if a kernel still runs."""
        return self._stream.rest()

    def _text_at(self, address: int) -> str:
        """Return the null-terminated text at a device address, up to the first byte that may not be read."""
        # Read byte by byte, because the text may end at the end of an allocation.
        text = bytearray()
        while len(text) < MAX_ASSERTION_TEXT:
            try:
                byte = self._bytes_at(address + len(text), 1)[0]
            except DriverError:
                break
            if byte == 0:
                break
            text.append(byte)
        return text.decode("utf-8", errors="replace")

    def _flush(self) -> None:
        """Pass kernels' output to `printed`. Called only while no kernel runs."""
        for number, text in joined(self._prints.take()):
            self.printed(self._kernel_names.get(number, ""), text)
        self._name_strays()

    def _name_strays(self) -> None:
        """Report ended regions that kernels have accessed to the operator, each once."""
        for address, size_bytes in self._regions.new_strays():
            count = self._regions.stray_accesses(address)
            self.noted(
                f"region {address:#x}",
                f"ended, and accessed {count} times since; its {size_bytes} bytes read as zeros, stores go nowhere\n",
            )

    def _raise_fault(self) -> None:
        error = self.fault()
        if error is not None:
            raise error


def _nothing() -> None:
    """Prepare no marks, because they are part of the queue's state."""


def _pass(kernel: DriverKernel) -> None:
    """Record nothing about a native launch, because its slot in the queue names the kernel."""


def _check_shape(kernel: CpuKernel, grid: Dim3, block: Dim3) -> None:
    """Raise LaunchRejected for a grid or block that no card accepts, or that this kernel does not."""
    x, y, z = grid
    # All cards have the same limits of grid and block. A kernel may have lower ones.
    if not (0 < x <= _MAX_X and 0 < y <= _MAX_Y and 0 < z <= _MAX_Z):
        raise LaunchRejected(f"the grid {grid} is not within (1, 1, 1) and {MAX_GRID_DIMS}")
    x, y, z = block
    if not (0 < x <= _MAX_BLOCK_X and 0 < y <= _MAX_BLOCK_Y and 0 < z <= _MAX_BLOCK_Z):
        raise LaunchRejected(f"the block {block} is not within (1, 1, 1) and {MAX_BLOCK_DIMS}")
    if x * y * z > kernel.max_threads_per_block:
        raise LaunchRejected(
            f"the block {block} has {x * y * z} threads, kernel {kernel.name} takes at most"
            f" {kernel.max_threads_per_block}"
        )
    # `.reqntid` of the image.
    if kernel.required_block is not None and block != kernel.required_block:
        raise LaunchRejected(f"kernel {kernel.name} demands blocks of {kernel.required_block}, not {block}")
