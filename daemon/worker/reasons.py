"""Why a session did not do what it was asked: errors and ended leases as failures a tenant can read."""

from typing import Final

from gpulease.daemon.drivers.interface import DriverError, ImageRejected, LaunchRejected
from gpulease.daemon.worker.ledger import Refused
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Opcode, Status

_REFUSAL_TEXT: Final = {
    Status.LEASE_EXPIRED: ("the lease has expired", "Acquire a new lease, and renew it in time."),
    Status.REVOKED: ("the lease was revoked", "Ask the operator why before you acquire another."),
    Status.LEASE_FREED: ("the lease was freed", "Acquire a new lease."),
    Status.DISCONNECTED: ("the daemon is stopping", "Acquire a new lease once it is back, or on another node."),
    Status.DRAINED: ("the node was drained", "Acquire a new lease on another node."),
    Status.TIMED_OUT: (
        "the submit took more time than it was given",
        "Give it more: .timeout_secs(seconds); or make the kernel shorter.",
    ),
    Status.DENIED: (
        "the token this connection attached with is over: it expired, was revoked, or the lease was renewed since",
        "Get a new token and attach again.",
    ),
    Status.SESSION_FAILED: ("the session has failed", "Ask the daemon why, then acquire a new lease."),
}

REFUSALS: Final = tuple(_REFUSAL_TEXT)
"""The statuses that a control page's word is known to have, and what is answered to a guest whose token is over."""

_DRIVER_STATUS: Final[dict[int, Status]] = {
    Opcode.MEM_ALLOC: Status.ALLOC_FAILED,
    Opcode.MODULE_LOAD: Status.LOAD_FAILED,
    Opcode.LAUNCH: Status.LAUNCH_FAILED,
    Opcode.GRAPH_CREATE: Status.LAUNCH_FAILED,
    Opcode.GRAPH_LAUNCH: Status.LAUNCH_FAILED,
    Opcode.SYNC: Status.SYNC_FAILED,
    Opcode.STREAM_CREATE: Status.ALLOC_FAILED,
    Opcode.STREAM_SYNC: Status.SYNC_FAILED,
    Opcode.SUBMIT_RUN: Status.ALLOC_FAILED,
}


def refusal_of(status: Status, reason: str = "") -> Failure:
    """Why every operation is refused from now on, by the control page's word and what the page says besides."""
    message, hint = _REFUSAL_TEXT.get(status, ("the lease has ended", "Acquire a new lease."))
    return Failure(status, f"{message}: {reason}" if reason else message, hint=hint)


def failure_of(error: Exception, op: int) -> Failure:
    """What an operation's error was. Raises the error if it is none that an operation may end with."""
    match error:
        case Refused():
            return error.failure
        case BodyError():
            return Failure(error.status, str(error))
        case ImageRejected():
            return Failure(Status.LOAD_FAILED, str(error), hint=error.hint, log=error.log, line=error.line)
        case LaunchRejected():
            return Failure(Status.LAUNCH_FAILED, str(error), hint=error.hint)
        case DriverError():
            return Failure(_DRIVER_STATUS.get(op, Status.SESSION_FAILED), str(error), hint=error.hint)
    raise error
