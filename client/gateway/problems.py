"""What a client of the HTTP face is told when its request is not served: a problem (RFC 9457) with a code of ours.

| status | code | what it means | Retry-After |
|---|---|---|---|
| 400 | invalid_request | the request makes no sense | |
| 403 | foreign_page | another site's page asks, in a browser: see `protocol.origin` | |
| 404 | no_such_model | this gateway serves no such model | |
| 408 | body_too_slow | the body did not arrive in time | |
| 409 | in_progress | another attempt at the same request has not ended | yes |
| 413 | too_large | the body is larger than any input | |
| 415 | unsupported_media_type | neither application/json nor application/octet-stream | |
| 421 | unknown_host | the Host header is no name of this gateway: see `--host-name` | |
| 422 | key_conflict | the Idempotency-Key was used for another request | |
| 429 | queue_full | so many requests wait already | yes |
| 500 | operation_failed | it was attempted and failed (`kind`), and is not done again | |
| 500 | outcome_unknown | it was begun, and nobody knows what came of it; it is not done again | |
| 500 | not_started | the model can't be run: it does not load, or needs more memory than its lease has | |
| 500 | internal | the gateway is at fault; its log says more | |
| 502 | capability_refused | the node did not accept the grant; nothing was done | |
| 503 | queue_timeout, no_capacity | no place here, or no room on a card, in time | yes |
| 503 | unavailable | no daemon or store answers, the node is drained, or the lease ended before the launch | yes |

A status of 429 and above with Retry-After, and 409, are worth asking again, with the same Idempotency-Key.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client import errors
from gpulease.client.gateway.errors import (
    CapabilityRefused,
    OperationConflict,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
    Overloaded,
    StaleEpoch,
    StoreUnavailable,
)

MEDIA_TYPE: Final = "application/problem+json"

RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 5.0
"""Another attempt mostly ends long before its claim does."""

_UNKNOWN: Final = "internal"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is told.

    Attributes:
        status: HTTP's.
        code: Ours, for programs.
        detail: For people.
        kind: The error's name, where one is behind it.
        retry_after_s: When it is worth asking again; None if it is not.
    """

    status: int
    code: str
    detail: str
    kind: str = ""
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """HTTP headers."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def body(self, request_id: str) -> dict[str, Any]:
        """The JSON object."""
        body = {"type": "about:blank", "title": self.code.replace("_", " "), "status": self.status}
        named = {"kind": self.kind, "request_id": request_id}
        return body | {"code": self.code, "detail": self.detail} | {key: text for key, text in named.items() if text}


class Refused(Exception):
    """The HTTP face refuses a request by itself."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


_BY_KIND: Final[tuple[tuple[type[Exception], int, str, float | None], ...]] = (
    # The first that fits: subclasses before what they are.
    (OperationConflict, 422, "key_conflict", None),
    (StaleEpoch, 409, "in_progress", RETRY_S),
    (OutcomeUnknown, 500, "outcome_unknown", None),
    (CapabilityRefused, 502, "capability_refused", None),
    (StoreUnavailable, 503, "unavailable", RETRY_S),
    (errors.CapacityExceeded, 503, "no_capacity", RETRY_S),
    (errors.Disconnected, 503, "unavailable", RETRY_S),
    (errors.Drained, 503, "unavailable", RETRY_S),
    (errors.Fenced, 503, "unavailable", RETRY_S),
    # The lease ended before anything was launched.
    (errors.LeaseExpired, 503, "unavailable", RETRY_S),
    (errors.Revoked, 503, "unavailable", RETRY_S),
    (errors.LoadFailed, 500, "not_started", None),
    (errors.AllocFailed, 500, "not_started", None),
    (errors.LaunchFailed, 500, "not_started", None),
    (errors.GpuSessionFailed, 503, "unavailable", RETRY_S),
    (errors.InvalidRequest, 400, "invalid_request", None),
)


def problem_of(error: BaseException) -> Problem:
    """What to tell of an error."""
    text, kind = str(error), type(error).__name__
    match error:
        case Refused(problem=problem):
            return problem
        case OperationInProgress(retry_after_s=seconds):
            return Problem(409, "in_progress", text, kind, min(seconds, LONGEST_RETRY_S))
        case Overloaded(retry_after_s=seconds, is_queue_full=is_full):
            status, code = (429, "queue_full") if is_full else (503, "queue_timeout")
            return Problem(status, code, text, kind, seconds)
        case OperationFailed(kind=cause) if not isinstance(error, OutcomeUnknown):
            return Problem(500, "operation_failed", text, cause)
    for known, status, code, retry_after_s in _BY_KIND:
        if isinstance(error, known):
            return Problem(status, code, text, kind, retry_after_s)
    if isinstance(error, errors.GpuLeaseError):
        return Problem(500, "not_started", text, kind)
    return Problem(500, _UNKNOWN, "The gateway failed; its log says more.")
