"""Ctrl-C and cancelled awaits: what an interrupted call has made goes back, and the session lives."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from gpulease.client import GpuLease, GpuSession, GpuWaiting, Region, aio
from gpulease.client.aio import driver as aio_driver
from gpulease.client.sync import driver as sync_driver
from helpers.daemon import Daemon
from helpers.interrupt_points import InterruptPoints
from helpers.kernels import TRANSFORM, scale_args
from helpers.waiting import wait_until

SLICE_BYTES = 64 << 20
REGION_BYTES = 2 << 20
MOST_WAITS = 200
"""More waits than any of the operations has: the walk must come to its end."""


class Scene:
    """A lease with a session of either face, and what the operations take."""

    lease: Any
    session: Any
    module: Any
    buffer: Any
    array: Any
    region: Any


def recorded(scene: Scene) -> Any:
    with scene.session.record() as graph:
        scene.session.launch(scene.module, "scale", [1], [32], scale_args(scene.buffer, 0, 1.0))
    return graph


async def recorded_async(scene: Scene) -> Any:
    async with scene.session.record() as graph:
        await scene.session.launch(scene.module, "scale", [1], [32], scale_args(scene.buffer, 0, 1.0))
    return graph


def closed_stream(scene: Scene) -> None:
    scene.session.stream().close()


async def closed_stream_async(scene: Scene) -> None:
    await (await scene.session.stream()).close()


def reused_buffer(scene: Scene) -> Any:
    scene.session.mem_free(scene.session.mem_alloc(4096))
    return scene.session.mem_alloc(4096)


async def reused_buffer_async(scene: Scene) -> Any:
    await scene.session.mem_free(await scene.session.mem_alloc(4096))
    return await scene.session.mem_alloc(4096)


def buffer_behind_dropped_ones(scene: Scene) -> Any:
    first, second = scene.session.mem_alloc(4096), scene.session.mem_alloc(4096)
    del first, second
    return scene.session.mem_alloc(4096)


async def buffer_behind_dropped_ones_async(scene: Scene) -> Any:
    first, second = await scene.session.mem_alloc(4096), await scene.session.mem_alloc(4096)
    del first, second
    return await scene.session.mem_alloc(4096)


def ended(made: Any) -> None:
    """End what its last reference does not end."""
    if isinstance(made, Region):
        made.close()


MAKING: dict[str, Callable[[Scene], Any]] = {
    "mem_alloc": lambda scene: scene.session.mem_alloc(1 << 20),
    "zeros": lambda scene: scene.session.zeros(1000, np.float32),
    "empty_device": lambda scene: scene.session.empty_device(1000, np.float32),
    "array": lambda scene: scene.session.array(np.ones(1000, np.float32)),
    "copy": lambda scene: scene.array.copy(),
    "module_load": lambda scene: scene.session.module_load(TRANSFORM),
    "stream": lambda scene: scene.session.stream(),
    "event": lambda scene: scene.session.default_stream.event(),
    "region_set": lambda scene: scene.session.region_set([scene.region]),
}
"""Operations of both faces whose result goes back with its last reference."""

SYNC = MAKING | {
    "record": recorded,
    "stream closed": closed_stream,
    "mem_alloc again": reused_buffer,
    "mem_alloc behind frees": buffer_behind_dropped_ones,
    "region": lambda scene: scene.lease.region(REGION_BYTES),
}

ASYNC = MAKING | {
    "record": recorded_async,
    "stream closed": closed_stream_async,
    "mem_alloc again": reused_buffer_async,
    "mem_alloc behind frees": buffer_behind_dropped_ones_async,
}


def test_every_operation_that_makes_something_is_here() -> None:
    """Adds the session's and lease's methods that nobody has thought of here."""
    made = {name.split()[0] for name in SYNC}
    others = (
        {"attach", "compile", "kernel", "elementwise", "default_stream", "buffer", "empty"}
        | {"mem_free", "mem_read", "mem_write", "module_unload", "launch", "sync", "printed", "on_printed", "close"}
        | {"cuda_version", "compute_capability", "driver", "card_uuid", "session_id", "slice_bytes", "shares_memory"}
        | {"region_granule_bytes", "is_alive", "disown"}
        # None of these makes a buffer: what is kept belongs to the lease, and what is taken ends with its session.
        | {"keep", "kept", "kept_names", "take", "reset", "owns_memory"}
    )
    methods = {name for name in dir(GpuSession) if not name.startswith("_")}
    assert methods - others <= made, "make it here, too, if it makes something"


@contextmanager
def blocking(daemon: Daemon, waiting: GpuWaiting, *, shared_memory: bool) -> Iterator[Scene]:
    scene = Scene()
    with (
        daemon.builder(SLICE_BYTES).waiting(waiting).acquire() as scene.lease,
        GpuSession(scene.lease, shared_memory=shared_memory) as session,
    ):
        scene.session = session
        scene.module, scene.buffer = session.module_load(TRANSFORM), session.mem_alloc(4096)
        scene.array = session.array(np.ones(16, np.float32))
        # What a first use keeps for later ones is there before anything is compared.
        scene.array.copy()
        scene.region = scene.lease.region(REGION_BYTES)
        session.launch(scene.module, "scale", [1], [32], scale_args(scene.buffer, 0, 1.0))
        recorded(scene).launch()
        session.stream().close()
        yield scene


def what_is_left(lease: GpuLease, session: GpuSession) -> tuple[int, int]:
    """(bytes, regions) that the lease's session has. What was noted to be freed is freed first."""
    session.sync()
    lease.used()
    report = lease.query()
    return report["allocated_bytes"], len(report["regions"])


class Interrupt:
    """Interrupts the blocking face at one of its waits: before it, or behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.is_behind, self.count = -1, False, 0
        for step, wait in list(sync_driver._WAIT_BY_STEP.items()):
            monkeypatch.setitem(sync_driver._WAIT_BY_STEP, step, self._interrupted(wait))

    def _interrupted(self, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def waiting(step: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if number == self.at and not self.is_behind:
                raise KeyboardInterrupt
            answer = wait(step)
            if number == self.at:
                raise KeyboardInterrupt
            return answer

        return waiting

    def walk(self, operation: Callable[[], Any]) -> Iterator[None]:
        """Interrupt the operation at each of its waits; yields behind each interrupt."""
        for at in range(MOST_WAITS):
            for self.is_behind in (False, True):
                self.at, self.count = at, 0
                made = None
                with suppress(KeyboardInterrupt):
                    made = operation()
                has_ended = self.count <= at
                self.at = -1
                ended(made)
                made = None  # dropped
                if has_ended:
                    assert at, "it waited for nothing, so nothing was interrupted"
                    return
                yield
        raise AssertionError("it waits and waits")


class Cancel:
    """Cancels a task at one of the waits of the asyncio face's operations: as the wait begins, or once it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_behind: bool = False) -> None:
        self.is_behind = is_behind
        self.at, self.count = -1, 0
        self.task: asyncio.Future[Any] | None = None
        for step, wait in list(aio_driver._WAIT_BY_STEP.items()):
            monkeypatch.setitem(aio_driver._WAIT_BY_STEP, step, self.cancelling(wait))

    def cancelling(self, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def waiting(step: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if number == self.at and not self.is_behind and self.task is not None:
                self.task.cancel()
            answer = await wait(step)
            if number == self.at and self.is_behind and self.task is not None:
                self.task.cancel()
            return answer

        return waiting

    async def reaches(self, at: int, making: Any) -> bool:
        """Run the operation in a task that is cancelled at that wait; whether it had so many."""
        self.count, self.at, self.task = 0, at, asyncio.ensure_future(making)
        await asyncio.wait((self.task,))
        self.at = -1
        return self.count > at


@pytest.mark.parametrize("name", SYNC)
def test_an_interrupt_at_any_wait_leaves_nothing(name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking(daemon, GpuWaiting.BLOCK, shared_memory=False) as scene:
        interrupt = Interrupt(monkeypatch)
        before = what_is_left(scene.lease, scene.session)
        for _ in interrupt.walk(lambda: SYNC[name](scene)):
            wait_until(lambda: what_is_left(scene.lease, scene.session) == before, "all is given back")


def test_an_interrupt_at_any_wait_of_an_acquire_leaves_no_lease(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Interrupt(monkeypatch)
    for _ in interrupt.walk(lambda: daemon.builder().acquire().free()):
        wait_until(lambda: not daemon.leases(), "no lease is left")


def test_an_interrupt_at_any_wait_of_an_attach_leaves_the_lease_to_the_next(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.builder().acquire() as lease:
        interrupt = Interrupt(monkeypatch)
        for _ in interrupt.walk(lambda: GpuSession(lease).close()):
            with GpuSession(lease) as session:
                session.sync()


@pytest.mark.parametrize(
    "is_behind",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["before the wait", "behind the wait"],
)
@pytest.mark.parametrize("name", [*ASYNC, "region", "acquire"])
def test_a_cancelled_await_at_any_wait_leaves_nothing(
    name: str, is_behind: bool, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = Cancel(monkeypatch, is_behind=is_behind)

    async def made(scene: Scene) -> None:
        if name == "acquire":
            await (await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire()).free()
        elif name == "region":
            await (await scene.lease.region(REGION_BYTES)).close()
        else:
            await ASYNC[name](scene)

    async def main() -> None:
        builder = aio.GpuBuilder(daemon.address).min_vram(SLICE_BYTES).lease_secs(60).waiting(GpuWaiting.BLOCK)
        scene = Scene()
        async with builder.acquire() as scene.lease, aio.GpuSession(scene.lease, shared_memory=False) as scene.session:
            session, lease = scene.session, scene.lease
            scene.module, scene.buffer = await session.module_load(TRANSFORM), await session.mem_alloc(4096)
            scene.array = await session.array(np.ones(16, np.float32))
            await scene.array.copy()
            scene.region = await lease.region(REGION_BYTES)
            await (await recorded_async(scene)).launch()
            await (await session.stream()).close()

            async def left() -> tuple[int, int, int]:
                await session.sync()
                await lease.used()
                report = await lease.query()
                leases = await asyncio.to_thread(daemon.leases)
                return report["allocated_bytes"], len(report["regions"]), len(leases)

            before = await left()
            for at in range(MOST_WAITS):
                if not await cancel.reaches(at, made(scene)):
                    assert at, "it waited for nothing, so nothing was cancelled"
                    break
                async with asyncio.timeout(20):
                    while await left() != before:  # noqa: ASYNC110  # the daemon tells by answers alone
                        await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared_memory", [True, False], ids=["ring", "socket"])
@pytest.mark.parametrize("waiting", [GpuWaiting.BLOCK, GpuWaiting.SPIN])
@pytest.mark.parametrize("name", SYNC)
def test_an_interrupt_at_any_point_leaves_nothing(
    name: str, waiting: GpuWaiting, shared_memory: bool, daemon: Daemon
) -> None:
    with blocking(daemon, waiting, shared_memory=shared_memory) as scene:
        before = what_is_left(scene.lease, scene.session)
        for point in InterruptPoints().walk(lambda: SYNC[name](scene), ended):
            wait_until(lambda: what_is_left(scene.lease, scene.session) == before, str(point))


@pytest.mark.exhaustive
def test_an_interrupt_at_any_point_of_an_acquire_leaves_no_lease(daemon: Daemon) -> None:
    def given_back(lease: GpuLease | None) -> None:
        if lease is not None:
            lease.free()

    for point in InterruptPoints().walk(lambda: daemon.builder().acquire(), given_back):
        wait_until(lambda: not daemon.leases(), str(point))


@pytest.mark.exhaustive
def test_an_interrupt_at_any_point_of_an_attach_leaves_the_lease_to_the_next(daemon: Daemon) -> None:
    def closed(session: GpuSession | None) -> None:
        if session is not None:
            session.close()

    with daemon.builder().acquire() as lease:
        for _ in InterruptPoints().walk(lambda: GpuSession(lease), closed):
            with GpuSession(lease) as session:
                session.sync()


@pytest.mark.parametrize("name", ["region", "closed region"])
def test_a_lease_s_block_leaves_no_task_of_a_cancelled_await(
    name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cancelled caller has asked for is answered, and given back, before the block is left."""
    cancel = Cancel(monkeypatch)

    async def interrupted(at: int) -> bool:
        async with aio.GpuBuilder(daemon.address).min_vram(SLICE_BYTES).acquire() as lease:
            region = await lease.region(REGION_BYTES)
            making: Any = lease.region(REGION_BYTES) if name == "region" else region.close()
            return await cancel.reaches(at, making)

    async def main() -> None:
        at = 0
        while await interrupted(at):
            assert asyncio.all_tasks() == {asyncio.current_task()}
            at += 1
        assert at, "it waited for nothing, so nothing was cancelled"

    asyncio.run(main())


# --- frees that nobody sends ---


@pytest.mark.parametrize("how", ["dropped", "freed", "of an interrupted call"])
def test_an_idle_session_frees_what_nobody_has(how: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # An answer may lie in a ring before anybody waits for it; over a socket every request waits.
    shares = how != "of an interrupted call"
    builder = daemon.builder(SLICE_BYTES).waiting(GpuWaiting.BLOCK)
    with builder.acquire() as lease, GpuSession(lease, shared_memory=shares) as session:
        empty = lease.query()["allocated_bytes"]
        if how == "of an interrupted call":
            for _ in Interrupt(monkeypatch).walk(lambda: session.mem_alloc(1 << 20)):
                break
        else:
            buffer = session.mem_alloc(1 << 20)
            if how == "freed":
                session.mem_free(buffer)
            del buffer
        wait_until(lambda: lease.query()["allocated_bytes"] == empty, "it is freed")


def test_an_idle_asyncio_session_frees_what_nobody_has(daemon: Daemon) -> None:
    async def main() -> None:
        builder = aio.GpuBuilder(daemon.address).min_vram(SLICE_BYTES)
        async with builder.acquire() as lease, aio.GpuSession(lease) as session:
            empty = (await lease.query())["allocated_bytes"]
            buffer = await session.mem_alloc(1 << 20)
            del buffer
            async with asyncio.timeout(20):
                while (await lease.query())["allocated_bytes"] != empty:  # noqa: ASYNC110  # as above
                    await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "with", "dropped"])
@pytest.mark.parametrize("shared_memory", [True, False], ids=["ring", "socket"])
def test_what_was_dropped_just_before_a_session_s_end_is_freed(how: str, shared_memory: bool, daemon: Daemon) -> None:
    with daemon.builder(SLICE_BYTES).acquire() as lease:
        session = GpuSession(lease, shared_memory=shared_memory)
        empty = lease.query()["allocated_bytes"]
        buffer = session.mem_alloc(1 << 20)
        if how == "with":
            with session:
                del buffer
        else:
            del buffer
            if how == "close":
                session.close()
        del session
        wait_until(lambda: lease.query()["allocated_bytes"] == empty, "it is freed")
