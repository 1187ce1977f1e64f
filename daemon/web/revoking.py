"""The web process's end of what an operator asks for: a revocation, a drain, a fence to be cleared; and the outcome.

Each is passed on to the broker with the token that came with it, by the channel that the broker started this process
with. The connection of its view changes nothing.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import count
from typing import Any, Final, NamedTuple

from gpulease.daemon.channel import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.web.link import BrokerSilent
from gpulease.protocol.opcodes import RevokeOutcome

MAX_REASON_CHARS: Final = 512
"""Of what a tenant is told: what the audit log keeps of it."""

OUTCOME_S: Final = 30.0
"""For the broker to tell what came of it: to end a worker and prove its memory free takes a second, and where that
fails, the broker gives up by itself before."""


class Refused(Enum):
    """Why the broker did not do it."""

    WRONG_TOKEN = "wrong_token"
    TOO_MANY = "too_many"
    DENIED = "denied"


class NotDone(Exception):
    """The message is for people."""

    def __init__(self, why: Refused, message: str) -> None:
        super().__init__(message)
        self.why = why


class Drained(NamedTuple):
    """What came of a drain.

    Attributes:
        left_ms: Until what is left is ended; None if the node is not drained.
        leases: How many are active.
    """

    left_ms: int | None
    leases: int


class BrokerChannel:
    """The channel, once this process serves.

    Args:
        on_token: Told the SHA-256 of the operator's token when it is another.
        on_loads: Told samples of a card: see `loads`.
    """

    def __init__(self, on_token: Callable[[bytes], None], on_loads: Callable[[Mapping[str, Any]], None]) -> None:
        self._on_token = on_token
        self._on_loads = on_loads
        self._channel: socket.socket | None = None
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def open(self, channel: socket.socket) -> None:
        """Hear what comes by it, from now on."""
        channel.setblocking(False)
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel, self._read)

    async def revoke(self, lease_id: str, reason: str, token: bytes) -> RevokeOutcome:
        """End a lease. Raises NotDone, or BrokerSilent if nobody knows what came of it."""
        answer = await self._ask({"op": "revoke", "lease_id": lease_id, "reason": reason, "token": token})
        return RevokeOutcome(answer["outcome"])

    async def drain(self, within_ms: int | None, token: bytes) -> Drained:
        """Drain the node, or end the drain if `within_ms` is None. Raises as `revoke` does."""
        answer = await self._ask({"op": "drain", "within_ms": within_ms, "token": token})
        return Drained(answer["left_ms"], answer["leases"])

    async def clear_fences(self, card: str, token: bytes) -> int:
        """Grant a card's fenced memory again; returns how many slices it was. Raises as `revoke` does."""
        answer = await self._ask({"op": "clear_fences", "card": card, "token": token})
        return int(answer["count"])

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._channel is None:
            raise BrokerSilent("the daemon has not answered yet")
        number = next(self._numbers)
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = told
        try:
            send_message(self._channel, message | {"number": number})
            answer = await asyncio.wait_for(told, OUTCOME_S)
        except (BlockingIOError, ChannelClosed):
            raise BrokerSilent("the daemon can't be told") from None
        except TimeoutError:
            raise BrokerSilent(f"the daemon has not told for {OUTCOME_S:g} s what came of it") from None
        finally:
            self._waiting.pop(number, None)
        if answer["op"] == "refused":
            raise NotDone(Refused(answer["why"]), answer["message"])
        return answer

    def _read(self) -> None:
        assert self._channel is not None
        try:
            message, fds = receive_message(self._channel)
        except BlockingIOError:
            return
        except ChannelClosed:
            # The connection to the broker ends with it, and so does this process.
            asyncio.get_running_loop().remove_reader(self._channel)
            return
        close_all(fds)
        match message:
            case {"op": "ping"}:
                # A broker that has not read for so long asks again.
                with contextlib.suppress(BlockingIOError, ChannelClosed):
                    send_message(self._channel, {"op": "pong"})
            case {"op": "token", "digest": bytes(digest)}:
                self._on_token(digest)
            case {"op": "loads"}:
                self._on_loads(message)
            case {"op": "revoked" | "drain_set" | "fences_cleared" | "refused", "number": int(number)}:
                if (told := self._waiting.get(number)) is not None and not told.done():
                    told.set_result(message)
