"""The node's membership in a fleet: the broker's message about it."""

from typing import Annotated, ClassVar

from gpulease.daemon.contract.message_fields import U64, Message, Text
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_S


@dataclass(frozen=True, slots=True)
class FleetMembership(Message):
    """A node's membership in its fleet, as of the last heartbeat.

    Attributes:
        node: The node's id.
        horizon_boot_ns: The membership deadline in nanoseconds of CLOCK_BOOTTIME. At the deadline the node's named
            leases end, unless a heartbeat has moved it. 0 outside the fleet.
        fenced: How many times the fleet has declared the node dead since the daemon's start.
    """

    OP: ClassVar[str] = "membership"
    node: Text
    horizon_boot_ns: Annotated[int, U64]
    fenced: Annotated[int, U64]

    def left_s(self, now_boot_ns: int) -> float | None:
        """Return the seconds until the membership deadline, 0 after it; None if the node has not joined."""
        if not self.horizon_boot_ns:
            return None
        return max(0, self.horizon_boot_ns - now_boot_ns) / NS_PER_S
