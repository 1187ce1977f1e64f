import pytest

from gpulease.client.errors import GpuLeaseError, error_class
from gpulease.daemon.broker.refusal import failure_of
from gpulease.daemon.leases import Cause, Denial, DenialReason
from gpulease.daemon.workers.revocation_word import word_for
from gpulease.protocol.failures import LEASE_ENDS
from gpulease.protocol.opcodes import Status


@pytest.mark.parametrize("reason", DenialReason)
def test_every_refusal_has_a_status_that_clients_know(reason: DenialReason) -> None:
    failure = failure_of(Denial(reason, "It can't be.", "Do something else."))
    assert failure.status is not Status.OK
    assert (failure.message, failure.hint) == ("It can't be.", "Do something else.")
    assert error_class(failure.status) is not GpuLeaseError


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (DenialReason.LEASE_EXPIRED, Status.LEASE_EXPIRED),
        (DenialReason.REVOKED, Status.REVOKED),
        (DenialReason.FENCED, Status.FENCED),
        (DenialReason.CAPACITY_EXCEEDED, Status.CAPACITY_EXCEEDED),
        (DenialReason.UNSUPPORTED, Status.UNSUPPORTED),
    ],
)
def test_public_error_numbers(reason: DenialReason, status: Status) -> None:
    assert failure_of(Denial(reason, "", "")).status is status


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_word_that_a_worker_can_say(cause: Cause) -> None:
    word = word_for(cause)
    assert word is not Status.OK
    assert error_class(word) is not GpuLeaseError


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (Cause.EXPIRED, Status.LEASE_EXPIRED),
        (Cause.REVOKED, Status.REVOKED),
        (Cause.FREED, Status.LEASE_FREED),
        (Cause.FAULTED, Status.SESSION_FAILED),
        (Cause.DRAINED, Status.DRAINED),
        (Cause.ORPHANED, Status.LEASE_EXPIRED),
    ],
)
def test_words(cause: Cause, word: Status) -> None:
    assert word_for(cause) is word


def test_every_cause_has_its_words_and_no_words_lack_a_cause() -> None:
    assert set(LEASE_ENDS) == {cause.value for cause in Cause}
