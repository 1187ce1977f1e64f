"""Fences and hints change no result; threads that wait for one another's flags get on."""

import struct
from collections.abc import Callable

import pytest

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate.waits import find_waits

RunBlock = Callable[..., list[list[int]]]

HARMLESS = [
    *(f"membar.{level}" for level in ("cta", "gl", "sys")),
    *(f"fence{order}.{scope}" for order in ("", ".sc", ".acq_rel") for scope in ("cta", "cluster", "gpu", "sys")),
    "fence.acquire.gpu",
    "fence.release.gpu",
    "fence.proxy.alias",
    "prefetch.global.L1 [%area]",
    "prefetch.local.L2 [0]",
    "prefetch.L2 [%area+99999999]",
    "prefetch.global.L2::evict_last [%area]",
    "prefetch.global.L2::evict_normal [%area]",
    "prefetchu.L1 [%area]",
    "applypriority.global.L2::evict_normal [%area], 128",
    "applypriority.L2::evict_normal [%area], 128",
    "nanosleep.u32 100",
    "nanosleep.u32 %b0",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "fence.proxy.async",
    "fence.proxy.async.shared::cta",
    "fence.mbarrier_init.release.cluster",
    "discard.global.L2 [%area], 128",
    "setmaxnreg.inc.sync.aligned.u32 96",
    "pmevent 3",
    "pmevent.mask 3",
    "setmaxnreg.dec.sync.aligned.u32 96",
    "discard.L2 [%area], 128",
    "fence.proxy.async.global",
    "fence.proxy.async.shared::cluster",
    "createpolicy.cvt.L2.b64 %d0, 0x100",
    *(f"createpolicy.fractional.L2::evict_{way}.b64 %d0" for way in ("normal", "unchanged", "first", "last")),
    "createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %d0, 0.5",
    *(f"createpolicy.range.L2::evict_{way}.b64 %d0, [%area], 256, 512" for way in ("normal", "unchanged", "first")),
    *(
        f"createpolicy.range.L2::evict_last.L2::evict_{way}.b64 %d0, [%area], 256, 512"
        for way in ("unchanged", "first")
    ),
    "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%area], 16, %d0",
    "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%area+512], [sh], 16, %d0",
    "createpolicy.fractional.L2::evict_last.b64 %d0, 0.5",
    "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d0",
    "createpolicy.range.global.L2::evict_last.b64 %d0, [%area], 256, 512",
    "ld.global.L1::evict_last.L2::cache_hint.L2::128B.v2.b32 {%r1, %r2}, [%area], %d0",
    "ld.global.nc.L1::no_allocate.L2::256B.u32 %r1, [%area]",
    "ld.relaxed.gpu.global.L1::no_allocate.u32 %r1, [%area]",
    "st.global.L1::no_allocate.L2::cache_hint.u32 [%area+8], %r1, %d0",
    "cp.async.cg.shared.global.L2::cache_hint.L2::128B [sh], [%area], 16, %d0",
    "cp.async.ca.shared.global.L2::cache_hint [sh], [%area], 8, 4, %d0",
]


def test_what_changes_nothing(run_block: RunBlock) -> None:
    text = "st.global.u64 [%area], %a0;" + "".join(f"{text};" for text in HARMLESS) + "ld.global.u64 %o0, [%area];"
    assert run_block(text, [[77]])[0][0] == 77


@pytest.mark.parametrize("text", ["fence.proxy.tensormap", "membar.proxy.alias", "prefetch.shared.L1 [sh]"])
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected, match="is not supported"):
        run_block(f"{text};", [[]])


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.L2::cache_hint.u32 %r1, [%area]",
        "ld.global.u32 %r1, [%area], %d0",
        "st.global.L2::cache_hint.u32 [%area], %r1, %r1",
        "cp.async.cg.shared.global.L2::cache_hint [sh], [%area], 16",
        "setmaxnreg.inc.sync.aligned.u32 %r1",
    ],
)
def test_policies_and_counts_are_checked(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(f"{text};", [[]])


LOADS = [
    "ld.volatile.global.u32 %r1, [%d0]",
    "ld.relaxed.gpu.global.u32 %r1, [%d0]",
    "ld.relaxed.cta.u32 %r1, [%d0]",
    "ld.acquire.sys.u32 %r1, [%d0]",
    "ld.acquire.cluster.global.u32 %r1, [%d0]",
    "ld.global.cv.u32 %r1, [%d0]",
    "atom.global.add.u32 %r1, [%d0], 0",
    "atom.acquire.gpu.global.cas.b32 %r1, [%d0], 0, 0",
    "membar.gl; ld.global.u32 %r1, [%d0]",
    "nanosleep.u32 20; ld.global.u32 %r1, [%d0]",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("look", LOADS)
@pytest.mark.parametrize("threads", [2, 40])
def test_each_thread_waits_for_the_one_behind_it(run_block: RunBlock, look: str, threads: int) -> None:
    """Against the order in which threads run: the last begins."""
    text = f"""
    mad.wide.u32 %d0, %i, 4, %area; mov.u32 %r3, 0;
    setp.eq.u32 %x0, %b0, 1; @%x0 bra GO;
    LOOK: {look}; add.u32 %r3, %r3, 1; setp.eq.u32 %x1, %r1, 0; @%x1 bra LOOK;
    GO: setp.eq.u32 %x0, %i, 0; @%x0 bra KEEP;
    sub.u64 %d1, %d0, 4; add.u32 %r2, %r1, 1; membar.gl; st.volatile.global.u32 [%d1], %r2;
    """
    area = bytearray(4096)
    run_block(text, [[int(k == threads - 1)] for k in range(threads)], area=area)
    assert list(struct.unpack_from(f"<{threads}I", area)) == [threads - 1 - k for k in range(threads)]


def test_a_lock_in_shared_memory(run_block: RunBlock) -> None:
    """The holder lets go only when a barrier of its warp is complete, in which those who wait take no part."""
    text = """
    setp.eq.u32 %x0, %i, 0; @%x0 st.shared.u32 [sh], 0; @%x0 st.shared.u32 [sh+4], 0; bar.sync 0;
    TRY: atom.shared.cas.b32 %r1, [sh], 0, 1; setp.ne.u32 %x1, %r1, 0; @%x1 bra TRY;
    ld.shared.u32 %r2, [sh+4]; shl.b32 %r3, 1, %i; and.b32 %r3, %r3, -1; mov.u32 %r4, %lanemask_eq; bar.warp.sync %r4;
    add.u32 %r2, %r2, 1; st.shared.u32 [sh+4], %r2; membar.cta; atom.shared.exch.b32 %r1, [sh], 0;
    bar.sync 0; ld.shared.u32 %r2, [sh+4]; cvt.u64.u32 %o0, %r2;
    """
    assert [row[0] for row in run_block(text, [[]] * 70)] == [70] * 70


@pytest.mark.parametrize("order", ["volatile", "relaxed.cta", "release.gpu"])
def test_threads_of_two_warps_take_turns(run_block: RunBlock, order: str) -> None:
    text = f"""
    setp.eq.u32 %x0, %i, 0; @%x0 st.shared.u32 [sh], 0; bar.sync 0;
    and.b32 %r5, %i, 31; setp.ne.u32 %x0, %r5, 0; @%x0 bra KEEP; shr.u32 %r6, %i, 5; mov.u32 %r7, 0;
    MORE: ld.volatile.shared.u32 %r1, [sh]; and.b32 %r2, %r1, 1; setp.ne.u32 %x1, %r2, %r6; @%x1 bra MORE;
    add.u32 %r1, %r1, 1; st.{order}.shared.u32 [sh], %r1; add.u32 %r7, %r7, 1;
    setp.lt.u32 %x2, %r7, 20; @%x2 bra MORE;
    ld.volatile.shared.u32 %r1, [sh]; cvt.u64.u32 %o0, %r1;
    """
    kept = run_block(text, [[]] * 64)
    assert (kept[0][0], kept[32][0]) == (39, 40)


def waits(body: str) -> tuple[set[int], bool]:
    head = ".version 8.0 .target sm_75 .entry k() { .reg .b32 %a, %b; .reg .b64 %d; .reg .pred %p;"
    found = find_waits(parse(head + body + "}").functions[0].instructions)
    return set(found.yields), found.is_short


def test_only_loops_that_watch_memory_are_left() -> None:
    assert waits("L: ld.global.u32 %a, [%d]; @%p bra L;") == (set(), True)
    assert waits("ld.volatile.global.u32 %a, [%d]; L: add.u32 %a, %a, 1; @%p bra L; bar.sync 0;") == (set(), True)
    assert waits("L: ld.volatile.global.u32 %a, [%d]; @%p bra L;") == ({1}, False)
    assert waits("L: red.global.add.u32 [%d], %a; st.volatile.u32 [%d], %a; @%p bra L;") == (set(), True)
    # The loop's body lies behind the branch back to its head.
    assert waits("bra L; M: @%p bra N; ret; L: bra M; N: ld.volatile.u32 %a, [%d]; bra M;")[0] == {5}
