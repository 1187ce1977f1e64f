"""The memory that a cubin will take on the card, computed from its ELF headers before the driver gets it.

The format is ELF-64 (System V ABI). The driver places the allocated sections on the card: code, constants, and
variables (.nv.global*), for which the file has no bytes. The headers give the sum of the variables' sizes in 32 bits,
even if it is larger (seen with ptxas 13.0), so the sizes of the symbols in a section count too. If a forged header
hides memory, NVML's figure shows it after the load.

The symbols also identify managed variables, which are refused. The code shows which kernels need a cooperative launch.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gpulease.daemon.drivers.cuda.memory import PAGE_BYTES, SHARING_BYTES, whole_pages
from gpulease.daemon.drivers.interface import ImageRejected, managed_refused

MAX_NAME_BYTES: Final = 32 << 10
"""Maximum length of a symbol's name, in bytes. Stops a file of symbols with endless names from being searched to its
end for each of them."""

MAX_ROWS: Final = 1 << 17
"""Maximum number of section headers of one file, of symbols, and of calls. Stops a forged file with 64 MiB of them from
costing a worker hundreds of MB. Real cubins have a few tens of thousands at most."""

MODULE_GRAIN_BYTES: Final = 64 << 10
"""The sum of a module's small sections is rounded up to this: they share pages with other modules, with gaps."""

SECTION_GRAIN_BYTES: Final = 512
"""Each small section is rounded up to a multiple of this number of bytes."""

# Layouts and constants of ELF-64, as far as they are used here.
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_CALL: Final = struct.Struct("<II")
_CLASS_64_LITTLE: Final = b"\x7fELF\x02\x01"
_CUDA: Final = 190
_SYMTAB: Final = 2
_DYNAMIC_SYMTAB: Final = 11
_CALL_GRAPH: Final = 0x70000001
_WRITABLE: Final = 1
_ALLOCATED: Final = 2
_EXECUTABLE: Final = 4
_FUNCTION: Final = 2
_SECTION_SYMBOL: Final = 3
_OBJECT: Final = 1
_MANAGED: Final = 0x04
"""Bit in a variable's st_other: the only difference between cubins with and without `__managed__` (seen with nvcc
13.0)."""

_ENTRY: Final = 0x10
"""Bit in a kernel's st_other."""

_SHARED: Final = b".nv.shared"
_DEBUGGED_SHARED: Final = b".nv_debug.shared"
"""Names of sections of shared memory, which is on the chip and not in the card's memory: `.nv.shared.KERNEL`, and in
code for a debugger also the variables of functions that several kernels call. Their flags are those of device memory
(seen with ptxas 13.0)."""

_NEEDS_NO_MEMORY: Final = frozenset({b"vprintf"})
"""The driver's own functions that do not make the context take memory."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The memory that a module takes on the card.

    Attributes:
        device_bytes: Bytes of the card that it takes while it is loaded.
        shared_bytes: The part of `device_bytes` that lies in pages shared with other modules.
        needs_driver_memory: Whether it calls the driver's own functions that make the context take more memory.
        calls_driver: Whether it calls any of the driver's own functions.
        leaves_traces: Whether its kernels may leave data that the driver keeps after the unload: in writable variables
          or, if they call the driver's functions, in its heap or print buffer.
        cooperative: Names of the kernels that seem to synchronise their grid, so that only a cooperative launch can run
          them.
        variables: Its variables in device and constant memory: the name of each, and whether kernels can write it.
    """

    device_bytes: int
    shared_bytes: int
    needs_driver_memory: bool
    calls_driver: bool
    leaves_traces: bool
    cooperative: frozenset[str] = frozenset()
    variables: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class _Section:
    """The fields of a section header that matter here."""

    name_at: int
    kind: int
    flags: int
    start: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class _Symbol:
    """A symbol; `names_section` is the string section that holds its name."""

    name_at: int
    kind: int
    other: int
    section: int
    value: int
    size: int
    names_section: _Section


@dataclass(slots=True)
class _File:
    """A cubin by its parts.

    Attributes:
        left_bytes: How many bytes of its sections may still be read. Sections of an honest file do not overlap; many
          overlapping ones would cause the same bytes to be read repeatedly.
    """

    content: bytes
    sections: list[_Section]
    names: _Section
    architecture: int
    left_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.left_bytes = len(self.content)

    def read(self, section: _Section, row_bytes: int) -> memoryview:
        """Return the complete rows of a section. Raises ValueError."""
        end = section.start + section.size
        if end > len(self.content):
            raise ValueError("a section lies outside of the file")
        # All sections together may have as many bytes as the file has.
        self.left_bytes -= section.size
        if self.left_bytes < 0:
            raise ValueError("sections overlap")
        return memoryview(self.content)[section.start : end - section.size % row_bytes]

    def text(self, strings: _Section, offset: int) -> bytes:
        """Return a string of a string section. Raises ValueError."""
        start = strings.start + offset
        return self.content[start : self.content.index(b"\0", start, start + MAX_NAME_BYTES)]

    def name_of(self, symbol: _Symbol) -> bytes:
        """Return the name of a symbol. Raises ValueError."""
        return self.text(symbol.names_section, symbol.name_at)

    def rows(self, row: struct.Struct, *kinds: int) -> Iterator[tuple[_Section, tuple[int, ...]]]:
        """Yield all rows of the sections of these kinds, in order, each with its section."""
        # Check the count before the first row is read.
        tables = [section for section in self.sections if section.kind in kinds]
        _check_count(sum(table.size // row.size for table in tables), "symbols or calls")
        for table in tables:
            for row_fields in row.iter_unpack(self.read(table, row.size)):
                yield table, row_fields

    def symbols(self) -> Iterator[_Symbol]:
        """Yield all symbols of all tables, in order."""
        for table, (name_at, info, other, index, value, size) in self.rows(_SYMBOL, _SYMTAB, _DYNAMIC_SYMTAB):
            yield _Symbol(name_at, info & 0xF, other, index, value, size, self.sections[table.link])

    def kept_name_of(self, symbol: _Symbol) -> str:
        """Return the name of a symbol, counted against `left_bytes`: forged names could share their bytes."""
        name = self.name_of(symbol)
        self.left_bytes -= len(name)
        if self.left_bytes < 0:
            raise ValueError("names overlap")
        return name.decode(errors="replace")


def _check_count(count: int, subject: str) -> None:
    if count > MAX_ROWS:
        raise ValueError(f"{count} {subject} were found; at most {MAX_ROWS} are supported")


def weigh(cubin: bytes) -> Weight:
    """Return the memory that a cubin takes.

    Raises ImageRejected if its headers can't be parsed, or for a managed variable.
    """
    try:
        return _measure(cubin, _open(cubin))
    except (struct.error, IndexError, ValueError) as error:
        raise ImageRejected(f"the cubin's headers are invalid: {error}", hint="Compile it again.") from None


def _measure(cubin: bytes, file: _File) -> Weight:
    # Step 1: read the sizes of the sections that go to the card, except those that stay on the chip, from their
    # headers.
    sizes = {
        index: section.size
        for index, section in enumerate(file.sections)
        if section.flags & _ALLOCATED and not _is_on_chip(file.text(file.names, section.name_at))
    }
    sums: dict[int, int] = {}
    symbols = list(file.symbols())
    needs_driver_memory = calls_driver = leaves_traces = False
    variables: dict[str, bool] = {}
    # Step 2: read the symbols. Refuse managed variables, note calls to the driver's functions, and correct the sizes
    # that a 32-bit header can't show.
    for symbol in symbols:
        if symbol.other & _MANAGED and symbol.kind not in (_FUNCTION, _SECTION_SYMBOL):
            raise managed_refused(file.name_of(symbol).decode(errors="replace"))
        if symbol.kind == _FUNCTION and symbol.section == 0:
            calls_driver = leaves_traces = True
            needs_driver_memory |= file.name_of(symbol) not in _NEEDS_NO_MEMORY
        elif symbol.kind == _OBJECT and (index := symbol.section) in sizes:
            sums[index] = sums.get(index, 0) + symbol.size
            sizes[index] = max(sizes[index], symbol.value + symbol.size, sums[index])
            if symbol.size:
                variables[file.kept_name_of(symbol)] = bool(file.sections[index].flags & _WRITABLE)
    leaves_traces |= any(file.sections[index].flags & _WRITABLE for index in sizes if sizes[index])
    # Step 3: add the sizes up. A large section has pages of its own. Small sections share pages, even with those of
    # other modules.
    own = sum(whole_pages(size) for size in sizes.values() if size > SHARING_BYTES)
    shared = sum(_share(size) for size in sizes.values() if size <= SHARING_BYTES)
    shared = -(-shared // MODULE_GRAIN_BYTES) * MODULE_GRAIN_BYTES
    return Weight(
        own + shared,
        shared,
        needs_driver_memory,
        calls_driver,
        leaves_traces,
        _cooperative(file, symbols),
        tuple(sorted(variables.items())),
    )


def _is_on_chip(name: bytes) -> bool:
    return name in (_SHARED, _DEBUGGED_SHARED) or name.startswith(_SHARED + b".")


def _share(size: int) -> int:
    """Return a small section's share of a page that is filled with as many sections of its size as fit."""
    grains = -(-size // SECTION_GRAIN_BYTES) * SECTION_GRAIN_BYTES
    return PAGE_BYTES // (PAGE_BYTES // grains) if grains else 0


def _open(cubin: bytes) -> _File:
    header = _HEADER.unpack_from(cubin)
    ident, table_at, row_bytes, count, names = header[0], header[6], header[11], header[12], header[13]
    # Step 1: check that it is a cubin.
    if not ident.startswith(_CLASS_64_LITTLE) or row_bytes != _SECTION.size:
        raise ValueError("it must be a 64-bit little-endian ELF file")
    if header[2] != _CUDA:
        raise ValueError(f"it must be code for a GPU ({_CUDA}), not for machine {header[2]}")
    # Step 2: read the section headers, and check every number against the file's length.
    if table_at + _SECTION.size > len(cubin):
        raise ValueError("the section headers lie outside of the file")
    if count == 0:
        # The number of sections did not fit in this field, so it is in the first section's size field.
        count = _SECTION.unpack_from(cubin, table_at)[5]
    if table_at + count * _SECTION.size > len(cubin):
        raise ValueError(f"its {len(cubin)} bytes can't hold {count} sections")
    _check_count(count, "sections")
    rows = [_SECTION.unpack_from(cubin, table_at + _SECTION.size * number) for number in range(count)]
    sections = [_Section(row[0], row[1], row[2], row[4], row[5], row[6]) for row in rows]
    # Since ABI version 8 (CUDA 13) the architecture begins at the next byte of the flags.
    architecture = header[7] >> 8 & 0xFFFF if ident[8] >= _ABI_OF_CUDA_13 else header[7] & 0xFF
    return _File(cubin, sections, sections[names if names != 0xFFFF else rows[0][6]], architecture)


# --- Cooperative launches ---
#
# nvcc's grid synchronisation takes the address of the grid's barrier from %envreg1 and %envreg2. It traps if the
# address is 0, as in any but a cooperative launch. No attribute in the file shows that, but the machine code does: it
# reads the two registers at fixed addresses of constant bank 0, and has an instruction that traps.
#
# Limit: a kernel that asks for the barrier (`is_valid()`) and traps for another reason, or after its own check, is
# refused too. For machine code compiled from PTX, the text distinguishes them (ptx/translate/cooperative.py).

_ABI_OF_CUDA_13: Final = 8

_ENVIRONMENT_AT: Final = ((100, 0x250), (90, 0x40), (0, 0x88))
"""(architecture, address): from that architecture on, %envreg0 is at that address in constant bank 0. Seen with
ptxas 13.0, sm_75 to sm_121."""

_INSTRUCTION_BYTES: Final = 16
_CONSTANT_FORMS: Final = (0x600, 0xA00)
"""Bits 9 to 11 of an instruction with an operand in a constant bank; bits 40 to 58 hold its bank and word."""

_UNIFORM_LOAD: Final = 0x7AC
"""LDCU, since sm_100; bits 37 to 58 hold its operand's bank and byte."""

_TRAP: Final = 0x95C

_MARKS: Final = 0xFFFFFFFC
"""A callee of this value or more begins a part of .nv.callgraph: -1 calls, -2 functions of which the address is
taken, -3 functions that call through a pointer, -4 functions that such calls may reach."""


def _cooperative(file: _File, symbols: list[_Symbol]) -> frozenset[str]:
    """Return the kernels with code that, including everything it calls, reads the grid's barrier and can trap."""
    # Step 1: find the sections of code that read the barrier's address, and those that can trap.
    reads, traps = set[int](), set[int]()
    for index, section in enumerate(file.sections):
        if section.flags & _EXECUTABLE and section.kind == 1:
            code = np.frombuffer(file.read(section, _INSTRUCTION_BYTES), "<u8")[::2]
            if _reads_grid_barrier(code, file.architecture):
                reads.add(index)
            if bool(np.any(code & np.uint64(0xFFF) == _TRAP)):
                traps.add(index)
    # The usual case: no kernel does both.
    if not reads or not traps:
        return frozenset()
    # Step 2: find the kernels that do both, in their own code or in the functions that they call.
    calls = _calls(file, symbols)
    reading, trapping = _callers_of(reads, calls), _callers_of(traps, calls)
    return frozenset(
        file.kept_name_of(symbol)
        for symbol in symbols
        if symbol.kind == _FUNCTION and symbol.other & _ENTRY and symbol.section in reading & trapping
    )


def _reads_grid_barrier(code: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]", architecture: int) -> bool:
    """Return whether an instruction has %envreg1 or %envreg2 as an operand. `code`: uint64, shape (instructions,)."""
    # The address depends on the architecture. Instructions are compared as arrays, because there may be millions.
    at = next(at for since, at in _ENVIRONMENT_AT if architecture >= since)
    words, bytes_ = code >> np.uint64(40) & np.uint64(0x7FFFF), code >> np.uint64(37) & np.uint64(0x3FFFFF)
    is_uniform = code & np.uint64(0xFFF) == _UNIFORM_LOAD
    has_constant = np.isin(code & np.uint64(0xE00), np.array(_CONSTANT_FORMS, "u8")) & ~is_uniform
    matches = [(has_constant & (words == place // 4)) | (is_uniform & (bytes_ == place)) for place in (at + 4, at + 8)]
    return bool(np.any(matches))


def _calls(file: _File, symbols: list[_Symbol]) -> dict[int, set[int]]:
    """Map each section of code to the sections that may call into it."""
    callers: dict[int, set[int]] = {}
    addressed, calling = set[int](), set[int]()
    # Each call graph section has parts, which special callees begin. No part continues in the next section.
    part, graph = 0, None
    for table, (caller, callee) in file.rows(_CALL, _CALL_GRAPH):
        if table is not graph:
            part, graph = 0, table
        if callee >= _MARKS:
            part = callee - (1 << 32)
        elif part == -2:
            addressed.add(symbols[caller].section)
        elif part == -3:
            calling.add(symbols[caller].section)
        else:
            callers.setdefault(symbols[callee].section, set()).add(symbols[caller].section)
    # A pointer may hold any function whose address is taken; -1 stands for all pointers.
    for section in addressed:
        callers.setdefault(section, set()).add(-1)
    callers[-1] = calling
    return callers


def _callers_of(sections: set[int], callers: dict[int, set[int]]) -> set[int]:
    """Return the sections, and all sections that call into them, directly or not."""
    found, pending = set(sections), list(sections)
    while pending:
        fresh = callers.get(pending.pop(), set()) - found
        found |= fresh
        pending.extend(fresh)
    return found
