"""Fair sharing of a process's only thread: a round-robin queue of connections.

The broker shares its thread among tenants, and a fleet's directory among the sources of its connections.

Each round of the event loop serves every tenant once, however many connections it has. A tenant's first connection with
a request is served at once. Its other connections wait in the tenant's queue, one round each. A tenant that floods the
daemon through all of its connections delays other tenants by only one quantum per round.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

QUANTUM_NS: Final = 1_000_000
"""Time for which a connection is served before its next request must wait. Most requests take 30 us; those that check a
signature take 200 us."""

Serve = Callable[[], None]
"""Serves one connection for one quantum."""


class FairQueue:
    """Decides which connection is served next.

    Attributes:
        quantum_ends_ns: When the connection that is served now has used its quantum.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        # Tenants that were served in this round, each with the connections that wait for the next round.
        self._queues: dict[Hashable, deque[Serve]] = {}
        self._is_round_scheduled = False
        self.quantum_ends_ns = 0

    @property
    def is_quantum_over(self) -> bool:
        """Whether the connection that is served now has used its quantum."""
        return self._clock_ns() >= self.quantum_ends_ns

    def enqueue(self, tenant: Hashable, serve: Serve) -> None:
        """Serve a connection of the tenant: at once if it is the tenant's first in this round, else in a later round.

        A connection must not be enqueued again before it was served.
        """
        # Each tenant that was served in this round has a queue, perhaps empty, where its other connections wait.
        queue = self._queues.get(tenant)
        if queue is not None:
            queue.append(serve)
            return
        self._queues[tenant] = deque()
        self._schedule_round()
        self._serve(serve)

    def _schedule_round(self) -> None:
        if not self._is_round_scheduled:
            self._is_round_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        # Serve every tenant once. A tenant without a waiting connection leaves the round: its next request is served at
        # once.
        self._is_round_scheduled = False
        for tenant, queue in list(self._queues.items()):
            if not queue:
                del self._queues[tenant]
                continue
            # At most one more round is scheduled, however many tenants wait.
            self._schedule_round()
            self._serve(queue.popleft())

    def _serve(self, serve: Serve) -> None:
        self.quantum_ends_ns = self._clock_ns() + QUANTUM_NS
        serve()
