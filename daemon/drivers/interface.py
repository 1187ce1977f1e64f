"""The interface between a session and the driver that computes for it.

A `Driver` stands for the cards of one kind; a `Context` is the only context of one worker process. A driver checks what
only it can know: whether an image can be loaded, and whether a kernel fits. The session checks handles, ownership and
the slice before it calls the driver. Error messages are written for the tenant: what happened, and what to do. The
session converts the errors to wire statuses.

This module also defines the steps of a launch graph, and the refusals that all drivers share: managed memory, and the
plain launch of a kernel that needs a cooperative one. For managed memory the CUDA driver keeps tens of MiB of a card,
which no lease is charged for, until the card's last context ends. A kernel that synchronises its grid traps unless it
was launched cooperatively, and the trap destroys the context.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    from gpulease.daemon.host.copy_ring import CopyRing, RingEnd
    from gpulease.daemon.sandbox.measures import SandboxNeeds

Dim3 = tuple[int, int, int]

ONE_BY_ONE: Final = "one-by-one"
"""Suffix of the CUDA driver's name if native code queues launches one by one: `cuda::one-by-one`."""


class DriverError(Exception):
    """The driver refused a call or could not finish it; the context remains usable.

    Attributes:
        hint: What the tenant can do about it, a sentence, or "".
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnusableSetting(DriverError):
    """A setting of the operator keeps the driver from working."""


class OutOfMemory(DriverError):
    """The card can't provide the bytes, although the slice allows them."""


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
    """Something in a session's image would differ, or have another address, from the context that it left."""


class LaunchRejected(DriverError):
    """The driver refused a launch before the kernel began, for its shape, shared memory or argument bytes."""


class KernelFault(DriverError):
    """A kernel began and failed; the first call that can report it raises this, once.

    Attributes:
        tag: The tag of its launch, 0 if the driver can't determine it.
        kernel: The kernel's name, "" if the driver can't determine it.
        address: The faulting device address, or None.
        context_lost: The context can no longer be used (CUDA's sticky errors).
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
        is_cooperative: Whether all blocks run at the same time, so that they may wait for each other.
        cluster: The number of neighbouring blocks in a cluster, by dimension; None for no clusters.
    """

    is_cooperative: bool
    cluster: Dim3 | None


@dataclass(frozen=True, slots=True)
class Figures:
    """The resources of a kernel.

    Attributes:
        shared_bytes: Shared memory of a block that the kernel's variables take.
        max_dynamic_shared_bytes: Maximum dynamic shared memory that a launch may request.
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
        """The entry point's name, as in the PTX text (mangled for C++)."""

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    @property
    def parameter_bytes(self) -> int:
        """The size of the parameter buffer that `launch` takes, in bytes."""

    @property
    def max_threads_per_block(self) -> int:
        """The maximum number of threads in a block of this kernel."""

    @property
    def kept_bytes(self) -> int:
        """The card's local memory that the context reserves before this kernel runs, and then keeps."""

    @property
    def is_due(self) -> bool:
        """Whether it has run for so long that `compile_kernel` is to optimise it before the next launch."""

    def figures(self) -> Figures:
        """Return the kernel's resources. Raises DriverError."""


class DriverModule(Protocol):
    @property
    def kernels(self) -> Mapping[str, DriverKernel]: ...

    @property
    def device_bytes(self) -> int:
        """Bytes of the card that the module's code, constants and variables take, rounded up as on the card."""

    @property
    def shared_bytes(self) -> int:
        """The part of `device_bytes` in pages shared with other modules; may stay until the last one is unloaded."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that the context reserves for the module and keeps. Modules share them, so only the largest counts."""

    def variable(self, name: str) -> tuple[int, int]:
        """Return the device address and size of a variable in device or constant memory; size 0 if it does not exist.

        Copies accept the address while the module is loaded. Raises DriverError.
        """


class Poll(Protocol):
    """Called by a waiting driver from time to time; raises when the wait must end."""

    def __call__(self) -> None:
        """Raise if the wait must end; otherwise the driver polls again."""


def keep_waiting() -> None:
    """Never end the wait. This is the `Poll` of callers that have nothing to check."""


class AdmitModule(Protocol):
    """Called by a driver before it loads an image; raises ImageRejected if the image does not fit."""

    def __call__(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        """Admit a module; the arguments are the properties of `DriverModule` with these names."""


def admit_all(device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
    """Admit every module: an `AdmitModule` that leaves it to the card to refuse."""


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """The functions with which native code launches and copies in a context, in the thread that uses the context.

    Attributes:
        state: The first argument of all functions, an address.
        launch: Address of `int32 launch(state, record, params, params_bytes, tag)`. It queues a launch and returns 0,
          or does nothing and returns another number. The caller must then call `Context.launch`, which queues the
          launch or raises the reason.
        query: Address of `int32 query(state)`. It returns 0 if all launches have succeeded and there is nothing to
          report, 1 if something is running, any other number if the caller must call `Context.sync` to find out.
        spin_ns: For how long it is worthwhile to call `query` repeatedly.
        record: Returns the record for `launch` of a kernel, a grid, a block and bytes of shared memory. It is valid as
          long as the kernel's module is loaded. None if only `Context.launch` can do such a launch.
        launched: Must be called with the kernel that native code launched last, before any other use of the context.
        copy_in: Address of `int32 copy_in(state, address, data, bytes)`. It copies host bytes to the device, like
          `Context.mem_write`, and returns 0; any other number if the caller must call `Context.mem_write` instead. All
          launches must have ended.
        copy_out: Address of `int32 copy_out(state, address, into, bytes)`, which does the same for `Context.mem_read`.
        replay: Address of `int32 replay(state, record, changed, tag)`. It notifies the driver of the parameter buffers
          that have changed (bit n for launch n), queues a chain's launches and returns 0. It queues nothing and returns
          any other number if the launches must be queued one by one. 0 if the driver has no chains.
        chain: Makes a chain of at most `MAX_CHAIN` launches; raises DriverError.
        zero: Address of `int32 zero(state, address, bytes)`. It does what `Context.mem_reuse` does, and returns 0; any
          other number if the caller must call `Context.mem_reuse` instead.
        replay_graph: Address of `int32 replay_graph(state, graph, tag)`, where `graph` is a `DriverGraph.native`. It
          queues the graph as `DriverGraph.replay` does, and returns 0. It queues nothing and returns any other number
          if the caller must call `DriverGraph.replay` instead. 0 if the driver has no such function.
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
"""Maximum number of marks of a `CardProgress`: mark n replaces mark n - MAX_MARKS. Native code repeats the number."""


@dataclass(frozen=True, slots=True)
class CardProgress:
    """The functions that show native code, without a wait, how much of a context's work has ended.

    Attributes:
        state: The first argument of all functions, an address.
        idle: Address of `int32 idle(state)`. It returns 1 if any stream has outstanding work, and another number if
          none has or the context is lost.
        mark: Address of `int32 mark(state, number)`. It puts a mark after everything in the selected stream and
          returns 0; any other number if it can't.
        reached: Address of `int32 reached(state, number)`. It returns 1 if work before the mark is outstanding, and
          another number if none is or the context is lost.
        prepare: Must be called once before the first mark. Raises DriverError.
        sleeps: Whether the context sleeps between polls of the card while it waits. Its waits then end later than the
          work does.
    """

    state: int
    idle: int
    mark: int
    reached: int
    prepare: Callable[[], None]
    sleeps: bool


class NativeChain(Protocol):
    """Launches that `NativeLaunch.replay` queues together, each with the parameters that are in its buffer."""

    @property
    def record(self) -> int:
        """The address of the record that native code passes to `NativeLaunch.replay`."""

    @property
    def params(self) -> Sequence[int]:
        """The address of each launch's parameter buffer, in the order of the launches."""

    @property
    def device_bytes(self) -> int: ...

    def close(self) -> None:
        """Release the chain; launches that are already queued run to their end."""


MAX_CHAIN: Final = 16
"""Maximum number of launches queued by one call of `NativeLaunch.replay`, without a check of the lease between them."""

SEGMENT_STEPS: Final = 32
"""Number of steps queued between two checks of the lease, so at most this many kernels and copies begin after the
lease's end. A card takes about 2 us to queue a segment, whatever its length, so longer segments gain little."""


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
    """A copy to the device of bytes that do not change between replays."""

    address: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A copy between the device and memory that was passed to `Context.pin`; from the device unless `to_device`."""

    address: int
    memory: memoryview
    to_device: bool


Step = KernelStep | DataStep | CopyStep


class AdmitGraph(Protocol):
    """Called by a driver before it makes a graph; raises if the graph does not fit."""

    def __call__(self, device_bytes: int) -> None:
        """Admit a graph; `device_bytes` is its `DriverGraph.device_bytes`."""


class PageMove(NamedTuple):
    """The size and times of a park or a return.

    Attributes:
        copied_ns: Time to copy the bytes, and to prepare host memory that was not prepared before.
        mapped_ns: Time to unmap and release the pages, or to take and map them.
    """

    size_bytes: int
    copied_ns: int
    mapped_ns: int


def admit_any(device_bytes: int) -> None:
    """Admit every graph: an `AdmitGraph` that leaves it to the card to refuse."""


class DriverGraph(Protocol):
    """A sequence of steps that can be queued as a whole, repeatedly."""

    @property
    def device_bytes(self) -> int:
        """Bytes that the graph takes of the card. When it is closed, the card keeps them for later graphs."""

    @property
    def native(self) -> int:
        """The graph's argument for `NativeLaunch.replay_graph`; 0 if only `replay` can queue the graph."""

    @property
    def due(self) -> Sequence[DriverKernel]:
        """Its kernels that `compile_kernel` is to optimise before the next replay (`DriverKernel.is_due`)."""

    def replayed(self) -> None:
        """Record that `NativeLaunch.replay_graph` has queued the graph, before any other use of the context."""

    def bind(self, step: int, params: bytes) -> None:
        """Give a KernelStep another parameter buffer. Replays that are already queued keep the previous one."""

    def replay(self, tag: int, poll: Poll, next_segment: Poll = keep_waiting) -> None:
        """Queue all steps in order, calling `poll` and then `next_segment` before each segment but the first.

        Both may raise to end the replay. A fault of one of the graph's kernels has this `tag`. A driver that has to
        wait before a copy calls `poll` while it waits. Raises LaunchRejected, or KernelFault for an earlier launch;
        some steps may then already be queued.
        """

    def close(self) -> None:
        """Release the graph. Replays that are already queued run to their end. Never waits."""


class Ticket(Protocol):
    """Work of the card that may still be in progress: a copy, or the contents of a stream."""

    def is_done(self) -> bool:
        """Return whether the work is complete or the context is lost. A copy's host memory may then be used again."""


class DriverEvent(Ticket, Protocol):
    """The time at which a stream finished everything that it held when the event was put into it."""


class AdoptedEvent:
    """An event that another process recorded, and that was already done there.

    Attributes:
        time_ns: The event's time on a clock of the host.
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
        kept_bytes: Bytes of zeroed memory that fill the region's place, mapped repeatedly, until `region_release`.
    """

    freed_bytes: int
    kept_bytes: int


class Context(Protocol):
    """A device context, used by one thread.

    The work of one stream runs in order. Different streams run concurrently if the driver can do that; a driver may
    also run all of them in the order of the calls. Launches and copies go into the stream that was last selected.
    Initially that is stream 0, which always exists. Only `stream_wait` orders one stream after another.

    Methods that take `poll` may have to wait for launches. While they wait, they call `poll` about every millisecond.
    `poll` may raise to end the wait. The method has then done nothing, but a copy of pinned memory may still complete.

    Every method except `launch` may raise `KernelFault` for an earlier launch. The context then clears the fault and
    continues, unless `context_lost`. From a fault until it is raised, the context skips launches.
    """

    @property
    def page_bytes(self) -> int:
        """Size of the card's pages: an allocation may take up to one page more than its size."""

    @property
    def compute_capability(self) -> int:
        """The compute capability that images are compiled for: 90 for 9.0."""

    @property
    def cuda_version(self) -> int:
        """The CUDA version of the card's driver, 13000 for 13.0; 0 without a CUDA driver."""

    # --- memory ---

    @property
    def rounding_bytes(self) -> int:
        """Bytes that all allocations together take of the card beyond their sizes."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of the card that the context keeps for later allocations."""

    def mem_alloc(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Allocate memory; return its device address, aligned to 256 bytes. Work queued after this reads zeros there.

        Args:
            size_bytes: At least 1.
            spare_bytes: How many bytes the context may continue to keep if it has to take more of the card.
            poll: As described at the class; called if kept memory has to be released first.

        Raises:
            OutOfMemory: The card can't provide so much.
        """

    def mem_free(self, address: int, poll: Poll = keep_waiting) -> None:
        """Release an allocation of `mem_alloc`; launches queued before may still use it."""

    def mem_reuse(self, address: int, size_bytes: int, poll: Poll = keep_waiting) -> None:
        """Do what `mem_free` and then `mem_alloc` of the same size do, if `mem_alloc` returns the same address.

        Launches queued before this may still use the old contents. Work queued after this reads zeros there.
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
        """Copy like `mem_write`, from memory that was passed to `pin`, or part of it."""

    def begin_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Begin a `write_pinned`: `data` may be reused once the ticket is done, or after any later wait."""

    def read_pinned(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy like `mem_read`, into memory that was passed to `pin`, or part of it."""

    def begin_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """Begin a `read_pinned`: the bytes are there once the ticket is done, or after any later wait."""

    # --- regions: opened, wiped, ended and released in this order ---

    @property
    def region_granule_bytes(self) -> int:
        """Regions begin and end at multiples of this; 0 if the driver has no regions."""

    def region_open(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Map memory for a region, at an address that this context has never used and never reuses.

        Nothing may use the region before `region_is_zeroed` returns True, because the card may be busy with other
        kernels before it zeroes the region.

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
        """Return whether all zeroing that `region_open` and `region_wipe` began is complete."""

    def region_wipe(self, address: int) -> None:
        """Begin to zero the bytes that `region_end` keeps of a region, so that `region_end` need not wait for that."""

    def region_end(self, address: int, poll: Poll = keep_waiting) -> RegionReturn:
        """Remove a region's memory and release it to the card; complete on return.

        No launch or copy that uses the region may be in progress: on CUDA, an access during this call can destroy the
        context. Afterwards, the region's addresses hold zeros that belong to no region. A kernel that uses a stale
        pointer then accesses no other region's bytes, and the context continues.

        Raises:
            DriverError: The memory is not released. The region's addresses must not be used again.
        """

    def region_release(self, address: int) -> None:
        """Release an ended region's addresses. From now on they are illegal addresses."""

    # --- parking: the bytes of allocations and regions leave the card, and come back to the same addresses ---

    def make_parkable(self, slice_bytes: int) -> None:
        """Prepare the context for `park`, before its first allocation. Raises DriverError if it can't be parked."""

    @property
    def pages_bytes(self) -> int:
        """Bytes of pages that `park` would move, or has moved, including freed memory that the context keeps."""

    def park(self, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting) -> PageMove:
        """Copy allocations and regions to host memory, and release them to the card; complete on return.

        No work may be in progress, and the context must not keep freed memory. Afterwards the caller may only end, wipe
        and release regions, and call `unpark`.

        Args:
            host: Host memory of at least `pages_bytes`, which only the context may use until `unpark`.
            ready: Called before bytes of `host` up to its argument are used. Memory that was passed to `pin_host` in
              parts of PARK_STEP_BYTES is copied fast.
            poll: As described at the class; if it raises, nothing has changed.

        Raises:
            DriverError: Nothing has changed.
            KernelFault: The context is lost, because the driver failed half-way.
        """

    def copy_ahead(self, host: memoryview, end: int) -> bool:
        """Copy a part of what `park` would copy, and return whether all of it is copied. Never waits.

        No work may be in progress at the first call, and none may begin until `park`; if some has begun, or the bytes
        have changed otherwise, call `forget_ahead`. `park` with the same `host` then copies only the rest. If memory
        was allocated or freed since, or a region was opened or ended, the context itself begins again.

        Args:
            host: As for `park`.
            end: Only bytes of `host` before this are used.

        Raises:
            DriverError: Call `forget_ahead`.
        """

    @property
    def ahead_bytes(self) -> int:
        """Bytes that `copy_ahead` has begun to copy, and that `park` would not copy again."""

    def forget_ahead(self) -> None:
        """Forget what `copy_ahead` has copied. Afterwards the context writes nothing to that host memory.

        May wait for the steps in flight, at most a few milliseconds. Raises DriverError.
        """

    def unpark(self, poll: Poll = keep_waiting) -> PageMove:
        """Take memory of the card, and copy the bytes back to where they were; complete on return.

        If `poll` raises, everything is still parked as before.

        Raises:
            OutOfMemory: The card can't provide the memory. Everything is still parked as before.
        """

    def pin_host(self, memory: memoryview) -> None:
        """Prepare host memory for `park`, as `pin` does, until `unpin_host`."""

    def unpin_host(self, memory: memoryview) -> None:
        """Undo an earlier `pin_host` of the same memory."""

    # --- leaving the process: a parked session's records, for a context of another process ---

    def can_lend(self) -> bool:
        """Return whether `lend_pages` can lend the session's pages."""

    def lend_pages(
        self, most: int, host: memoryview, ready: Callable[[int], None], poll: Poll = keep_waiting
    ) -> list[int]:
        """Lend the pages of a session that is not parked, and in which nothing runs, to a context of another process.

        `parked_state` then describes these pages. They must not change while they are lent, except that regions may
        end.

        Args:
            most: The largest number of descriptors. It must be the same in the other context.
            host: Host memory to which small pages are copied instead, as by `park`.
            ready: As for `park`.
            poll: As for `park`.

        Returns descriptors of the pages, which the caller closes.

        Raises:
            DriverError: The pages can't be lent now.
        """

    def lend_ring(self, ring: "CopyRing") -> "RingEnd":
        """Lend the pages as `lend_pages` does, but through a ring, for a context that can't read this card's memory.

        Returns the end that fills the ring. Nothing may use the pages until that end is over or settled.
        """

    def why_stays(self) -> str:
        """Return why another process could not take over this context's state; "" if one could.

        The context need not be parked. Calls no driver function, so `parked_state` may find reasons that this does not.
        """

    def parked_state(self) -> bytes:
        """Return the state of what is parked or lent, for `adopt_parked`.

        Raises DriverError if something in it can't leave this process.
        """

    def parked_regions(self) -> dict[int, tuple[int, int]]:
        """Return the position in host memory and the size of each parked region that has not ended, by address."""

    def event_times_ns(self, events: Sequence[DriverEvent]) -> list[int]:
        """Return the times of events that are done, on a clock of the host, for `adopt_event`. Raises DriverError."""

    def module_place(self, module: DriverModule) -> tuple[int, ...]:
        """Return the addresses and numbers of a module that the tenant's data may contain.

        Raises DriverError, with the reason, for a module that can't leave this process.
        """

    def adopt_parked(
        self, state: bytes, host: memoryview, pages: Sequence[int] = (), ring: "CopyRing | None" = None
    ) -> None:
        """Take over the parked state of another context. Nothing may be allocated here yet.

        Args:
            state: The state.
            host: Host memory with the bytes, except those of lent pages.
            pages: Descriptors of lent pages, which `unpark` copies from card to card. This context owns them from now
                on, even if the call fails, and closes them by the end of `unpark`.
            ring: The ring that the other context fills with all pages; `unpark` empties it.

        Raises:
            ImageMismatch: The state does not fit this context.
        """

    def module_code(self, module: DriverModule) -> bytes:
        """Return the machine code of a parkable context's module, for `adopt_module`; b"" if none is kept."""

    def adopt_module(self, image: bytes, place: tuple[int, ...], code: bytes = b"") -> DriverModule:
        """Load a module of the other context. Call `adopt_parked` first, and load modules in their original order.

        `code`: What `module_code` returned there; with it, the image need not be compiled. `unpark` restores the bytes
        of its variables. Raises ImageMismatch unless the module gets the same place.
        """

    def adopt_event(self, time_ns: int) -> DriverEvent:
        """Return an event of the other context by its time. Raises DriverError.

        All events recorded here from now on are later. `elapsed_ns` accepts it together with any other event.
        """

    # --- the card's figure, streams and events ---

    def free_bytes(self) -> int:
        """Return the card's free bytes according to the driver. Other processes change this figure, too."""

    def mark(self, stream: int) -> Ticket:
        """Return a ticket that is done once everything that is now in a stream has ended."""

    def event(self, stream: int) -> DriverEvent:
        """Put an event after everything that is now in a stream."""

    def event_wait(self, events: Sequence[DriverEvent], poll: Poll = keep_waiting) -> None: ...

    def elapsed_ns(self, start: DriverEvent, end: DriverEvent) -> int:
        """Return the time between two events that are done, negative if `end` came first. Raises DriverError."""

    def streams_bytes(self, count: int) -> int:
        """Return the bytes of the card that the context keeps for `count` streams in addition to stream 0."""

    def stream_create(self) -> int:
        """Make a stream; return its number, at least 1. Numbers may be reused. At most MAX_STREAMS exist at a time."""

    def stream_destroy(self, stream: int) -> None:
        """Release a stream; its work continues. Does not access the card."""

    def stream_select(self, stream: int) -> None:
        """Put launches and copies into this stream from now on. Does not access the card."""

    def stream_wait(self, stream: int, other: int) -> None:
        """Make later work in `stream` wait for everything that is now in `other`; return at once."""

    def stream_sync(self, stream: int, poll: Poll = keep_waiting) -> None:
        """Wait for everything that one stream holds."""

    # --- modules and launches ---

    def module_load(self, image: bytes, admit: AdmitModule = admit_all) -> DriverModule:
        """Load PTX text or a cubin, after `admit` has admitted its bytes. Raises ImageRejected."""

    def compile_kernel(self, kernel: DriverKernel, threads: int) -> bool:
        """Compile the code that a launch of this many threads needs; return whether it was not compiled before.

        The compilation can't be interrupted. Without this call, the launch itself compiles. Raises LaunchRejected.
        """

    def forget_earlier(self) -> None:
        """Forget all compiled images, so that a load's duration discloses nothing about another tenant's images."""

    def module_unload(self, module: DriverModule, poll: Poll = keep_waiting) -> None:
        """Release a module, after everything that was launched before has ended."""

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
        """Launch with attributes. Raises LaunchRejected, with the bound, for a launch that never fits on the card."""

    def set_spinning(self, *, spins: bool, yields: bool) -> None:
        """Set whether waits spin on the card before they sleep, and whether they yield the core while they spin."""

    def native(self) -> NativeLaunch | None:
        """Return the functions for native launches; None if there are none. They must not be used after `watch`."""

    def progress(self) -> CardProgress:
        """Return the functions that show how much of the context's work has ended."""

    def graph(self, steps: Sequence[Step], admit: AdmitGraph, poll: Poll = keep_waiting) -> DriverGraph:
        """Make a launch graph of at least one step, after `admit` has admitted its bytes. Raises LaunchRejected."""

    # --- waits, faults and the end ---

    def sync(self, poll: Poll = keep_waiting) -> None:
        """Wait for everything in all streams, including destroyed streams."""

    def flush_printed(self) -> None:
        """Write kernels' output to this process's standard output (host/captured_output.py). No kernel may run."""

    def watch(self, poll: Poll) -> None:
        """Count the launches that end from now on.

        Calls `poll` before each launch and while a launch waits for room. If `poll` raises, the launch is not queued.
        """

    def running(self) -> Mapping[int, int]:
        """Map each stream that is running a kernel to the number of its operations that have ended.

        May be called only after `watch`. While a stream's number does not change, it runs the same kernel.
        """

    def fault(self) -> KernelFault | None:
        """Return the pending fault, without waiting, and clear it as if it had been raised."""

    def close(self) -> None:
        """End the context normally; the process may exit right afterwards."""


class Driver(Protocol):
    """A kind of card, and the requirements of its workers."""

    @property
    def name(self) -> str:
        """The driver's name in settings: cuda or cpu."""

    def preload(self) -> None:
        """Import a context's modules, without touching a device. The zygote calls this once before it forks."""

    def needs(self) -> "SandboxNeeds":
        """Return the paths and devices that workers open inside the sandbox; called after `preload`."""

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """Return descriptors of folders in which workers, processes of user `owner`, may cache compiled code."""

    def open_context(self, card: str, slice_bytes: int) -> Context:
        """Make this process's only context on the card of that UUID. Raises DriverError."""

    def rewind(self, context: Context) -> "Opening":
        """End a warm-up. The returned `Opening` makes the context again, as if nothing had run in it.

        The caller must have released all allocations and modules. Raises DriverError.
        """

    def recycle(self, context: Context) -> "Opening":
        """Overwrite a lease's remaining data, and unpin all memory. The `Opening` makes the context again.

        The caller must have released all allocations and modules. Raises DriverError if something is left.
        """


class Opening(Protocol):
    """The last step of making a context. It needs the size of the slice."""

    def __call__(self, slice_bytes: int) -> Context:
        """Make the context. May be called only once. Raises DriverError."""


# ptxas 13.0 reads strings across line ends and without escapes. Each alternative takes linear time: a comment or string
# that is never closed ends the search, instead of being searched for again.
_MANAGED: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|(?P<managed>\.managed(?![\w$]))""", re.DOTALL
)
# A variable's name is the first word outside of comments, strings, directives and numbers.
_WORD: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|\.[\w$]+|\d[\w$]*|(?P<word>[A-Za-z_$%][\w$]*)""", re.DOTALL
)

# Names come from a tenant, so messages cut longer ones.
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
    # Nearly all images end here, after one search without the regular expression.
    if b".managed" not in ptx:
        return
    # The other alternatives match comments and strings, so that the attribute is ignored inside them.
    for match in _MANAGED.finditer(ptx):
        if match["managed"] is not None:
            line = ptx.count(b"\n", 0, match.start()) + 1
            raise managed_refused(_variable_behind(ptx, match.end()), line=line)


def _variable_behind(ptx: bytes, position: int) -> str:
    """Return the first name after an attribute: the variable's. All other words begin with a dot or a digit."""
    for match in _WORD.finditer(ptx, position):
        if match["word"] is not None:
            return match["word"].decode("ascii")
    return ""


def managed_refused(variable: str, *, line: int = 0) -> ImageRejected:
    """Return the error for an image with a managed variable."""
    name = variable[:_SHOWN_NAME_CHARACTERS]
    where = f"line {line}: " if line else ""
    reason = f"{where}the variable {name!r} is __managed__; leases do not support managed memory"
    hint = "Declare it __device__, or pass a buffer from mem_alloc to the kernel."
    return ImageRejected(reason, log=reason, line=line, hint=hint)


def cooperative_refused(kernel: str) -> LaunchRejected:
    """Return the error for the plain launch of a kernel that synchronises its grid."""
    return LaunchRejected(
        f"kernel {kernel} needs a cooperative launch because it synchronizes its whole grid",
        hint="Launch it on a card with cooperative=True, outside graphs and submits.",
    )


def too_much_shared(kernel: str, size_bytes: int, static_bytes: int, most_bytes: int) -> LaunchRejected:
    """Return the error for a launch with blocks of more than `most_bytes` of shared memory, static and dynamic."""
    return LaunchRejected(
        f"kernel {kernel}: {size_bytes} bytes of dynamic shared memory, plus {static_bytes} bytes of its "
        f"variables, exceed the {most_bytes} bytes that a block can have on this device",
        hint="Use smaller tiles or fewer stages, which need less shared memory.",
    )
