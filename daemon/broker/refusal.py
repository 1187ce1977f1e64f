"""A request that never gets to the lease table.

The lease core's refusals as statuses of the wire.
"""

from typing import Final

from gpulease.daemon.leases import Denial, DenialReason
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


class Refusal(Exception):
    """Why a request is refused on the spot.

    Attributes:
        failure: What to answer.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_STATUS: Final = {
    DenialReason.CAPACITY_EXCEEDED: Status.CAPACITY_EXCEEDED,
    DenialReason.LEASE_EXPIRED: Status.LEASE_EXPIRED,
    DenialReason.REVOKED: Status.REVOKED,
    DenialReason.FENCED: Status.FENCED,
    DenialReason.UNSUPPORTED: Status.UNSUPPORTED,
    DenialReason.INVALID_REQUEST: Status.INVALID_REQUEST,
    DenialReason.NOT_FOUND: Status.NOT_FOUND,
    DenialReason.LIMIT: Status.DENIED,
    DenialReason.RATE: Status.BUSY,
    DenialReason.SESSION_FAILED: Status.SESSION_FAILED,
    DenialReason.FREED: Status.LEASE_FREED,
    DenialReason.SHUTTING_DOWN: Status.DISCONNECTED,
    DenialReason.NOT_RECORDED: Status.BUSY,
    DenialReason.DRAINED: Status.DRAINED,
    DenialReason.BUSY: Status.BUSY,
}


def failure_of(denial: Denial) -> Failure:
    """What to answer a refused request."""
    return Failure(_STATUS[denial.reason], denial.message, hint=denial.hint)
