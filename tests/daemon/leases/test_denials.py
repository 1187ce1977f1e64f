import pytest

from gpulease.client.errors import GpuLeaseError, error_class
from gpulease.daemon.leases.denials import Denial, DenialReason
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


@pytest.mark.parametrize("reason", DenialReason)
def test_every_denial_has_an_answer_that_clients_know(reason: DenialReason) -> None:
    failure = Denial(reason, "It can't be.", "Do something else.").failure
    assert failure == Failure(reason.status, "It can't be.", "Do something else.")
    assert failure.status is not Status.OK
    assert error_class(failure.status) is not GpuLeaseError


def test_names_in_records_and_statuses_on_the_wire() -> None:
    assert {reason.value: reason.status.name for reason in DenialReason} == {
        "capacity_exceeded": "CAPACITY_EXCEEDED",
        "lease_expired": "LEASE_EXPIRED",
        "revoked": "REVOKED",
        "fenced": "FENCED",
        "unsupported": "UNSUPPORTED",
        "invalid_request": "INVALID_REQUEST",
        "not_found": "NOT_FOUND",
        "limit": "DENIED",
        "rate": "BUSY",
        "session_failed": "SESSION_FAILED",
        "freed": "LEASE_FREED",
        "shutting_down": "DISCONNECTED",
        "not_recorded": "BUSY",
        "drained": "DRAINED",
        "busy": "BUSY",
        "not_allowed": "DENIED",
        "isolated": "BUSY",
        "name_taken": "BUSY",
    }
