"""The interface between a session and the driver that computes for it.

A `Driver` knows the cards of one kind; a `Context` is the only context of one worker process. A driver checks what only
it can know: whether an image can be loaded, whether a kernel fits. The session checks handles, ownership and the slice
before it calls the driver. Errors say what happened in words that a tenant can act on; the session turns them into wire
statuses.

Also here: the steps of a launch graph, and what every driver refuses: managed memory, and the plain launch of a kernel
that needs a cooperative one. For managed memory the driver keeps tens of MiB of a card, which no lease is charged for,
until the card's last context ends. A kernel that synchronises its grid traps unless it was launched cooperatively, and
the trap costs the context.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    from gpulease.daemon.sandbox.measures import SandboxNeeds

Dim3 = tuple[int, int, int]

ONE_BY_ONE: Final = "one-by-one"
"""Part of the CUDA driver's name if native code queues each launch by itself: `cuda::one-by-one`."""


class DriverError(Exception):
    """The driver refused a call or could not finish it; the context remains usable.

    Attributes:
        hint: What the tenant can do about it, a sentence, or "".
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class OutOfMemory(DriverError):
    """The card can't give the bytes, though the slice allows them."""


class ImageRejected(DriverError):
    """The driver can't load a module image.

    Attributes:
        log: The compiler's log, or the reason with the offending line's text.
        line: 1-based line of the PTX source that the log refers to, 0 if none.
    """

    def __init__(self, message: str, *, log: str = "", line: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.log = log
        self.line = line


class ImageMismatch(DriverError):
    """Something of a session's image would not be what, or where, it was in the context that it left."""


class LaunchRejected(DriverError):
    """The driver refused a launch before the kernel began, for its shape, shared memory or argument bytes."""


class KernelFault(DriverError):
    """A kernel began and failed; the first call that can report it raises this, once.

    Attributes:
        tag: The tag of its launch, 0 if the driver can't determine it.
        kernel: The kernel's name, "" if the driver can't determine it.
        address: The faulting device address, or None.
        context_lost: The context can't be used any more (CUDA's sticky errors).
    """

    def __init__(
        self,
        message: str,
        *,
        tag: int = 0,
        kernel: str = "",
        address: int | None = None,
        context_lost: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.tag = tag
        self.kernel = kernel
        self.address = address
        self.context_lost = context_lost


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter's offset and size in the parameter buffer, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class DriverLaunchAttributes:
    """Properties of a launch in addition to its shape.

    Attributes:
        is_cooperative: All blocks run at the same time, so that they may wait for each other.
        cluster: Neighbouring blocks that run together, by dimension; None for no clusters.
    """

    is_cooperative: bool
    cluster: Dim3 | None


@dataclass(frozen=True, slots=True)
class Figures:
    """The resources of a kernel.

    Attributes:
        shared_bytes: Shared memory of a block that its variables take.
        max_dynamic_shared_bytes: Most dynamic shared memory that a launch may request.
        registers: Registers of a thread; 0 where the driver has none.
        local_bytes: Local memory of a thread.
        constant_bytes: Constant memory that its module's code declares; 0 where the driver does not count it.
    """

    shared_bytes: int
    max_dynamic_shared_bytes: int
    registers: int = 0
    local_bytes: int = 0
    constant_bytes: int = 0


class DriverKernel(Protocol):
    """A kernel: an entry point of a loaded module."""

    @property
    def name(self) -> str:
        """The entry point's name, as it stands in the PTX text (mangled for C++)."""

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    @property
    def parameter_bytes(self) -> int:
        """The size of the parameter buffer that `launch` takes, in bytes."""

    @property
    def max_threads_per_block(self) -> int:
        """The most threads that a block of this kernel may have."""

    @property
    def kept_bytes(self) -> int:
        """The card's local memory that the context reserves before this kernel runs, and then keeps."""

    def figures(self) -> Figures:
        """Return the kernel's resources. Raises DriverError."""


class DriverModule(Protocol):
    @property
    def kernels(self) -> Mapping[str, DriverKernel]: ...

    @property
    def device_bytes(self) -> int:
        """Bytes of the card for code, constants and variables until it is unloaded, rounded like the card does."""

    @property
    def shared_bytes(self) -> int:
        """The part of `device_bytes` in pages shared with other modules; the card may keep those until all go."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that the context reserves for it and keeps. One store serves all modules: the largest figure counts."""

    def variable(self, name: str) -> tuple[int, int]:
        """Return the device address and the size of a variable in device or constant memory; the size is 0 without one.

        Copies take the address while the module is loaded. Raises DriverError.
        """


class Poll(Protocol):
    """Called by a waiting driver from time to time; raises when the wait must end."""

    def __call__(self) -> None:
        """Raise if the wait must end; otherwise the driver polls once more."""


def keep_waiting() -> None:
    """Never end the wait: the `Poll` of callers that have nothing to check."""


class AdmitModule(Protocol):
    """Called by a driver before it loads an image; raises ImageRejected without room."""

    def __call__(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        """Admit a module with these bytes, which are those of `DriverModule`."""


def admit_all(device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
    """An `AdmitModule` without a bound of its own: only the card refuses."""


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """The functions with which native code launches and copies in a context, in the thread that uses the context.

    Attributes:
        state: The first argument of all functions, an address.
        launch: Address of `int32 launch(state, record, params, params_bytes, tag)`. It queues a launch and returns 0,
          or does nothing and returns another number: `Context.launch` then does it, or raises the reason.
        query: Address of `int32 query(state)`. It returns 0 if all launches have ended well and there is nothing to
          report, 1 if something runs, any other number if `Context.sync` has to find out.
        spin_ns: For how long repeated calls of `query` are worthwhile.
        record: Returns the record of a kernel, a grid, a block and bytes of shared memory for `launch`, valid as long
          as the kernel's module is loaded; None if only `Context.launch` can do such a launch.
        launched: To be called with the kernel that native code launched last, before any other use of the context.
        copy_in: Address of `int32 copy_in(state, address, data, bytes)`. It copies host bytes to the device, like
          `Context.mem_write`, and returns 0; any other number if `Context.mem_write` has to do it. All launches must
          have ended.
        copy_out: Address of `int32 copy_out(state, address, into, bytes)`, which does the same for `Context.mem_read`.
        replay: Address of `int32 replay(state, record, changed, tag)`. It notifies the driver of the parameter buffers
          that have changed, bit n for launch n's, and queues a chain's launches. Returns 0; any other number if the
          launches have to be done one by one, none being queued. 0 if the driver has no chains.
        chain: Makes a chain of launches; raises DriverError. `MAX_CHAIN` at most.
        zero: Address of `int32 zero(state, address, bytes)`. It does what `Context.mem_reuse` does, and returns 0; any
          other number if that has to do it.
        replay_graph: Address of `int32 replay_graph(state, graph, tag)`. It queues the graph that has this as
          `DriverGraph.native`, as `DriverGraph.replay` does, and returns 0; any other number if that has to do it,
          nothing being queued. 0 if the driver has no such function.
    """

    state: int
    launch: int
    query: int
    spin_ns: int
    record: Callable[[DriverKernel, Dim3, Dim3, int], bytes | None]
    launched: Callable[[DriverKernel], None]
    copy_in: int
    copy_out: int
    zero: int
    replay: int = 0
    chain: "Callable[[Sequence[KernelStep]], NativeChain] | None" = None
    replay_graph: int = 0


MAX_MARKS: Final = 64
"""Most marks of a `CardProgress`: mark n replaces mark n - MAX_MARKS. Native code repeats the number."""


@dataclass(frozen=True, slots=True)
class CardProgress:
    """The functions that show without a wait how much of a context's work has ended, for native code.

    Attributes:
        state: The first argument of all functions, an address.
        idle: Address of `int32 idle(state)`. It returns 1 if work is outstanding in any stream, another number if none
          is, or the context is lost.
        mark: Address of `int32 mark(state, number)`. It puts a mark behind everything in the selected stream and
          returns 0; any other number if it can't.
        reached: Address of `int32 reached(state, number)`. It returns 1 if work before the mark is outstanding, another
          number if none is, or the context is lost.
        prepare: To be called once before the first mark. Raises DriverError.
        sleeps: A wait of the context polls the card between sleeps, so it ends later than the work does.
    """

    state: int
    idle: int
    mark: int
    reached: int
    prepare: Callable[[], None]
    sleeps: bool


class NativeChain(Protocol):
    """Launches that `NativeLaunch.replay` queues together, each with the parameters in its buffer."""

    @property
    def record(self) -> int:
        """The address of the record that native code gives to `NativeLaunch.replay`."""

    @property
    def params(self) -> Sequence[int]:
        """The address of each launch's parameter buffer, in their order."""

    @property
    def device_bytes(self) -> int: ...

    def close(self) -> None:
        """Release it; what is queued runs to its end."""


MAX_CHAIN: Final = 16
"""Most launches queued by one call of `NativeLaunch.replay`, without a check of the lease between them."""

SEGMENT_STEPS: Final = 32
"""Steps queued between two checks of the lease: this is how many kernels and copies may begin after its end. A card
takes some 2 us to queue a segment, whatever it contains, so longer segments gain little."""


PARK_STEP_BYTES: Final = 64 << 20
"""Host memory for a parked session is prepared and copied in steps of this many bytes. A card copies a step in some
1.2 ms, and the host pins one in about twice that time."""


@dataclass(frozen=True, slots=True)
class KernelStep:
    """A launch with the arguments of `Context.launch`."""

    kernel: DriverKernel
    grid: Dim3
    block: Dim3
    shared_bytes: int
    params: bytes


@dataclass(frozen=True, slots=True)
class DataStep:
    """A copy to the device of bytes that never change."""

    address: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A copy between the device and memory that was given to `Context.pin`; from the device unless `to_device`."""

    address: int
    memory: memoryview
    to_device: bool


Step = KernelStep | DataStep | CopyStep


class AdmitGraph(Protocol):
    """Called by a driver before it makes a graph; raises without room."""

    def __call__(self, device_bytes: int) -> None:
        """Admit a graph with these bytes, which are `DriverGraph.device_bytes`."""


class PageMove(NamedTuple):
    """What a park or a return moved.

    Attributes:
        copied_ns: Time for the copy, and for host memory that was not prepared, in nanoseconds.
        mapped_ns: Time to unmap and release the pages, or to take and map them.
    """

    size_bytes: int
    copied_ns: int
    mapped_ns: int


def admit_any(device_bytes: int) -> None:
    """An `AdmitGraph` without a bound of its own: only the card refuses."""


class DriverGraph(Protocol):
    """A sequence of steps that can be queued as a whole, repeatedly."""

    @property
    def device_bytes(self) -> int:
        """Bytes it takes of the card; the card keeps them for later graphs when this one is closed."""

    @property
    def native(self) -> int:
        """What `NativeLaunch.replay_graph` takes for it; 0 if only `replay` can queue it."""

    def replayed(self) -> None:
        """Record that `NativeLaunch.replay_graph` has queued it, before any other use of the context."""

    def bind(self, step: int, params: bytes) -> None:
        """Give a KernelStep another parameter buffer; replays queued before keep theirs."""

    def replay(self, tag: int, poll: Poll, next_segment: Poll = keep_waiting) -> None:
        """Queue all steps in order, calling `poll` and then `next_segment` before each segment but the first.

        Both may raise to end the replay. A fault of one of its kernels has this `tag`. A driver may have to wait
        before a copy, and calls `poll` meanwhile. Raises LaunchRejected, or KernelFault for an earlier launch; some
        steps may have been queued then.
        """

    def close(self) -> None:
        """Release the graph; replays queued before run to their end. Never waits."""


class Ticket(Protocol):
    """Work of the card that may still be in progress: a copy, or the contents of a stream."""

    def is_done(self) -> bool:
        """Return whether it is complete, or the context is lost: a copy's caller may use the host memory again."""


class DriverEvent(Ticket, Protocol):
    """The time at which a stream has finished everything that it held."""


class AdoptedEvent:
    """An event of another process, which was done there.

    Attributes:
        time_ns: Its time on a clock of the host.
    """

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns

    def is_done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RegionReturn:
    """The bytes of a region that has ended.

    Attributes:
        freed_bytes: Bytes that were released to the card.
        kept_bytes: Bytes of zeroed memory, mapped repeatedly in the region's place until `region_release`.
    """

    freed_bytes: int
    kept_bytes: int


class Context(Protocol):
    """A device context, used by one thread.

    Each stream runs in order. Streams run concurrently where the driver can do that; a driver may also run all of them
    in the order of the calls. Launches and copies go into the stream that was selected last, at first into stream 0,
    which always exists. Only `stream_wait` orders one stream after another.

    Methods that take `poll` may have to wait for launches. They call `poll` about every millisecond meanwhile. It may
    raise to end the wait: the method has then done nothing, except that a copy of pinned memory may still be done.

    Every method but `launch` may raise `KernelFault` for an earlier launch. The context then forgets the fault and
    continues, unless `context_lost`. It skips launches after a fault until the fault was raised.
    """

    @property
    def page_bytes(self) -> int:
        """Size of the card's pages: an allocation may take up to one page more than its size."""

    @property
    def compute_capability(self) -> int:
        """The capability that images are compiled for: 90 for 9.0."""

    @property
    def cuda_version(self) -> int:
        """The version of CUDA of the card's driver, 13000 for 13.0; 0 for no CUDA driver."""

    # --- memory ---

    @property
    def rounding_bytes(self) -> int:
        """Bytes that all allocations together take of the card beyond their sizes."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of the card that the context keeps for later allocations."""

    def mem_alloc(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Allocate; return the device address, aligned to 256 bytes. Everything queued from now on finds zeros there.

        Args:
            size_bytes: At least 1.
            spare_bytes: How many bytes may stay kept if more is taken of the card.
            poll: As in the class; called if kept memory has to be released first.

        Raises:
            OutOfMemory: The card can't provide so much.
        """

    def mem_free(self, address: int, poll: Poll = keep_waiting) -> None:
        """Release an allocation of `mem_alloc`; launches queued before may still use it."""

    def mem_reuse(self, address: int, size_bytes: int, poll: Poll = keep_waiting) -> None:
        """Do what a `mem_free` and a `mem_alloc` of the same size do together, if the latter returns the same address.

        Launches queued before may still use the old contents; everything queued from now on finds zeros there.
        """

    def trim(self, most_bytes: int, poll: Poll = keep_waiting) -> None:
        """Release kept memory to the card until at most `most_bytes` are kept."""

    # --- copies ---

    def mem_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy host bytes to the device in stream order; `data` may be reused on return."""

    def mem_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy device bytes to the host in stream order; complete on return."""

    def pin(self, memory: memoryview) -> None:
        """Prepare host memory for many fast copies, if the driver can; it stays mapped until the process ends."""

    def write_pinned(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy like `mem_write`, from memory, or a part of it, that was given to `pin`."""

    def begin_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Begin a `write_pinned`: `data` may be reused once the ticket is done, or after any later wait."""

    def read_pinned(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy like `mem_read`, into memory, or a part of it, that was given to `pin`."""

    def begin_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Begin a `read_pinned`: the bytes are there once the ticket is done, or after any later wait."""

    # --- regions: opened, wiped, ended and released in this order ---

    @property
    def region_granule_bytes(self) -> int:
        """Regions begin and end at multiples of this; 0 if the driver has no regions."""

    def region_open(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Map memory for a region, at an address that this context has never used and never reuses.

        Nothing may use the region before `region_is_zeroed`: a card may be busy with other kernels meanwhile.

        Args:
            size_bytes: A multiple of `region_granule_bytes`.
            spare_bytes: As in `mem_alloc`.
            poll: As in `mem_alloc`.

        Raises:
            OutOfMemory: The card can't provide so much.
        """

    def region_kept_bytes(self, size_bytes: int) -> int:
        """Return the `RegionReturn.kept_bytes` of a region of that size."""

    def region_is_zeroed(self) -> bool:
        """Return whether everything is zero that `region_open` and `region_wipe` began to zero."""

    def region_wipe(self, address: int) -> None:
        """Begin to zero what `region_end` keeps of a region, so that `region_end` need not wait for it."""

    def region_end(self, address: int, poll: Poll = keep_waiting) -> RegionReturn:
        """Remove a region's memory and release it to the card; complete on return.

        No launch or copy that uses the region may be in progress: on CUDA an access meanwhile can cost the context.
        From then on its addresses hold zeros that belong to no region: a kernel that reads and writes there with a
        stale pointer meets no other region's bytes, and the context continues.

        Raises:
            DriverError: The memory is not released. The region's addresses must not be used again.
        """

    def region_release(self, address: int) -> None:
        """Release an ended region's addresses: an access there is an illegal address from now on."""

    # --- parking: the bytes of allocations and regions leave the card, and come back to the same addresses ---

    def make_parkable(self, slice_bytes: int) -> None:
        """Prepare the context for `park`; before its first allocation. Raises DriverError if it can't be parked."""

    @property
    def pages_bytes(self) -> int:
        """Bytes of pages that `park` would move, or has moved; freed memory that is kept counts, too."""

    def park(self, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting) -> PageMove:
        """Copy allocations and regions to host memory, and release them to the card; complete on return.

        Nothing may be in progress, and no memory kept. From then on only regions may be ended, wiped and released, and
        `unpark` called.

        Args:
            host: Host memory of at least `pages_bytes`, for the context's use alone until `unpark`.
            ready: Called before bytes of `host` up to its argument are used. What was given to `pin_host` in parts of
              PARK_STEP_BYTES is copied fast.
            poll: As in the class; if it raises, nothing has changed.

        Raises:
            DriverError: Nothing has changed.
            KernelFault: The context is lost, because the driver failed half-way.
        """

    def unpark(self, poll: Poll = keep_waiting) -> PageMove:
        """Take memory of the card, and copy the bytes back to where they were; complete on return.

        Raises:
            OutOfMemory: The card can't give the memory. Everything is parked as before; so after a poll that raises.
        """

    def pin_host(self, memory: memoryview) -> None:
        """Prepare host memory for `park`, as `pin` does, until `unpin_host`."""

    def unpin_host(self, memory: memoryview) -> None:
        """Undo `pin_host`, which was called with the same memory before."""

    # --- leaving the process: a parked session's records, for a context of another process ---

    def parked_state(self) -> bytes:
        """Return what `adopt_parked` needs. Raises DriverError, with the reason, for what can't leave this process."""

    def parked_regions(self) -> dict[int, tuple[int, int]]:
        """Return the place and the size in the host memory of each parked region that has not ended, by address."""

    def event_times_ns(self, events: Sequence[DriverEvent]) -> list[int]:
        """Return the times of events that are done, on a clock of the host, for `adopt_event`. Raises DriverError."""

    def module_place(self, module: DriverModule) -> tuple[int, ...]:
        """Return the addresses and numbers of a module that the tenant's data may contain.

        Raises DriverError, with the reason, for a module that can't leave this process.
        """

    def adopt_parked(self, state: bytes, host: memoryview) -> None:
        """Enter the parked state of another context, with its bytes in `host`. Nothing was allocated here before.

        Raises ImageMismatch.
        """

    def adopt_module(self, image: bytes, place: tuple[int, ...]) -> DriverModule:
        """Load a module of that context; in the order in which the other one loaded them. Call `adopt_parked` before.

        The bytes of its variables come back with `unpark`. Raises ImageMismatch unless it has the same place.
        """

    def adopt_event(self, time_ns: int) -> DriverEvent:
        """Return an event of that context by its time. Events recorded here from now on are later. Raises DriverError.

        `elapsed_ns` takes it together with any other event.
        """

    # --- the card's figure, streams and events ---

    def free_bytes(self) -> int:
        """Return the card's free bytes by the driver's own figure, which other processes change, too."""

    def mark(self, stream: int) -> Ticket:
        """Return a ticket that is done once everything that is in a stream now has ended."""

    def event(self, stream: int) -> DriverEvent:
        """Put an event after what a stream holds now."""

    def event_wait(self, events: Sequence[DriverEvent], poll: Poll = keep_waiting) -> None: ...

    def elapsed_ns(self, start: DriverEvent, end: DriverEvent) -> int:
        """Return the time between two events that are done, negative if `end` came first. Raises DriverError."""

    def streams_bytes(self, count: int) -> int:
        """Return the bytes of the card that the context keeps for `count` streams in addition to stream 0."""

    def stream_create(self) -> int:
        """Make a stream; return its number, at least 1. Numbers may be reused. At most MAX_STREAMS exist at a time."""

    def stream_destroy(self, stream: int) -> None:
        """Release a stream; its work continues. Does not call the card."""

    def stream_select(self, stream: int) -> None:
        """Put launches and copies into this stream from now on. Does not call the card."""

    def stream_wait(self, stream: int, other: int) -> None:
        """Order what is put in `stream` later after what is in `other` now; returns at once."""

    def stream_sync(self, stream: int, poll: Poll = keep_waiting) -> None:
        """Wait for everything that one stream holds."""

    # --- modules and launches ---

    def module_load(self, image: bytes, admit: AdmitModule = admit_all) -> DriverModule:
        """Load PTX text or a cubin, after `admit` has admitted its bytes. Raises ImageRejected."""

    def compile_kernel(self, kernel: DriverKernel) -> bool:
        """Compile what a kernel's first launch needs, if anything is left; return whether there was.

        The launch would do it, too. It can't be interrupted. Raises LaunchRejected.
        """

    def forget_earlier(self) -> None:
        """Forget all compiled images, so that the time of a load discloses nothing about another tenant's images."""

    def module_unload(self, module: DriverModule, poll: Poll = keep_waiting) -> None:
        """Release a module, once everything launched before has ended."""

    def launch(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        """Queue a launch and return. `params` is the kernel's parameter buffer, laid out. Raises LaunchRejected."""

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
        """`launch` with attributes. Raises LaunchRejected, with the bound, for what never fits on the card."""

    def set_spinning(self, *, spins: bool, yields: bool) -> None:
        """Choose whether waits spin on the card before they sleep, and whether they yield the core meanwhile."""

    def native(self) -> NativeLaunch | None:
        """Return the functions for native launches here; None if there are none. Not to be used after `watch`."""

    def progress(self) -> CardProgress:
        """Return the functions that show how much of the context's work has ended."""

    def graph(self, steps: Sequence[Step], admit: AdmitGraph, poll: Poll = keep_waiting) -> DriverGraph:
        """Make a launch graph of at least one step, after `admit` has admitted its bytes. Raises LaunchRejected."""

    # --- waits, faults and the end ---

    def sync(self, poll: Poll = keep_waiting) -> None:
        """Wait for everything that all streams hold, destroyed streams too."""

    def flush_printed(self) -> None:
        """Write what kernels have printed to this process's standard output (host/captured_output.py); none may run."""

    def watch(self, poll: Poll) -> None:
        """Count the launches that end from now on.

        Calls `poll` before each launch and while a launch waits for room. If `poll` raises, the launch is not queued.
        """

    def running(self) -> Mapping[int, int]:
        """Map each stream that runs a kernel now to the number of its operations that have ended.

        Only after `watch`. While a stream's number does not change, it is the same kernel.
        """

    def fault(self) -> KernelFault | None:
        """Return the pending fault, without waiting; the context then forgets it as if it had raised it."""

    def close(self) -> None:
        """End the context normally; the process may exit right afterwards."""


class Driver(Protocol):
    """A kind of card, and what its workers need."""

    @property
    def name(self) -> str:
        """The driver's name in settings: cuda or cpu."""

    def preload(self) -> None:
        """Import what a context needs, without touching a device. The zygote calls this once before it forks."""

    def needs(self) -> "SandboxNeeds":
        """Return paths and devices that its workers open inside the sandbox; called after `preload`."""

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """Return descriptors of folders where its workers, processes of user `owner`, may cache what they compiled."""

    def open_context(self, card: str, slice_bytes: int) -> Context:
        """Make this process's only context on the card of that UUID. Raises DriverError."""

    def rewind(self, context: Context) -> "Opening":
        """End a warm-up; the result makes the context again, as if nothing had run in it.

        The caller must have released all allocations and modules. Raises DriverError.
        """

    def recycle(self, context: Context) -> "Opening":
        """Overwrite what a lease left in the context and unpin all memory; the result makes the context again.

        The caller must have released all allocations and modules. Raises DriverError if something is left.
        """


class Opening(Protocol):
    """The last step of making a context, for which the slice must be known."""

    def __call__(self, slice_bytes: int) -> Context:
        """Make the context; to be called once. Raises DriverError."""


# ptxas 13.0 reads strings across line ends and without escapes. Each alternative takes linear time: a comment or string
# that is never closed ends the search, instead of being searched for again.
_MANAGED: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|(?P<managed>\.managed(?![\w$]))""", re.DOTALL
)
# The variable's name is the first word outside of comments, strings, directives and numbers.
_WORD: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|\.[\w$]+|\d[\w$]*|(?P<word>[A-Za-z_$%][\w$]*)""", re.DOTALL
)

# Names are a tenant's text: longer ones are cut in messages.
_SHOWN_NAME_CHARACTERS: Final = 200


def text_of(image: bytes) -> bytes:
    """Return the PTX text of an image: everything before its first NUL.

    cuModuleLoadData and cuLinkAddData take C strings.
    """
    return image.partition(b"\0")[0]


def refuse_managed_text(ptx: bytes) -> None:
    """Raise ImageRejected for PTX text that declares a managed variable (PTX ISA section 11.4, `.attribute`).

    The declaration may be anywhere, so this searches for the attribute itself, outside of comments and strings.
    """
    # Nearly all images: one search, without the regular expression.
    if b".managed" not in ptx:
        return
    # The other alternatives match comments and strings, so that the attribute in them is skipped.
    for found in _MANAGED.finditer(ptx):
        if found["managed"] is not None:
            line = ptx.count(b"\n", 0, found.start()) + 1
            raise managed_refused(_variable_behind(ptx, found.end()), line=line)


def _variable_behind(ptx: bytes, position: int) -> str:
    """Return the first name after an attribute: the variable's. Everything else begins with a dot or a digit."""
    for found in _WORD.finditer(ptx, position):
        if found["word"] is not None:
            return found["word"].decode("ascii")
    return ""


def managed_refused(variable: str, *, line: int = 0) -> ImageRejected:
    """Return the error for an image with a managed variable."""
    name = variable[:_SHOWN_NAME_CHARACTERS]
    where = f"line {line}: " if line else ""
    said = f"{where}the variable {name!r} is __managed__; managed memory is not supported on a lease"
    hint = "Declare it __device__, or pass a buffer of mem_alloc to the kernel."
    return ImageRejected(said, log=said, line=line, hint=hint)


def cooperative_refused(kernel: str) -> LaunchRejected:
    """Return the error for the plain launch of a kernel that synchronises its grid."""
    return LaunchRejected(
        f"kernel {kernel} needs a cooperative launch: it synchronises its whole grid",
        hint="Launch it on a card with cooperative=True, by itself: graphs and submits have no cooperative launches.",
    )


def too_much_shared(kernel: str, size_bytes: int, static_bytes: int, most_bytes: int) -> LaunchRejected:
    """Return the error for a launch with blocks of more than `most_bytes` of shared memory, static and dynamic."""
    return LaunchRejected(
        f"kernel {kernel}: {size_bytes} bytes of dynamic shared memory, plus {static_bytes} of its variables, "
        f"are more than the {most_bytes} that a block can have on this device",
        hint="Use smaller tiles or fewer stages, which need less shared memory.",
    )
