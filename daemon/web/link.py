"""The web process's end of its connection to the broker: questions out, answers and events in."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.version import AGENT
from gpulease.protocol.connection import Connection, EndOfStream, Goodbye, Reply, Role, StreamBroken, Told
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, Hello, HelloReply, LeaseEvent
from gpulease.protocol.opcodes import Opcode

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
