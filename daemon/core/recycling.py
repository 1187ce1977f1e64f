"""Contexts that serve their tenant's next lease too, where the operator wants that.

A lease that its tenant gave back, in good order and with nothing in doubt, has its context scrubbed instead of killed.
Once that is proved its slice is free and the context waits in the pool, for that tenant alone, for a bounded time and a
bounded number of leases. Whatever else happens, and whatever takes too long, the worker is killed as any is.

So many wait on a card at a time. Where there are as many, a tenant who has fewer takes a place of who has the most: to
leave as many as one can is no use.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpulease.daemon.core.warm import WarmContext


@dataclass(frozen=True, slots=True)
class Recycling:
    """The bounds of it.

    Raises:
        ValueError: One is below 1.
    """

    # One that nobody comes back for holds what a context costs, and a process.
    idle_s: int = 10
    # What no scrub foresaw, leaks of the driver's for one, ends with the process.
    max_leases: int = 1000
    # A tenant that gives back many leases at a time must not leave a process for each.
    max_idle: int = 16
    # A kernel that goes on, or a worker that hangs, must not keep the slice.
    scrub_timeout_ms: int = 500

    def __post_init__(self) -> None:
        if min(self.idle_s, self.max_leases, self.max_idle, self.scrub_timeout_ms) < 1:
            raise ValueError(f"Every bound of recycling must be at least 1: {self!r}.")


def gives_way(waiting: Sequence[WarmContext], tenant: str, max_idle: int) -> list[WarmContext] | None:
    """Which of a card's contexts that wait for a tenant goes, so that one more of `tenant`'s may; None if it may not.

    While there is room, none. Then the oldest of whoever has the most, if it would have no fewer than `tenant` even so:
    two tenants who have as many take nothing from each other. `waiting`: oldest first.
    """
    if len(waiting) < max_idle:
        return []
    counts = Counter(context.tenant for context in waiting)
    most = max(counts.values())
    if most < counts[tenant] + 2:
        return None
    return [next(context for context in waiting if counts[context.tenant] == most)]
