"""One control request over a connection of its own, without what sessions need.

Importing that would be most of a command's time.
"""

from typing import Any

from gpulease.client.engine.exchange import CONTROL_REPLY_LIMIT_S, ask_once
from gpulease.client.engine.request import address_of
from gpulease.client.sync.driver import drive
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body


def ask(op: Opcode, body: Body, address: str | None = None, reply_limit_s: float = CONTROL_REPLY_LIMIT_S) -> Any:
    """The body of the reply, for programs that look after a node. Raises what the library raises."""
    return drive(ask_once(address_of(address), op, body, reply_limit_s))
