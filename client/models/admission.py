"""Whether a request can be done in its time: from what batches took, no clock read here."""

import math
from dataclasses import dataclass
from typing import Final

MEAN_PART: Final = 1 / 8
DEVIATION_PART: Final = 1 / 4
DEVIATIONS: Final = 4
"""How a time is foretold from those before it, as RFC 6298, 2, foretells round trips: mean and four deviations."""

HALF_LIFE_S: Final = 1.0
"""In which an estimate halves while nothing is measured: without it one slow batch could refuse all that would measure
another."""


class Estimate:
    """What the next of its kind will take, in seconds; 0 while nothing is known."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0
        self._measured_at: float | None = None

    def measured(self, took_s: float, now: float) -> None:
        """One took so long."""
        if self._measured_at is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            self._deviation_s += DEVIATION_PART * (abs(took_s - self._mean_s) - self._deviation_s)
            self._mean_s += MEAN_PART * (took_s - self._mean_s)
        self._measured_at = now

    def seconds(self, now: float) -> float:
        """What to reckon with now."""
        if self._measured_at is None:
            return 0.0
        age_s = max(0.0, now - self._measured_at)
        return (self._mean_s + DEVIATIONS * self._deviation_s) * math.exp2(-age_s / HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request finds when it comes.

    Attributes:
        items_ahead: That wait before it.
        max_batch: Items in a batch.
        is_running: Whether a batch is computed now.
        batch_s: What a batch is reckoned to take.
        start_s: What it is reckoned to take until there is a lease; 0 if there is one.
        lease_left_s: What is left of the lease; None if there is none yet.
    """

    items_ahead: int
    max_batch: int
    is_running: bool
    batch_s: float
    start_s: float
    lease_left_s: float | None

    def expected_s(self, items: int) -> float:
        """When so many items more will be done, from now."""
        batches = math.ceil((self.items_ahead + items) / self.max_batch) + self.is_running
        return self.start_s + batches * self.batch_s

    def refusal(self, items: int, left_s: float) -> str:
        """Why they can't be done in `left_s`; "" if they can, as far as can be told."""
        expected_s = self.expected_s(items)
        if expected_s > left_s:
            return f"it would take {expected_s:.3f} s, and has {left_s:.3f} s"
        if self.lease_left_s is not None and expected_s > self.lease_left_s:
            return f"it would take {expected_s:.3f} s, and the lease ends in {self.lease_left_s:.3f} s"
        return ""
