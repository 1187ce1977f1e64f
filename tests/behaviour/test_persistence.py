"""What a session keeps as long as its lease lives: a buffer that is written once, and a module that is loaded once."""

import numpy as np

from gpulease.client import GpuExclusivityClass, GpuSession
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.messages import Empty, MemRead
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, TRANSFORM, fill_u32, floats, grid_for, numbers, scale_args
from helpers.raw_peer import RawPeer


def test_one_upload_serves_many_launches_of_both_kernels(daemon: Daemon) -> None:
    n, rounds = 300, 2000
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4 * n)
        session.mem_write(buffer, 0, numbers(n))
        minus, plus = scale_args(buffer, n, -1.0), scale_args(buffer, n, 1.0)
        expected = numbers(n)
        for _ in range(rounds):
            session.launch(module, "scale", grid_for(n), BLOCK, minus)
            session.launch(module, "bias", grid_for(n), BLOCK, plus)
            expected = expected * -1 + 1
        session.sync()
        np.testing.assert_array_equal(floats(session.mem_read(buffer, 0, 4 * n)), expected)
        assert lease.query()["launches"] == 2 * rounds


def test_buffers_do_not_touch_each_other(daemon: Daemon) -> None:
    sizes = [1, 3, 15, 16, 17, 255, 4096, 4097]
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        buffers = [session.mem_alloc(size) for size in sizes]
        for number, buffer in enumerate(buffers, start=1):
            session.mem_write(buffer, 0, bytes([number]) * len(buffer))
        session.mem_free(buffers.pop(3))
        for number, buffer in zip([1, 2, 3, 5, 6, 7, 8], buffers, strict=True):
            assert session.mem_read(buffer, 0, len(buffer)) == bytes([number]) * len(buffer)


def test_memory_that_is_kept_outlives_a_connection_and_a_sync(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        first = GpuSession(lease)
        buffer = first.mem_alloc(64)
        first.mem_write(buffer, 0, numbers(16))
        first.sync()
        first.keep(buffer, "numbers")
        handle = buffer.handle
        first.close()
        with RawPeer(daemon.address).hello() as peer:
            assert not isinstance(peer.attach(lease.lease_id), Failure)
            data = peer.request(Opcode.MEM_READ, MemRead(handle, 0, 64), lease.lease_id).data
            assert data == numbers(16).tobytes()


def test_two_connections_of_a_shared_session_see_the_same_memory(daemon: Daemon) -> None:
    shared = daemon.builder().exclusivity(GpuExclusivityClass.SHARED)
    with shared.acquire() as lease, GpuSession(lease) as session, RawPeer(daemon.address).hello() as other:
        buffer = session.mem_alloc(16)
        with fill_u32(session, buffer, 4) as fill:
            fill(0x01020304)
            session.sync()
        other.attach(lease.lease_id)
        other.request(Opcode.SYNC, Empty(), lease.lease_id)
        reply = other.request(Opcode.MEM_READ, MemRead(buffer.handle, 0, 16), lease.lease_id)
        assert reply.data == bytes([4, 3, 2, 1]) * 4


def test_new_memory_is_zero_even_where_old_memory_was(daemon: Daemon) -> None:
    size = 1 << 20
    with daemon.builder(size).acquire() as lease, GpuSession(lease) as session:
        for _ in range(3):
            buffer = session.mem_alloc(size)
            assert not np.frombuffer(session.mem_read(buffer, 0, size), np.uint8).any()
            session.mem_write(buffer, 0, b"\xff" * size)
            session.mem_free(buffer)


def test_the_next_tenant_finds_zeros(daemon: Daemon) -> None:
    size = 1 << 20
    for _ in range(3):
        with daemon.builder(size).acquire() as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(size)
            assert not np.frombuffer(session.mem_read(buffer, 0, size), np.uint8).any()
            session.mem_write(buffer, 0, b"\xee" * size)
