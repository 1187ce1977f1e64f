"""Who waits for a model, and which of them make the next batch: numbers in and numbers out, no clock."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpulease.client.rpc import Outcome

MAX_ATTEMPTS: Final = 2
"""How often a request of a pure model is computed at most: a request that ends every lease is not tried for ever."""


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request in line.

    Attributes:
        payload: Its items' inputs.
        items: How many.
        at: When it came, of a monotonic clock in seconds.
        deadline: Until when it is worth beginning.
        answer: Where its outcome goes. Done already if its caller went away.
        attempts: How often it was begun.
        is_alone: Whether it is to have a batch of its own: one before failed with it.
        timer: What answers it at its deadline.
    """

    payload: bytes
    items: int
    at: float
    deadline: float
    answer: "asyncio.Future[Outcome]"
    attempts: int = 0
    is_alone: bool = False
    timer: asyncio.TimerHandle | None = None

    def settle(self, outcome: Outcome) -> None:
        """Answer it, if it is not answered yet."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(outcome)


class Line:
    """A bounded line, first come first served.

    Args:
        max_items: How many may wait.
        max_batch: How many make a batch at most.

    Attributes:
        items: How many wait.
    """

    def __init__(self, max_items: int, max_batch: int) -> None:
        self.max_items, self.max_batch = max_items, max_batch
        self.items = 0
        self._waiting: deque[WaitingRequest] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def join(self, request: WaitingRequest) -> bool:
        """Put it at the end; False if the line is full."""
        if self.items + request.items > self.max_items:
            return False
        self._waiting.append(request)
        self.items += request.items
        return True

    def rejoin(self, requests: Iterable[WaitingRequest]) -> None:
        """Put those that were begun back where they were, at the front. They had their places, so there is room."""
        for request in reversed(list(requests)):
            self._waiting.appendleft(request)
            self.items += request.items

    def leave(self, request: WaitingRequest) -> bool:
        """Take it out of the line; False if it is not in it."""
        try:
            self._waiting.remove(request)
        except ValueError:
            return False
        self.items -= request.items
        return True

    def due_at(self, max_delay_s: float) -> float | None:
        """When the next batch is to begin: at once (0) if it is full, None if nobody waits."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        return 0.0 if self.items >= self.max_batch or first.is_alone else first.at + max_delay_s

    def next_batch(self) -> list[WaitingRequest]:
        """Take the next batch out: those in front, as many as fit; whoever's caller went away is left out."""
        batch: list[WaitingRequest] = []
        items = 0
        while self._waiting:
            request = self._waiting[0]
            is_wanted = not request.answer.done()
            if is_wanted and batch and (request.is_alone or items + request.items > self.max_batch):
                break
            self._waiting.popleft()
            self.items -= request.items
            if is_wanted:
                batch.append(request)
                items += request.items
                if request.is_alone:
                    break
        return batch

    def take_all(self) -> list[WaitingRequest]:
        """Empty it."""
        found = list(self._waiting)
        self._waiting.clear()
        self.items = 0
        return found
