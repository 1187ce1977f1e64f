"""The seam between a session worker and what computes for it.

A `Driver` knows the cards of one kind; a `Context` is the one context of one worker process. A driver checks what
only it can know (is this image loadable, does this kernel fit); handles, ownership and the slice's ledger are
checked by the session before a call gets here.

Errors say what happened in words a tenant can act on; the session turns them into wire statuses.

What a launch graph is made of, for a driver: its steps, and what a driver makes of them.

Whatever can be checked without the driver was checked when a step was made (`worker.graphs`).

What no lease supports, on any driver: managed memory, and kernels that need a cooperative launch.

The driver keeps tens of MiB of a card for managed memory, which belong to no lease, until the card's last context
ends. A kernel that synchronises its grid traps unless it was launched cooperatively, and the trap costs the context.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from gpulease.daemon.sandbox.measures import Needs

Dim3 = tuple[int, int, int]


class DriverError(Exception):
    """A call the driver refused or could not finish; the context goes on.

    Attributes:
        hint: What the tenant can do about it, a sentence, or "".
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class OutOfMemory(DriverError):
    """The card could not give the bytes, though the slice would allow them."""


class ImageRejected(DriverError):
    """A module image that could not be loaded.

    Attributes:
        log: The compiler's log, or the reason with the offending line's text.
        line: 1-based line of the PTX source the log speaks of, 0 if none.
    """

    def __init__(self, message: str, *, log: str = "", line: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.log = log
        self.line = line


class LaunchRejected(DriverError):
    """A launch that was refused before the kernel began: shape, shared memory, argument bytes."""


class KernelFault(DriverError):
    """A kernel that began and failed; reported once, by the first call that can report it.

    Attributes:
        tag: The number `launch` was given for it, 0 if the driver can't tell.
        kernel: The kernel's name, "" if the driver can't tell.
        address: The faulting device address, or None.
        context_lost: True if the context can do nothing any more (CUDA's sticky errors).
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
    """One kernel parameter's place in the parameter buffer, in bytes."""

    offset: int
    size: int


class Kernel(Protocol):
    """One entry point of a loaded module."""

    @property
    def name(self) -> str:
        """The entry's name, as PTX spells it."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In declaration order."""

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter buffer `launch` takes."""

    @property
    def max_threads_per_block(self) -> int:
        """The most threads a block of this kernel may have."""

    @property
    def kept_bytes(self) -> int:
        """What the context must have set aside before this kernel runs, and keeps: the card's local memory for it."""


class Module(Protocol):
    """A loaded image."""

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """Entry points by name."""

    @property
    def device_bytes(self) -> int:
        """What its code, constants and variables take of the card until it is unloaded, rounded as the card does."""

    @property
    def shared_bytes(self) -> int:
        """How many of those lie in pages shared with other modules: the card may keep such pages until all are gone."""

    @property
    def kept_bytes(self) -> int:
        """What the context must set aside for it and then keeps. One store serves all, so the greatest counts."""


class Poll(Protocol):
    """What a waiting driver calls now and then; it raises when the wait must end."""

    def __call__(self) -> None:
        """Look once."""


def keep_waiting() -> None:
    """The `Poll` of a wait that nothing ends early."""


class Admit(Protocol):
    """What a driver asks before it loads an image; it raises ImageRejected if there is no room."""

    def __call__(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        """See `Module`, which will say the same."""


def admit_all(device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
    """The `Admit` that leaves it to the card."""


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """How native code launches in a context and asks after it, in the thread that uses the context.

    Attributes:
        state: The address that both functions get first.
        launch: Address of `int32 launch(state, record, params, params_bytes, tag)`, which queues one and gives 0, or
            does nothing and gives another number: `Context.launch` then does it, or says why not.
        query: Address of `int32 query(state)`: 0 if all that was launched has ended well and there is nothing to tell,
            1 if something runs, any other number if `Context.sync` is to find out.
        spin_ns: How long `query` is worth asking again and again.
        record: What `launch` takes for a kernel, a grid, a block and bytes of shared memory, as long as its module is
            loaded; None if that can be launched by `Context.launch` alone.
        launched: To be told which kernel native code launched last, before the context is used otherwise.
    """

    state: int
    launch: int
    query: int
    spin_ns: int
    record: Callable[[Kernel, Dim3, Dim3, int], bytes | None]
    launched: Callable[[Kernel], None]


class Ticket(Protocol):
    """A copy that was begun."""

    def is_done(self) -> bool:
        """Whether its host memory is the caller's again: it is complete, or the context is lost."""


class Context(Protocol):
    """One device context, used by one thread.

    Its streams each run in order, and beside one another where the driver can: running all of them in the order of the
    calls is allowed too. Launches and copies go into the stream that was selected last, at first into stream 0, which
    is always there; none is ordered behind another but by `stream_wait`.

    Methods that take `poll` may have to wait for launches. They call it now and then meanwhile, about every
    millisecond, and it may raise to give up the wait: nothing was done then but waiting, or, by a copy of pinned
    memory, it may yet be done.

    Every method but `launch` may raise `KernelFault` for an earlier launch. After it did, the fault is forgotten and
    the context goes on, unless `context_lost`. Launches behind a fault are skipped until it has been raised.
    """

    @property
    def page_bytes(self) -> int:
        """What the card's memory comes in: an allocation may take up to one page more than its size."""

    @property
    def rounding_bytes(self) -> int:
        """What all allocations together take of the card beyond their sizes."""

    @property
    def cached_bytes(self) -> int:
        """What the context keeps of the card beyond live allocations, for those to come."""

    def mem_alloc(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        """Device address of memory that is zero for what is queued from now on, aligned to 256 bytes.

        Args:
            size_bytes: At least 1.
            spare_bytes: How much may stay kept if more is taken of the card.
            poll: See the class; called if something kept has to be given back first.

        Raises:
            OutOfMemory: The card has not so much.
        """

    def mem_free(self, address: int, poll: Poll = keep_waiting) -> None:
        """Release an allocation, which launches queued before may still use. Takes only what mem_alloc gave."""

    def trim(self, most_bytes: int, poll: Poll = keep_waiting) -> None:
        """Give back to the card what is kept, until it is at most so many bytes."""

    def mem_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy host bytes to the device in stream order; `data` may be reused on return."""

    def mem_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """Copy device bytes to the host in stream order; complete on return."""

    def pin(self, memory: memoryview) -> None:
        """Prepare host memory that stays mapped until the process ends for many fast copies, if the driver can."""

    def write_pinned(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> None:
        """See mem_write; `data` was given to `pin` before, whole or as a part."""

    def begin_write(self, address: int, data: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """See write_pinned; may return before `data` may be reused, which the ticket tells, and any later wait."""

    def read_pinned(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        """See mem_read; `into` was given to `pin` before, whole or as a part."""

    def begin_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> Ticket:
        """See read_pinned; may return before the bytes are there, which the ticket tells, and any later wait."""

    def streams_bytes(self, count: int) -> int:
        """What so many streams at a time, beside stream 0, make the context keep of the card."""

    def stream_create(self) -> int:
        """A stream's number, at least 1; numbers may be used again. The caller keeps to MAX_STREAMS at a time."""

    def stream_destroy(self, stream: int) -> None:
        """Let go of a stream; what it holds goes on. Asks nothing of the card."""

    def stream_select(self, stream: int) -> None:
        """Launches and copies go into this stream from now on. Asks nothing of the card."""

    def stream_wait(self, stream: int, other: int) -> None:
        """What is put in `stream` later comes after what was put in `other` before; nothing is waited for here."""

    def stream_sync(self, stream: int, poll: Poll = keep_waiting) -> None:
        """Wait for what one stream holds."""

    def module_load(self, image: bytes, admit: Admit = admit_all) -> Module:
        """Load PTX text or a cubin, once `admit` was told what it will take of the card. Raises ImageRejected."""

    def forget_earlier(self) -> None:
        """From now on compile all that comes as if it were new: the time it takes must tell nobody what others load."""

    def module_unload(self, module: Module, poll: Poll = keep_waiting) -> None:
        """Release a module once everything launched before has ended."""

    def launch(self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        """Queue a launch and return. `params` is the kernel's parameter buffer, laid out. Raises LaunchRejected."""

    def set_spinning(self, *, spins: bool, yields: bool) -> None:
        """How waits look at the card: again and again for a while before they sleep; with others let in between."""

    def native(self) -> NativeLaunch | None:
        """How native code does the same, if it can; not behind `watch`."""

    def graph(self, steps: "Sequence[Step]", admit: "AdmitGraph", poll: Poll = keep_waiting) -> "Graph":
        """Make a launch graph of at least one step, once `admit` was told what it will take. Raises LaunchRejected."""

    def sync(self, poll: Poll = keep_waiting) -> None:
        """Wait for what all streams hold, destroyed ones too."""

    def watch(self, poll: Poll) -> None:
        """Keep count of launches that end from now on, and call `poll` before each launch and while one waits for room.

        `poll` may raise then; the launch was not queued.
        """

    def running(self) -> Mapping[int, int]:
        """By stream, of those that have come to a kernel which has not ended: how much of what they held has ended.

        Only after `watch`. As long as a stream's number does not change, it is the same kernel.
        """

    def fault(self) -> KernelFault | None:
        """A pending fault, without waiting; it is then forgotten as if raised."""

    def close(self) -> None:
        """End the context in good order; the process may exit right after."""


class Driver(Protocol):
    """A kind of card."""

    @property
    def name(self) -> str:
        """Which driver: cuda or cpu."""

    def preload(self) -> None:
        """Import what a context needs, without touching a device: the zygote runs this once before it forks."""

    def needs(self) -> "Needs":
        """What its workers open once they are shut in; asked behind `preload`."""

    def keep_for(self, owner: int) -> tuple[int, ...]:
        """Descriptors of folders where its workers, processes of that user, may keep what they compiled."""

    def open_context(self, card: str, slice_bytes: int) -> Context:
        """Make this process's one context on the card of that UUID. Raises DriverError."""

    def rewind(self, context: Context) -> "Opening":
        """End what a rehearsal was to this context; the result makes the context anew, as if nothing had been.

        All that was allocated and loaded must have been released. Raises DriverError.
        """

    def recycle(self, context: Context) -> "Opening":
        """The same after a lease: what the context held is overwritten, and no memory is pinned any more.

        All that was allocated and loaded must have been released. Raises DriverError if something is left.
        """


class Opening(Protocol):
    """The rest of making a context, once its slice is known."""

    def __call__(self, slice_bytes: int) -> Context:
        """Called once. Raises DriverError."""


SEGMENT_STEPS: Final = 32
"""Steps queued between two looks at the lease: so many kernels and copies may begin after its end. On a card a segment
takes some 2 us to queue, whatever it holds, so longer ones gain little."""


@dataclass(frozen=True, slots=True)
class KernelStep:
    """A launch; see `Context.launch`."""

    kernel: Kernel
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
    """A copy between the device and memory that was given to `Context.pin`: `to_device`, or from it."""

    address: int
    memory: memoryview
    to_device: bool


Step = KernelStep | DataStep | CopyStep


class AdmitGraph(Protocol):
    """What a driver asks before it makes a graph; it raises if there is no room."""

    def __call__(self, device_bytes: int) -> None:
        """See `Graph.device_bytes`."""


def admit_any(device_bytes: int) -> None:
    """The `AdmitGraph` that leaves it to the card."""


class Graph(Protocol):
    """A sequence that can be queued as a whole, again and again."""

    @property
    def device_bytes(self) -> int:
        """What it takes of the card, which keeps it for later graphs when this one goes."""

    def bind(self, step: int, params: bytes) -> None:
        """Give a KernelStep another parameter buffer; replays that were queued before keep theirs."""

    def replay(self, tag: int, poll: Poll) -> None:
        """Queue all steps in order, calling `poll` before each segment but the first; it may raise to end the replay.

        `tag` is what a fault of one of its kernels tells. A driver may have to wait before a copy, and calls `poll`
        then. Raises LaunchRejected, or KernelFault for an earlier launch; some steps may have been queued then.
        """

    def close(self) -> None:
        """Give back what it takes; replays that were queued run to their end. Never waits."""


# ptxas 13.0 reads strings over line ends and without escapes. Every alternative is linear: what is never closed ends
# the search instead of being looked for again.
_MANAGED: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|(?P<managed>\.managed(?![\w$]))""", re.DOTALL
)
_WORD: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|\.[\w$]+|\d[\w$]*|(?P<word>[A-Za-z_$%][\w$]*)""", re.DOTALL
)

_SHOWN_NAME_CHARACTERS: Final = 200


def text_of(image: bytes) -> bytes:
    """The PTX text of an image: all before its first NUL, as cuModuleLoadData and cuLinkAddData take a C string."""
    return image.partition(b"\0")[0]


def refuse_managed_text(ptx: bytes) -> None:
    """Raise ImageRejected for PTX text that declares a managed variable (PTX ISA section 11.4, `.attribute`).

    The declaration may stand anywhere, so this looks for the attribute itself, outside of comments and strings.
    """
    if b".managed" not in ptx:
        return
    for found in _MANAGED.finditer(ptx):
        if found["managed"] is not None:
            line = ptx.count(b"\n", 0, found.start()) + 1
            raise managed_refused(_variable_behind(ptx, found.end()), line=line)


def _variable_behind(ptx: bytes, position: int) -> str:
    """The first name behind an attribute: the variable's, as all else in a declaration begins with a dot or digit."""
    for found in _WORD.finditer(ptx, position):
        if found["word"] is not None:
            return found["word"].decode("ascii")
    return ""


def managed_refused(variable: str, *, line: int = 0) -> ImageRejected:
    """The error for an image with a managed variable."""
    name = variable[:_SHOWN_NAME_CHARACTERS]
    where = f"line {line}: " if line else ""
    said = f"{where}the variable {name!r} is __managed__; managed memory is not supported on a lease"
    hint = "Declare it __device__, or pass a buffer of mem_alloc to the kernel."
    return ImageRejected(said, log=said, line=line, hint=hint)


def cooperative_refused(kernel: str) -> LaunchRejected:
    """The error for the launch of a kernel that synchronises its grid."""
    why = "it synchronises its whole grid, which is not supported on a lease"
    return LaunchRejected(
        f"kernel {kernel} needs a cooperative launch: {why}",
        hint="Launch one kernel for each part between two grid synchronisations: launches of a stream run in order.",
    )
