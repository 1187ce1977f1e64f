"""A session's ledger: its allocations, regions, modules, graphs and streams, and the bytes of the slice that they take.

An allocation is charged to the slice with the number of bytes that the tenant asked for. The card uses more than that:
for rounding to pages, for modules, for the local memory of kernels. Up to `allowance_bytes` of this is charged to the
node, and the rest to the slice. While it is within the allowance, a tenant can therefore allocate all the bytes of its
slice. In any case the session never takes more of the card than the broker admitted.

A module's handle is never used again. A device pointer becomes valid again only when the driver returns the same
address again. Handles of other sessions are unknown here, because each process has one ledger.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Final

from gpulease.daemon.drivers.interface import DriverError, DriverModule, ImageRejected
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.native.allocation_records import AllocationRecords
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Status

MAX_ALLOCATIONS: Final = 65_536
"""Limit on the live allocations of a session. Stops a loop of one-byte allocations, each of which costs the driver
far more than a byte."""

MAX_MODULES: Final = 1024
"""Limit on the modules that are loaded in a session. Each costs host memory, which no slice bounds."""

MAX_IMAGE_BYTES: Final = 256 << 20
"""Limit on the bytes of all images that are loaded in a session at one time. They cost host memory, too."""


def invalid_handle(message: str) -> Refused:
    """Return the refusal of a handle that does not belong to this session, or of a range outside the allocation."""
    return Refused(
        Failure(
            Status.INVALID_HANDLE, message, hint="Use handles that this session returned and that you have not freed."
        )
    )


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A module, its image's size, its holder, and the addresses of the variables that the tenant has looked up."""

    module: DriverModule
    image_bytes: int
    holder: Holder
    variables: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ChargedRegion:
    """A region: the bytes of the slice that it takes now, its size, and the check before a copy or a graph uses it.

    Attributes:
        check: Raises Refused unless the region is active.
    """

    charged_bytes: int
    size_bytes: int
    check: Callable[[], None]
    has_ended: bool = False


def _keep_all(most_bytes: int) -> None: ...


class Dependents:
    """Callbacks of objects that must be notified when an allocation, a region or a module is released.

    Most objects have no dependents; then the only cost is a lookup in an empty map.

    Args:
        on_add: Called with the handle of each object that gets a dependent.
    """

    def __init__(self, on_add: Callable[[int], None] = lambda handle: None) -> None:
        self._on_add = on_add
        self._callbacks: dict[int, dict[int, Callable[[str], None]]] = {}

    def __contains__(self, handle: int) -> bool:
        return handle in self._callbacks

    def add(self, handle: int, dependent: int, on_release: Callable[[str], None]) -> None:
        """Call `on_release`, with a description of `handle`, when `handle` is released."""
        self._callbacks.setdefault(handle, {})[dependent] = on_release
        self._on_add(handle)

    def remove(self, handle: int, dependent: int) -> None:
        """Forget a dependent; an unknown one is ignored."""
        callbacks = self._callbacks.get(handle)
        if callbacks is not None:
            callbacks.pop(dependent, None)
            if not callbacks:
                del self._callbacks[handle]

    def released(self, handle: int, reason: str) -> None:
        """Call all dependents of a released object, and forget them."""
        for on_release in self._callbacks.pop(handle, {}).values():
            on_release(reason)


class Ledger:
    """A session's allocations, regions and modules, and the bytes that these, graphs and streams take.

    Args:
        slice_bytes: Size of the lease's slice of the card.
        allowance_bytes: Bytes that the card may take in addition to allocations before the slice is charged.
        page_bytes: The card's page size.

    Attributes:
        used_bytes: Sum of all live allocations, each with the bytes that the tenant asked for.
        rounding_bytes: Bytes that the card takes beyond `used_bytes` because it rounds sizes up; SessionResources sets
          it to the driver's figure.
        make_room: Called before the card takes more memory, with the number of bytes that the driver may keep cached.
        records: The allocations for which native code serves copies.
        holder: The holder of objects made now: that of the connection that is being served.
        allocation_dependents: Callbacks for the freeing of an allocation, by its handle.
        module_dependents: Callbacks for the unloading of a module, by its number.
    """

    def __init__(self, slice_bytes: int, allowance_bytes: int = 0, page_bytes: int = 1) -> None:
        self.slice_bytes = slice_bytes
        self.used_bytes = 0
        self.rounding_bytes = 0
        self.make_room: Callable[[int], None] = _keep_all
        self._allowance_bytes = allowance_bytes
        self._page_bytes = page_bytes
        # Modules: bytes in separate pages, bytes in shared pages, and the maximum of the shared bytes so far.
        self._own_bytes = 0
        self._shared_bytes = 0
        self._most_shared_bytes = 0
        # Bytes that the context keeps until its end: for kernels and their system calls, for streams, for graphs.
        self._kept_bytes = 0
        self._streams_bytes = 0
        self._graph_bytes = 0
        self._most_graph_bytes = 0
        self.records = AllocationRecords()
        self.holder = Holder()
        self.allocation_dependents = Dependents(on_add=self.records.hide)
        self.module_dependents = Dependents()
        # By address: the sizes of allocations, and their holders.
        self._allocations: dict[int, int] = {}
        self._holders: dict[int, Holder] = {}
        # By address: the sizes of modules' variables, which are charged with their modules.
        self._variables: dict[int, int] = {}
        # By address: the regions.
        self._regions: dict[int, ChargedRegion] = {}
        self._modules: dict[int, LoadedModule] = {}
        self._image_bytes = 0
        self._last_module = 0

    @property
    def charged_bytes(self) -> int:
        # Only what exceeds the allowance is charged to the slice.
        return self.used_bytes + max(0, self._overhead_bytes - self._allowance_bytes)

    @property
    def room_bytes(self) -> int:
        """Bytes that the card may still take beyond the allocations; negative if it has taken too much."""
        return self.slice_bytes + self._allowance_bytes - self.used_bytes - self._overhead_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes charged to the slice outside the pages of allocations and regions. Parking does not move them."""
        return max(0, self._overhead_bytes - self.rounding_bytes - self._allowance_bytes)

    @property
    def _overhead_bytes(self) -> int:
        # Charge shared pages at their maximum, because one small module keeps a whole page from being released.
        modules_bytes = self._own_bytes + self._most_shared_bytes
        # Charge graphs at their maximum, too: the driver keeps a destroyed graph's memory for the next graphs.
        graphs_bytes = -(-self._most_graph_bytes // self._page_bytes) * self._page_bytes
        return self.rounding_bytes + modules_bytes + self._kept_bytes + self._streams_bytes + graphs_bytes

    def check_alloc(self, size_bytes: int) -> None:
        """Raise Refused unless the slice has room for `size_bytes` more."""
        if size_bytes == 0:
            raise Refused(Failure(Status.ALLOC_FAILED, "0 bytes can't be allocated", hint="Request at least 1 byte."))
        if len(self._allocations) >= MAX_ALLOCATIONS:
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"the session has {MAX_ALLOCATIONS} allocations, the maximum",
                    hint="Free some, or allocate fewer but larger ones.",
                )
            )
        # Check both bounds: the bytes that are reported to the tenant as free, and whole pages on the card.
        free_bytes = self.slice_bytes - self.charged_bytes
        if size_bytes > free_bytes or size_bytes + -size_bytes % self._page_bytes > self.room_bytes:
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"{size_bytes} bytes were requested; {free_bytes} of the slice's {self.slice_bytes} bytes are free",
                    hint="Free something, or acquire a lease with more min_vram.",
                )
            )

    def cacheable_bytes(self, size_bytes: int) -> int:
        """Return the most bytes of the card that may stay cached while a checked allocation takes its pages."""
        return self.room_bytes - size_bytes - -size_bytes % self._page_bytes

    def add_allocation(self, address: int, size_bytes: int) -> None:
        """Record an allocation that the driver made."""
        self._allocations[address] = size_bytes
        self._holders[address] = holder = self.holder
        holder.count(size_bytes)
        self.used_bytes += size_bytes

    def locate(self, handle: int, offset: int, length: int) -> int:
        """Return the device address of a range inside an allocation or an active region. Raises Refused."""
        size_bytes = self._size_of(handle)
        if offset + length > size_bytes:
            raise invalid_handle(
                f"bytes {offset} to {offset + length} are outside the allocation {handle:#x} of {size_bytes} bytes"
            )
        return handle + offset

    def check_allocation(self, handle: int) -> None:
        """Raise Refused unless the handle is a live allocation or an active region."""
        self._size_of(handle)

    def check_free(self, handle: int) -> None:
        """Raise Refused unless the handle is an allocation that the tenant may free."""
        # Addresses of regions and variables are handles, too, but MEM_FREE does not release them.
        if handle in self._regions:
            raise Refused(
                Failure(
                    Status.INVALID_HANDLE,
                    f"{handle:#x} is a region, not an allocation",
                    hint="Free a region by its lease id.",
                )
            )
        if handle in self._variables:
            raise Refused(
                Failure(
                    Status.INVALID_HANDLE,
                    f"{handle:#x} is a module's variable, not an allocation",
                    hint="It is freed with its module.",
                )
            )
        self._size_of(handle)

    def show(self, handle: int) -> None:
        """Let native code serve copies of an allocation. Copies of regions and variables are served by Python."""
        size_bytes = self._allocations.get(handle)
        if size_bytes is not None:
            self.records.show(handle, size_bytes, is_reusable=handle not in self.allocation_dependents)

    def remove_allocation(self, handle: int) -> None:
        """Record that the driver freed an allocation, and call its dependents."""
        # Before anything else, native code must stop serving the handle.
        self.records.hide(handle)
        self._freed(handle)
        size_bytes = self._allocations.pop(handle)
        self._holders.pop(handle).count(-size_bytes)
        self.used_bytes -= size_bytes

    def reuse_allocation(self, handle: int) -> int:
        """Record that an allocation was freed and replaced by one of the same size; return that size in bytes.

        Native code does the same for an allocation without dependents, where the holder stays the same.
        """
        self._freed(handle)
        return self._allocations[handle]

    def allocations_of(self, holder: Holder) -> list[int]:
        """Return the handles of all allocations of a holder."""
        return [handle for handle, owner in self._holders.items() if owner is holder]

    def holder_of(self, handle: int) -> Holder | None:
        """Return an allocation's holder; None if no allocation has that handle."""
        return self._holders.get(handle)

    def hand_over(self, handle: int, holder: Holder) -> None:
        size_bytes = self._allocations[handle]
        self._holders[handle].count(-size_bytes)
        self._holders[handle] = holder
        holder.count(size_bytes)

    def size_of(self, handle: int) -> int | None:
        """Return the size of an allocation; None if no allocation has that handle."""
        return self._allocations.get(handle)

    def _freed(self, handle: int) -> None:
        self.allocation_dependents.released(handle, f"the allocation {handle:#x}, which was freed")

    # --- regions ---

    def add_region(self, address: int, size_bytes: int, check: Callable[[], None]) -> None:
        """Record a region that the driver mapped; see `ChargedRegion`."""
        self._regions[address] = ChargedRegion(size_bytes, size_bytes, check)
        self.used_bytes += size_bytes

    def void_region(self, address: int, reason: str) -> None:
        """Notify a region's dependents that its end begins."""
        self.allocation_dependents.released(address, reason)

    def end_region(self, address: int, kept_bytes: int) -> None:
        """Record that a region's memory was released to the card. `kept_bytes` stay mapped in its place."""
        region = self._regions[address]
        # Only `kept_bytes` stay charged; the rest is back on the card.
        self.used_bytes += kept_bytes - region.charged_bytes
        region.charged_bytes = kept_bytes
        region.has_ended = True

    def has_ended(self, address: int) -> bool:
        """Return whether a region's memory was released."""
        return self._regions[address].has_ended

    def region_bytes(self, address: int) -> int:
        """Return the bytes of the slice that a region takes now."""
        return self._regions[address].charged_bytes

    def remove_region(self, address: int) -> None:
        """Record that the last bytes of an ended region were released."""
        self.used_bytes -= self._regions.pop(address).charged_bytes

    def check_load(self, image_bytes: int) -> None:
        """Raise Refused unless the session may load one more module, from an image of that size."""
        if len(self._modules) >= MAX_MODULES or self._image_bytes + image_bytes > MAX_IMAGE_BYTES:
            raise Refused(
                Failure(
                    Status.LOAD_FAILED,
                    f"the session has {len(self._modules)} modules with images of {self._image_bytes} "
                    f"bytes in total; at most {MAX_MODULES} modules and {MAX_IMAGE_BYTES} bytes are "
                    "allowed",
                    hint="Unload modules that are no longer needed.",
                )
            )

    def check_module(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        """Raise ImageRejected unless there is room for a module that takes these bytes of the card.

        Also raises the errors of `make_room`. The bytes are those of `DriverModule`.
        """
        # Count only bytes that are not charged yet: the module's own pages, new shared pages, new kept memory.
        more_bytes = device_bytes - shared_bytes + max(0, kept_bytes - self._kept_bytes)
        more_bytes += max(0, self._shared_bytes + shared_bytes - self._most_shared_bytes)
        if more_bytes > max(0, self.room_bytes):
            raise ImageRejected(
                f"the module needs {more_bytes} bytes on the card for code, variables and its system "
                f"calls; the slice has room for {max(0, self.room_bytes)}",
                hint="Free something, make its variables smaller, or acquire a lease with more min_vram.",
            )
        # Memory that the ledger counts as free may be in the driver's cache, so have the driver release it first.
        self.make_room(self.room_bytes - more_bytes)

    def check_graph(self, device_bytes: int) -> None:
        """Raise Refused unless there is room for a graph that takes `device_bytes` of the card."""
        # Only what exceeds the maximum so far takes more memory of the card.
        more_bytes = self._graph_bytes + device_bytes - self._most_graph_bytes
        if more_bytes > max(0, self.room_bytes):
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"the graph needs {more_bytes} bytes on the card; the slice has room for {max(0, self.room_bytes)}",
                    hint="Close other graphs, free something, or acquire a lease with more min_vram.",
                )
            )
        self.make_room(self.room_bytes - max(0, more_bytes))

    def allows(self, device_bytes: int) -> bool:
        """Return whether the card may take `device_bytes` more for graphs without any charge to the slice."""
        pages_bytes = -(-device_bytes // self._page_bytes) * self._page_bytes
        return self._overhead_bytes + pages_bytes <= self._allowance_bytes

    def add_graph(self, device_bytes: int) -> None:
        self._graph_bytes += device_bytes
        self._most_graph_bytes = max(self._most_graph_bytes, self._graph_bytes)

    def remove_graph(self, device_bytes: int) -> None:
        """Record that a graph was destroyed. The driver keeps its bytes for the next one."""
        self._graph_bytes -= device_bytes

    @property
    def keeps_for_good(self) -> bool:
        """Return whether the context keeps memory until its end, for streams, graphs, or kernels' memory and heap."""
        return bool(self._kept_bytes or self._streams_bytes or self._most_graph_bytes)

    def allocations_held(self) -> list[tuple[int, int, Holder]]:
        """Return address, size and holder of each live allocation."""
        return [(address, size, self._holders[address]) for address, size in self._allocations.items()]

    def loaded(self) -> list[tuple[int, LoadedModule]]:
        """Return all loaded modules, each with its number, in the order in which they were loaded."""
        return list(self._modules.items())

    @property
    def last_module(self) -> int:
        """The highest number that a module ever had."""
        return self._last_module

    def restore_module(self, number: int, module: DriverModule, image_bytes: int, variables: dict[int, int]) -> None:
        """Record a module that a session brought from another process, and its variables' sizes by their addresses."""
        self._last_module = number - 1
        self.add_module(module, image_bytes)
        for address, size_bytes in variables.items():
            self.add_variable(number, address, size_bytes)

    def restore_last_module(self, number: int) -> None:
        """Set the highest number that a module had in another process, so that no number is given out twice."""
        self._last_module = max(self._last_module, number)

    def variable_size(self, address: int) -> int:
        return self._variables[address]

    def modules(self) -> list[tuple[int, DriverModule]]:
        """Return all loaded modules, each with its number."""
        return [(number, loaded.module) for number, loaded in self._modules.items()]

    def has_module(self, number: int) -> bool:
        """Return whether a module of that number is loaded."""
        return number in self._modules

    def modules_of(self, holder: Holder) -> list[int]:
        """Return the numbers of all modules of a holder."""
        return [number for number, loaded in self._modules.items() if loaded.holder is holder]

    def allocations(self) -> list[int]:
        """Return the handles of all live allocations."""
        return list(self._allocations)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the context keeps for kernels: their local memory, and the heap of their system calls."""
        return self._kept_bytes

    def restore_kept(self, kept_bytes: int) -> None:
        """Undo a charge: the context has taken only `kept_bytes`."""
        self._kept_bytes = kept_bytes

    def charge_kept(self, kept_bytes: int) -> None:
        """Charge `kept_bytes`, all the memory that the context keeps for kernels.

        Raises DriverError if it does not fit, and the errors of `make_room`.
        """
        more_bytes = kept_bytes - self._kept_bytes
        if more_bytes > max(0, self.room_bytes):
            raise DriverError(
                f"{more_bytes} bytes on the card would be reserved for local memory and the device's "
                "heap, for every thread that the card can run at once; the slice has room for "
                f"{max(0, self.room_bytes)}",
                hint="Use less local memory (arrays in kernels, deep stacks), or acquire a lease with more min_vram.",
            )
        # Each kernel's figure is a total, so charge only the difference to the largest total so far.
        if more_bytes > 0:
            self.make_room(self.room_bytes - more_bytes)
        self._kept_bytes = max(self._kept_bytes, kept_bytes)

    def charge_streams(self, streams_bytes: int) -> None:
        """Charge `streams_bytes`, all the memory that the context keeps for streams and never releases.

        Raises Refused.
        """
        more_bytes = streams_bytes - self._streams_bytes
        if more_bytes > max(0, self.room_bytes):
            raise Refused(
                Failure(
                    Status.ALLOC_FAILED,
                    f"another stream needs {more_bytes} bytes on the card; the slice has room for "
                    f"{max(0, self.room_bytes)}",
                    hint="Free something, use fewer streams, or acquire a lease with more min_vram.",
                )
            )
        self._streams_bytes = max(self._streams_bytes, streams_bytes)

    def add_module(self, module: DriverModule, image_bytes: int) -> int:
        """Record a module that the driver loaded; return its number."""
        self._own_bytes += module.device_bytes - module.shared_bytes
        self._shared_bytes += module.shared_bytes
        self._most_shared_bytes = max(self._most_shared_bytes, self._shared_bytes)
        self._kept_bytes = max(self._kept_bytes, module.kept_bytes)
        self._last_module += 1
        self._modules[self._last_module] = LoadedModule(module, image_bytes, self.holder)
        self._image_bytes += image_bytes
        return self._last_module

    def module(self, number: int) -> DriverModule:
        """Return the loaded module of that number. Raises Refused."""
        loaded = self._modules.get(number)
        if loaded is None:
            raise invalid_handle(f"{number} is not a loaded module of this session")
        return loaded.module

    def add_variable(self, number: int, address: int, size_bytes: int) -> None:
        """Record the address of a module's variable: copies and graphs may name it until the module is unloaded."""
        self._modules[number].variables.add(address)
        self._variables[address] = size_bytes

    def remove_module(self, number: int) -> None:
        """Record that the driver unloaded a module, and call its dependents."""
        loaded = self._modules.pop(number)
        # A module's variables end with it; graphs that copy to them become void.
        for address in loaded.variables:
            del self._variables[address]
            self.allocation_dependents.released(address, f"the variable {address:#x} of an unloaded module")
        self.module_dependents.released(number, f"module {number}, which was unloaded")
        self._image_bytes -= loaded.image_bytes
        self._own_bytes -= loaded.module.device_bytes - loaded.module.shared_bytes
        self._shared_bytes -= loaded.module.shared_bytes
        # The driver releases the shared pages only with the last module.
        if not self._modules:
            self._most_shared_bytes = 0

    def _size_of(self, handle: int) -> int:
        # Look up the most frequent kind first. No size is 0, so `or` looks in the variables if no allocation has this
        # handle.
        size_bytes = self._allocations.get(handle) or self._variables.get(handle)
        if size_bytes is None:
            region = self._regions.get(handle)
            if region is not None:
                region.check()
                return region.size_bytes
            raise invalid_handle(f"{handle:#x} is not a live allocation of this session")
        return size_bytes
