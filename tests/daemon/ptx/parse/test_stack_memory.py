"""alloca, stacksave and stackrestore: each thread has memory of its own, as much as fits and no more."""

import struct

import pytest

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.limits import MAX_STACK_BYTES

HEAD = ".version 7.3\n.target sm_75\n.address_size 64\n"
KERNEL = """.visible .entry k(.param .u64 out, .param .u64 size) {
  .reg .b64 %d<12>; .reg .b32 %r<6>; .reg .pred %p;
  ld.param.u64 %d1, [out]; ld.param.u64 %d2, [size]; mov.u32 %r1, %tid.x;
"""


def run(context: CpuContext, body: str, size: int, threads: int = 40) -> list[int]:
    kernel = context.module_load(f"{HEAD}{KERNEL}{body} ret; }}".encode()).kernels["k"]
    out = context.mem_alloc(8 * threads)
    context.launch(kernel, (1, 1, 1), (threads, 1, 1), 0, struct.pack("<QQ", out, size), 1)
    data = bytearray(8 * threads)
    context.mem_read(out, memoryview(data))
    return list(struct.unpack(f"<{threads}Q", data))


STORE = "mul.wide.u32 %d10, %r1, 8; add.u64 %d10, %d1, %d10; st.global.u64 [%d10], %d9;"


def test_two_pieces_of_each_thread_do_not_meet(context: CpuContext) -> None:
    body = f"""alloca.u64 %d3, %d2; alloca.u64 %d4, 24, 16;
    st.local.u32 [%d3], %r1; add.u32 %r2, %r1, 1000; st.local.u32 [%d4], %r2; bar.sync 0;
    ld.local.u32 %r3, [%d3]; ld.local.u32 %r4, [%d4]; mad.wide.u32 %d9, %r4, 65536, 0;
    cvt.u64.u32 %d8, %r3; add.u64 %d9, %d9, %d8; and.b64 %d8, %d4, 15; add.u64 %d9, %d9, %d8; {STORE}"""
    assert run(context, body, 12) == [(n + 1000) * 65536 + n for n in range(40)]


def test_what_is_restored_is_taken_again(context: CpuContext) -> None:
    body = f"""mov.u32 %r2, 0;
    AGAIN: stacksave.u64 %d5; alloca.u64 %d3, %d2; cvta.local.u64 %d6, %d3; st.u32 [%d6], %r2; ld.u32 %r3, [%d6];
    stackrestore.u64 %d5; add.u32 %r2, %r2, 1; setp.lt.u32 %p, %r2, 50; @%p bra AGAIN; cvt.u64.u32 %d9, %r3; {STORE}"""
    assert run(context, body, MAX_STACK_BYTES // 2) == [49] * 40


@pytest.mark.parametrize("size", [MAX_STACK_BYTES + 1, 2**63, 2**64 - 8])
def test_more_than_there_is_is_a_fault(context: CpuContext, size: int) -> None:
    with pytest.raises(KernelFault):
        run(context, "alloca.u64 %d3, 8; alloca.u64 %d3, %d2;", size)
    assert run(context, f"alloca.u64 %d3, %d2; mov.u64 %d9, 5; {STORE}", 64) == [5] * 40


def test_what_lies_behind_it_is_nobody_s(context: CpuContext) -> None:
    with pytest.raises(KernelFault):
        run(context, f"alloca.u64 %d3, 8; st.local.u32 [%d3+{MAX_STACK_BYTES}], %r1;", 0)


@pytest.mark.parametrize(
    "text",
    ["alloca.u32 %r2, 8;", "@%p alloca.u64 %d3, 8;", "alloca.u64 %d3, 8, 3;", "alloca.u64 %d3;", "stacksave.u64 5;"],
)
def test_other_forms_are_refused(context: CpuContext, text: str) -> None:
    with pytest.raises(ImageRejected):
        context.module_load(f"{HEAD}{KERNEL}{text} ret; }}".encode())
