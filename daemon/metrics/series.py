"""Where numbers gather: one cell for each combination of a family's labels."""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from gpulease.daemon.metrics.families import Family

Labels = tuple[str, ...]

OTHERS: Final = "other"
"""The label of tenants that came once as many as may be told apart were known."""

MAX_TENANT_SERIES: Final = 64
"""Tenants that are told apart. Stops names, which on a host of many users come and go, from growing the daemon, every
scrape and Prometheus for ever. Who is known stays: a series that moved would be a counter that goes backwards."""

MAX_PAIR_SERIES: Final = 512
"""Combinations of cards and tenants: on a host of more than 8 cards fewer tenants are told apart. All of them in all
families make an exposition of 1 MB."""

MAX_LABEL_CHARS: Final = 128
"""Of a tenant's name. Whoever writes certificates chooses it."""


@dataclass(slots=True)
class Distribution:
    """Observations: how many fell under each bound, and behind the last one; their sum and count."""

    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self.counts)


class Histogram:
    """The distributions of a family, which may be a summary: that has no bounds."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.of: dict[Labels, Distribution] = {}

    def __bool__(self) -> bool:
        """Whether anything was observed."""
        return bool(self.of)

    def observe(self, labels: Labels, value: float) -> None:
        """Take in one observation; a negative one, of clocks read in another order, is 0."""
        found = self.of.get(labels)
        if found is None:
            found = self.of[labels] = Distribution([0] * (len(self.family.bounds) + 1))
        found.total += max(0.0, value)
        found.counts[bisect_left(self.family.bounds, value)] += 1


@dataclass(slots=True)
class TenantLabels:
    """The bound on tenants: the first `most` keep their names, all others share one."""

    most: int
    _known: dict[str, str] = field(default_factory=dict)

    def of(self, tenant: str) -> str:
        """A tenant's label, the same ever after."""
        label = self._known.get(tenant)
        if label is None:
            if len(self._known) >= self.most:
                return OTHERS
            # Names come from settings and certificates; the exposition is UTF-8.
            label = tenant.encode(errors="backslashreplace").decode()[:MAX_LABEL_CHARS]
            self._known[tenant] = label
        return label


Counts = defaultdict[Labels, float]


def counts() -> Counts:
    """The values of a counter's series: 0 until something happened."""
    return defaultdict(float)
