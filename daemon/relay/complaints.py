"""What is logged of strangers: they can go on for ever, the log can't."""

import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell

PAUSE_S: Final = 1.0
"""Between two lines."""

MAX_CHARS: Final = 200
"""Of what a line says of a peer."""


class Complaints:
    """One line a second at most, which counts those that were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()
        self._left_out = 0

    def add(self, peer: str, why: str) -> None:
        """A peer was turned away."""
        if self._clock() < self._next:
            self._left_out += 1
            return
        tell(LogEvent.STRANGER_REFUSED, peer=peer, reason=why[:MAX_CHARS], suppressed=self._left_out or None)
        self._next = self._clock() + PAUSE_S
        self._left_out = 0
