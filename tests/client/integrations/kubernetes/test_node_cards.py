"""The cards that the driver publishes, on a real daemon whose health the test changes."""

from typing import Any

import pytest

from gpulease.client.integrations.kubernetes import node_cards
from gpulease.client.integrations.kubernetes.node_cards import NodeCards
from gpulease.client.integrations.kubernetes.resource_pool import Trouble
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Report
from helpers.daemon import Daemon


@pytest.mark.parametrize(
    ("check", "troubles"), [("zygote", (Trouble.SICK,)), ("journal", (Trouble.SICK,)), ("capacity", ()), ("", ())]
)
def test_the_cards_of_a_daemon_that_can_grant_no_lease_are_sick(
    check: str, troubles: tuple[Trouble, ...], shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(opcode: Opcode, body: Any, address: str) -> Any:
        reply = ask(opcode, body, address)
        if opcode is not Opcode.HEALTH or not check:
            return reply
        checks = [one | {"ok": one["ok"] and one["check"] != check} for one in reply.report["checks"]]
        return Report(reply.report | {"checks": checks, "ready": False})

    monkeypatch.setattr(node_cards, "ask", answer)
    cards = NodeCards(shared_daemon.address, set)
    assert [card.troubles for card in cards.read()] == [troubles]
    assert [one.is_healthy for one in cards.health("node-a")] == [not troubles]
