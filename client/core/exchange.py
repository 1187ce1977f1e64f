"""The basic procedures: send, receive, ask, connect. All others are built from them."""

import contextlib
import errno
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple, cast

from gpulease.client.core.clean_ups import CLEAN_UP_S, CleanUp
from gpulease.client.core.waits import Deadline, Procedure, Sleep, Wait
from gpulease.client.errors import Disconnected, GpuLeaseError, error_of
from gpulease.client.transport.channel import Channel, connect_error, resolve, start_connecting
from gpulease.client.transport.credentials import SecuredAddress
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Failure, Opcode, Waiting
from gpulease.protocol.address import Address, TcpAddress, UnixAddress
from gpulease.protocol.limits import USUAL_MAX_WAIT_S
from gpulease.protocol.messages import Body, Hello, HelloReply, Ping
from gpulease.protocol.opcodes import HelloRequestOption
from gpulease.protocol.operations import Trait, having
from gpulease.protocol.primitives import Tlv

CONNECT_LIMIT_S: Final = 10.0
"""Longest time for a connect and its HELLO, in seconds. A daemon answers within milliseconds, except on a host that
swaps."""

CONTROL_REPLY_LIMIT_S: Final = 30.0
"""Longest time for a control request, in seconds, in addition to its own wait for room. To free a lease, the daemon
waits until a process is reaped and its memory is proved free, which takes well under a second. After this time, the
daemon is assumed to hang."""

PING_AFTER_S: Final = 2.0
"""Time without a reply after which the client pings the daemon, in seconds, for a request that makes something or waits
for room. A grant without a wait takes far less, so hardly any acquire pings."""

LATE_S: Final = 1.0
"""If this process notices a deadline more than this many seconds late, the delay is its own: it was stopped (job
control, a debugger), or its host is overloaded. The peer may have answered long ago."""

MAX_EXTENSIONS: Final = 3
"""Maximum number of times that a deadline is extended because it was noticed late. If this process notices every
deadline late (on an overloaded host, or in an event loop that other work blocks for seconds), this bounds the wait for
a daemon that hangs."""

CONNECT_RETRY_S: Final = 0.01
"""Pause before another connect to a Unix socket with a full backlog, in seconds."""

AGENT: Final = "gpulease-python/0.1"
"""Name of this client in HELLO."""

_HTTP: Final = (
    "an HTTP server answers there, not gpuleased",
    "Is this the port of the web page? Use an address in the daemon's setting `listen`",
)

OTHER_PEERS: Final = {
    # A TLS alert (RFC 8446, section 5.1).
    b"\x15\x03": ("it speaks TLS", "Write the address as tls:HOST:PORT"),
    b"HTTP/": _HTTP,
    # Some servers answer a request that they can't parse with the body alone, as in HTTP/0.9.
    b"<": _HTTP,
    b"SSH-": ("an SSH server answers there, not gpuleased", "Use the port on which gpuleased listens"),
}
"""Error texts for an address at which another kind of server answers, by the first bytes of its answer to a plain
frame."""

Clock = Callable[[], float]


_AWAIT_SESSION: Final = having(Trait.AWAITS_SESSION)


def control_limit_s(op: Opcode) -> float:
    """Return the longest time for a control request other than an acquire, in seconds."""
    return CONTROL_REPLY_LIMIT_S + (USUAL_MAX_WAIT_S if op in _AWAIT_SESSION else 0.0)


class FixedDeadline:
    """A deadline a fixed number of seconds from now. Raises Disconnected once it has passed.

    If this process was stopped meanwhile, the peer gets up to CONNECT_LIMIT_S again, at most MAX_EXTENSIONS times: the
    peer may have been waiting for this process to read or to send.
    """

    def __init__(self, seconds: float, operation: str, address: Address, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._seconds, self._operation, self._address = seconds, operation, address
        self._extensions = 0

    def remaining_s(self) -> float:
        """Seconds left; negative after the deadline."""
        return self._end - self._clock()

    def raise_or_extend(self) -> Procedure[None]:
        """Raise Disconnected, whose text names the daemon and the time, unless this process was late."""
        if self.remaining_s() < -LATE_S and self._extensions < MAX_EXTENSIONS:
            self._extensions += 1
            self._end = self._clock() + min(self._seconds, CONNECT_LIMIT_S)
            return
        other = "" if isinstance(self._address, UnixAddress) else ", or another program listens there"
        raise Disconnected(
            f"{self._operation}: the daemon at {self._address} did not answer within {self._seconds:g} s",
            f"The daemon hangs, or its host is overloaded: see its log{other}",
        )
        yield  # makes this a procedure, as `Deadline` says


def send(channel: Channel, parts: Iterable[bytes | memoryview], deadline: Deadline) -> Procedure[None]:
    """Write buffers one after another without joining them. Raises LinkEnded, or an error of the deadline.

    If `parts` is a deque of memoryviews, the sent bytes are removed from it.

    Returns when the kernel, or the ring, has all of the bytes. If the call is interrupted after some of them were sent,
    the stream is broken and is closed.
    """
    unsent = parts if isinstance(parts, deque) else deque(memoryview(part) for part in parts if len(part))
    channel.finish()
    channel.sending = unsent, sum(map(len, unsent))
    try:
        # push() sends what the channel accepts and removes it from `unsent`. Wait for room for the remaining bytes, and
        # receive while waiting: a peer that waits for us to read would never make room.
        while unsent or channel.has_unsent:
            if channel.link.end is not None:
                raise LinkEnded(channel.link.end)
            if not channel.push(unsent) and channel.link.end is None:
                yield from _wait(channel, deadline, for_room=True)
                channel.pump()
    except BaseException:
        channel.finish()  # if this is interrupted as well, the next user of the channel does it
        raise
    channel.sending = None


def receive(channel: Channel, request_id: int, deadline: Deadline) -> Procedure[Body | Failure]:
    """Wait for the result of a request. Raises LinkEnded, or an error of the deadline."""
    take = channel.link.take
    while (result := take(request_id)) is None:
        # Most replies come while spinning. If none has come by then, wait by the driver, which costs a system call and
        # perhaps a task switch.
        if not channel.spin():
            yield from _wait(channel, deadline, for_room=False)
            channel.pump()
    return result


def receive_from_living(
    channel: Channel, request_id: int, deadline: Deadline, *, pong_limit_s: float, clock: Clock = time.monotonic
) -> Procedure[Body | Failure]:
    """Wait for the result of a control request that may take long, as long as the daemon answers PING.

    Args:
        channel: The connection.
        request_id: The request.
        deadline: The deadline of the request itself.
        pong_limit_s: Longest time for the answer to a PING, in seconds.
        clock: The monotonic time in seconds.

    Raises LinkEnded, an error of the deadline, or Disconnected if a PING is not answered in time: then the daemon
    hangs, or its host went down without closing the connection.
    """
    take, operation = channel.link.take, operation_of(Opcode.PING)
    # The end of the silence after which a PING is sent; while a PING is in flight, the deadline of its answer.
    ping_id, silence = 0, FixedDeadline(PING_AFTER_S, operation, channel.address, clock)
    while (result := take(request_id)) is None:
        # The daemon answered the PING: wait for PING_AFTER_S again.
        if ping_id and take(ping_id) is not None:
            ping_id, silence = 0, FixedDeadline(PING_AFTER_S, operation, channel.address, clock)
        # Five cases, in this order: a deadline has passed, but bytes have arrived, so check again; the request's own
        # deadline has passed; neither has passed, so wait; the PING was not answered in time; no PING was sent yet, so
        # send one.
        if min(deadline.remaining_s(), silence.remaining_s()) <= 0 and channel.pump():
            continue
        if deadline.remaining_s() <= 0:
            yield from deadline.raise_or_extend()
        elif silence.remaining_s() > 0:
            if not channel.spin():
                yield Wait(channel, False, min(deadline.remaining_s(), silence.remaining_s()))
                channel.pump()
        elif ping_id:
            yield from silence.raise_or_extend()
        else:
            silence = FixedDeadline(pong_limit_s, operation, channel.address, clock)
            ping_id, frame = channel.link.request(Opcode.PING, Ping(0))
            yield from send(channel, (frame,), silence)
    return result


def polls_for(address: Address, waiting: Waiting | None) -> bool:
    """Return whether to poll for a reply that takes about a millisecond (`Channel.is_polled`).

    A daemon on another host answers too late for that, and a tenant that chose BLOCK asked to sleep.
    """
    return isinstance(address, UnixAddress) and waiting is not Waiting.BLOCK


def receive_reply(
    channel: Channel, op: Opcode, request_id: int, deadline: Deadline, clock: Clock = time.monotonic
) -> Procedure[Body | Failure]:
    """Wait for the result of a control request. Raises the errors of `receive` or `receive_from_living`."""
    if op not in _AWAIT_SESSION:
        return (yield from receive(channel, request_id, deadline))
    return (yield from receive_from_living(channel, request_id, deadline, pong_limit_s=CONNECT_LIMIT_S, clock=clock))


def wait_for_room(channel: Channel, deadline: Deadline) -> Procedure[None]:
    """Wait until the channel may accept more. Raises LinkEnded, or an error of the deadline."""
    if channel.link.end is None:
        yield from _wait(channel, deadline, for_room=True)
        channel.pump()
    if channel.link.end is not None:
        raise LinkEnded(channel.link.end)


def _wait(channel: Channel, deadline: Deadline, *, for_room: bool) -> Procedure[None]:
    remaining_s = deadline.remaining_s()
    # An interrupted call may already have received the bytes that this one waits for.
    if channel.unfinished is not None:
        channel.finish_step()
    elif remaining_s > 0:
        yield Wait(channel, for_room, remaining_s)
    # The deadline has passed, but this process may have been stopped since it last received. Take the bytes that have
    # arrived, or the connection's end: a ring reads its socket only after `doze`.
    else:
        channel.doze(for_room=for_room)
        if not channel.pump():
            yield from deadline.raise_or_extend()


def answer_to(channel: Channel, op: Opcode, body: Body, deadline: Deadline, session_id: int = 0) -> Procedure[Any]:
    """Send a request. Returns the reply's body, or the Failure of a refusal. Raises the errors of `receive_reply`."""
    # Number the request, send it, then wait. If the reply comes during the send, the link keeps it.
    request_id, frame = channel.link.request(op, body, session_id)
    yield from send(channel, (frame,), deadline)
    return (yield from receive_reply(channel, op, request_id, deadline))


class GrantCleanUp(CleanUp):
    """Frees the lease that the first request of a connection may have made, if the call is interrupted.

    Attributes:
        channel: The connection, once the request was built.
        number: The request's id.
        made: The reply's body, once it has come.
    """

    def __init__(self, undo: "Callable[[Any], First]", channel: Channel | None = None, made: Any = None) -> None:
        """Prepare the clean-up of a request.

        Args:
            undo: Makes the request that frees the lease in a reply's body.
            channel: The connection, if it exists already.
            made: The reply's body, if the lease exists already.
        """
        self.channel = channel
        self.number = 0
        self.made = made
        self._undo = undo

    def _give_back(self) -> Procedure[None]:
        channel = self.channel
        if channel is None:
            return
        try:
            with contextlib.suppress(LinkEnded, GpuLeaseError):
                if self.made is None:
                    yield from self._take_late(channel)
                # The client's half of the connection is closed, so free the lease over another connection.
                if self.made is not None:
                    freeing = self._undo(self.made)
                    yield from ask_once(channel.address, freeing.op, freeing.body, CLEAN_UP_S, CLEAN_UP_S)
        finally:
            channel.close()
            channel.link.notifications.clear()

    def _take_late(self, channel: Channel) -> Procedure[None]:
        # Step 1: shut down the client's half. When the daemon has read the end of the stream, it makes nothing more,
        # and closes its own half.
        with contextlib.suppress(OSError):
            channel.sock.shutdown(socket.SHUT_WR)
        # Step 2: wait for the reply. If the daemon made a lease, the reply comes before it closes its half.
        deadline = FixedDeadline(CLEAN_UP_S, "give up", channel.address)
        reply = yield from receive(channel, self.number, deadline)
        if not isinstance(reply, Failure):
            self.made = reply


def ask(channel: Channel, op: Opcode, body: Body, deadline: Deadline) -> Procedure[Any]:
    """Send a request; returns the reply's body. Raises a refusal's error, LinkEnded, or an error of the deadline."""
    result = yield from answer_to(channel, op, body, deadline)
    if isinstance(result, Failure):
        raise error_of(result, operation_of(op))
    return result


@cache
def operation_of(op: Opcode) -> str:
    """Return the name of an operation for messages: the opcode's name, in lower case."""
    return op.name.lower()


def disconnected(ended: LinkEnded, channel: Channel, operation: str) -> GpuLeaseError:
    """Return the error for a control connection that ended: the goodbye's own error, or Disconnected."""
    # Prefer the peer's own reason. Otherwise use the failure's hint, or the guess that no daemon is running.
    if channel.link.is_end_explained:
        return error_of(ended.failure, operation)
    own_hint = ended.failure.hint
    hint = f"{own_hint} The daemon was asked at {channel.address}" if own_hint else _is_it_running(channel.address)
    return error_of(Failure(ended.failure.status, ended.failure.message, hint), operation)


class First(NamedTuple):
    """The first request of a connection, sent together with HELLO to save a round trip.

    Attributes:
        op: Its operation, a control request.
        body: Its body.
        session_id: The session to which it applies.
        takes_descriptors: Whether to accept descriptors that come with its reply.
        clean_up: Records the object that the request may make, if it must be released after an interrupt.
        is_polled: Whether to poll for the replies before sleeping (`Channel.is_polled`).
    """

    op: Opcode
    body: Body
    session_id: int = 0
    takes_descriptors: bool = False
    clean_up: GrantCleanUp | None = None
    is_polled: bool = False


def dial(address: Address, deadline: Deadline) -> Procedure[tuple[Channel, HelloReply]]:
    """Connect and send HELLO. Raises Disconnected, Untrusted, Busy, Unsupported, Denied or InvalidRequest."""
    channel, hello, _ = yield from _dial(address, deadline, None)
    return channel, hello


def dial_for(address: Address, deadline: Deadline, first: First) -> Procedure[tuple[Channel, HelloReply, int]]:
    """Connect, and send HELLO and another request together. Also returns the request id, for `receive`.

    This does not wait for the request's reply, which has a deadline of its own. Raises the errors of `dial`.
    """
    return (yield from _dial(address, deadline, first))


def _dial(address: Address, deadline: Deadline, first: First | None) -> Procedure[tuple[Channel, HelloReply, int]]:
    # Step 1: connect the transport: TCP or a Unix socket, with TLS if the address asks for it.
    channel = yield from _connect(address, deadline)
    if isinstance(address, SecuredAddress):
        channel = yield from _secure(channel, address, deadline)
    # Step 2: send HELLO and the first request in one flight, which saves a round trip. Wait only for HELLO's reply.
    first_id = 0
    try:
        # On TCP, another server may be listening. The line end makes a server that expects lines answer at once.
        options = (Tlv(HelloRequestOption.LINE_END, b"\r\n\r\n"),) if isinstance(address, TcpAddress) else ()
        hello_id, frame = channel.link.request(Opcode.HELLO, Hello(0, AGENT, options))
        if first is not None:
            channel.takes_descriptors, channel.is_polled = first.takes_descriptors, first.is_polled
            clean_up = first.clean_up
            creates = clean_up is not None
            first_id, first_frame = channel.link.request_behind_hello(
                first.op, first.body, first.session_id, creates=creates
            )
            if clean_up is not None:
                clean_up.channel, clean_up.number = channel, first_id
            frame += first_frame
        yield from send(channel, (frame,), deadline)
        hello = yield from _receive_hello(channel, hello_id, deadline)
        if isinstance(hello, Failure):
            raise error_of(hello, "hello")
    except LinkEnded as ended:
        channel.close()
        _check_peer(channel)
        raise disconnected(ended, channel, "hello") from None
    except GpuLeaseError:
        channel.close()
        raise
    except BaseException:
        # The call was interrupted. If a request in flight may make something, the connection is still needed
        # (`GrantCleanUp`).
        if first is None or first.clean_up is None:
            channel.close()
        raise
    return channel, cast(HelloReply, hello), first_id


def _receive_hello(channel: Channel, hello_id: int, deadline: Deadline) -> Procedure[Body | Failure]:
    """Wait for the answer to HELLO.

    Raises the errors of `receive`, or Disconnected as soon as another program answers.
    """
    # Check the first bytes after each receive: otherwise an HTTP or SSH server would only cause a timeout.
    while (hello := channel.link.take(hello_id)) is None:
        yield from _wait(channel, deadline, for_room=False)
        channel.pump()
        _check_peer(channel)
    return hello


def _check_peer(channel: Channel) -> None:
    """Raise Disconnected if the first received bytes are those of a known program other than gpuleased."""
    received = channel.link.strange_bytes()
    for begin, (problem, hint) in OTHER_PEERS.items():
        if received.startswith(begin):
            raise Disconnected(f"{channel.address}: {problem}", hint)


def _connect(address: Address, deadline: Deadline) -> Procedure[Channel]:
    try:
        candidates = resolve(address)
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from None
    code = 0
    # Try every address of the name. A Unix socket with a full backlog answers EAGAIN: try again until the deadline.
    for family, sockaddr in candidates:
        channel, code = start_connecting(family, sockaddr, address)
        try:
            # The daemon's backlog is full: close the socket and try again after a pause.
            while code == errno.EAGAIN and deadline.remaining_s() > 0:
                channel.sock.close()
                yield Sleep(CONNECT_RETRY_S)
                channel, code = start_connecting(family, sockaddr, address)
            # The connect is in progress (EINPROGRESS): the socket becomes writable when it has succeeded or failed.
            if code == errno.EINPROGRESS:
                # Check at least once, even if the time is over: this process may have been stopped in between.
                is_done = yield Wait(channel, True, max(0.0, deadline.remaining_s()))
                while not is_done and deadline.remaining_s() > 0:
                    is_done = yield Wait(channel, True, deadline.remaining_s())
                code = connect_error(channel) if is_done else errno.ETIMEDOUT
        except BaseException:
            channel.close()
            raise
        if not code:
            return channel
        channel.close()
    # A missing permission has its own advice; for every other error, ask whether the daemon is running.
    if code == errno.EACCES:
        hint = (
            "Ask the operator to give this user access: the socket's folder, group and mode determine who may "
            "write to it"
        )
        raise Disconnected(f"can't connect to {address}: {os.strerror(code)}", hint)
    raise _unreachable(address, _connect_problem(address, code))


def _connect_problem(address: Address, code: int) -> str:
    """Return the system's error text, or a better one if the path is not a socket."""
    # ECONNREFUSED means that no process listens, or that the path is not a socket. stat() distinguishes the two.
    if code == errno.ECONNREFUSED and isinstance(address, UnixAddress):
        with contextlib.suppress(OSError):
            mode = os.stat(address.path).st_mode
            if not stat.S_ISSOCK(mode):
                return "this path is a folder, not a socket" if stat.S_ISDIR(mode) else "that is not a socket"
    return os.strerror(code)


def _secure(channel: Channel, address: SecuredAddress, deadline: Deadline) -> Procedure[Channel]:
    # Import this only here, because ssl takes a third of this package's import time.
    from gpulease.client.transport.tls import TlsChannel, TlsEnded, TlsStream, context_of

    try:
        # Do the handshake: send and receive records until both sides have completed it, or the time is over.
        stream = TlsStream(channel.sock, context_of(address.files), address)
        tls_channel = TlsChannel(stream, address)
        while not stream.shake_hands():
            yield from _wait(tls_channel, deadline, for_room=stream.has_unsent)
    except TlsEnded as ended:
        channel.close()
        raise ended.error from None
    except BaseException:
        channel.close()
        raise
    return tls_channel


def _unreachable(address: Address, reason: str) -> Disconnected:
    return Disconnected(f"can't connect to {address}: {reason}", _is_it_running(address))


def _is_it_running(address: Address) -> str:
    return f"Is gpuleased running? It should listen on {address}; GPULEASE_ADDRESS or the builder names another address"


def ask_once(
    address: Address, op: Opcode, body: Body, limit_s: float | None = None, connect_limit_s: float = CONNECT_LIMIT_S
) -> Procedure[Any]:
    """Send one control request over a separate connection; return the reply's body.

    Args:
        address: The daemon's address.
        op: The operation.
        body: The request's body.
        limit_s: Longest wait for the reply, in seconds; None for `control_limit_s` of the operation.
        connect_limit_s: Longest time for the connect and HELLO, in seconds.

    Raises the errors of `dial`, the refusal's error, or Disconnected.
    """
    operation = operation_of(op)
    deadline = FixedDeadline(connect_limit_s, "connect", address)
    channel, _, number = yield from dial_for(address, deadline, First(op, body))
    try:
        # The reply has its own deadline: the connect's is short, but a control request may take longer.
        reply_deadline = FixedDeadline(control_limit_s(op) if limit_s is None else limit_s, operation, address)
        result = yield from receive_reply(channel, op, number, reply_deadline)
        if isinstance(result, Failure):
            raise error_of(result, operation)
        return result
    except LinkEnded as ended:
        raise disconnected(ended, channel, operation) from None
    finally:
        channel.close()
