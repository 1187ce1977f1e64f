"""The revocation word of a lease's page: which status ends the operations of a lease that ended for a cause.

Several causes share one status. A broker that takes a worker over therefore reads the cause from the page, too.
"""

from typing import Final

from gpulease.daemon.leases import Cause
from gpulease.protocol.opcodes import Status

_WORDS: Final = {
    Cause.ORPHANED: Status.LEASE_EXPIRED,
    Cause.EXPIRED: Status.LEASE_EXPIRED,
    Cause.REVOKED: Status.REVOKED,
    Cause.FREED: Status.LEASE_FREED,
    Cause.SHUTDOWN: Status.DISCONNECTED,
    Cause.DRAINED: Status.DRAINED,
}
_CAUSES_BY_WORD: Final = {word: cause for cause, word in _WORDS.items() if cause is not Cause.ORPHANED}
_CAUSES_BY_NAME: Final = {cause.value: cause for cause in Cause}

_TIME_LIMITS: Final = frozenset({None, Cause.KERNEL_TIMEOUT, Cause.LOAD_TIMEOUT})
"""Causes by which a submit has run for too long. None: its own timeout."""


def word_for(cause: Cause) -> Status:
    """Return the status that a worker answers once its lease has ended for `cause`."""
    return _WORDS.get(cause, Status.SESSION_FAILED)


def submit_word_for(cause: Cause | None) -> Status:
    """Return the status that a submit's worker answers once it was ended for `cause`; None: its timeout is over."""
    return Status.TIMED_OUT if cause in _TIME_LIMITS else word_for(cause or Cause.ABANDONED)


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
