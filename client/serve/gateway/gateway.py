"""`Gateway`: serves each HTTP request on a separate lease. `http.application` declares the routes.

A body of application/octet-stream is the input, and `?output_len=` is the number of output bytes. A body of
application/json is `{"input_base64": "...", "output_len": 4096}`. The reply has the body's media type, or the one that
Accept names. Every request needs the header Idempotency-Key: repeating a request with the same key returns the same
outcome.

A request that fails gets a problem reply (RFC 9457):

| status | code | meaning | Retry-After |
|---|---|---|---|
| 400 | invalid_request | the request is invalid | |
| 403 | foreign_page | a browser sent it for another site's page: see `protocol.http_origin` | |
| 404 | no_such_model | this gateway does not serve this model | |
| 408 | body_too_slow | the body did not arrive in time | |
| 409 | in_progress | another attempt at the same request has not ended | yes |
| 413 | too_large | the body is larger than any input | |
| 415 | unsupported_media_type | neither application/json nor application/octet-stream | |
| 421 | unknown_host | the Host header does not name this gateway: see `--host-name` | |
| 422 | key_conflict | the Idempotency-Key was used for another request | |
| 429 | queue_full | too many requests wait already | yes |
| 500 | operation_failed | the request was attempted and failed (`kind`); it is not executed again | |
| 500 | outcome_unknown | the request may have been executed; its outcome is unknown, and it is not executed again | |
| 500 | not_started | the model can't be run: it can't be loaded, or needs more memory than its lease has | |
| 500 | internal | the gateway failed; its log has the error | |
| 502 | capability_refused | the node did not accept the grant; nothing was done | |
| 503 | queue_timeout, no_capacity | no place here, or no room on a card, became free in time | yes |
| 503 | unavailable | no daemon or store answers, the node is drained, or the lease ended before the launch | yes |

After 409, and after any status from 429 on that has Retry-After, retry with the same Idempotency-Key.
"""

import asyncio
import base64
import binascii
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
from prometheus_client import Counter, Gauge, Histogram
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gpulease.client import errors
from gpulease.client.errors import InvalidRequest
from gpulease.client.http.application import (
    BINARY,
    JSON,
    make_application,
    media_type_of,
    problem_response,
    read_body,
)
from gpulease.client.http.caller_text import text_for_callers
from gpulease.client.http.problems import Problem, RequestRefused
from gpulease.client.http.server_metrics import ServerMetrics
from gpulease.client.serve.gateway.admission import GatewayAdmission, GatewayBounds
from gpulease.client.serve.gateway.attempt import Authority, Effects, serve_inference_request
from gpulease.client.serve.gateway.gateway_errors import (
    CapabilityRefused,
    OperationConflict,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
    Overloaded,
    StaleEpoch,
    StoreUnavailable,
)
from gpulease.client.serve.gateway.inference import MAX_INPUT_BYTES, InferenceRequest, InferenceResponse
from gpulease.client.serve.gateway.ledger import checked_id
from gpulease.client.serve.gateway.settings import Model
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore
from gpulease.client.texts import parse_problem

FORGET_EVERY_S: Final = 600.0
"""Seconds between two removals of outcomes older than `GatewayBounds.keep_s`."""

_log: Final = logging.getLogger("gpulease.gateway")

MakeEffects = Callable[[float, float], Effects]
"""Makes Effects from the longest wait for a lease and the longest wait for another attempt, both in seconds."""


class Gateway:
    """Serves inference requests over HTTP, each on its own lease."""

    def __init__(
        self,
        models: Mapping[str, Model],
        effects: MakeEffects,
        authority: Authority,
        store: ReplicatedIdempotencyStore,
        bounds: GatewayBounds,
    ) -> None:
        self._models, self._effects, self._authority = models, effects, authority
        self._store, self._bounds = store, bounds
        self._admission = GatewayAdmission(bounds)
        self._metrics = GatewayMetrics(self._admission)
        self._threads: anyio.CapacityLimiter | None = None
        # For each request that is being served here, by its id, an event that wakes waiting repetitions.
        self._running_by_id: dict[str, asyncio.Event] = {}

    def app(self) -> Starlette:
        return make_application(
            infer=self._infer,
            models=self._describe_models,
            health=self._health,
            metrics=self._metrics.text,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # An attempt blocks, so each has a thread. The limiter needs the running loop.
        self._threads = anyio.CapacityLimiter(self._bounds.max_in_flight)
        forgetting = asyncio.create_task(self._forget_old_outcomes())
        try:
            yield
        finally:
            forgetting.cancel()
            with suppress(asyncio.CancelledError):
                await forgetting

    async def _forget_old_outcomes(self) -> None:
        while True:
            try:
                await anyio.to_thread.run_sync(self._store.forget, self._bounds.keep_s)
            # Removing old outcomes is not urgent: the next round removes them.
            except StoreUnavailable as error:
                _log.warning("outcomes are kept for longer: %s", error)
            await asyncio.sleep(FORGET_EVERY_S)

    async def _infer(self, request: Request) -> Response:
        # The id stays "" until the header is checked, so that replies never contain an invalid id.
        began_s, request_id = time.monotonic(), ""
        # Only served models become labels of metrics, so that callers can't create new series.
        model_id = request.path_params["model"] if request.path_params["model"] in self._models else ""
        try:
            # Take a place before any other check, so that an overloaded gateway spends nothing on the request.
            with self._admission.place():
                if not model_id:
                    raise RequestRefused(Problem(404, "no_such_model", "This gateway serves no such model."))
                # Check the headers before reading the body, so that a wrong request takes no memory.
                request_id = idempotency_key(request.headers.getlist("Idempotency-Key"))
                body_type = checked_media_type(request.headers.get("Content-Type", ""))
                max_bytes = MAX_JSON_BYTES if body_type == JSON else MAX_INPUT_BYTES
                body = await read_body(request, max_bytes, self._bounds.body_s, "The body")
                parsed = parse_body(body, body_type, request.query_params.get("output_len", ""))
                response = await self._serve(request_id, model_id, parsed)
            outcome = "replayed" if response.is_replayed else "done"
            self._metrics.count_bytes(model_id, len(parsed.input), len(response.output))
            answer = _answer(response, answer_type(request.headers.get("Accept", ""), body_type))
        except ClientDisconnect:
            outcome, answer = "disconnected", Response(status_code=400)
        except Exception as error:
            # Every failure becomes a reply here, so no error reaches uvicorn.
            problem = problem_of(error)
            if problem.code == "internal":
                _log.exception("request %s failed", request_id)
            # The client does not see the error's own text, so the log must have it.
            elif problem.detail != str(error):
                _log.warning("request %s: %s: %s", request_id, type(error).__name__, str(error))
            outcome, answer = problem.code, _problem_response(problem, request_id)
        self._metrics.count_request(model_id, outcome, time.monotonic() - began_s)
        return answer

    async def _serve(self, request_id: str, model_id: str, parsed: "ParsedBody") -> InferenceResponse:
        model = self._models[model_id]
        # A model's limit may be lower than the gateway's.
        if parsed.output_len > model.max_output_bytes:
            text = f"The output of model {model_id} must have at most {model.max_output_bytes} bytes."
            raise RequestRefused(Problem(400, "invalid_request", text))
        # First wait for other requests of the same id, then for a slot: a repeated request must not occupy two.
        async with self._exclusively(request_id) as join_s, self._admission.slot() as left_s:
            inference = InferenceRequest(
                request_id,
                model_id,
                parsed.input,
                parsed.output_len,
                model.min_vram_bytes,
                model.lease_s,
                audience=None,
                token_nonce=0,
                now_secs=time.time(),
            )
            # The time that is left of the two waits may be spent in the daemon's queue and on attempts in other
            # gateways.
            effects = self._effects(left_s, join_s)
            # The thread continues if this task is cancelled: a client that disconnects must not interrupt an attempt
            # between the launch and the record of its outcome.
            return await anyio.to_thread.run_sync(
                serve_inference_request,
                effects,
                self._authority,
                inference,
                model.image,
                model.kernel,
                limiter=self._threads,
            )

    @asynccontextmanager
    async def _exclusively(self, request_id: str) -> AsyncIterator[float]:
        """Wait until this gateway serves no other request of this id, and hold the id during the block.

        The wait takes no slot. Yields the seconds left to wait for an attempt in another gateway.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._bounds.join_s
        try:
            async with asyncio.timeout_at(deadline_s):
                # Check again after waking: another waiter may have taken the id first.
                while (running := self._running_by_id.get(request_id)) is not None:
                    await running.wait()
        except TimeoutError:
            raise OperationInProgress(f"{request_id}: another attempt is in progress", LONGEST_RETRY_S) from None
        self._running_by_id[request_id] = running = asyncio.Event()
        try:
            yield max(0.0, deadline_s - loop.time())
        finally:
            del self._running_by_id[request_id]
            running.set()

    def _describe_models(self) -> dict[str, Any]:
        return {name: {"max_output_bytes": model.max_output_bytes} for name, model in self._models.items()}

    def _health(self) -> dict[str, Any]:
        # Requests that have taken a place and wait for a slot.
        waiting = self._admission.taken - self._admission.in_flight
        return {"in_flight": self._admission.in_flight, "queued": waiting}


def _answer(response: InferenceResponse, media_type: str) -> Response:
    if media_type == JSON:
        return JSONResponse(answer_of(response))
    return Response(response.output, media_type=BINARY, headers=headers_of(response))


def _problem_response(problem: Problem, request_id: str) -> Response:
    return problem_response(problem, request_id, is_body_unread=problem.status in (408, 413))


RETRY_S: Final = 1.0
"""Seconds of Retry-After for a failure that is usually short."""
LONGEST_RETRY_S: Final = 5.0
"""Longest Retry-After in seconds, because another attempt usually ends long before its claim expires."""

_BY_KIND: Final[tuple[tuple[type[Exception], int, str, float | None], ...]] = (
    # The first matching class is used, so subclasses come before their base classes.
    (OperationConflict, 422, "key_conflict", None),
    (StaleEpoch, 409, "in_progress", RETRY_S),
    (OutcomeUnknown, 500, "outcome_unknown", None),
    (CapabilityRefused, 502, "capability_refused", None),
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
    (errors.OperationFailed, 503, "unavailable", RETRY_S),
    (errors.GpuSessionFailed, 503, "unavailable", RETRY_S),
    (errors.InvalidRequest, 400, "invalid_request", None),
)


def problem_of(error: BaseException) -> Problem:
    """Return the problem reply for an error. Texts that could reveal the host's details are replaced."""
    # `kind` is the class of the error, for programs that distinguish more than the code does.
    text, kind = str(error), type(error).__name__
    match error:
        case RequestRefused(problem=problem):
            return problem
        # The attempt's claim expires later than the attempt usually ends, so ask the client to retry earlier.
        case OperationInProgress(retry_after_s=seconds):
            return Problem(409, "in_progress", text, kind, min(seconds, LONGEST_RETRY_S))
        case Overloaded(retry_after_s=seconds, is_queue_full=is_full):
            status, code = (429, "queue_full") if is_full else (503, "queue_timeout")
            return Problem(status, code, text, kind, seconds)
        case OperationFailed(kind=cause) if not isinstance(error, OutcomeUnknown):
            return Problem(500, "operation_failed", text, cause)
        # The error's text names the store's address, which clients must not see.
        case StoreUnavailable():
            return Problem(503, "unavailable", "The store of outcomes does not answer.", kind, RETRY_S)
    for error_kind, status, code, retry_after_s in _BY_KIND:
        if isinstance(error, error_kind):
            # Errors of the host may name its sockets and addresses.
            if status >= 500 and isinstance(error, errors.GpuLeaseError):
                text = text_for_callers(error)
            return Problem(status, code, text, kind, retry_after_s)
    if isinstance(error, errors.GpuLeaseError):
        return Problem(500, "not_started", text_for_callers(error), kind)
    return Problem(500, "internal", "The gateway failed; its log has details.")


MAX_JSON_BYTES: Final = (MAX_INPUT_BYTES + 2) // 3 * 4 + 1024
"""Largest JSON body: the largest input in base64, and the JSON around it."""

_FIELDS: Final = frozenset({"input_base64", "output_len"})
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_DIGITS: Final = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The parsed body of a request: the input, and the requested bytes of output."""

    input: bytes
    output_len: int


def checked_media_type(header: str) -> str:
    """Return the media type of a Content-Type header, BINARY or JSON. Raises RequestRefused for any other."""
    media_type = media_type_of(header)
    if media_type not in (BINARY, JSON):
        raise RequestRefused(
            Problem(415, "unsupported_media_type", f"{media_type or 'no media type'!r}; {JSON} or {BINARY} are")
        )
    return media_type


def answer_type(accept: str, body_type: str) -> str:
    """Return the media type of the reply: the first known one in the Accept header, otherwise the body's."""
    # Quality values are ignored: the first type that the gateway supports is used.
    accepted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return next((candidate for candidate in accepted if candidate in (BINARY, JSON)), body_type)


def idempotency_key(values: list[str]) -> str:
    """Return the request's id: the header `Idempotency-Key`, a string in quotes (RFC 8941, 3.3.3) or without them.

    Raises InvalidRequest.
    """
    if len(values) != 1:
        raise InvalidRequest(
            "a request must have exactly one Idempotency-Key header, which identifies it when it is repeated"
        )
    text = values[0].strip()
    # A quoted and an unquoted form of the same key are the same request.
    if quoted := _QUOTED.fullmatch(text):
        text = re.sub(r"\\(.)", r"\1", quoted[1])
    return checked_id(text, "Idempotency-Key")


def parse_body(body: bytes, body_type: str, output_len: str) -> ParsedBody:
    """Parse a body. For a binary one, `output_len` comes from the query. Raises InvalidRequest."""
    if body_type == BINARY:
        if not _DIGITS.fullmatch(output_len):
            raise InvalidRequest("a binary request must have ?output_len= with the number of output bytes")
        return ParsedBody(body, int(output_len))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body must be JSON: {parse_problem(error)}") from None
    # Refuse unknown members: one could be a misspelt limit.
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise InvalidRequest(f"the body must be an object of {' and '.join(sorted(_FIELDS))}")
    text, length = value["input_base64"], value["output_len"]
    if not isinstance(text, str) or not isinstance(length, int) or isinstance(length, bool):
        raise InvalidRequest("input_base64 must be text, and output_len a number of bytes")
    try:
        return ParsedBody(base64.b64decode(text, validate=True), length)
    except (binascii.Error, ValueError):
        raise InvalidRequest("input_base64 must be base64 (RFC 4648, 4)") from None


def answer_of(response: InferenceResponse) -> dict[str, Any]:
    return {
        "request_id": response.request_id,
        "lease_id": str(response.lease_id),
        "token_expires_at_unix_secs": response.token_expires_at_unix_secs,
        "is_replayed": response.is_replayed,
        "output_base64": base64.b64encode(response.output).decode(),
    }


def headers_of(response: InferenceResponse) -> dict[str, str]:
    """Return the headers of a binary reply. They contain the values that a JSON reply has as members."""
    return {
        "Gpulease-Lease-Id": str(response.lease_id),
        "Gpulease-Token-Expires-At": str(response.token_expires_at_unix_secs),
        "Idempotency-Replayed": "true" if response.is_replayed else "false",
    }


BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds in seconds. A request takes tens of milliseconds with a warm context, and hundreds with a new one; the
larger bounds are for requests that wait."""


class GatewayMetrics(ServerMetrics):
    """The metrics of one gateway.

        gpulease_gateway_requests_total{model, outcome}   requests answered; outcome: done, replayed, or a problem's
        code
        gpulease_gateway_request_seconds{model}           histogram: from a request's head to its answer
        gpulease_gateway_in_flight                        requests being served, each on a separate lease
        gpulease_gateway_queued                           requests waiting for a slot
        gpulease_gateway_input_bytes_total{model}         bytes of input received
        gpulease_gateway_output_bytes_total{model}        bytes of output sent

    `model` is "" for requests that named no served model.
    """

    def __init__(self, admission: GatewayAdmission) -> None:
        super().__init__()
        registry = self.registry
        name = "gpulease_gateway_"
        self._requests = Counter(f"{name}requests", "Requests answered.", ("model", "outcome"), registry=registry)
        self._seconds = Histogram(
            f"{name}request_seconds",
            "Time from the request's head to the answer.",
            ("model",),
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._input = Counter(f"{name}input_bytes", "Bytes of input received.", ("model",), registry=registry)
        self._output = Counter(f"{name}output_bytes", "Bytes of output returned.", ("model",), registry=registry)
        in_flight = Gauge(f"{name}in_flight", "Requests that are being served.", registry=registry)
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge(f"{name}queued", "Requests that wait to be served.", registry=registry)
        queued.set_function(lambda: admission.taken - admission.in_flight)

    def count_request(self, model: str, outcome: str, seconds: float) -> None:
        """Count one request by its outcome, with its duration."""
        self._requests.labels(model, outcome).inc()
        self._seconds.labels(model).observe(seconds)

    def count_bytes(self, model: str, input_bytes: int, output_bytes: int) -> None:
        """Count the bytes of one request's input and output."""
        self._input.labels(model).inc(input_bytes)
        self._output.labels(model).inc(output_bytes)
