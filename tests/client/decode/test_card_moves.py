"""A decode engine's session moves to another card of its host: its tenants see one long step and no replay."""

import asyncio

import pytest

from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon, running
from helpers.decode.card_moves import outputs_around_moves
from helpers.decode.decoder_rig import TOKENS, Outputs

pytestmark = pytest.mark.usefixtures("_decode_kernels")

CONFIG = """
[limits]
park_memory = "2GiB"
park_stay_ms = 0
parks_per_minute = 1000000
"""


def test_an_engine_moves_between_cards_without_a_replay(alone: Outputs) -> None:
    with running(Daemon(vram=("512MiB", "512MiB"), config=CONFIG)) as node:
        cards = [card["uuid"] for card in ask(Opcode.GET_INVENTORY, Empty(), node.address).details]
        moves = asyncio.run(outputs_around_moves(node, cards, TOKENS))
    assert moves.outputs == alone
    assert not moves.rebinds
