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

A request and its answer over HTTP, as bytes and as JSON. `asgi` says which when.

The HTTP face: an ASGI application.

    POST /v1/models/{model}/infer   one request; needs the header Idempotency-Key
    GET  /v1/models                 what is served
    GET  /healthz                   200 while requests are taken
    GET  /metrics                   see `metrics`

A body of application/octet-stream is the input, and `?output_len=` says how many bytes of output are wanted; one of
application/json is `{"input_base64": "...", "output_len": 4096}`. The answer comes in the same form, or in the one that
Accept names. What is not served is answered by a problem, see `problems`.

There is no authentication here: whoever reaches the gateway may have it compute, and, by its Idempotency-Key and the
same request, be told an outcome again. Put it behind a proxy that says who may.
"""

import asyncio
import base64
import binascii
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpulease.client import errors
from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.admission import Admission, Bounds
from gpulease.client.serve.gateway.errors import (
    CapabilityRefused,
    OperationConflict,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
    Overloaded,
    StaleEpoch,
    StoreUnavailable,
)
from gpulease.client.serve.gateway.gateway_metrics import GatewayMetrics
from gpulease.client.serve.gateway.ledger import checked_id
from gpulease.client.serve.gateway.serving import Authority, Effects, serve_inference_request
from gpulease.client.serve.gateway.settings import MAX_INPUT_BYTES, InferenceRequest, InferenceResponse, Model
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore

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
    (errors.OperationFailed, 503, "unavailable", RETRY_S),
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


BINARY: Final = "application/octet-stream"
JSON: Final = "application/json"

MAX_JSON_BYTES: Final = (MAX_INPUT_BYTES + 2) // 3 * 4 + 1024
"""The largest input in base64, and what is around it."""

_FIELDS: Final = frozenset({"input_base64", "output_len"})
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_DIGITS: Final = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body says."""

    input: bytes
    output_len: int


def media_type(header: str) -> str:
    """BINARY or JSON. Raises Refused for any other."""
    found = header.partition(";")[0].strip().lower()
    if found not in (BINARY, JSON):
        raise Refused(Problem(415, "unsupported_media_type", f"{found or 'no media type'!r}; {JSON} or {BINARY} are"))
    return found


def wanted_type(accept: str, asked_in: str) -> str:
    """In what to answer: what is accepted, else what was asked in."""
    accepted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return next((found for found in accepted if found in (BINARY, JSON)), asked_in)


def idempotency_key(values: list[str]) -> str:
    """The request's id, of the header `Idempotency-Key`: a string in quotes (RFC 8941, 3.3.3), or without them.

    Raises InvalidRequest.
    """
    if len(values) != 1:
        raise InvalidRequest("a request has one header Idempotency-Key, which makes it the same when it is asked again")
    text = values[0].strip()
    if quoted := _QUOTED.fullmatch(text):
        text = re.sub(r"\\(.)", r"\1", quoted[1])
    return checked_id(text, "Idempotency-Key")


def asked_of(body: bytes, asked_in: str, output_len: str) -> Asked:
    """What a body says; `output_len` is the query's, which a binary one needs. Raises InvalidRequest."""
    if asked_in == BINARY:
        if not _DIGITS.fullmatch(output_len):
            raise InvalidRequest("a binary request says ?output_len= and how many bytes of output it wants")
        return Asked(body, int(output_len))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise InvalidRequest(f"the body is an object of {' and '.join(sorted(_FIELDS))}")
    text, length = value["input_base64"], value["output_len"]
    if not isinstance(text, str) or not isinstance(length, int) or isinstance(length, bool):
        raise InvalidRequest("input_base64 is text, and output_len a number of bytes")
    try:
        return Asked(base64.b64decode(text, validate=True), length)
    except (binascii.Error, ValueError):
        raise InvalidRequest("input_base64 is no base64 (RFC 4648, 4)") from None


def answer_of(response: InferenceResponse) -> dict[str, Any]:
    """The JSON of a response."""
    return {
        "request_id": response.request_id,
        "lease_id": str(response.lease_id),
        "token_expires_at_unix_secs": response.token_expires_at_unix_secs,
        "is_replayed": response.is_replayed,
        "output_base64": base64.b64encode(response.output).decode(),
    }


def headers_of(response: InferenceResponse) -> dict[str, str]:
    """The headers beside an output in bytes."""
    return {
        "Gpulease-Lease-Id": str(response.lease_id),
        "Gpulease-Token-Expires-At": str(response.token_expires_at_unix_secs),
        "Idempotency-Replayed": "true" if response.is_replayed else "false",
    }


FORGET_EVERY_S: Final = 600.0
"""How often outcomes older than `Bounds.keep_s` are dropped."""

_log: Final = logging.getLogger("gpulease.gateway")

MakeEffects = Callable[[float, float], Effects]
"""Effects that wait for a lease, and for another attempt, for so many seconds."""


class Gateway:
    """One gateway: its models, its bounds, and what it does with a request."""

    def __init__(
        self,
        models: Mapping[str, Model],
        effects: MakeEffects,
        authority: Authority,
        store: ReplicatedIdempotencyStore,
        bounds: Bounds,
    ) -> None:
        self._models, self._effects, self._authority = models, effects, authority
        self._store, self._bounds = store, bounds
        self._admission = Admission(bounds)
        self._metrics = GatewayMetrics(self._admission)
        self._threads: anyio.CapacityLimiter | None = None
        self._served: dict[str, asyncio.Event] = {}

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/models/{model}/infer", self._infer, methods=["POST"]),
            Route("/v1/models", self._list, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
            Route("/metrics", self._tell_metrics, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=self._life)

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        self._threads = anyio.CapacityLimiter(self._bounds.max_in_flight)
        forgetting = asyncio.create_task(self._forget())
        try:
            yield
        finally:
            forgetting.cancel()
            with suppress(asyncio.CancelledError):
                await forgetting

    async def _forget(self) -> None:
        while True:
            try:
                await anyio.to_thread.run_sync(self._store.forget, self._bounds.keep_s)
            except StoreUnavailable as error:
                _log.warning("outcomes are kept for longer: %s", error)
            await asyncio.sleep(FORGET_EVERY_S)

    # --- requests ---

    async def _infer(self, request: Request) -> Response:
        began_s, request_id = time.monotonic(), ""
        model_id = request.path_params["model"] if request.path_params["model"] in self._models else ""
        try:
            # Before anything that can fail otherwise, so that whoever asks too much learns that first.
            with self._admission.place():
                if not model_id:
                    raise Refused(Problem(404, "no_such_model", "This gateway serves no such model."))
                request_id = idempotency_key(request.headers.getlist("Idempotency-Key"))
                asked_in = media_type(request.headers.get("Content-Type", ""))
                body = await self._body(request, MAX_JSON_BYTES if asked_in == JSON else MAX_INPUT_BYTES)
                asked = asked_of(body, asked_in, request.query_params.get("output_len", ""))
                response = await self._serve(request_id, model_id, asked)
            outcome = "replayed" if response.is_replayed else "done"
            self._metrics.moved(model_id, len(asked.input), len(response.output))
            answer = _answer(response, wanted_type(request.headers.get("Accept", ""), asked_in))
        except ClientDisconnect:
            outcome, answer = "disconnected", Response(status_code=400)
        except Exception as error:
            problem = problem_of(error)
            if problem.code == "internal":
                _log.exception("request %s failed", request_id)
            outcome, answer = problem.code, _problem(problem, request_id)
        self._metrics.answered(model_id, outcome, time.monotonic() - began_s)
        return answer

    async def _body(self, request: Request, most_bytes: int) -> bytes:
        """The body, read piece by piece. Raises Refused if it is too large or too slow."""
        too_large = Refused(Problem(413, "too_large", f"A body of this kind has at most {most_bytes} bytes."))
        declared = request.headers.get("Content-Length", "0")
        if not declared.isdecimal() or int(declared) > most_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._bounds.body_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most_bytes:
                        raise too_large
        except TimeoutError:
            text = f"The body did not arrive within {self._bounds.body_s:g} s."
            raise Refused(Problem(408, "body_too_slow", text)) from None
        return bytes(body)

    async def _serve(self, request_id: str, model_id: str, asked: Asked) -> InferenceResponse:
        model = self._models[model_id]
        if asked.output_len > model.max_output_bytes:
            text = f"Model {model_id} gives at most {model.max_output_bytes} bytes of output."
            raise Refused(Problem(400, "invalid_request", text))
        async with self._one_at_a_time(request_id) as join_s, self._admission.slot() as left_s:
            wanted = InferenceRequest(
                request_id,
                model_id,
                asked.input,
                asked.output_len,
                model.min_vram_bytes,
                model.lease_s,
                audience=None,
                token_nonce=0,
                now_secs=time.time(),
            )
            effects = self._effects(left_s, join_s)
            # In a thread that is not given up: who hangs up does not end what was begun.
            return await anyio.to_thread.run_sync(
                serve_inference_request,
                effects,
                self._authority,
                wanted,
                model.image,
                model.kernel,
                limiter=self._threads,
            )

    @asynccontextmanager
    async def _one_at_a_time(self, request_id: str) -> AsyncIterator[float]:
        """Duplicates of a request that is served here wait for it without a slot, so that others are served meanwhile.

        Yields how many seconds are left to wait for an attempt of another gateway's.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._bounds.join_s
        try:
            async with asyncio.timeout_at(until):
                while (served := self._served.get(request_id)) is not None:
                    await served.wait()
        except TimeoutError:
            raise OperationInProgress(f"{request_id}: another attempt is at it", LONGEST_RETRY_S) from None
        self._served[request_id] = ended = asyncio.Event()
        try:
            yield max(0.0, until - loop.time())
        finally:
            del self._served[request_id]
            ended.set()

    # --- about itself ---

    async def _list(self, _: Request) -> Response:
        listed = {name: {"max_output_bytes": model.max_output_bytes} for name, model in self._models.items()}
        return JSONResponse({"models": listed})

    async def _health(self, _: Request) -> Response:
        waiting = self._admission.taken - self._admission.in_flight
        return JSONResponse({"status": "ok", "in_flight": self._admission.in_flight, "queued": waiting})

    async def _tell_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), headers={"Content-Type": self._metrics.content_type})


def _answer(response: InferenceResponse, wanted: str) -> Response:
    if wanted == JSON:
        return JSONResponse(answer_of(response))
    return Response(response.output, media_type=BINARY, headers=headers_of(response))


def _problem(problem: Problem, request_id: str) -> Response:
    headers = problem.headers()
    if problem.status in (408, 413):
        # What is left of the body is not read, so the connection can't be used again.
        headers["Connection"] = "close"
    return JSONResponse(problem.body(request_id), problem.status, headers, MEDIA_TYPE)
