import struct

import pytest

from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.ptx.context import CpuContext


def kernel(body: str) -> bytes:
    return f"""
.version 8.0
.target sm_75
.address_size 64
.entry k(.param .u64 out)
{{
    .shared .align 4 .b8 sh[4096];
    .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .pred %p<4>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %d0, [out];
    mad.wide.u32 %d1, %r0, 4, %d0;
    {body}
}}
""".encode()


def run(context: CpuContext, body: str, threads: int = 8, blocks: int = 1) -> list[int]:
    address = context.mem_alloc(4 * threads)
    kernels = context.module_load(kernel(body)).kernels
    context.launch(kernels["k"], (blocks, 1, 1), (threads, 1, 1), 0, address.to_bytes(8, "little"), 3)
    into = bytearray(4 * threads)
    context.mem_read(address, memoryview(into))
    return list(struct.unpack(f"<{threads}I", into))


def test_loops_and_branches(context: CpuContext) -> None:
    body = """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    AGAIN: setp.ge.u32 %p0, %r1, %r0; @%p0 bra OUT;
    add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1; bra.uni AGAIN;
    OUT: st.global.u32 [%d1], %r2; ret;
    """
    assert run(context, body) == [sum(range(k)) for k in range(8)]


@pytest.mark.parametrize("end", ["ret", "exit", "ret.uni"])
def test_threads_leave_early(context: CpuContext, end: str) -> None:
    body = f"setp.lt.u32 %p0, %r0, 3; @%p0 {end}; st.global.u32 [%d1], 1;"
    assert run(context, body) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_code_behind_the_end_and_empty_kernels(context: CpuContext) -> None:
    assert run(context, "ret; st.global.u32 [%d1], 1; bra END; END:") == [0] * 8
    assert run(context, "") == [0] * 8


def test_registers_start_as_zero(context: CpuContext) -> None:
    assert run(context, "st.global.u32 [%d1], %r9; @%p3 st.global.u32 [%d1], 1; ret;") == [0] * 8


def test_a_trap_names_its_thread(context: CpuContext) -> None:
    with pytest.raises(KernelFault, match=r"trap executed by thread \(5,0,0\) of block \(0,0,0\) in kernel k"):
        run(context, "setp.eq.u32 %p0, %r0, 5; @%p0 trap; st.global.u32 [%d1], 1; ret;")


@pytest.mark.parametrize("rows", [1, 8])
def test_a_fault_stops_that_thread_at_once_and_all_behind_it(context: CpuContext, rows: int) -> None:
    address = context.mem_alloc(32)
    body = """
    mov.u32 %r1, %tid.y; add.u32 %r0, %r0, %r1; mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.u32 [%d1], 1; setp.eq.u32 %p0, %r0, 3; @%p0 trap; st.global.u32 [%d1], 2; ret;
    """
    kernels = context.module_load(kernel(body)).kernels
    context.launch(kernels["k"], (1, 1, 1), (8 // rows, rows, 1), 0, address.to_bytes(8, "little"), 3)
    with pytest.raises(KernelFault):
        context.sync(lambda: None)
    into = bytearray(32)
    context.mem_read(address, memoryview(into))
    # Threads of a row run together.
    assert struct.unpack("<8I", into) == ((1,) * 8 if rows == 1 else (2, 2, 2, 1, 0, 0, 0, 0))


def test_a_barrier_keeps_registers_of_every_width(context: CpuContext) -> None:
    body = """
    .reg .b16 %h<2>; .reg .f64 %g<2>;
    cvt.u16.u32 %h0, %r0; cvt.rn.f64.u32 %g0, %r0; setp.gt.u32 %p0, %r0, 3; mov.u64 %d2, %d1;
    bar.sync 0;
    cvt.u32.u16 %r1, %h0; cvt.rzi.u32.f64 %r2, %g0; selp.u32 %r3, 100, 0, %p0;
    add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; st.global.u32 [%d2], %r1; ret;
    """
    assert run(context, body) == [2 * k + (100 if k > 3 else 0) for k in range(8)]


@pytest.mark.parametrize("spelling", ["bar.sync 0", "barrier.sync 0", "barrier.sync.aligned 0", "bar.cta.sync 0"])
def test_a_barrier_makes_stores_of_all_threads_seen(context: CpuContext, spelling: str) -> None:
    body = f"""
    shl.b32 %r1, %r0, 2; mov.u32 %r2, sh; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], %r0;
    {spelling};
    xor.b32 %r3, %r1, 28; mov.u32 %r4, sh; add.u32 %r4, %r4, %r3; ld.shared.u32 %r5, [%r4];
    st.global.u32 [%d1], %r5; ret;
    """
    assert run(context, body, blocks=3) == [7 - k for k in range(8)]


def test_ended_threads_are_not_waited_for(context: CpuContext) -> None:
    body = "setp.lt.u32 %p0, %r0, 3; @%p0 ret; bar.sync 0; bar.sync 0; st.global.u32 [%d1], 1; ret;"
    assert run(context, body) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_barriers_in_loops_and_under_guards(context: CpuContext) -> None:
    body = """
    mov.u32 %r6, 0; mov.u32 %r1, 0; mov.u32 %r3, sh;
    setp.eq.u32 %p1, %r0, %r0; setp.eq.u32 %p2, %r0, 0; @%p2 st.shared.u32 [%r3], 0;
    AGAIN: @%p1 bar.sync 0;
    ld.shared.u32 %r2, [%r3]; add.u32 %r6, %r6, %r2;
    bar.sync 0;
    add.u32 %r1, %r1, 1; @%p2 st.shared.u32 [%r3], %r1;
    setp.lt.u32 %p0, %r1, 4; @%p0 bra AGAIN;
    st.global.u32 [%d1], %r6; ret;
    """
    assert run(context, body) == [0 + 1 + 2 + 3] * 8
