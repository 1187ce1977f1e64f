"""What an operator asks of the node as a whole: to be drained, or not any more."""

import time
from typing import Final

from gpulease.daemon.core import DrainSet, LeaseTable
from gpulease.protocol.messages import DrainStatus

NS_PER_MS: Final = 1_000_000


def drain_left_ms(table: LeaseTable) -> int | None:
    """Time until a drain ends what is left, rounded up; None if there is no drain."""
    return _left_ms(table.drain_ns)


def status_of(outcome: DrainSet) -> DrainStatus:
    """The reply to DRAIN and DRAIN_CANCEL."""
    return DrainStatus(_left_ms(outcome.deadline_ns), outcome.active_leases)


def _left_ms(deadline_ns: int | None) -> int | None:
    return None if deadline_ns is None else -(-max(0, deadline_ns - time.monotonic_ns()) // NS_PER_MS)
