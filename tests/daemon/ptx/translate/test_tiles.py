"""wmma's loads and stores: strides, spaces, bounds; what is refused. Products are held against numpy elsewhere."""

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

pytestmark = pytest.mark.exhaustive

Array = np.ndarray[Any, np.dtype[Any]]
RunBlock = Callable[..., list[list[int]]]
WORDS = [(7 * n + 1) % 65521 for n in range(1024)]
FRAGMENT = "{%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}"
SUM = "{%f0,%f1,%f2,%f3,%f4,%f5,%f6,%f7}"

# Loads a matrix C by one layout and stores it 2048 bytes on by another, which says where each element went.
PASS = "wmma.load.c.sync.aligned.{0}.m16n16k16{1}.f32 {3}, [{2}]{4}; wmma.store.d.sync.aligned.{5}.m16n16k16.global.f32"


def placed(values: list[int]) -> bytearray:
    return bytearray(struct.pack("<1024I", *values))


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("stride", [0, 16, 19])
@pytest.mark.parametrize("space", ["", ".global"])
def test_a_matrix_comes_as_its_layout_says(run_block: RunBlock, layout: str, stride: int, space: str) -> None:
    area = placed(WORDS)
    given = f", {stride}" if stride else ""
    text = PASS.format(layout, space, "%area", SUM, given, "row") + f" [%area+2048], {SUM};"
    run_block(text, [[]] * 32, area=area)
    found = struct.unpack("<1024I", area)[512:768]
    for row in range(16):
        for column in range(16):
            at = row * (stride or 16) + column if layout == "row" else column * (stride or 16) + row
            assert found[16 * row + column] == WORDS[at]


@pytest.mark.parametrize("place", ["%d1", "sh"])
def test_a_matrix_in_shared_memory(run_block: RunBlock, place: str) -> None:
    fill = """shl.b32 %r14, %i, 5; cvt.u64.u32 %d2, %r14; add.u64 %d2, %area, %d2; mov.u32 %r13, sh;
add.u32 %r13, %r13, %r14;"""
    for half in (0, 16):
        fill += f"ld.global.v2.u64 {{%d3, %d4}}, [%d2+{half}]; st.shared.v2.u64 [%r13+{half}], {{%d3, %d4}};"
    generic = "mov.u64 %d1, sh; cvta.shared.u64 %d1, %d1;"
    space = "" if place == "%d1" else ".shared::cta"
    area = placed(WORDS)
    text = PASS.format("col", space, place, SUM, ", %r15", "col") + f" [%area+2048], {SUM};"
    run_block(f"mov.u32 %r15, 16; {fill} {generic} {text}", [[]] * 32, area=area)
    assert list(struct.unpack("<1024I", area)[512:768]) == WORDS[:256]


WIDTHS = {"f16": 16, "bf16": 16, "s8": 8, "u8": 8, "tf32": 32, "f32": 32, "s32": 32, "f64": 64}
HELD_AS = {"f16": "f2", "bf16": "u2", "s8": "i1", "u8": "u1", "tf32": "f4", "f32": "f4", "s32": "i4", "f64": "f8"}
CHOSEN = (("f16", "f16"), ("f16", "f32"), ("f32", "f16"), ("f32", "f32"))
SIDES = ("row", "col")
SPACES = ("", ".global", ".shared", ".shared::cta")

# The shape, the types of A and B, of C and of D, and what follows all types.
SHAPES = ("m16n16k16", "m32n8k16", "m8n32k16")
PRODUCTS = [
    *((shape, "f16", c, d, "") for shape, (c, d) in zip((*SHAPES, SHAPES[0]), CHOSEN, strict=True)),
    *((shape, "bf16", "f32", "f32", "") for shape in SHAPES),
    *((shape, "s8", "s32", "s32", "") for shape in SHAPES),
    *((shape, "u8", "s32", "s32", ".satfinite") for shape in SHAPES),
    *(("m16n16k8", "tf32", "f32", "f32", ""),) * 4,
    *(("m8n8k4", "f64", "f64", "f64", rn) for rn in ("", ".rn", ".rn", "")),
]

# The four matrices lie 1024 bytes apart, in global and in shared memory.
COPY_IN = "shl.b32 %r0, %i, 7; cvt.u64.u32 %d2, %r0; add.u64 %d3, %area, %d2; mov.u64 %d4, sh; add.u64 %d4, %d4, %d2;"
COPY_IN += "".join(
    f"ld.global.v2.u64 {{%d0, %d1}}, [%d3+{n}]; st.shared.v2.u64 [%d4+{n}], {{%d0, %d1}};" for n in range(0, 128, 16)
)
COPY_OUT = """bar.warp.sync -1; shl.b32 %r0, %i, 5; cvt.u64.u32 %d2, %r0; add.u64 %d3, %area, %d2;
mov.u64 %d4, sh; add.u64 %d4, %d4, %d2;"""
COPY_OUT += "".join(
    f"ld.shared.u64 %d0, [%d4+{3072 + n}]; st.global.u64 [%d3+{3072 + n}], %d0;" for n in range(0, 32, 8)
)


def fragment(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{n}" for n in range(count)) + "}"


def held(values: Array, kind: str, side: str) -> bytes:
    """A matrix's bytes by rows or by columns."""
    values = values if side == "row" else values.T
    if kind == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2").tobytes()
    return values.astype(HELD_AS[kind]).tobytes()


def counts_of(shape: str, kinds: dict[str, str]) -> dict[str, int]:
    """The registers of each fragment; those of A and B of .f16 are always eight."""
    m, n, k = map(int, re.findall(r"\d+", shape))
    sizes = {"a": m * k, "b": k * n, "c": m * n, "d": m * n}
    if kinds["a"] == "f16":
        sizes |= dict.fromkeys("ab", 512)
    width = 64 if kinds["a"] == "f64" else 32
    return {part: size * WIDTHS[kinds[part]] // (32 * width) for part, size in sizes.items()}


def product_text(number: int, sides: dict[str, str]) -> str:
    """Load three matrices, multiply, store the fourth; each by turns in another space."""
    shape, kind, c, d, end = PRODUCTS[number]
    kinds = {"a": kind, "b": kind, "c": c, "d": d}
    spaces = {part: SPACES[(number + turn) % 4] for turn, part in enumerate(kinds)}
    fragments = {part: fragment(f"m{part}", count) for part, count in counts_of(shape, kinds).items()}
    moves = []
    for place, part in enumerate(kinds):
        address = f"[{'sh' if 'shared' in spaces[part] else '%area'}+{1024 * place}]"
        spelling = f"{part}.sync.aligned.{sides[part]}.{shape}{spaces[part]}.{kinds[part]}"
        is_load = part != "d"
        operands = f"{fragments[part]}, {address}" if is_load else f"{address}, {fragments[part]}"
        moves.append(f"wmma.{'load' if is_load else 'store'}.{spelling} {operands};")
    types = f"{d}.{c}" if kind == "f16" else f"{d}.{kind}.{kind}.{c}"
    multiply = f"wmma.mma.sync.aligned.{sides['a']}.{sides['b']}.{shape}.{types}{end}"
    declared = f".reg .b{64 if kind == 'f64' else 32} %ma<8>, %mb<8>, %mc<8>, %md<8>;"
    out = COPY_OUT if "shared" in spaces["d"] else ""
    return f"""{declared} {COPY_IN} bar.warp.sync -1; {"".join(moves[:3])}
    {multiply} {", ".join(fragments[part] for part in "dabc")}; {moves[3]} {out}"""


@pytest.mark.parametrize("number", range(len(PRODUCTS)), ids=lambda n: ".".join(PRODUCTS[n][:4]) + f"-{n % 4}")
def test_products(run_block: RunBlock, number: int) -> None:
    """D = AB + C in each shape and type; by turns each matrix lies by rows or columns."""
    shape, kind, c, d, end = PRODUCTS[number]
    m, n, k = map(int, re.findall(r"\d+", shape))
    sides = dict(zip("abcd", (SIDES[turn & 1] for turn in (number, number >> 1, number, number + 1)), strict=True))
    random = np.random.default_rng(number)
    low = 0 if kind == "u8" else -4
    a, b, added = (random.integers(low, 9, size) for size in ((m, k), (k, n), (m, n)))
    if c == "s32":
        added = random.choice([2**31 - 1, 2**31 - 100, -(2**31), 5], (m, n))
    given = (held(a, kind, sides["a"]), held(b, kind, sides["b"]), held(added, c, sides["c"]))
    area = bytearray(b"".join(data.ljust(1024, b"\0") for data in given).ljust(4096, b"\0"))
    run_block(product_text(number, sides), [[]] * 32, area=area)
    expected = a @ b + added
    if end == ".satfinite":
        expected = expected.clip(-(2**31), 2**31 - 1)
    assert area[3072:] == held(expected, d, sides["d"]).ljust(1024, b"\0")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {SUM}, [%area+4], 80;", r"4-byte load\) by thread \(20,"),
        (f"wmma.load.c.sync.aligned.row.m16n16k16.f32 {SUM}, [%area+2];", "misaligned address"),
        (f"wmma.store.d.sync.aligned.col.m16n16k16.global.f32 [%area], {SUM}, -1;", r"4-byte store\)"),
        (f"wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {FRAGMENT}, [sh+4064];", "illegal shared address 0x10e0"),
    ],
)
def test_what_lies_outside_faults(run_block: RunBlock, text: str, fault: str) -> None:
    with pytest.raises(KernelFault, match=fault):
        run_block(text, [[]] * 32)


@pytest.mark.parametrize(
    "text",
    [
        f"wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {SUM[:-5]}}}, [%area];",
        f"wmma.load.a.sync.aligned.row.m16n16k16.local.f16 {FRAGMENT}, [%area];",
        f"wmma.load.a.sync.aligned.row.m16n16k16.global.f32 {FRAGMENT}, [%area];",
        f"wmma.load.c.sync.aligned.row.m16n16k16.f32 {SUM}, [in];",
        "wmma.load.a.sync.aligned.row.m8n8k32.global.s4 {%r1}, [%area];",
        f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {SUM}, {{%r1}}, {FRAGMENT}, {SUM};",
        f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {SUM}, {FRAGMENT}, {FRAGMENT}, {{%f0}};",
        f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32.satfinite {SUM}, {FRAGMENT}, {FRAGMENT}, {SUM};",
    ],
)
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(text, [[]] * 32)
