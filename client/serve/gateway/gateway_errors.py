"""Errors between a request and its effect, in addition to a lease's own (`gpulease.client.errors`).

GatewayError
├── OperationConflict   the id was used for another operation
├── OperationInProgress another attempt at the same operation has not ended
├── OperationFailed     the operation was attempted and failed; it is not done again
│   └── OutcomeUnknown  the operation may have been done; it is not done again
├── StaleEpoch          another attempt has taken this one's place
├── CapabilityRefused   the grant does not permit the submission
├── StoreUnavailable    the idempotency store does not answer
└── Overloaded          the gateway has no room for the request
"""

from gpulease.client.errors import GpuLeaseError


class GatewayError(GpuLeaseError):
    """A request was not served."""


class OperationConflict(GatewayError):
    """The request's id stands for another operation already: another model, input or output length."""

    default_hint = "Use a new id for a new request"


class OperationInProgress(GatewayError):
    """Another attempt at the same operation has not ended.

    Attributes:
        retry_after_s: Seconds after which that attempt has ended, or its claim is over, at the latest.
    """

    default_hint = "Ask again with the same id"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OperationFailed(GatewayError):
    """The operation was attempted and failed; asking again with the same id gives the same answer.

    Attributes:
        kind: The class of the error that ended it.
    """

    default_hint = "Use a new id to run it again"

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind or type(self).__name__


class OutcomeUnknown(OperationFailed):
    """An attempt began its effect and died before it recorded the outcome. The operation is not retried."""


class StaleEpoch(GatewayError):
    """The reservation is over: its claim ran out, and another attempt has taken its place."""

    default_hint = "Ask again with the same id for what came of the other attempt"


class CapabilityRefused(GatewayError):
    """The grant does not permit the submission; nothing was done on the card."""


class StoreUnavailable(GatewayError):
    """The idempotency store does not answer, so no attempt may begin."""

    default_hint = "Ask again with the same id in a moment"


class Overloaded(GatewayError):
    """The gateway has no room for the request.

    Attributes:
        retry_after_s: Seconds after which asking again makes sense.
        is_queue_full: True if the request found no place in the queue; False if it waited there for too long.
    """

    default_hint = "Ask again with the same id in a moment"

    def __init__(self, message: str, retry_after_s: float, *, is_queue_full: bool) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_queue_full = is_queue_full
