"""What a control connection may be waiting for, each with a clock of its own.

One control connection: transport on one side, requests on the other.

A connection that does not introduce itself, stops inside a frame, or does not read what it asked for is closed; one
that attaches to a session leaves the broker altogether: its socket goes to the session's worker.

Who may connect: a count of connections, in all and per tenant.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, cast

from gpulease.daemon.broker.handlers.requests import RequestDispatcher
from gpulease.daemon.broker.memory_reserve import Trimmer
from gpulease.daemon.broker.peer import Peer, identify
from gpulease.daemon.broker.refusal import Refusal
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.host.version import AGENT
from gpulease.daemon.leases import SubmitAbandoned, SubmitReady
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.connection import (
    Connection,
    EndOfStream,
    Event,
    Goodbye,
    Rejected,
    Reply,
    Request,
    Role,
    State,
    StreamBroken,
)
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Attach, Body, HelloReply, LeaseEvent
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import Wanted


class AwaitedStep(Enum):
    """One thing a peer owes."""

    HELLO = auto()
    FRAME = auto()
    READING = auto()
    ATTACH = auto()
    CLOSE = auto()


class Deadlines:
    """The clocks of one connection. None is touched by another's start or stop."""

    def __init__(self) -> None:
        self._handles: dict[AwaitedStep, asyncio.TimerHandle] = {}

    def start(self, wait: AwaitedStep, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do `action` in `delay_s` unless it is stopped; a clock that runs goes on as it was."""
        if wait not in self._handles:
            self._handles[wait] = asyncio.get_running_loop().call_later(delay_s, action, *arguments)

    def stop(self, wait: AwaitedStep) -> None:
        """The peer did what it owed, or owes it no more."""
        if (handle := self._handles.pop(wait, None)) is not None:
            handle.cancel()

    def stop_all(self) -> None:
        """The connection is gone."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()


HELLO_TIMEOUT_S: Final = 10.0
"""From connect to HELLO. Stops peers that connect and say nothing from using up the connections."""

STALL_TIMEOUT_S: Final = 10.0
"""From the first byte of a frame to its last. Stops a peer that sends one byte a minute; no honest control request
takes a second packet."""

HAND_OVER_POLL_S: Final = 0.001
"""Until a hand-over looks again whether what was written before it is out; it nearly always is at once."""

MAX_HAND_OVER_POLL_S: Final = 0.1
"""Longest pause between two such looks, each twice the one before: peers that do not read must cost nothing."""

SUBMIT_WAIT_S: Final = 10.0
"""For a submit to be gone before its lease's session is opened; one that has answered is gone in a moment. Shorter than
a client waits, so that it is told why."""

EVENTS_PER_TURN: Final = 16
"""Requests of one connection served in one turn at most: a buffer full of small ones takes 100 ms."""

LINGER_S: Final = 5.0
"""For a peer to read what it was told last, before the connection is cut."""

READ_BUFFER_BYTES: Final = 4 << 10
"""What a connection reads into; almost every control request fits. It grows with a larger one. Stops those who connect
and say nothing from taking 64 KiB each."""

WRITE_BUFFER_BYTES: Final = 256 << 10
"""Replies a peer has not read, before nothing more is read from it."""

EVENT_BUFFER_BYTES: Final = 32 << 10
"""What a peer may have left unread, events and replies, before events are dropped for it. So a subscriber that never
reads costs this much, and is not cut off for what it did not ask for one by one."""


_SUBMIT_RUNS: Final = Failure(
    Status.BUSY,
    "a submit runs in the lease's memory: its session can't be opened meanwhile",
    hint="AwaitedStep for the submit's answer; for both at a time acquire with GpuBuilder().submits(bytes).",
)


class ControlConnection(asyncio.BufferedProtocol):
    """A tenant's or an operator's connection to the broker.

    Args:
        admit: Counts the connection in, or says why it is one too many.
        release: Counts it out again; called exactly once.
        tenant_of_uid: Names of tenants by their local users' numbers.
        peer: Who it is, where that is known already; else its socket says so.
        options: What HELLO is answered besides.
    """

    def __init__(
        self,
        runtime: Runtime,
        driver: str,
        admit: Callable[["ControlConnection"], Failure | None],
        release: Callable[["ControlConnection"], None],
        tenant_of_uid: Mapping[int, str],
        peer: Peer | None = None,
        options: tuple[Tlv, ...] = (),
    ) -> None:
        self.peer = peer or Peer("", is_operator=False, is_known=False)
        self._is_identified = peer is not None
        self._runtime = runtime
        self._driver = driver
        self._admit = admit
        self._release = release
        self._tenant_of_uid = tenant_of_uid
        self._options = options
        self._connection = Connection(
            Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES, buffer_bytes=READ_BUFFER_BYTES
        )
        self._transport: asyncio.Transport | None = None
        self._desk: RequestDispatcher | None = None
        self._deadlines = Deadlines()
        self._is_reader_slow = False
        self._is_in_line = False

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer connected."""
        # Stream servers hand out stream transports; uvloop's do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self._is_identified:
            self.peer = identify(transport.get_extra_info("socket"), self._tenant_of_uid)
        self._desk = RequestDispatcher(self._runtime, self, self._driver)
        refusal = self._admit(self)
        if refusal is not None:
            self.say_goodbye(refusal)
            return
        failure = Failure(Status.INVALID_REQUEST, f"no HELLO came within {HELLO_TIMEOUT_S:g} s")
        self._deadlines.start(AwaitedStep.HELLO, HELLO_TIMEOUT_S, self.say_goodbye, failure)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: no more is ever held for a peer than this buffer."""
        return self._connection.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        self._connection.reader.buffer_updated(nbytes)
        self._ask_for_a_turn()

    def eof_received(self) -> bool:
        """The peer will send nothing more; what it asked for is given up."""
        self._connection.receive_eof()
        self._take_events()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The transport is gone."""
        self._transport = None
        self._deadlines.stop_all()
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        self._release(self)

    def pause_writing(self) -> None:
        """The peer does not read: neither do we, and not for long."""
        if self._transport is not None:
            self._is_reader_slow = True
            self._transport.pause_reading()
            self._deadlines.start(AwaitedStep.READING, STALL_TIMEOUT_S, self._transport.abort)

    def resume_writing(self) -> None:
        """The peer reads again."""
        if self._transport is not None:
            self._deadlines.stop(AwaitedStep.READING)
            self._is_reader_slow = False
            self._resume_reading()

    # --- answers ---

    @property
    def is_open(self) -> bool:
        """Whether there is anybody to answer."""
        return self._transport is not None and not self._transport.is_closing()

    def answer(self, request: Request, result: Body | Failure) -> None:
        """Answer a request, if the peer is still there."""
        if self._transport is None or self._transport.is_closing():
            return
        if isinstance(result, Failure):
            self._transport.write(self._connection.send_failure(request, result))
            return
        try:
            self._transport.write(self._connection.send_reply(request, result))
        except LocalProtocolError:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"answering {request.op.name}")
            failure = Failure(Status.INTERNAL, "the daemon's answer can't be encoded", hint="Tell the operator.")
            self._transport.write(self._connection.send_failure(request, failure))

    def tell(self, subscription: int, event: LeaseEvent) -> bool:
        """Tell a subscriber something, unless what it has not read stands in the way; True where nobody is left."""
        if self._transport is None or self._transport.is_closing():
            return True
        if self._transport.get_write_buffer_size() > EVENT_BUFFER_BYTES:
            return False
        self._transport.write(self._connection.send_event(subscription, event))
        return True

    def say_goodbye(self, failure: Failure) -> None:
        """Say why and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._connection.send_goodbye(failure))
            self._close()

    def turn_away(self, failure: Failure) -> None:
        """Refuse what it waits for, then say why and close; leases go on."""
        if self._desk is not None:
            self._desk.give_up(failure)
        self.say_goodbye(failure)

    def _close(self) -> None:
        if self._transport is not None:
            self._deadlines.start(AwaitedStep.CLOSE, LINGER_S, self._transport.abort)
            self._transport.close()

    # --- events ---

    def _ask_for_a_turn(self) -> None:
        if self._is_in_line:
            return
        self._is_in_line = True
        self._runtime.turns.ask(self.peer.tenant, self._take_turn)
        if self._is_in_line and self._transport is not None:
            # What it sends meanwhile is the kernel's to keep.
            self._transport.pause_reading()

    def _take_turn(self) -> None:
        self._is_in_line = False
        self._take_events()

    def _take_events(self) -> None:
        for _ in range(EVENTS_PER_TURN):
            if self._connection.state is State.ATTACHING:
                self._read_no_more()
                return
            event = self._connection.next_event()
            if event is None:
                self._resume_reading()
                self._watch_for_stall()
                return
            self._take_event(event)
            if self._runtime.turns.is_over:
                break
        self._ask_for_a_turn()

    def _take_event(self, event: Event) -> None:
        match event:
            case Request():
                self._take_request(event)
            case Rejected() if not event.is_quiet and self._transport is not None and self.is_open:
                self._transport.write(self._connection.send_failure(event, event.failure))
                if event.op == Opcode.HELLO and self._connection.state is State.OPENING:
                    # A peer whose HELLO makes no sense has no better one.
                    self._close()
            case StreamBroken():
                self.say_goodbye(event.failure)
            case EndOfStream():
                self._close()
            case Rejected() | Reply() | Goodbye():
                pass

    def _take_request(self, request: Request) -> None:
        if self._desk is None:
            return
        if request.op is Opcode.HELLO:
            self._deadlines.stop(AwaitedStep.HELLO)
            self.answer(request, HelloReply(0, AGENT, MAX_PAYLOAD_BYTES, self._options))
        elif request.op is Opcode.ATTACH:
            self._attach(request, self._desk)
        elif request.op is Opcode.GPU_SUBMIT:
            self._submit(request, self._desk)
        else:
            self._desk.take(request)

    def _watch_for_stall(self) -> None:
        if self._connection.reader.is_mid_frame and self._connection.state is State.CONTROL:
            failure = Failure(Status.INVALID_REQUEST, f"a frame did not end within {STALL_TIMEOUT_S:g} s")
            self._deadlines.start(AwaitedStep.FRAME, STALL_TIMEOUT_S, self.say_goodbye, failure)
        else:
            self._deadlines.stop(AwaitedStep.FRAME)

    def _read_no_more(self) -> None:
        """What comes behind a request that takes its connection along is the kernel's to keep, but for what is here."""
        reader = self._connection.reader
        if self._transport is not None and not self._transport.is_closing() and reader.start != reader.end:
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._is_reader_slow and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- hand-over ---

    def _submit(self, request: Request, desk: RequestDispatcher) -> None:
        """Have a worker made for it first, and only then see whether its token is used up already."""
        if self._transport is None or self._transport.is_closing():
            return
        # That it leaves is to be heard. What it sends meanwhile stops the reading: nobody takes it before the worker.
        self._resume_reading()

        def on_ready(outcome: SubmitReady | Failure) -> None:
            if isinstance(outcome, Failure):
                self._refuse_attach(request, outcome, is_told=True)
            else:
                self._attach(request, desk, submit=outcome)

        try:
            desk.check_attach(request)
            desk.submits.ask(request, on_ready)
        except Refusal as refusal:
            self._refuse_attach(request, refusal.failure)

    def _attach(
        self,
        request: Request,
        desk: RequestDispatcher,
        look_again_s: float = HAND_OVER_POLL_S,
        submit: SubmitReady | None = None,
        until_s: float = 0.0,
    ) -> None:
        """`until_s`: until when to wait for a submit that has the session's memory; 0: that begins now."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            if submit is not None:
                self._runtime.post(SubmitAbandoned(submit.submit_id))
            return
        # What the peer sent behind its ATTACH is the worker's to read, in the kernel or in our buffer.
        self._transport.pause_reading()
        if self._transport.get_write_buffer_size():
            self._deadlines.start(AwaitedStep.ATTACH, STALL_TIMEOUT_S, self._transport.abort)
            look_again_s, pause_s = min(2 * look_again_s, MAX_HAND_OVER_POLL_S), look_again_s
            loop.call_later(pause_s, self._attach, request, desk, look_again_s, submit)
            return
        self._deadlines.stop(AwaitedStep.ATTACH)
        try:
            guest = desk.check_attach(request)
            if submit is None and not desk.open_session(request.session_id):
                until_s = until_s or loop.time() + SUBMIT_WAIT_S
                if loop.time() >= until_s:
                    raise Refusal(_SUBMIT_RUNS)
                loop.call_later(MAX_HAND_OVER_POLL_S, self._attach, request, desk, HAND_OVER_POLL_S, None, until_s)
                return
        except Refusal as refusal:
            if submit is not None:
                self._runtime.post(SubmitAbandoned(submit.submit_id))
            self._refuse_attach(request, refusal.failure)
            return
        number = request.session_id if submit is None else submit.submit_id
        desk.spend_token(lambda is_spent: self._attach_spent(request, desk, guest, number, is_spent=is_spent))

    def _attach_spent(
        self, request: Request, desk: RequestDispatcher, guest: Guest | None, number: int, *, is_spent: bool
    ) -> None:
        """The token of an ATTACH, if it has one, opens no other connection; unless it could not open this one.

        `number`: of the worker that gets the connection.
        """
        is_submit = number != request.session_id
        desk.announce(number)
        if is_spent and self.is_open and self._hand_over(request, guest, number):
            desk.attached(request.session_id, is_submit=is_submit)
            return
        if is_submit:
            self._runtime.post(SubmitAbandoned(number))
        failure = desk.not_attached(request.session_id, is_submit=is_submit)
        if not is_spent:
            failure = Failure(Status.BUSY, "that the token is used can't be written down now", hint="Try again.")
        self._refuse_attach(request, failure)

    def _hand_over(self, request: Request, guest: Guest | None, number: int) -> bool:
        if self._transport is None:
            return False
        try:
            fd = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:
            # No descriptor is left.
            return False
        try:
            rest = self._connection.take_rest()
            wanted = Wanted()
            # A relay's socket looks like a local peer's, and descriptors would end in the relay.
            if isinstance(request.body, Attach) and not self.peer.is_relayed:
                wanted = Wanted.from_options(request.body.options)
            if not self._runtime.workers.attach(number, fd, request.request_id, rest, wanted, guest):
                self._connection.receive_data(rest)
                return False
        finally:
            os.close(fd)
        # Closes this process's descriptor only; the connection lives on in the worker's.
        self._transport.abort()
        return True

    def _refuse_attach(self, request: Request, failure: Failure, *, is_told: bool = False) -> None:
        """`is_told`: log and metrics know already, from the lease table."""
        if self._transport is None:
            return
        if not is_told:
            self._runtime.recorder.refused(request.op.name, self.peer.tenant, request.session_id, failure.message)
            self._runtime.metrics.refused(request.op.name, failure.status)
        self.answer(request, failure)
        self._take_events()


OPERATOR_CONNECTIONS: Final = 32
"""Connections beyond the limit that only operators get, so that they can look and revoke when tenants fill it."""


class ConnectionLimiter:
    """Counts control connections; a session's connection counts no more once its worker has it."""

    def __init__(
        self, max_connections: int, max_connections_per_tenant: int, has_memory: Callable[[], bool] = lambda: True
    ) -> None:
        self._max_connections = max_connections
        self._max_per_tenant = max_connections_per_tenant
        self._has_memory = has_memory
        self._inside: set[ControlConnection] = set()
        self._by_tenant: Counter[str] = Counter()
        self._left = asyncio.Event()
        self._trimmer = Trimmer()

    def admit(self, connection: ControlConnection) -> Failure | None:
        """Count a connection in, or say why not."""
        peer = connection.peer
        limit = self._max_connections + (OPERATOR_CONNECTIONS if peer.is_operator else 0)
        if len(self._inside) >= limit:
            return _busy(f"{len(self._inside)} control connections are open, the most this daemon takes")
        if not peer.is_operator and self._by_tenant[peer.tenant] >= self._max_per_tenant:
            return _busy(f"tenant {peer.tenant} has {self._max_per_tenant} control connections, the most one may have")
        if not peer.is_operator and not self._has_memory():
            return Failure(Status.BUSY, "the daemon is out of memory", hint="Try again later.")
        self._inside.add(connection)
        self._by_tenant[peer.tenant] += 1
        return None

    def widen(self, max_connections: int, max_connections_per_tenant: int) -> None:
        """Other bounds, for those who come from now on."""
        self._max_connections, self._max_per_tenant = max_connections, max_connections_per_tenant

    def release(self, connection: ControlConnection) -> None:
        """Count a connection out; one that was refused was never in."""
        self._trimmer.left()
        if connection in self._inside:
            self._inside.discard(connection)
            self._by_tenant[connection.peer.tenant] -= 1
            if not self._by_tenant[connection.peer.tenant]:
                del self._by_tenant[connection.peer.tenant]
            self._left.set()

    async def emptied(self) -> None:
        """AwaitedStep until nobody is inside."""
        while self._inside:
            self._left.clear()
            await self._left.wait()

    def turn_away(self, failure: Failure) -> None:
        """Refuse what anybody waits for, tell everybody why, and close."""
        for connection in list(self._inside):
            connection.turn_away(failure)

    def say_goodbye(self, failure: Failure) -> None:
        """Tell everybody why, and close."""
        for connection in list(self._inside):
            connection.say_goodbye(failure)


def _busy(message: str) -> Failure:
    return Failure(Status.BUSY, message, hint="Close connections that are not needed, or try again later.")
