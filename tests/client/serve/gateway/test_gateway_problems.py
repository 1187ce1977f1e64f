"""Every error has a status, and a reply with Retry-After only where a retry is safe."""

import pytest

from gpulease.client import errors
from gpulease.client.serve.gateway import gateway_errors
from gpulease.client.serve.gateway.gateway import problem_of


@pytest.mark.parametrize(
    ("error", "status", "code", "may_retry"),
    [
        (gateway_errors.OperationConflict("x"), 422, "key_conflict", False),
        (gateway_errors.OperationInProgress("x", 30), 409, "in_progress", True),
        (gateway_errors.StaleEpoch("x"), 409, "in_progress", True),
        (gateway_errors.OperationFailed("x", "SyncFailed"), 500, "operation_failed", False),
        (gateway_errors.OutcomeUnknown("x"), 500, "outcome_unknown", False),
        (gateway_errors.CapabilityRefused("x"), 502, "capability_refused", False),
        (gateway_errors.StoreUnavailable("x"), 503, "unavailable", True),
        (gateway_errors.Overloaded("x", 1, is_queue_full=True), 429, "queue_full", True),
        (gateway_errors.Overloaded("x", 1, is_queue_full=False), 503, "queue_timeout", True),
        (errors.CapacityExceeded("x"), 503, "no_capacity", True),
        (errors.Busy("x"), 503, "no_capacity", True),
        (errors.Disconnected("x"), 503, "unavailable", True),
        (errors.Drained("x"), 503, "unavailable", True),
        (errors.Fenced("x"), 503, "unavailable", True),
        (errors.Revoked("x"), 503, "unavailable", True),
        (errors.GpuSessionFailed("x"), 503, "unavailable", True),
        (errors.LoadFailed("x"), 500, "not_started", False),
        (errors.AllocFailed("x"), 500, "not_started", False),
        (errors.Denied("x"), 500, "not_started", False),
        (errors.InvalidRequest("x"), 400, "invalid_request", False),
        (RuntimeError("secret"), 500, "internal", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error(error: Exception, status: int, code: str, may_retry: bool) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert ("Retry-After" in problem.headers()) == may_retry
    assert all(1 <= int(seconds) <= 5 for seconds in problem.headers().values())
    body = problem.body("the id")
    assert (body["status"], body["code"], body["request_id"]) == (status, code, "the id")
    assert "secret" not in str(body)


@pytest.mark.parametrize("kind", [errors.Disconnected, errors.Untrusted, gateway_errors.StoreUnavailable])
def test_a_client_reads_nothing_of_the_host_s_sockets_and_paths(kind: type[errors.GpuLeaseError]) -> None:
    assert "/run" not in problem_of(kind("nobody is at /run/d.sock")).detail


def test_a_hint_is_for_who_runs_the_gateway() -> None:
    assert problem_of(errors.Revoked("by an operator", "Ask at /run/d.sock")).detail == "by an operator"
    assert "send less" in problem_of(errors.InvalidRequest("too much", "send less")).detail.lower()
