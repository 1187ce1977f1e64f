"""Sessions that leave their worker: another one continues them, on the same card or another, with all they have."""

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpulease.client import (
    Busy,
    GpuBuilder,
    GpuExclusivityClass,
    GpuLease,
    GpuSession,
    Unsupported,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, LeaseMove, LeaseRef
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, check_main_job, floats, numbers, scale_args
from helpers.lasting import LastingDaemon
from helpers.pointers import POINTERS, chase_args, count_args

MIB = 1 << 20
SLICE = 64 * MIB
N = 10_000
CONFIG = """
[limits]
park_memory = "2GiB"
overcommit = 4.0
park_stay_ms = 0
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    daemon = Daemon(vram=("512MiB", "512MiB"), config=CONFIG)
    try:
        daemon.wait_until_it_answers()
    except BaseException:
        daemon.discard()
        raise
    yield daemon
    daemon.stop()


@pytest.fixture
def lasting() -> Iterator[LastingDaemon]:
    node = LastingDaemon(vram=("512MiB", "512MiB"), config=CONFIG)
    try:
        node.start()
        yield node
    finally:
        node.stop()


@pytest.fixture
def lease(node: Daemon) -> Iterator[GpuLease]:
    with parkable(node.address) as lease:
        yield lease


@pytest.fixture
def session(lease: GpuLease) -> Iterator[GpuSession]:
    with GpuSession(lease) as session:
        yield session


def parkable(address: str, *, seconds: float = 120) -> GpuLease:
    builder = GpuBuilder(address).min_vram(SLICE).lease_secs(seconds).parkable().device("0")
    return builder.exclusivity(GpuExclusivityClass.SHARED).acquire()


def row(address: str, lease: GpuLease) -> dict[str, Any]:
    found: dict[str, Any] = ask(Opcode.LEASE_QUERY, LeaseRef(lease.lease_id), address).report
    return found


def depth(address: str, lease: GpuLease) -> str:
    park = row(address, lease)["park"]
    return str(park["depth"]) if park["phase"] == "parked" else str(park["phase"])


def chill(address: str, lease: GpuLease) -> None:
    """Have a session leave its worker."""
    # What its client still had to send, such as frees, brings it back once.
    for _ in range(5):
        move(address, lease, None)
        time.sleep(0.02)
        if depth(address, lease) == "cold":
            return
    raise AssertionError(f"the session is {depth(address, lease)}")


def move(address: str, lease: GpuLease, device: str | None) -> Any:
    """Move a session, once its clients and the broker have nothing under way."""
    until = time.monotonic() + 20
    while True:
        try:
            return ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, device), address)
        except (Unsupported, Busy) as error:
            if "has sent something" not in str(error) and "returning" not in str(error):
                raise
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def cards(address: str) -> list[dict[str, Any]]:
    return list(ask(Opcode.GET_INVENTORY, Empty(), address).details)


def has_ended(address: str, lease: GpuLease) -> Callable[[], bool]:
    return lambda: row(address, lease)["state"] == "torndown"


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_main_job_before_between_and_after(node: Daemon, lease: GpuLease, shared_memory: bool) -> None:
    with GpuSession(lease, shared_memory=shared_memory) as session:
        for _ in range(3):
            check_main_job(session)
            before = node.worker_pid(lease.lease_id)
            chill(node.address, lease)
            check_main_job(session)
            assert node.worker_pid(lease.lease_id) != before


def test_pointers_variables_graphs_streams_and_kept_buffers(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    module = session.module_load(POINTERS)
    nodes = [session.mem_alloc(16) for _ in range(7)]
    for one, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        session.mem_write(one, 0, struct.pack("<QQ", following.handle, 0))
    counted = session.mem_alloc(8)
    session.keep(counted, "counted")
    variable = module.variable("kept") if hasattr(module, "variable") else None
    transform, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    with session.record() as graph:
        session.mem_write(buffer, 0, data)
        session.launch(transform, "bias", [40], [256], scale_args(buffer, N, 7))
        session.mem_read(buffer, 0, data.nbytes, into=back)
    stream = session.stream()
    session.sync()
    for turn in range(1, 4):
        if turn % 2:
            chill(node.address, lease)
        else:
            move(node.address, lease, "1")
        session.launch(module, "chase", [1], [1], chase_args(nodes[0], 70), stream=stream)
        stream.sync()
        session.launch(module, "count", [1], [1], count_args(counted))
        session.sync()
        assert [struct.unpack("<Q", session.mem_read(one, 8, 8))[0] for one in nodes] == [10 * turn] * 7
        assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)
        data[:] = numbers(N) * turn
        graph.launch()
        session.sync()
        np.testing.assert_array_equal(back, numbers(N) * turn + 7)
        assert floats(session.mem_read(buffer, 0, 4))[0] == turn * numbers(N)[0] + 7
    assert variable is None or variable.handle
