"""What a session owns: allocations counted against the slice, modules, and the numbers a tenant knows them by.

Allocations count with the bytes asked for. What the card takes besides (rounding to pages, modules, local memory of
kernels) is on the node up to the lease's allowance, and on the slice beyond it: a tenant gets all the bytes it asked
for, and the card never gives more than was admitted.

Numbers are never reused for modules; a device pointer is one again only when the driver gives the same address. A
number another session owns is just unknown here: there is one ledger a process.

What all desks of a session work with. A desk does the operations of one kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import Context, DriverError, ImageRejected, Module
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

MAX_ALLOCATIONS: Final = 65_536
"""Most live allocations of a session. Stops a loop of one-byte allocations, each of which costs the driver far more."""

MAX_MODULES: Final = 1024
"""Most loaded modules of a session: each costs host memory, which no slice bounds."""

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


def _no_room_needed(most_bytes: int) -> None:
    """The `make_room` of a driver that keeps nothing."""


class Uses:
    """Who must be told when something goes.

    Nobody uses most of what a session has: a look at an empty map is all it costs then.
    """

    def __init__(self) -> None:
        self._users: dict[int, dict[int, Callable[[str], None]]] = {}

    def add(self, thing: int, user: int, tell: Callable[[str], None]) -> None:
        """Have `tell` called, with what it was, once `thing` goes."""
        self._users.setdefault(thing, {})[user] = tell

    def remove(self, thing: int, user: int) -> None:
        """That user is gone; again is harmless."""
        users = self._users.get(thing)
        if users is not None:
            users.pop(user, None)
            if not users:
                del self._users[thing]

    def gone(self, thing: int, what: str) -> None:
        """It went."""
        for tell in self._users.pop(thing, {}).values():
            tell(what)


class Ledger:
    """The session's allocations and modules.

    Attributes:
        used_bytes: What was allocated, as asked for.
        rounding_bytes: What the card takes of it besides; its keeper is the driver.
        make_room: Called before the card takes more, with how much may stay that is only kept for later.
        allocation_uses: Who must be told when an allocation is freed.
        module_uses: The same of modules.
    """

    def __init__(self, slice_bytes: int, allowance_bytes: int = 0, page_bytes: int = 1) -> None:
        self.slice_bytes = slice_bytes
        self.used_bytes = 0
        self.rounding_bytes = 0
        self.make_room: Callable[[int], None] = _no_room_needed
        self._allowance_bytes = allowance_bytes
        self._page_bytes = page_bytes
        self._own_bytes = 0
        self._shared_bytes = 0
        self._most_shared_bytes = 0
        self._kept_bytes = 0
        self._streams_bytes = 0
        self._graph_bytes = 0
        self._most_graph_bytes = 0
        self.allocation_uses = Uses()
        self.module_uses = Uses()
        self._allocations: dict[int, int] = {}
        self._modules: dict[int, LoadedModule] = {}
        self._image_bytes = 0
        self._last_module = 0

    @property
    def charged_bytes(self) -> int:
        """What is taken of the slice."""
        return self.used_bytes + max(0, self._besides_bytes - self._allowance_bytes)

    @property
    def room_bytes(self) -> int:
        """What may yet be taken besides allocations."""
        return self.slice_bytes + self._allowance_bytes - self.used_bytes - self._besides_bytes

    @property
    def _besides_bytes(self) -> int:
        # Pages that modules share are charged at their most: one small module keeps a whole page from going back.
        modules_bytes = self._own_bytes + self._most_shared_bytes
        # So is what graphs take: the driver keeps it for the next ones.
        graphs_bytes = -(-self._most_graph_bytes // self._page_bytes) * self._page_bytes
        return self.rounding_bytes + modules_bytes + self._kept_bytes + self._streams_bytes + graphs_bytes

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
        free_bytes = self.slice_bytes - self.charged_bytes
        if size_bytes > free_bytes or size_bytes + -size_bytes % self._page_bytes > self.room_bytes:
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"{size_bytes} bytes were asked for; {free_bytes} of the slice's {self.slice_bytes} bytes are free",
                    hint="Free something, or acquire a lease with more min_vram.",
                )
            )

    def spare_bytes_beside(self, size_bytes: int) -> int:
        """What of the card may be kept unused while an allocation that was checked takes its pages."""
        return self.room_bytes - size_bytes - -size_bytes % self._page_bytes

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
        self.allocation_uses.gone(handle, f"the allocation {handle:#x}, which is freed")

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

    def check_module(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        """Raises ImageRejected unless there is room for a module that takes so much of the card.

        What `make_room` raises, too.
        """
        more_bytes = device_bytes - shared_bytes + max(0, kept_bytes - self._kept_bytes)
        more_bytes += max(0, self._shared_bytes + shared_bytes - self._most_shared_bytes)
        if more_bytes > max(0, self.room_bytes):
            raise ImageRejected(
                f"the module takes {more_bytes} bytes of the card for code, variables and what its system calls need; "
                f"the slice has room for {max(0, self.room_bytes)}",
                hint="Free something, make its variables smaller, or acquire a lease with more min_vram.",
            )
        self.make_room(self.room_bytes - more_bytes)

    def check_graph(self, device_bytes: int) -> None:
        """Raises Refused unless there is room for a graph that takes so much of the card."""
        more_bytes = self._graph_bytes + device_bytes - self._most_graph_bytes
        if more_bytes > max(0, self.room_bytes):
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"the graph takes {more_bytes} bytes of the card; the slice has room for {max(0, self.room_bytes)}",
                    hint="Close other graphs, free something, or acquire a lease with more min_vram.",
                )
            )
        self.make_room(self.room_bytes - max(0, more_bytes))

    def add_graph(self, device_bytes: int) -> None:
        """The driver made it."""
        self._graph_bytes += device_bytes
        self._most_graph_bytes = max(self._most_graph_bytes, self._graph_bytes)

    def remove_graph(self, device_bytes: int) -> None:
        """It is gone; what it took is there for the next one."""
        self._graph_bytes -= device_bytes

    @property
    def keeps_for_good(self) -> bool:
        """Whether the context keeps something until its end: for streams, graphs, or kernels' local memory and heap."""
        return bool(self._kept_bytes or self._streams_bytes or self._most_graph_bytes)

    def modules(self) -> list[tuple[int, Module]]:
        """All that are loaded, with their numbers."""
        return [(number, loaded.module) for number, loaded in self._modules.items()]

    def allocations(self) -> list[int]:
        """All live allocations."""
        return list(self._allocations)

    @property
    def kept_bytes(self) -> int:
        """What the context keeps besides allocations and modules."""
        return self._kept_bytes

    def keep_again(self, kept_bytes: int) -> None:
        """What was to be kept beyond that was not taken."""
        self._kept_bytes = kept_bytes

    def keep(self, kept_bytes: int) -> None:
        """Have the context keep so many bytes in all besides allocations and modules.

        Raises DriverError if there is no room, and what `make_room` raises.
        """
        more_bytes = kept_bytes - self._kept_bytes
        if more_bytes > max(0, self.room_bytes):
            raise DriverError(
                f"{more_bytes} bytes of the card would be set aside for local memory and the device's heap, for every "
                f"thread the card can hold; the slice has room for {max(0, self.room_bytes)}",
                hint="Use less local memory (arrays in kernels, deep stacks), or acquire a lease with more min_vram.",
            )
        if more_bytes > 0:
            self.make_room(self.room_bytes - more_bytes)
        self._kept_bytes = max(self._kept_bytes, kept_bytes)

    def keep_streams(self, streams_bytes: int) -> None:
        """Have the context keep so many bytes in all for streams: none goes back. Raises Refused."""
        more_bytes = streams_bytes - self._streams_bytes
        if more_bytes > max(0, self.room_bytes):
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"one more stream takes {more_bytes} bytes of the card; the slice has room for "
                    f"{max(0, self.room_bytes)}",
                    hint="Free something, use fewer streams, or acquire a lease with more min_vram.",
                )
            )
        self._streams_bytes = max(self._streams_bytes, streams_bytes)

    def add_module(self, module: Module, image_bytes: int) -> int:
        """A number for a loaded module."""
        self._own_bytes += module.device_bytes - module.shared_bytes
        self._shared_bytes += module.shared_bytes
        self._most_shared_bytes = max(self._most_shared_bytes, self._shared_bytes)
        self._kept_bytes = max(self._kept_bytes, module.kept_bytes)
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
        loaded = self._modules.pop(number)
        self.module_uses.gone(number, f"module {number}, which is unloaded")
        self._image_bytes -= loaded.image_bytes
        self._own_bytes -= loaded.module.device_bytes - loaded.module.shared_bytes
        self._shared_bytes -= loaded.module.shared_bytes
        if not self._modules:
            self._most_shared_bytes = 0

    def _size_of(self, handle: int) -> int:
        size_bytes = self._allocations.get(handle)
        if size_bytes is None:
            raise invalid_handle(f"{handle:#x} is not a live allocation of this session")
        return size_bytes


# Plain integers, as in `taking`.
_COPIES: Final = int(Counter.COPIES)
_COPIED_BYTES: Final = int(Counter.COPIED_BYTES)


@dataclass(slots=True, eq=False)
class SessionResources:
    """What a session has, for its desks.

    Attributes:
        count: Called when what the session holds has changed.
        check_lease: The look at the lease, for whatever takes long; raises once it is over.
        counters: The control page's.
        may_have_grown: The context was made to do what can take memory of the card by itself; whoever looks resets it.
    """

    ledger: Ledger
    context: Context
    count: Callable[[], None]
    check_lease: Callable[[], None]
    counters: memoryview
    may_have_grown: bool = False


class Operations:
    """Each public method that takes a frame does one operation and gives its reply.

    They raise BodyError, Refused, DriverError, and what the look at the lease raises.
    """

    def __init__(self, holdings: SessionResources) -> None:
        self._holdings = holdings
        self._ledger = holdings.ledger
        self._context = holdings.context
        self._count = holdings.count
        self._check_lease = holdings.check_lease
        self._counters = holdings.counters

    def _count_copy(self, size_bytes: int) -> None:
        self._counters[_COPIES] += 1
        self._counters[_COPIED_BYTES] += size_bytes
