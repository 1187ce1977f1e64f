"""HTTP on the sockets that the broker opened: uvicorn, with limits for peers that do not finish their requests."""

import asyncio
import socket
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpulease.daemon.web.guard import App

MAX_CONNECTIONS: Final = 128
"""Maximum number of open connections. A further connection evicts the one that has been idle for the longest, or else
one that does not read its response. So a local user who opens all connections can't lock others out."""

MAX_HEAD_BYTES: Final = 16 << 10
"""Maximum number of bytes of a request's line and headers together."""

HEAD_S: Final = 10.0
"""Maximum time in seconds from a connection's start, or from its last response, to the end of the next request. It ends
connections that send a byte a second, or nothing."""

KEEP_ALIVE_S: Final = 5
"""Seconds for which an idle connection stays open."""

STALL_S: Final = 10.0
"""Seconds within which a peer must read part of its response once the kernel's and the transport's buffers are full."""

BUFFER_BYTES: Final = 256 << 10
"""Maximum number of bytes of a response in the transport's buffer: room for a state with 200 leases."""


class BoundedHttp(H11Protocol):
    """An HTTP connection with deadlines for its peer."""

    _idle_since_s = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, evict another if there are too many, and start its deadline."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._idle_since_s = self.loop.time()
        # The set already contains this connection.
        if len(self.connections) > MAX_CONNECTIONS:
            self._eviction_victim().transport.abort()
        self._update_deadline()

    def _eviction_victim(self) -> "BoundedHttp":
        others = [other for other in self.connections if isinstance(other, BoundedHttp) and other is not self]
        # Prefer a connection without a request; then one that does not read its answer. A connection that is being
        # served is never closed.
        idle = [other for other in others if not other.is_answering]
        stalled = [other for other in others if other._stall is not None]
        return min(idle or stalled or [self], key=lambda other: other._idle_since_s)

    @property
    def is_answering(self) -> bool:
        """Whether a request of this connection is not answered in full yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        """Start the deadline for the next request.

        If the peer has already sent a further request (HTTP pipelining), the connection is closed. Otherwise a peer
        could keep its connection busy at all times, and such a connection is never evicted. Browsers and Prometheus do
        not pipeline requests.
        """
        # The transport closes after it has sent the response.
        if self.conn.trailing_data[0]:
            self.transport.close()
            self._lingering = self._lingering or self.loop.call_later(STALL_S, self.transport.abort)
        super().on_response_complete()
        self._idle_since_s = self.loop.time()
        self._update_deadline()

    def pause_writing(self) -> None:
        """Start the deadline for a peer that does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = _cancel(self._stall)

    def connection_lost(self, error: Exception | None) -> None:
        for handle in (self._stall, self._deadline, self._lingering):
            _cancel(handle)
        self._stall = self._deadline = self._lingering = None
        super().connection_lost(error)

    def _update_deadline(self) -> None:
        # There is no deadline while the peer waits for the server's response.
        if self.is_answering or self.transport.is_closing():
            self._deadline = _cancel(self._deadline)
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)


def _cancel(handle: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if handle is not None:
        handle.cancel()
    return None


class Server(uvicorn.Server):
    """A uvicorn server with an event for its start.

    Attributes:
        listening: Set once it serves.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def server_of(app: App) -> Server:
    """Return a server for the application, with all its modules imported."""
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        loop="asyncio",
        ws="none",
        lifespan="off",
        # Log only errors, so that a peer can't fill the daemon's log.
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return Server(config)
