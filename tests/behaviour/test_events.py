"""Events and their times, with both APIs and a real daemon."""

import asyncio
from collections.abc import Iterator

import pytest

from gpulease.client import Busy, GpuExclusivityClass, GpuSession, InvalidHandle, InvalidRequest, aio
from gpulease.protocol.limits import MAX_EVENTS
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, TRANSFORM, grid_for, scale_args

N = 1 << 16


@pytest.fixture(scope="module")
def session(shared_daemon: Daemon) -> Iterator[GpuSession]:
    lease = shared_daemon.builder(16 << 20, seconds=600).exclusivity(GpuExclusivityClass.SHARED).acquire()
    with lease, GpuSession(lease) as session:
        yield session


def test_the_time_between_two_events_grows_with_the_work(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    session.launch(module, "scale", grid_for(N), BLOCK, scale_args(buffer, N))
    stream = session.default_stream
    events = [stream.event()]
    for launches in (1, 20):
        for _ in range(launches):
            session.launch(module, "scale", grid_for(N), BLOCK, scale_args(buffer, N))
        events.append(stream.event())
    first, second, third = events
    short, both = first.elapsed_ms(second), first.elapsed_ms(third)
    assert 0 < short < both
    assert both == pytest.approx(short + second.elapsed_ms(third))
    assert first.elapsed_ms(first) == 0


def test_the_wrong_order_is_said(session: GpuSession) -> None:
    with session.stream() as stream:
        first, second = stream.event(), stream.event()
        if first.elapsed_ms(second):
            with pytest.raises(InvalidRequest, match="swap them"):
                second.elapsed_ms(first)


def test_an_event_of_another_session_is_refused(shared_daemon: Daemon, session: GpuSession) -> None:
    with shared_daemon.builder(1 << 20).acquire() as lease, GpuSession(lease) as other:
        theirs, ours = other.default_stream.event(), session.default_stream.event()
        with pytest.raises(InvalidHandle, match="belongs to another session"):
            ours.elapsed_ms(theirs)
        theirs.handle = 1 << 40
        with pytest.raises(InvalidHandle, match="is not an event of this connection"):
            theirs.elapsed_ms(theirs)
        other.sync()


def test_events_are_bounded_and_dropped_ones_make_room(session: GpuSession) -> None:
    events = [session.default_stream.event() for _ in range(MAX_EVENTS)]
    session.sync()
    more = session.default_stream.event()
    with pytest.raises(Busy, match=f"has {MAX_EVENTS} events"):
        session.sync()
    del more, events[1:]
    session.default_stream.event()
    session.sync()
    for _ in range(2):
        events = [session.default_stream.event() for _ in range(MAX_EVENTS // 2)]
    assert events[0].elapsed_ms(events[-1]) >= 0


def test_nothing_is_timed_while_a_graph_is_recorded(session: GpuSession) -> None:
    with pytest.raises(InvalidRequest, match="recording a launch graph"), session.record():
        session.default_stream.event()


def test_the_asyncio_face(shared_daemon: Daemon) -> None:
    async def scenario() -> float:
        builder = aio.GpuBuilder(shared_daemon.address).min_vram(1 << 20)
        async with builder.acquire() as lease, aio.GpuSession(lease) as session, session.stream() as stream:
            start = await stream.event()
            return await start.elapsed_ms(await stream.event())

    assert asyncio.run(scenario()) >= 0
