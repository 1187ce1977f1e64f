"""Figures from samples."""

import time
from collections.abc import Callable, Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def timed_us(action: Callable[[], object], count: int) -> list[float]:
    """How long each of `count` calls took, in microseconds."""
    samples = []
    clock = time.perf_counter
    for _ in range(count):
        started = clock()
        action()
        samples.append((clock() - started) * 1e6)
    return samples


def per_call_us(action: Callable[[], object], fence: Callable[[], object], count: int) -> float:
    """Microseconds a call when `count` calls are issued back to back and then fenced."""
    fence()
    started = time.perf_counter()
    for _ in range(count):
        action()
    fence()
    return (time.perf_counter() - started) / count * 1e6


def gigabytes_per_s(action: Callable[[], object], size_bytes: int, count: int) -> float:
    """Median throughput of `count` copies of `size_bytes`, in 1e9 bytes per second."""
    return size_bytes / percentile(timed_us(action, count), 50) / 1e3
