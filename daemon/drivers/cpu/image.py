"""An image's bytes to a loaded module (the interface's `Module` and `Kernel`)."""

import ctypes
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpulease.daemon.drivers.cpu.areas import Needs
from gpulease.daemon.drivers.cpu.arena import Arena
from gpulease.daemon.drivers.cpu.limits import MAX_IMAGE_BYTES, MAX_THREADS_PER_BLOCK
from gpulease.daemon.drivers.cpu.native.compiler import BadIr, NativeCode, compile_ir
from gpulease.daemon.drivers.cpu.ptx.parser import parse
from gpulease.daemon.drivers.cpu.ptx.syntax import Function, Variable
from gpulease.daemon.drivers.cpu.rejection import rejected
from gpulease.daemon.drivers.cpu.translate.callees import FIRST_HANDLE, HANDLE_STEP
from gpulease.daemon.drivers.cpu.translate.linking import link
from gpulease.daemon.drivers.cpu.translate.module import translate
from gpulease.daemon.drivers.interface import Admit, Dim3, ImageRejected, OutOfMemory, Parameter, admit_all

# Numbers of functions in this process: a pointer to one means nothing to another module.
_HANDLES = itertools.count()

_BINARY_MAGICS = {b"\x7fELF": "a cubin", b"\x50\xed\x55\xba": "a fatbin"}


@dataclass(frozen=True, slots=True, eq=False)
class CpuKernel:
    """One entry point.

    Attributes:
        number: Its place among all kernels the context ever loaded, for fault reports.
        required_block: The block its .reqntid demands, or None.
        static_shared_bytes: Shared memory its variables take.
        dynamic_shared_offset: Where shared memory asked for at launch begins.
        entry: Host address of its runner.
        variables: Host address of its module's table of variables.
        needs: What a block of it takes.
    """

    name: str
    number: int
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int
    required_block: Dim3 | None
    static_shared_bytes: int
    dynamic_shared_offset: int
    entry: int
    variables: int
    needs: Needs
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CpuModule:
    """A loaded image and what must live as long as its kernels can run."""

    kernels: Mapping[str, CpuKernel]
    device_bytes: int
    codes: tuple[NativeCode, ...]
    variable_addresses: tuple[int, ...]
    # Keeps the table that kernels read the addresses from.
    variable_table: Any
    shared_bytes: int = 0
    kept_bytes: int = 0


def load(image: bytes, arena: Arena, *, slice_bytes: int, first_number: int, admit: Admit = admit_all) -> CpuModule:
    """Parse, translate, compile and place. Raises ImageRejected; nothing is left behind then."""
    tree = link(parse(_decode(image)))
    wanted = sum(variable.size for variable in tree.variables)
    if wanted > slice_bytes:
        raise ImageRejected(f"the module's variables take {wanted} bytes, the slice has {slice_bytes}")
    admit(wanted, 0, 0)
    parts = translate(tree)
    try:
        codes = tuple(compile_ir(part.text, is_optimised=part.is_optimised) for part in parts)
    except BadIr as error:
        raise ImageRejected("the embedded driver failed to translate this image", log=str(error)) from None
    entries = {
        name: code.address(runner)
        for part, code in zip(parts, codes, strict=True)
        for name, runner in part.runners.items()
    }
    needs = {name: found for part in parts for name, found in part.needs.items()}
    addresses = _place(tree.variables, arena)
    names = [variable.name for variable in tree.variables]
    named = dict(zip(names, addresses, strict=True))
    handles = {name: FIRST_HANDLE + HANDLE_STEP * next(_HANDLES) for name in tree.addressed or ()}
    _relocate(tree.variables, named | handles, arena)
    addresses_and_handles = (*addresses, *handles.values())
    table = (ctypes.c_uint64 * max(1, len(addresses_and_handles)))(*addresses_and_handles)
    kernels = {
        function.name: _kernel(
            function,
            number=first_number + offset,
            entry=entries[function.name],
            variables=ctypes.addressof(table),
            needs=needs[function.name],
        )
        for offset, function in enumerate(tree.functions)
    }
    return CpuModule(kernels, wanted, codes, addresses, table)


def _decode(image: bytes) -> str:
    """The PTX text, or a refusal of what is none."""
    kind = _BINARY_MAGICS.get(image[:4])
    if kind is not None:
        raise ImageRejected(
            f"this image is {kind}: the embedded driver takes PTX text only",
            hint="Compile with nvcc -ptx.",
        )
    if len(image) > MAX_IMAGE_BYTES:
        raise ImageRejected(f"{len(image)} bytes of PTX are more than {MAX_IMAGE_BYTES}")
    try:
        # The driver API takes C strings: zeros behind the text belong to them.
        return image.rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError as error:
        line = image.count(b"\n", 0, error.start) + 1
        raise rejected("this is no text", line=line) from None


def _place(variables: tuple[Variable, ...], arena: Arena) -> tuple[int, ...]:
    """Give each variable its memory and first value; those without bytes get the null address."""
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


def _relocate(variables: tuple[Variable, ...], addresses: Mapping[str, int], arena: Arena) -> None:
    """Write the addresses that initialisers name."""
    for variable in variables:
        for relocation in variable.relocations:
            value = (addresses.get(relocation.symbol, 0) + relocation.addend) >> relocation.shift
            place = addresses[variable.name] + relocation.offset
            size = relocation.size
            arena.bytes_at(place, size)[:] = (value & (2 ** (8 * size) - 1)).to_bytes(size, "little")


def release(addresses: "list[int] | tuple[int, ...]", arena: Arena) -> None:
    """Take variables' memory back."""
    for address in addresses:
        if address:
            arena.free(address)


def _kernel(function: Function, *, number: int, entry: int, variables: int, needs: Needs) -> CpuKernel:
    return CpuKernel(
        name=function.name,
        number=number,
        parameters=tuple(Parameter(p.offset, p.size) for p in function.parameters),
        parameter_bytes=function.parameter_bytes,
        max_threads_per_block=min(function.bounds.max_threads or MAX_THREADS_PER_BLOCK, MAX_THREADS_PER_BLOCK),
        required_block=function.bounds.required,
        static_shared_bytes=function.shared_bytes,
        dynamic_shared_offset=function.dynamic_shared_offset,
        entry=entry,
        variables=variables,
        needs=needs,
    )
