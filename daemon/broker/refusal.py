"""A request that never gets to the lease table.

The lease core's refusals as statuses of the wire.
"""

from typing import Final

from gpulease.daemon.leases import Cause, Denial, DenialReason
from gpulease.protocol.failures import LEASE_ENDS, Failure
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

_TOO_LONG: Final = frozenset({None, Cause.KERNEL_TIMEOUT, Cause.LOAD_TIMEOUT})
_CAUSES: Final = {
    LEASE_ENDS[cause.value].status: cause
    for cause in (Cause.EXPIRED, Cause.REVOKED, Cause.FREED, Cause.SHUTDOWN, Cause.DRAINED)
}
_ENDS: Final = {cause.value: cause for cause in Cause}


def failure_of(denial: Denial) -> Failure:
    """What to answer a refused request."""
    return Failure(_STATUS[denial.reason], denial.message, hint=denial.hint)


def word_for(cause: Cause) -> Status:
    """What a worker answers once its lease has ended for `cause`."""
    # The client of an abandoned lease left before there was a session, so no tenant's session is told LEASE_FREED.
    return Status.SESSION_FAILED if cause is Cause.ABANDONED else LEASE_ENDS[cause.value].status


def submit_word_for(cause: Cause | None) -> Status:
    """What a submit's worker answers once it was ended for `cause`; None: its own time is over."""
    return Status.TIMED_OUT if cause in _TOO_LONG else word_for(cause or Cause.ABANDONED)


def cause_of(word: Status, said: str = "") -> Cause:
    """Why a lease ended whose worker answers so. `said`: the cause that its page names, "" if it names none."""
    cause = _ENDS.get(said)
    if cause is not None and word_for(cause) is word:
        return cause
    return _CAUSES.get(word, Cause.WORKER_DIED)
