"""Run an ASGI application on uvicorn: its listening socket, the guard before it, its signals and its end."""

import asyncio
import errno
import ipaddress
import json
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
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from gpulease.client.errors import InvalidRequest
from gpulease.client.http.problems import MEDIA_TYPE, Problem
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
"""Most connections at a time; uvicorn answers one more with 503. Stops a peer from taking all descriptors of the
process."""

MAX_HEAD_BYTES: Final = 16 << 10
"""Most bytes of a request's line and headers. Stops a peer that never ends them."""

KEEP_ALIVE_S: Final = 5
"""Seconds that an idle connection stays open."""

HEAD_LIMIT_S: Final = 10.0
"""Seconds for a connection's next line and headers to arrive; then it is closed. Stops a peer from holding all of
MAX_CONNECTIONS by sending nothing, or a byte at a time: uvicorn's own limit begins after the first answer."""


@contextmanager
def listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """Listen at `tcp:127.0.0.1:PORT` or `unix:PATH`; yields the socket and its URL. Raises InvalidRequest.

    Only addresses that this host alone can reach are taken, because clients are not authenticated.
    """
    try:
        where = parse_address(address)
    except ValueError as error:
        raise InvalidRequest(f"--listen: {error}") from None
    if isinstance(where, TlsAddress):
        raise InvalidRequest(f"--listen {where}: a gateway speaks plain HTTP", "Write tcp:127.0.0.1:PORT or unix:PATH")
    sock = _bound(where)
    try:
        yield sock, _url(sock, where)
    finally:
        if isinstance(where, UnixAddress):
            remove_path(where.path)
        sock.close()


def _bound(where: UnixAddress | TcpAddress) -> socket.socket:
    try:
        if isinstance(where, UnixAddress):
            return bound_to_path(where.path)
        _check_loopback(where)
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        sock = socket.create_server((where.host, where.port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit TCP_NODELAY. Without it, the second of two writes waits 40 ms for a delayed ACK.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        # socket.create_server() adds the address to its message; this message names it already.
        about = (error.strerror or str(error)).partition(" (while attempting")[0]
        todo = (
            "Stop the program that listens there, or give another --listen" if error.errno == errno.EADDRINUSE else ""
        )
        raise InvalidRequest(f"can't listen at {where}: {about}", todo) from None


def _check_loopback(where: TcpAddress) -> None:
    try:
        is_loopback = where.host == "localhost" or ipaddress.ip_address(where.host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise InvalidRequest(
            f"{where}: a gateway does not authenticate its callers, so it must listen where only this host can connect",
            "Write tcp:127.0.0.1:PORT or unix:PATH, and put a proxy in front of it that authenticates callers",
        )


def _url(sock: socket.socket, where: UnixAddress | TcpAddress) -> str:
    if isinstance(where, UnixAddress):
        return f"http+unix://{where.path}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class TimelyProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which closes a connection if its next request does not begin in HEAD_LIMIT_S.

    What is not HTTP ends the connection likewise: behind an answer, within one, or within a request's body.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's is
        """Wait for the first request."""
        super().connection_made(transport)
        self._await_head_behind(None)

    def on_response_complete(self) -> None:
        """Wait for the next request, which may be here already."""
        answered = self.cycle
        super().on_response_complete()
        self._await_head_behind(answered)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; if an answer is under way, it ends there, and its application sends nothing more."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            # h11 would refuse to send a second answer, and uvicorn log that with a traceback.
            self.transport.close()

    def _await_head_behind(self, answered: RequestResponseCycle | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_LIMIT_S, self._close_behind, answered)

    def _close_behind(self, answered: RequestResponseCycle | None) -> None:
        if self.cycle is answered:
            self.transport.close()


class KeepingServer(uvicorn.Server):
    """uvicorn's server, which makes a Unix socket again when its file was removed."""

    _keeping: tuple[asyncio.Task[None], ...] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and watch the sockets' paths from then on."""
        await super().startup(sockets)
        self._keeping = tuple(asyncio.create_task(keep_path(sock, self._serve_also)) for sock in sockets or ())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await super().shutdown(sockets)

    async def _serve_also(self, sock: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            return TimelyProtocol(self.config, self.server_state, self.lifespan.state)

        # It is closed with the servers of the start.
        self.servers.append(await asyncio.get_running_loop().create_server(protocol, sock=sock, backlog=BACKLOG))


class GuardedApp:
    """An ASGI application behind the checks of `protocol.http_origin`.

    A foreign site's page in a browser of this host gets nothing.

    Args:
        app: The application that answers requests which pass.
        known: The host names that the server answers to.
    """

    def __init__(self, app: Any, known: KnownHosts) -> None:
        self._app, self._known = app, known

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "http":
            is_act = scope["method"] not in READING
            refused = refusal(headers_of(scope["headers"]), self._known, is_act=is_act)
            if refused is not None:
                await _send_refusal(send, *refused)
                return
        # The peer hung up while the application read its body: there is no one to answer.
        with suppress(ClientDisconnect):
            await self._app(scope, receive, send)


async def _send_refusal(send: Any, status: int, text: str) -> None:
    code = {400: "invalid_request", MISDIRECTED: "unknown_host"}.get(status, "foreign_page")
    body = json.dumps(Problem(status, code, text).body("")).encode()
    head = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def known_hosts(sock: socket.socket, host_names: Iterable[str]) -> KnownHosts:
    """Return the host names that a server at `sock` answers to. Raises InvalidRequest."""
    try:
        named = parse_host_names(host_names)
    except ValueError as error:
        raise InvalidRequest(f"--host-name: {error}") from None
    own = None if sock.family == socket.AF_UNIX else loopback_hosts(sock.getsockname()[0])
    return KnownHosts(own, named, "--host-name")


def serve(app: Any, sock: socket.socket, *, known: KnownHosts, stop_s: float) -> None:
    """Serve until SIGINT or SIGTERM; then accept nothing more, finish for up to `stop_s` seconds, and return."""
    asyncio.run(serve_within(app, sock, known=known, stop_s=stop_s))


async def serve_within(
    app: Any,
    sock: socket.socket,
    *,
    known: KnownHosts,
    stop_s: float,
    began: Callable[[uvicorn.Server], None] = lambda _: None,
) -> None:
    """Serve as `serve` does, in the running event loop, which has what the application needs.

    Args:
        app: The application.
        sock: Where it listens.
        known: The host names that it answers to.
        stop_s: Seconds in which requests are finished.
        began: Takes the server, which ends once its `should_exit` is true.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # Its warnings are of requests that are not HTTP and of upgrades: a peer could fill the log with them.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    config = uvicorn.Config(
        GuardedApp(app, known),
        http=TimelyProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(stop_s),
    )
    server = KeepingServer(config)

    def stop(*_: object) -> None:
        server.should_exit = True

    if threading.current_thread() is threading.main_thread():
        # uvicorn has its own handlers while it runs. Afterwards it raises the signal again, for these.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
    began(server)
    await server.serve(sockets=[sock])
