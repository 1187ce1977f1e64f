"""The zygote as the broker sees it: when it can't be started, and when it does not read."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import channel_pair, close_all
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.workers.zygote_client import ZygoteBroken, ZygoteClient
from helpers.processes import stop_process
from helpers.waiting import wait_until

SANDBOX = SandboxSettings()
MANY = 600


def never(*_: object) -> None:
    raise AssertionError("nothing is to be told of a zygote that never was")


def test_an_interpreter_that_is_gone_is_a_broken_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but ZygoteBroken may come out: the broker tries again after it, and after nothing else."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ZygoteBroken, match="no process can be started: No such file or directory"):
        asyncio.run(ZygoteClient("cpu", never, never, SandboxSettings()).start())


def test_a_driver_that_can_not_be_loaded_is_a_broken_zygote() -> None:
    with pytest.raises(ZygoteBroken, match="there is no driver 'tpu'"):
        asyncio.run(ZygoteClient("tpu", never, never, SandboxSettings()).start())


def change_many(zygote: ZygoteClient, told: Callable[[int], None]) -> None:
    """Tell it something that means nothing to it, often; `told` is called with the number of each that it was told."""
    for number in range(MANY):
        zygote.change(0, WorkerSpec(1, "GPU-0", 1 << 20, is_shared=False), partial(told, number))


def test_what_has_no_room_in_the_channel_waits() -> None:
    """The zygote is stopped, and the kernel keeps some 180 messages for it: a worker asked for behind them is made."""
    told: list[int] = []
    spawned: list[str] = []

    def hear(_: ZygoteClient, message: Message, fds: list[int]) -> None:
        spawned.append(message.OP)
        close_all(fds)

    async def ask() -> None:
        zygote = ZygoteClient("cpu", hear, never, SANDBOX)
        await zygote.start()
        pid = zygote._pid
        page, (ours, theirs) = BrokerPage(), channel_pair()
        try:
            stop_process(pid)
            spec = WorkerSpec(1, "GPU-0", 1 << 20, is_shared=False)
            change_many(zygote, told.append)
            assert len(told) < MANY
            zygote.spawn(spec, theirs.fileno(), page.fds, ours.fileno())
            theirs.close()
            os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(wait_until, lambda: spawned, "the worker is made", 60)
        finally:
            os.kill(pid, signal.SIGCONT)
            zygote.stop()
            theirs.close()
            ours.close()
            page.close()

    asyncio.run(ask())
    assert told == list(range(MANY))
    assert spawned[0] == "spawned"


def test_more_than_can_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.workers.zygote_client.MAX_WAITING", 3)

    async def ask() -> None:
        zygote = ZygoteClient("cpu", never, never, SANDBOX)
        await zygote.start()
        pid = zygote._pid
        stop_process(pid)
        try:
            with pytest.raises(BlockingIOError, match="3 messages wait for the zygote"):
                change_many(zygote, lambda _: None)
        finally:
            os.kill(pid, signal.SIGCONT)
            zygote.stop()

    asyncio.run(ask())
