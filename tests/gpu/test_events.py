"""Events and their times on a real card."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import GpuSession
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, TRANSFORM, grid_for, scale_args, start_endless

pytestmark = pytest.mark.gpu

N = 1 << 22


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


def test_a_kernel_is_timed_by_the_card(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    stream = session.default_stream
    session.launch(module, "scale", grid_for(N), BLOCK, scale_args(buffer, N))
    events = [stream.event()]
    for launches in (1, 20):
        for _ in range(launches):
            session.launch(module, "scale", grid_for(N), BLOCK, scale_args(buffer, N))
        events.append(stream.event())
    short, both = events[0].elapsed_ms(events[1]), events[0].elapsed_ms(events[2])
    print(f"{short} ms, {both} ms")
    assert 0.002 < short < both < 1000


def test_an_event_waits_for_its_own_stream(session: GpuSession) -> None:
    with session.stream() as busy, session.stream() as free:
        kept = start_endless(session, busy)
        start = free.event()
        assert start.elapsed_ms(free.event()) < 1000
        begun, before = time.monotonic(), busy.event()
        time.sleep(0.05)
        one = session.empty(1, np.uint32)
        one[:] = 1
        session.mem_write(kept[1], 0, one, stream=free)
        waited_ms = start.elapsed_ms(before)
        assert 40 < waited_ms < (time.monotonic() - begun) * 1000 + 1000
