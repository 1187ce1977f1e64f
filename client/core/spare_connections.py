"""Control connections of freed leases, kept for later acquires from the same daemon."""

import weakref
from collections import deque
from typing import Final

from gpulease.client.fork_guard import register
from gpulease.client.transport.channel import Channel
from gpulease.protocol.messages import HelloReply

MAX_SPARE: Final = 16
"""Maximum number of connections that are kept. Each counts towards the daemon's limit for the tenant."""


class SpareConnections:
    """Connections to one daemon that no lease uses, for programs that acquire one lease after another.

    An acquire then needs neither a connect nor HELLO. Threads may share the object. Dropping the last reference closes
    all connections.
    """

    def __init__(self) -> None:
        self._spare: deque[tuple[Channel, HelloReply]] = deque()
        self._closing = weakref.finalize(self, _close_all, self._spare)
        register(self)

    def give(self, channel: Channel, hello: HelloReply) -> None:
        """Keep the connection of a freed lease. Close it instead if MAX_SPARE are already kept."""
        if len(self._spare) >= MAX_SPARE:
            channel.close()
        else:
            self._spare.append((channel, hello))

    def take(self) -> tuple[Channel, HelloReply] | None:
        """Return a connection that looks alive, and the reply to its HELLO; None if there is none."""
        while True:
            try:
                # Take the newest, because the daemon is least likely to have closed it.
                channel, hello = self._spare.pop()
            except IndexError:
                return None
            # No reply is due on a spare connection, so any received bytes mean that the daemon is ending it.
            if not channel.pump():
                return channel, hello
            channel.close()

    def close(self) -> None:
        _close_all(self._spare)

    def disown(self) -> None:
        """Leave the connections to the parent process (`fork_guard.Inherited`); each channel does so itself."""
        self._spare.clear()


def _close_all(spare: deque[tuple[Channel, HelloReply]]) -> None:
    while spare:
        channel, _ = spare.pop()
        channel.close()
