"""Streams of a session on a real daemon. The embedded driver executes them in the order of the requests."""

import asyncio
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import (
    Busy,
    GpuExclusivityClass,
    GpuLease,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    LaunchFailed,
    LeaseExpired,
    Module,
    Stream,
    SyncFailed,
    aio,
)
from gpulease.protocol.limits import MAX_STREAMS
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, FAULTS, TRANSFORM, grid_for, numbers, scale_args, start_endless, start_stray_store
from helpers.waiting import wait_until

N = 1000
BYTES = 4 * N


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


@pytest.fixture
def module(session: GpuSession) -> Module:
    return session.module_load(TRANSFORM)


def operations(session: GpuSession) -> int:
    return int(session.lease.query()["operations"])


@pytest.mark.parametrize("shared_memory", [True, False])
def test_copies_and_kernels_in_two_streams(daemon: Daemon, shared_memory: bool) -> None:
    with (
        daemon.builder(64 << 20).acquire() as lease,
        GpuSession(lease, shared_memory=shared_memory) as session,
        session.stream() as one,
        session.stream() as two,
    ):
        module = session.module_load(TRANSFORM)
        buffers = [session.mem_alloc(BYTES) for _ in range(2)]
        ins = [session.empty(N, np.float32) for _ in range(2)]
        outs = [session.empty(N, np.float32) for _ in range(2)]
        for turn in range(5):
            for at, stream in enumerate((one, two)):
                stream.sync()
                if turn:
                    np.testing.assert_array_equal(outs[at], numbers(N) * (turn + at))
                ins[at][:] = numbers(N)
                outs[at][:] = -1
                session.mem_write(buffers[at], 0, ins[at], stream=stream)
                args = scale_args(buffers[at], N, turn + at + 1)
                session.launch(module, "scale", grid_for(N), BLOCK, args, stream=stream)
                assert session.mem_read(buffers[at], 0, BYTES, into=outs[at], stream=stream) is outs[at]
        session.sync()
        np.testing.assert_array_equal(outs[1], numbers(N) * 6)
        assert not session._session.attachment.lent


def test_one_stream_used_alone_is_selected_once(session: GpuSession, module: Module) -> None:
    buffer, stream = session.mem_alloc(BYTES), session.stream()
    args = scale_args(buffer, N, 2.0)
    before = operations(session)
    for _ in range(5):
        session.launch(module, "scale", grid_for(N), BLOCK, args, stream=stream)
    stream.sync()
    assert operations(session) == before + 1 + 5 + 1
    session.launch(module, "scale", grid_for(N), BLOCK, args)
    session.launch(module, "scale", grid_for(N), BLOCK, args, stream=session.default_stream)
    session.sync()
    assert operations(session) == before + 7 + 1 + 2 + 1


def test_other_memory_is_copied_when_the_call_returns(session: GpuSession) -> None:
    buffer, stream = session.mem_alloc(BYTES), session.stream()
    for target in (stream, session.default_stream, None):
        data = np.random.default_rng(3).bytes(BYTES)
        session.mem_write(buffer, 0, data, stream=target)
        assert session.mem_read(buffer, 0, BYTES, stream=target) == data
        assert session.mem_read(buffer, 8, 4) == data[8:12]
    assert not session._session.attachment.lent


def test_order_between_streams_is_asked_for(session: GpuSession, module: Module) -> None:
    buffer, stream, data = session.mem_alloc(BYTES), session.stream(), session.empty(N, np.float32)
    data[:] = numbers(N)
    session.mem_write(buffer, 0, data, stream=stream)
    session.default_stream.wait_for(stream)
    session.launch(module, "scale", grid_for(N), BLOCK, scale_args(buffer, N, 3.0))
    stream.wait_for(None)
    back = session.mem_read(buffer, 0, BYTES, into=session.empty(N, np.float32), stream=stream)
    stream.sync()
    np.testing.assert_array_equal(back, numbers(N) * 3)


def test_memory_of_a_copy_under_way_is_not_given_out(session: GpuSession) -> None:
    stream, buffer = session.stream(), session.mem_alloc(BYTES)

    def place_of_a_new_one() -> int:
        array = session.empty(N, np.float32)
        place: int = array.ctypes.data
        return place

    def copied_and_dropped() -> int:
        array = session.empty(N, np.float32)
        array[:] = 7
        session.mem_write(buffer, 0, array, stream=stream)
        session.mem_write(buffer, 0, array, stream=stream)
        place: int = array.ctypes.data
        return place

    for wait in (stream.sync, session.sync):
        place = copied_and_dropped()
        gc.collect()
        assert place_of_a_new_one() != place
        wait()
        assert place_of_a_new_one() == place
    copied_and_dropped()
    session.mem_free(buffer)
    stream.close()
    assert place_of_a_new_one() != place, "it may go on"
    session.sync()
    assert place_of_a_new_one() == place


def test_failures_are_told_whatever_stream_they_were_in(session: GpuSession, module: Module) -> None:
    one, two = session.stream(), session.stream()
    buffer, data = session.mem_alloc(BYTES), session.empty(N, np.float32)
    data[:] = 1
    number = session.launch(module, "scale", [1 << 31], [1], scale_args(buffer, N, 1.0), stream=one)
    session.mem_write(buffer, 0, data, stream=two)
    with pytest.raises(LaunchFailed) as caught:
        two.sync()
    assert caught.value.failure.failed_request_id == number
    assert session.mem_read(buffer, 0, 4, stream=two) == bytes(4), "the copy was skipped"
    session.mem_write(buffer, 0, data, stream=two)
    assert session.mem_read(buffer, 0, 4, stream=two) == data[:1].tobytes()
    faults = session.module_load(FAULTS)
    start_stray_store(session, faults, buffer, 1 << 40)
    with pytest.raises(SyncFailed, match="stray_store"):
        one.sync()
    one.sync()


def test_streams_that_are_gone_or_anothers(session: GpuSession, module: Module, daemon: Daemon) -> None:
    stream, buffer = session.stream(), session.mem_alloc(BYTES)
    args = scale_args(buffer, N, 1.0)
    with daemon.builder().acquire() as lease, GpuSession(lease) as other:
        foreign = other.stream()
    stream.close()
    stream.close()
    before = operations(session)
    for wrong in (stream, foreign, buffer, 0):
        for use in (
            lambda wrong=wrong: session.launch(module, "scale", [1], [1], args, stream=wrong),
            lambda wrong=wrong: session.mem_write(buffer, 0, bytes(4), stream=wrong),
            lambda wrong=wrong: session.mem_read(buffer, 0, 4, stream=wrong),
            lambda wrong=wrong: session.mem_write(buffer, 0, session.empty(4, np.uint8), stream=wrong),
            lambda wrong=wrong: session.default_stream.wait_for(wrong),
        ):
            with pytest.raises(InvalidHandle):
                use()
    with pytest.raises(InvalidHandle, match="is closed"):
        stream.sync()
    with pytest.raises(InvalidHandle, match="is closed"):
        stream.wait_for(None)
    with pytest.raises(InvalidRequest, match="can't be closed"):
        session.default_stream.close()
    assert operations(session) == before, "nothing of this was sent"


def test_streams_are_bounded_and_go_with_their_last_reference(session: GpuSession) -> None:
    streams = [session.stream() for _ in range(MAX_STREAMS)]
    with pytest.raises(Busy, match=f"{MAX_STREAMS} streams"):
        session.stream()
    del streams[:3]
    with streams.pop():
        pass
    assert len([session.stream() for _ in range(4)]) == 4
    assert repr(streams[0]) == f"<Stream {streams[0].handle}>"


def test_a_connections_streams_are_its_own_and_go_with_it(daemon: Daemon) -> None:
    shared = daemon.builder().exclusivity(GpuExclusivityClass.SHARED)
    with shared.acquire() as lease, GpuSession(lease) as first:
        for _ in range(3):
            with GpuSession(lease) as second:
                streams = [second.stream() for _ in range(MAX_STREAMS)]
                second.mem_write(second.mem_alloc(4), 0, bytes(4), stream=streams[-1])
                with pytest.raises(Busy):
                    first.stream()
        wait_until(lambda: has_a_stream(first), "the other connection's streams are gone")


def has_a_stream(session: GpuSession) -> bool:
    try:
        session.stream().sync()
    except Busy:
        return False
    return True


def test_in_a_lease_that_ends(daemon: Daemon) -> None:
    def set_up(lease: GpuLease) -> tuple[Stream, object]:
        session = GpuSession(lease)
        stream = session.stream()
        return stream, (start_endless(session, stream), session)

    _, (stream, kept), _ = daemon.short_lease(set_up)
    with pytest.raises(LeaseExpired):
        stream.sync()
    del kept


def test_asyncio(daemon: Daemon) -> None:
    async def main() -> None:
        wish = aio.GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60)
        async with wish.acquire() as lease, aio.GpuSession(lease) as session:
            module, buffer = await session.module_load(TRANSFORM), await session.mem_alloc(BYTES)
            data, back = session.empty(N, np.float32), session.empty(N, np.float32)
            data[:] = numbers(N)
            other = await session.stream()
            async with session.stream() as stream:
                await session.mem_write(buffer, 0, data, stream=stream)
                await session.launch(module, "scale", grid_for(N), BLOCK, scale_args(buffer, N, 2.0), stream=stream)
                await other.wait_for(stream)
                await session.mem_read(buffer, 0, BYTES, into=back, stream=other)
                await asyncio.gather(other.sync(), session.default_stream.sync())
            np.testing.assert_array_equal(back, 2 * numbers(N))
            await other.close()
            await other.close()
            with pytest.raises(InvalidHandle, match="is closed"):
                await other.sync()
            await session.sync()

    asyncio.run(main())
