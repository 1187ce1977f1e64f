"""What can go wrong with a call, beside `Disconnected`."""

from gpulease.client.errors import Disconnected, GpuLeaseError
from gpulease.protocol.rpc import CallError, CallErrorCode


class CallFailed(GpuLeaseError):
    """The server answered with an error; or, TOO_LATE, the call's time was over before it was asked.

    Attributes:
        code: Why.
        retry_after_s: When it may be worth asking again; 0: nothing is known of that.
    """

    def __init__(self, error: CallError) -> None:
        super().__init__(f"{error.code.name.lower()}: {error.text}")
        self.error = error
        self.code: CallErrorCode = error.code
        self.retry_after_s = error.retry_after_ms / 1000


class CallTimedOut(Disconnected):
    """No answer in time. The call may have been done, or may still be."""

    default_hint = "Give it more time, or see why the server is slow"
