"""What only the asyncio face has: cancellation, tasks that share a session, the keep-alive task."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from gpulease.client import Disconnected, GpuLeaseError, InvalidRequest, KernelArgs, Revoked
from gpulease.client.aio import AsyncGpuBuilder, AsyncGpuLease, AsyncGpuSession
from gpulease.protocol import Opcode, Status
from helpers.scripted_peer import ScriptedPeer, Silence


def builder(peer: ScriptedPeer, seconds: float = 60) -> AsyncGpuBuilder:
    return AsyncGpuBuilder(peer.address).min_vram(1 << 20).lease_secs(seconds)


async def heard(peer: ScriptedPeer, op: str, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while peer.ops().count(op) < count:  # noqa: ASYNC110  # another thread hears it, which sets no event
            await asyncio.sleep(0.005)


def slow(peer: ScriptedPeer, op: Opcode) -> threading.Event:
    """Make an operation wait until the event is set."""
    release = threading.Event()
    usual = {Opcode.SYNC: peer._empty, Opcode.MEM_WRITE: peer._mem_write, Opcode.LAUNCH: peer._empty}[op]

    def wait(request: object) -> object:
        release.wait(5)
        return usual(request)  # type: ignore[arg-type]

    peer.script[op] = wait  # type: ignore[assignment]
    return release


def test_a_cancelled_operation_leaves_the_session_in_step(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with await builder(peer).acquire() as lease, AsyncGpuSession(lease) as session:
            buffer = await session.mem_alloc(8 << 20)
            data = bytes(range(256)) * (8 << 12)
            release = slow(peer, Opcode.MEM_WRITE)
            task = asyncio.create_task(session.mem_write(buffer, 0, data))
            await heard(peer, "MEM_WRITE")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            waiting = asyncio.create_task(session.mem_read(buffer, 0, 8 << 20))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            release.set()
            assert await waiting == data

    asyncio.run(scenario())


def test_a_cancelled_launch_is_whole_or_not_sent(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with await builder(peer).acquire() as lease, AsyncGpuSession(lease) as session:
            module = await session.module_load(b"ptx")
            release = slow(peer, Opcode.LAUNCH)

            async def flood() -> None:
                while True:
                    await session.launch(module, "nothing", [1], [1], KernelArgs())

            task = asyncio.create_task(flood())
            await asyncio.sleep(0.1)
            assert not task.done(), "the socket is full"
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release.set()
            await session.sync()

    asyncio.run(scenario())


def test_tasks_take_turns(peer: ScriptedPeer) -> None:
    async def work(session: AsyncGpuSession, mark: int) -> None:
        buffer = await session.mem_alloc(2 << 20)
        for _ in range(5):
            await session.mem_write(buffer, 0, bytes([mark]) * (2 << 20))
            assert await session.mem_read(buffer, 0, 2 << 20) == bytes([mark]) * (2 << 20)

    async def scenario() -> None:
        async with await builder(peer).acquire() as lease, AsyncGpuSession(lease) as session:
            await asyncio.gather(*(work(session, mark) for mark in range(4)))

    asyncio.run(scenario())


def test_a_cancelled_acquire_closes_its_connection(peer: ScriptedPeer) -> None:
    peer.on(Opcode.LEASE_ALLOC, Silence())

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await builder(peer).timeout(60).acquire()

    asyncio.run(scenario())


def test_close_wakes_a_waiting_task(peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, Silence())

    async def scenario() -> None:
        async with await builder(peer).acquire() as lease:
            session = await AsyncGpuSession(lease).open()
            task = asyncio.create_task(session.sync())
            await heard(peer, "SYNC")
            await session.close()
            with pytest.raises(InvalidRequest, match="the session was closed"):
                await task

    asyncio.run(scenario())


def test_a_session_that_was_never_opened(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with await builder(peer).acquire() as lease:
            session = AsyncGpuSession(lease)
            await session.close()
            with pytest.raises(InvalidRequest, match="is not open"):
                await session.sync()

    asyncio.run(scenario())


def test_a_dropped_lease_is_freed(peer: ScriptedPeer) -> None:
    async def scenario() -> AsyncGpuLease:
        lease = await builder(peer).acquire()
        del lease
        await heard(peer, "LEASE_FREE")
        return await builder(peer).acquire()

    lease = asyncio.run(scenario())
    del lease  # its loop is closed by now
    asyncio.run(heard(peer, "LEASE_FREE", 2))


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is dropped goes by its reference count, or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
def test_a_loop_that_ends_in_the_middle_of_everything(peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, Silence())

    async def scenario() -> None:
        lease = await builder(peer).acquire()
        session = await AsyncGpuSession(lease).open()
        task = asyncio.create_task(session.sync())
        await heard(peer, "SYNC")
        task.cancel()

    asyncio.run(scenario())
    asyncio.run(heard(peer, "LEASE_FREE"))


@pytest.mark.usefixtures("no_gc")
def test_a_loop_that_ends_in_the_middle_of_a_renewal(peer: ScriptedPeer) -> None:
    peer.on(Opcode.LEASE_RENEW, Silence())

    async def scenario() -> "weakref.ref[AsyncGpuLease]":
        lease = await builder(peer, 0.1).acquire()
        lease.keep_alive()
        await heard(peer, "LEASE_RENEW")
        return weakref.ref(lease)

    assert asyncio.run(scenario())() is None


@pytest.mark.usefixtures("no_gc")
def test_an_error_does_not_keep_the_lease(peer: ScriptedPeer) -> None:
    peer.fail(Opcode.SYNC, Status.SYNC_FAILED, "illegal address")

    async def scenario() -> None:
        lease = await builder(peer).acquire()
        session = await AsyncGpuSession(lease).open()
        with suppress(GpuLeaseError):
            await session.sync()
        del session, lease
        await heard(peer, "LEASE_FREE")

    asyncio.run(scenario())


@pytest.mark.usefixtures("no_gc")
def test_a_loss_does_not_keep_the_lease(peer: ScriptedPeer) -> None:
    peer.fail(Opcode.LEASE_RENEW, Status.REVOKED, "mine now")

    async def scenario() -> None:
        lost = asyncio.Event()
        lease = await builder(peer, 0.1).acquire()
        keeper = lease.keep_alive(lambda _: lost.set())
        await asyncio.wait_for(lost.wait(), 5)
        dropped = weakref.ref(lease)
        del lease
        assert dropped() is None
        assert isinstance(keeper.loss, Revoked)

    asyncio.run(scenario())


def test_keep_alive(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        lost: asyncio.Future[GpuLeaseError] = asyncio.get_running_loop().create_future()
        async with await builder(peer, 0.2).acquire() as lease:
            async with lease.keep_alive(lost.set_result) as keeper:
                await heard(peer, "LEASE_RENEW", 3)
                peer.fail(Opcode.LEASE_RENEW, Status.REVOKED, "mine now")
                error = await asyncio.wait_for(lost, 5)
            assert isinstance(error, Revoked)
            assert keeper.loss is error

    asyncio.run(scenario())


@pytest.mark.parametrize("start", [lambda lease: lease.keep_alive(), lambda lease: lease.on_warning(print)])
def test_stopped_before_its_first_step(peer: ScriptedPeer, start: Callable[[AsyncGpuLease], Any]) -> None:
    """Nothing is warned of: a coroutine that was never awaited would be."""

    async def scenario() -> None:
        async with await builder(peer).acquire() as lease:
            await start(lease).stop()

    asyncio.run(scenario())


def test_leaving_never_hides_what_went_wrong_inside(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with await builder(peer).acquire():
            peer.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())

    async def quietly() -> None:
        with pytest.raises(Disconnected):
            await builder(peer).acquire()

    asyncio.run(quietly())
