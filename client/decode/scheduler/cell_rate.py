"""A rate limit: several permits at once, then one permit per interval."""

from typing import Final

ROUNDING_S: Final = 1e-6
"""Seconds by which a permit may be early, because of the rounding of floats."""


class CellRate:
    """The generic cell rate algorithm (ITU-T I.371): `at_once` permits, then one more every `interval_s` seconds."""

    def __init__(self, at_once: int, interval_s: float) -> None:
        self._slack_s, self._interval_s = (at_once - 1) * interval_s, interval_s
        self._expected_at = float("-inf")

    def delay_s(self, now: float) -> float:
        """Return the seconds until the next permit; 0 if there is one now."""
        # `_expected_at` is I.371's theoretical arrival time: when the next permit is due at the steady rate. A burst
        # may be earlier than that by `_slack_s`.
        delay_s = self._expected_at - self._slack_s - now
        return delay_s if delay_s > ROUNDING_S else 0.0

    def take(self, now: float) -> float:
        """Take a permit and return 0. If there is none, take nothing and return the seconds until the next one."""
        delay_s = self.delay_s(now)
        if not delay_s:
            # After a pause the schedule restarts at `now`, so a pause permits no more than a burst.
            self._expected_at = max(self._expected_at, now) + self._interval_s
        return delay_s
