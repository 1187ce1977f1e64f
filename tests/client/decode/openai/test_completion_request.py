"""Bodies of completions: what is accepted, and that anything else is an error in OpenAI's format."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_request import CompletionRequest, parse_request
from gpulease.client.decode.openai.request_parameters import PARAMETERS, STREAM_OPTIONS

NAMES = sorted({*PARAMETERS, *STREAM_OPTIONS, "content", "role", "type", "text"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = VALUES | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
SEED = 7


def parsed(is_chat: bool = False, **said: Any) -> CompletionRequest:
    usual: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
    return parse_request(json.dumps(usual | said).encode(), is_chat=is_chat, fresh_seed=SEED)


def refused(is_chat: bool = False, **said: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parsed(is_chat, **said)
    assert error.value.status == 400
    return error.value


@given(BODIES, st.booleans())
def test_any_json_is_taken_or_refused_in_shape(said: Any, is_chat: bool) -> None:
    error = None
    try:
        parse_request(json.dumps(said).encode(), is_chat=is_chat, fresh_seed=SEED)
    except ApiError as refused:
        error = refused
    if error is not None:
        assert error.status == 400
        json.dumps(error.body()).encode("ascii")
        assert len(error.message) < 1000


@given(st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_request(body, is_chat=False, fresh_seed=SEED)


def test_what_is_taken_where_nothing_is_said() -> None:
    asked = parsed()
    assert (asked.prompt, asked.max_tokens, asked.stops, asked.model) == ("Hi", 16, (), "")
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k, asked.sampling.seed) == (1, 1, 0, 7)
    assert asked.is_seed_chosen
    assert (asked.is_stream, asked.has_usage, asked.has_logprobs) == (False, False, False)
    assert parsed(is_chat=True).max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "taken"), [("a", "a"), (["a"], "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([7], (7,))]
)
def test_prompts(prompt: Any, taken: Any) -> None:
    assert parsed(prompt=prompt).prompt == taken


@pytest.mark.parametrize("prompt", [None, "", [], [[]], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], {}, 7])
def test_prompts_that_are_none(prompt: Any) -> None:
    assert refused(prompt=prompt).param == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.1),
        ("logprobs", 2),
        ("logprobs", True),
        ("stop", ["a"] * 5),
        ("stop", [""]),
        ("stop", "x" * 1025),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_k", 1.5),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_can_t_be_computed_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", [{}]), ("response_format", {"type": "json_object"}), ("top_logprobs", 3), ("logprobs", 1)],
)
def test_what_a_chat_can_t_have_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(is_chat=True, **{name: value}).param == name


def test_a_parameter_that_nobody_knows_is_refused() -> None:
    error = refused(repetition_penaltyé=1.1)
    assert error.code == "unknown_parameter"
    assert "repetition_penalty" in error.message


def test_messages() -> None:
    said = [{"role": "developer", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    asked = parsed(is_chat=True, messages=said)
    assert asked.messages == ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})


@pytest.mark.parametrize(
    "message",
    [
        {},
        "a",
        {"role": "tool", "content": "a"},
        {"role": "user"},
        {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "content": "a", "tool_calls": [{}]},
    ],
)
def test_messages_that_are_none(message: Any) -> None:
    assert refused(is_chat=True, messages=[message]).param == "messages"


def test_a_top_k_of_minus_one_keeps_all_tokens() -> None:
    assert parsed(top_k=-1) == parsed(top_k=0) == parsed()


def test_a_negative_seed_is_one_of_64_bits() -> None:
    assert parsed(seed=-1).sampling.seed == 2**64 - 1
