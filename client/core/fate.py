"""What became of a lease whose session's connection ended: the broker knows, so it is asked."""

from collections.abc import Mapping
from typing import Final

from gpulease.client.core.lease import DAEMON_STOPS_HINT, LeaseState
from gpulease.client.core.steps import Procedure, Sleep
from gpulease.client.errors import Disconnected, GpuLeaseError
from gpulease.protocol import Failure, Status

FATE_WAIT_S: Final = 2.0
"""How long the broker may take to notice that a worker is gone. It is told by the kernel, in milliseconds; two seconds
is a host under heavy load."""

FATE_POLL_S: Final = 0.05
"""Pause between two questions."""

_STATUS_BY_CAUSE: Final = {
    "freed": Status.LEASE_FREED,
    "abandoned": Status.LEASE_FREED,
    "expired": Status.LEASE_EXPIRED,
    "revoked": Status.REVOKED,
    "faulted": Status.SESSION_FAILED,
    "worker_died": Status.SESSION_FAILED,
    "spawn_failed": Status.SESSION_FAILED,
    "shutdown": Status.DISCONNECTED,
    "over_slice": Status.SESSION_FAILED,
    "kernel_timeout": Status.SESSION_FAILED,
    "unresponsive": Status.SESSION_FAILED,
    "drained": Status.DRAINED,
    "load_timeout": Status.SESSION_FAILED,
    "orphaned": Status.LEASE_EXPIRED,
}
_WORDS: Final = {
    "freed": "the lease was freed",
    "abandoned": "the lease was given up",
    "expired": "the lease expired",
    "revoked": "the lease was revoked",
    "faulted": "the session's GPU context failed",
    "worker_died": "the session's process died",
    "spawn_failed": "the session's process could not be started",
    "shutdown": "the daemon shut down",
    "over_slice": "the session held more of the card than was leased",
    "kernel_timeout": "a kernel ran for longer than the lease allows",
    "unresponsive": "the session's process did not answer any more",
    "drained": "the lease ended because its node was drained",
    "load_timeout": "an image compiled for longer than the node allows",
    "orphaned": "the lease was orphaned",
}
_FENCE_MATTERS: Final = frozenset({Status.SESSION_FAILED, Status.DISCONNECTED})
"""How a lease ended matters more to its tenant than whether its memory came back, except for these."""


def fate_of(report: Mapping[str, object]) -> Failure | None:
    """How the lease in a LEASE_QUERY report ended; None if it has not."""
    cause, state = report.get("cause"), report.get("state")
    if cause is None and state != "fenced":
        return None
    reason = str(report.get("reason") or "")
    status = _STATUS_BY_CAUSE.get(str(cause), Status.SESSION_FAILED)
    words = _WORDS.get(str(cause), f"the lease ended ({cause})")
    if state == "fenced" and status in _FENCE_MATTERS:
        status, words = Status.FENCED, f"{words} and its memory is fenced"
    hint = DAEMON_STOPS_HINT if status is Status.DISCONNECTED else ""
    return Failure(status, f"{words}: {reason}" if reason else words, hint)


def find_fate(lease: LeaseState, ended: Failure) -> Procedure[Failure]:
    """How a lease ended whose session's connection did, as `ended` says; never raises for what the broker answers."""
    last = lease.clock() + FATE_WAIT_S
    try:
        while lease.over is None:
            lease.over = fate_of((yield from lease.query()))
            if lease.over is not None or lease.clock() >= last:
                break
            yield Sleep(FATE_POLL_S)
    except Disconnected as error:
        return lease.over or Failure(Status.DISCONNECTED, f"{ended.message}; then {error.message}", error.hint)
    except GpuLeaseError as error:
        return _unknown_lease(lease, error.failure)
    return lease.over or Failure(
        Status.DISCONNECTED,
        f"{ended.message}, and the daemon says the lease is still active",
        "Open the session anew, or acquire a new lease",
    )


def _unknown_lease(lease: LeaseState, failure: Failure) -> Failure:
    """A daemon forgets leases some time after their end: what is past its deadline expired."""
    if failure.status is Status.NOT_FOUND and lease.clock() >= lease.deadline:
        return Failure(Status.LEASE_EXPIRED, "the lease expired")
    return failure
