import pickle

import pytest

from gpulease.client import errors
from gpulease.client.errors import (
    GpuLeaseError,
    GpuSessionFailed,
    InvalidRequest,
    LaunchFailed,
    LeaseExpired,
    OperationFailed,
    SyncFailed,
    answers,
    error_class,
    error_of,
)
from gpulease.protocol import Failure, Opcode, Status

PUBLIC_HOST_CODES = {
    "Disconnected": -1,
    "LeaseExpired": -2,
    "Fenced": -3,
    "CapacityExceeded": -4,
    "Unsupported": -5,
    "Revoked": -6,
}


def test_every_status_but_two_has_a_class_of_its_own() -> None:
    plain = {status for status in Status if error_class(status) is GpuLeaseError}
    assert plain == {Status.OK, Status.INTERNAL}


def test_the_public_host_codes() -> None:
    for name, code in PUBLIC_HOST_CODES.items():
        kind = getattr(errors, name)
        assert kind.host_code == code
        assert kind.default_status == code


def test_a_status_has_one_class() -> None:
    with pytest.raises(ValueError, match="LEASE_EXPIRED is LeaseExpired already, it can't be Other too"):

        @answers(Status.LEASE_EXPIRED)
        class Other(GpuLeaseError):
            pass


def test_an_unknown_status_survives() -> None:
    assert error_class(-12345) is GpuLeaseError
    error = error_of(Failure(-12345, "new"), "sync")  # type: ignore[arg-type]
    assert str(error) == "sync: new"
    assert error.status == -12345


def test_an_error_says_what_failed_why_and_what_to_do() -> None:
    error = error_of(Failure(Status.LEASE_EXPIRED, "its time was up.", "lease again"), "sync")
    assert str(error) == "sync: its time was up. Lease again"
    assert str(LeaseExpired("it is over", "")).startswith("it is over. Acquire a new lease")
    assert str(InvalidRequest("no")) == "no"


@pytest.mark.parametrize(
    ("op", "kernel", "words"),
    [
        (Opcode.LAUNCH, "scale", "earlier launch 7 of kernel 'scale' failed"),
        (Opcode.LAUNCH, "", "earlier launch 7 failed"),
        (Opcode.MEM_FREE, "", "earlier MEM_FREE 7 failed"),
        (0x7777, "", "earlier request 7 failed"),
    ],
)
def test_a_deferred_failure_names_what_failed(op: int, kernel: str, words: str) -> None:
    failure = Failure(Status.SYNC_FAILED, "bad", failed_request_id=7, failed_op=op, kernel=kernel)
    message = str(error_of(failure, "mem_alloc"))
    assert message.startswith(f"mem_alloc: {words}: bad; this mem_alloc was not executed")


def test_errors_travel_between_processes() -> None:
    failure = Failure(Status.SYNC_FAILED, "bad", kernel="scale", address=0x10)
    copy = pickle.loads(pickle.dumps(error_of(failure, "sync")))
    assert isinstance(copy, SyncFailed)
    assert (copy.kernel, copy.address, str(copy)) == ("scale", 0x10, str(error_of(failure, "sync")))


def test_the_tree_in_the_documentation_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = [line for line in errors.__doc__.splitlines() if "─" in line or line.strip() == "GpuLeaseError"]
    for line in drawn:
        kind = getattr(errors, line.split("─")[-1].split()[0])
        depth = next(at for at, char in enumerate(line[4:]) if char.isalpha()) // 4
        assert len(kind.__mro__) - len(GpuLeaseError.__mro__) == depth
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GpuLeaseError)}
    assert len(drawn) == len(classes)
    assert {error_class(status) for status in Status} <= classes
    assert issubclass(LaunchFailed, OperationFailed)
    assert not issubclass(OperationFailed, GpuSessionFailed)
