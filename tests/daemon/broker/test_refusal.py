import pytest

from gpulease.client.errors import GpuLeaseError, error_class
from gpulease.daemon.broker.refusal import failure_of
from gpulease.daemon.leases import Denial, DenialReason
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
