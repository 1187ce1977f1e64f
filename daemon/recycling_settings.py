"""The part of the settings that is about contexts that serve their tenant's next lease, and within what bounds."""

from typing import Final

from gpulease.daemon.core import Recycling

RECYCLE: Final = ("off", "same-tenant")

MAX_RECYCLE_IDLE_S: Final = 3600
"""A context that is kept for longer for one tenant is a mistyped unit."""


def recycling_of(recycle: str, idle_s: int, leases: int) -> Recycling | None:
    """Within what bounds contexts serve again; None if they never do."""
    return None if recycle == RECYCLE[0] else Recycling(idle_s=idle_s, max_leases=leases)


def check_recycling(recycle: str, idle_s: int, leases: int, warm_contexts: int) -> None:
    """Raises ValueError for what can't be meant."""
    if recycle not in RECYCLE:
        raise ValueError(f"recycle is {recycle!r}; it must be {' or '.join(RECYCLE)}")
    if recycle != RECYCLE[0] and not warm_contexts:
        raise ValueError("recycle needs warm_contexts: only contexts that were made ahead serve again")
    if not 1 <= idle_s <= MAX_RECYCLE_IDLE_S:
        raise ValueError(f"recycle_idle_s is {idle_s}; it must be between 1 and {MAX_RECYCLE_IDLE_S}")
    if leases < 1:
        raise ValueError(f"recycle_leases is {leases}; it must be at least 1")
