"""What workers' counters say, as increments: a session's numbers go into its tenant's, which outlive it.

A page is its worker's own to write, so nothing of it is taken at its word: a number that goes back, or that no counting
could have come to, counts as no news. A tenant that took its worker over can lie about its own figures, no further.
"""

from typing import Final

from gpulease.daemon.broker.worker import Worker
from gpulease.daemon.metrics import families
from gpulease.daemon.metrics.families import Family
from gpulease.daemon.worker.page import BrokerPage, Counter

LARGEST: Final = 1 << 53
"""Of a counter: what Prometheus's numbers, doubles, hold exactly. A launch a microsecond comes to it in 285 years."""

_READ: Final = (
    Counter.LAUNCHES,
    Counter.SYNCS,
    Counter.SYNC_ERRORS,
    Counter.COPIES,
    Counter.COPIED_BYTES,
    Counter.OPS,
    Counter.FAILED_OPS,
)
_NOTHING: Final = (0,) * len(_READ)
_FAMILIES: Final = (
    families.SESSION_LAUNCHES,
    families.SESSION_SYNCS,
    families.SESSION_SYNC_ERRORS,
    families.SESSION_COPIES,
    families.SESSION_COPIED_BYTES,
    families.SESSION_OPERATIONS,
    families.SESSION_OPERATION_ERRORS,
)


def news_of(worker: Worker) -> list[tuple[Family, float]]:
    """What it did since it was asked last."""
    before = worker.counted or _NOTHING
    now = _read(worker.page, before)
    worker.counted = now
    more = [new - old for new, old in zip(now, before, strict=True)]
    # The page counts waits that went well and those that did not; the series counts all.
    more[1] += more[2]
    return [(family, float(count)) for family, count in zip(_FAMILIES, more, strict=True) if count]


def begin_at(worker: Worker) -> None:
    """What it did so far was another daemon's to count."""
    worker.counted = _read(worker.page, _NOTHING)


def held_bytes(worker: Worker, most_bytes: int) -> int:
    """What its session holds, as far as that can be."""
    return min(worker.page.counter(Counter.ALLOCATED_BYTES), most_bytes)


def _read(page: BrokerPage, before: tuple[int, ...]) -> tuple[int, ...]:
    found = page.counters()
    return tuple(
        found[counter] if old <= found[counter] < LARGEST else old for counter, old in zip(_READ, before, strict=True)
    )
