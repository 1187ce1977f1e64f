"""Processes that the broker keeps beside it: noticed when they die, lie or hang, and started anew."""

import asyncio
import logging
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gpulease.daemon.broker.service import loop_factory
from gpulease.daemon.contract.messages import Ready
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.workers.helper_process import ChildKind, ChildProcess, Timeouts, ordinary_timeouts
from helpers.daemon import python_environment
from helpers.processes import is_running, process_info, stop_process
from helpers.side_script import Die, Progress, Talk
from helpers.waiting import PATIENCE_S

PATIENCE = replace(ordinary_timeouts(), restart_s=0.02, max_restart_s=0.1, beat_s=0.2, hung_after_s=PATIENCE_S)
HUNG_SOON = replace(PATIENCE, hung_after_s=6)


@pytest.fixture(autouse=True)
def _all_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


class Rig:
    """One that goes some way, and what was heard of it.

    Attributes:
        ways: The way that each process goes, the last for all that follow.
    """

    def __init__(self, *ways: str, patience: Timeouts = PATIENCE) -> None:
        self.ways = list(ways)
        self.heard: list[str] = []
        self.unhandled: list[int] = []
        self.ends = 0
        self.process = ChildProcess(
            self._kind(), self._begin, self._take, self._on_end, patience, self.unhandled.append
        )

    def _kind(self) -> ChildKind:
        return ChildKind(
            name="the script",
            module="helpers.side_script",
            sends={Progress.OP: Progress},
            broken="nothing can be written",
            died=LogEvent.WEB_DIED,
            hung=LogEvent.WEB_HUNG,
            not_started=LogEvent.WEB_NOT_STARTED,
            back=LogEvent.WEB_BACK,
            arguments=self.ways,
            environment=python_environment(),
        )

    async def _begin(self) -> None:
        await self.process.expect(Ready)

    def _take(self, message: Progress, fds: list[int]) -> None:
        if message.text == "a fault of the handler":
            raise ZeroDivisionError
        self.heard.append(message.text)

    def _on_end(self) -> None:
        self.ends += 1
        if len(self.ways) > 1:
            del self.ways[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ChildProcess]:
        """Started, and stopped behind it."""
        try:
            await self.process.start()
            yield self.process
        finally:
            await self.process.stop()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On the broker's own loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())  # type: ignore[arg-type]


async def until(condition: Callable[[], object], what: str) -> None:
    """As helpers.waiting.wait_until; the loop goes on meanwhile."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.005)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    """What was logged, each with its reason."""
    records = [getattr(record, ATTRIBUTE) for record in caplog.records]
    return [(name, fields.get("reason")) for name, fields in records]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("dies", "the script died while it was starting; the log says why"),
        ("breaks", "nothing can be written: there is no paper"),
        ("is not ready", "the script was not ready after 0.5 s"),
    ],
)
def test_one_that_does_not_come_to_be(way: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(way, patience=replace(PATIENCE, start_s=0.5 if way == "is not ready" else PATIENCE.start_s))

    async def main() -> None:
        with pytest.raises(CannotListen, match=said):
            await rig.process.start()
        assert (rig.process.pid, rig.process.is_running, rig.ends) == (0, False, 1)
        await rig.process.stop()

    run(main)
    assert not caplog.records, "whoever starts it says so"


def test_one_that_is_ready_in_time_serves_although_the_broker_is_late() -> None:
    limit_s = 0.05
    rig = Rig("serves", patience=replace(PATIENCE, start_s=limit_s))

    def be_late() -> None:
        assert rig.process._channel is not None
        assert select.select([rig.process._channel], [], [], PATIENCE_S)[0], "it is ready"
        time.sleep(2 * limit_s)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(be_late)
        async with rig.running() as process:
            assert process.is_running

    run(main)


def test_an_interpreter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    rig = Rig("serves")

    async def main() -> None:
        with pytest.raises(CannotListen, match="the script can't be started: No such file or directory"):
            await rig.process.start()

    run(main)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "event", "reason"),
    [
        ("serves", "web.died", "exited with status 7"),
        ("closes its channel", "web.died", "the other process closed the channel"),
        ("makes no sense", "web.died", "a malformed message"),
        ("hangs", "web.hung", "it gave no sign of life for 6 s"),
    ],
)
def test_one_that_is_lost_is_replaced(way: str, event: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    is_odd = way in ("closes its channel", "makes no sense")
    patience = HUNG_SOON if way == "hangs" else PATIENCE
    rig = Rig(way, "serves", patience=replace(patience, exit_s=0.05) if is_odd else patience)

    async def main() -> None:
        async with rig.running() as process:
            pid = process.pid
            if way == "serves":
                process.send(Die(7))
            await until(lambda: told(caplog)[-1:] == [("web.back", None)], "there is another one")
            assert process.pid != pid
            assert not is_running(pid)
            process.send(Progress("hello"))
            await until(lambda: rig.heard == ["hello"], "it serves")

    run(main)
    assert told(caplog) == [(event, reason), ("web.back", None)]
    assert rig.ends == 2


def test_who_dies_again_and_again_is_started_later_each_time(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("serves", "dies", "dies", "dies", "serves")
    restarts: list[int] = []

    async def main() -> None:
        async with rig.running() as process:
            process.send(Die(7))
            await until(lambda: told(caplog)[-1:] == [("web.back", None)], "there is another one")
            restarts.append(process._restarts)

    run(main)
    assert [name for name, _ in told(caplog)] == ["web.died", *["web.not_started"] * 3, "web.back"]
    assert restarts == [4]


def test_what_is_for_one_does_not_come_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("serves")

    async def main() -> None:
        async with rig.running() as process:
            say = process.to_this_one()
            say(Progress("first"))
            await until(lambda: rig.heard, "it is heard")
            process.send(Die(0))
            await until(lambda: told(caplog)[-1:] == [("web.back", None)], "there is another one")
            say(Progress("late"))
            process.send(Progress("last"))
            await until(lambda: len(rig.heard) == 2, "it is heard")

    run(main)
    assert rig.heard == ["first", "last"]


def test_messages_that_can_t_be_read_or_handled_are_answered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("serves")

    async def main() -> None:
        async with rig.running() as process:
            process.send(Talk())
            process.send(Progress("a fault of the handler", 14))
            process.send(Progress("hello"))
            await until(lambda: rig.heard == ["hello"], "it serves")

    run(main)
    assert rig.unhandled == [11, 12, 13, 14]
    faults = [getattr(record, ATTRIBUTE)[1] for record in caplog.records]
    assert ["tomorrow's: the op must be one of" in fault["doing"] for fault in faults] == [True], "one line a second"


def stop_everything(pid: int) -> None:
    """It, and this process's loop, for longer than one may be silent."""
    stop_process(pid)
    time.sleep(1.2 * HUNG_SOON.hung_after_s)
    os.kill(pid, signal.SIGCONT)


def test_a_healthy_one_is_not_killed_for_the_brokers_own_stops(caplog: pytest.LogCaptureFixture) -> None:
    """As by a host that is suspended."""
    rig = Rig("serves", patience=HUNG_SOON)

    async def main() -> None:
        async with rig.running() as process:
            pid = process.pid
            stop_everything(pid)
            for times in range(1, 4):
                process.send(Progress("hello"))
                await until(lambda wanted=times: len(rig.heard) == wanted, "it answers")  # type: ignore[misc]
                await asyncio.sleep(PATIENCE.beat_s)
            assert process.pid == pid

    run(main)
    assert told(caplog) == []


def test_one_that_can_not_be_killed_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a system call of a disk that hangs: here it is killed in vain."""
    rig = Rig("hangs", patience=replace(PATIENCE, end_s=0.05))

    async def main() -> None:
        kill = os.kill
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: None)
            await rig.process.start()
            pid = rig.process.pid
            await rig.process.stop()
            assert is_running(pid)
        kill(pid, signal.SIGKILL)
        # It is reaped all the same: nothing is left of it behind this test.
        await until(lambda: process_info(pid) is None, "it is reaped")

    run(main)
