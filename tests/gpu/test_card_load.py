"""How busy a real card is, as the web page's last hour shows it."""

import pytest

from gpulease.daemon.cards.nvidia import NvidiaCards

pytestmark = pytest.mark.gpu


def test_a_card_tells_its_utilisation_and_memory() -> None:
    cards = NvidiaCards()
    try:
        for card in cards.discover({}):
            load = cards.load(card.uuid)
            assert load.utilization_percent is not None
            assert 0 <= load.utilization_percent <= 100
            assert load.used_bytes is not None
            assert 0 < load.used_bytes
    finally:
        cards.close()
