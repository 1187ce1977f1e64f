"""Refusals: requests that the broker refuses itself, and the answers to those that the lease table denies."""

from gpulease.daemon.leases import Denial
from gpulease.daemon.leases.denials import STATUS_OF_REASON
from gpulease.protocol.failures import Failure


class Refused(Exception):
    """The broker refuses a request, which never reaches the lease table.

    Attributes:
        failure: The answer to the request.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(denial: Denial) -> Failure:
    """Return the answer to a request that the lease table denied."""
    return Failure(STATUS_OF_REASON[denial.reason], denial.message, hint=denial.hint)
