"""Cubins, made here: headers, sections and symbols as ptxas writes them, and as an attacker would."""

import contextlib
import struct
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.cuda.cubin_footprint import MAX_ROWS, MODULE_GRAIN_BYTES, weigh
from gpulease.daemon.drivers.interface import ImageRejected

IMAGES = Path(__file__).parents[1] / "images"
MIB = 1 << 20
PROGBITS, SYMTAB, NOBITS, ALLOCATED, OBJECT, FUNCTION = 1, 2, 8, 2, 1, 2


@dataclass
class Section:
    """One to be written; those with a size but no content have no bytes in the file."""

    name: str
    kind: int
    flags: int
    size: int
    content: bytes = b""
    link: int = 0


@dataclass
class Symbol:
    name: str
    kind: int
    section: int
    value: int
    size: int
    other: int = 0


def cubin(*sections: Section, symbols: tuple[Symbol, ...] = ()) -> bytes:
    """Sections are numbered from 1; behind them come the strings and the symbols."""
    texts = b"\0"
    places: dict[str, int] = {}
    for name in dict.fromkeys([section.name for section in sections] + [symbol.name for symbol in symbols]):
        places[name] = len(texts)
        texts += name.encode() + b"\0"
    rows = b"".join(
        struct.pack("<IBBHQQ", places[s.name], s.kind, s.other, s.section, s.value, s.size) for s in symbols
    )
    strings_at = len(sections) + 1
    all_sections = [
        Section("", 0, 0, 0),
        *sections,
        Section("", 3, 0, len(texts), texts),
        Section("", SYMTAB, 0, len(rows), rows, strings_at),
    ]
    body = b""
    headers = b""
    for section in all_sections:
        start = 64 + len(body)
        body += section.content
        name_at = places.get(section.name, 0)
        headers += struct.pack(
            "<IIQQQQIIQQ", name_at, section.kind, section.flags, 0, start, section.size, section.link, 0, 1, 0
        )
    ident = b"\x7fELF\x02\x01".ljust(16, b"\0")
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(all_sections), strings_at
    )
    return head + body + headers


CODE = Section(".text.k", PROGBITS, ALLOCATED | 4, 384, bytes(384))


def in_grains(size: int) -> int:
    return -(-size // MODULE_GRAIN_BYTES) * MODULE_GRAIN_BYTES


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sections", "taken"),
    [
        ((CODE,), in_grains(384)),
        ((CODE, Section(".debug_frame", PROGBITS, 0, 9 * MIB)), in_grains(384)),
        ((CODE, Section(".nv.shared.k", NOBITS, 3, 200 << 10)), in_grains(384)),
        ((CODE, Section(".nv_debug.shared", NOBITS, 3, 200 << 10)), in_grains(384)),
        # Only a part of a name that has no dot after it, as a hostile file may have.
        ((CODE, Section(".nv.shared_k", NOBITS, 3, 42 * MIB)), 42 * MIB + in_grains(384)),
        ((CODE, Section(".nv.global", NOBITS, 3, MIB)), in_grains(MIB + 512)),
        # Two of these fill a page of 2 MiB, with a gap.
        ((CODE, Section(".nv.global", NOBITS, 3, 700_000)), in_grains(MIB + 512)),
        ((CODE, Section(".nv.global", NOBITS, 3, 40 * MIB + 1)), 42 * MIB + in_grains(512)),
        ((CODE, Section(".nv.constant3", PROGBITS, 2, 65536, bytes(65536))), in_grains(65536 + 512)),
    ],
)
def test_what_is_placed_on_the_card_counts(sections: tuple[Section, ...], taken: int) -> None:
    weight = weigh(cubin(*sections))
    assert weight.device_bytes == taken
    assert weight.device_bytes - weight.shared_bytes in (0, 42 * MIB)


def test_sizes_beyond_the_headers_32_bits_are_the_symbols() -> None:
    """As ptxas writes 41 GiB of variables: the section says 1 GiB."""
    symbols = (Symbol("small", OBJECT, 2, 0, 77), Symbol("big", OBJECT, 2, 80, 41 << 30))
    image = cubin(CODE, Section(".nv.global", NOBITS, 3, (80 + (41 << 30)) % (1 << 32)), symbols=symbols)
    assert weigh(image).device_bytes >= 41 << 30
    wrapped = (Symbol("one", OBJECT, 2, 0, 4 << 30), Symbol("two", OBJECT, 2, 0, 4 << 30))
    assert weigh(cubin(CODE, Section(".nv.global", NOBITS, 3, 0), symbols=wrapped)).device_bytes >= 8 << 30


def test_shared_memory_in_code_for_a_debugger_is_no_variable() -> None:
    """As ptxas -g writes the shared array of a device function: a session with such a module can leave its process."""
    shared, sums = Section(".nv_debug.shared", NOBITS, 3, 0x480), Symbol("sums", OBJECT, 2, 0x400, 128)
    kept = Symbol("kept", OBJECT, 3, 0, 4)
    image = cubin(CODE, shared, Section(".nv.global", NOBITS, 3, 4), symbols=(sums, kept))
    assert weigh(image).variables == (("kept", True),)


@pytest.mark.parametrize(("name", "found"), [("malloc", True), ("__assertfail", True), ("vprintf", False)])
def test_calls_that_need_driver_memory_are_found(name: str, found: bool) -> None:
    undefined, defined = Symbol(name, FUNCTION | 1 << 4, 0, 0, 0), Symbol("k", FUNCTION | 1 << 4, 1, 0, 384)
    weight = weigh(cubin(CODE, symbols=(undefined, defined)))
    assert (weight.needs_driver_memory, weight.calls_driver) == (found, True)


@pytest.mark.exhaustive
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_weighed_or_refused(data: st.DataObject) -> None:
    image = bytearray(cubin(CODE, symbols=(Symbol("malloc", FUNCTION, 0, 0, 0),)))
    for _ in range(data.draw(st.integers(1, 6))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    # Anything else that is raised would end the worker.
    with contextlib.suppress(ImageRejected):
        assert weigh(bytes(image[: data.draw(st.integers(0, len(image)))])).device_bytes >= 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("image", "leaves"),
    [
        (cubin(CODE), False),
        (cubin(CODE, Section(".nv.constant3", PROGBITS, 2, 64, bytes(64))), False),
        (cubin(CODE, Section(".nv.shared.k", NOBITS, 3, 200 << 10)), False),
        (cubin(CODE, Section(".nv_debug.shared", NOBITS, 3, 4), symbols=(Symbol("x", OBJECT, 2, 0, 4),)), False),
        (cubin(CODE, Section(".nv.global", NOBITS, 3, 4)), True),
        (cubin(CODE, Section(".nv.global", NOBITS, 3, 0), symbols=(Symbol("x", OBJECT, 2, 0, 4),)), True),
        (cubin(CODE, Section(".nv.global.init", PROGBITS, 3, 4, bytes(4))), True),
        (cubin(CODE, symbols=(Symbol("vprintf", FUNCTION, 0, 0, 0),)), True),
        (cubin(CODE, symbols=(Symbol("k", FUNCTION, 1, 0, 384),)), False),
    ],
)
def test_what_kernels_can_leave_in_what_the_driver_keeps(image: bytes, leaves: bool) -> None:
    assert weigh(image).leaves_traces is leaves


@pytest.mark.parametrize("name", ["managed.sm75.cubin", "managed.sm90.cubin"])
def test_a_managed_variable_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ImageRejected, match="'counter' is __managed__"):
        weigh((IMAGES / name).read_bytes())


@pytest.mark.parametrize(("kind", "section"), [(OBJECT, 2), (0, 2), (OBJECT | 1 << 4, 0), (5, 2)])
def test_a_managed_symbol_of_any_kind_is_refused(kind: int, section: int) -> None:
    variables = Section(".nv.global", NOBITS, 3, 4)
    weigh(cubin(CODE, variables, symbols=(Symbol("m", kind, section, 0, 4),)))
    with pytest.raises(ImageRejected, match="'m' is __managed__"):
        weigh(cubin(CODE, variables, symbols=(Symbol("m", kind, section, 0, 4, other=0x04),)))


@pytest.mark.parametrize(
    "name",
    [
        *(f"launches.sm{architecture}.cubin" for architecture in (75, 80, 90, 100)),
        # Functions in sections of their own, named by the call graph.
        "launches.parts.sm90.cubin",
    ],
)
def test_kernels_that_synchronise_their_grid_are_told_from_others(name: str) -> None:
    found = weigh((IMAGES / name).read_bytes()).cooperative
    assert found == {"grid_sync", "grid_sync_in_call", "grid_sync_behind_pointer"}


def test_code_of_another_machine_is_no_cubin() -> None:
    image = bytearray(cubin(CODE))
    image[18:20] = (62).to_bytes(2, "little")
    with pytest.raises(ImageRejected, match="machine 62"):
        weigh(bytes(image))


def test_the_same_bytes_are_not_read_again_for_each_of_many_sections() -> None:
    """A file of 1 MiB whose 8,000 sections of code are the same half of it would be 260 million instructions."""
    image = bytearray(cubin(CODE, *[Section("", PROGBITS, ALLOCATED | 4, 1 << 19)] * 8_000))
    image += bytes(1 << 20)
    with pytest.raises(ImageRejected, match="overlap"):
        weigh(bytes(image))


CALL_GRAPH = 0x70000001
READS_AND_TRAPS = Section(
    ".text.k", PROGBITS, ALLOCATED | 4, 32, struct.pack("<4Q", 0x600 | 0x8C // 4 << 40, 0, 0x95C, 0)
)
K = Symbol("k", FUNCTION, 1, 0, 32, other=0x10)


def headers_of(count: int) -> bytes:
    """A file whose first section header says there are that many, most of them empty."""
    image = bytearray(cubin(CODE))
    (table_at,) = struct.unpack_from("<Q", image, 40)
    struct.pack_into("<Q", image, table_at + 32, count)
    struct.pack_into("<H", image, 60, 0)
    return bytes(image.ljust(table_at + 64 * count, b"\0"))


def rows_of(kind: int, row_bytes: int, count: int) -> bytes:
    return cubin(READS_AND_TRAPS, Section("", kind, 0, row_bytes * count, bytes(row_bytes * count)), symbols=(K,))


@pytest.mark.parametrize(
    "image",
    [headers_of(MAX_ROWS + 1), rows_of(SYMTAB, 24, MAX_ROWS + 1), rows_of(CALL_GRAPH, 8, MAX_ROWS + 1)],
    ids=["sections", "symbols", "calls"],
)
def test_more_rows_than_real_cubins_have_are_refused_before_they_are_kept(image: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ImageRejected, match=f"were found; at most {MAX_ROWS}"):
            weigh(image)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_that_share_their_bytes_are_not_kept_for_each_of_many_kernels() -> None:
    """A file of a few hundred KB could have thousands of kernels whose names end alike, each of them 32 KB."""
    assert weigh(cubin(READS_AND_TRAPS, symbols=(K,))).cooperative == {"k"}
    with pytest.raises(ImageRejected, match="names overlap"):
        weigh(cubin(READS_AND_TRAPS, symbols=(replace(K, name="k" * 16_000),) * 100))


def test_a_name_that_never_ends_is_refused() -> None:
    image = cubin(CODE, symbols=(Symbol("m" * (64 << 10), OBJECT, 1, 0, 4, other=0x04),))
    with pytest.raises(ImageRejected, match="headers are invalid"):
        weigh(image)


@given(st.sampled_from(["launches.parts.sm90.cubin", "managed.sm75.cubin"]), st.data())
@settings(max_examples=60, deadline=None)
def test_real_cubins_with_any_bytes_changed_are_weighed_or_refused(name: str, data: st.DataObject) -> None:
    image = bytearray((IMAGES / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageRejected):
        weigh(bytes(image))
