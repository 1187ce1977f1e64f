"""FairQueue: how the requests of many connections share the broker's one thread, so that no tenant holds up another.

In each round of the event loop every tenant has one turn, whatever the number of its connections: the first of them
that has something is served at once, the others wait in the tenant's own line, for a round each. So a tenant that
floods the daemon through all the connections it may have costs the others one turn of its own a round.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_NS: Final = 1_000_000
"""How long a turn may go on before the next request of it is left for the next one. Most requests take 30 us; those
that check a signature, 200."""

Serve = Callable[[], None]
"""Serves one connection for one turn."""


class FairQueue:
    """Whose turn it is."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lines: dict[str, deque[Serve]] = {}
        self._is_due = False
        self.ends_ns = 0

    @property
    def is_over(self) -> bool:
        """Whether the turn that goes on has lasted for long enough."""
        return self._clock_ns() >= self.ends_ns

    def ask(self, tenant: str, serve: Serve) -> None:
        """Serve a connection of the tenant: now if it is the tenant's first in this round, else in a later one.

        Must not be asked again for the same connection before it was served.
        """
        line = self._lines.get(tenant)
        if line is not None:
            line.append(serve)
            return
        self._lines[tenant] = deque()
        self._begin_round_later()
        self._serve(serve)

    def _begin_round_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._is_due = False
        for tenant, line in list(self._lines.items()):
            if not line:
                del self._lines[tenant]
                continue
            self._begin_round_later()
            self._serve(line.popleft())

    def _serve(self, serve: Serve) -> None:
        self.ends_ns = self._clock_ns() + TURN_NS
        serve()
