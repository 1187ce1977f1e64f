"""Where addresses lie; a cluster of one block."""

from collections.abc import Callable

import pytest

from gpulease.daemon.drivers.interface import ImageRejected

RunBlock = Callable[..., list[list[int]]]

LOCAL = ".local .align 8 .b8 mine[16]; mov.u64 %d2, mine; cvta.local.u64 %d2, %d2;"
SHARED = "mov.u64 %d1, sh; cvta.shared::cluster.u64 %d1, %d1;"


@pytest.mark.parametrize(("place", "shared", "local"), [("%area", 0, 0), ("%d1", 1, 0), ("%d2+8", 0, 1), ("0", 0, 0)])
@pytest.mark.parametrize("last", ["shared::cta", "shared::cluster"])
def test_a_generic_address_lies_in_one_space(
    run_block: RunBlock, place: str, shared: int, local: int, last: str
) -> None:
    base, _, offset = place.partition("+")
    asks = "".join(
        f"isspacep.{space} %x{n}, %d3; selp.u64 %o{n}, 1, 0, %x{n};"
        for n, space in enumerate(("shared", "local", "global", last))
    )
    text = f"{LOCAL} {SHARED} add.u64 %d3, {base}, {offset or 0}; {asks}".replace("add.u64 %d3, 0,", "mov.u64 %d3,")
    assert run_block(text, [[], []]) == [[shared, local, int(not shared | local), shared]] * 2


def test_a_cluster_is_one_block(run_block: RunBlock) -> None:
    text = f"""{SHARED} st.shared::cluster.u64 [sh], 7; mov.u32 %r1, sh;
mapa.shared::cluster.u32 %r2, %r1, 0; ld.shared::cluster.u64 %o0, [%r2]; mapa.u64 %d3, %d1, 0; ld.u64 %o1, [%d3];
getctarank.u64 %r3, %d1; getctarank.shared::cluster.u32 %r4, %r1; mov.u32 %r5, %cluster_ctarank;
mov.u32 %r6, %cluster_nctarank; mov.u32 %r7, %cluster_nctaid.y; mov.u32 %r8, %cluster_ctaid.x;
add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r5; add.u32 %r3, %r3, %r8; cvt.u64.u32 %o2, %r3;
mad.lo.u32 %r6, %r6, 10, %r7; mov.u32 %r9, %nclusterid.x; mad.lo.u32 %r6, %r6, 10, %r9; cvt.u64.u32 %o3, %r6;"""
    assert run_block(text, [[]]) == [[7, 7, 0, 111]]


@pytest.mark.parametrize(("order", "acquire"), [("", ""), (".release", ".acquire"), (".relaxed.aligned", ".aligned")])
def test_all_of_a_cluster_meet(run_block: RunBlock, order: str, acquire: str) -> None:
    text = f"""shl.b32 %r1, %i, 2; mov.u32 %r2, sh; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %b0;
barrier.cluster.arrive{order}; barrier.cluster.wait{acquire}; setp.eq.u32 %x0, %i, 69; @%x0 ret;
ld.shared.u32 %r3, [%r1+4]; barrier.cluster.arrive; barrier.cluster.wait; cvt.u64.u32 %o0, %r3;"""
    assert [row[0] for row in run_block(text, [[n] for n in range(70)])] == [*range(1, 70), 0]


@pytest.mark.parametrize("text", ["isspacep.const %x0, %area;", "mapa.u64 %d0, sh, 0;", "isspacep.shared %r0, %area;"])
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(text, [[]])
