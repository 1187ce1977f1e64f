"""The decode server, called with OpenAI's own client, unchanged."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from gpulease.client.decode import TINY_MODEL, DecoderObserver, FinishedRequest, decode_log, open_model
from gpulease.client.decode.openai import completion_request, openai_server, prompt_job
from gpulease.client.decode.openai.answer_text import prompt_logprobs
from gpulease.client.decode.openai.decode_metrics import DecodeMetrics
from gpulease.client.decode.supervisor import engine_losses
from gpulease.client.decode.supervisor.generation import Emitted
from gpulease.client.decode.supervisor.serving_engine import ServingEngine
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.tokenizer import Tokenizer
from gpulease.client.errors import Denied, Revoked
from helpers.daemon import Daemon
from helpers.decode.decode_lines import lines_of
from helpers.decode.decoder_rig import before_step, no_new_steps
from helpers.decode.openai_rig import CHAT_TOKENS, MODEL, OpenAiRig, key_of, openai_rig
from helpers.waiting import wait_until

# Import the client where it is used: every process of a run imports this file, and the client takes half a second.
if TYPE_CHECKING:
    import openai

PROMPT = "Changed in version"
USER = [{"role": "user", "content": "What does the with statement do?"}]


class Heard(DecoderObserver):
    """Number of requests that have ended."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []

    def on_finished(self, report: FinishedRequest) -> None:
        self.finished.append(report)


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module", params=[0, 1], ids=["in one process", "by a front"])
def rig(shared_daemon: Daemon, heard: Heard, request: pytest.FixtureRequest) -> Iterator[OpenAiRig]:
    heard.finished.clear()
    with openai_rig(shared_daemon, [heard], http_processes=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def patient(shared_daemon: Daemon) -> Iterator[OpenAiRig]:
    """A server that lets requests wait without a practical limit."""
    with openai_rig(shared_daemon, wait_s=600.0) as running:
        yield running


def complete(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**given | options)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**given | options)


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_a_completion(client: openai.OpenAI) -> None:
    done = complete(client)
    assert done.object == "text_completion"
    assert done.choices[0].text.startswith(" 3.")
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12
    assert done.choices[0].logprobs is None


def test_a_stream_has_the_whole_s_text_and_ends_with_the_counts(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    whole = complete(client)
    assert text_of(chunks) == whole.choices[0].text
    assert len(chunks) > 4
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    *counted, last = complete(client, stream=True, stream_options=options)
    assert counted[-1].usage == last.usage == whole.usage
    counts = [chunk.usage.completion_tokens for chunk in counted]
    assert counts == sorted(counts)
    assert 1 <= counts[0] < counts[-1] == 12


def test_a_prompt_s_cached_tokens_are_counted_and_change_nothing(client: openai.OpenAI) -> None:
    prompt = [7 + 5 * number % 400 for number in range(70)]
    first, again = (complete(client, prompt=prompt, max_tokens=3, n=2, temperature=0.9, seed=1) for _ in range(2))
    assert [choice.text for choice in again.choices] == [choice.text for choice in first.choices]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == 64
    assert again.usage.prompt_tokens == first.usage.prompt_tokens == 70
    *_, last = complete(client, prompt=prompt, max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == 64


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True))
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert (whole.object, chunks[0].object) == ("chat.completion", "chat.completion.chunk")


def test_a_prompt_in_tokens_is_the_text_s(rig: OpenAiRig, client: openai.OpenAI) -> None:
    async def tokens() -> list[int]:
        return (await rig.decoder.tokenizer()).encode(PROMPT)

    ids = rig.wait_for(tokens())
    answers = [complete(client, prompt=prompt).choices[0].text for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len(set(answers)) == 1


def test_a_seed_gives_its_tokens_again_and_a_chosen_one_is_told(client: openai.OpenAI) -> None:
    first = complete(client, temperature=1.5, max_tokens=24)
    seed = first.model_extra["gpulease"]["seed"]
    again = complete(client, temperature=1.5, max_tokens=24, seed=seed)
    assert again.choices[0].text == first.choices[0].text
    assert "gpulease" not in again.model_extra
    assert complete(client, temperature=1.5, max_tokens=24, seed=seed + 1).choices[0].text != first.choices[0].text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_ends_the_text_before_it(client: openai.OpenAI, is_stream: bool) -> None:
    whole = complete(client).choices[0].text
    stop = whole[5:8]
    done = complete(client, stop=[stop, "nowhere"], stream=is_stream)
    if is_stream:
        chunks = list(done)
        assert text_of(chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert done.choices[0].text == whole[: whole.index(stop)]
        assert done.choices[0].finish_reason == "stop"


def test_an_answer_includes_its_stop_only_on_request(rig: OpenAiRig, client: openai.OpenAI) -> None:
    whole = complete(client, logprobs=0).choices[0]
    stop, tokens = whole.text[5:8], whole.logprobs.tokens
    with_stop = {"include_stop_str_in_output": True}
    behind = whole.text.index(stop) + len(stop)
    (done,) = complete(client, stop=[stop, "nowhere"], extra_body=with_stop, logprobs=0).choices
    assert (done.text, done.finish_reason) == (whole.text[:behind], "stop")
    # The tokens are those of the text; the last one may continue after the stop.
    assert "".join(done.logprobs.tokens).startswith(done.text)
    streamed = complete(client, stop=stop, extra_body=with_stop, stream=True)
    assert text_of(streamed) == done.text
    # The same for a token that the caller has chosen as an end.
    with rig.http() as http:
        ids = http.post("/tokenize", json={"prompt": whole.text, "add_special_tokens": False}).json()["tokens"]
    place = ids.index(ids[4])
    for body, count in ({}, place), (with_stop, place + 1):
        (done,) = complete(client, extra_body={"stop_token_ids": [ids[4]], **body}, logprobs=0).choices
        assert (done.text, done.finish_reason) == ("".join(tokens[:count]), "stop")
        assert done.logprobs.tokens == tokens[:count]


def test_a_chat_s_last_message_is_continued(rig: OpenAiRig, client: openai.OpenAI) -> None:
    """The answer is that to the rendered prompt, cut off after the message's content."""
    import openai

    begun = [*USER, {"role": "assistant", "content": "The with"}]
    with rig.http() as http:
        said = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
        tokens = http.post("/tokenize", json=said).json()["tokens"]
        shown = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert shown.endswith("The with")
    continued = chat(client, messages=begun, extra_body={"continue_final_message": True})
    done = complete(client, prompt=tokens, max_tokens=8)
    assert continued.choices[0].message.content == done.choices[0].text
    # How many there were before depends on earlier requests.
    counts = [(one.usage.prompt_tokens, one.usage.completion_tokens) for one in (continued, done)]
    assert counts[0] == counts[1]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, messages=begun, extra_body=both)
    assert refused.value.param == "continue_final_message"


def test_a_prompt_is_cut_to_as_many_tokens_as_its_caller_says(client: openai.OpenAI) -> None:
    tokens = [number % 500 for number in range(7, 407)]

    def answer(prompt: Any, **cut: Any) -> tuple[str, int]:
        done = complete(client, prompt=prompt, max_tokens=6, extra_body=cut)
        return done.choices[0].text, done.usage.prompt_tokens

    assert answer(tokens, truncate_prompt_tokens=20) == answer(tokens[-20:])
    assert answer(tokens, truncate_prompt_tokens=20, truncation_side="right") == answer(tokens[:20])
    # As many as the context of 160 positions has room for; the answer's last token takes no position.
    assert answer(tokens, truncate_prompt_tokens=-1) == answer(tokens[-155:])
    # A text that could never fit, and one that is short enough.
    assert answer("The with statement " * 500, truncate_prompt_tokens=9)[1] == 9
    assert answer(PROMPT, truncate_prompt_tokens=100) == answer(PROMPT)


def test_what_is_not_http_is_refused_in_openai_s_shape(rig: OpenAiRig) -> None:
    host, port = rig.url.removeprefix("http://").split(":")
    for sent in (b"no request\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=60) as peer:
            peer.sendall(sent)
            head, _, body = peer.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert b"content-type: application/json" in head.lower()
        error = json.loads(body)["error"]
        assert (error["code"], error["type"], error["param"]) == ("malformed_request", "invalid_request_error", None)


def test_log_probabilities_of_a_prompt_are_those_of_its_echo(client: openai.OpenAI) -> None:
    """In vLLM's shape, for completions in each choice, for chats once; the answer's own are not affected."""
    echoed = complete(client, echo=True, logprobs=3).choices[0].logprobs
    done = complete(client, prompt=[PROMPT, "The with"], logprobs=2, extra_body={"prompt_logprobs": 3, "n": 2})
    assert len(done.choices) == 4
    first, same, *others = (choice.model_extra["prompt_logprobs"] for choice in done.choices)
    assert first == same
    assert others[0] == others[1] != first
    assert first[0] is None
    for place, shown in enumerate(first[1:], 1):
        own, *_ = shown.values()
        assert (own["decoded_token"], own["logprob"]) == (echoed.tokens[place], echoed.token_logprobs[place])
        ranks = [one["rank"] for one in shown.values()]
        assert sorted(rank for rank in ranks if rank is not None) == [1, 2, 3]
        assert (own["rank"] is None) is (len(shown) == 4)
        likeliest = {one["decoded_token"]: one["logprob"] for one in shown.values()}
        assert likeliest == echoed.top_logprobs[place]
    plain = complete(client, logprobs=2).choices[0]
    assert (done.choices[0].text, done.choices[0].logprobs) == (plain.text, plain.logprobs)
    shown = chat(client, extra_body={"prompt_logprobs": 0}).model_extra["prompt_logprobs"]
    assert [entry and len(entry) for entry in shown] == [None] + [1] * (len(shown) - 1)
    assert shown[1:]


def test_other_tasks_run_while_a_long_prompt_s_log_probabilities_are_named() -> None:
    tokenizer = open_model(TINY_MODEL).tokenizer()
    scores = [Emitted(5, place, -1.0, ranks=((5, -1.0), (6, -2.0))) for place in range(100)]
    turns = []

    async def others() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def named() -> int:
        task = asyncio.create_task(others())
        found = await prompt_logprobs(tokenizer, scores, 2)
        task.cancel()
        return len(found)

    assert asyncio.run(named()) == 101
    # One result for each PROMPT_TOKENS_AT_ONCE tokens.
    assert len(turns) == 4


def test_lists_of_tokens_and_words_limit_an_answer(rig: OpenAiRig, client: openai.OpenAI) -> None:
    import openai

    async def encoded(text: str) -> list[int]:
        return (await rig.decoder.tokenizer()).encode(text, begins=False)

    plain = complete(client, max_tokens=24, logprobs=0).choices[0]
    # A word of the answer, which the answer no longer contains.
    word = max(re.findall(r"[a-z]+", plain.text), key=len)
    for bad in (word, f" {word}"):
        other = complete(client, max_tokens=24, extra_body={"bad_words": [bad]}).choices[0].text
        assert word not in re.findall(r"[a-z]+", other)
        assert other != plain.text
    allowed = rig.wait_for(encoded("abc"))
    answer = complete(client, temperature=1, seed=1, extra_body={"allowed_token_ids": allowed, "min_tokens": 12})
    assert (set(answer.choices[0].text) <= set("abc"), answer.usage.completion_tokens) == (True, 12)
    for name, value in (("allowed_token_ids", [5, 10**6]), ("allowed_token_ids", ["a"]), ("bad_words", [" "])):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, extra_body={name: value})
        assert refused.value.param == name


def test_logprobs_are_the_chosen_tokens(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=1).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(log <= 0 for log in choice.logprobs.token_logprobs)
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    told = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=1, stream=True)]
    streamed = [log for one in told if one for log in one.token_logprobs]
    assert streamed == choice.logprobs.token_logprobs
    of_chat = chat(client, logprobs=True).choices[0]
    assert b"".join(bytes(one.bytes) for one in of_chat.logprobs.content).decode() == of_chat.message.content


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "gpulease"


# --- Errors. ---


def test_errors_are_the_client_s_own(rig: OpenAiRig, client: openai.OpenAI) -> None:
    import openai

    with rig.client("nobody") as stranger, pytest.raises(openai.AuthenticationError) as unknown:
        complete(stranger)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="gpt-9")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError) as tools:
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (tools.value.param, tools.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as strange:
        complete(client, prompt=[10**9])
    assert strange.value.type == "invalid_request_error"


def test_a_quota_is_a_429_with_retry_after(rig: OpenAiRig) -> None:
    import openai

    with rig.client("bob") as bob, complete(bob, max_tokens=100, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            complete(bob)
    assert refused.value.code == "quota_exceeded"
    assert int(refused.value.response.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b'{"prompt": "%s"}' % (b"word import " * 300_000)),
        ("completions", b'{"prompt": [%s5]}' % (b"5," * 1_000_000)),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"word import " * 300_000)),
    ],
    ids=["text", "tokens", "chat"],
)
def test_a_prompt_that_can_t_fit_is_refused_as_too_long_before_it_is_cut(
    rig: OpenAiRig, path: str, body: bytes
) -> None:
    """Some 4 MiB: more bytes than 160 tokens of the tiny model stand for."""
    with rig.http() as http:
        reply = http.post(f"/v1/{path}", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    message = reply.json()["error"]["message"]
    # Clients that shorten a chat recognise the error by these words.
    assert "This model's maximum context length is 160 tokens. However, " in message


def test_a_request_on_its_way_takes_a_place_of_its_tenant_s_alone(rig: OpenAiRig, client: openai.OpenAI) -> None:
    import openai

    """Its body counts before it is read: whoever sends many at once holds no memory beyond its places."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key_of('bob')}\r\n"
    address = httpx.URL(rig.url)
    with socket.create_connection((address.host, address.port or 0)) as slow, rig.client("bob") as bob:
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        wait_until(lambda: rig.do(lambda: rig.decoder.prompts.coming["bob"]) == 1, "the first body is on its way")
        with pytest.raises(openai.RateLimitError) as refused:
            complete(bob)
        assert refused.value.code == "quota_exceeded"
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert complete(client).choices[0].text
    wait_until(lambda: rig.do(lambda: rig.decoder.prompts.coming["bob"]) == 0, "its place is free")


def test_no_text_is_read_in_the_process_of_the_steps(
    rig: OpenAiRig, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither JSON nor a template nor a tokenizer: each may take seconds, and every stream would stop."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a text is read here")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    monkeypatch.setattr(ChatTemplate, "render", fail)
    monkeypatch.setattr(completion_request, "parse_request", fail)
    monkeypatch.setattr(prompt_job, "parse_request", fail)
    assert complete(client).choices[0].text
    assert chat(client).choices[0].message.content
    assert complete(client, prompt=[5, 6], stream=True)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_openai_s_words(
    rig: OpenAiRig, client: openai.OpenAI, is_chat: bool
) -> None:
    import openai

    """Ann's requests are bounded by the context, of 160 positions, bob's by his region, of 10 blocks."""
    words = r"This model's maximum context length is 160 tokens\. However, you requested (\d+) tokens \((\d+) in the"
    text = "Changed in version 3. " * 8
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    with pytest.raises(openai.BadRequestError) as long:
        (chat if is_chat else complete)(client, max_tokens=150, **asked)
    found = re.search(words, long.value.body["message"])  # type: ignore[index]
    assert found
    assert int(found[1]) == int(found[2]) + 150
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages" if is_chat else "prompt")


def test_a_prompt_that_can_t_be_computed_is_refused_by_its_parameter(rig: OpenAiRig) -> None:
    half = [{"role": "user", "content": "\ud800"}]
    with rig.http() as http:
        for path, body in (
            ("completions", {"prompt": [5, 10**6]}),
            ("completions", {"prompt": [5, -1], "min_tokens": 1}),
            ("completions", {"prompt": "\ud800"}),
            ("chat/completions", {"messages": half}),
            ("chat/completions", {"messages": half, "continue_final_message": True}),
        ):
            reply = http.post(f"/v1/{path}", content=json.dumps(body))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(body))), body


def test_the_model_says_how_long_the_caller_s_requests_may_be(rig: OpenAiRig, client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).max_model_len == 160  # type: ignore[attr-defined]
    with rig.client("eve") as eve:
        assert next(iter(eve.models.list())).max_model_len == 64  # type: ignore[attr-defined]
        # The answer to a chat without a limit may be as long as her region has room for.
        messages = [{"role": "user", "content": "What does the with statement do? " * 2}]
        whole = chat(eve, messages=messages, max_tokens=None)
    assert whole.usage.completion_tokens < CHAT_TOKENS
    assert whole.usage.total_tokens == 65, "the last token takes no position"


def test_a_chat_that_does_not_say_gets_the_server_s_length(rig: OpenAiRig, client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=None).usage.completion_tokens == CHAT_TOKENS


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_waits_too_long_is_told_when_to_ask_again(rig: OpenAiRig, is_stream: bool) -> None:
    rig.wait_for(rig.decoder.suspend("eve"))
    with rig.http("eve") as http:
        reply = http.post("/v1/completions", json={"prompt": PROMPT, "stream": is_stream})
        rig.wait_for(rig.decoder.resume("eve"))
    if not is_stream:
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
        assert reply.json()["error"]["code"] == "pool_exhausted"
        return
    # The head was sent when the request began to wait.
    *comments, last = reply.text.removesuffix("\n\n").split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert (reply.status_code, set(comments)) == (200, {": waiting"})
    assert (told["error"]["code"], told["gpulease"]) == ("pool_exhausted", {"status": 503, "retry_after": 1})


def test_a_stream_that_waits_is_never_silent(patient: OpenAiRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's head and a comment come at once, and a comment again and again; OpenAI's client passes over them."""
    monkeypatch.setattr(openai_server, "SILENCE_S", 0.01)
    patient.wait_for(patient.decoder.suspend("ann"))
    asked = {"prompt": PROMPT, "stream": True}
    with patient.http() as http, http.stream("POST", "/v1/completions", json=asked) as reply:
        assert (reply.status_code, reply.headers["X-Accel-Buffering"]) == (200, "no")
        lines = reply.iter_lines()
        assert [next(lines) for _ in range(8)] == [": waiting", ""] * 4
        patient.wait_for(patient.decoder.resume("ann"))
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    patient.wait_for(patient.decoder.suspend("ann"))
    with patient.client() as client:
        stream = complete(client, stream=True)
        patient.wait_for(patient.decoder.resume("ann"))
        assert text_of(stream).startswith(" 3.")


def test_an_id_of_a_request_that_goes_on_is_a_409(patient: OpenAiRig) -> None:
    asked, named = {"prompt": PROMPT, "max_tokens": 2}, {"X-Request-Id": "twice"}
    patient.wait_for(patient.decoder.suspend("ann"))
    with patient.http() as http, patient.http() as other, patient.http("eve") as eve:
        with http.stream("POST", "/v1/completions", json=asked | {"stream": True}, headers=named) as first:
            again = other.post("/v1/completions", json=asked, headers=named)
            of_another = eve.post("/v1/completions", json=asked, headers=named)
            patient.wait_for(patient.decoder.resume("ann"))
            assert first.read().endswith(b"[DONE]\n\n")
        later = other.post("/v1/completions", json=asked, headers=named)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "request_id_in_use")
    assert again.headers["X-Should-Retry"] == "false"
    assert (of_another.status_code, later.status_code) == (200, 200)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"prompt": NaN}', b"\xff", b"1" * 5000])
def test_a_body_that_is_no_request_is_refused_in_shape(rig: OpenAiRig, body: bytes) -> None:
    with rig.http() as http:
        reply = http.post("/v1/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tokenize"])
def test_a_body_that_is_too_large_is_not_read(rig: OpenAiRig, path: str) -> None:
    with rig.http() as http:
        reply = http.post(path, content=b" " * (4 << 20) + b"{}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")


def test_other_paths_and_methods_are_refused_in_shape(rig: OpenAiRig) -> None:
    with rig.http() as http:
        assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
        reply = http.get("/v1/completions", headers={"X-Request-Id": "mine-2"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
        assert (reply.headers["Allow"], reply.headers["X-Request-Id"]) == ("POST", "mine-2")
        # A second Date would make two dates (RFC 9110, 6.6.1).
        assert reply.headers.get_list("Date") == [reply.headers["Date"]]
        assert http.get("/healthz").json()["status"] == "ok"
        assert http.get("/metrics").status_code == 200


def test_a_sane_request_id_is_the_request_s(rig: OpenAiRig, heard: Heard) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    with rig.http() as http:
        reply = http.post("/v1/completions", json=asked, headers={"X-Request-Id": "mine-1"})
        other = http.post("/v1/completions", json=asked, headers={"X-Request-Id": "not sane"})
    assert (reply.headers["X-Request-Id"], reply.json()["id"]) == ("mine-1", "cmpl-mine-1")
    assert "ann/mine-1" in [report.request_id for report in heard.finished]
    assert other.headers["X-Request-Id"] not in ("", "not sane")
    with rig.http() as http:
        mine = {"X-Request-Id": "mine-3"}
        for reply in (
            http.get("/v1/models", headers=mine),
            http.get("/v1/models/another", headers=mine),
            http.post("/tokenize", json={"prompt": PROMPT}, headers=mine),
            http.post("/tokenize", json={}, headers=mine),
            http.get("/v1/nothing", headers=mine),
        ):
            assert reply.headers["X-Request-Id"] == "mine-3", reply.url


# --- Callers that go, regions that go. ---


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_caller_that_hangs_up_ends_its_sequence(rig: OpenAiRig, heard: Heard, is_stream: bool) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "stream": is_stream}
    name = f"gone-{is_stream}"
    # The first token is computed, and the last one can't be before the client disconnects.
    with no_new_steps(rig.decoder, after=20):
        if is_stream:
            with (
                rig.http() as http,
                http.stream("POST", "/v1/completions", json=asked, headers={"X-Request-Id": name}) as reply,
            ):
                next(reply.iter_bytes())
        else:
            # The client disconnects once its sequence is computed; before that, there might be no sequence to end.
            host, _, port = rig.url.removeprefix("http://").partition(":")
            body = json.dumps(asked)
            head = f"Host: {host}:{port}\r\nAuthorization: Bearer {key_of('ann')}\r\nX-Request-Id: {name}\r\n"
            head += f"Content-Length: {len(body)}\r\n"
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{body}".encode())
                wait_until(lambda: rig.do(lambda: len(rig.decoder.scheduler.tenants["ann"].live)), "it is computed")
        found = wait_until(lambda: [one for one in heard.finished if one.request_id == f"ann/{name}"], "it has ended")
    assert found[0].reason == "Cancelled"
    assert len(found[0].emitted) < 120


def test_a_lost_region_shows_in_the_extension_alone(
    rig: OpenAiRig, client: openai.OpenAI, shared_daemon: Daemon
) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 1.2, "seed": 5}
    quiet = complete(client, **asked)
    assert "gpulease" not in quiet.model_extra

    async def revoke() -> None:
        shared_daemon.revoke(rig.decoder.regions.pools["ann"].region.lease_id)

    with before_step(rig.decoder, 10, revoke):
        chunks = list(complete(client, stream=True, **asked))
    assert text_of(chunks) == quiet.choices[0].text
    extensions = [chunk.model_extra["gpulease"] for chunk in chunks if "gpulease" in (chunk.model_extra or {})]
    assert extensions == [{"replays": 1}]


def test_an_error_in_mid_stream_is_an_event(shared_daemon: Daemon) -> None:
    import openai

    """The whole lease is revoked after the first tokens."""
    with openai_rig(shared_daemon) as rig, rig.client() as client:
        stream = iter(complete(client, stream=True, max_tokens=120))
        next(stream)
        rig.do(lambda: rig.decoder._supervisor.fail(_lost()))
        with pytest.raises(openai.APIError) as lost:
            list(stream)
        assert lost.value.code == "engine_unavailable"
        assert "gpulease.sock" not in str(lost.value)
        with pytest.raises(openai.InternalServerError) as refused:
            complete(client)
        assert refused.value.status_code == 503
        with rig.http() as http:
            health = http.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "engine_lost")


def _lost() -> Any:
    from gpulease.client.decode import EngineDecodeFailed

    return EngineDecodeFailed("The engine is lost: nobody is at unix:/run/gpulease/gpulease.sock")


def test_health_says_since_when_and_why_there_is_no_engine(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_losses, "MAX_PAUSE_S", 0.01)

    async def refuse(*_: Any) -> None:
        raise Denied("unix:/run/gpulease.sock lets nobody in")

    with openai_rig(shared_daemon) as rig, rig.http() as http:
        began, lost_for = datetime.now(UTC), DecodeMetrics(["ann"], lambda: rig.decoder)
        assert b"\ngpulease_decode_without_engine_seconds 0.0\n" in rig.do(lost_for.text)
        assert "engine_lost" not in http.get("/healthz").json()
        with monkeypatch.context() as patch:
            patch.setattr(ServingEngine, "open", refuse)
            lost = Revoked("by an operator")
            rig.do(lambda: rig.decoder._supervisor.engine_failed(rig.decoder._supervisor.serving, lost))

            def is_refused() -> bool:
                outage = rig.decoder.outage
                return outage is not None and outage.tries > 2

            wait_until(lambda: rig.do(is_refused), "another engine is refused")
            health = http.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "engine_lost")
        told = health.json()["engine_lost"]
        assert (told["cause"], told["refusal"]) == ("Revoked", "Denied")
        assert told["tries"] > 2
        assert told["seconds"] >= 0
        assert datetime.fromisoformat(told["since"]) > began - timedelta(seconds=2)
        assert "gpulease.sock" not in health.text
        assert b"\ngpulease_decode_without_engine_seconds 0.0\n" not in rig.do(lost_for.text)
        wait_until(lambda: http.get("/healthz").status_code == 200, "another engine serves")


def test_requests_that_fail_write_no_more_lines_than_their_tenant_has(
    rig: OpenAiRig, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import openai

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret of the host")

    with monkeypatch.context() as patch:
        patch.setattr(rig.decoder, "submit", fail)
        # No budget of lines is refilled while this test runs.
        patch.setattr(decode_log, "LINE_EVERY_S", 1e9)
        patch.setattr(rig.decoder.log, "_budgets", {})
        for _ in range(decode_log.LINES_AT_ONCE + 3):
            with pytest.raises(openai.InternalServerError) as refused:
                complete(client)
            assert "secret" not in str(refused.value)
    lines = lines_of(caplog, "request_failed")
    assert len(lines) == decode_log.LINES_AT_ONCE
    assert (lines[0]["tenant"], lines[0]["cause"]) == ("ann", "RuntimeError: secret of the host")


def test_events_are_valid_json_of_one_line(rig: OpenAiRig) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    with rig.http() as http:
        reply = http.post("/v1/completions", json=asked)
    assert reply.headers["Content-Type"] == "text/event-stream"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert events[0] == ": waiting"
    assert [json.loads(event.removeprefix("data: "))["object"] for event in events[1:-2]]
