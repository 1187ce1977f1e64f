"""Copies from and to arrays that a session shares with its worker, by well-behaved tenants and by hostile ones."""

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import (
    GpuBuilder,
    GpuExclusivityClass,
    GpuSession,
    InvalidHandle,
    KernelArgs,
    LaunchFailed,
    Revoked,
    aio,
)
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.messages import ArenaCopy, Empty, Handle, MemAlloc
from gpulease.protocol.ring import SharedMemoryRequest
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, numbers
from helpers.raw_peer import RawPeer
from helpers.ring_peer import RingPeer

U64 = 2**64 - 1
ARENA = 8 << 20
WAITED_BYTES = 128 << 10
"""Size of a write that the client waits for, instead of only queueing it."""


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


def operations(session: GpuSession) -> int:
    return int(session.lease.query()["operations"])


@pytest.mark.exhaustive
def test_there_and_back(session: GpuSession) -> None:
    data, back = session.empty((1000, 333), np.float32), session.empty((1000, 333), np.float32)
    data[:] = np.random.default_rng(1).random(data.shape)
    buffer = session.mem_alloc(data.nbytes)
    before = operations(session)
    session.mem_write(buffer, 0, data)
    assert session.mem_read(buffer, 0, data.nbytes, into=back) is back
    assert operations(session) == before + 2, "one operation each, however large"
    np.testing.assert_array_equal(back, data)


def test_parts_and_views(session: GpuSession) -> None:
    data = session.empty((64, 64), np.float32)
    data[:] = numbers(64 * 64).reshape(64, 64)
    buffer = session.mem_alloc(data.nbytes + 8)
    for part in (data[3:7], data[5], data[:, 1], data.T, data.data[2:4], data.view(np.uint8)[:1]):
        expected = np.ascontiguousarray(part).tobytes()
        session.mem_write(buffer, 8, part)
        assert session.mem_read(buffer, 8, len(expected)) == expected
    into = session.empty(64, np.uint8)
    into[:] = 255
    session.mem_write(buffer, 0, bytes(range(64)))
    session.mem_read(buffer, 10, 5, into=into)
    assert into.tobytes() == bytes(range(10, 15)) + b"\xff" * 59


def test_ranges_that_are_wrong(session: GpuSession) -> None:
    data = session.empty(100, np.uint8)
    buffer = session.mem_alloc(100)
    for offset in (1, -1, 1 << 70):
        with pytest.raises(InvalidHandle):
            session.mem_write(buffer, offset, data)
        with pytest.raises(InvalidHandle):
            session.mem_read(buffer, offset, 100, into=data)
    session.mem_free(buffer)
    with pytest.raises(InvalidHandle, match="is freed"):
        session.mem_write(buffer, 0, data)


def test_an_array_outlives_its_session(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        with GpuSession(lease) as session:
            array = session.empty(1000, np.uint8)
        array[:] = 3
        assert array.sum() == 3000
        with GpuSession(lease) as again:
            buffer = again.mem_alloc(1000)
            again.mem_write(buffer, 0, array)  # An array of the earlier session's mapping is here an ordinary array.
            own = again.empty(1000, np.uint8)
            assert (again.mem_read(buffer, 0, 1000, into=own) == 3).all()


def test_kept_failures_are_told_by_a_copy(session: GpuSession) -> None:
    module, data = session.module_load(TRANSFORM), session.empty(WAITED_BYTES, np.uint8)
    data[:] = 1
    buffer = session.mem_alloc(WAITED_BYTES)
    args = KernelArgs().push_u64(buffer.handle).push_u32(1).push_f32(1)
    number = session.launch(module, "scale", [1 << 31], [1], args)
    with pytest.raises(LaunchFailed) as caught:
        session.mem_write(buffer, 0, data)
    assert caught.value.failure.failed_request_id == number
    assert session.mem_read(buffer, 0, 4) == bytes(4), "it was not done"
    session.mem_write(buffer, 0, data)
    assert session.mem_read(buffer, WAITED_BYTES - 4, 4) == bytes([1] * 4)


def test_a_lease_that_was_revoked(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    buffer, data = session.mem_alloc(WAITED_BYTES), session.empty(WAITED_BYTES, np.uint8)
    daemon.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        session.mem_write(buffer, 0, data)


def test_asyncio(daemon: Daemon) -> None:
    async def main() -> None:
        wish = aio.GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60)
        async with wish.acquire() as lease, aio.GpuSession(lease) as session:
            data, back = session.empty(5000, np.uint8), session.empty(5000, np.uint8)
            data[:] = np.arange(5000) % 251
            buffer = await session.mem_alloc(5000)
            await session.mem_write(buffer, 0, data)
            await session.mem_read(buffer, 0, 5000, into=back)
            np.testing.assert_array_equal(back, data)

    asyncio.run(main())


@pytest.mark.parametrize("over", ["tcp", "socket", "second"])
def test_without_an_arena_all_works_the_same(daemon: Daemon, over: str) -> None:
    builder = GpuBuilder(daemon.tcp_address if over == "tcp" else daemon.address).min_vram(1 << 20).lease_secs(60)
    shared = builder.exclusivity(GpuExclusivityClass.SHARED)
    with (
        shared.acquire() as lease,
        GpuSession(lease) as first,
        GpuSession(lease, shared_memory=over != "socket") as session,
    ):
        assert (first._session.attachment.arena is None) == (over == "tcp")
        assert session._session.attachment.arena is None
        data = session.empty(100, np.uint8)
        data[:] = 7
        buffer = session.mem_alloc(100)
        session.mem_write(buffer, 0, data)
        assert (session.mem_read(buffer, 0, 100, into=session.empty(100, np.uint8)) == 7).all()


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[RingPeer]:
    with RawPeer(daemon.address).hello() as owner, RingPeer(daemon.address).hello() as peer:
        lease_id = owner.acquire().lease_id
        assert peer.attach_ring(lease_id, SharedMemoryRequest(ring=True, arena_bytes=ARENA)).arena_bytes == ARENA
        yield peer
        owner.free(lease_id)


COPIES = [
    (0, ARENA, 1, Status.INVALID_REQUEST),
    (0, ARENA - 1, 2, Status.INVALID_REQUEST),
    (0, U64, 1, Status.INVALID_REQUEST),
    (0, 0, U64, Status.INVALID_HANDLE),
    (0, U64, U64, Status.INVALID_HANDLE),
    (U64, 0, 1, Status.INVALID_HANDLE),
    (4000, 0, 97, Status.INVALID_HANDLE),
    (4096, ARENA, 0, Status.OK),
    (4000, ARENA - 96, 96, Status.OK),
]


@pytest.mark.parametrize("op", [Opcode.ARENA_WRITE, Opcode.ARENA_READ])
def test_ranges_a_hostile_client_names(peer: RingPeer, op: Opcode) -> None:
    handle = peer.ask_in_ring(Opcode.MEM_ALLOC, MemAlloc(4096))
    assert isinstance(handle, Handle)
    for offset, at, length, status in COPIES:
        result = peer.ask_in_ring(op, ArenaCopy(handle.handle, offset, at, length))
        assert (result.status if isinstance(result, Failure) else Status.OK) is status, (offset, at, length, result)


def test_the_arena_can_be_cut_short_by_nobody(peer: RingPeer) -> None:
    for size in (0, ARENA // 2, ARENA + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(peer.fds[1], size)


def test_no_arena_was_asked_for(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as owner, RawPeer(daemon.address).hello() as peer:
        lease_id = owner.acquire().lease_id
        peer.attach(lease_id)
        refused = peer.refused(Opcode.ARENA_READ, ArenaCopy(0, 0, 0, 0), lease_id)
        assert refused.status is Status.UNSUPPORTED
        assert peer.request(Opcode.SYNC, Empty(), lease_id) == Empty()
        owner.free(lease_id)
