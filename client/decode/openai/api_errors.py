"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, each with its HTTP status.

`REPLIES` has the reply to every error of the decoder, and `FINISHES` the finish reason of every end that is none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.decode_errors import (
    AdmissionRefused,
    DecodeError,
    EngineDecodeFailed,
    ModelRejected,
    NoModelLoaded,
    RebindLimited,
    RequestBreaksEngine,
    RequestIdInUse,
    RequestRejected,
    SequenceEnded,
    TextNotRead,
    TextProcessesFailed,
)
from gpulease.client.decode.decode_requests import AdmissionReason, CompletionReason
from gpulease.client.errors import GpuLeaseError
from gpulease.client.http.problems import RequestRefused

EXTENSION: Final = "gpulease"
"""The member of replies that OpenAI's do not have: `replays`, and `seed` where the server chose it; in a stream's error
`status`, and `retry_after` in seconds."""

INVALID: Final = "invalid_request_error"
"""The type of errors that are the caller's."""

RETRY_AFTER_S: Final = 1.0
"""Seconds of Retry-After where the time is unknown: room becomes free with each sequence's end."""

OVERLOADED: Final = 503
CLOSED_REQUEST: Final = 499
IN_USE: Final = 409
FAILED: Final = 500

FINISHES: Final[Mapping[CompletionReason, str]] = {
    CompletionReason.END_OF_SEQUENCE: "stop",
    CompletionReason.MAX_TOKENS_REACHED: "length",
}
"""OpenAI's finish reason of each end of a whole answer; every other end is an error."""


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """The reply to a kind of error.

    Attributes:
        status: HTTP's status.
        code: A word for programs.
        is_retried: Whether asking again makes sense.
        message: What the caller reads; "" for the error's own text. Errors of the host name its sockets, paths and
            peers, which tenants must not see: their texts are for the log.
    """

    status: int
    code: str
    is_retried: bool = False
    message: str = ""


ADMISSION_REPLIES: Final[Mapping[AdmissionReason, ReplyTo]] = {
    AdmissionReason.QUOTA_EXCEEDED: ReplyTo(429, "quota_exceeded", is_retried=True),
    AdmissionReason.REBIND_LIMITED: ReplyTo(429, "rebind_limited", is_retried=True),
    AdmissionReason.POOL_EXHAUSTED: ReplyTo(OVERLOADED, "pool_exhausted", is_retried=True),
    AdmissionReason.TOO_LARGE: ReplyTo(400, "context_length_exceeded"),
}
"""Replies to AdmissionRefused and WaitedTooLong, by their reason."""

_NO_ENGINE: Final = ReplyTo(
    OVERLOADED, "engine_unavailable", is_retried=True, message="The engine is not available. Send the request again."
)

REPLIES: Final[Mapping[type[GpuLeaseError], ReplyTo]] = {
    # The first that matches counts, so subclasses come before their bases.
    RequestIdInUse: ReplyTo(IN_USE, "request_id_in_use"),
    TextNotRead: ReplyTo(400, "text_not_read"),
    RequestRejected: ReplyTo(400, "request_rejected"),
    TextProcessesFailed: ReplyTo(
        OVERLOADED, "texts_unavailable", is_retried=True, message="No text can be read now. Send the request again."
    ),
    RebindLimited: ReplyTo(429, "rebind_limited", is_retried=True),
    ModelRejected: ReplyTo(
        FAILED, "model_rejected", message="The model's files can't be used; the server's log says why."
    ),
    SequenceEnded: ReplyTo(OVERLOADED, "sequence_ended", is_retried=True),
    RequestBreaksEngine: ReplyTo(FAILED, "request_breaks_engine"),
    EngineDecodeFailed: _NO_ENGINE,
    NoModelLoaded: ReplyTo(
        OVERLOADED, "stopping", is_retried=True, message="The server stops. Send the request again."
    ),
    DecodeError: _NO_ENGINE,
    GpuLeaseError: _NO_ENGINE,
}
"""Replies to all other errors of the library."""

_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}
_RETRIED_BY_CLIENTS: Final = (IN_USE, FAILED)
"""Statuses that OpenAI's clients ask again by themselves, and that answer the same again here."""


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

    def event_body(self) -> dict[str, Any]:
        """Return the JSON object of a stream's event: it also has what headers can't say any more."""
        told = {"status": self.status} | ({} if self.retry_after_s is None else {"retry_after": self._whole_seconds})
        return self.body() | {EXTENSION: told}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self._whole_seconds)}
        if self.retry_after_s is None and self.status in _RETRIED_BY_CLIENTS:
            headers["X-Should-Retry"] = "false"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def _whole_seconds(self) -> int:
        return max(1, math.ceil(self.retry_after_s or 0.0))


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that can't be taken."""
    return ApiError(400, code, message, param)


def too_long(limit: int, prompt_tokens: int, answer_tokens: int, *, is_chat: bool) -> ApiError:
    """Return the error of a prompt and an answer that have more tokens together than a request may."""
    total, where = prompt_tokens + answer_tokens, _prompt_member(is_chat)
    detail = f"you requested {total} tokens ({prompt_tokens} in the {where}, {answer_tokens} in the completion)"
    return _over_limit(limit, detail, where, f"{where} or completion")


def prompt_too_long(limit: int, detail: str, *, is_chat: bool) -> ApiError:
    """Return the error of a prompt that is longer by itself than a request may be; `detail` is a sentence's end."""
    where = _prompt_member(is_chat)
    return _over_limit(limit, detail, where, where)


def _prompt_member(is_chat: bool) -> str:
    return "messages" if is_chat else "prompt"


def _over_limit(limit: int, detail: str, param: str, reduced: str) -> ApiError:
    # The words are OpenAI's: clients that shorten a chat know the error by them, and read the numbers.
    text = (
        f"This model's maximum context length is {limit} tokens. However, {detail}."
        f" Please reduce the length of the {reduced}."
    )
    return ApiError(400, ADMISSION_REPLIES[AdmissionReason.TOO_LARGE].code, text, param)


def api_error_of(error: Exception) -> ApiError | None:
    """Return what a caller gets for an error of the HTTP face or of the decoder; None for one that is unexpected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        problem = error.problem
        return ApiError(problem.status, problem.code, problem.detail, None, problem.retry_after_s)
    if not isinstance(error, GpuLeaseError):
        return None
    reply = reply_to(error)
    again_s = getattr(error, "retry_after_s", None) or RETRY_AFTER_S
    return ApiError(reply.status, reply.code, reply.message or str(error), None, again_s if reply.is_retried else None)


def reply_to(error: GpuLeaseError) -> ReplyTo:
    """Return the reply to an error of the library."""
    if isinstance(error, AdmissionRefused):
        return ADMISSION_REPLIES[error.reason]
    return next(reply for kind, reply in REPLIES.items() if isinstance(error, kind))
