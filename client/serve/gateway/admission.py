"""How much a gateway takes on: so many at a time, so many that wait, and for so long."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from gpulease.client.serve.gateway.errors import Overloaded

RETRY_S: Final = 1.0
"""When it is worth asking again after a refusal for want of room."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a gateway takes on.

    Attributes:
        max_in_flight: Requests that are served at the same time, each on a lease of its own.
        max_queue: Requests that wait for that beside them. They hold no lease and no reservation.
        queue_s: How long a request waits, here and in the daemon's line together.
        body_s: How long a request's body may take to arrive.
        join_s: How long a request waits for another attempt at the same one.
        keep_s: For how long an outcome is kept.
    """

    max_in_flight: int = 4
    max_queue: int = 32
    queue_s: float = 10.0
    body_s: float = 10.0
    join_s: float = 5.0
    keep_s: float = 86_400.0


class Admission:
    """The places of one gateway, in one event loop.

    Attributes:
        taken: Places taken, by requests that are served and by those that wait.
        in_flight: Requests that are served.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._slots = asyncio.Semaphore(bounds.max_in_flight)
        self.taken = 0
        self.in_flight = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place to be served from or to wait in, taken before anything of the body is. Raises Overloaded."""
        most = self._bounds.max_in_flight + self._bounds.max_queue
        if self.taken >= most:
            raise Overloaded(f"{most} requests are served or wait, the most there may be", RETRY_S, is_queue_full=True)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """The right to be served now, and how many seconds of waiting are left. Raises Overloaded."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._bounds.queue_s
        try:
            async with asyncio.timeout_at(until):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded(
                f"the request has waited for {self._bounds.queue_s:g} s, the longest there may be",
                RETRY_S,
                is_queue_full=False,
            ) from None
        self.in_flight += 1
        try:
            yield max(0.0, until - loop.time())
        finally:
            self.in_flight -= 1
            self._slots.release()
