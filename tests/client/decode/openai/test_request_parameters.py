"""The table of parameters: each is used, ignored, or accepted only with values that change nothing."""

import json
from typing import Any, Final, cast

import pytest

from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_request import CompletionRequest, parse_request
from gpulease.client.decode.openai.request_parameters import PARAMETERS, STREAM_OPTIONS, RequestParameter

TOOLS: Final = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

USED_VALUES: Final[dict[str, Any]] = {
    "add_special_tokens": False,
    "allowed_token_ids": [5, 6],
    "bad_words": ["x"],
    "best_of": 2,
    "cache_salt": "a",
    "chat_template_kwargs": {"enable_thinking": False},
    "ebnf": 'root ::= "a"',
    "echo": True,
    "grammar": 'root ::= "a"',
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_json": {"type": "null"},
    "guided_regex": "a+",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "json_schema": {"type": "null"},
    "logit_bias": {"5": 1},
    "min_p": 0.1,
    "min_tokens": 2,
    "n": 2,
    "presence_penalty": -0.5,
    "priority": -1,
    "prompt_logprobs": 0,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "repetition_penalty": 1.1,
    "regex": "a+",
    "stop_token_ids": [5],
    "structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"type": "null"}, "end": ">"}]},
    "structured_outputs": {"choice": ["a"]},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "tools": TOOLS,
    "top_logprobs": 2,
    "logprobs": (1, True),
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "Another"}],
    "model": "another",
    "prompt": "Another",
    "seed": 99,
    "stop": "x",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
}
"""For each parameter that is used, a value that changes the request; if chats differ, by whether it is a chat."""

TAKEN_WITH: Final[dict[str, dict[str, Any]]] = {
    "parallel_tool_calls": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS},
    "top_logprobs": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 5},
}
"""Parameters that change a request only together with others."""

DEFAULTS_OF_CLIENTS: Final[dict[str, Any]] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "echo": False,
    "suffix": None,
    "user": None,
    "include_reasoning": True,
    "priority": 0,
    "detokenize": True,
    "flat_logprobs": False,
    "logits_processors": None,
    "structured_outputs": None,
    "extra_args": None,
    "skip_reading_prefix_cache": False,
}
"""What a program sends if it writes every parameter of vLLM's SamplingParams with its default."""

DEFAULTS_OF_LLAMA_CPP: Final[dict[str, Any]] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "grammar": "",
    "n_keep": 0,
    "n_probs": 0,
    "min_keep": 0,
    "id_slot": -1,
    "t_max_predict_ms": 0,
    "cache_prompt": True,
    "return_tokens": False,
    "post_sampling_probs": False,
    "response_fields": [],
    "lora": [],
    "timings_per_token": False,
}
"""What a program sends if it writes the parameters of llama.cpp's server with their defaults."""

OF_VLLM: Final = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message detokenize documents echo extra_args flat_logprobs frequency_penalty
    guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
    include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors logprobs
    max_completion_tokens max_tokens media_io_kwargs min_p min_tokens mm_processor_kwargs n output_kind
    parallel_tool_calls presence_penalty priority prompt_embeds prompt_logprobs reasoning_effort repetition_penalty
    request_id response_format return_token_ids return_tokens_as_token_ids seed skip_reading_prefix_cache
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_options structural_tag
    structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
    truncate_prompt_tokens use_beam_search user vllm_xargs
"""
"""The parameters of vLLM's SamplingParams and of its completions and chats."""


def parsed(is_chat: bool, said: dict[str, Any]) -> CompletionRequest:
    usual: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
    # stream_options are accepted only with stream.
    usual["stream"] = "stream_options" in said
    return parse_request(json.dumps(usual | said).encode(), is_chat=is_chat, fresh_seed=7)


def refusal(is_chat: bool, said: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parsed(is_chat, said)
    return refused.value


def asked(parameter: RequestParameter, is_chat: bool) -> bool:
    return parameter.is_of_chats if is_chat else parameter.is_of_completions


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_is_what_the_table_says(name: str, is_chat: bool) -> None:
    parameter = PARAMETERS[name]
    plain = parsed(is_chat, {})
    assert (parameter.is_used, parameter.is_ignored).count(True) <= 1
    assert not (parameter.is_ignored and parameter.neutral)
    # A parameter that is used everywhere has no values that mean the same as its absence.
    assert not (parameter.is_used and parameter.neutral and parameter.is_of_chats and parameter.is_of_completions)
    if not asked(parameter, is_chat):
        assert refusal(is_chat, {name: "x"}).code == "unknown_parameter"
        for value in parameter.neutral:
            assert parsed(is_chat, {name: value}) == plain
        return
    if parameter.is_used:
        value = USED_VALUES[name]
        if others := TAKEN_WITH.get(name):
            plain = parsed(is_chat, others)
            assert parsed(is_chat, {**others, name: value}) != plain
            return
        assert parsed(is_chat, {name: value[is_chat] if name == "logprobs" else value}) != plain
        return
    if parameter.is_ignored:
        assert parsed(is_chat, {name: "x"}) == plain
        return
    for value in (None, *parameter.neutral):
        assert parsed(is_chat, {name: value}) == plain
        if type(value) in (int, float):
            assert parsed(is_chat, {name: float(cast(float, value))}) == plain
            assert refusal(is_chat, {name: bool(value)}).param == name
    wrong = refusal(is_chat, {name: "another"})
    assert (wrong.status, wrong.param, wrong.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_defaults_of_clients_are_taken(is_chat: bool) -> None:
    assert parsed(is_chat, DEFAULTS_OF_CLIENTS | ({"logprobs": False} if is_chat else {})) == parsed(is_chat, {})
    assert parsed(is_chat, DEFAULTS_OF_LLAMA_CPP) == parsed(is_chat, {})


def test_every_parameter_of_vllm_is_in_the_table() -> None:
    """A parameter that is neither used nor neutral is refused by its name, not as an unknown one."""
    assert not set(OF_VLLM.split()) - PARAMETERS.keys()


def test_every_parameter_of_openai_s_client_is_in_the_table() -> None:
    # Import it here: every process of a run imports this file, and the client takes half a second.
    from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParameters
    from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParameters

    for kind in (CompletionParameters, ChatParameters):
        assert set(kind.__annotations__) - {"stream"} <= PARAMETERS.keys()
    assert set(ChatCompletionStreamOptionsParam.__annotations__) <= STREAM_OPTIONS.keys()


def test_options_of_a_stream_are_looked_at_likewise() -> None:
    def streamed(**options: Any) -> dict[str, Any]:
        return {"stream_options": options}

    plain = parsed(False, streamed())
    assert parsed(False, streamed(include_obfuscation=False, continuous_usage_stats=False)) == plain
    assert refusal(False, streamed(continuous_usage_stats=True)).param == "stream_options.continuous_usage_stats"
    assert parsed(False, streamed(continuous_usage_stats=True, include_usage=True)).has_running_usage
    unknown = refusal(False, streamed(include_use=True))
    assert (unknown.code, unknown.param) == ("unknown_parameter", "stream_options.include_use")
    # A text that is not a name is not repeated in the error.
    for name in ("x" * 1000, "\ud800", "a\n"):
        assert refusal(False, {name: 1}).param is None
