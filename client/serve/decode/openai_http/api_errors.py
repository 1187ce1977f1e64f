"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, each with its HTTP status."""

import math
from typing import Any, Final

from gpulease.client.errors import GpuLeaseError
from gpulease.client.serve.decode.decode_errors import AdmissionRefused, ModelRejected, RebindLimited, RequestRejected
from gpulease.client.serve.decode.decode_requests import AdmissionReason
from gpulease.client.serve.http.problems import RequestRefused

INVALID: Final = "invalid_request_error"
"""The type of errors that are the caller's."""

RETRY_AFTER_S: Final = 1.0
"""Seconds of Retry-After where nobody can tell: rooms become free with each sequence's end."""

OVERLOADED: Final = 503
CLOSED_REQUEST: Final = 499

_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}
_ADMISSION: Final = {
    AdmissionReason.QUOTA_EXCEEDED: (429, "quota_exceeded"),
    AdmissionReason.REBIND_LIMITED: (429, "rebind_limited"),
    AdmissionReason.POOL_EXHAUSTED: (OVERLOADED, "pool_exhausted"),
    AdmissionReason.TOO_LARGE: (400, "context_length_exceeded"),
}


class ApiError(Exception):
    """A reply to a request that is not served.

    Attributes:
        status: HTTP's status.
        message: A sentence for people.
        code: A word for programs.
        param: The parameter that is wrong; None if none is.
        retry_after_s: Seconds after which asking again makes sense; None if it never does.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON object."""
        kind = _KINDS.get(self.status, INVALID if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that can't be taken."""
    return ApiError(400, code, message, param)


def api_error_of(error: Exception) -> ApiError | None:
    """Return what a caller gets for an error of the HTTP face or of the decoder; None for one that is unexpected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        problem = error.problem
        return ApiError(problem.status, problem.code, problem.detail, None, problem.retry_after_s)
    if isinstance(error, AdmissionRefused):
        status, code = _ADMISSION[error.reason]
        again_s = None if status == 400 else error.retry_after_s or RETRY_AFTER_S
        return ApiError(status, code, str(error), None, again_s)
    if isinstance(error, RebindLimited):
        return ApiError(429, "rebind_limited", str(error), None, error.retry_after_s)
    if isinstance(error, RequestRejected | ModelRejected):
        return invalid(str(error), code="request_rejected")
    if isinstance(error, GpuLeaseError):
        return ApiError(OVERLOADED, "engine_unavailable", str(error), None, RETRY_AFTER_S)
    return None
