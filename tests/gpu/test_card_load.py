"""The load of a real card, as the web page shows it for the last hour."""

import pytest

from gpulease.daemon.gpus.nvidia import NvidiaCards
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu


def test_a_card_tells_its_utilisation_and_memory(cards: Cards) -> None:
    source = NvidiaCards()
    try:
        for card, total_bytes in zip(source.discover({}), cards.total_bytes(), strict=True):
            load = source.load(card.uuid)
            assert load.utilization_percent is not None
            assert load.used_bytes is not None
            assert 0 <= load.utilization_percent <= 100
            assert 0 < load.used_bytes < total_bytes
    finally:
        source.close()
