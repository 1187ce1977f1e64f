"""Errors of serving a request, in addition to those of leases (`gpulease.client.errors`).

GatewayError
├── OperationConflict   the id was used for another operation
├── OperationInProgress another attempt at the same operation has not ended
├── OperationFailed     the operation was attempted and failed; it is not executed again
│   └── OutcomeUnknown  the operation may have been executed; it is not executed again
├── StaleEpoch          another attempt has replaced this one
├── CapabilityRefused   the grant does not permit the submission
├── StoreUnavailable    the idempotency store does not answer
└── Overloaded          the gateway has no room for the request
"""

from gpulease.client.errors import GpuLeaseError


class GatewayError(GpuLeaseError):
    """Base of the errors of a request that was not served."""


class OperationConflict(GatewayError):
    """The request's id was used for another operation: another model, input or output length."""

    default_hint = "Use a new id for a new request"


class OperationInProgress(GatewayError):
    """Another attempt at the same operation has not ended.

    Attributes:
        retry_after_s: Seconds until that attempt has ended, or its claim has expired.
    """

    default_hint = "Repeat the request with the same id"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OperationFailed(GatewayError):
    """The operation was attempted and failed. Repeating the request with the same id returns the same error.

    Attributes:
        kind: The class of the error that ended it.
    """

    default_hint = "Use a new id to run it again"

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind or type(self).__name__


class OutcomeUnknown(OperationFailed):
    """An attempt may have begun the effect, and died before it recorded the outcome. The operation is not retried."""


class StaleEpoch(GatewayError):
    """The reservation has ended: its claim expired, and another attempt has replaced this one."""

    default_hint = "Repeat the request with the same id to get the other attempt's outcome"


class CapabilityRefused(GatewayError):
    """The grant does not permit the submission. Nothing was done on the card."""


class StoreUnavailable(GatewayError):
    """The idempotency store does not answer, so no attempt may begin."""

    default_hint = "Repeat the request with the same id in a moment"


class Overloaded(GatewayError):
    """The gateway has no room for the request.

    Attributes:
        retry_after_s: Seconds after which the request may be retried.
        is_queue_full: True if the queue had no place; False if the request waited in the queue for too long.
    """

    default_hint = "Repeat the request with the same id in a moment"

    def __init__(self, message: str, retry_after_s: float, *, is_queue_full: bool) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_queue_full = is_queue_full
