"""Every end of a request and every error: the exception in Python, the HTTP reply, and the finish reason."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from gpulease.client.decode import decode_errors as errors
from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason, DecodeError, ModelRefusal
from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters, SchedulerEvent
from gpulease.client.decode.openai.api_errors import FINISHES, ApiError, api_error_of
from gpulease.client.decode.supervisor.request_ledger import error_of
from gpulease.client.errors import Disconnected, GpuLeaseError

PATH: Final = "unix:/run/gpulease/gpulease.sock"
REQUEST: Final = PromptRequest("ann", "ann/r", (1,), SamplingParameters(), 4)

ENDS: Final[dict[CompletionReason, tuple[type[DecodeError] | None, str | None]]] = {
    CompletionReason.END_OF_SEQUENCE: (None, "stop"),
    CompletionReason.MAX_TOKENS_REACHED: (None, "length"),
    CompletionReason.CANCELLED: (None, None),
    CompletionReason.DEADLINE_EXCEEDED: (errors.WaitedTooLong, None),
    CompletionReason.ENGINE_ERROR: (errors.RequestBreaksEngine, None),
    CompletionReason.REVOKED: (errors.SequenceEnded, None),
    CompletionReason.EXPIRED: (errors.SequenceEnded, None),
    CompletionReason.PREEMPTED: (errors.SequenceEnded, None),
}
"""For each end of a request: what the iterator raises, and the finish reason of an answer."""

ADMISSION: Final[dict[AdmissionReason, tuple[int, str, bool]]] = {
    AdmissionReason.QUOTA_EXCEEDED: (429, "quota_exceeded", True),
    AdmissionReason.REBIND_LIMITED: (429, "rebind_limited", True),
    AdmissionReason.POOL_EXHAUSTED: (503, "pool_exhausted", True),
    AdmissionReason.TOO_LARGE: (400, "context_length_exceeded", False),
}
"""For each refusal: the status, the code, and whether the reply has a Retry-After."""

MODELS: Final[dict[ModelRefusal, tuple[int, str, bool]]] = {
    ModelRefusal.UNKNOWN: (404, "model_not_found", False),
    ModelRefusal.QUEUE_FULL: (503, "model_queue_full", True),
    ModelRefusal.WAITED_TOO_LONG: (503, "model_loading", True),
    ModelRefusal.LOAD_FAILED: (503, "model_failed", True),
    ModelRefusal.STOPPING: (503, "stopping", True),
}
"""For each reason why a model does not serve a request: status, code, and whether there is a Retry-After."""

ERRORS: Final[dict[type[GpuLeaseError], tuple[int, str, bool, bool]]] = {
    errors.RequestRejected: (400, "request_rejected", False, True),
    errors.TextNotRead: (400, "text_not_read", False, True),
    errors.UnknownModel: (404, "model_not_found", False, True),
    errors.GrammarRefused: (400, "grammar_refused", False, True),
    errors.TextProcessesFailed: (503, "texts_unavailable", True, False),
    errors.RequestIdInUse: (409, "request_id_in_use", False, True),
    errors.RebindLimited: (429, "rebind_limited", True, True),
    errors.LibraryPanicked: (500, "library_failed", False, False),
    errors.ModelRejected: (500, "model_rejected", False, False),
    errors.NoModelLoaded: (503, "stopping", True, False),
    errors.SequenceEnded: (503, "sequence_ended", True, True),
    errors.EngineDecodeFailed: (503, "engine_unavailable", True, False),
    errors.RequestBreaksEngine: (500, "request_breaks_engine", False, True),
    errors.DecodeError: (503, "engine_unavailable", True, False),
    Disconnected: (503, "engine_unavailable", True, False),
    GpuLeaseError: (503, "engine_unavailable", True, False),
}
"""For each other error: the status, the code, whether there is a Retry-After, and whether callers see its text."""


def kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from kinds(inner)


def made(kind: type[Any]) -> GpuLeaseError:
    """Return an error of this class, with a socket's path in its text if the class takes a text."""
    if kind is errors.SequenceEnded:
        return errors.SequenceEnded(CompletionReason.REVOKED)
    more: dict[type[Any], tuple[Any, ...]] = {errors.RebindLimited: (2.5,), errors.TextNotRead: ("memory",)}
    arguments = more.get(kind, ())
    error = kind(f"about {PATH}", *arguments)
    assert isinstance(error, GpuLeaseError)
    return error


def replied(error: Exception) -> ApiError:
    reply = api_error_of(error)
    assert reply is not None
    return reply


@pytest.mark.parametrize("reason", CompletionReason)
def test_every_end_has_its_error_or_its_finish_reason(reason: CompletionReason) -> None:
    kind, finish = ENDS[reason]
    end = SchedulerEvent.Completed(REQUEST, reason, kept_out_by=AdmissionReason.QUOTA_EXCEEDED, detail="full")
    error = error_of(end)
    assert (None if error is None else type(error)) == kind
    assert FINISHES.get(reason) == finish
    if isinstance(error, errors.WaitedTooLong):
        assert error.reason is AdmissionReason.QUOTA_EXCEEDED


@pytest.mark.parametrize("kind", [errors.AdmissionRefused, errors.WaitedTooLong])
@pytest.mark.parametrize("reason", AdmissionReason)
def test_every_refusal_has_its_status(reason: AdmissionReason, kind: type[errors.AdmissionRefused]) -> None:
    reply = replied(kind(reason, "why", None))
    assert (reply.status, reply.code, "Retry-After" in reply.headers()) == ADMISSION[reason]
    assert "why" in reply.message


@pytest.mark.parametrize("reason", ModelRefusal)
def test_every_model_that_is_not_there_has_its_status(reason: ModelRefusal) -> None:
    reply = replied(errors.ModelUnavailable("why", reason))
    assert (reply.status, reply.code, "Retry-After" in reply.headers()) == MODELS[reason]


def test_the_seconds_of_a_refusal_are_retry_after_s() -> None:
    reply = replied(errors.AdmissionRefused(AdmissionReason.REBIND_LIMITED, "why", 2.5))
    assert reply.headers()["Retry-After"] == "3"
    assert reply.event_body()["gpulease"] == {"status": 429, "retry_after": 3}


def test_the_table_has_every_error_of_the_decoder() -> None:
    of_table = {*ERRORS, errors.AdmissionRefused, errors.WaitedTooLong, errors.ModelUnavailable}
    assert {kind for kind in kinds(DecodeError) if kind.__module__ == errors.__name__} <= of_table


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_its_status_and_shows_no_path_of_the_host(kind: type[GpuLeaseError]) -> None:
    error = made(kind)
    status, code, is_retried, is_own_text = ERRORS[kind]
    reply = replied(error)
    headers = reply.headers()
    assert (reply.status, reply.code, "Retry-After" in headers) == (status, code, is_retried)
    assert (reply.message == str(error)) is is_own_text
    assert is_own_text or PATH not in reply.message
    # OpenAI's clients would send these requests again by themselves, and get the same reply.
    assert ("X-Should-Retry" in headers) is (status in (409, 500))


def test_an_unexpected_error_is_none_of_them() -> None:
    assert api_error_of(ValueError("bug")) is None
