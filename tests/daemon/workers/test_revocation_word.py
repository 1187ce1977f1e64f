import pytest

from gpulease.client.errors import GpuLeaseError, error_class
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.workers.revocation_word import word_for
from gpulease.protocol.opcodes import Status


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_status_that_clients_know(cause: Cause) -> None:
    status = word_for(cause)
    assert status is not Status.OK
    assert error_class(status) is not GpuLeaseError


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (Cause.EXPIRED, Status.LEASE_EXPIRED),
        (Cause.REVOKED, Status.REVOKED),
        (Cause.FREED, Status.LEASE_FREED),
        (Cause.FAULTED, Status.SESSION_FAILED),
        (Cause.DRAINED, Status.DRAINED),
        (Cause.ORPHANED, Status.LEASE_EXPIRED),
    ],
)
def test_statuses_of_causes(cause: Cause, status: Status) -> None:
    assert word_for(cause) is status
