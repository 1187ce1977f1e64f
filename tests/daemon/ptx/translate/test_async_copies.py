"""cp.async: what is copied, what is zeros, and what is checked."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]
FEW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SIZES = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]
AREA = bytes((7 * k + 1) % 256 for k in range(4096))

# 32 bytes of `sh` start as ones; what they hold behind the copy is kept.
SET = "mov.u64 %d1, -1; st.shared.u64 [sh], %d1; st.shared.u64 [sh+8], %d1; st.shared.u64 [sh+16], %d1;"
KEEP = "".join(f"ld.shared.u64 %o{n}, [sh+{8 * n}];" for n in range(3))
WAIT = "cp.async.commit_group; cp.async.wait_group 0; cp.async.wait_all;"


def kept_bytes(row: list[int]) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in row[:3])


@pytest.mark.parametrize(("hint", "size"), SIZES)
@pytest.mark.parametrize(
    ("into", "prefetch"),
    [("shared", ""), ("shared::cta", ".L2::64B"), ("shared::cta", ".L2::128B"), ("shared", ".L2::256B")],
)
def test_copies(run_block: RunBlock, hint: str, size: int, into: str, prefetch: str) -> None:
    copy = f"cp.async.{hint}.{into}.global{prefetch} [sh], [%area+32], {size};"
    kept = run_block(SET + copy + WAIT + KEEP, [[]], area=bytearray(AREA))
    assert kept_bytes(kept[0]) == AREA[32 : 32 + size] + b"\xff" * (24 - size)


@pytest.mark.parametrize(("hint", "size"), SIZES)
def test_what_is_not_taken_is_zeros(run_block: RunBlock, hint: str, size: int) -> None:
    copy = f"cp.async.{hint}.shared.global [sh], [%area+16], {size}, %b0;"

    @FEW
    @given(st.integers(0, size))
    def run(taken: int) -> None:
        kept = run_block(SET + copy + KEEP, [[taken]], area=bytearray(AREA))
        assert kept_bytes(kept[0]) == AREA[16 : 16 + taken] + bytes(size - taken) + b"\xff" * (24 - size)

    run()


@pytest.mark.parametrize("negated", ["", "!"])
def test_a_source_may_be_ignored(run_block: RunBlock, negated: str) -> None:
    copy = f"setp.ne.u32 %x0, %b0, 0; cp.async.ca.shared.global [sh], [%area], 8, {negated}%x0;"
    for flag in (0, 1):
        kept = run_block(SET + copy + KEEP, [[flag]], area=bytearray(AREA))
        is_ignored = flag != (negated == "!")
        assert kept_bytes(kept[0])[:8] == (bytes(8) if is_ignored else AREA[:8])


def test_only_what_is_taken_must_be_there(run_block: RunBlock) -> None:
    run_block("mov.u64 %d0, 0; cp.async.ca.shared.global [sh], [%d0], 16, 0;", [[]])
    with pytest.raises(KernelFault, match="illegal address 0x0"):
        run_block("mov.u64 %d0, 0; cp.async.ca.shared.global [sh], [%d0], 16, 1;", [[]])
    for taken in (0, 3, 4):
        run_block("cp.async.ca.shared.global [sh], [%area+4096], 16, %b0;", [[taken]])
    with pytest.raises(KernelFault, match="illegal address"):
        run_block("cp.async.ca.shared.global [sh], [%area+4096], 16, %b0;", [[5]])
    with pytest.raises(KernelFault, match="misaligned address"):
        run_block("cp.async.ca.shared.global [sh], [%area+4], 8, %b0;", [[4]])
    with pytest.raises(KernelFault, match="illegal shared address"):
        run_block("cp.async.ca.shared.global [sh+4096], [%area], 4;", [[]])


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.cg.shared.global [sh], [%area], 8;",
        "cp.async.ca.shared.global [sh], [%area], 2;",
        "cp.async.ca.shared.global [sh], [%area], %r1;",
        "cp.async.wait_group %r1;",
        "cp.async.mbarrier.arrive.global.b64 [%area];",
    ],
)
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(text, [[]])
