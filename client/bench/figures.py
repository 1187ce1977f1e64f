"""Figures from samples: percentiles, rates, and the trend of a series."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def print_figures(figures: Mapping[str, object]) -> None:
    """Print figures as one JSON object on a line, numbers to four places, at once."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def timed_us(action: Callable[[], object], count: int) -> list[float]:
    """Return the microseconds that each of `count` calls took."""
    samples = []
    clock = time.perf_counter
    for _ in range(count):
        started = clock()
        action()
        samples.append((clock() - started) * 1e6)
    return samples


def per_call_us(action: Callable[[], object], fence: Callable[[], object], count: int) -> float:
    """Return the microseconds a call when `count` calls are issued back to back and then fenced."""
    fence()
    started = time.perf_counter()
    for _ in range(count):
        action()
    fence()
    return (time.perf_counter() - started) / count * 1e6


def gigabytes_per_s(action: Callable[[], object], size_bytes: int, count: int) -> float:
    """Return the median throughput of `count` copies of `size_bytes`, in 1e9 bytes per second."""
    return size_bytes / percentile(timed_us(action, count), 50) / 1e3


@dataclass(frozen=True, slots=True)
class Trend:
    """A least-squares line through the second half of a series; caches and tables fill during the first.

    Attributes:
        growth: The line's rise over that half, in the series' unit.
        bound: The largest rise that counts as flat.
    """

    growth: float
    bound: float

    @property
    def is_flat(self) -> bool:
        """True if the line rises by no more than the bound; falling is no fault."""
        return self.growth <= self.bound


def trend_of(at_s: Sequence[float], values: Sequence[float], bound: float) -> Trend:
    """Return the trend of values taken at these times in seconds, three at least. Raises ValueError."""
    if len(at_s) != len(values) or len(values) < 3:
        raise ValueError(f"a trend needs three points at least, each with its time; there are {len(values)}")
    half = len(values) // 2 if len(values) >= 6 else 0
    times, late = at_s[half:], values[half:]
    middle_s, middle = sum(times) / len(times), sum(late) / len(late)
    spread = sum((time - middle_s) ** 2 for time in times)
    slope = sum((t - middle_s) * (v - middle) for t, v in zip(times, late, strict=True)) / spread if spread else 0.0
    return Trend(slope * (times[-1] - times[0]), bound)
