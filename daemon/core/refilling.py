"""When a card's next context may be made ahead: a pause after one was taken, and later each time one was lost."""

from dataclasses import dataclass
from typing import Final

from gpulease.daemon.core.limits import NS_PER_MS, NS_PER_S

REFILL_PAUSE_MS: Final = 100
"""From a lease's taking a context to the making of the next: making one slows the driver down for all, and the tenant
is about to attach."""

FIRST_BACK_OFF_S: Final = 1
"""From the loss of a context to the making of the next. Stops a card that can make none from being tried in a loop."""

MAX_BACK_OFF_S: Final = 64
"""The same after many losses in a row, each of which doubles it."""


@dataclass(slots=True)
class Refill:
    """One card's.

    Attributes:
        next_ns: Not before then, by the monotonic clock.
        losses: So many were lost since one was ready, as far as that makes a difference.
    """

    next_ns: int = 0
    losses: int = 0

    def was_taken(self, now_ns: int) -> None:
        """A lease or a submit has taken one."""
        self._postpone(now_ns + REFILL_PAUSE_MS * NS_PER_MS)

    def was_made(self) -> None:
        """One is ready."""
        self.losses = 0

    def was_lost(self, now_ns: int) -> None:
        """One has died, hung, or was not ready in time."""
        back_off_s = min(FIRST_BACK_OFF_S << self.losses, MAX_BACK_OFF_S)
        self.losses = min(self.losses + 1, MAX_BACK_OFF_S.bit_length())
        self._postpone(now_ns + back_off_s * NS_PER_S)

    def _postpone(self, until_ns: int) -> None:
        self.next_ns = max(self.next_ns, until_ns)
