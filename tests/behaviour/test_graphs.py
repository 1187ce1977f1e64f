"""Launch graphs through a daemon: recorded once, launched with other values, invalid once a needed object is gone."""

import asyncio
import gc
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client import (
    Buffer,
    GpuSession,
    Graph,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    Module,
    Revoked,
    SyncFailed,
    aio,
)
from gpulease.client.core.recorder import Recording
from gpulease.protocol import Opcode
from gpulease.protocol.operations import Trait, having
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, floats, numbers, scale_args, start_stray_store

N = 1000


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


def parametrised(buffer: Buffer, factor: float = 2.0) -> KernelArgs:
    args = KernelArgs().push_parameter("x", "buffer", buffer).push_u32(N)
    return args.push_parameter("factor", "f32", factor)


def launch(session: GpuSession, module: Module, kernel: str, args: KernelArgs) -> int:
    return session.launch(module, kernel, [4], [256], args)


def recorded(session: GpuSession, module: Module, buffer: Buffer) -> Graph:
    with session.record() as graph:
        launch(session, module, "scale", parametrised(buffer))
        launch(session, module, "bias", scale_args(buffer, N, 10))
    return graph


def read(session: GpuSession, buffer: Buffer) -> NDArray[np.float32]:
    return floats(session.mem_read(buffer, 0, 4 * N))


def test_copies_and_launches_again_and_again(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    with session.record() as graph:
        session.mem_write(buffer, 0, data)
        launch(session, module, "scale", parametrised(buffer))
        session.mem_write(buffer, 4, np.float32(-1).tobytes())
        assert session.mem_read(buffer, 0, data.nbytes, into=back) is back
    assert (read(session, buffer) == 0).all(), "recording does nothing"
    assert graph.parameters == ("x", "factor")
    before = session.lease.query()["operations"]
    for start, factor in ((1.0, None), (5.0, 3.0), (7.0, np.float32(0.5))):
        data[:] = numbers(N) + start
        assert (graph.launch() if factor is None else graph.launch(factor=factor)) > 0
        session.sync()
        expected = data * np.float32(factor or 2)
        expected[1] = -1
        np.testing.assert_array_equal(back, expected)
    assert session.lease.query()["operations"] == before + 3 * 2, "one request a launch, one a sync"
    graph.close()
    with pytest.raises(InvalidHandle, match="the graph is closed"):
        graph.launch()


def test_every_operation_that_can_be_a_node_is_recorded(session: GpuSession) -> None:
    module, buffer, data = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.empty(N, np.float32)
    with session.record():
        session.mem_write(buffer, 0, data)
        session.mem_write(buffer, 0, bytes(4))
        launch(session, module, "scale", parametrised(buffer))
        session.mem_read(buffer, 0, 4 * N, data)
        recording = session._session.attachment.recording
        assert isinstance(recording, Recording)
        assert {node.op for node in recording._nodes} == having(Trait.RECORDED)


def test_in_a_stream(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    graph = recorded(session, module, buffer)
    graph.launch()
    with session.stream() as stream:
        data[:] = numbers(N)
        stream.wait_for(session.default_stream)
        session.mem_write(buffer, 0, data, stream=stream)
        graph.launch(stream=stream, factor=3.0)
        session.mem_read(buffer, 0, data.nbytes, into=back, stream=stream)
        stream.sync()
    np.testing.assert_array_equal(back, numbers(N) * 3 + 10)
    with pytest.raises(InvalidHandle, match=r"launch of a graph: stream .* is freed"):
        graph.launch(stream=stream)
    graph.launch()
    np.testing.assert_array_equal(read(session, buffer), (numbers(N) * 3 + 10) * 2 + 10)


def test_buffers_are_parameters(daemon: Daemon, session: GpuSession) -> None:
    module = session.module_load(TRANSFORM)
    one, other = session.mem_alloc(4 * N), session.mem_alloc(8 * N)
    session.mem_write(other, 0, np.tile(numbers(N), 2))
    graph = recorded(session, module, one)
    graph.launch()
    graph.launch(x=(other, 4 * N), factor=5)
    graph.launch(x=one)
    assert (read(session, one) == (10 + 10) * 2 + 10).all()
    rest = floats(session.mem_read(other, 0, 8 * N))
    np.testing.assert_array_equal(rest, np.concatenate([numbers(N), numbers(N) * 5]))
    with daemon.builder().acquire() as lease, GpuSession(lease) as beside:
        foreign = beside.mem_alloc(4)
        for values in (
            {"x": foreign},
            {"x": 5},
            {"x": (other, 8 * N + 1)},
            {"factor": "a"},
            {"factor": None},
            {"y": 1},
        ):
            with pytest.raises((InvalidHandle, InvalidRequest), match="launch of a graph: "):
                graph.launch(**values)


@pytest.mark.parametrize("gone", ["buffer", "rebound", "module"])
def test_what_a_graph_needs_is_gone(session: GpuSession, gone: str) -> None:
    module, buffer, other = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.mem_alloc(4 * N)
    graph = recorded(session, module, buffer)
    graph.launch(x=other)
    if gone == "module":
        session.module_unload(module)
    else:
        session.mem_free(other if gone == "rebound" else buffer)
    with pytest.raises(InvalidHandle, match="is freed"):
        graph.launch(x=other)
    if gone == "rebound":
        graph.launch()
        session.sync()
        return
    # Now the worker's own check, for a client that does not check. An allocation of another size makes the client free
    # what it holds.
    session.mem_alloc(4)
    object.__setattr__(graph._contents, "handles", ())
    number = graph.launch(x=other)
    with pytest.raises(InvalidHandle, match=f"earlier GRAPH_LAUNCH {number} failed: graph .* uses") as caught:
        session.sync()
    assert caught.value.failure.failed_op == Opcode.GRAPH_LAUNCH
    session.sync()


def test_a_fault_names_the_graphs_launch(session: GpuSession) -> None:
    module, buffer = session.module_load(FAULTS), session.mem_alloc(4 * N)
    with session.record() as graph:
        start_stray_store(session, module, buffer)
    number = graph.launch()
    graph.launch()
    with pytest.raises(SyncFailed) as caught:
        session.sync()
    failure = caught.value.failure
    assert (failure.failed_request_id, failure.failed_op, failure.kernel) == (
        number,
        Opcode.GRAPH_LAUNCH,
        "stray_store",
    )
    session.sync()


def test_dropped_graphs_go_and_their_buffers_with_them(session: GpuSession) -> None:
    module, buffer, data = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.empty(N, np.float32)
    graph = recorded(session, module, buffer)
    with session.record() as copying:
        session.mem_read(buffer, 0, data.nbytes, into=data)
    place = data.ctypes.data
    graph.launch()
    copying.launch()
    del buffer, data, graph, copying, module
    gc.collect()
    assert session.empty(N, np.float32).ctypes.data != place, "a copy into it may still run"
    session.sync()
    session.sync()
    assert session.lease.query()["allocated_bytes"] == 0
    assert session.empty(N, np.float32).ctypes.data == place


def launch_for_ever(graph: Graph) -> None:
    while True:
        graph.launch()


def test_a_revoked_lease(daemon: Daemon) -> None:
    lease = daemon.builder(64 << 20).acquire()
    session = GpuSession(lease)
    graph = recorded(session, session.module_load(TRANSFORM), session.mem_alloc(4 * N))
    daemon.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        launch_for_ever(graph)


def test_without_shared_memory_graphs_have_launches_and_constants(daemon: Daemon) -> None:
    with daemon.builder(1 << 20).acquire() as lease, GpuSession(lease, shared_memory=False) as session:
        module, buffer, data = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.empty(N, np.float32)
        data[:] = numbers(N)
        with session.record() as graph:
            with pytest.raises(InvalidRequest, match="not shared"):
                session.mem_write(buffer, 0, data)
            with pytest.raises(InvalidRequest, match="not shared"):
                session.mem_read(buffer, 0, data.nbytes, into=data)
            session.mem_write(buffer, 0, bytes(data))
            launch(session, module, "bias", parametrised(buffer))
        for more in range(100):
            graph.launch(factor=more)
        np.testing.assert_array_equal(read(session, buffer), numbers(N) + 99)


def test_asyncio(daemon: Daemon) -> None:
    async def main() -> None:
        wish = aio.GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60)
        async with wish.acquire() as lease, aio.GpuSession(lease) as session:
            module, buffer = await session.module_load(TRANSFORM), await session.mem_alloc(4 * N)
            data, back = session.empty(N, np.float32), session.empty(N, np.float32)
            async with session.record() as graph:
                await session.mem_write(buffer, 0, data)
                await session.launch(module, "scale", [4], [256], parametrised(buffer))
                await session.mem_read(buffer, 0, data.nbytes, into=back)
            for factor, stream in ((2, None), (3, await session.stream())):
                data[:] = numbers(N) + factor
                await graph.launch(factor=factor, stream=stream)
                await session.sync()
                np.testing.assert_array_equal(back, data * factor)
            await graph.close()
            with pytest.raises(InvalidHandle):
                await graph.launch()

    asyncio.run(main())
