"""Blocks of one launch on several host threads: each runs once, in areas of its own, and may wait for any other."""

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gpulease.daemon.drivers.interface import KernelFault, UnusableSetting
from gpulease.daemon.native.compiler import NativeCode
from gpulease.daemon.ptx import stream
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.ptx.limits import (
    MAX_LIVE_REGISTERS,
    MAX_LOCAL_BYTES,
    MAX_RESIDENT_BLOCKS,
    MAX_THREADS_PER_BLOCK,
)
from gpulease.daemon.ptx.memory import IN_ORDER, Areas, KernelNeeds
from gpulease.daemon.ptx.native.structures import (
    BOARD_BYTES,
    MAX_HEAD_BYTES,
    SLOT_BYTES,
    BlockEnvironment,
    Fault,
    KernelRunning,
    QueuedLaunch,
    Team,
)
from gpulease.daemon.ptx.stream import THREADS_VARIABLE, host_threads

HEAD = """
.version 8.0
.target sm_80
.address_size 64
"""

# Every kernel takes one pointer; %b is the block's number, %n how many there are, %t the thread's.
KERNEL = """
.visible .entry {name}(.param .u64 into)
{{
    .shared .align 4 .b32 all[64];
    .local .align 4 .b32 own[4];
    .reg .pred %p, %q;
    .reg .b32 %b, %n, %t, %v, %w, %s<4>;
    .reg .f32 %f;
    .reg .b64 %at, %mine, %next;
    ld.param.u64 %at, [into];
    mov.u32 %b, %ctaid.x;
    mov.u32 %n, %nctaid.x;
    mov.u32 %t, %tid.x;
    mad.wide.u32 %mine, %b, 4, %at;
    setp.ne.u32 %p, %t, 0;
    {body}
    ret;
}}
"""

BODIES = {
    "count": "atom.global.add.u32 %v, [%mine], 1;",
    # Each block waits until the one behind it has set its flag; the last need not.
    "backwards": """
        @%p bra TOGETHER;
        add.u32 %w, %b, 1;
        setp.eq.u32 %q, %w, %n;
        @%q bra SET;
    LOOK:
        ld.acquire.gpu.global.u32 %v, [%mine+4];
        setp.eq.u32 %q, %v, 0;
        @%q bra LOOK;
    SET:
        st.release.gpu.global.u32 [%mine], %w;
    TOGETHER:
        bar.sync 0;""",
    # A barrier over the grid; word 0 counts, behind it each block leaves a word and reads the next one's.
    "grid": """
        add.u32 %w, %b, 100;
        @!%p st.global.u32 [%mine+4], %w;
        bar.sync 0;
        @%p bra TOGETHER;
        fence.acq_rel.gpu;
        red.release.gpu.global.add.u32 [%at], 1;
    LOOK:
        ld.acquire.gpu.global.u32 %v, [%at];
        setp.lt.u32 %q, %v, %n;
        @%q bra LOOK;
    TOGETHER:
        bar.sync 0;
        add.u32 %w, %b, 1;
        rem.u32 %w, %w, %n;
        mad.wide.u32 %next, %w, 4, %at;
        ld.global.u32 %v, [%next+4];
        mad.wide.u32 %mine, %n, 4, %mine;
        @!%p st.global.u32 [%mine+4], %v;""",
    # Sums to words 0 to 2, in ways that are one step only if the host makes them so.
    "sums": """
        atom.global.add.f32 %f, [%at], 0f3F800000;
        atom.global.inc.u32 %v, [%at+4], 1000000;
        ld.relaxed.gpu.global.u32 %v, [%at+8];
    AGAIN:
        mov.u32 %s0, %v;
        add.u32 %w, %s0, 3;
        atom.global.cas.b32 %v, [%at+8], %s0, %w;
        setp.ne.u32 %q, %v, %s0;
        @%q bra AGAIN;""",
    # What others of the block left in shared memory, and the thread in its own, across a barrier.
    "areas": """
        mov.u64 %next, all;
        cvta.shared.u64 %next, %next;
        mad.wide.u32 %next, %t, 4, %next;
        st.u32 [%next], %b;
        st.local.u32 [own+8], %b;
        bar.sync 0;
        xor.b32 %w, %t, 1;
        mov.u64 %next, all;
        cvta.shared.u64 %next, %next;
        mad.wide.u32 %next, %w, 4, %next;
        ld.u32 %v, [%next];
        ld.local.u32 %w, [own+8];
        add.u32 %v, %v, %w;
        atom.global.add.u32 %w, [%mine], %v;""",
    # Block 0 waits for what never comes; the others fault.
    "faults": """
        setp.ne.u32 %q, %b, 0;
        @%q trap;
    LOOK:
        ld.volatile.global.u32 %v, [%at];
        setp.eq.u32 %q, %v, 0;
        @%q bra LOOK;""",
}
PTX = HEAD + "".join(KERNEL.format(name=name, body=body) for name, body in BODIES.items())

TOGETHER = (
    HEAD
    + """
.func wait(.param .b64 at)
{
    .reg .pred %p;
    .reg .b32 %v;
    .reg .b64 %at;
    ld.param.u64 %at, [at];
LOOK:
    ld.acquire.gpu.global.u32 %v, [%at];
    setp.eq.u32 %p, %v, 0;
    @%p bra LOOK;
    ret;
}
.visible .entry meet(.param .u64 into)
{
    .reg .pred %p;
    .reg .b32 %b;
    .reg .b64 %at, %mine, %other;
    ld.param.u64 %at, [into];
    mov.u32 %b, %ctaid.x;
    mad.wide.u32 %mine, %b, 4, %at;
    st.release.gpu.global.u32 [%mine], 1;
    xor.b32 %b, %b, 1;
    mad.wide.u32 %other, %b, 4, %at;
    {
        .param .b64 given;
        st.param.b64 [given], %other;
        call wait, (given);
    }
    ret;
}
"""
)


@pytest.fixture(scope="module", params=[1, 3])
def shared(request: pytest.FixtureRequest) -> Iterator[CpuContext]:
    context = CpuContext(1 << 22, hosts=request.param)
    context.module_load(PTX.encode())
    yield context
    context.close()


@pytest.fixture
def context(shared: CpuContext) -> Iterator[CpuContext]:
    before = threading.active_count()
    yield shared
    assert shared.rest()
    assert threading.active_count() == before


def run(
    context: CpuContext, name: str, blocks: int, threads: int, words: int
) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """So many words, zeros at first, as the kernel leaves them."""
    into = context.mem_alloc(4 * words)
    try:
        (module,) = context._modules
        kernel = module.kernels[name]
        context.launch(kernel, (blocks, 1, 1), (threads, 1, 1), 0, into.to_bytes(8, "little"), 7)
        found = bytearray(4 * words)
        context.mem_read(into, memoryview(found))
    finally:
        context.mem_free(into)
    return np.frombuffer(found, np.uint32)


def test_every_block_runs_once(context: CpuContext) -> None:
    for blocks in (1, 2, 5, 63, 20_000):
        assert (run(context, "count", blocks, 1, blocks) == 1).all()


@pytest.mark.parametrize("threads", [1, 64])
def test_a_block_may_wait_for_a_later_one(context: CpuContext, threads: int) -> None:
    for blocks in (2, 40):
        assert (run(context, "backwards", blocks, threads, blocks + 1)[:blocks] > 0).all()


@pytest.mark.parametrize(("blocks", "threads"), [(2, 1), (60, 33), (MAX_RESIDENT_BLOCKS, 1)])
def test_a_barrier_over_the_grid(context: CpuContext, blocks: int, threads: int) -> None:
    found = run(context, "grid", blocks, threads, 2 * blocks + 1)
    assert found[0] == blocks
    assert (found[1 + blocks :] == 100 + (np.arange(blocks) + 1) % blocks).all()


def test_atomics_are_one_step(context: CpuContext) -> None:
    found = run(context, "sums", 4000, 16, 3)
    assert found[:1].view(np.float32)[0] == 64_000
    assert list(found[1:]) == [64_000, 192_000]


def test_blocks_have_areas_of_their_own(context: CpuContext) -> None:
    blocks = 3000
    assert (run(context, "areas", blocks, 64, blocks) == 128 * np.arange(blocks)).all()


def test_one_fault_ends_all_blocks(context: CpuContext) -> None:
    for _ in range(5):
        with pytest.raises(KernelFault, match=r"trap executed by thread \(0,0,0\) of block \([1-9]\d*,0,0\)") as caught:
            run(context, "faults", 300, 1, 1)
        assert caught.value.tag == 7
        assert (run(context, "count", 300, 1, 300) == 1).all()


def test_launches_in_turn_wake_helpers_or_not(context: CpuContext) -> None:
    for blocks in [1, 4000, 2, 3] * 25:
        assert run(context, "count", blocks, 1, blocks).sum() == blocks


def test_blocks_run_at_the_same_time() -> None:
    """Block 0 waits in a function, where it can't be set aside, for block 1."""
    context = CpuContext(1 << 20, hosts=2)
    try:
        kernel = context.module_load(TOGETHER.encode()).kernels["meet"]
        into = context.mem_alloc(8)
        context.launch(kernel, (2, 1, 1), (1, 1, 1), 0, into.to_bytes(8, "little"), 1)
        found = bytearray(8)
        context.mem_read(into, memoryview(found))
        assert found == bytes([1, 0, 0, 0] * 2)
    finally:
        context.close()


def test_without_threads_to_be_had_there_are_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = stream.NativeThread

    def refuse(code: NativeCode, function: str, argument: int) -> stream.NativeThread:
        if function == "run_helper":
            raise RuntimeError("can't start new thread")
        return start(code, function, argument)

    context = CpuContext(1 << 22, hosts=3)
    try:
        context.module_load(PTX.encode())
        monkeypatch.setattr(stream, "NativeThread", refuse)
        assert (run(context, "count", 500, 1, 500) == 1).all()
    finally:
        context.close()


def test_without_a_thread_for_the_stream_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> stream.NativeThread:
        raise RuntimeError("can't start new thread")

    context = CpuContext(1 << 22, hosts=1)
    try:
        context.module_load(PTX.encode())
        with monkeypatch.context() as patch:
            patch.setattr(stream, "NativeThread", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                run(context, "count", 500, 1, 500)
        assert (run(context, "count", 500, 1, 500) == 1).all()
    finally:
        context.close()


def test_the_loop_s_offsets_are_the_structures() -> None:
    def offsets(structure: type[ctypes.Structure], names: str) -> list[int]:
        return [getattr(structure, name).offset for name in names.split()]

    assert offsets(Team, "launch environments helpers wake_ns idle_yields ending") == list(range(0, 48, 8))
    assert offsets(Team, "next stop fault used") == list(range(64, 96, 8))
    assert offsets(Team, "state idle work done") == [128, 136, 192, 224]
    assert offsets(
        QueuedLaunch, "entry blocks chunk environment_count shared_stride local_stride frame_stride running"
    ) == [
        0,
        8,
        64,
        68,
        72,
        76,
        80,
        88,
    ]
    assert offsets(KernelRunning, "block_ns entry first_code_ns") == [0, 8, 16]
    names = "arena shadow last_granule shared local frames fault prints block resumes next"
    assert offsets(BlockEnvironment, names) == list(range(0, 88, 8))
    assert (ctypes.sizeof(BlockEnvironment), ctypes.sizeof(Fault)) == (128, 80)


def test_the_operator_bounds_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(200))
    for setting, threads in (("", 64), ("3", 3), ("100", 64)):
        monkeypatch.setenv(THREADS_VARIABLE, setting)
        assert host_threads() == threads


@pytest.mark.parametrize("setting", ["0", "-1", "many", "1.5", "²"])
def test_a_setting_that_is_no_number_of_threads_keeps_the_driver_from_starting(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, setting)
    with pytest.raises(UnusableSetting, match="must be a number of threads"):
        CpuDriver().preload()


def test_there_is_room_for_the_largest_block() -> None:
    frame_bytes = MAX_HEAD_BYTES + SLOT_BYTES * MAX_LIVE_REGISTERS
    largest = KernelNeeds(0, MAX_LOCAL_BYTES, BOARD_BYTES, frame_bytes, parks=True)
    assert largest.fit(MAX_THREADS_PER_BLOCK)
    assert not replace(largest, local_bytes_per_thread=5 * MAX_LOCAL_BYTES).fit(MAX_THREADS_PER_BLOCK)
    assert not replace(largest, frame_bytes_per_thread=5 * frame_bytes).fit(MAX_THREADS_PER_BLOCK)


def test_places_are_as_many_as_fit_and_lie_apart() -> None:
    areas = Areas(BlockEnvironment())
    try:
        needs = KernelNeeds(5000, 100, 0, 64, parks=False)
        assert areas.spread(needs, 1, 32, 0, 4) == areas.spread(needs, 100, 32, 0, 1) == IN_ORDER
        assert areas.spread(needs, 640, 32, 4097, 4) == (10, 1024, 8192, 12288, 4096)
        assert areas.spread(replace(needs, parks=True), 1, 32, 0, 1) == (1, 1024, 0, 12288, 4096)
        large = replace(needs, local_bytes_per_thread=MAX_LOCAL_BYTES)
        assert areas.spread(large, 10**9, 1024, 0, 4)[:2] == (64, 3)
    finally:
        areas.close()
