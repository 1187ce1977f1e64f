"""The order of warps and blocks, shuffled by a seed: races show, and equal seeds give equal runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gpulease.daemon.config.settings import ConfigError, load_config
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.zygote.driver_registry import driver_named

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
SEEDS = (1, 2, 3, 77, 2**31 - 1)

# Each thread takes a ticket: who came when. ENTER keeps the kernel to one way of running its threads.
TICKETS = """
.global .u32 next;
.entry tickets(.param .u64 out)
{
    .reg .b64 %p; .reg .b32 %r<9>; .reg .pred %c;
    ld.param.u64 %p, [out];
    ENTER
    atom.global.add.u32 %r0, [next], 1;
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mad.wide.u32 %p, %r1, 4, %p;
    st.global.u32 [%p], %r0;
    ret;
}
"""
# Lanes, threads apart with barrier 0, warps of lanes, and threads that a scheduler runs.
WAYS = {
    "plain": "",
    "barrier": "bar.sync 0;",
    "warp": "shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;",
    "scheduled": "barrier.sync 1; match.any.sync.b32 %r4, %r1, -1;",
}

# The first thread writes behind the barrier what the others read there: each may see either.
RACE = """
.entry race(.param .u64 out)
{
    .reg .b64 %p; .reg .b32 %r<9>; .reg .pred %first; .shared .u32 s;
    ld.param.u64 %p, [out];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %p, %r0, 4, %p;
    setp.eq.u32 %first, %r0, 0;
    @%first st.shared.u32 [s], 7;
    bar.sync 0;
    ld.shared.u32 %r1, [s];
    @%first st.shared.u32 [s], 9;
    st.global.u32 [%p], %r1;
    ret;
}
"""


@contextmanager
def opened(name: str) -> Iterator[CpuContext]:
    context = driver_named(name).open_context("", 1 << 20)
    assert isinstance(context, CpuContext)
    try:
        yield context
    finally:
        context.close()


def run(name: str, text: str, kernel: str, blocks: int, threads: int) -> list[int]:
    """What a kernel stores, a word for each thread."""
    found = np.zeros(blocks * threads, "<u4")
    with opened(name) as context:
        out = context.mem_alloc(found.nbytes)
        made = context.module_load((HEAD + text).encode()).kernels[kernel]
        context.launch(made, (blocks, 1, 1), (threads, 1, 1), 0, out.to_bytes(8, "little"), 1)
        context.mem_read(out, found.data.cast("B"))
    return found.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_every_thread_runs_once_in_an_order_that_the_seed_decides(way: str) -> None:
    text = TICKETS.replace("ENTER", WAYS[way])
    runs = {seed: run(f"cpu::{seed}", text, "tickets", 3, 200) for seed in SEEDS}
    assert all(sorted(found) == list(range(600)) for found in runs.values())
    assert len({tuple(found) for found in runs.values()}) > 1
    # Another block than the first begins, and another warp within a block.
    assert {found.index(0) // 200 for found in runs.values()} != {0}
    assert {found[200:400].index(min(found[200:400])) // 32 for found in runs.values()} != {0}
    assert run(f"cpu:sm_80:{SEEDS[0]}", text, "tickets", 3, 200) == runs[SEEDS[0]]


def test_a_race_shows() -> None:
    assert 9 in run("cpu", RACE, "race", 1, 64)
    found = {seed: tuple(run(f"cpu::{seed}", RACE, "race", 1, 64)) for seed in SEEDS}
    assert len(set(found.values())) > 1


def test_the_operator_says_the_seed() -> None:
    assert load_config(None, {"shuffle_warps": 7}).driver_of_workers("cpu") == "cpu::7"
    assert load_config(None, {"shuffle_warps": 0, "arch": "sm_80"}).driver_of_workers("cpu") == "cpu:sm_80:0"
    assert load_config(None, {"shuffle_warps": 7}).driver_of_workers("cuda") == "cuda"
    assert load_config(None, {"launch_chains": False}).driver_of_workers("cuda") == "cuda:one-by-one"
    with pytest.raises(ConfigError, match="shuffle_warps is only for the embedded driver"):
        load_config(None, {"shuffle_warps": 7, "driver": "cuda"})
    with pytest.raises(ConfigError, match="shuffle_warps must be a whole number from 0 to 2147483647, not 2147483648"):
        load_config(None, {"shuffle_warps": 2**31})


def test_blocks_may_still_wait_for_one_another() -> None:
    text = """
.global .u32 arrived;
.entry meet(.param .u64 out)
{
    .reg .b64 %p; .reg .b32 %r<9>; .reg .pred %c;
    ld.param.u64 %p, [out];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mad.wide.u32 %p, %r1, 4, %p;
    atom.global.add.u32 %r0, [arrived], 1;
AGAIN:
    ld.volatile.global.u32 %r0, [arrived];
    setp.lt.u32 %c, %r0, 160;
    @%c bra AGAIN;
    st.global.u32 [%p], %r0;
    ret;
}
"""
    assert run("cpu::5", text, "meet", 4, 40) == [160] * 160
