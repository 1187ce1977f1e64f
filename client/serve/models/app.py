"""The HTTP face: an ASGI application, which also has the calls through shared memory served while it runs.

    POST /v1/models/{model}/infer   one request of one or more items
    GET  /v1/models                 what is served
    GET  /healthz                   200 while requests are taken, and how each model is
    GET  /metrics                   see `metrics`

A body of application/octet-stream is the items' inputs, one behind the other, and the answer their outputs; one of
application/json is `{"input_base64": "..."}`, answered by `{"model": "...", "output_base64": "..."}`; or, where the
model's file says of what type its numbers are, `{"input": [...]}` of one item's numbers or of several items' arrays,
answered by `{"model": "...", "output": [...]}` in the same shape (see `json_numbers`).
The header `Gpulease-Deadline-Ms` says how long the request may take; `Gpulease-Model` of the answer, which model gave
it: a smaller variant, perhaps. What is not served is answered by a problem (RFC 9457) with a code of
`protocol.rpc.CallErrorCode`, or one of these: too_large (413), body_too_slow (408), unsupported_media_type (415),
not_finite (500: the output is no number that JSON can say), foreign_page (403) and unknown_host (421), see
`protocol.origin`.

There is no authentication here: whoever reaches the server may have it compute.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpulease.client.serve.gateway.app import MEDIA_TYPE, Problem, Refused
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
from gpulease.client.serve.models.model_metrics import ServerMetrics
from gpulease.client.serve.models.settings import ModelSettings
from gpulease.client.serve.rpc import Outcome, RpcServer
from gpulease.protocol.rpc import CallError, CallErrorCode

BODY_LIMIT_S: Final = 10.0
"""How long a body may take to arrive. Stops peers that send a byte now and then."""

MAX_DEADLINE_MS: Final = 3_600_000

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"

_JSON_ROOM: Final = 256
"""Of a JSON body, beside the base64 or the numbers."""


class _Form(Enum):
    """In what a request is asked, and answered."""

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
_ASK_AGAIN: Final = {CallErrorCode.QUEUE_FULL, CallErrorCode.TOO_LATE, CallErrorCode.UNAVAILABLE}
"""Those of which nothing was done."""

_log: Final = logging.getLogger("gpulease.models")


class ModelServer:
    """Models over HTTP, and over a Unix socket by RPC.

    Args:
        models: By name.
        address: Of the daemon; None for the usual one.
        rpc: A Unix socket that listens for callers; None for none.
    """

    def __init__(self, models: Mapping[str, ModelSettings], address: str | None, rpc: socket.socket | None) -> None:
        self._metrics = ServerMetrics()
        self._host = ModelHost(models, address, self._metrics)
        self._rpc = rpc

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
        async with contextlib.AsyncExitStack() as stack:
            server = RpcServer(self._rpc, self._host.call, self._host.describe) if self._rpc is not None else None
            if server is not None:
                await stack.enter_async_context(server)
            await stack.enter_async_context(self._host)
            try:
                yield
            finally:
                if server is not None:
                    server.stop_accepting()

    async def _infer(self, request: Request) -> Response:
        try:
            name = request.path_params["model"]
            model = self._host.models.get(name)
            if model is None:
                raise Refused(Problem(404, "no_such_method", "This server has no such model."))
            asked_in = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            form, payload = await _payload(request, asked_in, model)
            outcome = await self._host.submit(name, payload, _deadline_s(request))
            return self._answer(outcome, form)
        except ClientDisconnect:
            return Response(status_code=400)
        except Refused as refused:
            return _told(refused.problem)

    def _answer(self, outcome: Outcome, form: _Form) -> Response:
        if isinstance(outcome, CallError):
            retry_s = max(1.0, outcome.retry_after_ms / 1000) if outcome.code in _ASK_AGAIN else None
            code = outcome.code.name.lower()
            return _told(Problem(_STATUS[outcome.code], code, outcome.text, retry_after_s=retry_s))
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
            raise Refused(Problem(500, "not_finite", str(error))) from None

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"models": self._host.description()})

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "models": self._host.state()})

    async def _tell_metrics(self, _: Request) -> Response:
        self._host.count_lease_time()
        return Response(self._metrics.text(), headers={"Content-Type": self._metrics.content_type})


def _told(problem: Problem) -> Response:
    headers = problem.headers()
    if problem.status in (408, 413, 415):
        # What is left of the body is not read, so the connection can't be used again.
        headers["Connection"] = "close"
    return JSONResponse(problem.body(""), problem.status, headers, MEDIA_TYPE)


def _deadline_s(request: Request) -> float | None:
    """What the request says of its deadline. Raises Refused."""
    text = request.headers.get("Gpulease-Deadline-Ms")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= MAX_DEADLINE_MS):
        detail = f"Gpulease-Deadline-Ms is a number of milliseconds from 1 to {MAX_DEADLINE_MS}."
        raise Refused(Problem(400, "invalid_request", detail))
    return int(text) / 1000


async def _payload(request: Request, asked_in: str, model: ModelSettings) -> tuple[_Form, bytes]:
    """The items' inputs. Raises Refused."""
    most_bytes = model.max_batch * model.input_bytes
    if asked_in == BINARY:
        return _Form.BYTES, await _body(request, most_bytes)
    if asked_in != JSON:
        raise Refused(Problem(415, "unsupported_media_type", f"The body is {BINARY} or {JSON}."))
    room = max(4 * (-(-most_bytes // 3)), _numbers_room(model))
    body = await _body(request, room + _JSON_ROOM)
    try:
        return _from_numbers(body, model) if b'"input_base64"' not in body else (_Form.BASE64, _from_base64(body))
    except NumbersRefused as error:
        raise Refused(Problem(400, "invalid_request", str(error))) from None


def _numbers_room(model: ModelSettings) -> int:
    if not model.input_type:
        return 0
    return MAX_NUMBER_CHARS * min(model.max_batch * model.input_bytes // size_of(model.input_type), MAX_NUMBERS)


def _from_numbers(body: bytes, model: ModelSettings) -> tuple[_Form, bytes]:
    """What is asked in numbers. Raises NumbersRefused."""
    if not model.input_type:
        raise NumbersRefused('It is an object of "input_base64": this model says of no type of numbers.')
    numbers = model.input_bytes // size_of(model.input_type)
    value = parsed_input(body, model.max_batch, numbers)
    form = _Form.ITEMS if value and isinstance(value[0], list) else _Form.ITEM
    payload = pack(value, model.input_type, numbers)
    answered = len(payload) // model.input_bytes * model.output_bytes // size_of(model.output_type)
    if answered > MAX_NUMBERS:
        raise NumbersRefused(f"Its answer would have {answered} numbers; {MAX_NUMBERS} are told: ask in base64.")
    return form, payload


def _from_base64(body: bytes) -> bytes:
    try:
        # One field has no comma and no array: what could become much more in memory is not parsed.
        asked = None if b"," in body or b"[" in body else json.loads(body)
        if not isinstance(asked, dict) or asked.keys() != {"input_base64"}:
            raise ValueError("it is an object of input_base64")
        return base64.b64decode(asked["input_base64"], validate=True)
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise Refused(Problem(400, "invalid_request", f"The body is not what it should be: {error}")) from None


async def _body(request: Request, most_bytes: int) -> bytes:
    """The body, read piece by piece. Raises Refused if it is too large or too slow."""
    too_large = Refused(Problem(413, "too_large", f"A body of this kind has at most {most_bytes} bytes."))
    declared = request.headers.get("Content-Length", "0")
    if not declared.isdecimal() or int(declared) > most_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError:
        raise Refused(Problem(408, "body_too_slow", f"It did not arrive within {BODY_LIMIT_S:g} s.")) from None
    return bytes(body)
