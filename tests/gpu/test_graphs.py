"""Launch graphs on a real card: their results, their memory, and what ends them."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import (
    Buffer,
    GpuSession,
    GpuSessionFailed,
    InvalidHandle,
    KernelArgs,
    LaunchFailed,
    LeaseExpired,
    SyncFailed,
)
from gpulease.daemon.drivers.interface import SEGMENT_STEPS
from gpulease.daemon.session.graph_operations import MAX_GRAPHS
from gpulease.protocol import Opcode
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, floats, numbers, scale_args, start_stray_store
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu

N = 100_000
MANY = 3 * SEGMENT_STEPS + 5
WIDE = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry wide(.param .u64 out, .param .align 4 .b8 data[3072])
{
    .reg .b64 %p;
    .reg .b32 %v;
    ld.param.u64 %p, [out];
    cvta.to.global.u64 %p, %p;
    ld.param.u32 %v, [data+3068];
    st.global.u32 [%p], %v;
    ret;
}
"""


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


def parametrised(buffer: Buffer, n: int = N) -> KernelArgs:
    args = KernelArgs().push_parameter("x", "buffer", buffer).push_u32(n)
    return args.push_parameter("factor", "f32", 2.0)


def test_copies_launches_and_constants_over_several_segments(session: GpuSession) -> None:
    module, buffer, other = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    with session.record() as graph:
        session.mem_write(buffer, 0, data)
        for _ in range(MANY):
            session.launch(module, "bias", [391], [256], parametrised(buffer))
        session.mem_write(buffer, 4, np.array([1000, 2000], np.float32).tobytes())
        session.launch(module, "scale", [391], [256], scale_args(buffer, N, 3))
        session.mem_read(buffer, 0, data.nbytes, into=back)
    for factor in (1, 1, 4):
        data[:] = numbers(N)
        graph.launch(factor=factor)
        session.sync()
        expected = (numbers(N) + MANY * factor) * 3
        expected[1:3] = (3000, 6000)
        np.testing.assert_array_equal(back, expected)
    # Two replays that wait one after the other keep their own arguments.
    graph.launch(x=other, factor=5)
    graph.launch(x=other, factor=7)
    graph.close()
    assert (floats(session.mem_read(other, 0, 4 * N)) == MANY * 12).all()


def test_a_launch_that_the_card_does_not_take(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    args = scale_args(buffer, N)
    for shape in ({"shared_bytes": 400_000}, {"grid": [1, 70_000, 1]}):
        with pytest.raises(LaunchFailed, match="scale"), session.record():
            session.launch(module, "scale", **{"grid": [1], "block": [32], "args": args} | shape)  # type: ignore[arg-type]
    with session.record() as graph:
        session.launch(module, "scale", [1], [32], args)
    graph.launch()
    session.sync()


def test_what_graphs_take_of_the_card_is_charged(session: GpuSession, cards: Cards) -> None:
    before = cards.used_bytes()
    module, buffer = session.module_load(WIDE), session.mem_alloc(4)
    data = session.empty(1024, np.uint8)
    args = KernelArgs().push_buffer(buffer).push_raw(bytes(3068) + b"\x01\x02\x03\x04")
    graphs = []
    for number in range(MAX_GRAPHS):
        with session.record() as graph:
            for _ in range(2 + number % 2 * 25):
                session.launch(module, "wide", [1], [1], args)
                session.mem_read(buffer, 0, 4, into=data)
        graph.launch()
        graphs.append(graph)
    session.sync()
    assert data[:4].tolist() == [1, 2, 3, 4]
    report = session.lease.query()
    taken = sum(cards.used_bytes()) - sum(before)
    print(f"{len(graphs)} graphs: the card shows {taken} bytes more, {report['allocated_bytes']} are charged")
    time.sleep(1)
    assert session.lease.query()["state"] == "active", "a session that holds more than was admitted is ended"


def test_a_fault_names_the_graphs_launch(session: GpuSession) -> None:
    module, buffer = session.module_load(FAULTS), session.mem_alloc(4 * N)
    with session.record() as graph:
        start_stray_store(session, module, buffer)
        start_stray_store(session, module, buffer)
    number = graph.launch()
    with pytest.raises(SyncFailed, match="a kernel of a graph") as caught:
        session.sync()
    failure = caught.value.failure
    assert (failure.failed_request_id, failure.failed_op) == (number, Opcode.GRAPH_LAUNCH)


def test_an_endless_kernel_in_a_graph_ends_with_its_lease(daemon: Daemon) -> None:
    with daemon.builder(64 << 20).lease_secs(2).acquire() as lease, GpuSession(lease) as session:
        module, flag = session.module_load(FAULTS), session.mem_alloc(4)
        with session.record() as graph:
            session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(flag))
        graph.launch()
        started = time.monotonic()
        with pytest.raises(LeaseExpired):
            session.sync()
        assert time.monotonic() - started < 4


def test_a_bound_on_kernels_holds_in_graphs_for_each_kernel(daemon: Daemon) -> None:
    with daemon.builder(64 << 20).max_kernel_secs(0.5).acquire() as lease, GpuSession(lease) as session:
        module, out = session.module_load(FAULTS), session.mem_alloc(4)
        with session.record() as graph:
            for _ in range(SEGMENT_STEPS + 8):
                session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(out).push_u32(1_500_000))
        with session.record() as endless:
            session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(out))
        session.mem_write(out, 0, bytes(4))
        started = time.monotonic()
        graph.launch()
        graph.launch()
        session.sync()
        assert time.monotonic() - started > 1
        session.mem_write(out, 0, bytes(4))
        endless.launch()
        with pytest.raises(GpuSessionFailed, match="a kernel ran for"):
            session.sync()


def test_what_it_needs_goes_while_it_runs(session: GpuSession) -> None:
    busy, module = session.module_load(FAULTS), session.module_load(TRANSFORM)
    buffer, other = session.mem_alloc(4 * N), session.mem_alloc(4 * N)
    with session.record() as graph:
        for _ in range(SEGMENT_STEPS):
            session.launch(module, "bias", [391], [256], parametrised(buffer))
    with session.record() as constant:
        session.mem_write(other, 0, numbers(1000).tobytes())
    session.launch(busy, "slow", [1], [1], KernelArgs().push_buffer(buffer).push_u32(5_000_000))
    graph.launch(x=other, factor=1)
    constant.launch()
    constant.close()
    session.module_unload(module)
    with pytest.raises(InvalidHandle):
        graph.launch()
    result = floats(session.mem_read(other, 0, 4 * N))
    assert (result[1000:] == SEGMENT_STEPS).all()
    assert (result[:1000] == numbers(1000)).all()
    with session.record() as again:
        session.mem_write(other, 0, bytes(4000))
    again.launch()
    assert (floats(session.mem_read(other, 0, 4000)) == 0).all()


EARLY = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry slow(.param .u64 out)
{
    .reg .b64 %d<4>;
    .reg .pred %p;
    griddepcontrol.launch_dependents;
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d1, %d1;
    mov.u64 %d2, %globaltimer;
    add.u64 %d2, %d2, 20000000;
AGAIN:
    mov.u64 %d3, %globaltimer;
    setp.lt.u64 %p, %d3, %d2;
    @%p bra AGAIN;
    st.global.u64 [%d1], %d3;
    ret;
}
.visible .entry between()
{
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    ret;
}
.visible .entry next(.param .u64 out)
{
    .reg .b64 %d<4>;
    mov.u64 %d2, %globaltimer;
    griddepcontrol.wait;
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d1, %d1;
    ld.global.u64 %d3, [%d1];
    st.global.u64 [%d1+8], %d2;
    st.global.u64 [%d1+16], %d3;
    ret;
}
.visible .entry reading(.param .u64 out, .param .u64 constant)
{
    .reg .b64 %d<6>;
    .pragma "gpulease.early_reads";
    ld.param.u64 %d4, [constant];
    cvta.to.global.u64 %d4, %d4;
    ld.global.u64 %d5, [%d4];
    mov.u64 %d2, %globaltimer;
    griddepcontrol.wait;
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d1, %d1;
    ld.global.u64 %d3, [%d1];
    st.global.u64 [%d1+8], %d2;
    st.global.u64 [%d1+16], %d3;
    st.global.u64 [%d1+24], %d5;
    ret;
}
"""


def test_a_kernel_that_waits_by_itself_starts_before_the_one_before_it_ends(session: GpuSession) -> None:
    if session.compute_capability < 90:
        pytest.skip("griddepcontrol is for compute capability 9.0 and later")
    module, times = session.module_load(EARLY), session.zeros(3, np.uint64)
    with session.record() as graph:
        session.launch(module, "slow", [1], [1], [times])
        session.launch(module, "next", [1], [1], [times])
    for _ in range(3):
        graph.launch()
        session.sync()
        end, start, seen = (int(value) for value in times.numpy())
        # The kernel started during the 20 ms of the first one, and waited for what that one wrote at its end.
        assert end - 20_000_000 < start < end
        assert seen == end


def test_a_kernel_reads_what_nobody_writes_before_the_one_before_it_ends(session: GpuSession) -> None:
    if session.compute_capability < 90:
        pytest.skip("griddepcontrol is for compute capability 9.0 and later")
    module, times = session.module_load(EARLY), session.zeros(4, np.uint64)
    constant = session.array(np.array([41], np.uint64))
    with session.record() as graph:
        session.launch(module, "slow", [1], [1], [times])
        session.launch(module, "reading", [1], [1], [times, constant])
    for _ in range(3):
        graph.launch()
        session.sync()
        end, start, seen, read = (int(value) for value in times.numpy())
        assert end - 20_000_000 < start < end
        assert (seen, read) == (end, 41)


def test_an_early_kernel_sees_what_came_before_the_kernel_that_it_waits_for(session: GpuSession) -> None:
    """`between` lets the next kernel start while `slow` runs, but ends only after `slow`."""
    if session.compute_capability < 90:
        pytest.skip("griddepcontrol is for compute capability 9.0 and later")
    module, buffers = session.module_load(EARLY), [session.mem_alloc(24) for _ in range(2)]
    with session.record() as graph:
        session.launch(module, "slow", [1], [1], KernelArgs().push_parameter("slow", "buffer", buffers[0]))
        for _ in range(3):
            session.launch(module, "between", [1], [1], [])
        session.launch(module, "next", [1], [1], KernelArgs().push_parameter("next", "buffer", buffers[0]))
    # Each replay has other parameters.
    for buffer in (buffers[0], buffers[1], buffers[1], buffers[0]):
        session.mem_write(buffer, 0, bytes(24))
        graph.launch(slow=buffer, next=buffer)
        end, _, seen = np.frombuffer(session.mem_read(buffer, 0, 24), np.uint64).tolist()
        assert seen == end > 0


def test_what_graphs_of_early_kernels_take_of_the_card_is_charged(session: GpuSession, cards: Cards) -> None:
    if session.compute_capability < 90:
        pytest.skip("griddepcontrol is for compute capability 9.0 and later")
    before = cards.used_bytes()
    module, graphs = session.module_load(EARLY), []
    for number in range(MAX_GRAPHS):
        with session.record() as graph:
            for _ in range(2 + number % 2 * (SEGMENT_STEPS - 2)):
                session.launch(module, "between", [1], [1], [])
        graph.launch()
        graphs.append(graph)
    session.sync()
    report = session.lease.query()
    taken = sum(cards.used_bytes()) - sum(before)
    print(f"{len(graphs)} graphs: the card shows {taken} bytes more, {report['allocated_bytes']} are charged")
    time.sleep(1)
    assert session.lease.query()["state"] == "active", "a session that holds more than was admitted is ended"
