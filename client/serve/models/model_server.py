"""`ModelServer`: serves models over HTTP and shared memory at the same time. `http.application` declares the routes.

A body of application/octet-stream has the items' inputs one after another; the reply has their outputs. A body of
application/json is `{"input_base64": "..."}`, and the reply `{"model": "...", "output_base64": "..."}`. If the model's
settings name the type of its numbers, the body may be `{"input": [...]}` with the numbers of one item, or with one
array for each of several items. The reply is then `{"model": "...", "output": [...]}` in the shape of the input (see
`json_numbers`).

The header `Gpulease-Deadline-Ms` is the number of milliseconds that the request may take. The reply's header
`Gpulease-Model` names the model that computed the reply, which may be a smaller variant.

A request that fails gets a problem reply (RFC 9457). Its code is one of `protocol.rpc.CallErrorCode`, or:
too_large (413), body_too_slow (408), unsupported_media_type (415), not_finite (500: JSON has no number for the output),
foreign_page (403) and unknown_host (421), see `protocol.http_origin`.
"""

import base64
import binascii
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gpulease.client.http.application import (
    BINARY,
    BODY_LIMIT_S,
    JSON,
    make_application,
    media_type_of,
    problem_response,
    read_body,
)
from gpulease.client.http.problems import Problem, RequestRefused
from gpulease.client.serve.models.host import ModelHost
from gpulease.client.serve.models.json_numbers import (
    MAX_NUMBER_CHARS,
    MAX_NUMBERS,
    NumbersRefused,
    pack,
    parsed_input,
    size_of,
    unpack,
)
from gpulease.client.serve.models.model_metrics import ModelServerMetrics
from gpulease.client.serve.models.model_settings import ModelSettings
from gpulease.client.serve.rpc import Outcome, RpcServer
from gpulease.protocol.rpc import CallError, CallErrorCode

MAX_DEADLINE_MS: Final = 3_600_000

_JSON_ROOM: Final = 256
"""Maximum number of bytes of a JSON body in addition to the base64 text or the numbers."""


class _Form(Enum):
    """The form of a request's body, and of its reply."""

    BYTES = "bytes"
    BASE64 = "base64"
    ITEM = "numbers of one item"
    ITEMS = "arrays of items"


_STATUS: Final = {
    CallErrorCode.INTERNAL: 500,
    CallErrorCode.INVALID_REQUEST: 400,
    CallErrorCode.NO_SUCH_METHOD: 404,
    CallErrorCode.QUEUE_FULL: 429,
    CallErrorCode.TOO_LATE: 503,
    CallErrorCode.UNAVAILABLE: 503,
    CallErrorCode.LEASE_LOST: 503,
    CallErrorCode.KERNEL_FAILED: 500,
}
_RETRYABLE: Final = {CallErrorCode.QUEUE_FULL, CallErrorCode.TOO_LATE, CallErrorCode.UNAVAILABLE}
"""Codes of requests that were not computed, so that a retry is safe and useful."""


class ModelServer:
    """Serves models over HTTP, and over a Unix socket by RPC.

    Args:
        models: The models, keyed by name.
        address: The daemon's address; None for the default one.
        rpc: A listening Unix socket for RPC; None for HTTP only.
    """

    def __init__(self, models: Mapping[str, ModelSettings], address: str | None, rpc: socket.socket | None) -> None:
        self._metrics = ModelServerMetrics()
        self._host = ModelHost(models, address, self._metrics)
        self._rpc = rpc

    def app(self) -> Starlette:
        return make_application(
            infer=self._infer,
            models=self._host.description,
            health=lambda: {"models": self._host.state()},
            metrics=self._metrics_text,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            server = RpcServer(self._rpc, self._host.call, self._host.describe) if self._rpc is not None else None
            if server is not None:
                await stack.enter_async_context(server)
            # Enter the host last, so that it ends first and can still answer waiting requests of RPC callers.
            await stack.enter_async_context(self._host)
            try:
                yield
            finally:
                if server is not None:
                    # Accept no new callers while the host computes the remaining requests.
                    server.stop_accepting()

    async def _infer(self, request: Request) -> Response:
        try:
            name = request.path_params["model"]
            # Refuse a request for an unknown model before reading its body.
            model = self._host.models.get(name)
            if model is None:
                raise RequestRefused(Problem(404, "no_such_method", "This server has no such model."))
            body_type = media_type_of(request.headers.get("Content-Type", ""))
            form, payload = await _payload(request, body_type, model)
            outcome = await self._host.submit(name, payload, _deadline_s(request))
            return self._answer(outcome, form)
        except ClientDisconnect:
            return Response(status_code=400)
        except RequestRefused as refused:
            return _problem_response(refused.problem)

    def _answer(self, outcome: Outcome, form: _Form) -> Response:
        if isinstance(outcome, CallError):
            # Retry-After must be at least one second.
            retry_s = max(1.0, outcome.retry_after_ms / 1000) if outcome.code in _RETRYABLE else None
            # Use the same codes as over shared memory, so that programs can switch between the two.
            code = outcome.code.name.lower()
            return _problem_response(Problem(_STATUS[outcome.code], code, outcome.text, retry_after_s=retry_s))
        # This may be a smaller variant of the model that the request named.
        name = self._host.name_of(outcome.method_id)
        if form is _Form.BASE64:
            return JSONResponse({"model": name, "output_base64": base64.b64encode(outcome.payload).decode()})
        if form is not _Form.BYTES:
            return JSONResponse({"model": name, "output": self._numbers(name, outcome.payload, form)})
        return Response(outcome.payload, media_type=BINARY, headers={"Gpulease-Model": name})

    def _numbers(self, name: str, payload: bytes, form: _Form) -> list[Any]:
        model = self._host.models[name]
        count = model.output_bytes // size_of(model.output_type)
        try:
            return unpack(payload, model.output_type, count, is_several=form is _Form.ITEMS)
        except NumbersRefused as error:
            raise RequestRefused(Problem(500, "not_finite", str(error))) from None

    def _metrics_text(self) -> bytes:
        # Count the time of current leases up to this scrape.
        self._host.count_lease_time()
        return self._metrics.text()


def _problem_response(problem: Problem) -> Response:
    return problem_response(problem, is_body_unread=problem.status in (408, 413, 415))


def _deadline_s(request: Request) -> float | None:
    """Return the request's deadline in seconds; None without the header. Raises RequestRefused."""
    text = request.headers.get("Gpulease-Deadline-Ms")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= MAX_DEADLINE_MS):
        detail = f"Gpulease-Deadline-Ms must be a number of milliseconds from 1 to {MAX_DEADLINE_MS}."
        raise RequestRefused(Problem(400, "invalid_request", detail))
    return int(text) / 1000


async def _payload(request: Request, body_type: str, model: ModelSettings) -> tuple[_Form, bytes]:
    """Return the body's form and the items' inputs. Raises RequestRefused."""
    # A request may have as many items as a batch.
    most_bytes = model.max_batch * model.input_bytes
    if body_type == BINARY:
        return _Form.BYTES, await read_body(request, most_bytes, BODY_LIMIT_S, "It")
    if body_type != JSON:
        raise RequestRefused(Problem(415, "unsupported_media_type", f"The body must be {BINARY} or {JSON}."))
    # The form is known only after the body was read, so allow the larger of the two sizes.
    room = max(4 * (-(-most_bytes // 3)), _numbers_room(model))
    body = await read_body(request, room + _JSON_ROOM, BODY_LIMIT_S, "It")
    try:
        return _from_numbers(body, model) if b'"input_base64"' not in body else (_Form.BASE64, _from_base64(body))
    except NumbersRefused as error:
        raise RequestRefused(Problem(400, "invalid_request", str(error))) from None


def _numbers_room(model: ModelSettings) -> int:
    if not model.input_type:
        return 0
    return MAX_NUMBER_CHARS * min(model.max_batch * model.input_bytes // size_of(model.input_type), MAX_NUMBERS)


def _from_numbers(body: bytes, model: ModelSettings) -> tuple[_Form, bytes]:
    """Return the form and the packed inputs of a body of numbers. Raises NumbersRefused."""
    if not model.input_type:
        raise NumbersRefused('It must be an object with "input_base64": this model declares no number type.')
    numbers = model.input_bytes // size_of(model.input_type)
    value = parsed_input(body, model.max_batch, numbers)
    # The reply has the shape of the request: one array, or an array of arrays.
    form = _Form.ITEMS if value and isinstance(value[0], list) else _Form.ITEM
    payload = pack(value, model.input_type, numbers)
    # Refuse this before computing, because a small input may have a huge output.
    answered = len(payload) // model.input_bytes * model.output_bytes // size_of(model.output_type)
    if answered > MAX_NUMBERS:
        raise NumbersRefused(f"Its answer would have {answered} numbers, more than {MAX_NUMBERS}: use base64.")
    return form, payload


def _from_base64(body: bytes) -> bytes:
    try:
        # An object with one string has neither commas nor arrays. Do not parse other bodies, because they may take much
        # more memory as objects.
        document = None if b"," in body or b"[" in body else json.loads(body)
        if not isinstance(document, dict) or document.keys() != {"input_base64"}:
            raise ValueError("it must be an object with input_base64")
        return base64.b64decode(document["input_base64"], validate=True)
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise RequestRefused(Problem(400, "invalid_request", f"The body is invalid: {error}")) from None
