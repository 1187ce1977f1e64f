"""Buffers that are freed and allocated again by the client, without the daemon: the program sees no difference."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from gpulease.client import AllocFailed, Buffer, GpuSession, InvalidHandle, LaunchFailed, aio
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, floats, numbers, scale_args

SIZE = 1 << 20
SLICE_BYTES = 64 << 20
N = SIZE // 4


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        yield session


def again(session: GpuSession, buffer: Buffer) -> Buffer:
    """Free a buffer, and allocate one of the same size. If it has the same address, the client had held the memory."""
    handle = buffer.handle
    session.mem_free(buffer)
    other = session.mem_alloc(buffer.size_bytes)
    assert other.handle == handle
    return other


def test_a_buffer_in_the_place_of_another_is_zero_behind_all_that_was_launched(session: GpuSession) -> None:
    module = session.module_load(TRANSFORM)
    buffer = session.mem_alloc(SIZE)
    for _ in range(3):
        session.mem_write(buffer, 0, numbers(N))
        session.launch(module, "bias", [N // 256], [256], scale_args(buffer, N, 10))
        old, buffer = buffer, again(session, buffer)
        assert not floats(session.mem_read(buffer, 0, SIZE)).any()
        with pytest.raises(InvalidHandle):
            session.mem_read(old, 0, 4)


def test_one_that_a_failure_kept_from_being_zeroed_is_zeroed_behind_it(session: GpuSession) -> None:
    module = session.module_load(TRANSFORM)
    buffer = session.mem_alloc(SIZE)
    session.mem_write(buffer, 0, numbers(N))
    session.launch(module, "bias", [1], [256], scale_args(buffer, N, 10), shared_bytes=1 << 30)
    buffer = again(session, buffer)
    with pytest.raises(LaunchFailed):
        session.sync()
    assert not floats(session.mem_read(buffer, 0, SIZE)).any()


def test_what_was_freed_is_there_for_any_other_allocation(session: GpuSession) -> None:
    for buffer in [session.mem_alloc(SIZE) for _ in range(4)] + [session.mem_alloc(256) for _ in range(500)]:
        session.mem_free(buffer)
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    assert session.mem_alloc(SLICE_BYTES).size_bytes == SLICE_BYTES


def test_the_lease_does_not_count_what_was_freed(daemon: Daemon) -> None:
    with daemon.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        session.mem_free(session.mem_alloc(SIZE))
        lease.used()  # Makes the client free what it holds.
        session.sync()
        assert lease.used().now_bytes == 0


def test_a_long_loop_that_nothing_settles(session: GpuSession) -> None:
    buffer = session.mem_alloc(SIZE)
    for _ in range(1000):
        buffer = again(session, buffer)
    assert not floats(session.mem_read(buffer, 0, SIZE)).any()


def test_a_graph_hears_of_it(session: GpuSession) -> None:
    module = session.module_load(TRANSFORM)
    buffer = session.mem_alloc(SIZE)
    with session.record() as graph:
        session.launch(module, "bias", [1], [256], scale_args(buffer, N, 10))
    again(session, buffer)
    with pytest.raises(InvalidHandle):
        graph.launch()


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.itself = buffer, self


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_buffers_in_garbage_make_room(session: GpuSession) -> None:
    first = Cycle(session.mem_alloc(SLICE_BYTES // 2))
    for _ in range(5):
        Cycle(session.mem_alloc(SLICE_BYTES // 2))
    # Far more than an operation frees before it.
    for _ in range(1000):
        Cycle(session.mem_alloc(256))
    with pytest.raises(AllocFailed):
        session.mem_alloc(SLICE_BYTES)
    assert first.buffer.is_alive
    del first
    assert session.mem_alloc(SLICE_BYTES).size_bytes == SLICE_BYTES


@pytest.mark.usefixtures("no_collection")
def test_and_so_they_do_with_asyncio(daemon: Daemon) -> None:
    async def main() -> None:
        wish = aio.GpuBuilder(daemon.address).min_vram(SLICE_BYTES).lease_secs(60)
        async with wish.acquire() as lease, aio.GpuSession(lease) as session:
            for _ in range(5):
                Cycle(await session.mem_alloc(SLICE_BYTES // 2))
            assert (await session.mem_alloc(SLICE_BYTES)).size_bytes == SLICE_BYTES

    asyncio.run(main())
