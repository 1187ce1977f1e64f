"""mbarrier: arrivals and bytes against a model, drawn step by step; waits; what is refused."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

RunBlock = Callable[..., list[list[int]]]
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# One thread takes five steps: %b0 expect at first, then each word of %b1 to %b5 is what to do, and how often.
STEP = """
and.b32 %r1, {word}, 7; shr.u32 %r2, {word}, 3;
setp.eq.u32 %x0, %r1, 0; @%x0 mbarrier.arrive.shared.b64 %d2, [sh+8], %r2;
setp.eq.u32 %x0, %r1, 1; @%x0 mbarrier.arrive_drop.release.cta.shared::cta.b64 %d2, [sh+8], %r2;
setp.eq.u32 %x0, %r1, 2; @%x0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [sh+8], %r2;
setp.eq.u32 %x0, %r1, 3; @%x0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [sh+8], %r2;
setp.eq.u32 %x0, %r1, 4; @%x0 mbarrier.arrive.expect_tx.shared.b64 %d2, [%d1], %r2;
setp.eq.u32 %x0, %r1, 5; @%x0 cp.async.mbarrier.arrive.noinc.b64 [%d1];
mbarrier.test_wait.parity.b64 %x1, [%d1], 0; selp.u32 %r3, 1, 0, %x1; shl.b32 %r4, %r4, 1; or.b32 %r4, %r4, %r3;
mbarrier.pending_count.b64 %r5, %d2; mad.lo.u32 %r6, %r6, 31, %r5;
mbarrier.test_wait.shared.b64 %x1, [sh+8], %d2; selp.u32 %r3, 1, 0, %x1; shl.b32 %r7, %r7, 1; or.b32 %r7, %r7, %r3;
"""
STEPS = (
    "mov.u64 %d1, sh; add.u64 %d1, %d1, 8; cvta.shared.u64 %d1, %d1; mbarrier.init.shared.b64 [sh+8], %b0;"
    + "".join(
        STEP.format(word=f"%b{n}").replace(".arrive.expect_tx.shared.b64", ".arrive.expect_tx.b64") for n in range(1, 6)
    )
    + "cvt.u64.u32 %o0, %r4; cvt.u64.u32 %o1, %r6; cvt.u64.u32 %o2, %r7;"
)


class Model:
    """Section 9.7.13.15: a phase ends when no arrivals and no bytes are left."""

    def __init__(self, count: int) -> None:
        self.pending = self.expected = count
        self.bytes = self.phase = 0
        self.seen = (0, 0)

    def change(self, come: int = 0, dropped: int = 0, more: int = 0, *, shows: bool = False) -> None:
        if shows:
            self.seen = self.pending, self.phase
        self.pending = max(0, self.pending - come)
        self.expected = max(0, self.expected - dropped)
        self.bytes += more
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.expected

    def step(self, what: int, number: int) -> None:
        if what in (0, 1):
            self.change(number, number * what, shows=True)
        elif what in (2, 3):
            self.change(more=number if what == 2 else -number)
        elif what == 4:
            self.change(1, more=number, shows=True)
        elif what == 5:
            self.change(1)


@FEW
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=5, max_size=5))
def test_arrivals_and_bytes(run_block: RunBlock, count: int, steps: list[tuple[int, int]]) -> None:
    model, parities, counts, states = Model(count), 0, 0, 0
    for what, number in steps:
        model.step(what, number)
        parities = parities << 1 | model.phase
        counts = (counts * 31 + model.seen[0]) % 2**32
        states = states << 1 | (model.phase ^ model.seen[1])
    kept = run_block(STEPS, [[count, *(what | number << 3 for what, number in steps)]])
    assert kept[0][:3] == [parities, counts, states]


def test_one_that_waits_lets_the_others_run(run_block: RunBlock) -> None:
    text = """
setp.ne.u32 %x0, %i, 0; @!%x0 mbarrier.init.shared.b64 [sh], %b0; bar.sync 0;
mbarrier.arrive.release.cta.shared::cta.b64 %d2, [sh];
AGAIN: mbarrier.try_wait.acquire.cta.shared::cta.b64 %x1, [sh], %d2, 1000; @!%x1 bra AGAIN;
mbarrier.arrive.shared::cluster.b64 _, [sh]; mov.u64 %o0, 7;
MORE: mbarrier.try_wait.parity.shared.b64 %x1, [sh], 1; @!%x1 bra MORE;
bar.sync 0; mbarrier.inval.shared.b64 [sh]; ld.shared.u64 %o1, [sh];
"""
    assert run_block(text, [[70]] * 70) == [[7, 0, 0, 0]] * 70


FILL = "".join(f"mov.u64 %d0, {n + 1}; st.shared.u64 [sh+{64 + 8 * n}], %d0;" for n in range(8))
START = "mov.u32 %r1, 1; mbarrier.init.shared.b64 [sh], %r1; mbarrier.arrive.expect_tx.shared.b64 %d2, [sh], 64;"
DONE = "mbarrier.test_wait.shared.b64 %x1, [sh], %d2; selp.u64 %o3, 1, 0, %x1;"
COUNTED = "mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("into", ["shared::cluster", "shared::cta"])
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_bulk_copies_in(run_block: RunBlock, into: str, hint: str) -> None:
    area = bytearray((7 * n + 1) % 256 for n in range(4096))
    policy = ", %d3" if hint else ""
    text = f"cp.async.bulk.{into}.global.{COUNTED}{hint} [sh+64], [%area+32], %b0, [sh]{policy};"
    keep = "".join(f"ld.shared.u64 %o{n}, [sh+{64 + 8 * at}];" for n, at in enumerate((0, 7, 8)))
    kept = run_block(f"{FILL} st.shared.u64 [sh+128], %d0; {START} {text} {DONE} {keep}", [[64]], area=area)
    assert kept[0] == [*(int.from_bytes(area[at : at + 8], "little") for at in (32, 88)), 8, 1]
    assert run_block(f"{START} {text} {DONE}", [[48]], area=area)[0][3] == 0


def test_bulk_copies_out_and_within(run_block: RunBlock) -> None:
    area = bytearray(4096)
    within = f"cp.async.bulk.shared::cluster.shared::cta.{COUNTED} [sh+256], [sh+64], 64, [sh]; {DONE}"
    out = "cp.async.bulk.global.shared::cta.bulk_group [%area+16], [sh+256], 64; cp.async.bulk.commit_group;"
    wait = "cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0; cp.async.bulk.prefetch.L2.global [%area], 16;"
    assert run_block(f"{FILL} {START} {within} {out} {wait}", [[]], area=area)[0][3] == 1
    assert area == bytes(16) + b"".join((n + 1).to_bytes(8, "little") for n in range(8)) + bytes(4096 - 80)


@pytest.mark.parametrize(
    ("place", "size", "fault"),
    [
        ("%area+4088", 32, "misaligned address"),
        ("%area+4080", 32, "illegal address .*16-byte load"),
        ("%area", 40, "misaligned"),
        ("%area", 4096, "illegal shared address 0x1000 .*16-byte store"),
    ],
)
def test_bulk_copies_are_checked(run_block: RunBlock, place: str, size: int, fault: str) -> None:
    with pytest.raises(KernelFault, match=fault):
        run_block(f"{START} cp.async.bulk.shared::cluster.global.{COUNTED} [sh+64], [{place}], {size}, [sh];", [[]])


def test_objects_are_checked(run_block: RunBlock) -> None:
    for place, fault in (("sh+4096", "illegal shared"), ("sh+4", "misaligned shared")):
        with pytest.raises(KernelFault, match=fault):
            run_block(f"mbarrier.init.shared.b64 [{place}], 1;", [[]])
    with pytest.raises(KernelFault, match="illegal shared"):
        run_block("mbarrier.arrive.b64 %d0, [%area];", [[]])


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.init.shared.b64 [in], 1;",
        "mbarrier.init.global.b64 [%area], 1;",
        "mbarrier.arrive.shared.b64 %d0;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [sh];",
        "mbarrier.arrive.shared.b64 %r0, [sh];",
        "mbarrier.test_wait.shared.b64 %x0, [sh], %d0, 10;",
        "mbarrier.test_wait.parity.shared.b64 %x0, [sh], %d0;",
        f"cp.async.bulk.shared::cluster.global.{COUNTED}.L2::cache_hint [sh], [%area], 16, [sh];",
        f"cp.async.bulk.shared::cluster.global.{COUNTED} [sh], [%area], 16, [sh], %d0;",
        f"cp.async.bulk.tensor.1d.shared::cluster.global.{COUNTED} [sh], [%area], [sh];",
        f"cp.async.bulk.shared::cluster.global.{COUNTED}.multicast::cluster [sh], [%area], 16, [sh], %h0;",
        "cp.async.bulk.wait_group %r0;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%area], [sh], 16;",
    ],
)
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(text, [[]])
