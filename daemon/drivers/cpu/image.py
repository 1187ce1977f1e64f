"""A compiled image's kernels and variables in one context (the interface's `Module` and `Kernel`)."""

import ctypes
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpulease.daemon.drivers.cpu.architecture import SM_90, Architecture
from gpulease.daemon.drivers.cpu.areas import Needs
from gpulease.daemon.drivers.cpu.arena import Arena
from gpulease.daemon.drivers.cpu.cache import LoadedCode, load_code
from gpulease.daemon.drivers.cpu.compiled import KernelFacts, ModuleVariable
from gpulease.daemon.drivers.cpu.translate.callees import FIRST_HANDLE, HANDLE_STEP
from gpulease.daemon.drivers.interface import Admit, Dim3, ImageRejected, OutOfMemory, Parameter, admit_all

# Numbers of functions in this process: a pointer to one means nothing to another module.
_HANDLES = itertools.count()


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
        pace: Host address of how long its blocks took last (native/layout.py).
        is_cooperative: Whether only a cooperative launch could run it.
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
    pace: int
    is_cooperative: bool = False
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CpuModule:
    """A loaded image and what must live as long as its kernels can run."""

    kernels: Mapping[str, CpuKernel]
    device_bytes: int
    code: LoadedCode
    variable_addresses: tuple[int, ...]
    # Keeps the table that kernels read the addresses from, and their paces.
    tables: tuple[Any, Any]
    shared_bytes: int = 0
    kept_bytes: int = 0


def load(
    image: bytes,
    arena: Arena,
    *,
    slice_bytes: int,
    first_number: int,
    admit: Admit = admit_all,
    architecture: Architecture = SM_90,
) -> CpuModule:
    """Compile and place. Raises ImageRejected; nothing is left behind then."""
    code = load_code(image, slice_bytes=slice_bytes, architecture=architecture)
    variables = code.image.variables
    device_bytes = sum(variable.size for variable in variables)
    admit(device_bytes, 0, 0)
    addresses = _place(variables, arena)
    names = [variable.name for variable in variables]
    named = dict(zip(names, addresses, strict=True))
    handles = {name: FIRST_HANDLE + HANDLE_STEP * next(_HANDLES) for name in code.image.addressed}
    _relocate(variables, named | handles, arena)
    addresses_and_handles = (*addresses, *handles.values())
    table = (ctypes.c_uint64 * max(1, len(addresses_and_handles)))(*addresses_and_handles)
    paces = (ctypes.c_uint64 * max(1, len(code.image.kernels)))()
    kernels = {
        facts.name: _kernel(
            facts,
            number=first_number + offset,
            entry=code.codes[facts.part].address(facts.symbol),
            variables=ctypes.addressof(table),
            pace=ctypes.addressof(paces) + offset * ctypes.sizeof(ctypes.c_uint64),
        )
        for offset, facts in enumerate(code.image.kernels)
    }
    return CpuModule(kernels, device_bytes, code, addresses, (table, paces))


def _place(variables: tuple[ModuleVariable, ...], arena: Arena) -> tuple[int, ...]:
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


def _relocate(variables: tuple[ModuleVariable, ...], addresses: Mapping[str, int], arena: Arena) -> None:
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


def _kernel(facts: KernelFacts, *, number: int, entry: int, variables: int, pace: int) -> CpuKernel:
    return CpuKernel(
        name=facts.name,
        number=number,
        parameters=facts.parameters,
        parameter_bytes=facts.parameter_bytes,
        max_threads_per_block=facts.max_threads_per_block,
        required_block=facts.required_block,
        static_shared_bytes=facts.static_shared_bytes,
        dynamic_shared_offset=facts.dynamic_shared_offset,
        entry=entry,
        variables=variables,
        needs=facts.needs,
        pace=pace,
        is_cooperative=facts.is_cooperative,
    )
