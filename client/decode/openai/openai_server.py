"""The ASGI application of a decode server. It serves OpenAI's API and parts of Anthropic's.

    POST /v1/completions, /v1/chat/completions   as one reply, or as server-sent events
    GET  /v1/models, /v1/models/{id}             the models that are served
    POST /v1/responses                           texts and calls of functions, as one reply or as events
    POST /v1/messages, .../count_tokens          the same in the form of Anthropic's API
    POST /v1/embeddings                          vectors of texts, if the model has them
    POST /tokenize, /detokenize                  a prompt's tokens, and the text of tokens
    GET  /tokenizer_info                         texts of special tokens, and the chat template
    GET  /healthz, /health, /v1/health, /ping    a report; 503 while the only model's engine is lost, otherwise 200
    GET  /ready                                  200 if requests (for ?model=MODEL) would be served, otherwise 503
    GET  /version                                the server's version
    GET  /metrics                                Prometheus' text format

Each caller has a key (`Authorization: Bearer KEY`, or `X-Api-Key: KEY`), which identifies its tenant. If a region is
lost, its sequences are replayed. The caller notices this only by the member `gpulease` in the next object.
"""

import asyncio
import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import gpulease
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.first_ended import first_ended
from gpulease.client.decode.openai import message_events
from gpulease.client.decode.openai.answer_text import AnswerPiece
from gpulease.client.decode.openai.answers import CompletionAnswer, best_of, gather_or_cancel
from gpulease.client.decode.openai.api_errors import (
    CLOSED_REQUEST,
    EXTENSION,
    FAILED,
    OVERLOADED,
    ApiError,
    error_of_problem,
)
from gpulease.client.decode.openai.api_keys import ApiKeys
from gpulease.client.decode.openai.completion_intake import (
    MAX_BODY_BYTES,
    CompletionSource,
    DecoderSource,
    Submitted,
    reply_to_error,
)
from gpulease.client.decode.openai.completion_replies import DONE, ReplyHead, TokenCounts, usage
from gpulease.client.decode.openai.completion_request import check_model
from gpulease.client.decode.openai.decode_settings import DEFAULT_CHAT_TOKENS, DEFAULT_WAIT_S
from gpulease.client.decode.openai.embeddings import read_inputs
from gpulease.client.decode.openai.message_request import count_tokens, read_message
from gpulease.client.decode.openai.response_events import ResponseEvents
from gpulease.client.decode.openai.response_request import read_response
from gpulease.client.decode.openai.served_models import DirectSource, OneModel, ServedModels
from gpulease.client.decode.openai.token_jobs import read_back, read_tokens, text_of, tokens_of
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.model_pool import ModelPool, unknown_model
from gpulease.client.decode.text.text_jobs import Job
from gpulease.client.http.application import BODY_LIMIT_S, JSON, disconnected, read_body
from gpulease.client.http.event_stream import COMMENT, json_event, named_event
from gpulease.client.http.event_stream import MEDIA_TYPE as EVENT_STREAM
from gpulease.client.http.problems import Problem
from gpulease.client.http.uvicorn_server import refuse_as_problem
from gpulease.client.texts import quoted

T = TypeVar("T")

ErrorForm = Callable[[ApiError], dict[str, Any]]
"""Returns the body of the reply to an error."""

SEND_LIMIT_S: Final = 60.0
"""Maximum time, in seconds, for a caller to receive a piece of a reply. Without a limit, the answers of callers that do
not read would stay in memory."""

SILENCE_S: Final = 5.0
"""If a stream has no events, the server sends a comment after this many seconds, at the latest after twice as many.
Many proxies close connections that are silent for 60 s, some after 30 s."""

SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""The form that X-Request-Id must have, because the id appears in logs, the audit log and replies."""

HEALTH_PATHS: Final = ("/healthz", "/health", "/v1/health", "/ping")
"""Paths of the health report. Other servers use the same paths, so that load balancers need no change."""

MESSAGES_PATH: Final = "/v1/messages"
"""The path of Anthropic's API."""

LOADING: Final = b": loading\n\n"
"""The comment that is sent in a stream while its model is being loaded. Clients ignore comments (HTML, 9.2.6)."""

# Without X-Accel-Buffering, nginx would hold back events until its buffer is full.
_STREAM_HEADERS: Final = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def make_openai_application(
    decoder: Decoder,
    keys: ApiKeys,
    model: str,
    *,
    wait_s: float = DEFAULT_WAIT_S,
    chat_tokens: int = DEFAULT_CHAT_TOKENS,
    routes: Sequence[Route] = (),
    metrics: Callable[[], bytes] = lambda: b"",
    health: Callable[[], Mapping[str, Any]] = dict,
    cors_origins: Sequence[str] = (),
    aliases: Sequence[str] = (),
) -> Starlette:
    """Return the application for an open decoder.

    Args:
        decoder: The decoder, which must stay open for as long as the application serves.
        keys: The tenants' keys.
        model: The model's name.
        wait_s: Seconds that a request may wait for its admission.
        chat_tokens: Default maximum number of tokens of a chat's answer.
        routes: Further routes.
        metrics: Renders the metrics.
        health: Returns further members of the health report.
        cors_origins: Origins of web pages that may call the server from a browser; "*" for all.
        aliases: Further names of the model in requests.
    """

    async def show_health(_: Request) -> Response:
        is_serving = decoder.is_serving
        report = {"status": "ok" if is_serving else "engine_lost", "model": model} | dict(health())
        # Load balancers use the status. Operators read when the engine was lost, and why.
        if outage := decoder.outage:
            report |= {"engine_lost": outage.report(time.monotonic(), time.time())}
        return Response(json.dumps(report), 200 if is_serving else OVERLOADED, media_type=JSON)

    async def show_ready(_: Request) -> Response:
        return Response(status_code=200 if decoder.is_serving else OVERLOADED)

    served = OneModel(decoder, DecoderSource(decoder, model, wait_s, chat_tokens, aliases))
    return _application(served, keys, show_health, show_ready, metrics, routes, cors_origins)


def make_pool_application(
    pool: ModelPool,
    models: ServedModels,
    keys: ApiKeys,
    *,
    routes: Sequence[Route] = (),
    metrics: Callable[[], bytes] = lambda: b"",
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """Return the application for an open pool of models.

    Args:
        pool: The pool, which must stay open for as long as the application serves.
        models: The pool's models.
        keys: The tenants' keys.
        routes: Further routes.
        metrics: Renders the metrics.
        cors_origins: Origins of web pages that may call the server from a browser; "*" for all.
    """

    def reports() -> dict[str, Any]:
        return {name: pool.report(name) | {"ready": pool.is_ready(name)} for name in pool.specs}

    async def show_health(_: Request) -> Response:
        return Response(json.dumps({"status": "ok", "models": reports()}), media_type=JSON)

    async def show_ready(request: Request) -> Response:
        """Reply 200 if the model in `?model=`, or without the parameter any model, is ready to serve requests."""
        states, requested = reports(), request.query_params.get("model")
        model = None if requested is None else pool.name_of(requested)
        if requested is not None and model not in states:
            return refusal_of(ApiError(404, "model_not_found", str(unknown_model(requested)), "model"))
        is_ready = any(state["ready"] for name, state in states.items() if model in (None, name))
        return Response(json.dumps({"models": states}), 200 if is_ready else OVERLOADED, media_type=JSON)

    return _application(models, keys, show_health, show_ready, metrics, routes, cors_origins)


def _application(
    models: ServedModels,
    keys: ApiKeys,
    show_health: Callable[[Request], Awaitable[Response]],
    show_ready: Callable[[Request], Awaitable[Response]],
    metrics: Callable[[], bytes],
    routes: Sequence[Route],
    cors_origins: Sequence[str],
) -> Starlette:
    face = OpenAiFace(DirectSource(models), keys)
    descriptions, texts = _Models(models, keys), _Texts(models, keys)

    async def show_version(_: Request) -> Response:
        return Response(json.dumps({"version": gpulease.__version__}), media_type=JSON)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    own_routes = [
        *completion_routes(face),
        Route("/v1/responses", _Responses(models, keys), methods=["POST"]),
        Route(MESSAGES_PATH, _Messages(models, keys), methods=["POST"]),
        Route(f"{MESSAGES_PATH}/count_tokens", texts.count_message, methods=["POST"]),
        Route("/v1/embeddings", _Embeddings(models, keys), methods=["POST"]),
        Route("/v1/models", descriptions.list, methods=["GET"]),
        Route("/v1/models/{model:path}", descriptions.show, methods=["GET"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/tokenizer_info", texts.show_tokenizer, methods=["GET"]),
        *(Route(path, show_health, methods=["GET"]) for path in HEALTH_PATHS),
        Route("/ready", show_ready, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
    ]
    # Put these routes first, so that additional routes can't replace them.
    return Starlette(
        routes=[*own_routes, *routes], exception_handlers=ERROR_REPLIES, middleware=browsers_of(cors_origins)
    )


def browsers_of(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that lets web pages of these origins call an application from a browser."""
    if not origins:
        return []
    # This is safe, because every endpoint that a page could misuse requires a key in a header.
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
        )
    ]


class OpenAiFace:
    """Serves completions and chat completions over HTTP, in the decoder's process or in a front."""

    def __init__(self, source: CompletionSource, keys: ApiKeys) -> None:
        """Prepare to serve.

        Args:
            source: Computes the completions.
            keys: The tenants' keys.
        """
        self._source, self._keys = source, keys

    async def complete(self, request: Request, send: Send, *, is_chat: bool) -> None:
        """Serve one request. Every failure becomes a reply in OpenAI's format, or the last event of a stream."""
        reply = _Reply(send, request)
        await _served(self._source.log, reply, self._serve(request, reply, is_chat=is_chat))

    async def _serve(self, request: Request, reply: "_Reply", *, is_chat: bool) -> None:
        reply.tenant = tenant = tenant_of(self._keys, request)
        # Step 1: take a place before reading the body, so that the tenant's limits also bound the bodies in memory.
        with _cancelled_on_failure() as started:
            async with self._source.place(tenant) as place:
                body = await reply.read(request)
                # Step 2: submit. If the request is refused, the reply has the error's status, unless the stream has
                # already begun because the model was being loaded.
                async with reply.loading() as on_loading:
                    beginning = place.begin(body, reply.request_id, is_chat=is_chat, on_loading=on_loading)
                    submitted = await _unless_disconnected(beginning, request.receive)
                    started += submitted.generations
        async with _cancelled_after(submitted.generations, request.receive):
            # Step 3: send the tokens. Cancel the generations at the end of this block, or when the caller disconnects.
            await self._answer(submitted, reply)

    async def _answer(self, submitted: Submitted, reply: "_Reply") -> None:
        request, generations = submitted.request, submitted.generations
        head = ReplyHead(
            request_id=reply.request_id,
            model=submitted.model,
            created=int(time.time()),
            is_chat=request.is_chat,
            has_logprobs=request.has_logprobs,
            ranks=request.ranks,
            has_usage=request.has_usage,
            seed=request.sampling.seed if request.is_seed_chosen else None,
        )
        tokenizer = await self._source.tokenizer(submitted.model)
        answers = [CompletionAnswer(tokenizer, request, submitted.end_tokens, begun) for begun in generations]
        if not request.is_stream:
            # Collect all pieces before sending anything, so that an error can still determine the reply's status.
            await gather_or_cancel(answer.collect() for answer in answers)
            wholes: list[AnswerPiece] = []
            for first in range(0, len(answers), request.tries):
                # Compute this once for all answers to a prompt: 128 copies would take too much memory.
                prompt_logprobs = await answers[first].prompt_logprobs()
                for answer in best_of(answers[first : first + request.tries], request.choices):
                    answer.whole.prompt_logprobs = prompt_logprobs
                    wholes.append(answer.whole)
            await reply.whole(head.whole(wholes, counts_of(submitted, answers)))
            return

        def chunk(piece: AnswerPiece, index: int, *, is_first: bool) -> dict[str, Any]:
            body = head.chunk(piece, index, is_first=is_first)
            return body | {"usage": usage(counts_of(submitted, answers))} if request.has_running_usage else body

        async def send(index: int, answer: CompletionAnswer) -> None:
            is_first = True
            async for piece in answer.pieces():
                last = piece.finish
                if last and (piece.text or piece.calls or is_first):
                    # Clients expect the finish reason in a separate object.
                    await reply.event(chunk(replace(piece, finish=""), index, is_first=is_first))
                    is_first, piece = False, AnswerPiece(finish=last)
                await reply.event(chunk(piece, index, is_first=is_first))
                is_first = False

        def abort() -> None:
            for generation in generations:
                generation.cancel()

        # Send the head at once, and comments while no tokens are ready. If the caller does not read them, abort.
        async with reply.stream(abort):
            await gather_or_cancel(send(index, answer) for index, answer in enumerate(answers))
            # OpenAI sends the token counts in a last object without choices.
            if request.has_usage:
                await reply.event(head.usage_chunk(counts_of(submitted, answers)))
        await reply.end(DONE)


def counts_of(submitted: Submitted, answers: Sequence[CompletionAnswer]) -> TokenCounts:
    """Return the token counts of a request so far."""
    # Count the reused tokens of each prompt once, even if it has several answers: only the first answer's sequence
    # reused blocks of earlier requests.
    firsts = submitted.generations[:: submitted.request.tries]
    return TokenCounts(
        sum(map(len, submitted.prompts)),
        sum(answer.completion_tokens for answer in answers),
        sum(generation.reused_tokens for generation in firsts),
    )


class _Models:
    """The endpoints that describe the served models.

    Args:
        models: The models.
        keys: The tenants' keys.
    """

    def __init__(self, models: ServedModels, keys: ApiKeys) -> None:
        self._models, self._keys = models, keys
        self._began = int(time.time())

    async def list(self, request: Request) -> Response:
        return self._reply_for(request, lambda tenant: {"object": "list", "data": self._described(tenant)})

    async def show(self, request: Request) -> Response:
        def describe(tenant: str) -> dict[str, Any]:
            described, requested = self._described(tenant), request.path_params["model"]
            for model in described:
                if model["id"] == requested:
                    return model
            text = f"Model {quoted(requested)} is not served here"
            hint = f"; use {described[0]['id']}." if len(described) == 1 else "; GET /v1/models lists those that are."
            raise ApiError(404, "model_not_found", text + hint, "model")

        return self._reply_for(request, describe)

    def _reply_for(self, request: Request, describe: Callable[[str], dict[str, Any]]) -> Response:
        headers = id_headers_of(request.scope, request_id_of(request))
        try:
            return Response(json.dumps(describe(tenant_of(self._keys, request))), 200, headers, JSON)
        except ApiError as error:
            return refusal_of(error, headers)

    def _described(self, tenant: str) -> Sequence[dict[str, Any]]:
        common_fields = {"object": "model", "created": self._began, "owned_by": "gpulease"}
        return [{"id": one["id"], **common_fields, **one} for one in self._models.described(tenant)]


class _Texts:
    """The endpoints that turn texts into tokens and back.

    Args:
        models: The models. Each reads texts in separate processes.
        keys: The tenants' keys.
    """

    def __init__(self, models: ServedModels, keys: ApiKeys) -> None:
        self._models, self._keys = models, keys

    async def tokenize(self, request: Request) -> Response:
        """Reply with the tokens that the model would receive for a prompt or a chat."""

        async def run(source: DecoderSource, tenant: str, body: bytes) -> dict[str, Any]:
            tokens = tokens_of(await source.do(tenant, read_tokens, body))
            return {"count": len(tokens), "max_model_len": source.room(tenant), "tokens": tokens}

        return await self._reply(request, run)

    async def detokenize(self, request: Request) -> Response:
        async def run(source: DecoderSource, tenant: str, body: bytes) -> dict[str, Any]:
            return {"prompt": text_of(await source.do(tenant, read_back, body))}

        return await self._reply(request, run)

    async def count_message(self, request: Request) -> Response:
        """Reply with the number of tokens of a prompt of `/v1/messages`."""

        async def run(source: DecoderSource, tenant: str, body: bytes) -> dict[str, Any]:
            answer = await source.do(tenant, count_tokens, body)
            if "error" in answer:
                raise ApiError(*answer["error"])
            return {"input_tokens": answer["input_tokens"]}

        return await self._reply(request, run)

    async def show_tokenizer(self, request: Request) -> Response:
        """Reply with the special tokens and the chat template of the model in `?model=`, in the format of vLLM.

        Programs that apply the template themselves need these.
        """
        model = request.query_params.get("model", "")

        async def run(source: DecoderSource, tenant: str, body: bytes) -> dict[str, Any]:
            check_model(model, source.names)
            return await source.tokenizer_info()

        return await self._reply(request, run, json.dumps({"model": model}).encode())

    async def _reply(
        self,
        request: Request,
        run: Callable[[DecoderSource, str, bytes], Awaitable[dict[str, Any]]],
        body: bytes | None = None,
    ) -> Response:
        """Reply with the result of `run` for the model that `body` names. By default, `body` is the request's body."""
        tenant, request_id = "", request_id_of(request)
        headers = id_headers_of(request.scope, request_id)
        try:
            tenant = tenant_of(self._keys, request)
            # This costs as much as tokenizing a prompt, so it needs a place, too.
            async with self._models.place(tenant) as place:
                if body is None:
                    body = await read_body(request, MAX_BODY_BYTES, BODY_LIMIT_S, "The body")
                source = await _unless_disconnected(place.source(body), request.receive)
                return Response(json.dumps(await run(source, tenant, body)), 200, headers, JSON)
        except ClientDisconnect:
            raise
        except Exception as error:
            refusal = reply_to_error(error, self._models.log, tenant, request_id)
            return refusal_of(refusal, headers, error_form_of(request.scope))


class _EngineEndpoint(ABC):
    """An endpoint that uses the engine. It is an ASGI application, so that it can detect a caller's disconnection.

    Args:
        models: The server's models.
        keys: The tenants' keys.
    """

    def __init__(self, models: ServedModels, keys: ApiKeys) -> None:
        self._models, self._keys = models, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        reply = _Reply(send, request)
        await _served(self._models.log, reply, self._serve(request, reply))

    @abstractmethod
    async def _serve(self, request: Request, reply: "_Reply") -> None:
        """Serve one request. `__call__` turns any exception into an error reply."""


class _AnswerEvents(Protocol):
    """Turns the pieces of an answer into the events of another API. Each event has a `type`."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first events of a stream."""

    def add(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        """Add a piece of the answer. Yield its events."""

    def end(self, finish: str, counts: TokenCounts) -> Iterator[dict[str, Any]]:
        """End the answer with its finish reason. Yield the last events."""

    def whole(self, finish: str, counts: TokenCounts) -> dict[str, Any]:
        """End the answer. Return the body of a reply that is not a stream."""

    def fail(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that ends with an error."""


class _ChatEndpoint(_EngineEndpoint):
    """An endpoint for chats in the format of another API. It sends a complete reply or a stream of events.

    Attributes:
        job: The job of a text process that parses a body into a chat.
        prompt: The name of the parameter with the prompt.
    """

    job: Job
    prompt: str

    @abstractmethod
    def _events(self, submitted: Submitted, answer: Mapping[str, Any], reply: "_Reply") -> _AnswerEvents:
        """Return the object that makes the answer's events. `answer` is the result of `job`."""

    async def _serve(self, request: Request, reply: "_Reply") -> None:
        reply.tenant = tenant = tenant_of(self._keys, request)
        with _cancelled_on_failure() as started:
            async with self._models.place(tenant) as place:
                body = await reply.read(request)
                async with reply.loading() as on_loading:
                    source = await _unless_disconnected(place.source(body, on_loading), request.receive)
                    answer = await source.read(tenant, body, is_chat=True, job=self.job)
                    submitted = await source.submit(
                        tenant, reply.request_id, answer, is_chat=True, parameter=self.prompt
                    )
                    started += submitted.generations
                    place.hold(submitted.generations)
        async with _cancelled_after(submitted.generations, request.receive):
            await self._answer(submitted, self._events(submitted, answer, reply), reply)

    async def _answer(self, submitted: Submitted, events: _AnswerEvents, reply: "_Reply") -> None:
        request = submitted.request
        tokenizer = await self._models.tokenizer(submitted.model)
        answer = CompletionAnswer(tokenizer, request, submitted.end_tokens, submitted.generations[0])
        if not request.is_stream:
            await answer.collect()
            for _ in events.add(answer.whole):
                pass
            await reply.whole(events.whole(answer.whole.finish, counts_of(submitted, [answer])))
            return
        async with reply.stream(submitted.generations[0].cancel):
            for event in events.begin():
                await reply.event(event, event["type"])
            try:
                async for piece in answer.pieces():
                    for event in events.add(piece):
                        await reply.event(event, event["type"])
                    finish = piece.finish
            except TimeoutError:
                raise
            except Exception as error:
                # The head was already sent, so send the error as an event in this API's format.
                event = events.fail(_api_error(self._models.log, reply, error))
                await reply.end(named_event(event["type"], event))
                return
            for event in events.end(finish, counts_of(submitted, [answer])):
                await reply.event(event, event["type"])
        await reply.end(b"")


class _Responses(_ChatEndpoint):
    """POST /v1/responses: a chat in the format of OpenAI's Responses API."""

    job = staticmethod(read_response)
    prompt = "input"

    def _events(self, submitted: Submitted, answer: Mapping[str, Any], reply: "_Reply") -> ResponseEvents:
        created, seed = int(time.time()), _chosen_seed(submitted)
        return ResponseEvents(reply.request_id, submitted.model, created, answer["response"], seed)


class _Messages(_ChatEndpoint):
    """POST /v1/messages: a chat in the format of Anthropic's Messages API."""

    job = staticmethod(read_message)
    prompt = "messages"

    def _events(self, submitted: Submitted, answer: Mapping[str, Any], reply: "_Reply") -> message_events.MessageEvents:
        prompt_tokens, seed = len(submitted.prompts[0]), _chosen_seed(submitted)
        return message_events.MessageEvents(reply.request_id, submitted.model, prompt_tokens, seed)


def _chosen_seed(submitted: Submitted) -> int | None:
    """Return the seed of a request if the server chose it; otherwise None."""
    return submitted.request.sampling.seed if submitted.request.is_seed_chosen else None


class _Embeddings(_EngineEndpoint):
    """POST /v1/embeddings: a vector for each input, in the order of the inputs."""

    async def _serve(self, request: Request, reply: "_Reply") -> None:
        reply.tenant = tenant = tenant_of(self._keys, request)
        # The request keeps its place until all inputs are computed, because some are submitted only late.
        async with self._models.place(tenant) as place:
            body = await reply.read(request)
            source = await _unless_disconnected(place.source(body), request.receive)
            answer = await source.do(tenant, read_inputs, body)
            generations: list[Generation] = []
            async with _cancelled_after(generations, request.receive):
                reply_body = await source.embed(tenant, reply.request_id, answer, generations)
        await reply.whole(reply_body)


def tenant_of(keys: ApiKeys, request: Request) -> str:
    """Return the tenant of a request's key. Raises ApiError for an unknown key; the error does not contain the key."""
    authorization = request.headers.get("Authorization", "")
    if not authorization and (key := request.headers.get("X-Api-Key")):
        # Clients of Anthropic's API send the key in this header.
        authorization = f"Bearer {key}"
    tenant = keys.tenant(authorization)
    if tenant is None:
        raise ApiError(401, "invalid_api_key", "No such key. Send one as Authorization: Bearer KEY.")
    return tenant


def completion_routes(face: OpenAiFace) -> list[Route]:
    return [
        Route("/v1/completions", _Endpoint(face, is_chat=False), methods=["POST"]),
        Route("/v1/chat/completions", _Endpoint(face, is_chat=True), methods=["POST"]),
    ]


class _Endpoint:
    """The ASGI application of one path. Unlike a Starlette endpoint function, it can detect a disconnect."""

    def __init__(self, face: OpenAiFace, *, is_chat: bool) -> None:
        self._face, self._is_chat = face, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._face.complete(Request(scope, receive), send, is_chat=self._is_chat)


async def _served(log: DecodeLog, reply: "_Reply", serving: Coroutine[Any, Any, None]) -> None:
    """Run `serving`. An error becomes an error reply or, if the head was sent, the last event of the stream."""
    try:
        try:
            await serving
        except TimeoutError:
            raise
        except Exception as error:
            await reply.refuse(_api_error(log, reply, error))
    except TimeoutError:
        log.warning("caller_took_nothing", tenant=reply.tenant, request=reply.request_id, after_s=SEND_LIMIT_S)


def _api_error(log: DecodeLog, reply: "_Reply", error: Exception) -> ApiError:
    """Return the reply to an error. Logs details that the caller must not see."""
    if isinstance(error, ClientDisconnect):
        return ApiError(CLOSED_REQUEST, "closed", "The caller disconnected.")
    return reply_to_error(error, log, reply.tenant, reply.request_id)


class _Reply:
    """Sends the reply to one request.

    Attributes:
        request_id: The request's id.
        tenant: The tenant's id; "" until the key is checked.
        is_body_read: Whether the request's body was read. If not, the connection can't be reused.
        is_started: Whether the head was sent. From then on, an error can only be sent as an event of the stream.
    """

    def __init__(self, send: Send, request: Request) -> None:
        self.request_id, self.tenant = request_id_of(request), ""
        self.is_body_read = self.is_started = False
        self._send, self._error_form = send, error_form_of(request.scope)
        self._id_headers = id_headers_of(request.scope, self.request_id)
        self._is_silent = False

    async def read(self, request: Request) -> bytes:
        """Return the body of the request. Raises the errors of `read_body`."""
        body = await read_body(request, MAX_BODY_BYTES, BODY_LIMIT_S, "The body")
        self.is_body_read = True
        return body

    async def whole(self, body: Mapping[str, Any]) -> None:
        """Send a complete reply that is not a stream."""
        data = json.dumps(body, ensure_ascii=False).encode()
        await self._begin(200, {"Content-Type": JSON, "Content-Length": str(len(data))})
        await self._put(data, is_last=True)

    @asynccontextmanager
    async def stream(self, abort: Callable[[], None]) -> AsyncIterator[None]:
        """Begin a stream. Send comments whenever the block sends no event for SILENCE_S.

        Args:
            abort: Called if the HTTP client does not receive a comment within SEND_LIMIT_S. It must make the block end.
        """
        if not self.is_started:
            await self._begin(200, _STREAM_HEADERS)
            await self._put(COMMENT)

        async def comment() -> None:
            # `event` clears the flag, which is cheaper than reading a clock for each token.
            with suppress(TimeoutError):
                while True:
                    self._is_silent = True
                    await asyncio.sleep(SILENCE_S)
                    if self._is_silent:
                        await self._put(COMMENT)
            abort()

        # Use a separate task, because the block waits for tokens.
        commenting = asyncio.create_task(comment())
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[Callable[[], None]]:
        """Yield a function that begins a stream, in which comments are then sent until the block ends."""
        is_over, commenting = asyncio.Event(), list[asyncio.Task[None]]()

        async def comment() -> None:
            await self._begin(200, _STREAM_HEADERS)
            while not is_over.is_set():
                await self._put(LOADING)
                with suppress(TimeoutError):
                    async with asyncio.timeout(SILENCE_S):
                        await is_over.wait()

        try:
            yield lambda: commenting.append(asyncio.create_task(comment()))
        finally:
            # Wait for the task instead of cancelling it, because it may be sending the head. This raises TimeoutError
            # if the caller does not receive the head in time.
            is_over.set()
            await asyncio.gather(*commenting)

    async def event(self, body: dict[str, Any], name: str = "") -> None:
        self._is_silent = False
        await self._put(named_event(name, body) if name else json_event(body))

    async def end(self, data: bytes) -> None:
        await self._put(data, is_last=True)

    async def refuse(self, error: ApiError) -> None:
        """Send an error as the reply or, if the head was sent, as the last event of the stream."""
        body = self._error_form(error)
        if self.is_started:
            event = body | {EXTENSION: error.event_body()[EXTENSION]}
            # In APIs other than OpenAI's, an event has a type, which is also its name in the stream.
            await self.end(named_event(event["type"], event) if "type" in event else json_event(event))
            return
        data = json.dumps(body).encode()
        headers = error.headers() | {"Content-Type": JSON, "Content-Length": str(len(data))}
        # If the body was not read, its rest may still arrive, so the connection can't be reused.
        await self._begin(error.status, headers | ({} if self.is_body_read else {"Connection": "close"}))
        await self._put(data, is_last=True)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started = True
        sent = {**self._id_headers, **headers}
        # ASGI requires pairs of bytes, with names in lower case.
        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()]
        await self._timely({"type": "http.response.start", "status": status, "headers": pairs})

    async def _put(self, data: bytes, *, is_last: bool = False) -> None:
        await self._timely({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _timely(self, message: Message) -> None:
        async with asyncio.timeout(SEND_LIMIT_S):
            await self._send(message)


async def _unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`. If the caller disconnects first, cancel `work` and raise ClientDisconnect."""
    working, _ = await first_ended(work, disconnected(receive))
    if working is None:
        raise ClientDisconnect
    result: T = working.result()
    return result


@contextmanager
def _cancelled_on_failure() -> Iterator[list[Generation]]:
    """If the block fails, cancel the generations that it added to the list, because no caller will read them.

    The block can fail even after the sequences were submitted: if the caller does not read while its model is being
    loaded, the exception is raised at the end of `_Reply.loading`.
    """
    started: list[Generation] = []
    try:
        yield started
    except BaseException:
        for generation in started:
            generation.cancel()
        raise


@asynccontextmanager
async def _cancelled_after(generations: Sequence[Generation], receive: Receive) -> AsyncIterator[None]:
    """Cancel the generations at the end of the block, or as soon as the caller disconnects."""

    def cancel() -> None:
        for generation in generations:
            generation.cancel()

    async def watch_caller() -> None:
        await disconnected(receive)
        cancel()

    watching = asyncio.create_task(watch_caller())
    try:
        yield
    finally:
        watching.cancel()
        cancel()
        await asyncio.gather(watching, return_exceptions=True)


def request_id_of(request: Request) -> str:
    """Return the request's X-Request-Id if it has the accepted form; otherwise a new id."""
    request_id = request.headers.get("X-Request-Id", "")
    return request_id if SANE_ID.fullmatch(request_id) else secrets.token_hex(12)


def error_form_of(scope: Scope) -> ErrorForm:
    """Return the format of errors at a request's path: Anthropic's on the paths of its API, otherwise OpenAI's."""
    return message_events.error_body if _is_message(scope) else ApiError.body


def id_headers_of(scope: Scope, request_id: str) -> dict[str, str]:
    """Return the headers with a request's id. Anthropic's clients read the id from another header."""
    headers = {"X-Request-Id": request_id}
    return headers | {"Request-Id": request_id} if _is_message(scope) else headers


def _is_message(scope: Scope) -> bool:
    path = str(scope["path"])
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def refusal_of(error: ApiError, headers: Mapping[str, str] | None = None, form: ErrorForm = ApiError.body) -> Response:
    """Return the reply to an error, with further headers."""
    return Response(json.dumps(form(error)), error.status, {**error.headers(), **(headers or {})}, JSON)


def refuse(scope: Scope, problem: Problem) -> Response:
    """Return the reply, in the format of its path, to a request that is refused before the application gets it."""
    # The operator's page expects RFC 9457 problems; all other paths are for clients of OpenAI's or Anthropic's API.
    if scope["path"] == "/" or scope["path"].startswith("/page/"):
        return refuse_as_problem(scope, problem)
    headers = {"Connection": "close", **id_headers_of(scope, request_id_of(Request(scope)))}
    return refusal_of(error_of_problem(problem), headers, error_form_of(scope))


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    text = f"{request.method} {quoted(request.scope['path'])} is not served here"
    headers, form = id_headers_of(request.scope, request_id_of(request)), error_form_of(request.scope)
    if status == 404:
        return refusal_of(ApiError(status, "not_found", f"{text}."), headers, form)
    # The reply must list the allowed methods (RFC 9110, 15.5.6), which Starlette keeps.
    allowed = getattr(error, "headers", None) or {}
    return refusal_of(
        ApiError(status, "method_not_allowed", f"{text}; send {allowed.get('Allow', 'another method')}."),
        headers | allowed,
        form,
    )


async def _failed(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after the reply, so the traceback is in the log.
    text = "The server failed; its log has details."
    headers = id_headers_of(request.scope, request_id_of(request))
    return refusal_of(ApiError(FAILED, "internal_error", text), headers, error_form_of(request.scope))


ERROR_REPLIES: Final = {404: _not_found, 405: _not_found, 500: _failed}
"""Functions that make the replies to errors outside endpoints, by status."""
