"""Errors in OpenAI's format, `{"error": {"message", "type", "param", "code"}}`, each with its HTTP status.

`REPLIES` maps each error of the library to its reply, and `FINISHES` maps each normal end to its finish reason.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    AdmissionRefused,
    CompletionReason,
    DecodeError,
    EngineDecodeFailed,
    GrammarRefused,
    LibraryPanicked,
    ModelRefusal,
    ModelRejected,
    ModelUnavailable,
    NoModelLoaded,
    RebindLimited,
    RequestBreaksEngine,
    RequestIdInUse,
    RequestRejected,
    SequenceEnded,
    TextNotRead,
    TextProcessesFailed,
    UnknownModel,
)
from gpulease.client.errors import GpuLeaseError
from gpulease.client.http.problems import Problem, RequestRefused

EXTENSION: Final = "gpulease"
"""The name of a member that replies have in addition to OpenAI's. It contains `replays`, and `seed` if the server chose
the seed. In a stream's error it contains `status` and, if the caller may retry, `retry_after` in seconds."""

INVALID: Final = "invalid_request_error"
"""The type of errors that the caller caused."""

RETRY_AFTER_S: Final = 1.0
"""Retry-After in seconds if it is unknown when there will be room. Each sequence that ends makes some room."""

OVERLOADED: Final = 503
CLOSED_REQUEST: Final = 499
IN_USE: Final = 409
FAILED: Final = 500

FINISHES: Final[Mapping[CompletionReason, str]] = {
    CompletionReason.END_OF_SEQUENCE: "stop",
    CompletionReason.MAX_TOKENS_REACHED: "length",
}
"""OpenAI's finish reason for each way in which a complete answer ends. Other ends are errors."""


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """The reply to a class of errors.

    Attributes:
        status: The HTTP status.
        code: The error's code, for programs.
        is_retried: Whether the caller may retry; the reply then has Retry-After.
        message: The text for the caller; "" for the error's own text. An error of the host may name sockets, paths and
            peers, which tenants must not see. Then the error's own text is only logged.
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

MODEL_REPLIES: Final[Mapping[ModelRefusal, ReplyTo]] = {
    ModelRefusal.UNKNOWN: ReplyTo(404, "model_not_found"),
    ModelRefusal.QUEUE_FULL: ReplyTo(OVERLOADED, "model_queue_full", is_retried=True),
    ModelRefusal.WAITED_TOO_LONG: ReplyTo(OVERLOADED, "model_loading", is_retried=True),
    ModelRefusal.LOAD_FAILED: ReplyTo(OVERLOADED, "model_failed", is_retried=True),
    ModelRefusal.STOPPING: ReplyTo(OVERLOADED, "stopping", is_retried=True),
}
"""Replies to ModelUnavailable, by its reason."""

_NO_ENGINE: Final = ReplyTo(
    OVERLOADED, "engine_unavailable", is_retried=True, message="The engine is not available. Send the request again."
)

REPLIES: Final[Mapping[type[GpuLeaseError], ReplyTo]] = {
    # The first class that matches is used, so subclasses come before their bases.
    RequestIdInUse: ReplyTo(IN_USE, "request_id_in_use"),
    UnknownModel: MODEL_REPLIES[ModelRefusal.UNKNOWN],
    TextNotRead: ReplyTo(400, "text_not_read"),
    GrammarRefused: ReplyTo(400, "grammar_refused"),
    RequestRejected: ReplyTo(400, "request_rejected"),
    TextProcessesFailed: ReplyTo(
        OVERLOADED, "texts_unavailable", is_retried=True, message="No text can be parsed now. Send the request again."
    ),
    RebindLimited: ReplyTo(429, "rebind_limited", is_retried=True),
    LibraryPanicked: ReplyTo(
        FAILED, "library_failed", message="A library of the server failed; the server's log has details."
    ),
    ModelRejected: ReplyTo(
        FAILED, "model_rejected", message="The model's files can't be used; the server's log says why."
    ),
    SequenceEnded: ReplyTo(OVERLOADED, "sequence_ended", is_retried=True),
    RequestBreaksEngine: ReplyTo(FAILED, "request_breaks_engine"),
    EngineDecodeFailed: _NO_ENGINE,
    NoModelLoaded: ReplyTo(
        OVERLOADED, "stopping", is_retried=True, message="The server is stopping. Send the request again."
    ),
    DecodeError: _NO_ENGINE,
    GpuLeaseError: _NO_ENGINE,
}
"""Replies to all other errors of the library."""

_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}
_RETRIED_BY_CLIENTS: Final = (IN_USE, FAILED)
"""Statuses for which OpenAI's clients retry, although a retry gets the same reply here."""


class ApiError(Exception):
    """The error reply to a request.

    Attributes:
        status: The HTTP status.
        message: A sentence for people.
        code: The error's code, for programs.
        param: The parameter that is wrong; None if the error is not about a parameter.
        retry_after_s: Seconds after which the caller may retry; None if a retry gets the same reply.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after_s = retry_after_s

    @property
    def parts(self) -> tuple[int, str, str, str | None, float | None]:
        """The constructor's arguments, from which another process creates the same error: `ApiError(*parts)`."""
        return self.status, self.code, self.message, self.param, self.retry_after_s

    def body(self) -> dict[str, Any]:
        # OpenAI's clients choose an exception class by the status, and show the member `type` to the user.
        kind = _KINDS.get(self.status, INVALID if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def event_body(self) -> dict[str, Any]:
        """Return the JSON object of an error event in a stream.

        It includes the status and the value of Retry-After, because the stream's headers were sent before the error.
        """
        members = {"status": self.status} | ({} if self.retry_after_s is None else {"retry_after": self._whole_seconds})
        return self.body() | {EXTENSION: members}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self._whole_seconds)}
        if self.retry_after_s is None and self.status in _RETRIED_BY_CLIENTS:
            # OpenAI's clients apply this header. Without it, they would retry requests for which a retry is useless or
            # harmful.
            headers["X-Should-Retry"] = "false"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def _whole_seconds(self) -> int:
        return max(1, math.ceil(self.retry_after_s or 0.0))


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for an invalid request, with the status 400."""
    return ApiError(400, code, message, param)


def too_long(limit: int, prompt_tokens: int, answer_tokens: int, parameter: str) -> ApiError:
    """Return the error for a prompt and an answer that together exceed the limit. `parameter` names the prompt."""
    total = prompt_tokens + answer_tokens
    detail = f"you requested {total} tokens ({prompt_tokens} in the {parameter}, {answer_tokens} in the completion)"
    return _over_limit(limit, detail, parameter, f"{parameter} or completion")


def prompt_too_long(limit: int, detail: str, parameter: str) -> ApiError:
    """Return the error for a prompt that alone exceeds the limit. `detail` follows "However, " in the message."""
    return _over_limit(limit, detail, parameter, parameter)


def prompt_parameter(*, is_chat: bool) -> str:
    """Return the name of the parameter that contains the prompt, by the endpoint."""
    return "messages" if is_chat else "prompt"


def _over_limit(limit: int, detail: str, param: str, reduced: str) -> ApiError:
    # This is OpenAI's text. Clients that shorten a chat recognise the error by the text, and parse its numbers.
    text = (
        f"This model's maximum context length is {limit} tokens. However, {detail}."
        f" Please reduce the length of the {reduced}."
    )
    return ApiError(400, ADMISSION_REPLIES[AdmissionReason.TOO_LARGE].code, text, param)


def error_of_problem(problem: Problem) -> ApiError:
    """Return a problem of the HTTP server as an error in OpenAI's format."""
    return ApiError(problem.status, problem.code, problem.detail, None, problem.retry_after_s)


def api_error_of(error: Exception) -> ApiError | None:
    """Return the reply for an error of the HTTP server or of the decoder; None for an unexpected error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        # Raised while the body is read, if the body is too large or arrives too slowly.
        return error_of_problem(error.problem)
    # After a bug, the caller gets a generic 500, and the log has the traceback.
    if not isinstance(error, GpuLeaseError):
        return None
    reply = reply_to(error)
    # Some errors state when there will be room. For others, the best time to retry is unknown.
    retry_after_s = getattr(error, "retry_after_s", None) or RETRY_AFTER_S
    param = (error.parameter or None) if isinstance(error, RequestRejected) else None
    return ApiError(
        reply.status, reply.code, reply.message or str(error), param, retry_after_s if reply.is_retried else None
    )


def reply_to(error: GpuLeaseError) -> ReplyTo:
    """Return the reply to an error of the library."""
    # For these two classes, the status depends on the reason.
    if isinstance(error, AdmissionRefused):
        return ADMISSION_REPLIES[error.reason]
    if isinstance(error, ModelUnavailable):
        return MODEL_REPLIES[error.reason]
    return next(reply for kind, reply in REPLIES.items() if isinstance(error, kind))
