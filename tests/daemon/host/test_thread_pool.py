"""The pool has all its threads from the start. If the host allows no more, an error says so at once."""

import asyncio
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from gpulease.daemon.host.processes import NoThread, start_thread
from gpulease.daemon.host.thread_pool import LoopThreadPool
from helpers.daemon import python_environment
from helpers.waiting import wait_until

NO_ROOM_BYTES = 1 << 46
"""For a thread's stack, whose size is that of the process's limit (pthread_create(3)): half of all addresses."""

FEW_THREADS = """
import resource
from gpulease.daemon.host.thread_pool import STACK_BYTES, LoopThreadPool
(size,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize:")]
resource.setrlimit(resource.RLIMIT_AS, (size + 8 * STACK_BYTES, resource.RLIM_INFINITY))
LoopThreadPool()
"""


def without_room_for_stacks() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (NO_ROOM_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def run_without_threads(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", *command],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=without_room_for_stacks,  # nothing here has threads
    )


Body = Callable[[LoopThreadPool], Awaitable[None]]


def run_with_pool(
    size: int, body: Body, new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
) -> None:
    async def run() -> None:
        pool = LoopThreadPool(size)
        asyncio.get_running_loop().set_default_executor(pool)
        await body(pool)

    # The end of the runner shuts the pool down.
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_a_pool_starts_no_thread_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pool: LoopThreadPool) -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        names = set(await asyncio.gather(*(asyncio.to_thread(own_name) for _ in range(100))))
        monkeypatch.undo()
        assert 1 <= len(names) <= 3

    run_with_pool(3, body)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThread):
        start_thread(threading.Thread())


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_results_and_errors_reach_their_callers(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    def call(number: int) -> int:
        if number % 3 == 0:
            raise LookupError(number)
        return number

    async def body(pool: LoopThreadPool) -> None:
        answers = await asyncio.gather(
            *(asyncio.to_thread(call, number) for number in range(1000)), return_exceptions=True
        )
        assert [repr(answer) for answer in answers] == [
            repr(number if number % 3 else LookupError(number)) for number in range(1000)
        ]

    run_with_pool(4, body, new_loop)


def test_calls_that_block_leave_the_other_threads_free() -> None:
    async def body(pool: LoopThreadPool) -> None:
        gate = threading.Event()
        blocked = [asyncio.ensure_future(asyncio.to_thread(gate.wait)) for _ in range(2)]
        try:
            assert await asyncio.to_thread(own_name)
        finally:
            gate.set()
        assert await asyncio.gather(*blocked) == [True, True]

    run_with_pool(3, body)


def test_a_call_waits_while_all_threads_are_busy_unless_its_caller_is_cancelled() -> None:
    async def body(pool: LoopThreadPool) -> None:
        gate, begun, made = threading.Event(), list[str](), list[str]()

        def block() -> None:
            begun.append(own_name())
            gate.wait()

        blocked = [asyncio.ensure_future(asyncio.to_thread(block)) for _ in range(2)]
        cancelled, waiting = (asyncio.ensure_future(asyncio.to_thread(made.append, name)) for name in ("no", "yes"))
        try:
            await asyncio.sleep(0)
            wait_until(lambda: len(begun) == 2, "both threads are busy")
            blocked[0].cancel()
            cancelled.cancel()
            await asyncio.sleep(0)
            assert made == []
        finally:
            gate.set()
        await asyncio.gather(blocked[1], waiting)
        assert made == ["yes"]

    run_with_pool(2, body)


def test_an_idle_thread_is_used_again_before_others() -> None:
    async def body(pool: LoopThreadPool) -> None:
        names = []
        for _ in range(20):
            names.append(await asyncio.to_thread(own_name))
            # The thread is idle once it waits, shortly after its result.
            wait_until(lambda: len(pool._idle) == 3, "all threads are idle")
        assert len(set(names)) == 1

    run_with_pool(3, body)


def test_a_shut_down_pool_has_made_its_calls_and_takes_no_more() -> None:
    made: list[int] = []

    async def body(pool: LoopThreadPool) -> None:
        gate = threading.Event()
        futures = [pool.submit(gate.wait), *(pool.submit(made.append, number) for number in range(5))]
        pool.shutdown(wait=False)
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(own_name)
        gate.set()
        await asyncio.gather(*futures)

    run_with_pool(1, body)
    assert made == [0, 1, 2, 3, 4]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpulease-look")]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_pool_that_can_not_be_whole(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Those that were started end."""
    start: Callable[[threading.Thread], None] = threading.Thread.start
    left = [after]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(NoThread, match="start more threads") as told:
        LoopThreadPool(3)
    assert (told.value.status, "TasksMax=" in told.value.hint) == (os.EX_UNAVAILABLE, True)


def test_a_host_that_has_too_few_for_a_pool() -> None:
    """Some of them, by room for so many stacks and no more."""
    command = [sys.executable, "-P", "-c", FEW_THREADS]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "NoThread: this host does not allow the daemon to start more threads" in done.stderr


def test_a_daemon_without_threads_says_so(tmp_path: Path) -> None:
    done = run_without_threads("-m", "gpulease.daemon", "--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu")
    assert done.returncode == os.EX_UNAVAILABLE
    assert done.stderr.startswith(
        "gpuleased: this host does not allow the daemon to start more threads. Raise its limits:"
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "d.sock").exists()


def own_name() -> str:
    return threading.current_thread().name


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
