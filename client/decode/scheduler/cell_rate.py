"""A bound of how often something may happen: so often at once, and then once in an interval."""

from typing import Final

ROUNDING_S: Final = 1e-6
"""Seconds too early that a permit is given: sums of floats fall short of the reported delay."""


class CellRate:
    """The generic cell rate algorithm (ITU-T I.371): `at_once` permits, then one more every `interval_s` seconds."""

    def __init__(self, at_once: int, interval_s: float) -> None:
        self._slack_s, self._interval_s = (at_once - 1) * interval_s, interval_s
        self._expected_at = float("-inf")

    def delay_s(self, now: float) -> float:
        """Return the seconds until the next permit; 0 if there is one now."""
        delay_s = self._expected_at - self._slack_s - now
        return delay_s if delay_s > ROUNDING_S else 0.0

    def take(self, now: float) -> float:
        """Take a permit, and return 0; without one, return the seconds until there is one, and take none."""
        delay_s = self.delay_s(now)
        if not delay_s:
            self._expected_at = max(self._expected_at, now) + self._interval_s
        return delay_s
