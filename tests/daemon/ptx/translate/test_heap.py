"""malloc and free in kernels: blocks do not meet, come back, and run out; what was not given is a fault."""

import struct

import pytest

from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.limits import HEAP_BYTES

TEXT = """.version 7.0
.target sm_75
.address_size 64
.extern .func (.param .b64 given) malloc (.param .b64 size);
.extern .func free (.param .b64 address);
.visible .entry fills(.param .u64 out, .param .u64 size, .param .u32 rounds)
{
  .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .pred %p;
  ld.param.u64 %d1, [out]; ld.param.u64 %d2, [size]; ld.param.u32 %r1, [rounds];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r5, %r2, %r3, %r4;
  mul.wide.u32 %d3, %r5, 4; add.u64 %d3, %d1, %d3;
MORE:
  { .param .b64 s; .param .b64 g; st.param.b64 [s], %d2; call (g), malloc, (s); ld.param.b64 %d4, [g]; }
  setp.eq.u64 %p, %d4, 0; @%p bra NONE;
  add.u64 %d5, %d4, %d2;
  st.u32 [%d4], %r5; st.u32 [%d5+-4], %r5; bar.sync 0; ld.u32 %r6, [%d4]; ld.u32 %r7, [%d5+-4];
  xor.b32 %r6, %r6, %r7; add.u32 %r7, %r7, %r6; st.global.u32 [%d3], %r7;
  { .param .b64 a; st.param.b64 [a], %d4; call free, (a); }
  sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra MORE;
  ret;
NONE:
  st.global.u32 [%d3], -1; ret;
}
.visible .entry frees(.param .u64 address, .param .u32 times)
{
  .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .pred %p;
  ld.param.u64 %d1, [address]; ld.param.u32 %r1, [times];
  { .param .b64 s; .param .b64 g; st.param.b64 [s], 100; call (g), malloc, (s); ld.param.b64 %d2, [g]; }
  setp.eq.u64 %p, %d1, 1; @%p mov.u64 %d1, %d2;
  setp.eq.u64 %p, %d1, 2; @%p add.u64 %d1, %d2, 16;
AGAIN:
  { .param .b64 a; st.param.b64 [a], %d1; call free, (a); }
  sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra AGAIN;
  ret;
}
.visible .entry breaks(.param .u64 unused)
{
  .reg .b64 %d<9>;
  { .param .b64 s; .param .b64 g; st.param.b64 [s], 100; call (g), malloc, (s); ld.param.b64 %d2, [g]; }
  st.u64 [%d2+-16], -1; st.u64 [%d2+112], 77;
  { .param .b64 s; .param .b64 g; st.param.b64 [s], 100; call (g), malloc, (s); ld.param.b64 %d3, [g]; }
  ld.param.u64 %d4, [unused]; st.global.u64 [%d4], %d3; ret;
}
"""


def launch(context: CpuContext, kernel: str, params: bytes, blocks: int = 1, threads: int = 1) -> None:
    kernels = context.module_load(TEXT.encode()).kernels
    context.launch(kernels[kernel], (blocks, 1, 1), (threads, 1, 1), 0, params, 1)
    context.sync()


def fill(context: CpuContext, size: int, rounds: int, blocks: int, threads: int) -> list[int]:
    out = context.mem_alloc(4 * blocks * threads)
    launch(context, "fills", struct.pack("<QQI", out, size, rounds), blocks, threads)
    data = bytearray(4 * blocks * threads)
    context.mem_read(out, memoryview(data))
    return list(struct.unpack(f"<{blocks * threads}I", data))


@pytest.mark.parametrize("size", [4, 100, 1000])
def test_each_thread_has_a_block_of_its_own_again_and_again(context: CpuContext, size: int) -> None:
    assert fill(context, size, 20, 4, 64) == list(range(256))


def test_what_does_not_fit_is_address_0(context: CpuContext) -> None:
    assert fill(context, HEAP_BYTES, 1, 1, 1) == [2**32 - 1]
    assert fill(context, 2**64 - 8, 1, 1, 1) == [2**32 - 1]
    assert fill(context, HEAP_BYTES - 32, 3, 1, 1) == [0]
    found = fill(context, HEAP_BYTES // 4, 1, 1, 2)
    assert found == [0, 1]


@pytest.mark.parametrize(("address", "times"), [(1, 2), (2, 1), (64, 1)])
def test_what_was_not_given_is_a_fault(context: CpuContext, address: int, times: int) -> None:
    with pytest.raises(KernelFault, match="free of 0x"):
        launch(context, "frees", struct.pack("<QI", address, times))
    launch(context, "frees", struct.pack("<QI", 1, 1))
    launch(context, "frees", struct.pack("<QI", 0, 3))


def test_headers_that_a_kernel_broke_give_nothing_outside_of_the_heap(context: CpuContext) -> None:
    out = context.mem_alloc(8)
    launch(context, "breaks", struct.pack("<Q", out))
    data = bytearray(8)
    context.mem_read(out, memoryview(data))
    assert bytes(data) == bytes(8)


def test_the_heap_counts_against_the_slice(context: CpuContext) -> None:
    assert context.module_load(TEXT.encode()).device_bytes == HEAP_BYTES
