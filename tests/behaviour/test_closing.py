"""To close what has ended does nothing: a session's streams, graphs, regions and subscriptions, with both APIs.

The ends are its own close, and the end of its session or its lease. With a real daemon.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpulease.client import GpuBuilder, GpuSession, aio
from helpers.daemon import Daemon

SLICE = 64 << 20
Closers = dict[str, Callable[[], Any]]


async def done(result: Any) -> Any:
    """Await what the asyncio API returns; the other API's results are done."""
    return await result if inspect.isawaitable(result) else result


async def opened(is_async: bool, daemon: Daemon) -> tuple[Any, Any, Closers]:
    """Return a lease, its session, and for each kind of object of theirs how one is closed."""
    kind: Any = aio.GpuBuilder if is_async else GpuBuilder
    lease = await done(kind(daemon.address).min_vram(SLICE).lease_secs(120).acquire())
    session: Any = await aio.GpuSession(lease) if is_async else GpuSession(lease)
    buffer = await done(session.mem_alloc(64))
    recorder = session.record()
    graph = await recorder.__aenter__() if is_async else recorder.__enter__()
    with pytest.raises(Exception, match="being recorded"):
        await done(graph.close())
    await done(session.mem_write(buffer, 0, bytes(64)))
    await done(recorder.__aexit__(None, None, None) if is_async else recorder.__exit__(None, None, None))
    region, stream = await done(lease.region(1 << 20)), await done(session.stream())
    closers = {
        "graph": graph.close,
        "stream": stream.close,
        "region": region.close,
        "events": lease.events().close,
        "watch": region.watch().close,
        "keep_alive": (await done(lease.keep_alive())).stop,
        "on_warning": lease.on_warning(lambda event: None).stop,
        "session": session.close,
    }
    return lease, session, closers


async def end_nothing(daemon: Daemon, lease: Any, session: Any) -> None:
    pass


async def close_session(daemon: Daemon, lease: Any, session: Any) -> None:
    await done(session.close())


async def free_lease(daemon: Daemon, lease: Any, session: Any) -> None:
    await done(lease.free())


async def revoke_lease(daemon: Daemon, lease: Any, session: Any) -> None:
    await asyncio.to_thread(daemon.revoke, lease.lease_id)


@pytest.mark.parametrize("end", [end_nothing, close_session, free_lease, revoke_lease])
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_what_has_ended_is_closed_without_an_error(
    daemon: Daemon, is_async: bool, end: Callable[[Daemon, Any, Any], Awaitable[None]]
) -> None:
    async def main() -> None:
        lease, session, closers = await opened(is_async, daemon)
        await end(daemon, lease, session)
        for close in (*closers.values(), *reversed(closers.values())):
            assert await done(close()) is None
        exit_lease = lease.__aexit__ if is_async else lease.__exit__
        await done(exit_lease(None, None, None))

    asyncio.run(main())


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_a_graph_whose_recording_failed_is_closed_without_an_error(daemon: Daemon, is_async: bool) -> None:
    async def main() -> None:
        lease, session, closers = await opened(is_async, daemon)
        recorder, mistake = session.record(), ValueError("of the block")
        graph = await recorder.__aenter__() if is_async else recorder.__enter__()
        ended = (ValueError, mistake, None)
        await done(recorder.__aexit__(*ended) if is_async else recorder.__exit__(*ended))
        for close in (graph.close, *closers.values(), lease.free):
            await done(close())

    asyncio.run(main())
