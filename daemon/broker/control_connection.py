"""A control connection of the broker: bytes in, requests to the dispatcher, answers and events out.

The peer is bounded in time and memory. A connection is closed if its peer does not introduce itself, stops inside a
frame, or does not read its answers. ATTACH and GPU_SUBMIT end a connection here: its socket goes to a worker.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, cast

from gpulease.daemon.broker.connection_limiter import ConnectionLimiter
from gpulease.daemon.broker.handlers.requests import RequestDispatcher
from gpulease.daemon.broker.peer import Peer, identify
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.host.version import AGENT
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.connection import (
    Connection,
    EndOfStream,
    Event,
    Goodbye,
    Rejected,
    Reply,
    Request,
    Role,
    StreamBroken,
)
from gpulease.protocol.connection_states import State
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, HelloReply, LeaseEvent, RegionEvent
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.primitives import Tlv

HELLO_TIMEOUT_S: Final = 10.0
"""From connect to HELLO. Stops peers that connect and say nothing from using up the connections."""

STALL_TIMEOUT_S: Final = 10.0
"""From the first byte of a frame to its last, and for a peer to read what was written. Stops a peer that sends or reads
one byte a minute. No honest control request takes a second packet."""

WRITTEN_POLL_S: Final = 0.001
"""First pause before a hand-over checks again whether the peer has read all replies. Nearly always it has at once."""

MAX_WRITTEN_POLL_S: Final = 0.1
"""Longest pause between two such checks; each is twice the one before. A peer that does not read costs nothing."""

LINGER_S: Final = 5.0
"""For a peer to read the final reply before the connection is cut."""

REQUESTS_PER_QUANTUM: Final = 16
"""The most requests of one connection that are served in a row. A buffer full of small ones would take 100 ms."""

READ_BUFFER_BYTES: Final = 4 << 10
"""Size of a connection's read buffer, which almost every control request fits. It grows for a larger request. Stops
peers that connect and say nothing from taking 64 KiB each."""

WRITE_BUFFER_BYTES: Final = 256 << 10
"""Unread replies from which on nothing more is read from the peer."""

EVENT_BUFFER_BYTES: Final = 32 << 10
"""Unread replies and events from which on events are dropped for the peer. A subscriber that never reads costs this
much, and is not cut off: it did not ask for each event."""


class ControlConnection(asyncio.BufferedProtocol):
    """A tenant's or an operator's connection to the broker.

    Args:
        driver: The name of the driver of the node's cards.
        limiter: Counts the connection, or refuses it. None for a connection of the daemon's own processes.
        tenant_of_uid: The names of tenants by the number of their local user.
        peer: The peer, if it is known already. Otherwise the socket tells it.
        refusal: Why the peer is refused at once; None if it is not.
        options: Options of the answer to HELLO.

    Attributes:
        peer: The other end.
    """

    def __init__(
        self,
        runtime: Runtime,
        driver: str,
        limiter: ConnectionLimiter | None,
        tenant_of_uid: Mapping[int, str],
        peer: Peer | None = None,
        refusal: Failure | None = None,
        options: tuple[Tlv, ...] = (),
    ) -> None:
        self.peer = peer or Peer("", is_operator=False, is_known=False)
        self._is_identified = peer is not None
        self._runtime = runtime
        self._driver = driver
        self._limiter = limiter
        self._tenant_of_uid = tenant_of_uid
        self._refusal = refusal
        self._options = options
        self._connection = Connection(
            Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES, buffer_bytes=READ_BUFFER_BYTES
        )
        self._transport: asyncio.Transport | None = None
        self._dispatcher: RequestDispatcher | None = None
        self._deadlines = Deadlines()
        self._is_peer_slow = False
        self._is_queued = False

    # --- asyncio.BufferedProtocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Identify the peer, and admit or refuse it."""
        # Stream servers hand out stream transports; uvloop's do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self._is_identified:
            self.peer = identify(transport.get_extra_info("socket"), self._tenant_of_uid)
        self._dispatcher = RequestDispatcher(self._runtime, self, self._driver)
        refusal = self._refusal
        if refusal is None and self._limiter is not None:
            refusal = self._limiter.admit(self)
        if refusal is not None:
            self.close_with(refusal)
            return
        failure = Failure(Status.INVALID_REQUEST, f"no HELLO came within {HELLO_TIMEOUT_S:g} s")
        self._deadlines.start(AwaitedStep.HELLO, HELLO_TIMEOUT_S, self.close_with, failure)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the room for the next bytes. No more than this buffer is ever held for a peer."""
        return self._connection.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Serve the requests in the buffer when the fair queue allows it."""
        self._connection.reader.buffer_updated(nbytes)
        self._enqueue()

    def eof_received(self) -> bool:
        """Close the connection: the peer sends no more, and what it asked for is given up."""
        self._connection.receive_eof()
        self._serve_requests()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Release everything that the connection held."""
        self._transport = None
        self._deadlines.stop_all()
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None
        if self._limiter is not None:
            self._limiter.release(self)

    def pause_writing(self) -> None:
        """Read nothing from a peer that does not read, and cut it off if it goes on."""
        if self._transport is not None:
            self._is_peer_slow = True
            self._transport.pause_reading()
            self._deadlines.start(AwaitedStep.READING, STALL_TIMEOUT_S, self._transport.abort)

    def resume_writing(self) -> None:
        """Go on with a peer that reads again."""
        if self._transport is not None:
            self._deadlines.stop(AwaitedStep.READING)
            self._is_peer_slow = False
            self.resume_reading()

    # --- answers and events ---

    @property
    def is_open(self) -> bool:
        """Return whether the peer can still read an answer."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_lost(self) -> bool:
        """Return whether the transport is gone."""
        return self._transport is None

    def answer(self, request: Request, result: Body | Failure) -> None:
        """Answer a request, if the connection is open."""
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

    def send_event(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        """Send an event to a subscriber. False if it has not read enough; True on a closed connection."""
        if self._transport is None or self._transport.is_closing():
            return True
        if self._transport.get_write_buffer_size() > EVENT_BUFFER_BYTES:
            return False
        self._transport.write(self._connection.send_event(subscription, event))
        return True

    def close_with(self, failure: Failure) -> None:
        """Tell the peer why, and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._connection.send_goodbye(failure))
            self._close()

    def turn_away(self, failure: Failure) -> None:
        """Refuse what the peer waits for, tell it why, and close. Its leases go on."""
        if self._dispatcher is not None:
            self._dispatcher.give_up(failure)
        self.close_with(failure)

    def _close(self) -> None:
        if self._transport is not None:
            self._deadlines.start(AwaitedStep.CLOSE, LINGER_S, self._transport.abort)
            self._transport.close()

    # --- requests ---

    def serve_next(self) -> None:
        """Go on with the requests behind one that did not take the connection along."""
        self._serve_requests()

    def _enqueue(self) -> None:
        if self._is_queued:
            return
        self._is_queued = True
        self._runtime.fair_queue.enqueue(self.peer.tenant, self._serve_quantum)
        if self._is_queued and self._transport is not None:
            # Still queued: the kernel keeps what the peer sends meanwhile.
            self._transport.pause_reading()

    def _serve_quantum(self) -> None:
        self._is_queued = False
        self._serve_requests()

    def _serve_requests(self) -> None:
        for _ in range(REQUESTS_PER_QUANTUM):
            if self._connection.state is State.ATTACHING:
                self._stop_reading_behind_attach()
                return
            event = self._connection.next_event()
            if event is None:
                self.resume_reading()
                self._watch_for_stall()
                return
            self._on_event(event)
            if self._runtime.fair_queue.is_quantum_over:
                break
        self._enqueue()

    def _on_event(self, event: Event) -> None:
        match event:
            case Request():
                self._on_request(event)
            case Rejected() if not event.is_quiet and self._transport is not None and self.is_open:
                self._transport.write(self._connection.send_failure(event, event.failure))
                if event.op == Opcode.HELLO and self._connection.state is State.OPENING:
                    # A peer whose HELLO is malformed has no better one.
                    self._close()
            case StreamBroken():
                self.close_with(event.failure)
            case EndOfStream():
                self._close()
            case Rejected() | Reply() | Goodbye():
                pass

    def _on_request(self, request: Request) -> None:
        if self._dispatcher is None:
            return
        if request.op is Opcode.HELLO:
            self._deadlines.stop(AwaitedStep.HELLO)
            self.answer(request, HelloReply(0, AGENT, MAX_PAYLOAD_BYTES, self._options))
        else:
            self._dispatcher.dispatch(request)

    def _watch_for_stall(self) -> None:
        if self._connection.reader.is_mid_frame and self._connection.state is State.CONTROL:
            failure = Failure(Status.INVALID_REQUEST, f"a frame did not end within {STALL_TIMEOUT_S:g} s")
            self._deadlines.start(AwaitedStep.FRAME, STALL_TIMEOUT_S, self.close_with, failure)
        else:
            self._deadlines.stop(AwaitedStep.FRAME)

    def _stop_reading_behind_attach(self) -> None:
        """Leave to the kernel what follows a request that takes the connection along, if some of it is here already."""
        reader = self._connection.reader
        if self._transport is not None and not self._transport.is_closing() and reader.start != reader.end:
            self._transport.pause_reading()

    # --- hand-over ---

    def resume_reading(self) -> None:
        """Read from the socket again, unless the peer does not read either."""
        if self._transport is not None and not self._is_peer_slow and not self._transport.is_closing():
            self._transport.resume_reading()

    def when_written(self, action: Callable[[], None]) -> None:
        """Stop reading. Call `action` once the peer has read all that was written, or the connection is closed.

        A peer that has not read within STALL_TIMEOUT_S is cut off.
        """
        self._call_when_written(action, 0)

    def _call_when_written(self, action: Callable[[], None], polls: int) -> None:
        if self._transport is None or self._transport.is_closing():
            action()
            return
        self._transport.pause_reading()
        if self._transport.get_write_buffer_size():
            self._deadlines.start(AwaitedStep.ATTACH, STALL_TIMEOUT_S, self._transport.abort)
            pause_s = back_off_s(polls, WRITTEN_POLL_S, MAX_WRITTEN_POLL_S)
            asyncio.get_running_loop().call_later(pause_s, self._call_when_written, action, polls + 1)
            return
        self._deadlines.stop(AwaitedStep.ATTACH)
        action()

    def hand_over(self, pass_on: Callable[[int, bytes], bool]) -> bool:
        """Give the socket away, and end the connection here.

        Args:
            pass_on: Gets a descriptor of the socket, which stays open only during the call, and the bytes that were
                read behind the current request. Returns whether the socket was taken.

        Returns:
            Whether the socket was taken. If not, or if no descriptor was left, the connection goes on here.
        """
        if self._transport is None:
            return False
        try:
            fd = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:
            # No descriptor is left.
            return False
        try:
            rest = self._connection.take_rest()
            if not pass_on(fd, rest):
                self._connection.receive_data(rest)
                return False
        finally:
            os.close(fd)
        # Closes this process's descriptor only; the connection lives on in the worker's.
        self._transport.abort()
        return True


class AwaitedStep(Enum):
    """A step that a peer owes within a time limit."""

    HELLO = auto()
    FRAME = auto()
    READING = auto()
    ATTACH = auto()
    CLOSE = auto()


class Deadlines:
    """The time limits of one connection, each with a timer of its own."""

    def __init__(self) -> None:
        self._handles: dict[AwaitedStep, asyncio.TimerHandle] = {}

    def start(self, step: AwaitedStep, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` in `delay_s` unless it is stopped. A timer that runs already goes on as it was."""
        if step not in self._handles:
            self._handles[step] = asyncio.get_running_loop().call_later(delay_s, action, *arguments)

    def stop(self, step: AwaitedStep) -> None:
        """Stop the timer of a step: the peer took it, or owes it no more."""
        if (handle := self._handles.pop(step, None)) is not None:
            handle.cancel()

    def stop_all(self) -> None:
        """Stop every timer: the connection is gone."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
