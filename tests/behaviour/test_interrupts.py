"""Ctrl-C and cancelled awaits: what an interrupted call has made is freed, and the session continues."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, islice, product
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gpulease.client import GpuBuilder, GpuLease, GpuSession, GpuWaiting, LeaseFreed, Region, Revoked, aio
from gpulease.client.aio import driver as aio_driver
from gpulease.client.cli.__main__ import main
from gpulease.client.console import exit_status
from gpulease.client.sync import driver as sync_driver
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, running
from helpers.fleet_directory import Directory
from helpers.fleet_rig import claims, fleet
from helpers.interrupt_points import InterruptPoints
from helpers.kernels import TRANSFORM, scale_args
from helpers.parking import row
from helpers.remote import Pki
from helpers.waiting import PATIENCE_S, wait_until

SLICE_BYTES = 64 << 20
REGION_BYTES = 2 << 20
MOST_WAITS = 200
"""More waits than any operation has, so that the walk ends."""

CHECKED_TOGETHER = 16
"""Interrupts between two checks that nothing is left."""


# Python discards an interrupt that occurs while it closes a generator, and warns about it. The sockets of calls that
# were interrupted twice are closed only with their last reference, which leads to a warning as well.
discards_interrupts = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Scene:
    """A lease with a session of either API, and the arguments of the operations."""

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


def region_s_block(scene: Scene) -> None:
    with scene.lease.region(REGION_BYTES):
        pass


def ended(made: Any) -> None:
    """End an object that does not end with its last reference."""
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
"""Operations of both APIs whose result is freed with its last reference."""

SYNC = MAKING | {
    "record": recorded,
    "stream closed": closed_stream,
    "mem_alloc again": reused_buffer,
    "mem_alloc behind frees": buffer_behind_dropped_ones,
    "region": lambda scene: scene.lease.region(REGION_BYTES),
    "region's block": region_s_block,
}

ASYNC = MAKING | {
    "record": recorded_async,
    "stream closed": closed_stream_async,
    "mem_alloc again": reused_buffer_async,
    "mem_alloc behind frees": buffer_behind_dropped_ones_async,
}


CLEANED_UP = ("region", "region's block", "acquire")
"""Operations whose clean-up runs in a separate task if the caller is cancelled. That task may be cancelled, too."""


PARTS = ("mem_alloc", "stream", "region", "empty_device")
"""Operations whose points are all reached by `mem_alloc again`, `stream closed`, `region's block` or `zeros`."""

TWICE = ("mem_alloc", "mem_alloc again", "stream closed")
"""Operations that are also interrupted a second time at every point: they make, reuse, and free."""


def test_every_operation_that_makes_something_is_here() -> None:
    """A new method of a session or a lease must be added here."""
    made = {name.split()[0] for name in SYNC}
    others = (
        {"attach", "compile", "kernel", "elementwise", "default_stream", "buffer", "empty"}
        | {"mem_free", "mem_read", "mem_write", "module_unload", "launch", "sync", "printed", "on_printed", "close"}
        | {"cuda_version", "compute_capability", "driver", "card_uuid", "session_id", "slice_bytes", "shares_memory"}
        | {"region_granule_bytes", "is_alive", "disown"}
        # These make no buffer: a kept buffer belongs to the lease, and one that is taken ends with its session.
        | {"keep", "kept", "kept_names", "take", "reset", "owns_memory"}
    )
    methods = {name for name in dir(GpuSession) if not name.startswith("_")}
    assert methods - others <= made, "make it here, too, if it makes something"


@pytest.fixture(scope="module")
def remote_daemon(pki: Pki) -> Iterator[Daemon]:
    with pki.daemon() as daemon:
        yield daemon


@contextmanager
def blocking(
    daemon: Daemon, waiting: GpuWaiting, *, shared_memory: bool, builder: GpuBuilder | None = None
) -> Iterator[Scene]:
    """Yield a scene with the blocking API. `builder` requests the lease; by default it is `daemon`'s Unix socket."""
    scene = Scene()
    asking = (builder or daemon.builder()).min_vram(SLICE_BYTES).lease_secs(600).waiting(waiting)
    with (
        asking.acquire() as scene.lease,
        GpuSession(scene.lease, shared_memory=shared_memory) as session,
    ):
        scene.session = session
        scene.module, scene.buffer = session.module_load(TRANSFORM), session.mem_alloc(4096)
        scene.array = session.array(np.ones(16, np.float32))
        # The first use keeps memory for later ones. Do it now, before anything is compared.
        scene.array.copy()
        scene.region = scene.lease.region(REGION_BYTES)
        session.launch(scene.module, "scale", [1], [32], scale_args(scene.buffer, 0, 1.0))
        recorded(scene).launch()
        session.stream().close()
        yield scene


def what_is_left(lease: GpuLease, session: GpuSession) -> tuple[int, int]:
    """Return (bytes, regions) of the lease's session, after everything that the client still had to free is freed."""
    session.sync()
    lease.used()
    report = lease.query()
    return report["allocated_bytes"], len(report["regions"])


class Interrupt:
    """Interrupts the blocking API at some of its waits, before or after the wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.targets: dict[int, bool] = {}
        """For a wait's number, whether to interrupt after it."""
        self.count = 0
        for step, wait in list(sync_driver._WAIT_BY_STEP.items()):
            monkeypatch.setitem(sync_driver._WAIT_BY_STEP, step, self._interrupted(wait))

    def _interrupted(self, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def waiting(step: Any) -> Any:
            # Ctrl-C interrupts only the main thread.
            if threading.current_thread() is not threading.main_thread():
                return wait(step)
            number, self.count = self.count, self.count + 1
            if self.targets.get(number) is False:
                raise KeyboardInterrupt
            answer = wait(step)
            if number in self.targets:
                raise KeyboardInterrupt
            return answer

        return waiting

    def walk(self, operation: Callable[[], Any]) -> Iterator[None]:
        """Interrupt the operation at each of its waits. Yields after each interrupt.

        Args:
            operation: Returns the object that it has made.
        """
        count = 0
        for at in range(MOST_WAITS):
            for is_behind in (False, True):
                if not self._reaches(operation, {at: is_behind}):
                    assert count, "it waited for nothing, so nothing was interrupted"
                    return
                count += 1
                yield
        raise AssertionError("it waits and waits")

    def _reaches(self, operation: Callable[[], Any], targets: dict[int, bool]) -> bool:
        """Run the operation with interrupts at these waits. Returns whether it reached the last of them."""
        self.targets, self.count = targets, 0
        made = None
        with suppress(KeyboardInterrupt):
            made = operation()
        count, self.targets = self.count, {}
        ended(made)
        return count > max(targets)


class Cancel:
    """Cancels a task at some waits of the asyncio API's operations, when a wait begins or after it has ended.

    At the second cancellation, tasks that continue without the caller are cancelled as well, as at the end of an event
    loop.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_behind: bool = False) -> None:
        self.is_behind = is_behind
        self.times = 1
        self.waits: tuple[int, ...] = ()
        self.count = 0
        self.task: asyncio.Future[Any] | None = None
        for step, wait in list(aio_driver._WAIT_BY_STEP.items()):
            monkeypatch.setitem(aio_driver._WAIT_BY_STEP, step, self.cancelling(wait))

    def cancelling(self, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def waiting(step: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if number in self.waits and not self.is_behind:
                self._cancel(number)
            answer = await wait(step)
            if number in self.waits and self.is_behind:
                self._cancel(number)
            return answer

        return waiting

    def _cancel(self, number: int) -> None:
        assert self.task is not None
        for task in [self.task, *(aio_driver._tasks_in_progress if number != self.waits[0] else ())]:
            task.cancel()

    async def reaches(self, making: Any, *waits: int) -> bool:
        """Run the operation in a task that is cancelled at these waits. Returns whether it reached the last of them."""
        self.count, self.waits, self.task = 0, waits, asyncio.ensure_future(making)
        await asyncio.wait((self.task,))
        while self.times > 1 and aio_driver._tasks_in_progress:
            await asyncio.wait(set(aio_driver._tasks_in_progress))
        self.waits = ()
        return self.count > waits[-1]

    async def walk(self, make: Callable[[], Any], times: int = 1) -> AsyncIterator[None]:
        """Cancel the operation at each of its waits. Yields after each run.

        Args:
            make: Returns a new coroutine of the operation.
            times: Number of cancellations. The second one is at each wait that follows the first.
        """
        self.times, count = times, 0
        async for _ in self._walk(make, (), times):
            count += 1
            yield
        assert count, "it waited for nothing, so nothing was cancelled"

    async def _walk(self, make: Callable[[], Any], earlier: tuple[int, ...], times: int) -> AsyncIterator[None]:
        first = max(earlier, default=-1) + 1
        for at in range(first, first + MOST_WAITS):
            if times > 1:
                async for _ in self._walk(make, (*earlier, at), times - 1):
                    yield
            if not await self.reaches(make(), *earlier, at):
                return
            if times == 1:
                yield
        raise AssertionError("it waits and waits")


def some_by_default(names: Iterable[str], chosen: Container[str]) -> list[Any]:
    """Return parameters. Those that are not chosen are marked `exhaustive`."""
    return [pytest.param(name, marks=[] if name in chosen else pytest.mark.exhaustive) for name in names]


def check_often(points: Iterable[object], is_as_before: Callable[[], bool]) -> None:
    """Check after every CHECKED_TOGETHER interrupts, and after the last, that nothing of the interrupted calls is left.

    What a call leaves stays, so a later check finds it, too; to check takes longer than to interrupt.

    Args:
        points: Interrupts when it is iterated. Yields where.
        is_as_before: Whether nothing is left.
    """
    begun, remaining = False, iter(points)
    while recent := [*islice(remaining, CHECKED_TOGETHER)]:
        wait_until(is_as_before, f"all is given back after one of {recent}")
        begun = True
    assert begun, "nothing was interrupted"


def check_interrupts(scene: Scene, name: str, interrupt: Interrupt) -> None:
    """Interrupt an operation at each of its waits. Fails if anything is left, or if the session does not continue."""
    before = what_is_left(scene.lease, scene.session)
    for _ in interrupt.walk(lambda: SYNC[name](scene)):
        wait_until(lambda: what_is_left(scene.lease, scene.session) == before, "all is given back")


@pytest.mark.parametrize("name", SYNC)
def test_an_interrupt_at_any_wait_leaves_nothing(name: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking(daemon, GpuWaiting.BLOCK, shared_memory=False) as scene:
        check_interrupts(scene, name, Interrupt(monkeypatch))


@pytest.mark.parametrize("name", ["mem_alloc", "region", "stream closed"])
def test_an_interrupt_at_any_wait_over_tls_leaves_nothing(
    name: str, remote_daemon: Daemon, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = pki.builder(remote_daemon.tls_address, pki.ann)
    with blocking(remote_daemon, GpuWaiting.BLOCK, shared_memory=False, builder=builder) as scene:
        check_interrupts(scene, name, Interrupt(monkeypatch))


def acquired(builder: GpuBuilder) -> None:
    builder.acquire().free()


def acquired_for_a_block(builder: GpuBuilder) -> None:
    with builder.acquire():
        pass


def reacquired(builder: GpuBuilder) -> None:
    with builder.acquire() as lease:
        lease.free()
        with lease.reacquire():
            pass


ACQUIRING = {"acquire": acquired, "its block": acquired_for_a_block, "reacquire": reacquired}


@pytest.mark.parametrize("how", ACQUIRING)
def test_an_interrupt_at_any_wait_of_an_acquire_leaves_no_lease(
    how: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in Interrupt(monkeypatch).walk(lambda: ACQUIRING[how](daemon.builder())):
        wait_until(lambda: not daemon.leases(), "no lease is left")


@pytest.mark.parametrize("how", some_by_default(ACQUIRING, ["its block"]))
def test_an_interrupt_at_any_wait_of_an_acquire_over_tls_leaves_no_lease(
    how: str, remote_daemon: Daemon, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = pki.builder(remote_daemon.tls_address, pki.ann)
    for _ in Interrupt(monkeypatch).walk(lambda: ACQUIRING[how](builder)):
        wait_until(lambda: not remote_daemon.leases(), "no lease is left")


@pytest.fixture(scope="module")
def fleet_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield the address of a fleet with one node, and a function: whether that node has no leases and no claims."""
    folder = tmp_path_factory.mktemp("fleet")
    with fleet(folder / "etcd", nodes=1) as (cluster, (node,)), Directory(cluster, folder / "d") as directory:
        directory.wait_for("view of its fleet is current")
        yield f"fleet:{directory.address}", lambda: not node.now.leases() and not claims(cluster)


@pytest.mark.exhaustive
def test_an_interrupt_at_any_wait_of_an_acquire_in_a_fleet_leaves_no_lease(
    fleet_of_one: tuple[str, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, is_idle = fleet_of_one
    builder = GpuBuilder(address).min_vram(1 << 20).lease_secs(600)
    acquired_for_a_block(builder)
    numbers = count()

    def named() -> None:
        # Use a new name, because the node may still be releasing the earlier one.
        acquired(builder.name(f"n{next(numbers)}"))

    for making in (partial(acquired_for_a_block, builder), partial(reacquired, builder), named):
        check_often(Interrupt(monkeypatch).walk(making), is_idle)


@pytest.mark.exhaustive
def test_a_cancelled_await_at_any_wait_of_an_acquire_in_a_fleet_leaves_no_lease(
    fleet_of_one: tuple[str, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, is_idle = fleet_of_one
    cancel = Cancel(monkeypatch, is_behind=True)

    async def acquired_and_freed() -> None:
        await (await aio.GpuBuilder(address).min_vram(1 << 20).lease_secs(600).acquire()).free()

    async def main() -> None:
        async for _ in cancel.walk(acquired_and_freed, times=2):
            pass
        await asyncio.to_thread(wait_until, is_idle, "no lease is left")

    asyncio.run(main())


def test_an_interrupt_at_any_wait_of_an_attach_leaves_the_lease_to_the_next(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.builder().acquire() as lease:
        interrupt = Interrupt(monkeypatch)
        for _ in interrupt.walk(lambda: GpuSession(lease).close()):
            with GpuSession(lease) as session:
                session.sync()


def test_an_interrupt_at_any_wait_of_a_submit_leaves_the_lease_to_the_next(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.ones(32, np.float32)

    def submitted(lease: GpuLease) -> Any:
        submit = lease.submit("scale", TRANSFORM).grid([1]).block([32])
        (scaled,) = submit.inout(numbers).arg(np.uint32(32)).arg(np.float32(2)).launch()
        return scaled

    with daemon.builder(SLICE_BYTES).acquire() as lease:
        interrupt = Interrupt(monkeypatch)
        for _ in interrupt.walk(lambda: submitted(lease)):
            wait_until(lambda: "submit" not in lease.query(), "the submit is gone")
            assert np.frombuffer(submitted(lease), np.float32).tolist() == [2.0] * 32


def cancelled_awaits() -> Iterator[Any]:
    """Yield (name, is_behind, times) of cancelled awaits.

    By default only one variant of each operation runs, and both variants of clean-ups.
    """
    for name, is_behind, times in product([*ASYNC, "region", "region's block", "acquire"], (False, True), (1, 2)):
        if times > 1 and name not in CLEANED_UP:
            continue
        is_default = is_behind == (times == 2) and (times == 1 or name in ("region", "acquire"))
        yield pytest.param(name, is_behind, times, marks=[] if is_default else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "is_behind", "times"), [*cancelled_awaits()])
def test_a_cancelled_await_at_any_wait_leaves_nothing(
    name: str, is_behind: bool, times: int, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = Cancel(monkeypatch, is_behind=is_behind)

    async def made(scene: Scene) -> None:
        if name == "acquire":
            await (await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire()).free()
        elif name == "region":
            await (await scene.lease.region(REGION_BYTES)).close()
        elif name == "region's block":
            async with scene.lease.region(REGION_BYTES):
                pass
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

            async def all_is_given_back() -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while await left() != before:  # noqa: ASYNC110  # the daemon tells by answers alone
                        await asyncio.sleep(0.01)

            before, cancelled = await left(), 0
            async for _ in cancel.walk(lambda: made(scene), times):
                cancelled += 1
                if cancelled % CHECKED_TOGETHER == 0:
                    await all_is_given_back()
            await all_is_given_back()

    asyncio.run(main())


@discards_interrupts
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "waiting", "shared_memory"),
    [
        *product([name for name in SYNC if name not in PARTS], [GpuWaiting.BLOCK], [True]),
        # Over a socket, these operations reach every point that all operations reach.
        *product(["mem_alloc again", "stream closed", "array", "copy", "region"], [GpuWaiting.BLOCK], [False]),
        # Spinning has separate points only in its waits.
        ("mem_alloc again", GpuWaiting.SPIN, False),
    ],
)
def test_an_interrupt_at_any_point_leaves_nothing(
    name: str, waiting: GpuWaiting, shared_memory: bool, daemon: Daemon
) -> None:
    with blocking(daemon, waiting, shared_memory=shared_memory) as scene:
        before = what_is_left(scene.lease, scene.session)
        points = InterruptPoints().walk(lambda: SYNC[name](scene), ended)
        check_often(points, lambda: what_is_left(scene.lease, scene.session) == before)


@pytest.fixture
def quick_clean_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a reply that never comes, because an interrupt prevented its request from being sent."""
    monkeypatch.setattr("gpulease.client.core.lease.CLEAN_UP_S", 0.2)


@discards_interrupts
@pytest.mark.usefixtures("quick_clean_ups")
@pytest.mark.parametrize("shared_memory", [True, False], ids=["ring", "socket"])
@pytest.mark.parametrize(
    ("name", "every"), [("region", 20), *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in TWICE)]
)
def test_a_second_interrupt_at_any_point_leaves_nothing(
    name: str, every: int, shared_memory: bool, daemon: Daemon
) -> None:
    with blocking(daemon, GpuWaiting.BLOCK, shared_memory=shared_memory) as scene:
        before = what_is_left(scene.lease, scene.session)
        points = InterruptPoints().walk_twice(lambda: SYNC[name](scene), ended, every)
        check_often(points, lambda: what_is_left(scene.lease, scene.session) == before)


@discards_interrupts
@pytest.mark.parametrize(
    ("how", "every"),
    [
        ("its block", 20),
        pytest.param("its block", 1, marks=pytest.mark.exhaustive),
        # The block's acquire is tested above; a free by a call differs from the end of a block.
        pytest.param("acquire", 5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_second_interrupt_at_any_point_of_an_acquire_leaves_no_lease(how: str, every: int, daemon: Daemon) -> None:
    points = InterruptPoints().walk_twice(lambda: ACQUIRING[how](daemon.builder()), lambda _: None, every)
    check_often(points, lambda: not daemon.leases())


@discards_interrupts
@pytest.mark.exhaustive
def test_an_interrupt_at_any_point_of_an_acquire_leaves_no_lease(daemon: Daemon) -> None:
    def given_back(lease: GpuLease | None) -> None:
        if lease is not None:
            lease.free()

    check_often(InterruptPoints().walk(lambda: daemon.builder().acquire(), given_back), lambda: not daemon.leases())


@discards_interrupts
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
    """What a cancelled caller has requested is awaited and freed before the block ends."""
    cancel = Cancel(monkeypatch)

    async def interrupted(at: int) -> bool:
        async with aio.GpuBuilder(daemon.address).min_vram(SLICE_BYTES).acquire() as lease:
            region = await lease.region(REGION_BYTES)
            making: Any = lease.region(REGION_BYTES) if name == "region" else region.close()
            return await cancel.reaches(making, at)

    async def main() -> None:
        at = 0
        while await interrupted(at):
            assert asyncio.all_tasks() == {asyncio.current_task()}
            at += 1
        assert at, "it waited for nothing, so nothing was cancelled"

    asyncio.run(main())


# --- commands that move sessions ---

MOVING = """
[limits]
park_memory = "512MiB"
park_stay_ms = 0
parks_per_minute = 1000000
"""


@pytest.fixture(scope="module")
def two_cards() -> Iterator[Daemon]:
    with running(Daemon(vram=("256MiB", "256MiB"), config=MOVING)) as daemon:
        yield daemon


@pytest.mark.parametrize(
    "words",
    [
        ("move", "{lease}", "--device", "1"),
        ("move", "--from", "0", "--json"),
        ("park", "{lease}"),
        ("park", "{lease}", "--cold", "--json"),
        ("drain", "--device", "0", "--move", "--within", "1h"),
        ("drain", "--within", "1h"),
    ],
    ids=" ".join,
)
def test_an_interrupted_command_reports_what_goes_on_without_it(
    words: tuple[str, ...], two_cards: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, results = two_cards, list[tuple[int, str]]()
    # A signal would end this process.
    monkeypatch.setattr(exit_status, "die_by_signal", lambda number: sys.exit(128 + number))
    builder = node.builder(SLICE_BYTES).device("0").lease_secs(600).parkable()

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, words, env={ADDRESS_VARIABLE: node.address, "COLUMNS": "250"})
        return result.exit_code, result.output

    def grant_again() -> None:
        for device in ((), ("--device", "0")):
            assert run("drain", *device, "--cancel")[0] == 0

    with builder.acquire() as lease, GpuSession(lease) as session:
        first, buffer, parks = row(node.address, lease)["card_uuid"], session.mem_alloc(4), 0
        session.mem_write(buffer, 0, b"kept")
        interrupt = Interrupt(monkeypatch)

        def operation() -> None:
            results.append(run(*(word.format(lease=lease.lease_id_text) for word in words)))

        def is_back() -> bool:
            assert session.mem_read(buffer, 0, 4) == b"kept"
            return bool(row(node.address, lease)["park"]["phase"] == "resident")

        for _ in interrupt.walk(operation):
            status, output = results[-1]
            assert status == 130, output
            # A request of the session waits for the end of a move. A park may begin only after the request.
            wait_until(is_back, "no move or park is in progress")
            if words[0] == "park":
                parks, before = row(node.address, lease)["park"]["parks"], parks
                assert parks == before or "may have begun" in output, output
            cards = node.inventory().details
            if any(card.get("drain_left_ms") or card.get("card_drain_left_ms") for card in cards):
                assert "stays drained" in output or "may have received the request" in output, output
                grant_again()
            if row(node.address, lease)["card_uuid"] != first:
                assert any(words in output for words in ("may have begun", "moved_bytes", "moved to")), output
                lease.move("0")
        grant_again()
        assert any("gpulease: interrupted." in output or '"interrupted"' in output for _, output in results), results


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "note"), [(("revoke",), "may have begun"), (("free",), "freed"), (("renew", "--for", "5m"), "extended")]
)
def test_an_interrupted_command_reports_what_it_may_have_done(
    words: tuple[str, ...], note: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_status, "die_by_signal", lambda number: sys.exit(128 + number))
    lease, ends = daemon.builder(SLICE_BYTES).acquire(), list[tuple[str, str]]()

    def operation() -> None:
        arguments = (words[0], lease.lease_id_text, *words[1:])
        result = CliRunner().invoke(main, arguments, env={ADDRESS_VARIABLE: daemon.address})
        ends.append((lease.lease_id_text, result.output))

    for _ in Interrupt(monkeypatch).walk(operation):
        lease_id, output = ends[-1]
        report = daemon.query(int(lease_id, 16))
        if report["state"] != "active" or report["generation"] > 1:
            assert note in output, output
            with suppress(LeaseFreed, Revoked):
                lease.free()
            daemon.wait_for_end(int(lease_id, 16))
            lease = daemon.builder(SLICE_BYTES).acquire()
    assert any("gpulease: interrupted." in output and note in output for _, output in ends), ends
    # The last command was not interrupted.
    with suppress(LeaseFreed, Revoked):
        lease.free()
    daemon.wait_for_end(lease.lease_id)


# --- frees that nobody sends ---


@pytest.mark.parametrize("how", ["dropped", "freed", "of an interrupted call"])
def test_an_idle_session_frees_what_nobody_has(how: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a ring, a reply may be there before anybody waits for it. Over a socket, every request waits.
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
            async with asyncio.timeout(PATIENCE_S):
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
