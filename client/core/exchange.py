"""The basic procedures: send, receive, ask, connect. Every other procedure is made of them."""

import contextlib
import errno
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, cast

from gpulease.client.core.clean_ups import CLEAN_UP_S, clean_up
from gpulease.client.core.waits import Limit, Procedure, Sleep, Wait
from gpulease.client.errors import Disconnected, GpuLeaseError, error_of
from gpulease.client.transport.channel import Channel, connect_error, resolve, start_connecting
from gpulease.client.transport.credentials import SecuredAddress
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.address import Address, TcpAddress, UnixAddress
from gpulease.protocol.messages import Body, Hello, HelloReply, Ping
from gpulease.protocol.opcodes import HelloRequestOption
from gpulease.protocol.primitives import Tlv

CONNECT_LIMIT_S: Final = 10.0
"""Longest a connect and its HELLO may take. A daemon answers in milliseconds; ten seconds is a host that swaps."""

CONTROL_REPLY_LIMIT_S: Final = 30.0
"""Longest a control request may take, besides the wait it asks for. Freeing a lease waits for a process to be reaped
and its memory to be seen free, which is well under a second; past this the daemon hangs."""

PING_AFTER_S: Final = 2.0
"""Silence behind a request that makes something, or waits for room, after which a daemon is asked whether it lives. Far
longer than a grant takes that need not wait, so that hardly any acquire pings."""

CONNECT_RETRY_S: Final = 0.01
"""Pause before trying again a Unix socket whose queue of pending connections is full."""

AGENT: Final = "gpulease-python/0.1"
"""Name of this client in HELLO."""

_HTTP: Final = "an HTTP server answers there, not gpuleased", "Is it the port of the web page? Name one of `listen`"

OTHER_PEERS: Final = {
    # An alert (RFC 8446, 5.1).
    b"\x15\x03": ("it speaks TLS", "Write the address as tls:HOST:PORT"),
    b"HTTP/": _HTTP,
    # Some answer a request that they can't read with the body alone, as HTTP/0.9 has it.
    b"<": _HTTP,
    b"SSH-": ("an SSH server answers there, not gpuleased", "Name the port that gpuleased listens at"),
}
"""What is wrong with an address, and what to do, by the first bytes that plain frames are answered with there."""

_INTERRUPTED: Final = Failure(
    Status.DISCONNECTED, "an earlier operation was interrupted in the middle of a request", "Open another connection"
)

Clock = Callable[[], float]


class TimeLimit:
    """Ends a fixed number of seconds from now, with Disconnected."""

    def __init__(self, seconds: float, doing: str, address: Address, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._why = f"{doing}: the daemon at {address} did not answer within {seconds:g} s"
        other = "" if isinstance(address, UnixAddress) else ", or another program listens there"
        self._hint = f"The daemon hangs or its host is overloaded: see its log{other}"

    def remaining_s(self) -> float:
        """Seconds left."""
        return self._end - self._clock()

    def over(self) -> Procedure[None]:
        """Raises Disconnected."""
        raise Disconnected(self._why, self._hint)
        yield  # makes this a procedure, as `Limit` says


def send(channel: Channel, parts: Iterable[bytes | memoryview], limit: Limit) -> Procedure[None]:
    """Write buffers, one after the other and without joining them. Raises LinkEnded, or what the limit raises.

    This returns when the kernel, or the ring, has all of the bytes. If it is interrupted after some of them went, the
    stream can't be used any more and is broken off.
    """
    rest = deque(memoryview(part) for part in parts if len(part))
    whole_bytes = sum(map(len, rest))
    try:
        while rest or channel.has_unsent:
            if channel.link.end is not None:
                raise LinkEnded(channel.link.end)
            if not channel.push(rest) and channel.link.end is None:
                yield from _wait(channel, limit, for_room=True)
                channel.pump()
    except BaseException:
        if channel.is_torn or 0 < sum(map(len, rest)) < whole_bytes:
            channel.link.break_off(_INTERRUPTED, is_explained=True)
        raise


def receive(channel: Channel, request_id: int, limit: Limit) -> Procedure[Body | Failure]:
    """Wait for the result of a request. Raises LinkEnded, or what the limit raises."""
    take = channel.link.take
    while (result := take(request_id)) is None:
        if not channel.spin():
            yield from _wait(channel, limit, for_room=False)
            channel.pump()
    return result


def receive_from_living(
    channel: Channel, request_id: int, limit: Limit, *, pong_limit_s: float, clock: Clock = time.monotonic
) -> Procedure[Body | Failure]:
    """Wait for the result of a control request that may take long, while the daemon answers PING beside it.

    Raises LinkEnded, what the limit raises, or Disconnected if a PING is not answered within `pong_limit_s`: the daemon
    hangs, or its host is gone without a word.
    """
    take, doing = channel.link.take, doing_of(Opcode.PING)
    ping_id, quiet = 0, TimeLimit(PING_AFTER_S, doing, channel.address, clock)
    while (result := take(request_id)) is None:
        if ping_id and take(ping_id) is not None:
            ping_id, quiet = 0, TimeLimit(PING_AFTER_S, doing, channel.address, clock)
        if limit.remaining_s() <= 0:
            yield from limit.over()
        elif quiet.remaining_s() > 0:
            yield Wait(channel, False, min(limit.remaining_s(), quiet.remaining_s()))
            channel.pump()
        elif ping_id:
            yield from quiet.over()
        else:
            quiet = TimeLimit(pong_limit_s, doing, channel.address, clock)
            ping_id, frame = channel.link.request(Opcode.PING, Ping(0))
            yield from send(channel, (frame,), quiet)
    return result


def wait_for_room(channel: Channel, limit: Limit) -> Procedure[None]:
    """Wait until the channel may take more. Raises LinkEnded, or what the limit raises."""
    if channel.link.end is None:
        yield from _wait(channel, limit, for_room=True)
        channel.pump()
    if channel.link.end is not None:
        raise LinkEnded(channel.link.end)


def _wait(channel: Channel, limit: Limit, *, for_room: bool) -> Procedure[None]:
    remaining_s = limit.remaining_s()
    if remaining_s > 0:
        yield Wait(channel, for_room, remaining_s)
    else:
        yield from limit.over()


def answer_to(channel: Channel, op: Opcode, body: Body, limit: Limit, session_id: int = 0) -> Procedure[Any]:
    """Send a request; returns the reply's body, or the Failure of a refusal. Raises what `receive` raises."""
    request_id, frame = channel.link.request(op, body, session_id)
    yield from send(channel, (frame,), limit)
    return (yield from receive(channel, request_id, limit))


Undo = Callable[[Any], "First | None"]
"""By a reply's body: the request that gives back what it brings; None if there is nothing."""


def give_up(channel: Channel, request_id: int, undo: Undo) -> Procedure[None]:
    """End a connection whose request makes something and was interrupted. Raises nothing but another interrupt.

    This side's half is closed, so the daemon makes nothing from then on, and closes its half. If it had made something,
    its reply comes before that, and what it brings is given back over another connection.
    """
    return clean_up(_give_up(channel, request_id, undo))


def _give_up(channel: Channel, request_id: int, undo: Undo) -> Procedure[None]:
    limit, link = TimeLimit(CLEAN_UP_S, "give up", channel.address), channel.link
    try:
        with contextlib.suppress(OSError):
            channel.sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(LinkEnded, GpuLeaseError):
            reply = yield from receive(channel, request_id, limit)
            again = None if isinstance(reply, Failure) else undo(reply)
            if again is not None:
                yield from ask_once(channel.address, again.op, again.body, CLEAN_UP_S, CLEAN_UP_S)
    finally:
        channel.close()
        link.told.clear()


def ask(channel: Channel, op: Opcode, body: Body, limit: Limit) -> Procedure[Any]:
    """Send a request; returns the reply's body. Raises a refusal's error, LinkEnded, or what the limit raises."""
    result = yield from answer_to(channel, op, body, limit)
    if isinstance(result, Failure):
        raise error_of(result, doing_of(op))
    return result


def doing_of(op: Opcode) -> str:
    """The name of an operation in messages."""
    return op.name.lower()


def disconnected(ended: LinkEnded, channel: Channel, doing: str) -> GpuLeaseError:
    """The error of a control connection that ended: the goodbye's, or Disconnected."""
    if channel.link.is_end_explained:
        return error_of(ended.failure, doing)
    own = ended.failure.hint
    hint = f"{own} It was asked at {channel.address}" if own else _is_it_running(channel.address)
    return error_of(Failure(ended.failure.status, ended.failure.message, hint), doing)


@contextlib.contextmanager
def closing_on_failure(channel: Channel, doing: str) -> Iterator[None]:
    """Close the channel if the block fails. Raises the error of a control connection where the stream ended."""
    try:
        yield
    except LinkEnded as ended:
        channel.close()
        raise disconnected(ended, channel, doing) from None
    except BaseException:
        channel.close()
        raise


class First(NamedTuple):
    """The first request of a connection, sent in one flight with HELLO.

    Attributes:
        op: Its operation, a control request.
        body: Its body.
        session_id: The session that it is for.
        takes_descriptors: Whether descriptors that come beside its reply are wanted.
        undo: Gives back what the reply brings, if the caller is interrupted.
    """

    op: Opcode
    body: Body
    session_id: int = 0
    takes_descriptors: bool = False
    undo: Undo | None = None


def dial(address: Address, limit: Limit) -> Procedure[tuple[Channel, HelloReply]]:
    """Connect and say HELLO. Raises Disconnected, Untrusted, Busy, Unsupported, Denied or InvalidRequest."""
    channel, hello, _ = yield from _dial(address, limit, None)
    return channel, hello


def dial_for(address: Address, limit: Limit, first: First) -> Procedure[tuple[Channel, HelloReply, int]]:
    """Connect, say HELLO and send a request behind it; returns its number too, for `receive`. Raises what `dial` does.

    The request's reply is not waited for: it has a limit of its own.
    """
    return (yield from _dial(address, limit, first))


def _dial(address: Address, limit: Limit, first: First | None) -> Procedure[tuple[Channel, HelloReply, int]]:
    channel = yield from _connect(address, limit)
    if isinstance(address, SecuredAddress):
        channel = yield from _secure(channel, address, limit)
    first_id = 0
    try:
        options = (Tlv(HelloRequestOption.LINE_END, b"\r\n\r\n"),) if isinstance(address, TcpAddress) else ()
        hello_id, frame = channel.link.request(Opcode.HELLO, Hello(0, AGENT, options))
        if first is not None:
            channel.takes_descriptors = first.takes_descriptors
            makes = first.undo is not None
            first_id, behind = channel.link.request_behind_hello(first.op, first.body, first.session_id, makes=makes)
            frame += behind
        yield from send(channel, (frame,), limit)
        hello = yield from _receive_hello(channel, hello_id, limit)
        if isinstance(hello, Failure):
            raise error_of(hello, "hello")
    except LinkEnded as ended:
        channel.close()
        _check_peer(channel)
        raise disconnected(ended, channel, "hello") from None
    except (GpuLeaseError, GeneratorExit):
        channel.close()
        raise
    except BaseException:
        if first is not None and first.undo is not None and first_id:
            yield from give_up(channel, first_id, first.undo)
        channel.close()
        raise
    return channel, cast(HelloReply, hello), first_id


def _receive_hello(channel: Channel, hello_id: int, limit: Limit) -> Procedure[Body | Failure]:
    """Wait for the answer to HELLO. Raises as `receive` does, or Disconnected as soon as another program answers."""
    while (hello := channel.link.take(hello_id)) is None:
        yield from _wait(channel, limit, for_room=False)
        channel.pump()
        _check_peer(channel)
    return hello


def _check_peer(channel: Channel) -> None:
    """Raises Disconnected if the first bytes that came are those of a known program that is no gpuleased."""
    came = channel.link.strange_bytes()
    for begin, (what, hint) in OTHER_PEERS.items():
        if came.startswith(begin):
            raise Disconnected(f"{channel.address}: {what}", hint)


def _connect(address: Address, limit: Limit) -> Procedure[Channel]:
    try:
        ways = resolve(address)
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from None
    code = 0
    for family, where in ways:
        channel, code = start_connecting(family, where, address)
        try:
            while code == errno.EAGAIN and limit.remaining_s() > 0:
                channel.sock.close()
                yield Sleep(CONNECT_RETRY_S)
                channel, code = start_connecting(family, where, address)
            if code == errno.EINPROGRESS:
                is_done = False
                while not is_done and limit.remaining_s() > 0:
                    is_done = yield Wait(channel, True, limit.remaining_s())
                code = connect_error(channel) if is_done else errno.ETIMEDOUT
        except BaseException:
            channel.close()
            raise
        if not code:
            return channel
        channel.close()
    if code == errno.EACCES:
        hint = (
            "Ask the operator to give this user access: the socket's folder, group and mode determine who may "
            "write to it"
        )
        raise Disconnected(f"can't connect to {address}: {os.strerror(code)}", hint)
    raise _unreachable(address, _why(address, code))


def _why(address: Address, code: int) -> str:
    """The system's error text, or more: it refuses a folder in the same words as a socket that nobody listens at."""
    if code == errno.ECONNREFUSED and isinstance(address, UnixAddress):
        with contextlib.suppress(OSError):
            mode = os.stat(address.path).st_mode
            if not stat.S_ISSOCK(mode):
                return "that is a folder, not a socket" if stat.S_ISDIR(mode) else "that is not a socket"
    return os.strerror(code)


def _secure(channel: Channel, address: SecuredAddress, limit: Limit) -> Procedure[Channel]:
    # Only here: ssl takes a third of all the time it takes to import this package.
    from gpulease.client.transport.tls import TlsChannel, TlsEnded, TlsStream, context_of

    try:
        stream = TlsStream(channel.sock, context_of(address.files), address)
        through = TlsChannel(stream, address)
        while not stream.shake_hands():
            yield from _wait(through, limit, for_room=stream.has_unsent)
    except TlsEnded as ended:
        channel.close()
        raise ended.error from None
    except BaseException:
        channel.close()
        raise
    return through


def _unreachable(address: Address, why: str) -> Disconnected:
    return Disconnected(f"can't connect to {address}: {why}", _is_it_running(address))


def _is_it_running(address: Address) -> str:
    return f"Is gpuleased running? It should listen on {address}; GPULEASE_ADDRESS or the builder names another address"


def ask_once(
    address: Address, op: Opcode, body: Body, reply_limit_s: float, connect_limit_s: float = CONNECT_LIMIT_S
) -> Procedure[Any]:
    """Ask one control request over a connection of its own; returns the reply's body."""
    doing = doing_of(op)
    limit = TimeLimit(connect_limit_s, "connect", address)
    channel, _, number = yield from dial_for(address, limit, First(op, body))
    try:
        result = yield from receive(channel, number, TimeLimit(reply_limit_s, doing, address))
        if isinstance(result, Failure):
            raise error_of(result, doing)
        return result
    except LinkEnded as ended:
        raise disconnected(ended, channel, doing) from None
    finally:
        channel.close()
