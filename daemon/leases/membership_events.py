"""Events and effects of the membership deadline; `membership_deadlines` handles them."""

from typing import NamedTuple

from gpulease.protocol.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class MembershipDeadlineMoved:
    """The fleet's store has acknowledged a heartbeat: claimed leases may be served for longer.

    See `membership_deadlines`.

    Attributes:
        membership_deadline_ns: The new membership deadline on the monotonic clock.
        membership_deadline_boot_ns: The same deadline on CLOCK_BOOTTIME.
    """

    membership_deadline_ns: int
    membership_deadline_boot_ns: int


@dataclass(frozen=True, slots=True)
class ClaimsLost:
    """The node's claims are void, because the fleet has fenced the node or was reset: every claimed lease ends.

    Attributes:
        reason: The cause as a clause, which tenants see.
    """

    reason: str


class SetMembershipDeadline(NamedTuple):
    """Write a claimed lease's membership deadline, on CLOCK_BOOTTIME, where its worker and the zygote read it.

    Comes before the `SetDeadline` that lets the lease begin.
    """

    worker_id: int
    membership_deadline_boot_ns: int
