"""The ASGI application that gateways and model servers share: routes, body limits, problem replies, metrics.

    POST /v1/models/{model}/infer   one request
    GET  /v1/models                 the models that are served
    GET  /healthz                   200 while the server takes requests
    GET  /metrics                   Prometheus' text format

Clients are not authenticated: any client that can connect may use the server. Put a proxy that authenticates in front
of it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from gpulease.client.http.problems import MEDIA_TYPE, Problem, RequestRefused

BINARY: Final = "application/octet-stream"
JSON: Final = "application/json"

BODY_LIMIT_S: Final = 10.0
"""Longest time, in seconds, for a body to arrive, so that a caller can't hold a connection by sending a byte at a time.
"""


def make_application(
    *,
    infer: Callable[[Request], Awaitable[Response]],
    models: Callable[[], dict[str, Any]],
    health: Callable[[], dict[str, Any]],
    metrics: Callable[[], bytes],
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
) -> Starlette:
    """Make the application of one server.

    Args:
        infer: Serves one request, and turns every failure into a reply.
        models: Describes each model, by name.
        health: Members of the health report in addition to `status`.
        metrics: Renders the metrics.
        lifespan: A context that opens and closes the resources that the server needs while it runs.
    """

    async def list_models(_: Request) -> Response:
        return JSONResponse({"models": models()})

    async def show_health(_: Request) -> Response:
        return JSONResponse({"status": "ok"} | health())

    async def show_metrics(_: Request) -> Response:
        return Response(metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    routes = [
        Route("/v1/models/{model}/infer", infer, methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/healthz", show_health, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def media_type_of(header: str) -> str:
    """Return a Content-Type header's media type, in lower case and without parameters."""
    return header.partition(";")[0].strip().lower()


async def read_body(request: Request, max_bytes: int, limit_s: float, slow_subject: str) -> bytes:
    """Read the body piece by piece, so that a body that is too large never fills memory.

    Args:
        request: The request.
        max_bytes: The largest body that is read.
        limit_s: Seconds within which the body must arrive.
        slow_subject: The subject of the sentence that reports a slow body.

    Raises:
        RequestRefused: The body is larger than `max_bytes`, or takes longer than `limit_s`.
        ClientDisconnect: The client closed the connection.
    """
    too_large = RequestRefused(Problem(413, "too_large", f"A body of this kind must have at most {max_bytes} bytes."))
    # First refuse by the declared length, before reading any of the body. A chunked body declares none.
    declared = request.headers.get("Content-Length", "0")
    if not declared.isdecimal() or int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for piece in request.stream():
                # Count the bytes that arrive, whatever length was declared.
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        text = f"{slow_subject} did not arrive within {limit_s:g} s."
        raise RequestRefused(Problem(408, "body_too_slow", text)) from None
    return bytes(body)


async def disconnected(receive: Receive) -> None:
    """Return once the client has closed the connection. The request's body must have been read."""
    # After the body, the only message that can come is the disconnect.
    while (await receive())["type"] != "http.disconnect":
        pass


def problem_response(problem: Problem, request_id: str = "", *, is_body_unread: bool) -> Response:
    """Return the reply. If `is_body_unread`, it closes the connection, which can't carry another request."""
    headers = problem.headers()
    if is_body_unread:
        headers["Connection"] = "close"
    return JSONResponse(problem.body(request_id), problem.status, headers, MEDIA_TYPE)
