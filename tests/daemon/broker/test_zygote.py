"""The zygote as the broker sees it, when it can't be started."""

import asyncio
import sys

import pytest

from gpulease.daemon.broker.zygote import Zygote, ZygoteBroken
from gpulease.daemon.sandbox.settings import SandboxSettings


def never(*_: object) -> None:
    raise AssertionError("nothing is to be told of a zygote that never was")


def test_an_interpreter_that_is_gone_is_a_broken_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but ZygoteBroken may come out: the broker tries again after it, and after nothing else."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ZygoteBroken, match="no process can be started: No such file or directory"):
        asyncio.run(Zygote("cpu", never, never, SandboxSettings()).start())


def test_a_driver_that_can_not_be_loaded_is_a_broken_zygote() -> None:
    with pytest.raises(ZygoteBroken, match="there is no driver 'tpu'"):
        asyncio.run(Zygote("tpu", never, never, SandboxSettings()).start())
