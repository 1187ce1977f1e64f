"""Everything that a session keeps when it is parked: contents, graphs, streams, events, arrays, variables, guests."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import GpuExclusivityClass, GpuLease, GpuSession
from helpers.daemon import Daemon, running
from helpers.kernels import TRANSFORM, check_main_job, floats, numbers, scale_args
from helpers.pointers import POINTERS, chase_args, count_args

MIB = 1 << 20
SLICE = 64 * MIB
N = 10_000
CONFIG = """
[limits]
park_memory = "1GiB"
park_stay_ms = 0
parks_per_minute = 1000000
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with running(Daemon(vram=("2GiB",), config=CONFIG)) as daemon:
        yield daemon


@pytest.fixture
def lease(node: Daemon) -> Iterator[GpuLease]:
    builder = node.builder(SLICE).parkable().exclusivity(GpuExclusivityClass.SHARED)
    with builder.acquire() as lease:
        yield lease


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_main_job_before_between_and_after(lease: GpuLease, shared_memory: bool) -> None:
    with GpuSession(lease, shared_memory=shared_memory) as session:
        for _ in range(3):
            check_main_job(session)
            lease.park()


def test_pointers_in_data_and_variables_of_modules(lease: GpuLease, session: GpuSession) -> None:
    module = session.module_load(POINTERS)
    nodes = [session.mem_alloc(16) for _ in range(7)]
    for one, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        session.mem_write(one, 0, struct.pack("<QQ", following.handle, 0))
    counted = session.mem_alloc(8)
    for turn in range(1, 4):
        lease.park()
        session.launch(module, "chase", [1], [1], chase_args(nodes[0], 70))
        session.launch(module, "count", [1], [1], count_args(counted))
        session.sync()
        assert [struct.unpack("<Q", session.mem_read(one, 8, 8))[0] for one in nodes] == [10 * turn] * 7
        assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)


def test_graphs_streams_events_and_arrays(lease: GpuLease, session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    with session.record() as graph:
        session.mem_write(buffer, 0, data)
        session.launch(module, "bias", [40], [256], scale_args(buffer, N, 7))
        session.mem_read(buffer, 0, data.nbytes, into=back)
    stream = session.stream()
    start = stream.event()
    for turn in range(3):
        lease.park()
        data[:] = numbers(N) * turn
        graph.launch()
        session.sync()
        np.testing.assert_array_equal(back, numbers(N) * turn + 7)
        lease.park()
        session.launch(module, "bias", [40], [256], scale_args(buffer, N, 1), stream=stream)
        stream.sync()
        lease.park()
        assert start.elapsed_ms(stream.event()) >= 0
        assert floats(session.mem_read(buffer, 0, 4))[0] == 8


def test_kept_buffers_and_connections(lease: GpuLease) -> None:
    with GpuSession(lease) as session:
        buffer = session.mem_alloc(1000)
        session.mem_write(buffer, 0, b"kept")
        session.keep(buffer, "model")
    lease.park()
    # An attach makes the session return.
    with GpuSession(lease) as session:
        assert bytes(session.mem_read(session.kept("model"), 0, 4)) == b"kept"
        lease.park()
        assert bytes(session.mem_read(session.kept("model"), 0, 4)) == b"kept"


def test_a_large_copy_from_many_requests(lease: GpuLease, session: GpuSession) -> None:
    data = np.random.default_rng(3).integers(0, 255, 20 * MIB, np.uint8)
    buffer = session.mem_alloc(data.nbytes)
    lease.park()
    session.mem_write(buffer, 0, data)
    lease.park()
    np.testing.assert_array_equal(np.frombuffer(session.mem_read(buffer, 0, data.nbytes), np.uint8), data)
