"""The node's membership of a fleet: the broker's message about it, and the page's view of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from gpulease.protocol.time_units import NS_PER_S

MEMBERSHIP: Final = "membership"
"""The op of the broker's message."""


@dataclass(frozen=True, slots=True)
class FleetMembership:
    """A node in its fleet, at the broker's last beat.

    Attributes:
        node: The node's id.
        horizon_boot_ns: When its named leases end without another beat, by CLOCK_BOOTTIME; 0 outside the fleet.
        fenced: The number of times that the fleet has given the node up since the daemon's start.
    """

    node: str
    horizon_boot_ns: int
    fenced: int

    def to_message(self) -> dict[str, Any]:
        """Return the broker's message."""
        return {"op": MEMBERSHIP} | asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the membership in a message."""
        return cls(message["node"], message["horizon_boot_ns"], message["fenced"])

    def left_s(self, now_boot_ns: int) -> float | None:
        """Return the seconds until the horizon, 0 behind it; None for a node that has not joined."""
        if not self.horizon_boot_ns:
            return None
        return max(0, self.horizon_boot_ns - now_boot_ns) / NS_PER_S
