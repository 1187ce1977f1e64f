"""Bounds on log lines that a peer can cause without end: a line now and then, with the number of suppressed lines."""

import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.log_budget import LogBudget
from gpulease.protocol.time_units import NS_PER_S

LINE_EVERY_S: Final = 1.0
"""The pause between two lines of a RateLimitedLog."""

MAX_REASON_CHARS: Final = 200
"""Maximum length of a logged reason, in characters. A reason may contain a peer's text."""


class RateLimit:
    """Admits one line in `pause_s` seconds, and counts the other lines.

    Args:
        pause_s: Seconds from an admitted line to the next one.
        clock: Seconds on a monotonic clock.
    """

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = LogBudget(1, round(pause_s * NS_PER_S))
        self._clock = clock

    def admit(self) -> int | None:
        """Return how many lines were suppressed since the last admitted line, or None to suppress this one too."""
        return self._budget.spend(round(self._clock() * NS_PER_S))


class RateLimitedLog:
    """Logs one event at most once a second; the field `suppressed` counts the lines that were left out."""

    def __init__(self, event: LogEvent, clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._limit = RateLimit(LINE_EVERY_S, clock)

    def add(self, peer: str, reason: str) -> None:
        """Log the event about a peer, or count it if a line was logged in the last LINE_EVERY_S."""
        # The next line that is logged contains the number of suppressed lines.
        suppressed = self._limit.admit()
        if suppressed is not None:
            log_event(self._event, peer=peer, reason=reason[:MAX_REASON_CHARS], suppressed=suppressed or None)
