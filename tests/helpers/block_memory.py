"""Shared memory that launches request: a kernel that uses one word of it, and each way to launch that kernel."""

from collections.abc import Callable
from typing import Final

import numpy as np

from gpulease.client import GpuLease, GpuSession

KIB: Final = 1024
DEFAULT_BYTES: Final = 48 * KIB
MOST_BYTES: Final = 227 * KIB
"""Most shared memory of a thread block on a card of compute capability 9.0.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

STATIC_BYTES: Final = KIB
REACH: Final = b"""
.version 7.8
.target sm_75
.address_size 64
.extern .shared .align 16 .b8 asked[];

.visible .entry reach(.param .u64 out, .param .u32 word)
{
    .reg .b64 %out; .reg .b32 %at, %base, %value;
    ld.param.u64 %out, [out]; cvta.to.global.u64 %out, %out;
    ld.param.u32 %at, [word];
    mov.u32 %base, asked;
    add.u32 %at, %at, %base;
    st.shared.u32 [%at], 77;
    ld.shared.u32 %value, [%at];
    st.global.u32 [%out], %value;
    ret;
}

.visible .entry reach_behind(.param .u64 out, .param .u32 word)
{
    .reg .b64 %out; .reg .b32 %at, %base, %value;
    .shared .align 16 .b8 own[1024];
    ld.param.u64 %out, [out]; cvta.to.global.u64 %out, %out;
    ld.param.u32 %at, [word];
    mov.u32 %base, asked;
    add.u32 %at, %at, %base;
    st.shared.u32 [%at], 77;
    st.shared.u32 [own+1020], 11;
    ld.shared.u32 %value, [%at];
    st.global.u32 [%out], %value;
    ret;
}
"""
"""Stores 77 at byte offset `word` of the dynamic shared memory, reads it back, and writes it to `out`."""

FOUND: Final = 77


def by_launch(lease: GpuLease, kernel: str, size_bytes: int) -> int:
    """Launch the kernel with `size_bytes` of shared memory. Returns the last word, as the kernel read it."""
    with GpuSession(lease) as session:
        out = session.mem_alloc(4)
        args = [out, np.uint32(max(0, size_bytes - 4))]
        session.launch(session.module_load(REACH), kernel, [1], [1], args, shared_bytes=size_bytes)
        return int.from_bytes(session.mem_read(out, 0, 4), "little")


def by_graph(lease: GpuLease, kernel: str, size_bytes: int) -> int:
    with GpuSession(lease) as session:
        out, module = session.mem_alloc(4), session.module_load(REACH)
        args = [out, np.uint32(max(0, size_bytes - 4))]
        with session.record() as graph:
            session.launch(module, kernel, [1], [1], args, shared_bytes=size_bytes)
        graph.launch()
        return int.from_bytes(session.mem_read(out, 0, 4), "little")


def by_submit(lease: GpuLease, kernel: str, size_bytes: int) -> int:
    work = lease.submit(kernel, REACH).shared_bytes(size_bytes).out(4).arg(np.uint32(max(0, size_bytes - 4)))
    (output,) = work.launch()
    return int.from_bytes(output, "little")


Way = Callable[[GpuLease, str, int], int]
WAYS: Final[tuple[Way, ...]] = (by_launch, by_graph, by_submit)
