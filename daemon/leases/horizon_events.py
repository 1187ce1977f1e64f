"""Events and effects of the fleet's horizon; `horizons` handles them."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HorizonMoved:
    """The fleet's store has acknowledged a beat: claimed leases may be served until then. See `horizons`.

    Attributes:
        horizon_ns: That time on the monotonic clock.
        horizon_boot_ns: That time on CLOCK_BOOTTIME.
    """

    horizon_ns: int
    horizon_boot_ns: int


@dataclass(frozen=True, slots=True)
class ClaimsLost:
    """The node's claims are void, because the fleet has fenced it or began anew: every claimed lease ends.

    Attributes:
        reason: A clause that tenants see.
    """

    reason: str


class SetHorizon(NamedTuple):
    """Write where worker and zygote read it until when a claimed lease may be served, on CLOCK_BOOTTIME.

    Comes before the `SetDeadline` that lets the lease begin.
    """

    worker_id: int
    horizon_boot_ns: int
