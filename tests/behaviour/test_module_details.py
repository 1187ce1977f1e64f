"""Reports about modules' variables and kernels, with both APIs and a real daemon."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import GpuExclusivityClass, GpuSession, Graph, InvalidHandle, InvalidRequest, Module, aio
from helpers.daemon import Daemon
from helpers.kernels import VARIABLES

WEIGHTS = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def session(shared_daemon: Daemon) -> Iterator[GpuSession]:
    lease = shared_daemon.builder(16 << 20, seconds=600).exclusivity(GpuExclusivityClass.SHARED).acquire()
    with lease, GpuSession(lease) as session:
        yield session


@pytest.fixture
def module(session: GpuSession) -> Module:
    return session.module_load(VARIABLES)


def test_a_kernel_sees_what_was_written_and_the_tenant_what_it_counted(session: GpuSession, module: Module) -> None:
    weights, count = module.variable("weights"), module.variable("count")
    assert (weights.size_bytes, count.size_bytes) == (32, 4)
    session.mem_write(weights, 0, WEIGHTS)
    result = session.mem_alloc(32)
    for factor in (1, 2):
        session.mem_write(weights, 4, (factor * WEIGHTS)[1:])
        session.launch(module, "weigh", [1], [8], [result])
        assert np.frombuffer(session.mem_read(result, 0, 32), np.float32).tolist() == (factor * WEIGHTS).tolist()
    assert session.mem_read(count, 0, 4) == (7 + 16).to_bytes(4, "little")


def test_a_variable_is_an_argument_like_a_buffer(session: GpuSession, module: Module) -> None:
    table = module.variable("table")
    session.mem_write(module.variable("weights"), 0, WEIGHTS)
    session.launch(module, "weigh", [1], [8], [table])
    assert session.mem_read(table, 0, 32) == WEIGHTS.tobytes()


def test_a_graph_writes_a_variable_anew(session: GpuSession, module: Module) -> None:
    weights, result = module.variable("weights"), session.mem_alloc(32)
    given = session.empty(8, np.float32)
    with session.record() as graph:
        session.mem_write(weights, 0, given)
        session.launch(module, "weigh", [1], [8], [result])
    for turn in (3, 5):
        given[:] = turn
        graph.launch()
        session.sync()
        assert np.frombuffer(session.mem_read(result, 0, 32), np.float32).tolist() == [turn] * 8


@pytest.mark.parametrize("name", ["nope", "weigh", "empty"])
def test_a_name_that_is_no_variable_is_said(session: GpuSession, module: Module, name: str) -> None:
    with pytest.raises(InvalidHandle, match=f"has no variable '{name}'"):
        module.variable(name)


@pytest.mark.parametrize("name", ["", "weights\0", "v" * 5000, 7])
def test_what_can_be_no_name_is_not_asked(module: Module, name: str) -> None:
    with pytest.raises(InvalidRequest):
        module.variable(name)


def test_bounds_hold(session: GpuSession, module: Module) -> None:
    count = module.variable("count")
    for offset, size in ((0, 5), (4, 1), (-1, 1)):
        with pytest.raises(InvalidHandle):
            session.mem_write(count, offset, bytes(size))
    # If a caller claims a wrong size, the worker's own bounds apply.
    lying = session.buffer(count.handle, 64)
    with pytest.raises(InvalidHandle, match="outside the allocation"):
        session.mem_read(lying, 0, 5)
    with pytest.raises(InvalidHandle, match="not a live allocation"):
        session.mem_read(session.buffer(count.handle + 1, 1), 0, 1)


def run(session: GpuSession, graph: Graph) -> None:
    graph.launch()
    session.sync()


def test_a_variable_ends_with_its_module_alone(session: GpuSession) -> None:
    module = session.module_load(VARIABLES)
    count = module.variable("count")
    with pytest.raises(InvalidHandle, match="count is a variable"):
        session.mem_free(count)
    session.mem_free(session.buffer(count.handle, 4))
    with pytest.raises(InvalidHandle, match="is a module's variable"):
        session.sync()
    assert session.mem_read(count, 0, 4) == b"\x07\0\0\0"
    stale = session.buffer(count.handle, 4)
    with session.record() as graph:
        session.mem_write(count, 0, bytes(4))
    session.module_unload(module)
    assert not count.is_alive
    with pytest.raises(InvalidHandle, match=r"module .* is freed"):
        session.mem_read(count, 0, 4)
    with pytest.raises(InvalidHandle, match="not a live allocation"):
        session.mem_read(stale, 0, 4)
    with pytest.raises(InvalidHandle, match=r"module .* is freed"):
        run(session, graph)
    with pytest.raises(InvalidHandle):
        module.variable("count")


def test_another_session_does_not_reach_it(shared_daemon: Daemon, module: Module) -> None:
    count = module.variable("count")
    with shared_daemon.builder(1 << 20).acquire() as lease, GpuSession(lease) as other:
        with pytest.raises(InvalidHandle, match="belongs to another session"):
            other.mem_read(count, 0, 4)
        with pytest.raises(InvalidHandle, match="not a live allocation"):
            other.mem_read(other.buffer(count.handle, 4), 0, 4)


def test_figures_of_the_kernels(session: GpuSession, module: Module) -> None:
    figures = module.kernel_figures()
    assert list(figures) == list(module.kernels)
    weigh, tile = figures["weigh"], figures["tile"]
    assert weigh.shared_bytes == 0
    assert tile.shared_bytes == 4096
    assert tile.max_dynamic_shared_bytes == weigh.max_dynamic_shared_bytes - 4096
    session.launch(module, "tile", [1], [1], [], shared_bytes=tile.max_dynamic_shared_bytes)
    session.sync()


def test_the_asyncio_face(shared_daemon: Daemon) -> None:
    async def scenario() -> bytes:
        builder = aio.GpuBuilder(shared_daemon.address).min_vram(1 << 20)
        async with builder.acquire() as lease, aio.GpuSession(lease) as session:
            module = await session.module_load(VARIABLES)
            count = await module.variable("count")
            assert (await module.kernel_figures())["tile"].shared_bytes == 4096
            await session.mem_write(count, 2, b"\x01")
            return await session.mem_read(count, 0, 4)

    assert asyncio.run(scenario()) == b"\x07\0\x01\0"
