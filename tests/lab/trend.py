"""A line through a series of samples: whether what is sampled grows."""

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
        """True if the line rises by no more than the bound; falling is fine."""
        return self.growth <= self.bound


def trend_of(at_s: Sequence[float], values: Sequence[float], bound: float) -> Trend:
    """The trend of values taken at these times in seconds, at least three. Raises ValueError."""
    if len(at_s) != len(values) or len(values) < 3:
        raise ValueError(f"a trend needs three points at least, each with its time; there are {len(values)}")
    # With few samples, all of them count.
    half = len(values) // 2 if len(values) >= 6 else 0
    times, late = at_s[half:], values[half:]
    # Least squares around the means; times without any spread give a slope of 0.
    middle_s, middle = sum(times) / len(times), sum(late) / len(late)
    spread = sum((time - middle_s) ** 2 for time in times)
    slope = sum((t - middle_s) * (v - middle) for t, v in zip(times, late, strict=True)) / spread if spread else 0.0
    return Trend(slope * (times[-1] - times[0]), bound)
