"""What only the asyncio face has: cancellation, tasks that share a session, the keep-alive task."""

import asyncio
import gc
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from gpulease import client
from gpulease.client import Disconnected, GpuLeaseError, InvalidHandle, InvalidRequest, KernelArgs, Revoked, aio
from gpulease.protocol import Opcode, Status
from gpulease.protocol.messages import StreamWait
from helpers.scripted_peer import ScriptedPeer, Silence
from helpers.waiting import PATIENCE_S


def builder(peer: ScriptedPeer, seconds: float = 60) -> aio.GpuBuilder:
    return aio.GpuBuilder(peer.address).min_vram(1 << 20).lease_secs(seconds)


async def heard(peer: ScriptedPeer, op: str, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while peer.ops().count(op) < count:  # noqa: ASYNC110  # another thread hears it, which sets no event
            await asyncio.sleep(0.005)


def slow(peer: ScriptedPeer, op: Opcode) -> threading.Event:
    """Make an operation wait until the event is set."""
    release = threading.Event()
    usual = {Opcode.SYNC: peer._empty, Opcode.MEM_WRITE: peer._mem_write, Opcode.LAUNCH: peer._empty}[op]

    def wait(request: object) -> object:
        release.wait(60)
        return usual(request)  # type: ignore[arg-type]

    peer.script[op] = wait  # type: ignore[assignment]
    return release


def test_a_cancelled_operation_leaves_the_session_in_step(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with builder(peer).acquire() as lease, aio.GpuSession(lease) as session:
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


def test_nobody_is_told_of_an_operation_that_fails_after_it_was_cancelled(peer: ScriptedPeer) -> None:
    told: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with builder(peer).acquire() as lease:
            session = await aio.GpuSession(lease)
            release = slow(peer, Opcode.SYNC)
            task = asyncio.create_task(session.sync())
            await heard(peer, "SYNC")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The operation fails now, and its error is collected.
            await session.close()
            release.set()
            gc.collect()

    asyncio.run(scenario())
    assert told == []


@pytest.mark.parametrize("repeated", ["launch", "order"])
def test_a_request_without_a_reply_is_sent_whole_although_it_was_cancelled(peer: ScriptedPeer, repeated: str) -> None:
    async def scenario() -> None:
        async with builder(peer).acquire() as lease, aio.GpuSession(lease) as session:
            module = await session.module_load(b"ptx")
            one, two = await session.stream(), await session.stream()
            release = slow(peer, Opcode.LAUNCH)
            begun = Counter[str]()

            async def flood() -> None:
                while True:
                    begun["launch"] += 1
                    await session.launch(module, "nothing", [1], [1], KernelArgs())
                    while repeated == "order":
                        begun["order"] += 1
                        await one.wait_for(two)

            task = asyncio.create_task(flood())
            # From here on the peer reads nothing, so after some turns of the loop the socket stays full.
            await heard(peer, "LAUNCH")
            for _ in range(100):
                await asyncio.sleep(0)
            assert not task.done(), "the socket is full"
            # Until its request is whole it has its turn, also after its cancellation: the next request comes after it.
            following = asyncio.create_task(two.wait_for(one))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not following.done()
            release.set()
            await following
            await session.sync()
            orders = [request.body for request in peer.heard if request.op is Opcode.STREAM_WAIT]
            assert orders[-1] == StreamWait(two.handle, one.handle)
            assert set(orders[:-1]) == ({StreamWait(one.handle, two.handle)} if repeated == "order" else set())
            assert len(orders) == 1 + begun["order"]
            assert peer.ops().count("LAUNCH") == begun["launch"]
            await one.close()
            with pytest.raises(InvalidHandle):
                await one.wait_for(two)
            await two.wait_for(None)

    asyncio.run(scenario())


def test_tasks_take_turns(peer: ScriptedPeer) -> None:
    async def work(session: aio.GpuSession, mark: int) -> None:
        buffer = await session.mem_alloc(2 << 20)
        for _ in range(5):
            await session.mem_write(buffer, 0, bytes([mark]) * (2 << 20))
            assert await session.mem_read(buffer, 0, 2 << 20) == bytes([mark]) * (2 << 20)

    async def scenario() -> None:
        async with builder(peer).acquire() as lease, aio.GpuSession(lease) as session:
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
        async with builder(peer).acquire() as lease:
            session = await aio.GpuSession(lease)
            task = asyncio.create_task(session.sync())
            await heard(peer, "SYNC")
            await session.close()
            with pytest.raises(InvalidRequest, match="the session was closed"):
                await task

    asyncio.run(scenario())


def test_a_session_that_was_never_opened(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with builder(peer).acquire() as lease:
            session = aio.GpuSession(lease)
            await session.close()
            with pytest.raises(InvalidRequest, match="is not open"):
                await session.sync()

    asyncio.run(scenario())


def test_a_dropped_lease_is_freed(peer: ScriptedPeer) -> None:
    async def scenario() -> aio.GpuLease:
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
        session = await aio.GpuSession(lease)
        task = asyncio.create_task(session.sync())
        await heard(peer, "SYNC")
        task.cancel()

    asyncio.run(scenario())
    asyncio.run(heard(peer, "LEASE_FREE"))


@pytest.mark.usefixtures("no_gc")
def test_a_loop_that_ends_in_the_middle_of_a_renewal(peer: ScriptedPeer) -> None:
    peer.on(Opcode.LEASE_RENEW, Silence())

    async def scenario() -> "weakref.ref[aio.GpuLease]":
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
        session = await aio.GpuSession(lease)
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
        await asyncio.wait_for(lost.wait(), 60)
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
                error = await asyncio.wait_for(lost, 60)
            assert isinstance(error, Revoked)
            assert keeper.loss is error

    asyncio.run(scenario())


@pytest.mark.parametrize("start", [lambda lease: lease.keep_alive(), lambda lease: lease.on_warning(print)])
def test_stopped_before_its_first_step(peer: ScriptedPeer, start: Callable[[aio.GpuLease], Any]) -> None:
    """Nothing is warned of: a coroutine that was never awaited would be."""

    async def scenario() -> None:
        async with builder(peer).acquire() as lease:
            await start(lease).stop()

    asyncio.run(scenario())


def test_leaving_never_hides_what_went_wrong_inside(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with builder(peer).acquire():
            peer.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())

    async def quietly() -> None:
        with pytest.raises(Disconnected):
            await builder(peer).acquire()

    asyncio.run(quietly())


NAMES = ("arrays", "lease", "modules", "session", "streams", "graphs", "submits", "events", "regions")
MODULES = {
    "gpulease.client": tuple(f"sync.{name}" for name in NAMES),
    "gpulease.client.aio": tuple(f"aio.{name}" for name in NAMES),
}
"""Where each face defines what the other defines too, below gpulease.client."""


def surface(face: str) -> dict[str, Any]:
    """What a face's modules define, by name, without what is private: classes and functions."""
    found = {}
    for module in (import_module(f"gpulease.client.{name}") for name in MODULES[face]):
        for name, value in vars(module).items():
            is_defined = inspect.isclass(value) or inspect.isfunction(value)
            if is_defined and value.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = value
    return found


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]


def members(kind: type) -> dict[str, Any]:
    """A class's methods with their parameters, and its other public names; how it is made is one of them."""
    public = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    shown = {name: parameters(getattr(kind, name)) for name, value in public.items() if not is_data(value)}
    return shown | dict.fromkeys(public.keys() - shown.keys()) | {"()": parameters(kind)}


def is_data(value: Any) -> bool:
    return not callable(value) and not isinstance(value, classmethod | staticmethod)


def test_both_faces_export_the_same_names() -> None:
    assert aio.__all__ == client.__all__
    theirs = surface("gpulease.client").keys() | surface("gpulease.client.aio").keys()
    for name in client.__all__:
        shared = getattr(aio, name) is getattr(client, name)
        assert shared is (name not in theirs), f"{name}: a face's own, or the same object in both"


def test_both_faces_have_the_same_methods_and_parameters() -> None:
    blocking, coroutines = surface("gpulease.client"), surface("gpulease.client.aio")
    assert blocking.keys() == coroutines.keys()
    assert len(blocking) > 12
    for name, value in blocking.items():
        describe = members if isinstance(value, type) else parameters
        assert describe(coroutines[name]) == describe(value), name


def test_what_opens_is_for_await_async_with_and_tasks(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        async with builder(peer).acquire() as lease, aio.GpuSession(lease) as session:
            assert lease.is_alive
            assert session.is_alive
            async with session.stream() as stream:
                assert stream.is_alive
            assert not stream.is_alive
            assert (await session.stream()).is_alive
        assert not lease.is_alive
        assert not session.is_alive
        lease = await builder(peer).acquire()
        session = await aio.GpuSession(lease)
        assert await session is session
        await session.close()
        await lease.free()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(builder(peer).acquire()) for _ in range(2)]
        for task in tasks:
            await task.result().free()

    asyncio.run(scenario())


def test_leaving_the_block_of_an_acquire_by_an_error_gives_the_lease_back(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            async with builder(peer).acquire():
                raise ZeroDivisionError
        assert peer.ops()[-1] == "LEASE_FREE"

    asyncio.run(scenario())


def test_an_acquire_that_is_closed_asks_for_nothing(peer: ScriptedPeer) -> None:
    async def scenario() -> None:
        opening = builder(peer).acquire()
        opening.close()
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await opening
        assert peer.ops() == []

    asyncio.run(scenario())
