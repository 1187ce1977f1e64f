"""The last hour of a decode server, in slots of SLOT_S: tokens, times to the first token, refusals."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

SLOT_S: Final = 10.0
"""Seconds of a slot."""

SPAN_S: Final = 3600.0
"""Seconds that are kept and shown at most."""

SHORTEST_SPAN_S: Final = 300.0
"""Seconds that are shown at the start, so that a chart is not almost empty for an hour."""

MAX_TIMES: Final = 256
"""Most times to the first token that a slot keeps, so that many requests a second do not fill memory."""


@dataclass(slots=True)
class _Slot:
    """The counts of the SLOT_S seconds from `number * SLOT_S` on."""

    number: int
    tokens: int = 0
    refused: int = 0
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))


class PageHistory:
    """The last hour. Times are monotonic seconds, and must not decrease."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._slots = deque[_Slot](maxlen=round(SPAN_S / SLOT_S) + 1)

    def add_tokens(self, now: float, count: int) -> None:
        self._slot(now).tokens += count

    def add_refusal(self, now: float) -> None:
        self._slot(now).refused += 1

    def add_first_token(self, now: float, seconds: float) -> None:
        """Record a request's time to its first token, in seconds."""
        self._slot(now).first_token_s.append(seconds)

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
        return {
            "span_s": round(span_s),
            "age_s": [round(now - (slot.number + 1) * SLOT_S, 1) for slot in slots],
            "tokens_s": [round(slot.tokens / SLOT_S, 1) for slot in slots],
            "first_token_ms": [milliseconds(slot.first_token_s) for slot in slots],
            "refused": [slot.refused for slot in slots],
        }

    def _slot(self, now: float) -> _Slot:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
        return self._slots[-1]


def milliseconds(times_s: Iterable[float]) -> float | None:
    """Return the median of times in seconds, as milliseconds; None without any."""
    times = list(times_s)
    return round(median(times) * 1e3, 1) if times else None
