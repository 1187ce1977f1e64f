"""Control requests of a command, without what sessions need: importing that would be most of a command's time."""

from typing import Any

from gpulease.client.core.exchange import CONTROL_REPLY_LIMIT_S, ask_once
from gpulease.client.core.wish import address_of
from gpulease.client.waiting import drive
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body


def ask(op: Opcode, body: Body, address: str | None = None) -> Any:
    """The body of the reply to one request, over a connection of its own. Raises what the library raises."""
    return drive(ask_once(address_of(address), op, body, CONTROL_REPLY_LIMIT_S))
