"""Who may connect: a count of connections, in all and per tenant."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from gpulease.daemon.broker.collecting import Trimmer
from gpulease.daemon.broker.control import ControlConnection
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

OPERATOR_CONNECTIONS: Final = 32
"""Connections beyond the limit that only operators get, so that they can look and revoke when tenants fill it."""


class Doorkeeper:
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
        """Wait until nobody is inside."""
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
