"""Limits of a gateway's work: requests served at the same time, requests that wait, and the time that they wait."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from gpulease.client.serve.gateway.gateway_errors import Overloaded

RETRY_S: Final = 1.0
"""Seconds of Retry-After for a request that found no room."""


@dataclass(frozen=True, slots=True)
class GatewayBounds:
    """Limits of one gateway.

    Attributes:
        max_in_flight: Maximum number of requests that are served at the same time, each on its own lease.
        max_queue: Maximum number of further requests that wait. They hold no lease and no reservation.
        queue_s: Seconds that a request may wait, here and in the daemon's queue together.
        body_s: Seconds in which a request's body must arrive.
        join_s: Seconds that a request waits for another attempt at the same request.
        keep_s: Seconds for which outcomes are kept.
    """

    max_in_flight: int = 4
    max_queue: int = 32
    queue_s: float = 10.0
    body_s: float = 10.0
    join_s: float = 5.0
    keep_s: float = 86_400.0


class GatewayAdmission:
    """The places of one gateway, for serving and for waiting. Used in one event loop.

    Attributes:
        taken: Number of places that are taken by requests being served or waiting.
        in_flight: Number of requests being served.
    """

    def __init__(self, bounds: GatewayBounds) -> None:
        self._bounds = bounds
        # A semaphore wakes waiters in the order of their arrival.
        self._slots = asyncio.Semaphore(bounds.max_in_flight)
        self.taken = 0
        self.in_flight = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place, for serving or waiting, during the block.

        Take it before reading the body. Raises Overloaded.
        """
        max_places = self._bounds.max_in_flight + self._bounds.max_queue
        # There is no await between the check and the increment, so two requests can't both take the last place.
        if self.taken >= max_places:
            raise Overloaded(
                f"{max_places} requests are being served or wait, the maximum", RETRY_S, is_queue_full=True
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a slot and hold it during the block. Yields the rest of `queue_s` in seconds. Raises Overloaded."""
        loop = asyncio.get_running_loop()
        # One limit applies to both queues: time spent here is subtracted from the wait in the daemon's queue.
        deadline_s = loop.time() + self._bounds.queue_s
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded(
                f"the request has waited for {self._bounds.queue_s:g} s, the maximum",
                RETRY_S,
                is_queue_full=False,
            ) from None
        self.in_flight += 1
        try:
            yield max(0.0, deadline_s - loop.time())
        finally:
            self.in_flight -= 1
            self._slots.release()
