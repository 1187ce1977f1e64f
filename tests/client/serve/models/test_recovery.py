"""After a lease or a batch failed: the pause, the error to blame, and the code for callers."""

import pytest

from gpulease.client import LeaseEvent, Phase, errors
from gpulease.client.serve.models.recovery import (
    MAX_PAUSE_S,
    PRESSURE_PAUSE_S,
    RestartPause,
    code_of,
    is_broken,
    lease_end_of,
)
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.rpc import CallErrorCode


def test_pauses_grow_to_a_bound_and_begin_anew_after_a_success() -> None:
    pause = RestartPause(lambda: 1.0)
    lost = errors.Revoked("revoked")
    found = [pause.after(lost) for _ in range(12)]
    assert found[:4] == [0.05, 0.1, 0.2, 0.4]
    assert found[-1] == MAX_PAUSE_S
    pause.succeeded()
    assert pause.after(lost) == 0.05
    assert RestartPause(lambda: 0.0).after(lost) == 0.025


@pytest.mark.parametrize("error", [errors.CapacityExceeded("full"), errors.Busy("busy"), errors.LoadFailed("no PTX")])
def test_some_are_not_asked_again_at_once(error: errors.GpuLeaseError) -> None:
    assert RestartPause(lambda: 0.0).after(error) == PRESSURE_PAUSE_S


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.LoadFailed("no PTX"), True),
        (errors.AllocFailed("too small"), True),
        (errors.InvalidRequest("a lease of 9 days"), True),
        (errors.NotFound("the daemon is another"), False),
        (errors.Disconnected("gone"), False),
        (errors.CapacityExceeded("full"), False),
    ],
)
def test_whom_to_blame(error: errors.GpuLeaseError, expected: bool) -> None:
    assert is_broken(error) is expected


@pytest.mark.parametrize(
    ("phase", "cause", "kind"),
    [
        (Phase.ACTIVE, "", None),
        (Phase.WARNING, "", None),
        (Phase.GRACE, "expired", errors.LeaseExpired),
        (Phase.TEARDOWN, "revoked", errors.Revoked),
        (Phase.ENDED, "isolated", errors.Revoked),
        (Phase.ENDED, "drained", errors.Drained),
        (Phase.ENDED, "kernel_timeout", errors.GpuSessionFailed),
        (9, "of a newer daemon", errors.GpuSessionFailed),
    ],
)
def test_events(phase: Phase | int, cause: str, kind: type[errors.GpuLeaseError] | None) -> None:
    ending = lease_end_of(LeaseEvent(LeaseId(1), phase, 0.0, 1, cause, "because", 0))
    assert type(ending) is (type(None) if kind is None else kind)
    assert ending is None or "because" in str(ending)


def test_what_a_batch_is_told() -> None:
    assert code_of(errors.SyncFailed("fault")) is CallErrorCode.KERNEL_FAILED
    assert code_of(errors.LeaseExpired("over")) is CallErrorCode.LEASE_LOST
