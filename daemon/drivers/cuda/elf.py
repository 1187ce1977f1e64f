"""What a cubin will take of the card, read from its ELF headers before the driver sees it (ELF-64, System V ABI).

Allocated sections are what is placed on the card: code, constants, and variables (.nv.global*), for which the file has
no bytes. The headers' sizes of those have 32 bits only, whatever their variables sum up to (seen with ptxas 13.0), so
the symbols in a section count too. Whatever a forged header hides shows in NVML's figure after the load.
"""

import struct
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.drivers.cuda.pages import PAGE_BYTES, SHARING_BYTES, whole_pages
from gpulease.daemon.drivers.interface import ImageRejected

MODULE_GRAIN_BYTES: Final = 64 << 10
"""A module counts as a multiple of this: its small parts lie in pages shared with other modules, with gaps."""

SECTION_GRAIN_BYTES: Final = 512
"""The same for one small section."""

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_CLASS_64_LITTLE: Final = b"\x7fELF\x02\x01"
_SYMTAB: Final = 2
_WRITABLE: Final = 1
_ALLOCATED: Final = 2
_OBJECT: Final = 1
_FUNCTION: Final = 2
_ON_CHIP: Final = b".nv.shared"
_FREE_OF_CHARGE: Final = frozenset({b"vprintf"})


@dataclass(frozen=True, slots=True)
class Weight:
    """What a module takes.

    Attributes:
        device_bytes: Of the card, for as long as it is loaded.
        shared_bytes: How many of those lie in pages shared with other modules.
        has_system_calls: Whether it calls functions of the driver's own that make the context grow.
        leaves_traces: Whether kernels may leave something in what the driver keeps when it is unloaded: in variables,
            or by the driver's own functions, in the heap or what is printed.
    """

    device_bytes: int
    shared_bytes: int
    has_system_calls: bool
    leaves_traces: bool


@dataclass(frozen=True, slots=True)
class _Section:
    """A section header's fields that matter here."""

    name_at: int
    kind: int
    flags: int
    start: int
    size: int
    link: int


def weigh(cubin: bytes) -> Weight:
    """What a cubin takes. Raises ImageRejected if its headers can't be followed."""
    try:
        return _weigh(cubin)
    except (struct.error, IndexError, ValueError) as error:
        raise ImageRejected(f"the cubin's headers can't be followed: {error}", hint="Compile it again.") from None


def _weigh(cubin: bytes) -> Weight:
    sections, names = _sections(cubin)
    sizes = {
        index: section.size
        for index, section in enumerate(sections)
        if section.flags & _ALLOCATED and not _text(cubin, names, section.name_at).startswith(_ON_CHIP)
    }
    sums: dict[int, int] = {}
    has_system_calls = leaves_traces = False
    for table in sections:
        if table.kind != _SYMTAB:
            continue
        strings = sections[table.link]
        symbols = _bytes_of(cubin, table)
        for name_at, info, _, index, value, size in _SYMBOL.iter_unpack(symbols):
            if info & 0xF == _FUNCTION and index == 0:
                leaves_traces = True
                has_system_calls |= _text(cubin, strings, name_at) not in _FREE_OF_CHARGE
            elif info & 0xF == _OBJECT and index in sizes:
                sums[index] = sums.get(index, 0) + size
                sizes[index] = max(sizes[index], value + size, sums[index])
    leaves_traces |= any(sections[index].flags & _WRITABLE for index in sizes if sizes[index])
    own = sum(whole_pages(size) for size in sizes.values() if size > SHARING_BYTES)
    shared = sum(_share(size) for size in sizes.values() if size <= SHARING_BYTES)
    shared = -(-shared // MODULE_GRAIN_BYTES) * MODULE_GRAIN_BYTES
    return Weight(own + shared, shared, has_system_calls, leaves_traces)


def _share(size: int) -> int:
    """What a small section takes of a page, in which as many of its size lie as fit whole."""
    grains = -(-size // SECTION_GRAIN_BYTES) * SECTION_GRAIN_BYTES
    return PAGE_BYTES // (PAGE_BYTES // grains) if grains else 0


def _sections(cubin: bytes) -> tuple[list[_Section], _Section]:
    header = _HEADER.unpack_from(cubin)
    ident, table_at, row_bytes, count, names = header[0], header[6], header[11], header[12], header[13]
    if not ident.startswith(_CLASS_64_LITTLE) or row_bytes != _SECTION.size:
        raise ValueError("it is no 64-bit little-endian ELF file")
    if table_at + _SECTION.size > len(cubin):
        raise ValueError("the section headers lie outside of the file")
    if count == 0:
        # More sections than the field can tell: the first one's size does.
        count = _SECTION.unpack_from(cubin, table_at)[5]
    if table_at + count * _SECTION.size > len(cubin):
        raise ValueError(f"{count} sections in {len(cubin)} bytes")
    rows = [_SECTION.unpack_from(cubin, table_at + _SECTION.size * number) for number in range(count)]
    sections = [_Section(row[0], row[1], row[2], row[4], row[5], row[6]) for row in rows]
    return sections, sections[names if names != 0xFFFF else rows[0][6]]


def _bytes_of(cubin: bytes, section: _Section) -> memoryview:
    end = section.start + section.size
    if end > len(cubin):
        raise ValueError("a section lies outside of the file")
    return memoryview(cubin)[section.start : end - section.size % _SYMBOL.size]


def _text(cubin: bytes, strings: _Section, offset: int) -> bytes:
    start = strings.start + offset
    return cubin[start : cubin.index(b"\0", start)]
