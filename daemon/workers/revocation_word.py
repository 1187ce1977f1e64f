"""The revocation word of a lease's page: the status with which operations fail after the lease has ended for a cause.

Several causes share one status, so a broker that takes over a worker reads the cause from the page as well.
"""

from typing import Final

from gpulease.daemon.leases.model import Cause
from gpulease.protocol.failures import LEASE_ENDS
from gpulease.protocol.opcodes import Status

_CAUSES_BY_WORD: Final = {
    LEASE_ENDS[cause.value].status: cause
    for cause in (Cause.EXPIRED, Cause.REVOKED, Cause.FREED, Cause.SHUTDOWN, Cause.DRAINED)
}
_CAUSES_BY_NAME: Final = {cause.value: cause for cause in Cause}


def word_for(cause: Cause) -> Status:
    """Return the status with which a worker answers once its lease has ended for `cause`."""
    # The client of an abandoned lease disconnected before there was a session, so LEASE_FREED can't be reported to it.
    return Status.SESSION_FAILED if cause is Cause.ABANDONED else LEASE_ENDS[cause.value].status


def submit_word_for(cause: Cause | None) -> Status:
    """Return the status with which a submit's worker answers after an end for `cause`; None: its timeout is over."""
    return Status.TIMED_OUT if cause is None or cause.row.is_time_limit else word_for(cause)


def cause_of(word: Status, name: str = "") -> Cause:
    """Return the cause for which a lease ended.

    Args:
        word: The revocation word on the lease's page.
        name: The cause's name on the page; "" if the page has none. A name that contradicts the word is ignored.
    """
    cause = _CAUSES_BY_NAME.get(name)
    if cause is not None and word_for(cause) is word:
        return cause
    return _CAUSES_BY_WORD.get(word, Cause.WORKER_DIED)
