"""What operators and clients of other servers call besides completions: health, version, tokens, browsers' checks."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import gpulease
import gpulease.client.decode
from helpers.daemon import Daemon
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig

FEATURES = Path(gpulease.client.decode.__path__[0]) / "openai/features.md"
PAGE = "https://chat.example"
ALIAS = "org/tiny-1B"
PROMPT = "Changed in version"
USER = [{"role": "user", "content": "What does the with statement do?"}]


@pytest.fixture(scope="module", params=[0, 1], ids=["in one process", "behind a front"])
def rig(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[OpenAiRig]:
    with openai_rig(shared_daemon, http_processes=request.param, cors=[PAGE], aliases=[ALIAS]) as running:
        yield running


@pytest.fixture
def http(rig: OpenAiRig) -> Iterator[httpx.Client]:
    with rig.http() as client:
        yield client


def test_health_readiness_and_version_need_no_key(rig: OpenAiRig) -> None:
    with httpx.Client(base_url=rig.url) as anyone:
        for path in ("/healthz", "/health", "/v1/health", "/ping"):
            assert anyone.get(path).json()["status"] == "ok", path
        assert (anyone.get("/ready").status_code, anyone.get("/ready").content) == (200, b"")
        assert anyone.get("/version").json() == {"version": gpulease.__version__}


def test_tokens_of_a_prompt_and_a_chat_are_those_that_the_model_gets(rig: OpenAiRig, http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()
    assert found["count"] == len(found["tokens"]) > 0
    assert found["max_model_len"] > 0
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    # Special tokens by their names, as vLLM's server returns them: the same text gives the same tokens.
    asked = {"prompt": f"<|end|>{PROMPT}"}
    assert (tokens := http.post("/tokenize", json=asked).json()["tokens"]) == [0, *found["tokens"]]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == asked
    chat = http.post("/tokenize", json={"messages": USER}).json()
    with rig.client() as client:
        done = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1)  # type: ignore[arg-type]
    assert done.usage is not None
    assert chat["count"] == done.usage.prompt_tokens


def test_a_model_is_served_by_each_of_its_names(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("root")) for one in listed] == [(MODEL, None), (ALIAS, MODEL)]
    assert http.get(f"/v1/models/{ALIAS}").json() == listed[1]
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "seed": 1}
    own, other = (http.post("/v1/completions", json=asked | {"model": name}).json() for name in (MODEL, ALIAS))
    assert (other["model"], other["choices"]) == (MODEL, own["choices"])
    for path, body in (
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 2}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [5]}),
    ):
        assert http.post(path, json=body | {"model": ALIAS}).status_code == 200, path
    assert http.get("/tokenizer_info", params={"model": ALIAS}).status_code == 200
    refused = http.post("/v1/completions", json=asked | {"model": "org/another"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "another"}, "model"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/tokenize", {"prompt": "a" * 5000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", [], None),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5] * 200}, "tokens"),
        ("/detokenize", {"tokens": [5, 512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5], "token": 5}, "token"),
        ("/v1/responses", {"input": "a" * 5000}, "input"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 500}, "input"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids"),
    ],
)
def test_bodies_that_are_none_are_refused_in_openai_s_shape(
    http: httpx.Client, path: str, body: object, param: str | None
) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param


def test_tokens_need_a_key(rig: OpenAiRig) -> None:
    with httpx.Client(base_url=rig.url) as anyone:
        assert anyone.post("/tokenize", json={"prompt": "a"}).status_code == 401


def test_pages_of_the_given_origins_alone_may_call(http: httpx.Client) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = http.options("/v1/completions", headers={"Origin": PAGE, **asked})
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
    refused = http.options("/v1/completions", headers={"Origin": "https://other.example", **asked})
    assert "Access-Control-Allow-Origin" not in refused.headers
    listed = http.get("/v1/models", headers={"Origin": PAGE})
    assert listed.headers["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Host": "rebound.example"}, 421, "unknown_host"),
        ({"Origin": "https://other.example"}, 403, "foreign_page"),
        ({"Host": "a b"}, 421, "unknown_host"),
    ],
)
def test_a_request_that_no_handler_sees_is_refused_in_its_path_s_form(
    http: httpx.Client, headers: dict[str, str], status: int, code: str
) -> None:
    for path in ("/v1/completions", "/v1/embeddings", "/nowhere"):
        refused = http.post(path, json={}, headers=headers | {"X-Request-Id": "r1"})
        assert (refused.status_code, refused.headers["Content-Type"]) == (status, "application/json")
        error = refused.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (code, "invalid_request_error", None)
        assert (refused.headers["X-Request-Id"], refused.headers["Connection"]) == ("r1", "close")
    # The operator's page shows a problem's detail.
    refused = http.delete("/page/tenants/ann/region", headers=headers)
    assert (refused.status_code, refused.headers["Content-Type"]) == (status, "application/problem+json")
    assert (refused.json()["code"], bool(refused.json()["detail"])) == (code, True)


def test_endpoints_that_the_table_of_features_says_there_are_not_are_not_found(http: httpx.Client) -> None:
    rows = [line for line in FEATURES.read_text().splitlines() if line.endswith("| no | |")]
    paths = [path for row in rows for path in re.findall(r"`(/[^`]+)`", row)]
    assert len(paths) > 8
    for path in paths:
        refused = http.post(path, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), path
