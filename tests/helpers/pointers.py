"""Kernels with device addresses in their data, and a variable of a module that counts. A park must change neither."""

from typing import Final

from gpulease.client import Buffer, KernelArgs

POINTERS: Final = b"""
.version 8.0
.target sm_75
.address_size 64
.global .align 8 .u64 kept = 5;
.visible .entry chase(.param .u64 first, .param .u32 steps) {
  .reg .u64 %rd<3>; .reg .u32 %r<3>; .reg .pred %p;
  ld.param.u64 %rd0, [first];
  ld.param.u32 %r0, [steps];
again:
  ld.global.u64 %rd1, [%rd0+8];
  add.u64 %rd1, %rd1, 1;
  st.global.u64 [%rd0+8], %rd1;
  ld.global.u64 %rd0, [%rd0];
  sub.u32 %r0, %r0, 1;
  setp.ne.u32 %p, %r0, 0;
  @%p bra again;
  ret;
}
.visible .entry count(.param .u64 into) {
  .reg .u64 %rd<3>;
  ld.param.u64 %rd0, [into];
  ld.global.u64 %rd1, [kept];
  add.u64 %rd1, %rd1, 1;
  st.global.u64 [kept], %rd1;
  st.global.u64 [%rd0], %rd1;
  ret;
}
"""
"""PTX of two kernels. `chase` follows the first word of each node to the next node, `steps` times, and adds one to each
node's second word. `count` adds one to the variable `kept`, which begins at 5, and stores the result.
"""


def chase_args(node: Buffer, steps: int) -> KernelArgs:
    return KernelArgs().push_buffer(node).push_u32(steps)


def count_args(into: Buffer) -> KernelArgs:
    return KernelArgs().push_buffer(into)
