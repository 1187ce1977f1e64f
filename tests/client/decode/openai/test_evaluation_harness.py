"""What lm-evaluation-harness sends to its `local-completions` and `local-chat-completions` models, replayed.

The bodies are those of its `_create_payload`, the paths those of its remote tokenizer, and the sums are its
`parse_logprobs`. The log-likelihoods are compared with the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from helpers.daemon import Daemon
from helpers.decode.made_models import tiny_model
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig
from helpers.decode.reference import Reference

PAIRS = [("Changed in version", " 3.7"), ("The with", " statement"), ("An iterator", " zebra"), ("return", " None")]


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon) -> Iterator[OpenAiRig]:
    with openai_rig(shared_daemon, wait_s=60.0) as running:
        yield running


@pytest.fixture
def http(rig: OpenAiRig) -> Iterator[httpx.Client]:
    with rig.http() as client:
        yield client


def encoded(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return tokens


def test_the_remote_tokenizer_has_all_that_it_asks_for(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|end|>", None)
    assert "{% for message in messages %}" in info["chat_template"]
    # A text that is scored as a whole is preceded by the end token; the harness encodes that token's text.
    assert encoded(http, info["eos_token"]) == [0]
    assert http.post("/detokenize", json={"tokens": encoded(http, "An iterator")}).json() == {"prompt": "An iterator"}
    assert http.get("/tokenizer_info?model=another").status_code == 404
    with httpx.Client(base_url=http.base_url) as anyone:
        assert anyone.get("/tokenizer_info").status_code == 401


def scored(http: httpx.Client, prompts: Sequence[Any], contexts: Sequence[int]) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each prompt after its context, and whether it is the greedy continuation."""
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    reply = http.post("/v1/completions", json=body | {"echo": True}).json()
    found = []
    for choice, begin in zip(sorted(reply["choices"], key=lambda one: one["index"]), contexts, strict=True):
        scores = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        found.append((sum(scores), all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))))
    return found


def expected(tokens: Sequence[int], begin: int) -> tuple[float, bool]:
    logits = Reference(*tiny_model()).logits(list(tokens)).astype(np.float64)
    logs = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    places = range(begin, len(tokens))
    total = sum(float(logs[place - 1, tokens[place]]) for place in places)
    return total, all(int(logs[place - 1].argmax()) == tokens[place] for place in places)


def test_log_likelihoods_of_tokens_and_of_texts_are_the_reference_s(http: httpx.Client) -> None:
    contexts = [encoded(http, context) for context, _ in PAIRS]
    wholes = [encoded(http, context + continuation) for context, continuation in PAIRS]
    begins = list(map(len, contexts))
    # By default the harness sends a batch of token lists; without a tokenizer, one text at a time.
    found = scored(http, wholes, begins)
    assert found == [scored(http, ["".join(pair)], [begin])[0] for pair, begin in zip(PAIRS, begins, strict=True)]
    for (total, is_greedy), whole, begin in zip(found, wholes, begins, strict=True):
        exact, is_likeliest = expected(whole, begin)
        assert total == pytest.approx(exact, abs=2e-2)
        assert is_greedy == is_likeliest
    assert {is_greedy for _, is_greedy in found} == {True, False}


def test_a_text_as_a_whole_is_scored_behind_the_end_token(http: httpx.Client) -> None:
    tokens = [0, *encoded(http, "Changed in version 3.7: the with statement")]
    ((total, _),) = scored(http, [tokens], [1])
    assert total == pytest.approx(expected(tokens, 1)[0], abs=5e-2)


def test_texts_are_generated_to_any_of_a_task_s_stops(http: httpx.Client) -> None:
    # humaneval has five stops, and the harness adds the text of the end token.
    stops = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "<|end|>"]
    prompts = [encoded(http, context) for context, _ in PAIRS]
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "stop": stops, "seed": 1234}
    reply = http.post("/v1/completions", json=body | {"prompt": prompts}).json()
    assert sorted(one["index"] for one in reply["choices"]) == [0, 1, 2, 3]
    assert reply["choices"][0]["text"].startswith(" 3.")
    # For chats the harness sends only the first four stops.
    messages = [{"role": "user", "content": "What does the with statement do?"}]
    chat = http.post("/v1/chat/completions", json=body | {"messages": messages, "stop": stops[:4]}).json()
    assert isinstance(chat["choices"][0]["message"]["content"], str)
