"""A control connection of the broker: it turns bytes into requests for the dispatcher, and sends replies and events.

A peer's time and memory are bounded. A connection is closed if its peer does not send HELLO, stops in the middle of a
frame, or does not read its replies. ATTACH and GPU_SUBMIT end a connection in this process: a worker gets its socket.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final, cast

from gpulease.daemon.broker.caller import Step
from gpulease.daemon.broker.connection_limiter import ConnectionLimiter
from gpulease.daemon.broker.handlers.requests import RequestDispatcher
from gpulease.daemon.broker.peer import Peer, identify
from gpulease.daemon.broker.runtime import FAULT, Runtime
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
"""Longest time from connect to HELLO, in seconds. Stops peers that connect and send nothing from using up the
connections."""

STALL_TIMEOUT_S: Final = 10.0
"""Longest time from the first byte of a frame to its last, and longest time for a peer to read its replies. Stops a
peer that sends or reads one byte a minute. No honest control request needs a second packet."""

WRITTEN_POLL_S: Final = 0.001
"""First pause before a hand-over checks again whether the peer has read all replies, which it almost always has."""

MAX_WRITTEN_POLL_S: Final = 0.1
"""Longest pause before a hand-over checks again. Each pause is twice the previous one, so that a peer that does not
read costs hardly any time."""

LINGER_S: Final = 5.0
"""Longest time, in seconds, for a peer to read the final reply before the connection is cut."""

REQUESTS_PER_QUANTUM: Final = 16
"""Maximum number of requests of one connection that are served one after the other. Serving a buffer full of small
requests would take 100 ms."""

READ_BUFFER_BYTES: Final = 4 << 10
"""Size of a connection's read buffer, which fits almost every control request. It grows for a larger request. Stops
peers that connect and send nothing from taking 64 KiB each."""

WRITE_BUFFER_BYTES: Final = 256 << 10
"""Bytes of unread replies above which the broker reads nothing more from the peer."""

EVENT_BUFFER_BYTES: Final = 32 << 10
"""Bytes of unread replies and events above which events for the peer are dropped. A subscriber that never reads costs
this much memory. It is not disconnected, because it did not request each single event."""


class ControlConnection(asyncio.BufferedProtocol):
    """A tenant's or an operator's connection to the broker.

    Args:
        driver: The name of the driver of the node's cards.
        limiter: Counts the connection, or refuses it. None for a connection of the daemon's own processes.
        tenant_of_uid: The names of tenants by the number of their local user.
        peer: The peer, if it is known already. Otherwise it is read from the socket.
        refusal: Why the peer is refused at once; None if it is not.
        options: Options of the reply to HELLO.

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
        # Use a placeholder until the connection is made and the kernel names the peer.
        self.peer = peer or Peer("", is_operator=False, is_known=False)
        self._is_identified = peer is not None
        self._runtime = runtime
        self._driver = driver
        self._limiter = limiter
        self._tenant_of_uid = tenant_of_uid
        self._refusal = refusal
        self._options = options
        # The protocol's state machine. It reads into one small buffer, so a silent peer costs no other memory.
        self._connection = Connection(
            Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES, buffer_bytes=READ_BUFFER_BYTES
        )
        self._transport: asyncio.Transport | None = None
        self._dispatcher: RequestDispatcher | None = None
        self._deadlines = Deadlines()
        self._is_peer_slow = False
        self._is_queued = False
        # A request that is served in steps, and its next step.
        self._in_steps: tuple[Request, Step] | None = None

    # --- asyncio.BufferedProtocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Identify the peer, and admit or refuse it."""
        # A stream server always passes a stream transport. uvloop's do not derive from asyncio's, so a cast is needed.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self._is_identified:
            self.peer = identify(transport.get_extra_info("socket"), self._tenant_of_uid)
        # Make the dispatcher before any refusal, because `connection_lost` closes it.
        self._dispatcher = RequestDispatcher(self._runtime, self, self._driver)
        refusal = self._refusal
        if refusal is None and self._limiter is not None:
            refusal = self._limiter.admit(self)
        if refusal is not None:
            self.close_with(refusal)
            return
        failure = Failure(Status.INVALID_REQUEST, f"no HELLO arrived within {HELLO_TIMEOUT_S:g} s")
        self._deadlines.start(AwaitedStep.HELLO, HELLO_TIMEOUT_S, self.close_with, failure)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes. The broker never holds more than this buffer for a peer."""
        return self._connection.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Serve the requests in the buffer when the fair queue allows it."""
        self._connection.reader.buffer_updated(nbytes)
        self._enqueue()

    def eof_received(self) -> bool:
        """Close the connection, because the peer sends no more. Its open requests are abandoned."""
        self._connection.receive_eof()
        self._serve_requests()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Release everything that the connection held."""
        self._transport = None
        self._in_steps = None
        self._deadlines.stop_all()
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None
        if self._limiter is not None:
            self._limiter.release(self)

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read, and disconnect it if that lasts."""
        if self._transport is not None:
            self._is_peer_slow = True
            self._transport.pause_reading()
            self._deadlines.start(AwaitedStep.READING, STALL_TIMEOUT_S, self._transport.abort)

    def resume_writing(self) -> None:
        """The peer reads again: stop its time limit, and read its requests again."""
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
        return self._transport is None

    def answer(self, request: Request, result: Body | Failure) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if isinstance(result, Failure):
            self._transport.write(self._connection.send_failure(request, result))
            return
        try:
            self._transport.write(self._connection.send_reply(request, result))
        # The reply violates the protocol, which is a bug of the daemon. The client must still get a reply, so report
        # that.
        except LocalProtocolError:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"answering {request.op.name}")
            failure = Failure(
                Status.INTERNAL,
                "the daemon's answer can't be encoded, which is a bug of the daemon",
                hint="Report it to the operator.",
            )
            self._transport.write(self._connection.send_failure(request, failure))

    def send_event(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        """Send the peer an event. Returns False if it has too many unread bytes; True if the connection is closed."""
        if self._transport is None or self._transport.is_closing():
            return True
        # The subscription keeps the latest event, and counts those that the peer missed.
        if self._transport.get_write_buffer_size() > EVENT_BUFFER_BYTES:
            return False
        self._transport.write(self._connection.send_event(subscription, event))
        return True

    def close_with(self, failure: Failure) -> None:
        """Send the peer the reason as a GOODBYE, and close once it is written, at the latest after LINGER_S."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._connection.send_goodbye(failure))
            self._close()

    def turn_away(self, failure: Failure) -> None:
        """Refuse the peer's open requests, send it the reason, and close. Its leases continue."""
        # Answer each open request before the connection ends.
        if self._dispatcher is not None:
            self._dispatcher.give_up(failure)
        self.close_with(failure)

    def _close(self) -> None:
        if self._transport is not None:
            self._deadlines.start(AwaitedStep.CLOSE, LINGER_S, self._transport.abort)
            self._transport.close()

    # --- requests ---

    def serve_next(self) -> None:
        """Serve the requests that follow an ATTACH or GPU_SUBMIT that was refused.

        No worker has taken the connection.
        """
        self._serve_requests()

    def serve_in_steps(self, request: Request, step: Step) -> None:
        """Serve a request in steps; see `ClientConnection`."""
        self._in_steps = request, step

    def _enqueue(self) -> None:
        if self._is_queued:
            return
        self._is_queued = True
        # The fair queue serves the tenants in turn, so a busy connection can't delay other tenants' connections.
        self._runtime.fair_queue.enqueue(self.peer.tenant, self._serve_quantum)
        if self._is_queued and self._transport is not None:
            # While the connection is queued, leave further bytes in the kernel, which then slows the peer down.
            self._transport.pause_reading()

    def _serve_quantum(self) -> None:
        self._is_queued = False
        self._serve_requests()

    def _serve_requests(self) -> None:
        # Serve a bounded number of requests, then go to the back of the queue.
        for _ in range(REQUESTS_PER_QUANTUM):
            # A request with several steps is served to its end first, so that a peer can have only one such request in
            # progress.
            if self._in_steps is not None:
                if not self._serve_step(*self._in_steps):
                    break
                self._in_steps = None
            # The rest of the bytes belongs to the worker that takes over the connection.
            if self._connection.state is State.ATTACHING:
                self._stop_reading_behind_attach()
                return
            event = self._connection.next_event()
            # No complete frame is left: continue reading, and bound the time for the rest of a frame.
            if event is None:
                self.resume_reading()
                self._watch_for_stall()
                return
            self._on_event(event)
            if self._runtime.fair_queue.is_quantum_over:
                break
        self._enqueue()

    def _on_event(self, event: Event) -> None:
        # The protocol's state machine turns the bytes into a request, a bad request with its answer, or an end.
        match event:
            case Request():
                self._on_request(event)
            case Rejected() if not event.is_quiet and self._transport is not None and self.is_open:
                self._transport.write(self._connection.send_failure(event, event.failure))
                if event.op == Opcode.HELLO and self._connection.state is State.OPENING:
                    # A peer that sends a malformed HELLO will not send a better one.
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
        # The protocol admits no other request before HELLO, so it needs no check here.
        if request.op is Opcode.HELLO:
            self._deadlines.stop(AwaitedStep.HELLO)
            self.answer(request, HelloReply(0, AGENT, MAX_PAYLOAD_BYTES, self._options))
            return
        try:
            self._dispatcher.dispatch(request)
        except Exception as error:
            self._answer_fault(request, error)

    def _serve_step(self, request: Request, step: Step) -> bool:
        """Return whether the request is complete."""
        try:
            return step()
        except Exception as error:
            self._answer_fault(request, error)
            return True

    def _answer_fault(self, request: Request, error: Exception) -> None:
        """Log a bug of ours, or a lack of memory, and answer the request, unless it was answered before."""
        if isinstance(error, MemoryError):
            self._runtime.memory_reserve.release()
        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"serving {request.op.name}")
        with contextlib.suppress(LocalProtocolError):
            self.answer(request, FAULT)

    def _watch_for_stall(self) -> None:
        # Bound only a frame that has begun: between two requests a peer may be silent for any time.
        if self._connection.reader.is_mid_frame and self._connection.state is State.CONTROL:
            failure = Failure(
                Status.INVALID_REQUEST, f"the rest of a frame did not arrive within {STALL_TIMEOUT_S:g} s"
            )
            self._deadlines.start(AwaitedStep.FRAME, STALL_TIMEOUT_S, self.close_with, failure)
        else:
            self._deadlines.stop(AwaitedStep.FRAME)

    def _stop_reading_behind_attach(self) -> None:
        """Stop reading after an ATTACH or GPU_SUBMIT if bytes after it have already arrived."""
        reader = self._connection.reader
        if self._transport is not None and not self._transport.is_closing() and reader.start != reader.end:
            self._transport.pause_reading()

    # --- hand-over ---

    def resume_reading(self) -> None:
        """Read from the socket again, unless the peer itself does not read."""
        if self._transport is not None and not self._is_peer_slow and not self._transport.is_closing():
            self._transport.resume_reading()

    def when_written(self, action: Callable[[], None]) -> None:
        """Stop reading, and call `action` once the peer has read everything written, or the connection is closed.

        A peer that has not read within STALL_TIMEOUT_S is disconnected.
        """
        self._call_when_written(action, 0)

    def _call_when_written(self, action: Callable[[], None], polls: int) -> None:
        if self._transport is None or self._transport.is_closing():
            action()
            return
        # The worker must get the bytes after the request, so this process must not read them.
        self._transport.pause_reading()
        # This process's buffer still has replies, which the worker does not have. Poll until they are sent.
        if self._transport.get_write_buffer_size():
            self._deadlines.start(AwaitedStep.ATTACH, STALL_TIMEOUT_S, self._transport.abort)
            pause_s = back_off_s(polls, WRITTEN_POLL_S, MAX_WRITTEN_POLL_S)
            asyncio.get_running_loop().call_later(pause_s, self._call_when_written, action, polls + 1)
            return
        self._deadlines.stop(AwaitedStep.ATTACH)
        action()

    def hand_over(self, pass_on: Callable[[int, bytes], bool]) -> bool:
        """Pass the socket to another process, and end the connection here.

        Args:
            pass_on: Gets a descriptor of the socket, which stays open only during the call, and the bytes that were
              read after the current request. Returns whether the socket was taken.

        Returns:
            Whether the socket was taken. If not, or if no descriptor was left, the connection continues here.
        """
        if self._transport is None:
            return False
        try:
            # Pass a duplicate, so that closing the transport later does not close the passed descriptor.
            fd = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:
            # No descriptor is left.
            return False
        try:
            rest = self._connection.take_rest()
            if not pass_on(fd, rest):
                # The worker did not take it. Put the bytes back, so that the requests in them are served here.
                self._connection.receive_data(rest)
                return False
        finally:
            os.close(fd)
        # This closes only this process's descriptor; the connection continues in the worker.
        self._transport.abort()
        return True


class AwaitedStep(Enum):
    """A step that a peer must take within a time limit."""

    HELLO = auto()
    FRAME = auto()
    READING = auto()
    ATTACH = auto()
    CLOSE = auto()


class Deadlines:
    """The time limits of one connection, with a timer for each."""

    def __init__(self) -> None:
        self._handles: dict[AwaitedStep, asyncio.TimerHandle] = {}

    def start(self, step: AwaitedStep, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` in `delay_s` unless it is stopped. A timer that is already running is not restarted."""
        # Do not restart a running timer: a peer that sends one byte at a time must not extend its limit.
        if step not in self._handles:
            self._handles[step] = asyncio.get_running_loop().call_later(delay_s, action, *arguments)

    def stop(self, step: AwaitedStep) -> None:
        """Stop the timer of a step, because the peer took the step or no longer has to."""
        if (handle := self._handles.pop(step, None)) is not None:
            handle.cancel()

    def stop_all(self) -> None:
        """Stop every timer when the connection is gone."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
