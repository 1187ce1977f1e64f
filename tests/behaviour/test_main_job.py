"""The main job: acquire, upload, two kernels on one buffer, read back, free.

Over every kind of socket and in every form of the API.
"""

import numpy as np
import pytest

from gpulease.client import GpuBuilder, GpuExclusivityClass, GpuSession, KernelArgs
from helpers.daemon import Daemon
from helpers.kernels import (
    BLOCK,
    TRANSFORM,
    check_main_job,
    floats,
    grid_for,
    numbers,
    packed_scale_args,
    scale_args,
)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 100_003])
def test_two_kernels_on_one_buffer(daemon: Daemon, n: int) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session, n)


def test_without_shared_memory(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease, shared_memory=False) as session:
        check_main_job(session)
        data = np.random.default_rng(3).bytes(1 << 19)
        buffer = session.mem_alloc(len(data))
        session.mem_write(buffer, 0, data)
        assert session.mem_read(buffer, 0, len(data)) == data


def test_over_tcp(daemon: Daemon) -> None:
    builder = GpuBuilder(daemon.tcp_address).min_vram(1 << 20).lease_secs(60)
    with builder.acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


def test_address_from_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    with GpuBuilder().min_vram(1 << 20).acquire() as lease, GpuSession(lease) as session:
        assert lease.address == daemon.address
        check_main_job(session)


def test_what_a_lease_and_its_session_say_of_themselves(daemon: Daemon) -> None:
    with daemon.builder(3 << 20, seconds=50).acquire() as lease, GpuSession(lease) as session:
        assert session.session_id == lease.lease_id
        assert session.slice_bytes == lease.size_bytes == 3 << 20
        assert session.driver == "cpu"
        assert session.card_uuid == lease.card_uuid == daemon.inventory().details[0]["uuid"]
        assert 40 < lease.remaining_s <= 50
        assert lease.exclusivity is GpuExclusivityClass.SESSION_EXCLUSIVE
        report = lease.query()
        assert report["state"] == "active"
        assert report["lease_id"] == lease.lease_id_text
        assert report["size_bytes"] == 3 << 20


def test_raw_argument_bytes_do_the_same_as_pushed_ones(daemon: Daemon) -> None:
    n = 64
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4 * n)
        session.mem_write(buffer, 0, numbers(n))
        args, sizes = packed_scale_args(buffer.handle, n, 2.0)
        session.launch(module, "scale", grid_for(n), BLOCK, args, sizes)
        session.launch(module, "bias", [1], [n], bytearray(packed_scale_args(buffer.handle, n, 1.0)[0]), [8, 4, 4])
        np.testing.assert_array_equal(floats(session.mem_read(buffer, 0, 4 * n)), numbers(n) * 2 + 1)


def test_all_kinds_of_host_buffers(daemon: Daemon) -> None:
    x = numbers(16)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(x.nbytes)
        for data in (x, x.tobytes(), bytearray(x.tobytes()), memoryview(x.data)):
            session.mem_write(buffer, 0, bytes(x.nbytes))
            session.mem_write(buffer, 0, data)
            assert session.mem_read(buffer, 0, x.nbytes) == x.tobytes()
        into = np.empty(8, dtype=np.float32)
        assert session.mem_read(buffer, 16, 32, into=into) is into
        np.testing.assert_array_equal(into, x[4:12])


def test_a_copy_larger_than_one_frame(daemon: Daemon) -> None:
    data = np.random.default_rng(7).bytes((5 << 20) + 3)
    with daemon.builder(8 << 20).acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(len(data))
        session.mem_write(buffer, 0, data)
        assert session.mem_read(buffer, 0, len(data)) == data
        assert session.mem_read(buffer, 1 << 20, 17) == data[1 << 20 : (1 << 20) + 17]


def test_part_of_a_buffer_as_an_argument(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(64)
        session.mem_write(buffer, 0, numbers(16))
        args = KernelArgs().push_buffer(buffer, 32).push_u32(4).push_f32(100.0)
        session.launch(module, "bias", [1], [4], args)
        expected = numbers(16)
        expected[8:12] += 100
        np.testing.assert_array_equal(floats(session.mem_read(buffer, 0, 64)), expected)


def test_module_lists_its_kernels(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(TRANSFORM)
        assert {name: entry.parameter_sizes for name, entry in module.kernels.items()} == {
            "scale": (8, 4, 4),
            "bias": (8, 4, 4),
        }


def test_freeing_gives_the_bytes_and_the_process_back_at_once(daemon: Daemon) -> None:
    before = daemon.available_bytes()
    lease = daemon.builder(1 << 30).acquire()
    assert daemon.available_bytes() == before - (1 << 30)
    assert daemon.has_worker(lease.lease_id)
    lease.free()
    assert daemon.available_bytes() == before
    assert not daemon.has_worker(lease.lease_id)
    assert daemon.query(lease.lease_id)["state"] == "torndown"


def test_dropping_the_last_reference_gives_the_lease_back(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    lease_id = lease.lease_id
    session = GpuSession(lease)
    check_main_job(session)
    del session, lease
    # The `daemon` fixture checks that nothing is left. Check here that the lease did not expire.
    assert daemon.query(lease_id)["cause"] in (None, "freed")


def test_dropped_buffers_give_their_bytes_back(daemon: Daemon) -> None:
    with daemon.builder(1 << 20).acquire() as lease, GpuSession(lease) as session:
        for _ in range(8):
            buffer = session.mem_alloc(1 << 20)
            session.mem_write(buffer, 0, b"x")
            del buffer


def test_several_launches_share_one_arguments_object(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4)
        session.mem_write(buffer, 0, np.float32(1).tobytes())
        args = scale_args(buffer, 1, 2.0)
        for _ in range(10):
            session.launch(module, "scale", [1], [1], args)
        assert floats(session.mem_read(buffer, 0, 4))[0] == 1024
