"""Runs an ASGI application on uvicorn: the listening socket, the guard in front of it, signals and shutdown."""

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import h11
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from gpulease.client.errors import InvalidRequest
from gpulease.client.http.application import problem_response
from gpulease.client.http.problems import Problem
from gpulease.client.http.unix_path import BACKLOG, bound_to_path, keep_path, remove_path
from gpulease.protocol.address import TcpAddress, TlsAddress, UnixAddress, parse_address
from gpulease.protocol.http_origin import (
    MISDIRECTED,
    READING,
    KnownHosts,
    headers_of,
    loopback_hosts,
    parse_host_names,
    refusal,
)

MAX_CONNECTIONS: Final = 512
"""Maximum number of simultaneous connections. Requests over additional connections get 503. Without a limit, a peer
could use up all descriptors of the process.
"""

FULL: Final = Problem(
    503, "too_many_connections", "The server has too many connections. Send the request again.", retry_after_s=1.0
)

MAX_HEAD_BYTES: Final = 16 << 10
"""Maximum number of bytes of a request's line and headers, so that a peer that never ends them can't fill memory."""

KEEP_ALIVE_S: Final = 5
"""Seconds that an idle connection stays open after a reply."""

HEAD_LIMIT_S: Final = 10.0
"""Longest time, in seconds, for a connection's next request line and headers to arrive, before it is closed. Without
this limit, a peer could hold all MAX_CONNECTIONS by sending nothing, or a byte at a time: uvicorn's own limit begins
only after the first reply."""

LINGER_S: Final = 5.0
"""Longest time, in seconds, for which the rest of a refused request is read and dropped. If a socket is closed while
data of its peer is unread, the kernel resets the connection, and most clients then miss the reply, because they send
their whole body before they read."""


@contextmanager
def listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """Listen at `tcp:127.0.0.1:PORT` or `unix:PATH`. Yields the socket and its URL. Raises InvalidRequest.

    Only addresses that other hosts can't reach are accepted, because HTTP here is not encrypted, and because the
    gateway and the model server do not authenticate their clients.
    """
    try:
        parsed = parse_address(address)
    except ValueError as error:
        raise InvalidRequest(f"--listen: {error}") from None
    if isinstance(parsed, TlsAddress):
        raise InvalidRequest(f"--listen {parsed}: the server uses plain HTTP", "Write tcp:127.0.0.1:PORT or unix:PATH")
    sock = _bound(parsed)
    try:
        yield sock, _url(sock, parsed)
    finally:
        if isinstance(parsed, UnixAddress):
            # Remove the path before the socket is closed, so that it never leads to a socket that refuses connections.
            remove_path(parsed.path)
        sock.close()


def _bound(address: UnixAddress | TcpAddress) -> socket.socket:
    try:
        if isinstance(address, UnixAddress):
            return bound_to_path(address.path)
        _check_loopback(address)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit TCP_NODELAY. Without it, the second of two writes waits 40 ms for a delayed ACK.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        # socket.create_server() adds the address to its message; this message names it already.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        todo = "End the program that listens there, or use another --listen" if error.errno == errno.EADDRINUSE else ""
        raise InvalidRequest(f"can't listen at {address}: {reason}", todo) from None


def _check_loopback(address: TcpAddress) -> None:
    try:
        # Accept only names and addresses of this host. Any other name could resolve to another host.
        is_loopback = address.host == "localhost" or ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise InvalidRequest(
            f"{address}: the server uses plain HTTP, so it must listen where only this host can connect",
            "Write tcp:127.0.0.1:PORT or unix:PATH, and put a proxy in front of it that uses TLS and authenticates"
            " callers",
        )


def _url(sock: socket.socket, address: UnixAddress | TcpAddress) -> str:
    if isinstance(address, UnixAddress):
        return f"http+unix://{address.path}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _LingeringTransport:
    """A connection's transport that, when it is closed, first drops what the peer still sends, for at most LINGER_S.

    It has all other attributes of the transport.

    Attributes:
        is_lingering: Whether it was closed but still reads.
    """

    def __init__(self, transport: asyncio.Transport, may_linger: Callable[[], bool]) -> None:
        self._transport, self._may_linger = transport, may_linger
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._may_linger():
            self._transport.close()
            return
        try:
            # The peer receives the end of the reply at once. It ends the connection by closing its own side.
            if not self._transport.get_write_buffer_size():
                self._transport.write_eof()
        except OSError:
            # The peer has reset the connection.
            self._transport.close()
            return
        self.is_lingering = True
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)


class TimelyProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, but it closes a connection whose next request's head takes longer than HEAD_LIMIT_S.

    Bytes that are not HTTP end the connection, too, whether after a reply, during one, or in a request's body. If the
    peer may still be sending a request when the connection is closed, the rest is dropped, so that the reply arrives.

    Attributes:
        refuse: Makes the reply to a request that is not passed to the application.
    """

    refuse: "Refuse"
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's is
        """Begin to wait for the first request's head."""
        super().connection_made(_LingeringTransport(transport, self._may_linger))  # type: ignore[arg-type]  # it is one
        self._await_head_after(None)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def _may_linger(self) -> bool:
        # A connection beyond the limit must not keep its descriptor.
        is_sending = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        return is_sending and len(self.connections) < MAX_CONNECTIONS

    def on_response_complete(self) -> None:
        """Begin to wait for the next request's head, which may have arrived already."""
        # Remember the request to which this reply belongs, before uvicorn may begin the next one.
        answered = self.cycle
        super().on_response_complete()
        self._await_head_after(answered)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP. A reply in progress is cut off, and its application can no longer send."""
        if self.cycle is not None and not self.cycle.response_complete:
            # Tell the application whose reply is cut off that its peer is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # h11 raises if a second reply is sent, which uvicorn would log with a traceback.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = "The request is not valid HTTP/1.1, or its line and headers are too long."
            # The bytes received contain no known path.
            reply = self.refuse(_NO_REQUEST, Problem(400, "malformed_request", text))
            head = h11.Response(status_code=reply.status_code, headers=reply.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head_after(self, answered: RequestResponseCycle | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        # One timer per connection. uvicorn sets `cycle` when a request's head is complete.
        self._head_timer = self.loop.call_later(HEAD_LIMIT_S, self._close_if_no_head, answered)

    def _close_if_no_head(self, answered: RequestResponseCycle | None) -> None:
        # If `cycle` still belongs to the answered request, or is None, the next head has not arrived.
        if self.cycle is answered:
            self.transport.close()


class KeepingServer(uvicorn.Server):
    """uvicorn's server, which also recreates its Unix socket when the socket's file was removed."""

    keeps_path = True
    _keeping: tuple[asyncio.Task[None], ...] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and begin to watch the sockets' paths."""
        await super().startup(sockets)
        if self.keeps_path:
            self._keeping = tuple(asyncio.create_task(keep_path(sock, self._serve_also)) for sock in sockets or ())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop watching the paths, then stop the server."""
        # Stop watching first, so that no socket is recreated during the shutdown.
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await super().shutdown(sockets)

    async def _serve_also(self, sock: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            kind = self.config.http_protocol_class
            return kind(self.config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]

        # uvicorn closes all of `servers` at its end.
        self.servers.append(await asyncio.get_running_loop().create_server(protocol, sock=sock, backlog=BACKLOG))


class GuardedApp:
    """An ASGI application behind the checks of `protocol.http_origin` and a limit of connections.

    The checks refuse requests of other sites' pages in a browser on this host (CSRF, DNS rebinding).

    Args:
        app: The application that answers requests that pass.
        hosts: The host names that the server answers to.
        is_full: Returns whether the server has too many connections.
        refuse: Makes the reply to a request that does not pass.
    """

    def __init__(self, app: Any, hosts: KnownHosts, is_full: Callable[[], bool], refuse: "Refuse") -> None:
        self._app, self._known, self._is_full, self._refuse = app, hosts, is_full, refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            await self._refuse(scope, problem)(scope, receive, send)
            return
        # If the peer disconnects while the application reads its body, no reply is possible.
        with suppress(ClientDisconnect):
            await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> Problem | None:
        if self._is_full():
            return FULL
        # Requests that change something are checked more strictly than those that only read.
        is_act = scope["method"] not in READING
        # Check every request, whatever its path is, before the application gets it.
        refused = refusal(headers_of(scope["headers"]), self._known, is_act=is_act)
        if refused is None:
            return None
        status, text = refused
        return Problem(status, {400: "invalid_request", MISDIRECTED: "unknown_host"}.get(status, "foreign_page"), text)


Refuse = Callable[[Any, Problem], Response]
"""Makes the reply to a request that the guard refuses, from its ASGI scope. It must close the connection, because the
request's body was not read."""


_NO_REQUEST: Final = {"type": "http", "path": "", "headers": []}
"""The ASGI scope of a request that could not be read."""


def refuse_as_problem(_: Any, problem: Problem) -> Response:
    """Return the reply to a refused request as a problem (RFC 9457)."""
    return problem_response(problem, is_body_unread=True)


def known_hosts(sock: socket.socket, host_names: Iterable[str], origins: Iterable[str] = ()) -> KnownHosts:
    """Return the host names that a server at `sock` answers to, and the pages that may call it. Raises InvalidRequest.

    Args:
        sock: Where the server listens.
        host_names: The operator's further names.
        origins: Origins of other sites' pages; "*" for all.
    """
    try:
        named = parse_host_names(host_names)
    except ValueError as error:
        raise InvalidRequest(f"--host-name: {error}") from None
    # A Unix socket has no host name, so only the names that the operator gave count.
    own = None if sock.family == socket.AF_UNIX else loopback_hosts(sock.getsockname()[0])
    return KnownHosts(own, named, "--host-name", frozenset(origin.encode("ascii") for origin in origins))


def serve(app: Any, sock: socket.socket, *, hosts: KnownHosts, stop_s: float) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Then accept no more requests, and give the others `stop_s` seconds."""
    asyncio.run(serve_within(app, sock, hosts=hosts, stop_s=stop_s))


def log_to_stderr() -> None:
    """Write this process's log lines to stderr. `serve_within` does this, too; call this first for earlier lines."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)


async def serve_within(
    app: Any,
    sock: socket.socket,
    *,
    hosts: KnownHosts,
    stop_s: float,
    began: Callable[[uvicorn.Server], None] = lambda _: None,
    keeps_path: bool = True,
    refuse: Refuse = refuse_as_problem,
) -> None:
    """Serve like `serve`, but in the running event loop.

    Args:
        app: The application.
        sock: The listening socket.
        hosts: The host names that the server answers to.
        stop_s: Seconds for requests to finish when the server stops.
        began: Called with the server, which stops when its `should_exit` is set.
        keeps_path: Whether to recreate the file of a Unix socket after it was removed. Only one of several processes
            that accept from one socket may do that.
        refuse: Makes the reply to a request that is refused before the application gets it.

    """
    log_to_stderr()
    # uvicorn warns of requests that are not HTTP and of upgrades, with which a peer could fill the log.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)

    class Protocol(TimelyProtocol):
        """A connection of this server, with its replies to requests that it refuses."""

    Protocol.refuse = staticmethod(refuse)
    # No access log, no websockets and no header that names the server; the limits are those of this module.
    config = uvicorn.Config(
        GuardedApp(app, hosts, lambda: len(server.server_state.connections) >= MAX_CONNECTIONS, refuse),
        http=Protocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(stop_s),
    )
    server = KeepingServer(config)
    server.keeps_path = keeps_path

    def stop(*_: object) -> None:
        server.should_exit = True

    if threading.current_thread() is threading.main_thread():
        # While uvicorn runs, its own handlers are installed. When it ends, it raises the signal again, for these.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        # A closed terminal sends SIGHUP, which would end the process before it frees its leases. Servers that reload
        # their settings have a handler already; under nohup the signal is ignored.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, stop)
    began(server)
    await server.serve(sockets=[sock])
