"""Named barriers, arrivals and reductions, and what becomes of those that are never complete."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

RunBlock = Callable[..., list[list[int]]]

FEW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPELLINGS = ["bar", "barrier", "bar.cta", "barrier.cta"]

# Each thread leaves its %b0 in its place of `sh` and takes that of thread %b1 behind the barrier.
SWAP = """
mov.u32 %r1, sh; mad.lo.u32 %r2, %i, 4, %r1; mad.lo.u32 %r3, %b1, 4, %r1;
st.shared.u32 [%r2], %b0; {}; ld.shared.u32 %r4, [%r3]; cvt.u64.u32 %o0, %r4;
"""


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("number", ["0", "5", "%b2"])
def test_any_barrier_for_all(run_block: RunBlock, spelling: str, number: str) -> None:
    text = SWAP.format(f"{spelling}.sync {number}")
    kept = run_block(text, [[k, 99 - k, 15] for k in range(100)], grid=2)
    assert [row[0] for row in kept] == [99 - k for k in range(100)]


@pytest.mark.parametrize("count", ["64", "%b3"])
def test_barriers_for_some_of_the_threads(run_block: RunBlock, count: str) -> None:
    """Two warps at barrier 1, two at 2; the fifth, which has 4 threads, at none."""
    text = "setp.ge.u32 %x0, %i, 128; @%x0 bra KEEP;" + SWAP.format(f"bar.sync %b2, {count}")
    rows = [[k, k ^ 32, 1 + k // 64, 64] for k in range(132)]
    assert [row[0] for row in run_block(text, rows)] == [*(k ^ 32 for k in range(128)), 0, 0, 0, 0]


@pytest.mark.parametrize("threads", [33, 50, 63])
def test_a_count_is_of_whole_warps(run_block: RunBlock, threads: int) -> None:
    text = SWAP.format("barrier.sync.aligned 3, 64")
    kept = run_block(text, [[k, threads - 1 - k] for k in range(threads)])
    assert [row[0] for row in kept] == [threads - 1 - k for k in range(threads)]


@pytest.mark.parametrize(
    ("threads", "arrive"),
    [(64, "bar.arrive"), (50, "barrier.arrive"), (50, "bar.cta.arrive"), (64, "barrier.cta.arrive.aligned")],
)
def test_producers_arrive_and_consumers_wait(run_block: RunBlock, threads: int, arrive: str) -> None:
    """The second warp fills, the first takes, three times over, with a barrier each way."""
    text = f"""
    mov.u32 %r1, sh; and.b32 %r2, %i, 31; mad.lo.u32 %r2, %r2, 4, %r1; mov.u32 %r5, 0; mov.u32 %r6, 0;
    setp.lt.u32 %x0, %i, 32; @%x0 bra TAKE;
    FILL: add.u32 %r3, %b0, %r5; st.shared.u32 [%r2], %r3; {arrive} 1, 64; bar.sync 2, 64;
    add.u32 %r5, %r5, 1; setp.lt.u32 %x1, %r5, 3; @%x1 bra FILL; bra KEEP;
    TAKE: barrier.sync 1, 64; ld.shared.u32 %r3, [%r2]; mad.lo.u32 %r6, %r6, 100, %r3; {arrive} 2, 64;
    add.u32 %r5, %r5, 1; setp.lt.u32 %x1, %r5, 3; @%x1 bra TAKE; cvt.u64.u32 %o0, %r6;
    """
    kept = run_block(text, [[k % 32] for k in range(threads)])
    for k in range(threads - 32):
        assert kept[k][0] == (k * 100 + k + 1) * 100 + k + 2
    assert not any(row[0] for row in kept[32:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("spelling", ["bar{}.{}", "bar.cta{}.{}", "barrier{}.aligned.{}", "barrier.cta{}.{}"])
@pytest.mark.parametrize("count", ["", ", 96"])
def test_reductions(run_block: RunBlock, spelling: str, count: str) -> None:
    popc = spelling.format(".red.popc", "u32")
    both, any_ = (spelling.format(f".red.{op}", "pred") for op in ("and", "or"))
    text = f"""
    setp.ne.u32 %x0, %b0, 0; {popc} %r1, 4{count}, %x0; {popc} %r2, 4{count}, !%x0;
    {both} %x1, 5{count}, %x0; {any_} %x2, 0{count}, %x0;
    cvt.u64.u32 %o0, %r1; cvt.u64.u32 %o1, %r2; selp.u64 %o2, 1, 0, %x1; selp.u64 %o3, 1, 0, %x2;
    """

    @FEW
    @given(st.integers(65, 96), st.sampled_from([(0, 1), (0, 0), (1, 1)]), st.data())
    def run(threads: int, choices: tuple[int, int], data: st.DataObject) -> None:
        flags = data.draw(st.lists(st.sampled_from(choices), min_size=threads, max_size=threads))
        true = sum(flags)
        expected = [true, threads - true, int(true == threads), int(true > 0)]
        assert run_block(text, [[flag] for flag in flags]) == [expected] * threads

    run()


def test_ended_threads_count_as_arrived(run_block: RunBlock) -> None:
    text = "setp.lt.u32 %x0, %i, %b0; @%x0 ret; bar.sync 1; bar.red.popc.u32 %r1, 2, %x0; mov.u64 %o0, 1;"
    for gone in (0, 1, 31, 32, 33, 69, 70):
        assert sum(row[0] for row in run_block(text, [[gone]] * 70)) == 70 - gone


@pytest.mark.parametrize(
    ("text", "number", "thread"),
    [
        # Others wait at another barrier.
        ("setp.lt.u32 %x0, %i, 3; @%x0 bra A; bar.sync 1; bra KEEP; A: bar.sync 2;", 2, "0,0,0"),
        # Too few left.
        ("setp.lt.u32 %x0, %i, 32; @%x0 ret; bar.sync 7, 64;", 7, "32,0,0"),
        # More than it is for.
        ("bar.sync 3, 32;", 3, "0,0,0"),
        # They do not agree on the number, or on the operation.
        ("setp.lt.u32 %x0, %i, 32; @%x0 bra A; bar.sync 4, 64; bra KEEP; A: bar.sync 4, 96;", 4, "0,0,0"),
        ("setp.lt.u32 %x0, %i, 9; @%x0 bra A; bar.sync 0; bra KEEP; A: bar.red.popc.u32 %r1, 0, %x0;", 0, "0,0,0"),
    ],
)
def test_what_is_never_complete_is_a_fault(run_block: RunBlock, text: str, number: int, thread: str) -> None:
    message = (
        rf"barrier {number} is never complete: .* waited for by thread \({thread}\) of block \(0,0,0\) in kernel k"
    )
    with pytest.raises(KernelFault, match=message) as caught:
        run_block(text, [[]] * 64)
    assert "PTX line" in str(caught.value)


def test_bad_operands_fault_when_they_are_met(run_block: RunBlock) -> None:
    for text, row in (("bar.sync %b0;", [16]), ("bar.sync 1, %b0;", [33]), ("bar.arrive 1, %b0;", [0])):
        with pytest.raises(KernelFault, match=r"no such barrier or number of threads \(barrier \d+\) used by thread"):
            run_block(text, [row] * 32)


@pytest.mark.parametrize(
    "text", ["bar.sync 16;", "bar.sync 1, 33;", "bar.arrive 1, 0;", "bar.arrive 1;", "barrier.cluster.sync;"]
)
def test_bad_constants_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(text, [[]])
