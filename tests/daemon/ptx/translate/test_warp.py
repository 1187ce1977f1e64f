"""Warp operations against the PTX ISA's definitions, with drawn values, masks, block sizes and early exits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_, xor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ALL = 0xFFFFFFFF

# Threads with %b7 = 1 end before; the others come to the operation over as many different ways as %b6 says.
BEFORE = "setp.eq.u32 %x7, %b7, 1; @%x7 ret; setp.eq.u32 %x6, %b6, 0; @%x6 bra ONE;"


def body(instruction: str, after: str) -> str:
    """The instruction at two places, of which each thread comes to one."""
    return f"{BEFORE} {instruction} {after} bra KEEP; ONE: {instruction} {after}"


@dataclass
class Warp:
    """One drawn warp: for each thread its mask, whether it ends before, and its way."""

    masks: list[int]
    ended: list[bool]
    ways: list[int]

    def live(self, lane: int) -> int:
        return self.masks[lane] & sum(1 << k for k, gone in enumerate(self.ended) if not gone)

    def rows(self, values: list[list[int]]) -> list[list[int]]:
        parts = zip(values, self.masks, self.ways, self.ended, strict=True)
        return [[*(v + [0] * 5)[:5], mask, way, int(gone)] for v, mask, way, gone in parts]


@st.composite
def warps(draw: st.DrawFn) -> Warp:
    """A warp of any size, parted into groups that have a mask each; masks may name lanes that are not there."""
    size = draw(st.integers(1, 32))
    groups = draw(st.lists(st.integers(0, 2), min_size=32, max_size=32))
    masks = [sum(1 << k for k in range(32) if groups[k] == groups[lane]) for lane in range(size)]
    ended = draw(st.lists(st.booleans(), min_size=size, max_size=size)) if draw(st.booleans()) else [False] * size
    ways = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return Warp(masks, ended, ways)


words = st.integers(0, 2**32 - 1)


Expected = Callable[[int], list[int]]


def check(run_block: RunBlock, text: str, warp: Warp, values: list[list[int]], expected: Expected) -> None:
    kept = run_block(text, warp.rows(values))
    for lane in range(len(values)):
        wanted = [0] * 4 if warp.ended[lane] else (expected(lane) + [0] * 4)[:4]
        assert kept[lane] == wanted, (lane, warp)


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Section 9.7.9.6's algorithm."""
    b, cval, segment = b & 31, c & 31, c >> 8 & 31
    last = (lane & segment) | (cval & ~segment & 31)
    first = lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment & 31)}[mode]
    inside = j >= last if mode == "up" else j <= last
    return (j, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(run_block: RunBlock, mode: str) -> None:
    text = body(
        f"shfl.sync.{mode}.b32 %r1|%x0, %b0, %b1, %b2, %b5;",
        "selp.u32 %r2, 1, 0, %x0; cvt.u64.u32 %o0, %r1; cvt.u64.u32 %o1, %r2;",
    )

    @FEW
    @given(warps(), st.data())
    def run(warp: Warp, data: st.DataObject) -> None:
        limits = st.one_of(st.sampled_from([0x1F, 0, 0x181F, 0x1C1F, 0x1E1F]), words)
        values = [[data.draw(words), data.draw(words), data.draw(limits)] for _ in warp.masks]

        def expected(lane: int) -> list[int]:
            source, inside = shuffled(mode, lane, *values[lane][1:])
            return [values[source][0] if warp.live(lane) >> source & 1 else 0, int(inside)]

        check(run_block, text, warp, values, expected)

    run()


def test_a_shuffle_s_operands_may_be_its_results(run_block: RunBlock) -> None:
    kept = run_block("shfl.sync.bfly.b32 %b0, %b0, 1, 31, -1; cvt.u64.u32 %o0, %b0;", [[k * 3] for k in range(32)])
    assert [row[0] for row in kept] == [(k ^ 1) * 3 for k in range(32)]


def test_shuffles_without_predicate_or_value(run_block: RunBlock) -> None:
    text = "shfl.sync.down.b32 _|%x0, %b0, 1, 30, 0xffffffff; selp.u32 %r1, 1, 0, %x0; cvt.u64.u32 %o0, %r1;"
    assert [row[0] for row in run_block(text, [[0]] * 32)] == [1] * 30 + [0, 0]


@pytest.mark.parametrize("negated", ["", "!"])
def test_votes(run_block: RunBlock, negated: str) -> None:
    text = "setp.ne.u32 %x0, %b0, 0; " + body(
        f"vote.sync.all.pred %x1, {negated}%x0, %b5; vote.sync.any.pred %x2, {negated}%x0, %b5;"
        f"vote.sync.uni.pred %x3, {negated}%x0, %b5; vote.sync.ballot.b32 %r1, {negated}%x0, %b5;",
        "cvt.u64.u32 %o0, %r1; selp.u64 %o1, 1, 0, %x1; selp.u64 %o2, 1, 0, %x2; selp.u64 %o3, 1, 0, %x3;",
    )

    @FEW
    @given(warps(), st.data())
    def run(warp: Warp, data: st.DataObject) -> None:
        flags = data.draw(st.lists(st.integers(0, 1), min_size=len(warp.masks), max_size=len(warp.masks)))
        if data.draw(st.booleans()):
            flags = [flags[0]] * len(flags)
        votes = sum((flag ^ (negated == "!")) << k for k, flag in enumerate(flags))

        def expected(lane: int) -> list[int]:
            live = warp.live(lane)
            ballot = votes & live
            return [ballot, int(ballot == live), int(ballot != 0), int(ballot in (0, live))]

        check(run_block, text, warp, [[flag] for flag in flags], expected)

    run()


@pytest.mark.parametrize(("kind", "register"), [("b32", "%b0"), ("b64", "%a0")])
def test_matches(run_block: RunBlock, kind: str, register: str) -> None:
    text = body(
        f"match.any.sync.{kind} %r1, {register}, %b5; match.all.sync.{kind} %r2|%x0, {register}, %b5;"
        f"match.all.sync.{kind} %r3, {register}, %b5;",
        "cvt.u64.u32 %o0, %r1; cvt.u64.u32 %o1, %r2; selp.u64 %o2, 1, 0, %x0; cvt.u64.u32 %o3, %r3;",
    )
    choices = st.sampled_from([0, 1, 2**31, 2**32, 2**63] if kind == "b64" else [0, 1, 2**31, 5])

    @FEW
    @given(warps(), st.data())
    def run(warp: Warp, data: st.DataObject) -> None:
        values = [[data.draw(choices)] for _ in warp.masks]
        if data.draw(st.booleans()):
            values = [values[0]] * len(values)

        def expected(lane: int) -> list[int]:
            live = warp.live(lane)
            same = sum(1 << k for k, v in enumerate(values) if live >> k & 1 and v == values[lane])
            everyone = live if same == live else 0
            return [same, everyone, int(same == live), everyone]

        check(run_block, text, warp, values, expected)

    run()


def signed(value: int) -> int:
    return value - 2**32 if value >> 31 else value


REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "add.u32": lambda v: sum(v),
    "add.s32": lambda v: sum(v),
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda v: min(map(signed, v)),
    "max.s32": lambda v: max(map(signed, v)),
    "and.b32": lambda v: reduce(and_, v),
    "or.b32": lambda v: reduce(or_, v),
    "xor.b32": lambda v: reduce(xor, v),
}


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_reductions(run_block: RunBlock, operation: str) -> None:
    text = body(f"redux.sync.{operation} %r1, %b0, %b5;", "cvt.u64.u32 %o0, %r1;")

    @settings(FEW, max_examples=8)
    @given(warps(), st.lists(words, min_size=32, max_size=32))
    def run(warp: Warp, drawn: list[int]) -> None:
        values = [[value] for value in drawn[: len(warp.masks)]]

        def expected(lane: int) -> list[int]:
            live = warp.live(lane)
            return [REDUCTIONS[operation]([v[0] for k, v in enumerate(values) if live >> k & 1]) % 2**32]

        check(run_block, text, warp, values, expected)

    run()


def test_elections(run_block: RunBlock) -> None:
    text = body(
        "elect.sync %r1|%x0, %b5; elect.sync _|%x1, %b5;",
        "cvt.u64.u32 %o0, %r1; selp.u64 %o1, 1, 0, %x0; selp.u64 %o2, 1, 0, %x1;",
    )

    @FEW
    @given(warps())
    def run(warp: Warp) -> None:
        def expected(lane: int) -> list[int]:
            leader = (warp.live(lane) & -warp.live(lane)).bit_length() - 1
            return [leader, int(leader == lane), int(leader == lane)]

        check(run_block, text, warp, [[] for _ in warp.masks], expected)

    run()


def test_warp_barriers_order_memory(run_block: RunBlock) -> None:
    text = """
    mov.u32 %r1, sh; mad.lo.u32 %r2, %i, 4, %r1; xor.b32 %r3, %i, 1; mad.lo.u32 %r3, %r3, 4, %r1;
    st.shared.u32 [%r2], %b0; bar.warp.sync %b5; ld.shared.u32 %r4, [%r3]; bar.warp.sync %b5;
    st.shared.u32 [%r3], %b1; bar.warp.sync 0xffffffff; ld.shared.u32 %r5, [%r2];
    cvt.u64.u32 %o0, %r4; cvt.u64.u32 %o1, %r5;
    """
    rows = [[10 + k, 100 + k, 0, 0, 0, 3 << (k & ~1 & 31)] for k in range(70)]
    assert [row[:2] for row in run_block(text, rows)] == [[10 + (k ^ 1), 100 + (k ^ 1)] for k in range(70)]


@pytest.mark.parametrize("block", [(32, 1, 1), (70, 1, 1), (5, 7, 1), (3, 4, 11), (1, 1, 1)])
def test_who_is_active(run_block: RunBlock, block: tuple[int, int, int]) -> None:
    count = block[0] * block[1] * block[2]
    text = """
    activemask.b32 %r1; cvt.u64.u32 %o0, %r1;
    setp.lt.u32 %x0, %b0, 5; @%x0 bra LESS; activemask.b32 %r1; bra JOIN; LESS: activemask.b32 %r1;
    JOIN: cvt.u64.u32 %o1, %r1; @%x0 activemask.b32 %r2; cvt.u64.u32 %o2, %r2;
    """
    kept = run_block(text, [[k % 9] for k in range(count)], block=block)
    for k, row in enumerate(kept):
        warp = range(k & ~31, min((k & ~31) + 32, count))
        small = sum(1 << (j & 31) for j in warp if j % 9 < 5)
        whole = sum(1 << (j & 31) for j in warp)
        assert row[:3] == [whole, small if k % 9 < 5 else whole & ~small, small if k % 9 < 5 else 0]


def test_lanes_and_warps_have_numbers(run_block: RunBlock) -> None:
    for text in ("laneid warpid nwarpid lanemask_eq", "lanemask_lt lanemask_le lanemask_gt lanemask_ge"):
        moves = "".join(f"mov.u32 %r1, %{name}; cvt.u64.u32 %o{n}, %r1;" for n, name in enumerate(text.split()))
        kept = run_block(moves, [[]] * 75, block=(5, 5, 3))
        for k, row in enumerate(kept):
            lane, bit = k % 32, 1 << k % 32
            if "laneid" in text:
                assert row == [lane, k // 32, 3, bit]
            else:
                assert row == [bit - 1, bit * 2 - 1, ALL & ~(bit * 2 - 1), ALL & ~(bit - 1)]


def test_reduction_trees_in_loops_and_across_blocks(run_block: RunBlock) -> None:
    text = """
    mov.u32 %r1, 16; mov.u32 %r2, %b0;
    MORE: shfl.sync.bfly.b32 %r3, %r2, %r1, 31, -1; add.u32 %r2, %r2, %r3; shr.u32 %r1, %r1, 1;
    setp.ne.u32 %x0, %r1, 0; @%x0 bra MORE; cvt.u64.u32 %o0, %r2;
    """
    kept = run_block(text, [[k * k] for k in range(1024)], grid=3)
    assert [row[0] for row in kept] == [sum(j * j for j in range(k & ~31, (k & ~31) + 32)) for k in range(1024)]


def test_loops_of_different_length(run_block: RunBlock) -> None:
    """Each round ballots among those still in the loop; the mask is the ballot before."""
    text = """
    mov.u32 %r1, -1; mov.u32 %r2, 0;
    MORE: setp.gt.u32 %x0, %b0, %r2; vote.sync.ballot.b32 %r3, %x0, %r1; @!%x0 bra OUT;
    mov.u32 %r1, %r3; add.u32 %r2, %r2, 1; bra MORE;
    OUT: cvt.u64.u32 %o0, %r3; cvt.u64.u32 %o1, %r2;
    """
    counts = [(k * 7) % 11 for k in range(32)]
    kept = run_block(text, [[count] for count in counts])
    for count, row in zip(counts, kept, strict=True):
        assert row[:2] == [sum(1 << k for k, other in enumerate(counts) if other > count), count]


def test_one_who_is_not_in_its_mask_faults(run_block: RunBlock) -> None:
    with pytest.raises(KernelFault, match=r"member mask 0x00000001, which lacks .* thread \(1,0,0\) .* kernel k"):
        run_block("vote.sync.ballot.b32 %r1, %x0, 1;", [[]] * 2)


def test_members_that_wait_elsewhere_for_ever_are_a_fault(run_block: RunBlock) -> None:
    text = """
    setp.eq.u32 %x0, %b0, 0; @%x0 bra OTHER; bar.warp.sync 7; bra KEEP;
    OTHER: shfl.sync.bfly.b32 %r1, %r1, 1, 31, 7;
    """
    with pytest.raises(KernelFault, match=r"member mask 0x00000007 is never complete.* by thread \(0,0,0\) of block"):
        run_block(text, [[0], [1], [1]])
    assert run_block(text, [[1], [1], [1]])


def test_a_warp_operation_and_a_barrier_that_wait_for_each_other(run_block: RunBlock) -> None:
    text = "setp.eq.u32 %x0, %b0, 0; @%x0 bra OTHER; bar.sync 0; bra KEEP; OTHER: bar.warp.sync 3;"
    with pytest.raises(KernelFault, match="is never complete"):
        run_block(text, [[0], [1]])


@pytest.mark.parametrize(
    "text", ["shfl.up.b32 %r1, %r1, 1, 0;", "vote.all.pred %x0, %x1;", "redux.sync.add.u64 %d0, %d1, -1;"]
)
def test_what_is_no_longer_there_is_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected, match="is not supported"):
        run_block(text, [[]])


@pytest.mark.parametrize(("constant", "expected"), [(0, 0), (1, 1), (-1, 1), (2, 1)])
def test_predicates_from_constants(run_block: RunBlock, constant: int, expected: int) -> None:
    assert run_block(f"mov.pred %x0, {constant}; selp.u64 %o0, 1, 0, %x0;", [[]])[0][0] == expected
