"""Bodies of completions: which are accepted, and that any other is refused with an error in OpenAI's format."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.openai.answer_forms import AnswerForm
from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_request import (
    MAX_REPLY_SCORES,
    CompletionRequest,
    check_reply_scores,
    parse_request,
)
from gpulease.client.decode.openai.prompt_job import read_prompts, with_tokens
from gpulease.client.decode.openai.request_parameters import PARAMETERS, STREAM_OPTIONS
from gpulease.client.decode.text.prompt_reader import PromptReader

NAMES = sorted({*PARAMETERS, *STREAM_OPTIONS, "content", "role", "type", "text"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=3),
    max_leaves=8,
)
TAGS = {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"type": "null"}, "end": ">"}]}
BODIES = VALUES | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
SEED = 7
BEGINS, NOT_BEGINS = {"add_special_tokens": True}, {"add_special_tokens": False}


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
    assert (asked.prompts, asked.max_tokens, asked.stops, asked.model) == (("Hi",), 16, (), "")
    assert (asked.choices, asked.tries, asked.ranks, asked.is_echo, asked.priority) == (1, 1, 0, False, 0)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k, asked.sampling.seed) == (1, 1, 0, 7)
    assert asked.is_seed_chosen
    assert (asked.is_stream, asked.has_usage, asked.has_logprobs) == (False, False, False)
    assert parsed(is_chat=True).max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([7], ((7,),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3], "b"], ((1,), (2, 3), "b")),
    ],
)
def test_prompts(prompt: Any, taken: Any) -> None:
    assert parsed(prompt=prompt).prompts == taken


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", ""], [[1], []], [1, "a"], [True], [1.5], {}, 7, ["a"] * 129]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    assert refused(prompt=prompt).param == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_salt", "x" * 1025),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("best_of", 0),
        ("echo", 1),
        ("suffix", "x"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"9" * 4000: 1}),
        ("logit_bias", {str(token): 1 for token in range(301)}),
        ("logit_bias", [5]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "high"),
        ("repetition_penalty", 0),
        ("min_p", 1.1),
        ("min_tokens", -1),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1] * 129),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [2**31]),
        ("allowed_token_ids", [5] * 4097),
        ("bad_words", "a"),
        ("bad_words", [5]),
        ("bad_words", [" "]),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["x" * 1025]),
        ("ignore_eos", 1),
        ("priority", 2**31),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("logprobs", 21),
        ("logprobs", True),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", "x" * 1025),
        ("stop", "a\ud800"),
        ("stop", ["a", "\udc00"]),
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
    [
        ("tools", [{}]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "a", "parameters": []}}]),
        ("tools", [{"type": "function", "function": {"name": "a"}}] * 2),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "a"}}),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": True}}),
        ("parallel_tool_calls", 1),
        ("top_logprobs", 3),
        ("logprobs", 1),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"continue_final_message": True}),
        ("continue_final_message", 1),
        ("add_generation_prompt", "no"),
        ("documents", ["a"]),
        ("chat_template_kwargs", {str(name): 1 for name in range(65)}),
    ],
)
def test_what_a_chat_can_t_have_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(is_chat=True, **{name: value}).param == name


def test_a_message_is_continued_or_followed_by_another() -> None:
    assert parsed(True, continue_final_message=True).continues
    assert parsed(True, continue_final_message=True, add_generation_prompt=False).continues
    for said in ({"add_generation_prompt": True}, {"chat_template_kwargs": {"add_generation_prompt": True}}):
        assert refused(True, continue_final_message=True, **said).param == "continue_final_message"
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "assistant", "content": "x", "tool_calls": calls}]
    assert refused(True, continue_final_message=True, messages=messages).param == "continue_final_message"
    # As in vLLM, the template's variables take precedence.
    asked = parsed(True, add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": True})
    assert asked.variables == {"add_generation_prompt": True}
    assert refused(stream=True, prompt_logprobs=1).param == "prompt_logprobs"


@pytest.mark.parametrize(
    ("is_chat", "values", "scores_a_token"),
    [
        (False, {"prompt_logprobs": 7}, 8),
        (False, {"prompt_logprobs": 7, "n": 4}, 32),
        (True, {"prompt_logprobs": 7, "n": 4}, 8),
        (False, {"echo": True, "logprobs": 3, "n": 2}, 8),
        (False, {"echo": True, "logprobs": 3, "n": 2, "stream": True}, 8),
    ],
)
def test_a_reply_of_too_many_log_probabilities_is_refused(
    is_chat: bool, values: dict[str, Any], scores_a_token: int
) -> None:
    request, most = parsed(is_chat, **values), MAX_REPLY_SCORES // scores_a_token
    check_reply_scores(request, [(most // 2, 0), (most // 2, 0)])
    with pytest.raises(ApiError) as error:
        check_reply_scores(request, [(most // 2, 0), (most // 2 + 1, 0)])
    assert error.value.param == ("prompt_logprobs" if "prompt_logprobs" in values else "logprobs")


def test_a_stream_s_own_log_probabilities_are_not_kept_so_not_bounded() -> None:
    check_reply_scores(parsed(logprobs=3, stream=True), [(0, MAX_REPLY_SCORES)])
    with pytest.raises(ApiError):
        check_reply_scores(parsed(logprobs=3), [(0, MAX_REPLY_SCORES // 4 + 1)])


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
        {"role": "tool", "tool_call_id": "1"},
        {"role": "function", "content": "a"},
        {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
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


def test_choices_are_the_best_of_as_many_tries_and_not_in_a_stream() -> None:
    assert (parsed(n=2).choices, parsed(n=2).tries, parsed(n=2, best_of=5).tries) == (2, 2, 5)
    assert refused(n=3, best_of=2).param == "best_of"
    assert refused(n=1, best_of=2, stream=True).param == "best_of"
    assert parsed(n=3, stream=True).choices == 3
    assert refused(prompt=["a", "b"], n=65).param == "prompt"
    assert parsed(prompt=["a", "b"], n=64).tries == 64


def test_an_echo_may_be_all_that_is_sent() -> None:
    assert parsed(echo=True, max_tokens=0).max_tokens == 0
    assert refused(max_tokens=0).param == "max_tokens"


def test_what_changes_the_choice_of_tokens_is_the_sampling_s() -> None:
    said: dict[str, Any] = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "min_tokens": 3,
    }
    sampling = parsed(**said, logit_bias={"7": -100, "9": 2.5}, stop_token_ids=[4, 5], ignore_eos=True).sampling
    assert {name: getattr(sampling, name) for name in said} == said
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.ignores_end) == (((7, -100), (9, 2.5)), (4, 5), True)


def test_a_chat_s_likeliest_tokens_and_template_variables() -> None:
    asked = parsed(True, logprobs=True, top_logprobs=20, chat_template_kwargs={"enable_thinking": False})
    assert (asked.has_logprobs, asked.ranks, asked.variables) == (True, 20, {"enable_thinking": False})


def test_a_schema_may_be_where_llama_cpp_has_it() -> None:
    schema = {"enum": ["yes", "no"]}
    for form in (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        {"type": "json_schema", "schema": schema},
        {"type": "json_object", "schema": schema},
    ):
        assert parsed(response_format=form).form == AnswerForm("response_format", schema)
    assert parsed(response_format={"type": "json_object"}).form == AnswerForm("response_format", {"type": "object"})
    with pytest.raises(ApiError, match="schema"):
        parsed(response_format={"type": "json_object", "schema": "a"})


@pytest.mark.parametrize(
    ("said", "form"),
    [
        ({"structured_outputs": {"json": {"type": "null"}}}, AnswerForm("structured_outputs", {"type": "null"})),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, AnswerForm("structured_outputs", {"type": "null"})),
        ({"structured_outputs": {"json_object": True}}, AnswerForm("structured_outputs", {"type": "object"})),
        ({"structured_outputs": {"regex": "a+", "json": None}}, AnswerForm("structured_outputs", regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, AnswerForm("structured_outputs", choices=("a", "b"))),
        ({"guided_json": {"type": "null"}}, AnswerForm("guided_json", {"type": "null"})),
        ({"guided_regex": "a+"}, AnswerForm("guided_regex", regex="a+")),
        ({"guided_choice": ["a"]}, AnswerForm("guided_choice", choices=("a",))),
        ({"json_schema": {"type": "null"}}, AnswerForm("json_schema", {"type": "null"})),
        ({"regex": "a+", "response_format": {"type": "text"}}, AnswerForm("regex", regex="a+")),
        ({"structured_outputs": {"grammar": "start: A"}}, AnswerForm("structured_outputs", grammar="start: A")),
        ({"guided_grammar": "start: A"}, AnswerForm("guided_grammar", grammar="start: A")),
        ({"grammar": "root ::= A", "stop": "a"}, AnswerForm("grammar", grammar="root ::= A")),
        ({"ebnf": "root ::= A", "grammar": ""}, AnswerForm("ebnf", grammar="root ::= A")),
    ],
)
def test_a_form_may_be_where_other_servers_have_it(said: dict[str, Any], form: AnswerForm) -> None:
    assert parsed(**said).form == parsed(True, **said).form == form


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": "a+"}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "invalid_value"),
        ({"structural_tag": TAGS, "min_tokens": 2}, "min_tokens", "invalid_value"),
        ({"structural_tag": TAGS, "regex": "a"}, "structural_tag", "invalid_value"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs", "invalid_value"),
        ({"guided_grammar": ["root"]}, "guided_grammar", "invalid_value"),
        ({"guided_grammar": "start: a", "regex": "a"}, "guided_grammar", "invalid_value"),
        ({"ebnf": "root ::= a", "min_tokens": 2}, "min_tokens", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": ""}},
            "structured_outputs.whitespace_pattern",
            "unsupported_parameter",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown_parameter"),
        ({"guided_json": []}, "guided_json", "invalid_value"),
        ({"guided_regex": ""}, "guided_regex", "invalid_value"),
        ({"guided_regex": "\ud800"}, "guided_regex", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a"], "stop": "a"}, "stop", "invalid_value"),
        ({"guided_regex": "a", "stop_token_ids": [5]}, "stop_token_ids", "invalid_value"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", "invalid_value"),
        ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words", "invalid_value"),
    ],
)
def test_a_form_that_is_wrong_is_refused_by_its_parameter(said: dict[str, Any], param: str | None, code: str) -> None:
    found = refused(**said)
    assert (found.status, found.param, found.code) == (400, param, code)


def test_a_bad_word_is_its_tokens_at_the_beginning_and_behind_a_space() -> None:
    tokenizer = open_model(TINY_MODEL).tokenizer()
    reader = PromptReader(tokenizer, 160)
    plain, spaced = (tuple(tokenizer.encode(text, begins=False)) for text in ("version", " version"))
    # A bad word with a leading space gives the same tokens as without one, as in vLLM.
    for word in ("version", " version"):
        found = with_tokens(reader, parsed(bad_words=[word], seed=1)).sampling.bad_words
        assert found == ((plain, spaced) if len(plain) == len(spaced) else (plain,))
    for word, said in (("zq" * 100, "1 to 16 tokens"), ("\ud800", "can't be cut")):
        with pytest.raises(ApiError, match=said) as error:
            with_tokens(reader, parsed(bad_words=[word]))
        assert error.value.param == "bad_words"


def test_a_begin_token_is_added_as_the_request_says() -> None:
    tokenizer = open_model(TINY_MODEL).tokenizer()
    tokenizer.begin_token, tokenizer.chat_begins = 7, False
    reader = PromptReader(tokenizer, 160)

    def first(is_chat: bool, **said: Any) -> bool:
        return read_prompts(reader, parsed(is_chat, **said))[0][0] == 7

    assert [first(False, **said) for said in ({}, BEGINS, NOT_BEGINS)] == [True, True, False]
    # In vLLM the default for chats is false: the template writes the first token if the model needs it.
    assert [first(True, **said) for said in ({}, BEGINS, NOT_BEGINS)] == [False, True, False]
    tokenizer.chat_begins = True
    assert [first(True, **said) for said in ({}, NOT_BEGINS)] == [True, False]
    assert refused(add_special_tokens="no").param == "add_special_tokens"
