"""Fits a line through a series of samples, to detect growth."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trend:
    """A least-squares line through the second half of a series; caches and tables fill during the first half.

    Attributes:
        growth: The line's rise over that half, in the series' unit.
        bound: The largest rise that counts as flat.
    """

    growth: float
    bound: float

    @property
    def is_flat(self) -> bool:
        """Whether the line rises by at most the bound. It may fall."""
        return self.growth <= self.bound


def trend_of(at_s: Sequence[float], values: Sequence[float], bound: float) -> Trend:
    """Return the trend of values sampled at these times, in seconds. Raises ValueError for fewer than three."""
    if len(at_s) != len(values) or len(values) < 3:
        raise ValueError(f"a trend needs three points at least, each with its time; there are {len(values)}")
    # With few samples, use all of them.
    half = len(values) // 2 if len(values) >= 6 else 0
    times, late = at_s[half:], values[half:]
    # Least squares around the means. If all times are equal, the slope is 0.
    middle_s, middle = sum(times) / len(times), sum(late) / len(late)
    spread = sum((time - middle_s) ** 2 for time in times)
    slope = sum((t - middle_s) * (v - middle) for t, v in zip(times, late, strict=True)) / spread if spread else 0.0
    return Trend(slope * (times[-1] - times[0]), bound)
