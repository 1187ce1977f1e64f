"""wmma's loads and stores: strides, spaces, bounds; what is refused. Products are held against numpy elsewhere."""

import struct
from collections.abc import Callable

import pytest

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

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
