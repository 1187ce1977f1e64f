"""The web process's two links to the broker: a connection for reading, and a channel for an operator's actions.

`BrokerLink` uses the ordinary protocol, and may read everything and change nothing. `BrokerChannel` is the channel that
the broker opened when it started this process. Through it, the web process sends the broker a request to revoke, to
drain or to clear fences, with the token of the HTTP request, and receives the outcome.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar, assert_never

from gpulease.daemon.contract.message_fields import MalformedMessage, expect_message, request_of
from gpulease.daemon.contract.messages import LivenessPing, Pong
from gpulease.daemon.host.answers import answer_within
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.version import AGENT
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.load_samples import CardLoads
from gpulease.daemon.web.web_messages import (
    TO_WEB,
    ActionOutcome,
    ActionRefused,
    ChangeDrain,
    ClearFences,
    DrainChanged,
    FencesCleared,
    FromWeb,
    LeaseRevokedReply,
    RevokeLease,
    TokenChanged,
    ToWeb,
    WebRefusal,
)
from gpulease.protocol.connection import Connection, EndOfStream, Goodbye, Notification, Reply, Role, StreamBroken
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, Hello, HelloReply, LeaseEvent
from gpulease.protocol.opcodes import Opcode, RevokeOutcome

ANSWER_S: Final = 5.0
"""Maximum time in seconds for the broker to answer. It normally takes a millisecond, and seconds on a host that swaps.
"""


class BrokerSilent(Exception):
    """The broker does not answer, or refuses; the message is a clause."""


class BrokerLink(asyncio.Protocol):
    """The protocol connection to the broker.

    Args:
        on_event: Called with each event about a lease.

    Attributes:
        agent: The broker's name and version, from its HELLO.
        lost: Done when the connection is over.
    """

    def __init__(self, on_event: Callable[[LeaseEvent], None]) -> None:
        self.agent = ""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Body | Failure]] = {}

    async def greet(self) -> None:
        """Send HELLO, and set `agent` from the broker's reply. Raises BrokerSilent."""
        reply = await self.ask(Opcode.HELLO, Hello(0, f"{AGENT} web", ()))
        assert isinstance(reply, HelloReply)
        self.agent = reply.agent

    async def ask(self, op: Opcode, body: Body) -> Any:
        """Send a request and return the body of the reply. Raises BrokerSilent."""
        if self._transport is None:
            raise BrokerSilent("the daemon is gone")
        try:
            number, frame = self._connection.send_request(op, body)
        except LocalProtocolError as error:
            # MAX_IN_FLIGHT requests are open, because the broker has not answered for a long time.
            raise BrokerSilent(str(error)) from None
        # Register the request before writing the frame, because the reply may arrive in the same turn of the loop.
        answer: asyncio.Future[Body | Failure] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(frame)
        try:
            result = await answer_within(answer, ANSWER_S)
        except TimeoutError:
            raise BrokerSilent(f"the daemon has not answered for {ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(result, Failure):
            raise BrokerSilent(result.message)
        return result

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._connection.receive_data(data)
        self._handle_events()

    def eof_received(self) -> bool:
        self._connection.receive_eof()
        self._handle_events()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Fail every request that waits for a reply."""
        self._transport = None
        # Notify each caller now, not after its own timeout.
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(BrokerSilent("the daemon is gone"))
        if not self.lost.done():
            self.lost.set_result(None)

    def _handle_events(self) -> None:
        while (event := self._connection.next_event()) is not None:
            match event:
                case Reply(_, number, result):
                    # The caller may have given up.
                    if (answer := self._waiting.get(number)) is not None and not answer.done():
                        answer.set_result(result)
                case Notification(_, LeaseEvent() as lease_event):
                    self._on_event(lease_event)
                # The broker has ended the connection, or the connection is broken; `connection_lost` follows.
                case Goodbye() | StreamBroken() | EndOfStream():
                    if self._transport is not None:
                        self._transport.close()


OUTCOME_S: Final = 30.0
"""Maximum time in seconds for the broker to report an outcome. To end a worker and prove its memory free takes about a
second. If that fails, the broker reports the failure within this time."""


class ActionNotDone(Exception):
    """The broker refused an action; the message is a sentence for the operator."""

    def __init__(self, reason: WebRefusal, message: str) -> None:
        super().__init__(message)
        self.why = reason


class DrainOutcome(NamedTuple):
    """The outcome of a drain.

    Attributes:
        left_ms: Milliseconds until the remaining leases are ended; None if there is no drain.
        leases: The number of active leases of the node, or of the card.
    """

    left_ms: int | None
    leases: int


Done = TypeVar("Done", LeaseRevokedReply, DrainChanged, FencesCleared)


class BrokerChannel:
    """The channel to the broker.

    Args:
        on_token: Called with the SHA-256 of the operator's token when the token changes.
        on_loads: Called with samples of a card's load.
        on_membership: Called with the node's membership in its fleet when it changes.
    """

    def __init__(
        self,
        on_token: Callable[[bytes], None],
        on_loads: Callable[[CardLoads], None],
        on_membership: Callable[[FleetMembership], None],
    ) -> None:
        self._on_token = on_token
        self._on_loads = on_loads
        self._on_membership = on_membership
        self._channel: socket.socket | None = None
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[ActionOutcome]] = {}

    def open(self, channel: socket.socket) -> None:
        """Read the broker's messages from now on, in the running loop."""
        channel.setblocking(False)
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel, self._read)

    async def revoke(self, lease_id: str, reason: str, token: bytes) -> RevokeOutcome:
        """Revoke a lease. Raises ActionNotDone, or BrokerSilent if the outcome is unknown."""
        reply = await self._ask(LeaseRevokedReply, lambda number: RevokeLease(number, token, lease_id, reason))
        return reply.outcome

    async def drain(self, within_ms: int | None, token: bytes, card: str = "") -> DrainOutcome:
        """Drain the node, or the card with that UUID; end the drain if `within_ms` is None. Raises as `revoke` does."""
        reply = await self._ask(DrainChanged, lambda number: ChangeDrain(number, token, within_ms, card))
        return DrainOutcome(reply.left_ms, reply.leases)

    async def clear_fences(self, card: str, token: bytes) -> int:
        """Allow a card's fenced memory to be granted again. Returns the number of slices. Raises as `revoke` does."""
        reply = await self._ask(FencesCleared, lambda number: ClearFences(number, token, card))
        return reply.count

    async def _ask(self, expected: type[Done], request: Callable[[int], FromWeb]) -> Done:
        if self._channel is None:
            raise BrokerSilent("the daemon has not answered yet")
        # The number pairs this request with its answer; others may be in progress.
        number = next(self._numbers)
        answer: asyncio.Future[ActionOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            send_message(self._channel, request(number).to_map())
            outcome = await answer_within(answer, OUTCOME_S)
        except (BlockingIOError, ChannelClosed):
            raise BrokerSilent("the daemon can't be reached") from None
        except TimeoutError:
            raise BrokerSilent(f"the daemon has not reported the outcome for {OUTCOME_S:g} s") from None
        finally:
            self._waiting.pop(number, None)
        # The answer is the outcome or a refusal. Only a bug can make it the outcome of another kind of request.
        if isinstance(outcome, ActionRefused):
            raise ActionNotDone(outcome.why, outcome.message)
        if not isinstance(outcome, expected):
            raise BrokerSilent(f"the daemon's answer must be {expected.OP}, not {outcome.OP}")
        return outcome

    def _read(self) -> None:
        assert self._channel is not None
        try:
            received, fds = receive_message(self._channel)
        except BlockingIOError:
            return
        except ChannelClosed:
            # The connection to the broker also ends, which ends this process.
            asyncio.get_running_loop().remove_reader(self._channel)
            return
        close_all(fds)
        try:
            self._dispatch(expect_message(TO_WEB, received))
        except MalformedMessage as error:
            # The broker has another version or a bug. Fail the request that this message answers, because no other
            # answer will come.
            log_event(LogEvent.DAEMON_FAULT, doing=f"reading a message of the broker: {error}")
            answer = self._waiting.get(request_of(received) or 0)
            if answer is not None and not answer.done():
                answer.set_exception(BrokerSilent("the daemon's answer can't be read"))

    def _dispatch(self, message: ToWeb) -> None:
        match message:
            case LivenessPing():
                # If the channel is full, this pong is lost, and the broker pings again.
                assert self._channel is not None
                with contextlib.suppress(BlockingIOError, ChannelClosed):
                    send_message(self._channel, Pong().to_map())
            case TokenChanged():
                self._on_token(message.digest)
            case CardLoads():
                self._on_loads(message)
            case FleetMembership():
                self._on_membership(message)
            case LeaseRevokedReply() | DrainChanged() | FencesCleared() | ActionRefused():
                # The caller may have given up.
                if (answer := self._waiting.get(message.request)) is not None and not answer.done():
                    answer.set_result(message)
            case _:
                assert_never(message)
