"""The HTTP face: an ASGI application.

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
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpulease.client.gateway import wire
from gpulease.client.gateway.admission import Admission, Bounds
from gpulease.client.gateway.authority import Authority
from gpulease.client.gateway.effects import Effects
from gpulease.client.gateway.errors import OperationInProgress, StoreUnavailable
from gpulease.client.gateway.inference import MAX_INPUT_BYTES, InferenceRequest, InferenceResponse
from gpulease.client.gateway.metrics import GatewayMetrics
from gpulease.client.gateway.models import Model
from gpulease.client.gateway.problems import LONGEST_RETRY_S, MEDIA_TYPE, Problem, Refused, problem_of
from gpulease.client.gateway.serve import serve_inference_request
from gpulease.client.gateway.store import ReplicatedIdempotencyStore

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
                request_id = wire.idempotency_key(request.headers.getlist("Idempotency-Key"))
                asked_in = wire.media_type(request.headers.get("Content-Type", ""))
                body = await self._body(request, wire.MAX_JSON_BYTES if asked_in == wire.JSON else MAX_INPUT_BYTES)
                asked = wire.asked_of(body, asked_in, request.query_params.get("output_len", ""))
                response = await self._serve(request_id, model_id, asked)
            outcome = "replayed" if response.is_replayed else "done"
            self._metrics.moved(model_id, len(asked.input), len(response.output))
            answer = _answer(response, wire.wanted_type(request.headers.get("Accept", ""), asked_in))
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

    async def _serve(self, request_id: str, model_id: str, asked: wire.Asked) -> InferenceResponse:
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
    if wanted == wire.JSON:
        return JSONResponse(wire.answer_of(response))
    return Response(response.output, media_type=wire.BINARY, headers=wire.headers_of(response))


def _problem(problem: Problem, request_id: str) -> Response:
    headers = problem.headers()
    if problem.status in (408, 413):
        # What is left of the body is not read, so the connection can't be used again.
        headers["Connection"] = "close"
    return JSONResponse(problem.body(request_id), problem.status, headers, MEDIA_TYPE)
