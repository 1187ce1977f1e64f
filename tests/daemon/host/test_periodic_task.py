"""A periodic task calls its function again and again, one call at a time, until it is stopped."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fuzz.virtual import VirtualLoop
from gpulease.daemon.host.periodic_task import PeriodicTask


class Calls:
    """Notes when it was called."""

    def __init__(self, *, fails: bool = False, takes_s: float = 0.0) -> None:
        self.at_s: list[float] = []
        self.faults: list[Exception] = []
        self._fails = fails
        self._takes_s = takes_s

    async def call(self) -> None:
        self.at_s.append(round(asyncio.get_running_loop().time() - self.began_s, 3))
        await asyncio.sleep(self._takes_s)
        if self._fails:
            raise ValueError("a fault")

    async def run(self, task: PeriodicTask, for_s: float, *, at_once: bool = False) -> None:
        self.began_s = asyncio.get_running_loop().time()
        task.start(at_once=at_once)
        task.start(at_once=at_once)
        await asyncio.sleep(for_s)
        await task.stop()
        await asyncio.sleep(for_s)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_pauses_follow_the_end_of_a_call_and_none_comes_after_the_stop() -> None:
    calls = Calls(takes_s=0.5)
    run(calls.run(PeriodicTask(calls.call, 1.0), 4.2))
    assert calls.at_s == [1.0, 2.5, 4.0]


def test_a_task_that_starts_at_once_pauses_for_as_long_as_its_function_says() -> None:
    calls = Calls()
    pauses = iter([1.0, 2.0, 4.0])
    run(calls.run(PeriodicTask(calls.call, lambda: next(pauses)), 4.0, at_once=True))
    assert calls.at_s == [0.0, 1.0, 3.0]


def test_a_fault_is_handed_on_and_the_next_call_follows() -> None:
    calls = Calls(fails=True)
    run(calls.run(PeriodicTask(calls.call, 1.0, calls.faults.append), 2.5))
    assert calls.at_s == [1.0, 2.0]
    assert [str(error) for error in calls.faults] == ["a fault", "a fault"]


def test_without_a_receiver_a_fault_ends_the_task() -> None:
    calls = Calls(fails=True)
    run(calls.run(PeriodicTask(calls.call, 1.0), 2.5))
    assert calls.at_s == [1.0]


def test_a_task_that_never_started_stops() -> None:
    asyncio.run(PeriodicTask(Calls().call, 1.0).stop())
