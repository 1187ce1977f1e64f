"""Launches of single atomic operations on a place for each thread, and on a shared place (PTX ISA 9.7.13)."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from helpers.record.cases import Array, Case, Result
from helpers.record.inputs import Draw, zeros

_THREADS: Final = 64
_BLOCKS: Final = 3
_PLACE_BYTES: Final = 16

_ONE_OPERAND: Final = {
    "add": ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16", "noftz.f16x2", "noftz.bf16x2"),
    "min": ("u32", "u64", "s32", "s64"),
    "max": ("u32", "u64", "s32", "s64"),
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    "cas": ("b16", "b32", "b64"),
}
_VECTORS: Final = (
    *((f"v{count}.f32", count, "f32") for count in (2, 4)),
    *((f"noftz.v{count}.{kind}", count, "b16") for count in (2, 4, 8) for kind in ("f16", "bf16")),
    *((f"noftz.v{count}.{kind}", count, "b32") for count in (2, 4) for kind in ("f16x2", "bf16x2")),
)
_IN_ANY_ORDER: Final = frozenset({"add", "min", "max", "and", "or", "xor", "inc", "dec"})


def _held(kind: str) -> str:
    plain = kind.removeprefix("noftz.")
    return {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(plain, plain)


def _forms() -> Iterator[tuple[str, str, str]]:
    """Yield the kernel's name, the operation and the type of each form."""
    for operation, kinds in _ONE_OPERAND.items():
        for kind in kinds:
            yield f"{operation}_{kind.replace('.', '_')}", operation, kind


def _apart(space: str, name: str, operation: str, kind: str) -> str:
    """Return a kernel with a place for each thread.

    It stores the result of `atom`, and the values that `atom` and `red` left in the place.
    """
    held = _held(kind)
    place = "%at" if space == "global" else "%inside"
    operands = "%x, %y" if operation == "cas" else "%x"
    red = "" if operation in ("cas", "exch") else f"red.{space}.{operation}.{kind} [{place}], %x;"
    return f"""
.visible .entry {space}_{name}(.param .u64 places, .param .u64 operands, .param .u64 results)
{{
    .shared .align 16 .b8 sh[{_PLACE_BYTES * _THREADS}];
    .reg .b64 %at, %from, %to; .reg .b32 %i, %inside; .reg .{held} %x, %y, %d;
    mov.u32 %i, %tid.x; mov.u32 %inside, sh; mad.lo.u32 %inside, %i, {_PLACE_BYTES}, %inside;
    ld.param.u64 %at, [places]; ld.param.u64 %from, [operands]; ld.param.u64 %to, [results];
    mad.wide.u32 %at, %i, {_PLACE_BYTES}, %at; mad.wide.u32 %from, %i, 16, %from; mad.wide.u32 %to, %i, 8, %to;
    ld.global.{held} %x, [%at]; st.shared.{held} [%inside], %x;
    ld.global.{held} %x, [%from]; ld.global.{held} %y, [%from+8];
    atom.{space}.{operation}.{kind} %d, [{place}], {operands};
    st.global.{held} [%to], %d;
    {red}
    ld.{space}.{held} %x, [{place}]; st.global.{held} [%at], %x;
    ret;
}}
"""


def _apart_vector(name: str, count: int, held: str) -> str:
    size = int(held[1:]) // 8
    loads = " ".join(f"ld.global.{held} %x{n}, [%from+{size * n}];" for n in range(count))
    stores = " ".join(f"st.global.{held} [%to+{size * n}], %d{n};" for n in range(count))
    given, got = (", ".join(f"%{letter}{n}" for n in range(count)) for letter in "xd")
    return f"""
.visible .entry {name.replace(".", "_")}(.param .u64 places, .param .u64 operands, .param .u64 results)
{{
    .reg .b64 %at, %from, %to; .reg .b32 %i; .reg .{held} %x<8>, %d<8>;
    mov.u32 %i, %tid.x;
    ld.param.u64 %at, [places]; ld.param.u64 %from, [operands]; ld.param.u64 %to, [results];
    mad.wide.u32 %at, %i, {_PLACE_BYTES}, %at; mad.wide.u32 %from, %i, 16, %from; mad.wide.u32 %to, %i, 16, %to;
    {loads}
    atom.global.add.{name} {{{got}}}, [%at], {{{given}}};
    {stores}
    red.global.add.{name} [%at], {{{given}}};
    ret;
}}
"""


def _together(name: str, operation: str, kind: str) -> str:
    """Return a kernel in which all threads of all blocks use one place of their block, and one of the grid."""
    held = _held(kind)
    return f"""
.visible .entry together_{name}(.param .u64 places, .param .u64 operands, .param .u64 results)
{{
    .shared .align 16 .b8 sh[16];
    .reg .b64 %at, %from, %to; .reg .b32 %i, %n; .reg .{held} %x, %y, %d; .reg .pred %p;
    mov.u32 %i, %ctaid.x; mov.u32 %n, %tid.x; setp.ne.u32 %p, %n, 0;
    ld.param.u64 %at, [places]; ld.param.u64 %from, [operands]; ld.param.u64 %to, [results];
    mad.wide.u32 %to, %i, 8, %to; mad.lo.u32 %i, %i, {_THREADS}, %n; mad.wide.u32 %from, %i, 8, %from;
    ld.global.{held} %x, [%at+8];
    @!%p st.shared.{held} [sh], %x;
    bar.sync 0;
    ld.global.{held} %x, [%from];
    red.global.{operation}.{kind} [%at], %x;
    atom.shared.{operation}.{kind} %d, [sh], %x;
    bar.sync 0;
    ld.shared.{held} %x, [sh];
    @!%p st.global.{held} [%to], %x;
    ret;
}}
"""


def _ptx() -> str:
    apart = "".join(_apart(space, *form) for space in ("global", "shared") for form in _forms())
    vectors = "".join(_apart_vector(*vector) for vector in _VECTORS)
    together = "".join(_together(*form) for form in _forms() if form[1] in _IN_ANY_ORDER)
    return f".version 8.1\n.target sm_90\n.address_size 64\n{apart}{vectors}{together}"


PTX: Final = _ptx()


def atomic_cases() -> Iterator[Case]:
    for name, operation, kind in _forms():
        for space in ("global", "shared"):
            places, operands = _operands(f"{space}_{name}", operation, kind)
            yield _case(f"{space}_{name}", Result(places), operands, Result(zeros(_THREADS, kind="u8")))
        if operation in _IN_ANY_ORDER:
            results = Result(zeros(_BLOCKS, kind="u8"))
            yield _case(f"together_{name}", Result(_start(name, kind)), _whole(name, kind), results, _BLOCKS)
    for name, _, held in _VECTORS:
        kind = "f4" if held == "f32" else "u2"
        places, operands = (_values(f"{name} {n}", kind, name, 16) for n in range(2))
        results = Result(zeros(_THREADS, 16, kind="u1"))
        yield _case(name.replace(".", "_"), Result(places.view("u1")), operands.view("u1"), results)


def _case(kernel: str, places: Result, operands: Array, results: Result, blocks: int = 1) -> Case:
    arguments = (places, operands, results)
    return Case(f"atomic.{kernel}", ("atomics",), kernel, (blocks, 1, 1), (_THREADS, 1, 1), arguments)


def _operands(name: str, operation: str, kind: str) -> tuple[Array, Array]:
    """Return the values of all places, and two operands for each thread.

    Half of the `cas` operations find their value.
    """
    size = int("".join(letter for letter in _held(kind) if letter.isdigit())) // 8
    places = zeros(_THREADS, 2, kind="u8")
    operands = zeros(_THREADS, 2, kind="u8")
    number = {"f32": "f4", "f64": "f8"}.get(kind, f"u{size}")
    for index, array in enumerate((places[:, 0], operands[:, 0], operands[:, 1])):
        values = _values(f"{name} {index}", number, kind, size)
        array[:] = values.reshape(_THREADS, -1).view(f"u{size}")[:, 0]
    if operation == "cas":
        operands[::2, 0] = places[::2, 0]
    if operation in ("inc", "dec"):
        places[:, 0] %= np.uint64(5)
        operands[:, 0] %= np.uint64(5)
    return places, operands


def _values(name: str, number: str, kind: str, row_bytes: int) -> Array:
    """Return rows of one number or several: floats with special values among them; any bits for other types."""
    d = Draw(name)
    count = row_bytes // np.dtype(number).itemsize
    if number[0] == "f":
        return d.specials(_THREADS, count, kind=number)
    if "bf16" in kind:
        return d.bf16(_THREADS, row_bytes // 2, with_specials=True)
    if "f16" in kind:
        return d.specials(_THREADS, row_bytes // 2, kind="f2").view("u2")
    return d.bits(_THREADS, count, kind=number)


def _start(name: str, kind: str) -> Array:
    """Return the start values of the grid's place and of the blocks' places. Sums of floats start with zero."""
    return zeros(2, kind="u8") if "f" in kind else Draw(f"{name} start").bits(2, kind="u8")


def _whole(name: str, kind: str) -> Array:
    """Return operands whose sums are exact in any order."""
    d = Draw(name)
    size = _THREADS * _BLOCKS
    words = zeros(size, kind="u8")
    if "f" not in kind:
        return d.bits(size, kind="u8") if "inc" not in name and "dec" not in name else words + np.uint64(10)
    small = d.integers(size, low=0, high=2)
    if "bf16" in kind:
        words[:] = np.where(small, 0x3F80, 0)
    elif "f16" in kind:
        words[:] = small.astype("f2").view("u2")
    else:
        held = small.astype("f4" if kind == "f32" else "f8")
        words[:] = held.view(f"u{held.itemsize}")
    return words * np.uint64(0x10001) if kind.endswith("x2") else words
