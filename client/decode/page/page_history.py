"""The last hour of a decode server, or of one tenant, in slots of SLOT_S: tokens, times of tokens, refusals."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

SLOT_S: Final = 10.0
"""Seconds of a slot."""

SPAN_S: Final = 3600.0
"""Maximum number of seconds that are kept and shown."""

SHORTEST_SPAN_S: Final = 300.0
"""Seconds that are shown at the start, so that a chart is not almost empty for an hour."""

SHORTEST_TIME_S: Final = 1e-6
"""Shorter times count as this time, because 0 has no logarithm."""

HIGH: Final = 0.99
"""The share of times that the high percentile, p99, must not be below."""

_LOG_RATIO: Final = math.log(1.02)
"""The logarithm of the ratio of two neighbouring buckets. A percentile is off by at most 1 %."""


class TimeCounts:
    """Counts of times in buckets, each 2 % above the one before: many times take little memory.

    Args:
        latest: How many of the latest additions count; None for all.
    """

    def __init__(self, latest: int | None = None) -> None:
        self._counts = Counter[int]()
        self._latest = None if latest is None else deque[tuple[int, int]](maxlen=latest)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time of `seconds` in its bucket, `count` times. Shorter times count as SHORTEST_TIME_S."""
        bucket = round(math.log(max(seconds, SHORTEST_TIME_S)) / _LOG_RATIO)
        self._counts[bucket] += count
        if self._latest is None:
            return
        # Keep the counts current with each addition, because the page asks several times a second.
        if len(self._latest) == self._latest.maxlen:
            oldest, oldest_count = self._latest[0]
            self._counts[oldest] -= oldest_count
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._latest.append((bucket, count))

    def percentiles_ms(self, *shares: float) -> tuple[float | None, ...]:
        """Return for each share, in ascending order, the time in milliseconds that it does not exceed.

        Without any times, the results are None.
        """
        found: list[float | None] = []
        ranks, seen = deque(math.ceil(share * self._counts.total()) for share in shares), 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            while ranks and seen >= ranks[0]:
                ranks.popleft()
                found.append(round(math.exp(bucket * _LOG_RATIO) * 1e3, 3))
        return (*found, *(None for _ in ranks))


Percentiles = tuple[float | None, float | None]
"""The median and the p99 of times, in milliseconds."""


def percentiles_of(times: TimeCounts) -> Percentiles:
    median, high = times.percentiles_ms(0.5, HIGH)
    return median, high


@dataclass(slots=True)
class _Slot:
    """The counts of the SLOT_S seconds from `number * SLOT_S` on."""

    number: int
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    first_tokens: TimeCounts | Percentiles = field(default_factory=TimeCounts)
    gaps: TimeCounts | Percentiles = field(default_factory=TimeCounts)

    def close(self) -> None:
        """Keep only the percentiles, because the slot gets no further times."""
        self.first_tokens, self.gaps = self.percentiles("first_tokens"), self.percentiles("gaps")

    def percentiles(self, name: str) -> Percentiles:
        times: TimeCounts | Percentiles = getattr(self, name)
        return percentiles_of(times) if isinstance(times, TimeCounts) else times


class PageHistory:
    """The last hour. Times are monotonic seconds, and must not decrease."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._slots = deque[_Slot](maxlen=round(SPAN_S / SLOT_S) + 1)

    def add_tokens(self, now: float, count: int) -> None:
        self._slot(now).tokens += count

    def add_refusal(self, now: float, kind: str) -> None:
        """Count a request that was refused, by its reason's name."""
        self._slot(now).refused[kind] += 1

    def add_first_token(self, now: float, seconds: float) -> None:
        """Count a request's time to its first token."""
        self._times(now, "first_tokens").add(seconds)

    def add_gaps(self, now: float, seconds: float, count: int) -> None:
        """Count `count` times of `seconds` between two tokens of a sequence."""
        self._times(now, "gaps").add(seconds, count)

    def shown(self, now: float) -> dict[str, Any]:
        """Return the history for the page: the figures of each finished slot, oldest first, and the slots' ages."""
        # The chart grows with the server's age up to an hour.
        span_s = min(SPAN_S, max(SHORTEST_SPAN_S, now - self._began_at))
        # The current slot is left out, because it is not complete.
        last = int(now // SLOT_S) - 1
        first = max(last - round(span_s / SLOT_S) + 1, int(self._began_at // SLOT_S))
        by_number = {slot.number: slot for slot in self._slots}
        # Slots in which nothing happened were never created.
        slots = [by_number.get(number) or _Slot(number) for number in range(first, last + 1)]
        first_tokens, gaps = ([slot.percentiles(name) for slot in slots] for name in ("first_tokens", "gaps"))
        refused_by = sum((slot.refused for slot in slots), Counter[str]())
        return {
            "span_s": round(span_s),
            "age_s": [round(now - (slot.number + 1) * SLOT_S, 1) for slot in slots],
            "tokens_s": [round(slot.tokens / SLOT_S, 1) for slot in slots],
            "first_token_ms": [median for median, _ in first_tokens],
            "first_token_p99_ms": [high for _, high in first_tokens],
            "gap_ms": [median for median, _ in gaps],
            "gap_p99_ms": [high for _, high in gaps],
            "refused": [slot.refused.total() for slot in slots],
            "refused_by": dict(refused_by.most_common()),
        }

    def _times(self, now: float, name: str) -> TimeCounts:
        times = getattr(self._slot(now), name)
        assert isinstance(times, TimeCounts)
        return times

    def _slot(self, now: float) -> _Slot:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            if self._slots:
                self._slots[-1].close()
            self._slots.append(_Slot(number))
        return self._slots[-1]
