"""The asyncio API does the same work with the same core, and never blocks its event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop

from gpulease.client import AllocFailed, Buffer, CapacityExceeded, InvalidRequest, KernelArgs, Revoked, SyncFailed, aio
from gpulease.client.core import lease as leases
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, FAULTS, TRANSFORM, floats, grid_for, numbers, scale_args
from helpers.waiting import PATIENCE_S, wait_until

Main = Callable[[Daemon], Coroutine[Any, Any, None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(daemon: Daemon, request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Return a function that runs a coroutine function on each kind of event loop."""

    def run_it(main: Main) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main(daemon))

    return run_it


def builder(daemon: Daemon, seconds: float = 60, size_bytes: int = 1 << 20) -> aio.GpuBuilder:
    return aio.GpuBuilder(daemon.address).min_vram(size_bytes).lease_secs(seconds)


async def check_main_job(session: aio.GpuSession, n: int = 1000) -> None:
    buffer = await session.mem_alloc(4 * n)
    await session.mem_write(buffer, 0, numbers(n))
    module = await session.module_load(TRANSFORM)
    await session.launch(module, "scale", grid_for(n), BLOCK, scale_args(buffer, n, 2.0))
    await session.launch(module, "bias", grid_for(n), BLOCK, scale_args(buffer, n, 10.0))
    await session.sync()
    data = await session.mem_read(buffer, 0, 4 * n)
    np.testing.assert_array_equal(floats(data), numbers(n) * 2 + 10)
    await session.module_unload(module)
    await session.mem_free(buffer)


async def start_endless(session: aio.GpuSession) -> tuple[Any, Any]:
    module = await session.module_load(FAULTS)
    flag = await session.mem_alloc(4)
    await session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(flag))
    return module, flag


def test_main_job(run: Callable[[Main], None]) -> None:
    async def main(daemon: Daemon) -> None:
        async with builder(daemon).acquire() as lease, aio.GpuSession(lease) as session:
            assert session.session_id == lease.lease_id
            await check_main_job(session)
            assert (await lease.query())["launches"] == 2

    run(main)


def test_several_sessions_at_once(run: Callable[[Main], None]) -> None:
    async def job(daemon: Daemon) -> None:
        async with builder(daemon).acquire() as lease, aio.GpuSession(lease) as session:
            for _ in range(3):
                await check_main_job(session)

    async def main(daemon: Daemon) -> None:
        await asyncio.gather(*(job(daemon) for _ in range(6)))

    run(main)


def test_the_loop_runs_while_a_kernel_does(run: Callable[[Main], None]) -> None:
    async def main(daemon: Daemon) -> None:
        async with builder(daemon).acquire() as other, aio.GpuSession(other) as neighbour:
            # Compile the kernels before the test begins.
            await check_main_job(neighbour)
            lease = await builder(daemon).acquire()
            async with aio.GpuSession(lease) as session:
                kept = await start_endless(session)
                waiting = asyncio.create_task(session.sync())
                for _ in range(2):
                    await check_main_job(neighbour)
                    assert not waiting.done()
                await asyncio.to_thread(daemon.revoke, lease.lease_id)
                with pytest.raises(Revoked):
                    await waiting
                del kept

    run(main)


def test_failures_are_typed(run: Callable[[Main], None]) -> None:
    async def main(daemon: Daemon) -> None:
        async with builder(daemon).acquire() as lease, aio.GpuSession(lease) as session:
            with pytest.raises(AllocFailed):
                await session.mem_alloc(2 << 20)
            module = await session.module_load(FAULTS)
            args = KernelArgs().push_u64(0).push_u64(0)
            number = await session.launch(module, "stray_store", [1], [1], args)
            with pytest.raises(SyncFailed) as caught:
                await session.sync()
            assert caught.value.failure.failed_request_id == number
            await check_main_job(session)
        with pytest.raises(CapacityExceeded):
            await builder(daemon, size_bytes=1 << 50).acquire()

    run(main)


@pytest.mark.exhaustive
def test_renew_and_keep_alive(run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # Renew so early that a busy host is not too late.
    monkeypatch.setattr(leases, "RENEW_AT", 0.1)

    async def main(daemon: Daemon) -> None:
        async with await builder(daemon, seconds=4).acquire() as lease, aio.GpuSession(lease) as session:
            async with lease.keep_alive() as keeper:
                await asyncio.sleep(4.5)
                await check_main_job(session)
                assert keeper.loss is None
            await lease.renew(30)
            assert lease.remaining_s > 20

    run(main)


def test_revoked_while_it_waits(run: Callable[[Main], None]) -> None:
    async def main(daemon: Daemon) -> None:
        lease = await builder(daemon).acquire()
        async with aio.GpuSession(lease) as session:
            # A process asks for an image's parameter types once: `start_endless` is three operations from here on.
            await session.module_load(FAULTS)
            # What the client has queued is served, and counted, before a sync returns.
            await session.sync()

            def operations() -> int:
                return int(daemon.query(lease.lease_id)["operations"])

            before = await asyncio.to_thread(operations)
            kept = await start_endless(session)
            waiting = asyncio.create_task(session.sync())
            await asyncio.to_thread(wait_until, lambda: operations() == before + 4, "the worker waits for the kernel")
            await asyncio.to_thread(daemon.revoke, lease.lease_id)
            with pytest.raises(Revoked):
                await waiting
            del kept

    run(main)


def test_a_cancelled_wait_for_room_leaves_the_line(run: Callable[[Main], None]) -> None:
    async def main(daemon: Daemon) -> None:
        async with await builder(daemon, size_bytes=6 << 30).acquire() as lease:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await builder(daemon).timeout(60).acquire()
            await lease.free()
        # All bytes must be free, which the `daemon` fixture checks.

    run(main)


async def contend(session: aio.GpuSession, buffer: Buffer) -> None:
    """Let several tasks wait for the session at the same time."""
    await asyncio.gather(*(session.mem_read(buffer, 0, 4) for _ in range(4)))


def test_loops_one_after_another_use_the_same_session(daemon: Daemon) -> None:
    async def opened() -> tuple[aio.GpuLease, aio.GpuSession, Buffer]:
        lease = await builder(daemon).acquire()
        session = await aio.GpuSession(lease)
        buffer = await session.mem_alloc(4)
        await session.mem_write(buffer, 0, b"kept")
        await contend(session, buffer)
        return lease, session, buffer

    async def used() -> bytes:
        await contend(session, buffer)
        data = bytes(await session.mem_read(buffer, 0, 4))
        await session.close()
        await lease.free()
        return data

    lease, session, buffer = asyncio.run(opened())
    assert asyncio.run(used()) == b"kept"


def test_the_loop_of_another_thread_is_refused(daemon: Daemon) -> None:
    errors: list[InvalidRequest] = []

    def run_elsewhere(work: Coroutine[Any, Any, Any]) -> None:
        try:
            asyncio.run(asyncio.wait_for(work, PATIENCE_S))
        except InvalidRequest as error:
            errors.append(error)

    async def main() -> None:
        async with builder(daemon).acquire() as lease, aio.GpuSession(lease) as session:
            buffer = await session.mem_alloc(4)
            calls: list[Coroutine[Any, Any, Any]] = [session.mem_read(buffer, 0, 4), session.sync(), lease.query()]
            threads = [threading.Thread(target=run_elsewhere, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            # The session's own loop uses it meanwhile, and afterwards.
            while any(thread.is_alive() for thread in threads):
                await contend(session, buffer)
            await session.mem_write(buffer, 0, b"kept")
            assert bytes(await session.mem_read(buffer, 0, 4)) == b"kept"

    asyncio.run(main())
    assert len(errors) == 3
    for error in errors:
        assert "in only one event loop at a time" in str(error)
        assert "asyncio.run_coroutine_threadsafe" in str(error)
