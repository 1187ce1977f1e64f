"""An acquire in two steps: its checks, then its place. Between them the fleet is asked for what it claims.

A claim costs the fleet's store a write. So what the node refuses in any case is refused before it.
"""

from dataclasses import dataclass
from enum import Enum


class AcquireStep(Enum):
    """Steps of an acquire that is claimed in the fleet between its checks and its place."""

    BOTH = "both"
    """Check and place at once: nothing is claimed."""
    CHECK = "check"
    """Count it against its tenant's rate, and check what is asked for; the reply is `Checked` or `Denied`."""
    PLACE = "place"
    """Check all but the rate again, and place it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Reply to an acquire's CHECK: it may be claimed. Nothing is kept for it."""

    request: int
