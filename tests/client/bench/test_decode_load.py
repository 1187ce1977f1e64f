"""The load on a decode server: arrivals, figures, and what becomes of each kind of reply."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import pytest
import uvicorn
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gpulease.client.bench.decode_load import (
    DecodeClient,
    ReplyError,
    RequestLoad,
    RequestOutcome,
    arrivals,
    figures_of,
    load_table,
    main,
    offer_load,
    prompt_of,
    report_of,
    tokens_of,
)


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(20.0, 20_000, 7))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 20, rel=0.03)
    assert spread == pytest.approx(mean, rel=0.05), "the gaps' deviation is their mean"
    assert times == list(arrivals(20.0, 20_000, 7))


def test_prompts_are_of_their_seeds() -> None:
    assert len(prompt_of(24, 1).split()) == 24
    assert prompt_of(24, 1) == prompt_of(24, 1) != prompt_of(24, 2)


def test_figures_count_whole_replies_as_goodput() -> None:
    outcomes = [
        RequestOutcome(0, 10.0, [10.1, 10.2, 10.4], "", 10.5),
        RequestOutcome(0, 10.0, [10.3], "broken off", 12.0),
        RequestOutcome(0, 10.0, [], "429 quota_exceeded", 10.01),
    ]
    assert figures_of(outcomes) == {
        "requests": 3,
        "whole": 1,
        "goodput_tokens_s": 1.5,
        "first_token_p50_ms": 100.0,
        "first_token_p99_ms": 300.0,
        "inter_token_p50_ms": 100.0,
        "inter_token_p99_ms": 200.0,
        "errors": {"broken off": 1, "429 quota_exceeded": 1},
    }


def test_without_samples_there_are_no_times() -> None:
    figures = figures_of([])
    assert (figures["goodput_tokens_s"], figures["first_token_p50_ms"], figures["errors"]) == (0.0, None, {})
    assert "all" in load_table(report_of([], 2))


def test_an_object_of_a_stream_tells_its_tokens() -> None:
    assert tokens_of({"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"]}}]}) == 2
    assert tokens_of({"choices": [{"text": "", "logprobs": None}]}) == tokens_of({"choices": []}) == 0
    with pytest.raises(ReplyError, match="stream: engine_lost"):
        tokens_of({"error": {"code": "engine_lost"}})


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://127.0.0.1", "http://"])
def test_another_url_is_refused(url: str) -> None:
    done = CliRunner().invoke(main, [url, "--key", "k"])
    assert done.exit_code == 2
    assert "must be http://HOST:PORT" in done.output


def offered(reply: Callable[[Request], Awaitable[Response]], requests: int = 6) -> list[RequestOutcome]:
    """The outcomes of a load on a server of one reply."""

    async def part() -> list[RequestOutcome]:
        app = Starlette(routes=[Route("/v1/completions", reply, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"))
        serving = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110  # uvicorn tells it by an attribute alone
            await asyncio.sleep(0.001)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            return await offer_load(DecodeClient(url, 5), ["k1", "k2"], RequestLoad(1e4, requests, 3, 1))
        finally:
            server.should_exit = True
            await serving

    return asyncio.run(part())


def chunk(*tokens: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "", "logprobs": {"tokens": tokens}}]}).encode() + b"\n\n"


def test_tokens_of_streams_are_timed_and_keys_are_the_tenants() -> None:
    seen: list[tuple[str, int]] = []

    async def reply(request: Request) -> Response:
        seen.append((request.headers["Authorization"], (await request.json())["max_tokens"]))

        async def parts() -> AsyncIterator[bytes]:
            yield chunk("a")
            yield chunk("b", "c") + b"data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    outcomes = offered(reply)
    assert [(one.error, len(one.token_times)) for one in outcomes] == [("", 3)] * 6
    assert set(seen) == {("Bearer k1", 5), ("Bearer k2", 5)}


def test_refusals_and_broken_replies_are_errors_by_kind() -> None:
    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": {"code": "quota_exceeded"}}, 429)

    async def break_off(_: Request) -> Response:
        return Response(chunk("a"), media_type="text/event-stream")

    async def talk_nonsense(_: Request) -> Response:
        return Response(b"data: [1\n\n")

    errors = [{one.error for one in offered(reply, 2)} for reply in (refuse, break_off, talk_nonsense)]
    assert errors == [{"429 quota_exceeded"}, {"broken off"}, {"no sound reply: JSONDecodeError"}]
