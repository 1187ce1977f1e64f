"""Limits on control connections: how many may be open in all, and how many of one tenant."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.host.memory_cleanup import Trimmer
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

OPERATOR_CONNECTIONS: Final = 32
"""Number of connections beyond the limit that only operators may open, so that they can inspect and revoke leases even
if tenants use up the daemon's connections."""


class LimitedConnection(Protocol):
    """The part of a control connection that the limiter uses."""

    @property
    def peer(self) -> Peer: ...

    def close_with(self, failure: Failure) -> None:
        """Send the peer the reason as a GOODBYE, and close. Its open requests get no answer."""

    def turn_away(self, failure: Failure) -> None:
        """Refuse the peer's open requests, send it the reason, and close."""


class ConnectionLimiter:
    """Counts control connections. A session's connection no longer counts once its worker has taken it over.

    Args:
        has_memory: Returns whether the broker has memory for one more tenant's connection.
    """

    def __init__(
        self, max_connections: int, max_connections_per_tenant: int, has_memory: Callable[[], bool] = lambda: True
    ) -> None:
        self._max_connections = max_connections
        self._max_per_tenant = max_connections_per_tenant
        self._has_memory = has_memory
        self._admitted: set[LimitedConnection] = set()
        self._by_tenant: Counter[str] = Counter()
        self._one_closed = asyncio.Event()
        self._trimmer = Trimmer()

    def admit(self, connection: LimitedConnection) -> Failure | None:
        """Admit a connection and count it, or return why it exceeds a limit."""
        peer = connection.peer
        # Check the node's limit, then the tenant's. The message names the limit that is reached.
        limit = self._max_connections + (OPERATOR_CONNECTIONS if peer.is_operator else 0)
        if len(self._admitted) >= limit:
            return _busy(f"{len(self._admitted)} control connections are open, the maximum of this daemon")
        if not peer.is_operator and self._by_tenant[peer.tenant] >= self._max_per_tenant:
            return _busy(
                f"tenant {peer.tenant} has {self._max_per_tenant} control connections open, the maximum for one tenant"
            )
        # Operators are exempt: they may have to end leases precisely because memory is short.
        if not peer.is_operator and not self._has_memory():
            return Failure(Status.BUSY, "the daemon is out of memory", hint="Try again later.")
        self._admitted.add(connection)
        self._by_tenant[peer.tenant] += 1
        return None

    def release(self, connection: LimitedConnection) -> None:
        """Stop counting a closed connection. A refused connection was never counted against the limits."""
        # Count refused connections as well, because they also had buffers.
        self._trimmer.count_closed()
        if connection in self._admitted:
            self._admitted.discard(connection)
            self._by_tenant[connection.peer.tenant] -= 1
            if not self._by_tenant[connection.peer.tenant]:
                del self._by_tenant[connection.peer.tenant]
            self._one_closed.set()

    def set_limits(self, max_connections: int, max_connections_per_tenant: int) -> None:
        """Change the limits for connections that arrive from now on."""
        self._max_connections, self._max_per_tenant = max_connections, max_connections_per_tenant

    async def wait_until_empty(self) -> None:
        """Wait until every admitted connection has closed."""
        while self._admitted:
            self._one_closed.clear()
            await self._one_closed.wait()

    def turn_away_all(self, failure: Failure) -> None:
        """Refuse all open requests, send every peer the reason, and close."""
        for connection in list(self._admitted):
            connection.turn_away(failure)

    def close_all_with(self, failure: Failure) -> None:
        for connection in list(self._admitted):
            connection.close_with(failure)


def _busy(message: str) -> Failure:
    return Failure(Status.BUSY, message, hint="Close connections that you do not need, or try again later.")
