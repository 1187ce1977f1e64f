"""An acquire in two steps: its checks, then its placement. Between the two, the node asks the fleet for the claim.

A claim costs a write to the fleet's store, so the node first refuses every acquire that it would refuse anyway.
"""

from enum import Enum

from gpulease.protocol.fast_dataclass import dataclass


class AcquireStep(Enum):
    """Steps of an acquire that is claimed in the fleet between its checks and its place."""

    BOTH = "both"
    """Check and place in one step, because the acquire claims nothing."""
    CHECK = "check"
    """Count the acquire against its tenant's rate and check the request. The reply is `Checked` or `RequestDenied`."""
    PLACE = "place"
    """Repeat every check but the rate, because the node may have changed since CHECK, and place the acquire."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Reply to an acquire's CHECK: the node may claim it in the fleet.

    Until PLACE, the node reserves nothing for it.
    """

    request: int
