"""The errors of the library. Every error says what failed, why, and what to do.

    GpuLeaseError
    ├── LeaseExpired        the lease's time is up
    ├── Revoked             an operator took the lease back
    ├── Fenced              the card's memory could not be proved free, and stays fenced until an operator clears it
    ├── CapacityExceeded    no card has that much room
    │   └── Busy            the daemon is at capacity (connections or requests)
    ├── Drained             the node is drained: it grants no lease, or ended this one
    ├── TimedOut            a one-shot job exceeded its time limit
    ├── Disconnected        no daemon answers, the connection was lost, or the daemon shut down (which ends the lease)
    │   └── Untrusted       the peer at that address could not prove that it is the daemon
    ├── Unsupported         the daemon does not support the request, or a part of it
    ├── Denied              the daemon does not let this tenant do that
    ├── InvalidRequest      the request is invalid
    │   ├── LeaseFreed      the lease was already freed
    │   └── NotFound        the daemon has no such lease
    ├── GpuSessionFailed    the session is lost: its process or its context failed, and its lease is over
    └── OperationFailed     one operation failed; the session continues
        ├── AllocFailed     the slice has no room for that
        ├── InvalidHandle   a buffer or module that is freed, from another session, or too small
        ├── LoadFailed      a module did not compile (`log`, `line`)
        ├── LaunchFailed    a kernel could not be started (`kernel`)
        ├── SyncFailed      a kernel failed while it ran (`kernel`, `address`)
        └── RegionFailed    an operation used a region that has ended or is cancelled
            │               (`lease_id`, `kernel`, `site`, `position`)
            ├── RegionRevoked    the region was revoked
            ├── RegionExpired    its time is up
            ├── RegionFreed      it was freed
            ├── RegionFenced     it had ended before, and an earlier error said how
            └── RegionCancelled  it is cancelled until it is resumed

A fault on a GPU can end the context. Later operations then raise the same SyncFailed, or GpuSessionFailed. A status
without a separate class is a plain GpuLeaseError.
"""

from collections.abc import Callable, Container
from typing import ClassVar, TypeVar

from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.lease_ids import LeaseId

_BY_STATUS: "dict[int, type[GpuLeaseError]]" = {}
_OF_REGION: "dict[int, type[GpuLeaseError]]" = {}


class GpuLeaseError(Exception):
    """A request failed.

    Attributes:
        message: What failed and why.
        hint: What to do about it; may be "".
        status: The status on the wire.
        failure: The daemon's complete failure; for an error that the client found, a failure built here.
    """

    host_code: ClassVar[int | None] = None
    """The public error number of the host API, for the errors that have one."""
    default_status: ClassVar[Status] = Status.INTERNAL
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, hint: str = "", failure: Failure | None = None) -> None:
        # This does the same as `Exception.__init__`, but faster: a tenant waits for the error of a refused launch.
        self.args = message, hint, failure
        # The message is for people, the failure for programs. An error that the client found builds its own failure.
        self.message = message
        self.hint = hint or self.default_hint
        self.failure = failure or Failure(self.default_status, message, hint)

    @property
    def status(self) -> Status:
        """The status on the wire; `default_status` of the class if the client found the error."""
        return self.failure.status

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        # Write one sentence, followed by the hint as another.
        return f"{self.message.rstrip().rstrip('.')}. {self.hint[:1].upper()}{self.hint[1:]}"


E = TypeVar("E", bound=type[GpuLeaseError])


def answers(status: Status) -> Callable[[E], E]:
    """Make the decorated class a status's error. Raises ValueError if the status already has a class."""

    def register(kind: E) -> E:
        # A second class for a status would replace the first one silently.
        if status in _BY_STATUS:
            raise ValueError(f"{status.name} is {_BY_STATUS[status].__name__} already, it can't be {kind.__name__} too")
        _BY_STATUS[status] = kind
        kind.default_status = status
        return kind

    return register


@answers(Status.LEASE_EXPIRED)
class LeaseExpired(GpuLeaseError):
    """The lease's time is up; its context and its memory are gone."""

    host_code = -2
    default_hint = "Acquire a new lease; renew it in time with lease.renew() or lease.keep_alive()"


@answers(Status.REVOKED)
class Revoked(GpuLeaseError):
    """An operator took the lease back; its context and its memory are gone."""

    host_code = -6
    default_hint = "Ask the node's operator why, then acquire a new lease"


@answers(Status.FENCED)
class Fenced(GpuLeaseError):
    """The card's memory could not be proved free, so the daemon does not grant it again."""

    host_code = -3
    default_hint = "Use another card, or ask the node's operator to clear the fence"


@answers(Status.CAPACITY_EXCEEDED)
class CapacityExceeded(GpuLeaseError):
    """No card has enough free memory now, or none became free within the time that the request waited."""

    host_code = -4
    default_hint = "Request less memory, or wait for room with GpuBuilder.timeout(seconds)"


@answers(Status.BUSY)
class Busy(CapacityExceeded):
    """The daemon is at capacity: connections or requests, not memory."""

    default_hint = "Try again in a moment"


@answers(Status.DRAINED)
class Drained(GpuLeaseError):
    """The node is being drained: it grants no lease, renews none, or has ended this one."""

    default_hint = "Acquire a lease on another node"


@answers(Status.TIMED_OUT)
class TimedOut(GpuLeaseError):
    """A one-shot job or an operation exceeded its time limit and was ended; its lease continues."""

    default_hint = "Give it more time"


@answers(Status.DISCONNECTED)
class Disconnected(GpuLeaseError):
    """No daemon answers, the connection ended without a reason, or the daemon stops, which ends its leases."""

    host_code = -1
    default_hint = "Is gpuleased running?"


class Untrusted(Disconnected):
    """The peer at a tls: address could not prove that it is the intended daemon; nothing was sent to it."""

    default_hint = "Ask the node's operator for the node's name and its CA's certificate"


@answers(Status.UNSUPPORTED)
class Unsupported(GpuLeaseError):
    """The daemon can't serve this request: it has another version, or its card lacks the feature."""

    host_code = -5
    default_hint = "Compare the versions of the daemon and of this client, and what the card supports"


@answers(Status.DENIED)
class Denied(GpuLeaseError):
    """The daemon does not let this tenant do that."""

    default_hint = "Ask the node's operator for permission"


@answers(Status.INVALID_REQUEST)
class InvalidRequest(GpuLeaseError):
    """The request is invalid, whichever tenant sends it."""


@answers(Status.LEASE_FREED)
class LeaseFreed(InvalidRequest):
    """The lease was freed; its memory may be another tenant's now."""

    default_hint = "Acquire a new lease"


@answers(Status.NOT_FOUND)
class NotFound(InvalidRequest):
    """The daemon has no record of the lease, which ended long ago, or before the daemon was restarted."""

    default_hint = "Acquire a new lease"


@answers(Status.SESSION_FAILED)
class GpuSessionFailed(GpuLeaseError):
    """The session is lost: its process or its context failed, and its lease is over."""

    default_hint = "Acquire a new lease"


class OperationFailed(GpuLeaseError):
    """An operation failed; the session continues. Every such error has one of the classes below."""


@answers(Status.ALLOC_FAILED)
class AllocFailed(OperationFailed):
    """The slice has no room for that allocation."""

    default_hint = "Free buffers, or acquire a larger lease"


@answers(Status.INVALID_HANDLE)
class InvalidHandle(OperationFailed):
    """A buffer or module that is freed, belongs to another session, or is too small for the operation."""

    default_hint = "Use only this session's handles, stay within their size, and don't use them after freeing them"


@answers(Status.LOAD_FAILED)
class LoadFailed(OperationFailed):
    """A module did not compile or load; `log` and `line` say why."""

    default_hint = "See `.log` for the compiler's whole output, and `.line` for the line of the source that it names"

    @property
    def log(self) -> str:
        """The compiler's log; "" if the driver returned none."""
        return self.failure.log

    @property
    def line(self) -> int:
        """The line of the source (CUDA C, or PTX) that the log names, from 1; 0 if it names none."""
        return self.failure.line


@answers(Status.LAUNCH_FAILED)
class LaunchFailed(OperationFailed):
    """A kernel could not be started, for example because its name or its parameters don't match the module."""

    default_hint = "Check the kernel name, arguments and block size against `module.kernels`"

    @property
    def kernel(self) -> str:
        """The name of the kernel that was to be launched."""
        return self.failure.kernel


@answers(Status.SYNC_FAILED)
class SyncFailed(OperationFailed):
    """A kernel failed while it ran. Don't use the memory that this kernel and later ones wrote."""

    default_hint = "Check the kernel's bounds and arguments"

    @property
    def kernel(self) -> str:
        """The kernel's name; "" if the driver doesn't report it."""
        return self.failure.kernel

    @property
    def address(self) -> int | None:
        """The device address that faulted; None if the driver doesn't report it."""
        return self.failure.address


class RegionFailed(OperationFailed):
    """A region refuses an operation that names it. The session and its other regions continue."""

    default_hint = "Stop using this region; the session and its other regions still work"

    @property
    def lease_id(self) -> LeaseId:
        """The region's lease id, as `Region.lease_id`."""
        return LeaseId(self.failure.region or 0)

    @property
    def kernel(self) -> str:
        """The kernel of the refused launch; "" for a copy or a graph of several kernels."""
        return self.failure.kernel

    @property
    def site(self) -> int | None:
        """The index of the refused launch in its burst or graph, from 0; None for a copy."""
        return self.failure.site

    @property
    def position(self) -> int | None:
        """The position that the refused launch passed."""
        return self.failure.position

    @property
    def flipped_ns(self) -> int | None:
        """When the daemon ended or cancelled the region, in nanoseconds of its host's monotonic clock."""
        return self.failure.flipped_ns


def _answers_of_region(status: Status) -> Callable[[E], E]:
    """Make the decorated class a status's error in failures that name a region."""

    # A region's status has a separate class, because the session continues: after a lease's end with that status it
    # does not.
    def register(kind: E) -> E:
        _OF_REGION[status] = kind
        kind.default_status = status
        return kind

    return register


@_answers_of_region(Status.REVOKED)
class RegionRevoked(RegionFailed):
    """The region was revoked. Later operations that name it raise RegionFenced."""


@_answers_of_region(Status.LEASE_EXPIRED)
class RegionExpired(RegionFailed):
    """The region's time is up. Later operations that name it raise RegionFenced."""


@_answers_of_region(Status.LEASE_FREED)
class RegionFreed(RegionFailed):
    """The region was freed. Later operations that name it raise RegionFenced."""


@_answers_of_region(Status.FENCED)
class RegionFenced(RegionFailed):
    """The region had ended, as an earlier error reported, or its memory could not be proved free."""


@answers(Status.CANCELLED)
@_answers_of_region(Status.CANCELLED)
class RegionCancelled(RegionFailed):
    """The region is cancelled until `Region.resume`; it has not ended."""

    default_hint = "Abandon the launch's work, or call region.resume()"


PERMANENT_ERRORS = (
    LeaseExpired,
    Revoked,
    Fenced,
    Drained,
    InvalidRequest,
    Denied,
    Unsupported,
    Untrusted,
    RegionFailed,
)
"""Errors that retrying the same request can't fix."""


def error_class(status: int, *, of_region: bool = False) -> type[GpuLeaseError]:
    """Return the error class of a status.

    Args:
        status: A number from the wire; a newer daemon may send one that this client doesn't support.
        of_region: Whether the failure names a region.

    Returns:
        The class; for a status without one, the base class, RegionFailed or GpuLeaseError.
    """
    # A number that this client does not support gets the base class, so that programs can catch it.
    return _OF_REGION.get(status, RegionFailed) if of_region else _BY_STATUS.get(status, GpuLeaseError)


def error_of(failure: Failure, operation: str, own_requests: Container[int] = ()) -> GpuLeaseError:
    """Return the error to raise for a failure.

    Args:
        failure: The daemon's failure.
        operation: The operation that received it.
        own_requests: Ids of the operation's own *quiet* requests (sent without waiting for a reply). The failure of any
            other request is reported as an earlier request's.
    """
    number = failure.failed_request_id
    # A quiet request's failure arrives with a later reply. Report which request failed, and that this one was not
    # executed.
    if number is None or number in own_requests:
        message = f"{operation}: {failure.message}"
    else:
        message = (
            f"{operation}: {_earlier(failure, number)} failed: {failure.message}; this {operation} was not executed"
        )
    return error_class(failure.status, of_region=failure.region is not None)(message, failure.hint, failure)


def _earlier(failure: Failure, number: int) -> str:
    # Name launches by their kernels, because programs choose a launch by its kernel's name.
    if failure.failed_op in (Opcode.LAUNCH, Opcode.LAUNCH_IN, Opcode.LAUNCH_WITH):
        kernel = f" of kernel {failure.kernel!r}" if failure.kernel else ""
        return f"earlier launch {number}{kernel}"
    try:
        return f"earlier {Opcode(failure.failed_op or 0).name} {number}"
    except ValueError:
        return f"earlier request {number}"
