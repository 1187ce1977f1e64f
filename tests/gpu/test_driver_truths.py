"""A working driver is reported as working, and a setting that hides its cards is reported."""

import pytest

from gpulease.daemon.gpus import cuinit
from gpulease.daemon.gpus.cuinit import CuInitResult
from gpulease.daemon.gpus.diagnosis import Library, describe_host, diagnose
from gpulease.daemon.gpus.nvidia import NvidiaCards
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu

NO_DEVICE = 100


def test_a_whole_host(cards: Cards) -> None:
    host = describe_host()
    assert host.module_version[:1].isdigit()
    assert (host.missing, host.closed) == ((), ())
    assert host.has_cards is not False
    assert cuinit.ask() == CuInitResult(0)
    source = NvidiaCards()
    assert source.why_no_context() is None
    source.close()


def test_cards_that_are_hidden(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    answer = cuinit.ask()
    assert answer == CuInitResult(NO_DEVICE)
    assert "CUDA sees no card" in diagnose(Library.CUDA, NO_DEVICE, describe_host()).message
