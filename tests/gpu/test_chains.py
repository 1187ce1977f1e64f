"""Bursts of launches on a card, which native code queues as chains. Each has its arguments, they are in order, and they
can be revoked.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import Buffer, GpuLeaseError, GpuSession, KernelArgs, Module, SyncFailed
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, check_main_job, floats, start_endless, start_stray_store

pytestmark = pytest.mark.gpu

N = 32
BURST = 6000
"""Number of launches, more than are needed until chains are made."""


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(256 << 20).device(0).acquire() as lease, GpuSession(lease) as session:
        yield session


def launch(session: GpuSession, module: Module, buffer: Buffer, number: float, kernel: str = "bias") -> None:
    args = KernelArgs().push_buffer(buffer).push_u32(N).push_f32(number)
    session.launch(module, kernel, [1], [N], args)


def test_each_launch_of_a_burst_has_its_own_arguments_and_place(session: GpuSession) -> None:
    module, buffers = session.module_load(TRANSFORM), [session.mem_alloc(4 * N) for _ in range(3)]
    sums = [0.0, 0.0, 0.0]
    for number in range(BURST):
        which = number % 3 if number % 7 else 0
        sums[which] += number % 5
        launch(session, module, buffers[which], number % 5)
    for buffer, total in zip(buffers, sums, strict=True):
        assert (floats(session.mem_read(buffer, 0, 4 * N)) == total).all()
    # Operations that do not commute show whether their order is right.
    value, other = np.float32(0), buffers[0]
    session.mem_write(other, 0, bytes(4 * N))
    for number in range(BURST):
        if number % 2:
            launch(session, module, other, 0.5, "scale")
            value *= np.float32(0.5)
        else:
            launch(session, module, other, number % 11)
            value += np.float32(number % 11)
    assert (floats(session.mem_read(other, 0, 4 * N)) == value).all()


def test_a_module_that_goes_and_comes_again(session: GpuSession) -> None:
    buffer = session.mem_alloc(4 * N)
    for turn in range(1, 4):
        module = session.module_load(TRANSFORM)
        for _ in range(BURST):
            launch(session, module, buffer, 1)
        session.module_unload(module)
        assert (floats(session.mem_read(buffer, 0, 4 * N)) == turn * BURST).all()


def test_a_fault_in_a_burst_is_told_and_ends_the_session(session: GpuSession) -> None:
    module, buffer, faults = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.module_load(FAULTS)
    for _ in range(BURST):
        launch(session, module, buffer, 1)
    start_stray_store(session, faults, buffer)
    for _ in range(BURST):
        launch(session, module, buffer, 1)
    with pytest.raises(SyncFailed):
        session.sync()


def test_a_lease_ends_under_a_burst_behind_an_endless_kernel(daemon: Daemon) -> None:
    with daemon.builder(256 << 20).device(0).acquire() as lease, GpuSession(lease) as session:
        module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
        for _ in range(BURST):
            launch(session, module, buffer, 1)
        session.sync()
        kept = start_endless(session)
        for _ in range(200):
            launch(session, module, buffer, 1)
        lease.free()
        with pytest.raises(GpuLeaseError):
            session.sync()
        assert kept is not None
    with daemon.builder(256 << 20).device(0).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
