"""Translates an image, caches its code, and loads it into a context (the interface's `Module` and `Kernel`).

An image is checked as a whole when it is loaded. Launches of a kernel that can't be translated fail with the reason. If
no kernel can be translated, the image is rejected.

Kernels are compiled at their first launch (kernel_code.py). Compiled code has no addresses of the process: it calls
functions by name, and finds variables in a table that each launch names. So other processes can use it too
(`daemon/native/code_cache.py`).
"""

import ctypes
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from typing import Any, NamedTuple

import msgpack

from gpulease.daemon import ptx
from gpulease.daemon.drivers.interface import (
    AdmitModule,
    Dim3,
    Figures,
    ImageRejected,
    OutOfMemory,
    Parameter,
    admit_all,
    refuse_managed_text,
    text_of,
)
from gpulease.daemon.native.code_cache import keep, key_of, read_kept
from gpulease.daemon.ptx.architecture import SM_90, Architecture
from gpulease.daemon.ptx.kernel_code import PartCode, PartSource
from gpulease.daemon.ptx.limits import (
    MAX_FIRST_CODE_THREADS,
    MAX_HELD_CODE_BYTES,
    MAX_IMAGE_BYTES,
    MAX_SHARED_BYTES,
    MAX_THREADS_PER_BLOCK,
    rejected,
)
from gpulease.daemon.ptx.memory import KernelNeeds, MemoryArena
from gpulease.daemon.ptx.native.library import bind_library
from gpulease.daemon.ptx.native.structures import KernelRunning
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.parse.syntax import Function, Image, Relocation
from gpulease.daemon.ptx.translate.call_graph import link
from gpulease.daemon.ptx.translate.callees import FIRST_HANDLE, HANDLE_STEP
from gpulease.daemon.ptx.translate.cooperative import cooperative_kernels
from gpulease.daemon.ptx.translate.module import ModulePart, translate
from gpulease.protocol.fast_dataclass import dataclass

# The first four bytes of binary images, which only a card accepts.
_BINARY_MAGICS = {b"\x7fELF": "a cubin", b"\x50\xed\x55\xba": "a fatbin"}


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The facts about one kernel that are needed to load it.

    They are plain values, which can be stored for other processes.

    Attributes:
        required_block: The block's shape by the kernel's .reqntid; None if it has none.
        static_shared_bytes: Bytes of shared memory of the kernel's variables.
        dynamic_shared_offset: The offset of the shared memory that a launch requests, in bytes.
        part: Index of the image's part that has the kernel's code.
        symbol: The name of the kernel's function in that part.
        is_cooperative: Whether the kernel needs a cooperative launch (`cooperative_refused`).
        needs: The memory of a block of the kernel besides shared memory.
        refusal: Why the kernel can't be translated, and what to do; None if it can. `symbol` and `needs` are then
            empty.
    """

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int
    required_block: Dim3 | None
    static_shared_bytes: int
    dynamic_shared_offset: int
    part: int
    symbol: str
    is_cooperative: bool
    refusal: tuple[str, str] | None
    needs: KernelNeeds


@dataclass(frozen=True, slots=True)
class ModuleVariable:
    """A variable of the module: its initial value, and the places in it that get addresses when it is loaded."""

    name: str
    size: int
    initial: bytes
    relocations: tuple[Relocation, ...]


@dataclass(frozen=True, slots=True)
class TranslatedImage:
    """A translated image, in the form that is stored for other processes.

    Attributes:
        addressed: The functions whose addresses kernels take.
        parts: The sources from which kernels are compiled.
    """

    kernels: tuple[KernelFacts, ...]
    variables: tuple[ModuleVariable, ...]
    addressed: tuple[str, ...]
    parts: tuple[PartSource, ...]

    def to_bytes(self) -> bytes:
        """Serialise for the cache. Raises OverflowError for a number of more than 64 bits."""
        data: bytes = msgpack.packb(astuple(self))
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "TranslatedImage":
        """Read the result of this version's `to_bytes`. Raises ValueError or TypeError for other bytes."""
        # msgpack returns nested tuples in the order of the fields.
        kernels, variables, addressed, parts = msgpack.unpackb(data, use_list=False)
        return cls(
            tuple(map(_kernel_from, kernels)),
            tuple(
                ModuleVariable(name, size, initial, tuple(Relocation(*entry) for entry in relocations))
                for name, size, initial, relocations in variables
            ),
            addressed,
            tuple(PartSource(*fields) for fields in parts),
        )


def _kernel_from(fields: Any) -> KernelFacts:
    name, parameters, *rest, needs = fields
    values = [name, tuple(Parameter(*p) for p in parameters), *rest, KernelNeeds(*needs)]
    return KernelFacts(*values)


def translate_image(
    image: bytes, *, slice_bytes: int, architecture: Architecture = SM_90, shuffle: int | None = None
) -> TranslatedImage:
    """Parse and translate. Raises ImageRejected if no kernel of the image could run."""
    # Parse the text, and find the functions and shared variables that each kernel uses.
    tree = link(parse(_decode(image), architecture))
    variables = tuple(ModuleVariable(v.name, v.size, v.initial, v.relocations) for v in tree.variables)
    # Check the size before the translation, which takes long.
    check_size(variables, slice_bytes)
    parts = translate(tree, shuffle)
    sources = tuple(PartSource.of(part.text, part.effort, is_once=part.is_once) for part in parts)
    return TranslatedImage(_kernels(tree, parts), variables, tuple(tree.addressed or ()), sources)


def check_size(variables: tuple[ModuleVariable, ...], slice_bytes: int) -> None:
    """Raise ImageRejected if a module's variables can't all fit a slice."""
    size_bytes = sum(variable.size for variable in variables)
    if size_bytes > slice_bytes:
        raise ImageRejected(f"the module's variables take {size_bytes} bytes, the slice has {slice_bytes}")


def _decode(image: bytes) -> str:
    """Return the PTX text. Raises ImageRejected for a binary, and for text that is too long or not UTF-8."""
    # A binary would run on a card, so its error has a hint.
    kind = _BINARY_MAGICS.get(image[:4])
    if kind is not None:
        raise ImageRejected(
            f"this image is {kind}: the embedded driver takes PTX text only",
            hint="Compile with nvcc -ptx.",
        )
    if len(image) > MAX_IMAGE_BYTES:
        raise ImageRejected(f"{len(image)} bytes of PTX are more than {MAX_IMAGE_BYTES}")
    # PTX from a C string ends with null bytes. Managed variables, which need a card's page faults, are rejected.
    text = text_of(image)
    refuse_managed_text(text)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise rejected("the image must be PTX text in UTF-8", line=line) from None


def _kernels(tree: Image, parts: list[ModulePart]) -> tuple[KernelFacts, ...]:
    places = {name: (n, symbol) for n, part in enumerate(parts) for name, symbol in part.runners.items()}
    needs = {name: needed for part in parts for name, needed in part.needs.items()}
    # A kernel can't run if its largest block does not fit into an area.
    for function in tree.functions:
        if function.name in needs and not needs[function.name].fit(_max_threads(function)):
            reason = f"a block of {_max_threads(function)} threads keeps more than there is room for"
            tree.refusals[function.name] = rejected(reason, line=function.line)
    # Raises if no kernel is left.
    tree.check()
    cooperative = cooperative_kernels(tree)
    return tuple(
        _facts(
            function,
            needs.get(function.name, _NO_NEEDS),
            *places.get(function.name, (0, "")),
            is_cooperative=function.name in cooperative,
            refusal=tree.refusals.get(function.name),
        )
        for function in tree.functions
    )


_NO_NEEDS = KernelNeeds(0, 0, 0, 0, parks=False)


def _max_threads(function: Function) -> int:
    return min(function.bounds.max_threads or MAX_THREADS_PER_BLOCK, MAX_THREADS_PER_BLOCK)


def _facts(
    function: Function,
    needs: KernelNeeds,
    part: int,
    symbol: str,
    *,
    is_cooperative: bool,
    refusal: ImageRejected | None,
) -> KernelFacts:
    return KernelFacts(
        name=function.name,
        parameters=tuple(Parameter(p.offset, p.size) for p in function.parameters),
        parameter_bytes=function.parameter_bytes,
        max_threads_per_block=_max_threads(function),
        required_block=function.bounds.required,
        static_shared_bytes=function.shared_bytes,
        dynamic_shared_offset=function.dynamic_shared_offset,
        part=part,
        symbol=symbol,
        is_cooperative=is_cooperative,
        refusal=None if refusal is None else (str(refusal), refusal.hint),
        needs=needs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCode:
    """A translated image, and the code of each of its parts in this process."""

    image: TranslatedImage
    codes: tuple[PartCode, ...]

    @property
    def size_bytes(self) -> int:
        return sum(code.size_bytes for code in self.codes)


# The code in this process by key, the most recently used last.
_cached_code: OrderedDict[bytes, LoadedCode] = OrderedDict()


def ready_to_look_up() -> None:
    """Read this driver's own sources, from which keys are computed, before a worker's sandbox hides them."""
    key_of(b"image", b"", ptx)


def load_code(
    image: bytes, *, slice_bytes: int, architecture: Architecture = SM_90, shuffle: int | None = None
) -> LoadedCode:
    """Return an image's code, translated now or earlier for this architecture and order. Raises ImageRejected."""
    # The key has the architecture, which decides which images are rejected, and the seed, which is compiled into the
    # code.
    key = key_of(f"image for {architecture}, shuffled by {shuffle}".encode(), image, ptx)
    code = _cached_code.get(key)
    if code is None:
        bind_library()
        translated = _kept_image(key)
        if translated is None:
            translated = translate_image(image, slice_bytes=slice_bytes, architecture=architecture, shuffle=shuffle)
            _keep(key, translated)
        code = _cached_code[key] = LoadedCode(translated, tuple(map(PartCode, translated.parts)))
        drop_oldest_code()
    _cached_code.move_to_end(key)
    # The code may have been translated for a lease with a larger slice.
    check_size(code.image.variables, slice_bytes)
    return code


def forget_code() -> None:
    """Drop all cached code. Loaded modules keep their own."""
    _cached_code.clear()


def _kept_image(key: bytes) -> TranslatedImage | None:
    data = read_kept(key)
    if data is None:
        return None
    try:
        return TranslatedImage.from_bytes(data)
    except (ValueError, TypeError):
        return None


def _keep(key: bytes, translated: TranslatedImage) -> None:
    # An image with a constant of more than 64 bits, which no compiler writes, is not stored.
    with suppress(OverflowError):
        keep(key, translated.to_bytes())


def drop_oldest_code() -> None:
    """Drop the least recently used code until the cache is within its limit. Loaded modules keep their own."""
    total = sum(code.size_bytes for code in _cached_code.values())
    while total > MAX_HELD_CODE_BYTES and len(_cached_code) > 1:
        _, dropped = _cached_code.popitem(last=False)
        total -= dropped.size_bytes


class _Handles:
    """Handles of functions. They are unique in this process, so no module can use another module's."""

    def __init__(self) -> None:
        self._next = FIRST_HANDLE

    def take(self) -> int:
        self._next += HANDLE_STEP
        return self._next - HANDLE_STEP

    def keep_free(self, handle: int) -> None:
        """Do not assign this handle, which a module from another process has."""
        self._next = max(self._next, handle + HANDLE_STEP)


_HANDLES = _Handles()


class ModulePlace(NamedTuple):
    """Addresses of a module's variables and handles of its functions, which the tenant's data may contain.

    Attributes:
        first_number: The number of its first kernel.
    """

    addresses: tuple[int, ...]
    handles: tuple[int, ...]
    first_number: int

    def to_numbers(self) -> tuple[int, ...]:
        return (self.first_number, len(self.addresses), *self.addresses, *self.handles)

    @classmethod
    def from_numbers(cls, numbers: tuple[int, ...]) -> "ModulePlace":
        first_number, count, *rest = numbers
        return cls(tuple(rest[:count]), tuple(rest[count:]), first_number)


@dataclass(frozen=True, slots=True, eq=False)
class CpuKernel:
    """The embedded driver's `Kernel` (drivers/interface.py).

    Attributes:
        number: Its number among all kernels that the context has loaded so far, for fault records.
        required_block: The block that its .reqntid demands, or None.
        static_shared_bytes: Shared memory that its variables take.
        dynamic_shared_offset: The offset of the shared memory that a launch requests, in bytes.
        code: The code of its part, with its runner, the function that runs blocks.
        symbol: The runner's name in that code.
        variables: The host address of its module's table of variables.
        needs: The memory that a block of the kernel takes.
        running: The state of its execution, which native code reads and writes.
        running_at: The host address of `running`.
        is_cooperative: Whether only a cooperative launch could run it.
        refusal: Why it can't run and what to do, or None.
    """

    name: str
    number: int
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int
    required_block: Dim3 | None
    static_shared_bytes: int
    dynamic_shared_offset: int
    code: PartCode
    symbol: str
    variables: int
    needs: KernelNeeds
    running: KernelRunning
    running_at: int
    is_cooperative: bool = False
    refusal: tuple[str, str] | None = None
    kept_bytes: int = 0

    @property
    def is_due(self) -> bool:
        """Return whether its first code has run so long that the kernel should be optimised (`DriverKernel.is_due`)."""
        return int(self.running.first_code_ns) < 0

    def entry_for(self, threads: int) -> int:
        """Return the host address of its runner for a launch of this many threads. Raises LaunchRejected.

        The kernel is compiled before its first launch. It is optimised before a launch of many threads, or after its
        first code has run for long.
        """
        running = self.running
        left_ns = running.first_code_ns
        is_large = threads >= MAX_FIRST_CODE_THREADS
        if running.entry == 0 or left_ns < 0 or (left_ns and is_large):
            running.entry = self.code.address(self.symbol, is_hot=left_ns < 0 or is_large)
            running.first_code_ns = 0 if self.code.is_optimised else self.code.first_code_ns
        return int(running.entry)

    def figures(self) -> Figures:
        """Return the shared memory of its variables, the maximum that a launch may add, and its local memory."""
        return Figures(
            self.static_shared_bytes,
            MAX_SHARED_BYTES - self.dynamic_shared_offset,
            local_bytes=self.needs.local_bytes_per_thread,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CpuModule:
    """A loaded image, and the objects that its kernels need while they can run."""

    kernels: Mapping[str, CpuKernel]
    device_bytes: int
    code: LoadedCode
    variable_addresses: tuple[int, ...]
    place: ModulePlace
    # Owns the memory of the variables' table, which native code reads.
    table: Any
    shared_bytes: int = 0
    kept_bytes: int = 0

    def variable(self, name: str) -> tuple[int, int]:
        """Return a variable's address and size; (0, 0) if no variable has that name."""
        for variable, address in zip(self.code.image.variables, self.variable_addresses, strict=True):
            if variable.name == name:
                return address, variable.size
        return 0, 0


def load(
    image: bytes,
    arena: MemoryArena,
    *,
    slice_bytes: int,
    first_number: int,
    admit: AdmitModule = admit_all,
    architecture: Architecture = SM_90,
    shuffle: int | None = None,
    place: ModulePlace | None = None,
) -> CpuModule:
    """Translate an image and allocate its variables. Raises ImageRejected, and then frees all memory.

    `place` describes a module of another context. Its variables are already in the arena, and the image must match it.
    """
    # Step 1: get the code, perhaps from the cache, and have the caller admit the module's memory.
    code = load_code(image, slice_bytes=slice_bytes, architecture=architecture, shuffle=shuffle)
    variables = code.image.variables
    device_bytes = sum(variable.size for variable in variables)
    admit(device_bytes, 0, 0)
    addresses = _place(variables, arena) if place is None else place.addresses
    handles = _handles_of(code, place)
    # Step 2: write the addresses of variables and the handles of functions into the initial values.
    names = [variable.name for variable in variables]
    address_of = dict(zip(names, addresses, strict=True))
    if place is None:
        _relocate(variables, address_of | handles, arena)
    addresses_and_handles = (*addresses, *handles.values())
    # Step 3: create the table in which compiled code finds addresses and handles, in the order of the translation.
    table = (ctypes.c_uint64 * max(1, len(addresses_and_handles)))(*addresses_and_handles)
    # Step 4: create a kernel for each entry point.
    kernels = {
        facts.name: _kernel(
            facts,
            number=first_number + offset,
            code=code.codes[facts.part],
            variables=ctypes.addressof(table),
        )
        for offset, facts in enumerate(code.image.kernels)
    }
    module_place = ModulePlace(addresses, tuple(handles.values()), first_number)
    return CpuModule(kernels, device_bytes, code, addresses, module_place, table)


def _handles_of(code: LoadedCode, place: ModulePlace | None) -> dict[str, int]:
    """Return the handle of each function that kernels point to. Raises ImageRejected if `place` has others."""
    if place is None:
        return {name: _HANDLES.take() for name in code.image.addressed}
    if len(place.handles) != len(code.image.addressed) or len(place.addresses) != len(code.image.variables):
        raise ImageRejected("the module has other variables and functions than it had")
    for handle in place.handles:
        _HANDLES.keep_free(handle)
    return dict(zip(code.image.addressed, place.handles, strict=True))


def _place(variables: tuple[ModuleVariable, ...], arena: MemoryArena) -> tuple[int, ...]:
    """Allocate each variable and write its initial value. An empty variable gets the address 0."""
    addresses: list[int] = []
    try:
        for variable in variables:
            addresses.append(arena.allocate(variable.size) if variable.size else 0)
            if variable.initial:
                arena.bytes_at(addresses[-1], len(variable.initial))[:] = variable.initial
    except OutOfMemory as error:
        release(addresses, arena)
        raise ImageRejected(f"no memory for the module's variables: {error}") from None
    return tuple(addresses)


def _relocate(variables: tuple[ModuleVariable, ...], addresses: Mapping[str, int], arena: MemoryArena) -> None:
    """Write the addresses that initial values contain (PTX ISA section 5.4, "Initializers")."""
    for variable in variables:
        for relocation in variable.relocations:
            # The parser converts a mask operator to a shift. A symbol without an address gives 0.
            value = (addresses.get(relocation.symbol, 0) + relocation.addend) >> relocation.shift
            place = addresses[variable.name] + relocation.offset
            size = relocation.size
            arena.bytes_at(place, size)[:] = (value & (2 ** (8 * size) - 1)).to_bytes(size, "little")


def release(addresses: "list[int] | tuple[int, ...]", arena: MemoryArena) -> None:
    for address in addresses:
        if address:
            arena.free(address)


def _kernel(facts: KernelFacts, *, number: int, code: PartCode, variables: int) -> CpuKernel:
    running = KernelRunning()
    return CpuKernel(
        name=facts.name,
        number=number,
        parameters=facts.parameters,
        parameter_bytes=facts.parameter_bytes,
        max_threads_per_block=facts.max_threads_per_block,
        required_block=facts.required_block,
        static_shared_bytes=facts.static_shared_bytes,
        dynamic_shared_offset=facts.dynamic_shared_offset,
        code=code,
        symbol=facts.symbol,
        variables=variables,
        needs=facts.needs,
        running=running,
        running_at=ctypes.addressof(running),
        is_cooperative=facts.is_cooperative,
        refusal=facts.refusal,
    )
