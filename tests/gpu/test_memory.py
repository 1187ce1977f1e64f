"""Memory that is allocated again: it is zero, only the session can access it, and the card never shows more than was
admitted.
"""

import numpy as np
import pytest

from gpulease.client import AllocFailed, GpuSession, KernelArgs
from gpulease.daemon.session.ledger import MAX_ALLOCATIONS
from helpers.admitted import watched
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def fresh_bytes(session: GpuSession, size: int) -> tuple[int, bool]:
    """Allocate memory, fill it and free it. Returns its address, and whether it was zero at first."""
    buffer = session.mem_alloc(size)
    is_zero = not np.frombuffer(session.mem_read(buffer, 0, size), np.uint8).any()
    session.mem_write(buffer, 0, b"\xff" * size)
    session.mem_free(buffer)
    return buffer.handle, is_zero


def test_what_is_given_again_is_zero(daemon: Daemon) -> None:
    with daemon.builder(256 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        for sizes in ((512, 1, 100, 512), (MIB, MIB, MIB - 511), (2 * MIB, MIB + 1, 2 * MIB), (64 * MIB, 64 * MIB)):
            seen = [fresh_bytes(session, size) for size in sizes]
            assert all(is_zero for _, is_zero in seen), sizes
            assert len({handle for handle, _ in seen}) == 1, "one block served all"


def test_launches_that_are_queued_do_not_reach_who_has_the_memory_next(daemon: Daemon) -> None:
    with daemon.builder(256 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        module, count = session.module_load(TRANSFORM), 16 * MIB
        for _ in range(20):
            buffer = session.mem_alloc(4 * count)
            args = KernelArgs().push_buffer(buffer).push_u32(count).push_f32(1.0)
            for _ in range(50):
                session.launch(module, "bias", [count // 256], [256], args)
            handle = buffer.handle
            session.mem_free(buffer)
            again = session.mem_alloc(4 * count)
            assert again.handle == handle
            assert session.mem_read(again, 0, 4096) == bytes(4096)
            assert session.mem_read(again, 4 * count - 4096, 4096) == bytes(4096)
            session.mem_free(again)


def test_holes_and_what_is_kept_stand_in_nobodys_way(daemon: Daemon, cards: Cards) -> None:
    with watched(daemon, cards, 512 * MIB) as seen:
        session = seen.session
        for size in (4 * MIB, 3 * MIB, MIB, 700_000):
            buffers = [session.mem_alloc(size) for _ in range(500 * MIB // max(size, MIB) // (2 if size < MIB else 1))]
            for buffer in buffers[::2]:
                session.mem_free(buffer)
            if size > MIB:
                session.mem_free(session.mem_alloc(200 * MIB))
            for buffer in buffers[1::2]:
                session.mem_free(buffer)
            session.mem_free(session.mem_alloc(512 * MIB))
            session.module_load(TRANSFORM)


def test_as_many_allocations_as_there_may_be(daemon: Daemon, cards: Cards) -> None:
    with watched(daemon, cards, 256 * MIB) as seen:
        session = seen.session
        buffers = [session.mem_alloc(1 + number % 700) for number in range(MAX_ALLOCATIONS)]
        with pytest.raises(AllocFailed, match="the maximum"):
            session.mem_alloc(1)
        for buffer in buffers:
            session.mem_free(buffer)
        session.mem_free(session.mem_alloc(256 * MIB))
