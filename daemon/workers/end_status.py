"""The status that a worker answers every request with once its lease has ended, and the cause that it stands for.

The broker writes the status into the worker's control page as its revocation flag. A later broker reads it back.
"""

from typing import Final

from gpulease.daemon.leases import Cause
from gpulease.protocol.opcodes import Status

_STATUS: Final = {
    Cause.ORPHANED: Status.LEASE_EXPIRED,
    Cause.EXPIRED: Status.LEASE_EXPIRED,
    Cause.REVOKED: Status.REVOKED,
    Cause.FREED: Status.LEASE_FREED,
    Cause.SHUTDOWN: Status.DISCONNECTED,
    Cause.DRAINED: Status.DRAINED,
}
_OUT_OF_TIME: Final = frozenset({None, Cause.KERNEL_TIMEOUT, Cause.LOAD_TIMEOUT})
_CAUSES: Final = {status: cause for cause, status in _STATUS.items() if cause is not Cause.ORPHANED}
_CAUSE_BY_NAME: Final = {cause.value: cause for cause in Cause}


def end_status(cause: Cause) -> Status:
    """Return what a session's worker answers once its lease has ended for `cause`."""
    return _STATUS.get(cause, Status.SESSION_FAILED)


def submit_end_status(cause: Cause | None) -> Status:
    """Return what a submit's worker answers once it was ended for `cause`; None if the submit's own time is over."""
    return Status.TIMED_OUT if cause in _OUT_OF_TIME else end_status(cause or Cause.ABANDONED)


def cause_of(status: Status, name: str = "") -> Cause:
    """Return why a lease ended whose worker answers `status`.

    The worker's page may name the cause (`name`, "" for none). A name that contradicts `status` is ignored.
    """
    cause = _CAUSE_BY_NAME.get(name)
    if cause is not None and end_status(cause) is status:
        return cause
    return _CAUSES.get(status, Cause.WORKER_DIED)
