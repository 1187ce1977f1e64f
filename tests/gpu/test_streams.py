"""Streams on a real card: they run concurrently, and every limit is enforced in each of them."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import GpuSession, GpuSessionFailed, KernelArgs, LeaseExpired, SyncFailed
from gpulease.client.bench.overlap import overlap
from gpulease.protocol.limits import MAX_STREAMS
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, start_endless, start_stray_store
from helpers.nvml import Cards
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BOUND_S = 0.5


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(256 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        yield session


def test_copies_overlap_with_kernels(daemon: Daemon) -> None:
    figures = overlap(daemon.address, "cuda")
    print(figures)
    assert figures["one_to_two"] > 1.4


def test_no_stream_waits_for_another_unasked(session: GpuSession) -> None:
    """A kernel in one stream waits for what a copy in another one writes. It ends only if both run concurrently."""
    streams = [session.default_stream, session.stream(), session.stream()]
    kept = []
    one = session.empty(1, np.uint32)
    one[:] = 1
    for waiting in streams:
        for writing in streams[1:]:
            if writing.handle == waiting.handle:
                continue
            module, flag = start_endless(session, waiting)
            # Keep the module and the buffer: else the next operation would free them, and for that wait for all
            # streams.
            kept.append((module, flag))
            session.mem_write(flag, 0, one, stream=writing)
            waiting.sync()
            # A copy from other memory waits only for its own stream.
            session.mem_write(flag, 0, bytes(4), stream=writing)
            session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(flag), stream=waiting)
            session.mem_write(flag, 0, one.tobytes(), stream=writing)
            assert session.mem_read(flag, 0, 4, stream=writing) == one.tobytes()
            session.sync()


def test_wait_for_orders_streams(session: GpuSession) -> None:
    one, two = session.stream(), session.stream()
    module = session.module_load(FAULTS)
    n = 1 << 20
    busy, buffer = session.mem_alloc(4), session.mem_alloc(4 * n)
    back = [session.empty(n, np.uint32) for _ in range(8)]
    for turn in range(8):
        stream, other = (one, two)[turn % 2], (two, one)[turn % 2]
        # This takes about 20 ms, so that an operation that does not wait for it would be first.
        session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(busy).push_u32(1_000_000), stream=stream)
        args = KernelArgs().push_buffer(buffer).push_u32(n).push_u32(turn + 1)
        session.launch(module, "fill_u32", [n // 256], [256], args, stream=stream)
        other.wait_for(stream)
        session.mem_read(buffer, 0, 4 * n, into=back[turn], stream=other)
    session.sync()
    for turn in range(8):
        assert (back[turn] == turn + 1).all()


def test_fresh_memory_is_zero_in_every_stream(session: GpuSession) -> None:
    size = 64 * MIB
    streams = [session.stream() for _ in range(3)]
    back = session.empty(size // 8, np.uint64)
    for turn in range(6):
        buffer = session.mem_alloc(size)
        late = session.stream()
        stream = late if turn % 2 else streams[turn % 3]
        back[:] = 1
        session.mem_read(buffer, 0, size, into=back, stream=stream)
        stream.sync()
        assert not back.any()
        back[:] = 2**64 - 1
        session.mem_write(buffer, 0, back, stream=stream)
        session.mem_free(buffer)


def test_more_copies_than_the_driver_takes_at_once(session: GpuSession) -> None:
    stream = session.stream()
    buffer = session.mem_alloc(4 * 3000)
    data = session.empty(3000, np.uint32)
    data[:] = np.arange(3000)
    for at in range(3000):
        session.mem_write(buffer, 4 * at, data[at : at + 1], stream=stream)
    back = session.mem_read(buffer, 0, data.nbytes, into=session.empty(3000, np.uint32), stream=stream)
    stream.sync()
    np.testing.assert_array_equal(back, data)


def test_all_streams_together_stay_within_what_was_admitted(daemon: Daemon, cards: Cards) -> None:
    used = cards.used_bytes()
    with daemon.builder(64 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        module, data = session.module_load(FAULTS), session.empty(MIB, np.uint8)
        buffers = [session.mem_alloc(MIB) for _ in range(MAX_STREAMS)]
        session.sync()
        before = cards.used_bytes()
        streams = [session.stream() for _ in range(MAX_STREAMS)]
        for stream, buffer in zip(streams, buffers, strict=True):
            session.mem_write(buffer, 0, data, stream=stream)
            args = KernelArgs().push_buffer(buffer).push_u32(1).push_u32(7)
            session.launch(module, "fill_u32", [1], [1], args, stream=stream)
            session.mem_read(buffer, 0, MIB, into=data, stream=stream)
        session.sync()
        # Import it here, because the module can't be imported in a process without a card's driver.
        from gpulease.daemon.drivers.cuda.streams import streams_bytes

        assert cards.used_bytes()[0] - before[0] <= streams_bytes(MAX_STREAMS)
        assert daemon.query(lease.lease_id)["state"] == "active"
    cards.check_back_to(used)


def test_an_endless_kernel_beside_others_ends_with_the_lease(daemon: Daemon) -> None:
    lease = daemon.builder(64 * MIB, seconds=1.5).acquire()
    session = GpuSession(lease)
    streams = [session.stream() for _ in range(3)]
    kept = start_endless(session, streams[2])
    for stream in (*streams[:2], session.default_stream):
        stream.sync()
    started = time.monotonic()
    with pytest.raises(LeaseExpired):
        streams[2].sync()
    assert time.monotonic() - started < 3
    daemon.wait_for_end(lease.lease_id)
    del kept


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_flood_behind_an_endless_kernel_ends_with_the_lease(daemon: Daemon, is_bounded: bool) -> None:
    builder = daemon.builder(64 * MIB, seconds=2)
    lease = (builder.max_kernel_secs(BOUND_S) if is_bounded else builder).acquire()
    session = GpuSession(lease)
    one, two = session.stream(), session.stream()
    data, buffer = session.empty(4, np.uint8), session.mem_alloc(4)
    session.mem_write(buffer, 0, data)
    kept = start_endless(session, one)

    def flood() -> None:
        while True:
            two.wait_for(one)
            session.mem_write(buffer, 0, data, stream=two)
            one.wait_for(two)

    with pytest.raises(GpuSessionFailed if is_bounded else LeaseExpired):
        flood()
    session.close()
    daemon.wait_for_end(lease.lease_id)
    assert daemon.query(lease.lease_id)["cause"] == ("kernel_timeout" if is_bounded else "expired")
    del kept


def test_a_kernel_that_runs_on_is_found_in_any_stream(daemon: Daemon) -> None:
    lease = daemon.builder(64 * MIB).max_kernel_secs(BOUND_S).acquire()
    session = GpuSession(lease)
    streams = [session.stream() for _ in range(3)]
    module, out = session.module_load(FAULTS), session.mem_alloc(4)

    def keep_the_others_busy(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for stream in (*streams[:2], session.default_stream):
                args = KernelArgs().push_buffer(out).push_u32(1).push_u32(7)
                session.launch(module, "fill_u32", [1], [1], args, stream=stream)
                stream.sync()

    keep_the_others_busy(0.1)
    kept = start_endless(session, streams[2])
    started = time.monotonic()
    # The worker's refusal may arrive before the reason for the lease's end.
    with pytest.raises(GpuSessionFailed, match=r"a kernel ran for|the session has failed"):
        keep_the_others_busy(10)
    assert BOUND_S <= time.monotonic() - started < 3 * BOUND_S
    session.close()
    daemon.wait_for_end(lease.lease_id)
    assert daemon.query(lease.lease_id)["cause"] == "kernel_timeout"
    del kept


def test_waiting_for_another_stream_is_no_kernels_time(daemon: Daemon) -> None:
    with daemon.builder(64 * MIB).max_kernel_secs(BOUND_S).acquire() as lease, GpuSession(lease) as session:
        one, two = session.stream(), session.stream()
        module, out = session.module_load(FAULTS), session.mem_alloc(4)
        started = time.monotonic()
        for _ in range(80):
            session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(out).push_u32(1_000_000), stream=one)
        two.wait_for(one)
        session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(out).push_u32(1000), stream=two)
        two.sync()
        assert time.monotonic() - started > 1.5 * BOUND_S
        session.sync()


def test_a_fault_in_one_stream_is_told_by_another(daemon: Daemon) -> None:
    lease = daemon.builder(64 * MIB).acquire()
    session = GpuSession(lease)
    one, two = session.stream(), session.stream()
    module, buffer = session.module_load(FAULTS), session.mem_alloc(16)
    one.wait_for(two)
    start_stray_store(session, module, buffer)
    time.sleep(0.2)
    with pytest.raises(SyncFailed, match="the context is lost"):
        two.sync()
    with pytest.raises(SyncFailed, match="the context is lost"):
        one.sync()
    lease.free()


def test_closing_beside_a_wait(session: GpuSession) -> None:
    """Another thread may close a stream that has unfinished work. The work is still completed."""
    stream = session.stream()
    module, out = session.module_load(FAULTS), session.mem_alloc(4)
    session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(out).push_u32(3_000_000), stream=stream)
    session.launch(module, "fill_u32", [1], [1], KernelArgs().push_buffer(out).push_u32(1).push_u32(9), stream=stream)
    closing = threading.Thread(target=stream.close)
    closing.start()
    closing.join()
    wait_until(lambda: session.mem_read(out, 0, 4) == (9).to_bytes(4, "little"), "the last kernel has run")
