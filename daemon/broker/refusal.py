"""Refusals: requests that the broker turns down itself, and the wire status of each denial of the lease table."""

from typing import Final

from gpulease.daemon.leases import Denial, DenialReason
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


class Refused(Exception):
    """The broker refuses a request, which never gets to the lease table.

    Attributes:
        failure: The answer to the request.
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
    DenialReason.NOT_ALLOWED: Status.DENIED,
    DenialReason.ISOLATED: Status.BUSY,
    DenialReason.NAME_TAKEN: Status.BUSY,
}


def failure_of(denial: Denial) -> Failure:
    """Return the answer to a request that the lease table denied."""
    return Failure(_STATUS[denial.reason], denial.message, hint=denial.hint)
