"""Loads and stores in every spelling: each space, type and vector; each order and scope; each hint.

What is read is compared with the same bytes read by Python; what is written, with the bytes written by Python.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.ptx.context import CpuContext

pytestmark = pytest.mark.exhaustive

SETTINGS = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DATA_BYTES: Final = 32
DATA: Final = st.binary(min_size=DATA_BYTES, max_size=DATA_BYTES)
WORDS: Final = range(0, DATA_BYTES, 8)
CONSTANT: Final = bytes((37 * k + 201) % 256 for k in range(DATA_BYTES))
FILL: Final = bytes(range(0xA0, 0xC0))

# An odd number by which the elements of a vector, or the words of memory, are mixed into one that tells all.
MIX: Final = 0x9E3779B97F4A7C15

TYPES: Final = {
    **{f"{letter}{bits}": bits // 8 for letter in "bus" for bits in (8, 16, 32, 64)},
    "f32": 4,
    "f64": 8,
}
VECTORS: Final = {"": 1, ".v2": 2, ".v4": 4}
SHAPES: Final = [(v, kind) for v in VECTORS for kind in TYPES if VECTORS[v] * TYPES[kind] <= 16]
SCOPES: Final = ("cta", "cluster", "gpu", "sys")
EVICTIONS: Final = (
    *(f".L1::evict_{way}" for way in ("normal", "unchanged", "first", "last")),
    ".L1::no_allocate",
)

# Where the data lies, by the space that the access names.
PLACES: Final = {
    "": "%in",
    ".global": "%in",
    ".const": "constant",
    ".local": "lo",
    ".shared": "sh",
    ".shared::cta": "sh",
    ".shared::cluster": "sh",
    ".param": "data",
    ".param::entry": "data",
    ".param::func": "passed",
}


def mixed(words: Iterable[int]) -> int:
    total = 0
    for word in words:
        total = (total * MIX + word) % 2**64
    return total


def kernel(function: str, body: str) -> bytes:
    """%out has room for the results; [%in], sh, lo and `passed` hold the kernel's parameter `data`."""
    copies = "".join(
        f"ld.param.u64 %e0, [data+{n}]; st.shared.u64 [sh+{n}], %e0; st.local.u64 [lo+{n}], %e0;\n" for n in WORDS
    )
    passes = "".join(f"ld.param.u64 %e0, [data+{n}]; st.param.b64 [passed+{n}], %e0;\n" for n in WORDS)
    keep = "".join(f"ld.param.u64 %w, [room+{n}]; mad.lo.u64 %d, %d, {MIX}, %w;" for n in WORDS)
    registers = (
        ".reg .b64 %e<4>, %d, %w, %in, %out; .reg .f32 %f<4>; .reg .f64 %g<4>; .reg .b32 %r<4>; .reg .b16 %h<4>;"
    )
    return f"""
.version 8.3
.target sm_90
.address_size 64
.const .align 16 .b8 constant[{DATA_BYTES}] = {{{", ".join(map(str, CONSTANT))}}};
.func within(.param .b64 to, .param .align 16 .b8 passed[{DATA_BYTES}])
{{
    {registers}
    ld.param.u64 %out, [to];
    {function}
    ret;
}}
.func kept(.param .b64 to, .param .align 16 .b8 room[{DATA_BYTES}])
{{
    {registers}
    ld.param.u64 %out, [to];
    {keep}
    st.global.u64 [%out], %d;
    ret;
}}
.entry k(.param .u64 in, .param .u64 out, .param .align 16 .b8 data[{DATA_BYTES}])
{{
    .shared .align 16 .b8 sh[{DATA_BYTES}];
    .local .align 16 .b8 lo[{DATA_BYTES}];
    {registers}
    ld.param.u64 %in, [in]; ld.param.u64 %out, [out];
    {copies}
    {body}
    {{ .param .b64 to; .param .align 16 .b8 passed[{DATA_BYTES}];
    st.param.b64 [to], %out; {passes} call within, (to, passed); }}
    ret;
}}
""".encode()


@contextmanager
def running(context: CpuContext, image: bytes, count: int) -> Iterator[Callable[[bytes], list[int]]]:
    """What the kernel leaves for each content of `data`."""
    into, out = context.mem_alloc(DATA_BYTES), context.mem_alloc(8 * count)
    module = context.module_load(image)

    def run(data: bytes) -> list[int]:
        context.mem_write(into, memoryview(data))
        context.mem_write(out, memoryview(bytes(8 * count)))
        parameters = into.to_bytes(8, "little") + out.to_bytes(8, "little") + data
        context.launch(module.kernels["k"], (1, 1, 1), (1, 1, 1), 0, parameters, 1)
        found = bytearray(8 * count)
        context.mem_read(out, memoryview(found))
        return words_of(found)

    try:
        yield run
    finally:
        context.module_unload(module)
        for address in (into, out):
            context.mem_free(address)


def words_of(data: bytes | bytearray) -> list[int]:
    return [int.from_bytes(data[n : n + 8], "little") for n in range(0, len(data), 8)]


def held(kind: str) -> str:
    """The registers for a type: for integers wider ones, which must be extended and cut."""
    return {"f32": "%f", "f64": "%g"}.get(kind, "%e")


def listed(kind: str, count: int) -> str:
    names = ", ".join(f"{held(kind)}{n}" for n in range(count))
    return names if count == 1 else f"{{{names}}}"


def elements(data: bytes, kind: str, count: int) -> list[int]:
    """The elements of a vector at the data's start as 64-bit registers hold them."""
    size = TYPES[kind]
    parts = [data[n : n + size] for n in range(0, size * count, size)]
    return [int.from_bytes(part, "little", signed=kind[0] == "s") % 2**64 for part in parts]


# An access: its spelling, and of that its space, vector and type.
Form = tuple[str, str, str, str]


def policy(spelling: str) -> str:
    """The operand that comes with a cache hint: any will do."""
    return ", %w" if "cache_hint" in spelling else ""


def loaded(spelling: str, space: str, vector: str, kind: str, number: int) -> str:
    count = VECTORS[vector]
    widen = {
        "f32": "mov.b32 %r0, %f{n}; cvt.u64.u32 %e{n}, %r0;",
        "f64": "mov.b64 %e{n}, %g{n};",
    }.get(kind, "")
    mix = "".join(f"{widen.format(n=n)} mad.lo.u64 %d, %d, {MIX}, %e{n};" for n in range(count))
    place = PLACES[space]
    load = f"{spelling} {listed(kind, count)}, [{place}]{policy(spelling)};"
    return f"{load} mov.u64 %d, 0; {mix} st.global.u64 [%out+{8 * number}], %d;\n"


ORDERS: Final = [f".{order}.{scope}" for order in ("relaxed", "acquire") for scope in SCOPES]
STORE_HINTS: Final = ("", ".wb", ".cg", ".cs", ".wt")
LOAD_HINTS: Final = ("", ".ca", ".cg", ".cs", ".lu", ".cv")
PREFETCHES: Final = ("", ".L2::64B", ".L2::128B", ".L2::256B")
FEWER_SPACES: Final = ("", ".global", ".shared", ".shared::cta", ".shared::cluster")


def further_hints(prefetches: tuple[str, ...]) -> Iterator[str]:
    """Each eviction with and without a policy, by turns with each prefetch."""
    turns = itertools.cycle(prefetches)
    for eviction, policy in itertools.product(("", *EVICTIONS), ("", ".L2::cache_hint")):
        yield eviction + policy + next(turns)
        yield eviction + policy + next(turns)


def loads() -> dict[str, list[Form]]:
    """By what they have in common: spelling, space, vector and type."""
    found: dict[str, list[Form]] = {}
    for space in PLACES:
        weak = itertools.cycle(("", ".weak"))
        found[f"ld{space}"] = [(f"ld{next(weak)}{space}{v}.{kind}", space, v, kind) for v, kind in SHAPES]
        found[f"ld.volatile{space}"] = [(f"ld.volatile{space}{v}.{kind}", space, v, kind) for v, kind in SHAPES]
    for space in FEWER_SPACES:
        orders = itertools.cycle(ORDERS)
        found[f"ld.order{space}"] = [
            *((f"ld{next(orders)}{space}{v}.{kind}", space, v, kind) for v, kind in SHAPES),
            *((f"ld{order}{space}.u32", space, "", "u32") for order in ORDERS),
        ]
    found["ld.nc"] = [(f"ld.global.nc{v}.{kind}", ".global", v, kind) for v, kind in SHAPES]
    cached = [*zip(itertools.cycle(LOAD_HINTS), further_hints(PREFETCHES), strict=False)]
    for name, spellings in (
        ("hints", [f"ld.global{hint}{rest}" for hint, rest in cached]),
        ("hints.nc", [f"ld.global{hint}.nc{rest}" for hint, rest in cached]),
        ("hints.order", [f"ld.relaxed.gpu.global{rest}" for rest in further_hints(PREFETCHES)]),
    ):
        found[name] = [(f"{spelling}.u32", ".global", "", "u32") for spelling in spellings]
    return found


LOADS: Final = loads()


@pytest.mark.parametrize("alike", LOADS)
def test_loads_read_the_bytes_that_are_there(resting: CpuContext, alike: str) -> None:
    texts = [loaded(*load, number) for number, load in enumerate(LOADS[alike])]
    in_function = [text for text in texts if "[passed]" in text]
    image = kernel("".join(in_function), "".join(text for text in texts if text not in in_function))
    with running(resting, image, len(texts)) as run:

        @SETTINGS
        @given(DATA)
        def check(data: bytes) -> None:
            for result, (spelling, space, vector, kind) in zip(run(data), LOADS[alike], strict=True):
                source = CONSTANT if space == ".const" else data
                assert result == mixed(elements(source, kind, VECTORS[vector])), spelling

        check()


def stored(spelling: str, space: str, vector: str, kind: str, number: int) -> str:
    """Between bytes that are there already; then all of them are kept."""
    values = listed(kind, VECTORS[vector])
    if space.startswith(".param"):
        fill = "".join(f"st.param.b64 [room+{n}], {word};" for n, word in zip(WORDS, words_of(FILL), strict=True))
        return f"""{{ .param .b64 to; .param .align 16 .b8 room[{DATA_BYTES}]; {fill} {spelling} [room], {values};
        add.u64 %d, %out, {8 * number}; st.param.b64 [to], %d; call kept, (to, room); }}\n"""
    plain, place = space.partition("::")[0] or ".global", PLACES[space]
    fill = "".join(f"st{plain}.u64 [{place}+{n}], {word};" for n, word in zip(WORDS, words_of(FILL), strict=True))
    keep = "".join(f"ld{plain}.u64 %w, [{place}+{n}]; mad.lo.u64 %d, %d, {MIX}, %w;" for n in WORDS)
    store = f"{spelling} [{place}], {values}{policy(spelling)};"
    return f"{fill} {store} mov.u64 %d, 0; {keep} st.global.u64 [%out+{8 * number}], %d;\n"


# The values to be stored: of each word of the data as much as the register holds.
VALUES: Final = "".join(
    f"ld.param.u64 %e{n}, [data+{8 * n}]; cvt.u32.u64 %r{n}, %e{n}; mov.b32 %f{n}, %r{n}; mov.b64 %g{n}, %e{n};"
    for n in range(4)
)


def stores() -> dict[str, list[Form]]:
    found: dict[str, list[Form]] = {}
    for space in (*FEWER_SPACES, ".local", ".param", ".param::func"):
        weak = itertools.cycle(("", ".weak"))
        found[f"st{space}"] = [(f"st{next(weak)}{space}{v}.{kind}", space, v, kind) for v, kind in SHAPES]
        found[f"st.volatile{space}"] = [(f"st.volatile{space}{v}.{kind}", space, v, kind) for v, kind in SHAPES]
    orders = [f".{order}.{scope}" for order in ("relaxed", "release") for scope in SCOPES]
    for space in FEWER_SPACES:
        given_ = itertools.cycle(orders)
        found[f"st.order{space}"] = [
            *((f"st{next(given_)}{space}{v}.{kind}", space, v, kind) for v, kind in SHAPES),
            *((f"st{order}{space}.u32", space, "", "u32") for order in orders),
        ]
    hints = [hint + rest for hint, rest in zip(itertools.cycle(STORE_HINTS), further_hints(("",)), strict=False)]
    found["hints"] = [(f"st.global{hint}.u32", ".global", "", "u32") for hint in hints]
    found["hints.order"] = [(f"st.relaxed.gpu.global{hint}.u32", ".global", "", "u32") for hint in further_hints(("",))]
    return found


STORES: Final = stores()


@pytest.mark.parametrize("alike", STORES)
def test_stores_write_their_bytes_and_no_others(resting: CpuContext, alike: str) -> None:
    texts = [stored(*store, number) for number, store in enumerate(STORES[alike])]
    with running(resting, kernel("", VALUES + "".join(texts)), len(texts)) as run:

        @SETTINGS
        @given(DATA)
        def check(data: bytes) -> None:
            for result, (spelling, _, vector, kind) in zip(run(data), STORES[alike], strict=True):
                size, count = TYPES[kind], VECTORS[vector]
                written = b"".join(data[8 * n : 8 * n + size] for n in range(count))
                assert result == mixed(words_of(written + FILL[size * count :])), spelling

        check()
