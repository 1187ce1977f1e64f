"""Errors of the decode engine, and the reasons that they and its reports give.

GpuLeaseError
└── DecodeError
    ├── ModelRejected       a model's file is broken, or the engine does not support the model
    ├── NoModelLoaded       the engine has no model: not opened, or closed
    ├── RequestRejected     a prompt or its sampling is invalid
    │   ├── GrammarRefused    its schema or grammar can't be followed within the limits
    │   ├── RequestIdInUse    a request with its id is in progress
    │   ├── UnknownModel      no model with this name is served to its tenant
    │   ├── TextNotRead       reading its text exceeds a limit (`limit`)
    │   └── AdmissionRefused  there is no room for it (`reason`, `retry_after_s`)
    │       └── WaitedTooLong   it was not admitted before its deadline
    ├── ModelUnavailable    the model is not on the card, and can't be brought there in time (`reason`, `retry_after_s`)
    ├── TextProcessesFailed the processes that read texts can't be started
    ├── LibraryPanicked     a Rust library panicked in one call
    ├── RebindLimited       a tenant's region was rebuilt too often; retry in `retry_after_s` seconds
    ├── SequenceEnded       a sequence was ended before its answer was complete (`reason`)
    └── EngineDecodeFailed  a step failed for all of the engine's sequences
        └── RequestBreaksEngine  it failed while it computed this request alone
"""

from enum import StrEnum

from gpulease.client.errors import GpuLeaseError


class CompletionReason(StrEnum):
    """Why a request ended. The values appear in audit records, logs and metrics."""

    END_OF_SEQUENCE = "EndOfSequence"
    MAX_TOKENS_REACHED = "MaxTokensReached"
    REVOKED = "Revoked"
    EXPIRED = "Expired"
    ENGINE_ERROR = "EngineError"
    CANCELLED = "Cancelled"
    PREEMPTED = "Preempted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class AdmissionReason(StrEnum):
    """Why a request was refused. The values appear in errors, logs and metrics."""

    POOL_EXHAUSTED = "PoolExhausted"
    QUOTA_EXCEEDED = "QuotaExceeded"
    TOO_LARGE = "TooLarge"
    REBIND_LIMITED = "RebindLimited"


class ModelRefusal(StrEnum):
    """Why a server with several models gave a request no model. The values appear in errors, replies and metrics."""

    UNKNOWN = "unknown"
    QUEUE_FULL = "queue_full"
    WAITED_TOO_LONG = "waited_too_long"
    LOAD_FAILED = "load_failed"
    STOPPING = "stopping"


class DecodeError(GpuLeaseError):
    """Base of all errors of the decode engine, its decoder and its servers."""


class ModelRejected(DecodeError):
    """A model's file is broken or truncated, or the engine does not support the model. Nothing stays loaded."""


class NoModelLoaded(DecodeError):
    """The engine has no model: it was not opened, or it is closed."""


class RequestRejected(DecodeError):
    """A prompt or its sampling is invalid: empty, outside the vocabulary, too long for the context, and so on.

    Attributes:
        parameter: The name of the invalid parameter in `/v1/completions`; "" if unknown.
    """

    def __init__(self, message: str, hint: str = "", *, parameter: str = "") -> None:
        super().__init__(message, hint)
        self.parameter = parameter


class UnknownModel(RequestRejected):
    """No model with this name is served to this tenant."""


class ModelUnavailable(DecodeError):
    """A request's model is not on the card, and was not brought there in time. Other models are not affected.

    Attributes:
        reason: Why.
        retry_after_s: Seconds after which the request may be sent again; None if unknown.
    """

    def __init__(self, message: str, reason: ModelRefusal, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class RequestIdInUse(RequestRejected):
    """Another request with this id is in progress."""


class AdmissionRefused(RequestRejected):
    """A request, or its replay, was refused admission. Nothing more is computed for it.

    Attributes:
        reason: Why.
        detail: The reason as a sentence, without its name.
        retry_after_s: Seconds after which it may be sent again; None if unknown.
    """

    def __init__(self, reason: AdmissionReason, detail: str, retry_after_s: float | None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.retry_after_s = reason, detail, retry_after_s


class WaitedTooLong(AdmissionRefused):
    """A request, or its replay, was not admitted before its deadline. `reason` is the obstacle at that time."""


class GrammarRefused(RequestRejected):
    """A request's schema or grammar is invalid, not supported, or needs more work than the limits allow."""


class TextNotRead(RequestRejected):
    """Reading a text, or a chat in the model's template, exceeds a limit. Only this request fails.

    Attributes:
        limit: The limit that it exceeded: "memory", "processor" or "time"; "process" if it ended the process that read
            it; "library" if a bug made a library fail.
    """

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class TextProcessesFailed(DecodeError):
    """The processes that read texts can't be started, or one failed. The operator's log has the cause."""


class LibraryPanicked(DecodeError):
    """A library written in Rust panicked during one call, because of a bug. The message contains the panic's text.

    Objects that the call changed may be broken. A server does not show the message to tenants.
    """


class RebindLimited(DecodeError):
    """A tenant's region was rebuilt too often recently, so it can't be rebuilt yet.

    Attributes:
        retry_after_s: Seconds after which it may be rebuilt.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SequenceEnded(DecodeError):
    """A sequence was ended before its answer was complete, and it is not replayed.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: CompletionReason) -> None:
        super().__init__(f"The sequence was ended before its answer was complete: {reason}", "Send it again")
        self.reason = reason


class EngineDecodeFailed(DecodeError):
    """A step failed for all of the engine's sequences: the lease, its session or the context is lost."""


class RequestBreaksEngine(EngineDecodeFailed):
    """The engine failed while it computed this request alone. It is not computed again; do not repeat it."""


def decoder_closed() -> NoModelLoaded:
    """Return the error that every call to a closed decoder raises."""
    return NoModelLoaded("The decoder is closed", "Open one with Decoder.open")
