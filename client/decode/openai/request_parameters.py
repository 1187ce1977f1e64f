"""All known parameters of completions and chats: which are used, and which values are accepted of the unused ones.

They are the parameters of OpenAI's API, and those that clients of other model servers send. A parameter that is not
supported is refused, unless its value does not change the answer. null counts as left out. An unknown name is refused,
because it may be misspelt, and ignoring it would give a wrong answer without an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.openai.api_errors import invalid
from gpulease.client.texts import quoted

MAX_NAME_CHARACTERS: Final = 128
"""Maximum length of an unknown parameter's name in the error's `param`. For a longer name, the error has no `param`."""


@dataclass(frozen=True, slots=True)
class RequestParameter:
    """How a parameter is treated.

    Attributes:
        is_used: Whether the server supports it.
        is_ignored: Whether every value is accepted and ignored, because no value changes the answer.
        neutral: The values that do not change the answer. They are accepted even if the parameter is not supported, or
            belongs to the other endpoint.
        is_of_chats: Whether it is a parameter of chats.
        is_of_completions: Whether it is a parameter of completions.
    """

    is_used: bool = False
    is_ignored: bool = False
    neutral: tuple[Any, ...] = ()
    is_of_chats: bool = True
    is_of_completions: bool = True


def _neutral(*values: Any) -> RequestParameter:
    return RequestParameter(neutral=values)


_USED: Final = RequestParameter(is_used=True)
_IGNORED: Final = RequestParameter(is_ignored=True)
_REFUSED: Final = RequestParameter()

PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    # Parameters of OpenAI's API.
    "audio": _REFUSED,
    "best_of": RequestParameter(is_used=True, neutral=(1,), is_of_chats=False),
    "echo": RequestParameter(is_used=True, neutral=(False,), is_of_chats=False),
    "frequency_penalty": _USED,
    "function_call": _neutral("auto", "none"),
    "functions": _neutral([]),
    "logit_bias": _USED,
    "logprobs": _USED,
    "max_completion_tokens": RequestParameter(is_used=True, is_of_completions=False),
    "max_tokens": _USED,
    "messages": RequestParameter(is_used=True, is_of_completions=False),
    "metadata": _IGNORED,
    "modalities": _neutral(["text"]),
    "model": _USED,
    "moderation": _REFUSED,
    "n": _USED,
    "parallel_tool_calls": RequestParameter(is_used=True, neutral=(True, False), is_of_completions=False),
    "prediction": _IGNORED,
    "presence_penalty": _USED,
    "prompt": RequestParameter(is_used=True, is_of_chats=False),
    "prompt_cache_key": _IGNORED,
    "prompt_cache_options": _IGNORED,
    "prompt_cache_retention": _IGNORED,
    "reasoning_effort": _REFUSED,
    "response_format": _USED,
    "safety_identifier": _IGNORED,
    "seed": _USED,
    "service_tier": _IGNORED,
    "stop": _USED,
    "store": _IGNORED,
    "stream": _USED,
    "stream_options": _USED,
    "suffix": _neutral(""),
    "temperature": _USED,
    "tool_choice": RequestParameter(is_used=True, neutral=("auto", "none"), is_of_completions=False),
    "tools": RequestParameter(is_used=True, neutral=([],), is_of_completions=False),
    "top_logprobs": RequestParameter(is_used=True, neutral=(0,), is_of_completions=False),
    "top_p": _USED,
    "user": _IGNORED,
    "verbosity": _REFUSED,
    "web_search_options": _REFUSED,
    # Parameters of vLLM, llama.cpp and SGLang.
    "add_generation_prompt": RequestParameter(is_used=True, neutral=(True,), is_of_completions=False),
    "add_special_tokens": _USED,
    "allowed_token_ids": _USED,
    "bad_words": _USED,
    "cache_prompt": _IGNORED,
    "cache_salt": _USED,
    "chat_template": _REFUSED,
    "chat_template_kwargs": RequestParameter(is_used=True, neutral=({},), is_of_completions=False),
    "continue_final_message": RequestParameter(is_used=True, neutral=(False,), is_of_completions=False),
    "custom_logit_processor": _REFUSED,
    "detokenize": _neutral(True),
    "documents": RequestParameter(is_used=True, neutral=([],), is_of_completions=False),
    "dry_allowed_length": _neutral(2),
    "dry_base": _neutral(1.75),
    "dry_multiplier": _neutral(0),
    "dry_penalty_last_n": _neutral(-1),
    "dry_sequence_breakers": _neutral([], ["\n", ":", '"', "*"]),
    "dynatemp_exponent": _neutral(1),
    "dynatemp_range": _neutral(0),
    "ebnf": _USED,
    "extra_args": _neutral({}),
    "flat_logprobs": _neutral(False),
    "grammar": _USED,
    "grammar_lazy": _neutral(False),
    "grammar_triggers": _neutral([]),
    "guided_choice": _USED,
    "guided_decoding_backend": _neutral("auto", "guidance"),
    "guided_grammar": _USED,
    "guided_json": _USED,
    "guided_regex": _USED,
    "guided_whitespace_pattern": _REFUSED,
    "id_slot": _neutral(-1),
    "ignore_eos": _USED,
    "image_data": _neutral([]),
    "include_reasoning": _neutral(True),
    "include_stop_str_in_output": _USED,
    "json_schema": _USED,
    "kv_transfer_params": _neutral({}),
    "length_penalty": _neutral(1),
    "logits_processors": _neutral([]),
    "lora": _neutral([]),
    "lora_path": _REFUSED,
    "media_io_kwargs": _neutral({}),
    "min_keep": _neutral(0),
    "min_p": _USED,
    "min_tokens": _USED,
    "mirostat": _neutral(0),
    "mirostat_eta": _neutral(0.1),
    "mirostat_tau": _neutral(5),
    "mm_processor_kwargs": _neutral({}),
    "n_indent": _neutral(0),
    "n_keep": _neutral(0),
    "n_predict": _REFUSED,
    "n_probs": _neutral(0),
    "no_stop_trim": _neutral(False),
    "output_kind": _REFUSED,
    "parse_tool_calls": _neutral(True),
    "penalize_nl": _neutral(False),
    "post_sampling_probs": _neutral(False),
    "priority": _USED,
    "prompt_embeds": _REFUSED,
    "prompt_logprobs": _USED,
    "reasoning_format": _neutral("none"),
    "regex": _USED,
    "repeat_last_n": _neutral(64),
    "repeat_penalty": _neutral(1),
    "repetition_penalty": _USED,
    "request_id": _REFUSED,
    "response_fields": _neutral([]),
    "return_hidden_states": _neutral(False),
    "return_progress": _neutral(False),
    "return_token_ids": _neutral(False),
    "return_tokens": _neutral(False),
    "return_tokens_as_token_ids": _neutral(False),
    "rid": _REFUSED,
    "samplers": _REFUSED,
    "separate_reasoning": _neutral(False),
    "session_params": _REFUSED,
    "skip_reading_prefix_cache": _IGNORED,
    "skip_special_tokens": _neutral(True),
    "spaces_between_special_tokens": _IGNORED,
    "stop_regex": _REFUSED,
    "stop_token_ids": _USED,
    "stream_reasoning": _neutral(True),
    "structural_tag": _USED,
    "structured_outputs": _USED,
    "t_max_predict_ms": _neutral(0, -1),
    "tfs_z": _neutral(1),
    "thinking_forced_open": _neutral(False),
    "thinking_token_budget": _REFUSED,
    "timings_per_token": _neutral(False),
    "top_a": _neutral(0),
    "top_k": _USED,
    "top_n_sigma": _neutral(-1),
    "truncate_prompt_tokens": _USED,
    "truncation_side": _USED,
    "typical_p": _neutral(1),
    "use_beam_search": _neutral(False),
    "vllm_xargs": _neutral({}),
    "xtc_probability": _neutral(0),
    "xtc_threshold": _neutral(0.1),
}
"""The parameters of completions and chats, by name."""

STREAM_OPTIONS: Final[Mapping[str, RequestParameter]] = {
    "continuous_usage_stats": _USED,
    "include_obfuscation": _IGNORED,
    "include_usage": _USED,
}
"""The members of the parameter `stream_options`, by name."""

STRUCTURED_OUTPUTS: Final[Mapping[str, RequestParameter]] = {
    "choice": _USED,
    "disable_additional_properties": _neutral(False),
    "disable_any_whitespace": _neutral(False),
    "disable_fallback": _IGNORED,
    "grammar": _USED,
    "json": _USED,
    "json_object": _USED,
    "regex": _USED,
    "structural_tag": _USED,
    "whitespace_pattern": _REFUSED,
}
"""The members of the parameter `structured_outputs`, by name."""


EMBEDDINGS: Final[Mapping[str, RequestParameter]] = {
    "dimensions": _USED,
    "encoding_format": _USED,
    "input": _USED,
    "model": _USED,
    "truncate_prompt_tokens": _USED,
    "truncation_side": _USED,
    "user": _IGNORED,
}
"""The parameters of `/v1/embeddings`, by name."""

TOKENIZE: Final[Mapping[str, RequestParameter]] = {
    "add_generation_prompt": _USED,
    "add_special_tokens": _USED,
    "chat_template_kwargs": _USED,
    "continue_final_message": _USED,
    "messages": _USED,
    "model": _USED,
    "prompt": _USED,
    "return_token_strs": _neutral(False),
    "tools": _USED,
}
"""The parameters of `/tokenize`, by name: vLLM's parameters that change the tokens of a prompt."""

DETOKENIZE: Final[Mapping[str, RequestParameter]] = {"model": _USED, "tokens": _USED}
"""The parameters of `/detokenize`, by name."""


def check_parameters(
    parameters: Mapping[str, Any], table: Mapping[str, RequestParameter], *, is_chat: bool = False, where: str = ""
) -> None:
    """Check the names of a request's parameters, and the values of the unused ones.

    Args:
        parameters: The request's parameters.
        table: The known parameters.
        is_chat: Whether the request is a chat.
        where: A prefix for names in errors, such as "stream_options.".

    Raises ApiError, which names the first parameter that is wrong.
    """
    for name, value in parameters.items():
        # null means "not set", for every parameter.
        if value is None:
            continue
        parameter = table.get(name)
        is_known = parameter is not None and (parameter.is_of_chats if is_chat else parameter.is_of_completions)
        # Some clients always send a parameter of the other endpoint. Accept the parameter if its value changes nothing.
        if parameter is not None and not is_known and any(_is_alike(value, neutral) for neutral in parameter.neutral):
            continue
        if parameter is None or not is_known:
            text = f"{where}{quoted(name)} is not a known parameter here; leave it out"
            # The caller chose the name, so it may be any text. Return it as `param` only if it is short and printable.
            is_name = name.isascii() and name.isprintable() and len(name) <= MAX_NAME_CHARACTERS
            raise invalid(text, where + name if is_name else None, "unknown_parameter")
        if parameter.is_used or parameter.is_ignored:
            continue
        if not any(_is_alike(value, neutral) for neutral in parameter.neutral):
            # Name the accepted values in the error, for clients that always send the parameter.
            offered = " or ".join(["null", *(json.dumps(neutral) for neutral in parameter.neutral)])
            text = f"{where}{name} = {quoted(value)} is not supported; leave it out, or send {offered}"
            raise invalid(text, where + name, "unsupported_parameter")


def _is_alike(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, 1 equals 1.0 but not true."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)
