"""Copies and accesses of many lanes at once are what each lane makes by itself, and so are their faults."""

import random
import re
import struct
from collections.abc import Callable

import pytest

from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate import module

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]
AREA = random.Random(3).randbytes(4096)
THREADS = 64

# Each thread's source in the area, its place in shared memory, and how much it takes.
COPY = """
cvt.u64.u32 %d1, %b0; add.u64 %d1, %area, %d1; mov.u32 %r5, sh; add.u32 %r5, %r5, %b1;
cp.async.ca.shared.global [%r5], [%d1], 16, %b2;
cp.async.wait_all; ld.shared.v2.u64 {%o0, %o1}, [%r5];
"""


@pytest.fixture(params=["together", "apart"])
def run_both(run_block: RunBlock, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunBlock:
    """Both ways of running threads; the comment sets their code apart."""
    if request.param == "apart":
        monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    return lambda body, *rest, **options: run_block(f"// {request.param}\n{body}", *rest, **options)


@pytest.mark.parametrize("way", ["neighbours", "anywhere", "parts", "none"])
def test_every_thread_copies_its_own(run_both: RunBlock, way: str) -> None:
    draw = random.Random(way)
    places = draw.sample(range(THREADS), THREADS)
    sources = [16 * n + 80 if way == "neighbours" else 16 * draw.randrange(256) for n in range(THREADS)]
    counts = {"parts": range(17), "none": (0, 16)}.get(way, (16,))
    rows = [[source, 16 * place, draw.choice(counts)] for source, place in zip(sources, places, strict=True)]
    kept = run_both(COPY, rows, area=bytearray(AREA))
    for (source, _, count), words in zip(rows, kept, strict=True):
        assert struct.pack("<2Q", *words[:2]) == AREA[source : source + count].ljust(16, b"\0")


@pytest.mark.parametrize(
    ("lane", "row", "address"),
    [(37, [16 * 300, 0, 16], None), (40, [8, 0, 16], None), (5, [0, 4096, 0], 4096), (33, [0, 4088, 16], 4088)],
)
def test_the_thread_whose_copy_may_not_be_is_named(
    run_both: RunBlock, lane: int, row: list[int], address: int | None
) -> None:
    rows = [row if n >= lane else [16 * n, 16 * n, 16] for n in range(THREADS)]
    with pytest.raises(KernelFault, match=rf"thread \({lane},0,0\)") as caught:
        run_both(COPY, rows, area=bytearray(AREA))
    if address is not None:
        assert caught.value.address == address


VECTORS = {"v2.u32": ("%r6, %r7", 8), "v4.u32": ("%r6, %r7, %r8, %r9", 16), "v2.u64": ("%d4, %d5", 16)}


def words_of(kind: str) -> str:
    """Keep what was loaded."""
    if kind == "v2.u64":
        return "mov.u64 %o0, %d4; mov.u64 %o1, %d5;"
    more = "mov.b64 %o1, {%r8, %r9};" if kind == "v4.u32" else "mov.u64 %o1, 0;"
    return f"mov.b64 %o0, {{%r6, %r7}}; {more}"


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("way", ["neighbours", "anywhere", "some"])
def test_vectors_go_through_shared_and_global_memory(run_both: RunBlock, kind: str, way: str) -> None:
    names, size = VECTORS[kind]
    draw = random.Random(kind + way)
    places = [size * (n if way == "neighbours" else draw.randrange(4096 // size)) for n in range(THREADS)]
    own = draw.sample(range(THREADS), THREADS) if way == "anywhere" else range(THREADS)
    zero = "".join(f"mov.b{kind[-2:]} {name}, 0;" for name in names.split(", "))
    guard = "and.b32 %r5, %b2, 1; setp.ne.u32 %x0, %r5, 0;"
    move = f"""
    cvt.u64.u32 %d1, %b0; add.u64 %d1, %area, %d1; mov.u32 %r5, sh; add.u32 %r4, %r5, %b1;
    @%x0 ld.global.{kind} {{{names}}}, [%d1]; st.shared.{kind} [%r4], {{{names}}}; {zero} bar.sync 0;
    ld.shared.{kind} {{{names}}}, [%r4]; cvt.u64.u32 %d1, %b1; add.u64 %d1, %area, %d1; bar.sync 0;
    @%x0 st.global.{kind} [%d1+2048], {{{names}}};
    """
    taken = [way != "some" or draw.random() < 0.7 for _ in range(THREADS)]
    rows = [[place, size * mine, int(flag)] for place, mine, flag in zip(places, own, taken, strict=True)]
    area = bytearray(AREA)
    kept = run_both(f"{guard} {zero} {move} {words_of(kind)}", rows, area=area)
    expected = bytearray(AREA)
    for (place, mine, flag), words in zip(rows, kept, strict=True):
        found = AREA[place : place + size] if flag else bytes(size)
        assert struct.pack("<2Q", *words[:2])[:size] == found
        if flag:
            expected[2048 + mine : 2048 + mine + size] = found
    assert area == expected


@pytest.mark.parametrize("lane", [0, 15, 16, 30, 31])
def test_the_first_of_many_accesses_that_may_not_be_is_named(run_both: RunBlock, lane: int) -> None:
    """512 bytes that lie side by side end where the area does, at each lane in turn."""
    body = """
    mad.lo.u32 %r5, %i, 16, %b0; cvt.u64.u32 %d1, %r5; add.u64 %d1, %area, %d1; mov.u32 %r6, %laneid;
    ld.global.v2.u64 {%o0, %o1}, [%d1];
    """
    with pytest.raises(KernelFault, match=rf"thread \({lane},0,0\)"):
        run_both(body, [[4096 - 16 * lane]] * 32, area=bytearray(AREA))


def test_a_block_of_one_warp_waits_for_nobody(kernel_of: Callable[[str], str]) -> None:
    body = "mov.u32 %b0, %laneid; bar.warp.sync -1; bar.sync 0; cvt.u64.u32 %o0, %b0;"
    for threads, waits in ((32, False), (64, True)):
        text = kernel_of(body).replace("\n{", f"\n.reqntid {threads}\n{{", 1)
        (part,) = module.translate(parse(text))
        assert "%given" in part.text
        assert ("resume" in part.text) == waits


def test_every_supported_version_of_llvm_reads_masked_accesses(kernel_of: Callable[[str], str]) -> None:
    """llvmlite 0.45 to 0.47 have LLVM 20, which refuses the alignment as an attribute. LLVM 22 reads both forms."""
    shuffle = "shfl.sync.idx.b32 %r4, %b0, %b1, 31, -1; cvt.u64.u32 %o0, %r4;"
    (part,) = module.translate(parse(kernel_of(shuffle)))
    calls = re.findall(r"call .*@llvm\.masked\.(load|store|gather)\.\w+\.\w+\((.*)\)", part.text)
    assert {name for name, _ in calls} == {"load", "store", "gather"}
    for _, operands in calls:
        assert re.search(r"ptr>? %\w+, i32 [48], <", operands), operands
