"""What NVML does not tell of a card's load is unknown, each figure for itself."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpulease.daemon.cards.nvidia import NvidiaCards
from gpulease.daemon.cards.source import CardLoad

UUID = "GPU-a"


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> NvidiaCards:
    """One card, whose NVML answers both questions."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=40, memory=3))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=7))
    found = NvidiaCards()
    found._handles[UUID] = object()
    return found


def unsupported(handle: Any) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_card_that_tells_both(cards: NvidiaCards) -> None:
    assert cards.load(UUID) == CardLoad(40, 7)


def test_each_figure_may_be_missing(cards: NvidiaCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", unsupported)
    assert cards.load(UUID) == CardLoad(None, 7)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", unsupported)
    assert cards.load(UUID) == CardLoad(None, None)
