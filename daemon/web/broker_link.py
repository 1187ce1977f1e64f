"""The web process's end of its connection to the broker: questions out, answers and events in.

The web process's end of what an operator asks for: a revocation, a drain, a fence to be cleared; and the outcome.

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

from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.version import AGENT
from gpulease.protocol.connection import Connection, EndOfStream, Goodbye, Reply, Role, StreamBroken, Told
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, Hello, HelloReply, LeaseEvent
from gpulease.protocol.opcodes import Opcode, RevokeOutcome

ANSWER_S: Final = 5.0
"""For the broker to answer: it takes a millisecond, and on a host that swaps, seconds."""


class BrokerSilent(Exception):
    """The broker does not answer, or refuses to; the message is a clause."""


class BrokerLink(asyncio.Protocol):
    """One connection, from HELLO on.

    Attributes:
        agent: How the broker introduced itself.
        lost: Done once the connection is over.
    """

    def __init__(self, on_event: Callable[[LeaseEvent], None]) -> None:
        self.agent = ""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Body | Failure]] = {}

    async def greet(self) -> None:
        """Say HELLO. Raises BrokerSilent."""
        reply = await self.ask(Opcode.HELLO, Hello(0, f"{AGENT} web", ()))
        assert isinstance(reply, HelloReply)
        self.agent = reply.agent

    async def ask(self, op: Opcode, body: Body) -> Any:
        """The body of the answer. Raises BrokerSilent."""
        if self._transport is None:
            raise BrokerSilent("the daemon is gone")
        try:
            number, frame = self._connection.send_request(op, body)
        except LocalProtocolError as error:
            # One that does not answer for an hour has as many questions as a connection may have.
            raise BrokerSilent(str(error)) from None
        answer: asyncio.Future[Body | Failure] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(frame)
        try:
            result = await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            raise BrokerSilent(f"the daemon has not answered for {ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(result, Failure):
            raise BrokerSilent(result.message)
        return result

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """There is a connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._connection.receive_data(data)
        self._take_events()

    def eof_received(self) -> bool:
        """The broker will say nothing more."""
        self._connection.receive_eof()
        self._take_events()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """It is over: nobody waits any more."""
        self._transport = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(BrokerSilent("the daemon is gone"))
        if not self.lost.done():
            self.lost.set_result(None)

    def _take_events(self) -> None:
        while (event := self._connection.next_event()) is not None:
            match event:
                case Reply(_, number, result):
                    # Who asked may have given up.
                    if (answer := self._waiting.get(number)) is not None and not answer.done():
                        answer.set_result(result)
                case Told(_, told):
                    self._on_event(told)
                case Goodbye() | StreamBroken() | EndOfStream():
                    if self._transport is not None:
                        self._transport.close()


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
