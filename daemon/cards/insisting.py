"""Trying again what may be better in a moment: device nodes that appear late, a driver that is still being loaded."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gpulease.daemon.cards.source import CardsUnavailable
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell

PATIENCE_S: Final = 30.0
"""All together. A driver that needs longer is met by the daemon's next start, if something starts it again."""

FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 4.0

T = TypeVar("T")


def pause_s(tried: int, waited_s: float) -> float | None:
    """How long to wait after so many tries, each pause twice the one before; None if it has been long enough."""
    wanted_s = min(FIRST_PAUSE_S * 2 ** min(tried - 1, 16), MAX_PAUSE_S)
    return None if waited_s + wanted_s > PATIENCE_S else wanted_s


async def insist(attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` gives, at once or later. Raises CardsUnavailable as it did last."""
    begun = time.monotonic()
    tried = 0
    while True:
        tried += 1
        try:
            return await attempt()
        except CardsUnavailable as error:
            wait_s = pause_s(tried, time.monotonic() - begun) if error.may_pass else None
            if wait_s is None:
                raise
            if tried == 1:
                said = f"{error}; it is tried again for {PATIENCE_S:g} s. {error.hint}"
                tell(LogEvent.CARDS_AWAITED, said, reason=str(error), hint=error.hint, patience_s=PATIENCE_S)
        await asyncio.sleep(wait_s)
