"""How long a loop polls instead of sleeping."""

import asyncio

import pytest

from gpulease.daemon.host import loop_polling
from gpulease.daemon.host.loop_polling import LoopPolling
from gpulease.daemon.host.processes import MIN_POLL_CORES
from gpulease.protocol.opcodes import Waiting


class Clock:
    """A clock that moves by one nanosecond each time it is read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


def turns(
    monkeypatch: pytest.MonkeyPatch, cores: int, calls: int = 1, periods: int = 1, waiting: Waiting | None = None
) -> int:
    """After so many calls of `stay_awake`, return how many turns the loop takes without sleeping."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores))
    polling = LoopPolling()
    taken = 0

    async def main() -> None:
        nonlocal taken
        loop = asyncio.get_running_loop()
        for _ in range(calls):
            polling.stay_awake(waiting, periods)
        call_soon = loop.call_soon

        def count(callback: object, *args: object, **more: object) -> asyncio.Handle:
            nonlocal taken
            taken += getattr(callback, "__self__", None) is polling
            return call_soon(callback, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon", count)
        for _ in range(4 * loop_polling.MAX_TURNS):
            await asyncio.sleep(0)

    asyncio.run(main())
    return taken


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.host.loop_polling.time.monotonic_ns", Clock())
    monkeypatch.setattr(loop_polling, "MAX_TURNS", 50)
    monkeypatch.setattr(loop_polling, "POLL_NS", 10)


def test_the_loop_polls_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 5 < turns(monkeypatch, MIN_POLL_CORES) <= 10
    assert 15 < turns(monkeypatch, MIN_POLL_CORES, periods=2) <= 20


def test_two_calls_poll_by_one_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 5 < turns(monkeypatch, MIN_POLL_CORES, calls=2) <= 11


def test_a_clock_that_stands_still_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.host.loop_polling.time.monotonic_ns", lambda: 1)
    assert turns(monkeypatch, MIN_POLL_CORES) == 49


def test_it_never_polls_with_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, MIN_POLL_CORES - 1) == 0


def test_it_never_polls_for_a_tenant_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, MIN_POLL_CORES, waiting=Waiting.BLOCK) == 0
    assert turns(monkeypatch, MIN_POLL_CORES, waiting=Waiting.SPIN) > 0
