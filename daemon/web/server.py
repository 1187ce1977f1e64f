"""HTTP on the sockets that the broker listens on: uvicorn, with a bound on each thing that a peer can leave undone."""

import asyncio
import socket
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpulease.daemon.web.guard import App

MAX_CONNECTIONS: Final = 128
"""Connections at a time. For one more the one gives way that has asked nothing for the longest, or else the one that
reads nothing of its answer: a local user who opens as many as there may be keeps nobody out."""

MAX_HEAD_BYTES: Final = 16 << 10
"""Of a request's line and headers. Stops a peer that never ends them."""

HEAD_S: Final = 10.0
"""From a connection's begin, or from its last answer, to the end of the next request. Stops a peer that sends a byte a
second, or nothing."""

KEEP_ALIVE_S: Final = 5
"""How long a connection that asks nothing more stays open."""

STALL_S: Final = 10.0
"""For a peer to read some of what it was sent, once the kernel and the transport hold no more for it."""

BUFFER_BYTES: Final = 256 << 10
"""Of an answer that a peer has not read: a whole state of 200 leases, so that one look is never cut in two."""


class BoundedHttp(H11Protocol):
    """One connection."""

    _idle_since_s = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody came."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._idle_since_s = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            self._who_gives_way().transport.abort()
        self._watch()

    def _who_gives_way(self) -> "BoundedHttp":
        others = [one for one in self.connections if isinstance(one, BoundedHttp) and one is not self]
        idle = [one for one in others if not one.is_answering]
        stalled = [one for one in others if one._stall is not None]
        return min(idle or stalled or [self], key=lambda one: one._idle_since_s)

    @property
    def is_answering(self) -> bool:
        """Whether it has asked something that was not answered in full."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Some of a request came."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A request was answered.

        Whoever has sent more meanwhile is answered no more of it: no browser does so, nor Prometheus, and a connection
        that always has something to answer would never give way.
        """
        if self.conn.trailing_data[0]:
            self.transport.close()
            self._lingering = self._lingering or self.loop.call_later(STALL_S, self.transport.abort)
        super().on_response_complete()
        self._idle_since_s = self.loop.time()
        self._watch()

    def pause_writing(self) -> None:
        """The peer does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The peer has read."""
        super().resume_writing()
        self._stall = _cancel(self._stall)

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        for handle in (self._stall, self._deadline, self._lingering):
            _cancel(handle)
        self._stall = self._deadline = self._lingering = None
        super().connection_lost(error)

    def _watch(self) -> None:
        if self.is_answering or self.transport.is_closing():
            self._deadline = _cancel(self._deadline)
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)


def _cancel(handle: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if handle is not None:
        handle.cancel()
    return None


class Server(uvicorn.Server):
    """One that says when it has begun.

    Attributes:
        begun: Set once it serves.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin."""
        await super().startup(sockets)
        self.begun.set()


def server_of(app: App) -> Server:
    """A server, all of it imported."""
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        loop="asyncio",
        ws="none",
        lifespan="off",
        # What a peer can cause is no line in the daemon's log.
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
