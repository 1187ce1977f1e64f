"""Parses bodies of `/v1/completions` and `/v1/chat/completions`. Each error names the wrong parameter."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.decode_requests import (
    MAX_BAD_SEQUENCES,
    MAX_POSITIONS,
    MAX_PRIORITY,
    MAX_SALT_CHARACTERS,
    SamplingParameters,
)
from gpulease.client.decode.openai.answer_forms import AnswerForm, form_of, is_unicode_text
from gpulease.client.decode.openai.api_errors import ApiError, invalid
from gpulease.client.decode.openai.request_parameters import PARAMETERS, STREAM_OPTIONS, check_parameters
from gpulease.client.decode.openai.tool_formats import NAME as TOOL_NAME
from gpulease.client.decode.openai.tool_formats import Tool
from gpulease.client.decode.row_records import MAX_RANKS
from gpulease.client.decode.text.prompt_reader import Cut
from gpulease.client.texts import parse_problem, quoted

MAX_STOPS: Final = 16
"""Maximum number of stops, because every piece of text is searched for every stop. OpenAI's API allows 4, but tasks of
lm-evaluation-harness send more."""

MAX_STOP_CHARACTERS: Final = 1024
"""Maximum characters of a stop. Up to this much text is kept back and searched again with every token."""

MAX_REFUSAL_CHARACTERS: Final = 240
"""Maximum characters of the reason why a value is refused. The reason may quote the value."""

MAX_MESSAGES: Final = 4096
"""Maximum number of messages of a chat. The model's template processes each message."""

MAX_BAD_WORDS: Final = MAX_BAD_SEQUENCES // 2
"""Maximum number of bad words. Each word has up to two spellings in tokens, and each spelling is a bad sequence."""

MAX_CHOICES: Final = 128
"""Maximum number of sequences of one request: its number of prompts times `best_of`, which is `n` by default."""

MAX_REPLY_SCORES: Final = 1 << 20
"""Maximum number of log-probabilities in one reply. They take about 64 MB of JSON in memory."""

MAX_TOOLS: Final = 128
"""Maximum number of tools, as in OpenAI's API."""

MAX_CALLS: Final = 128
"""Maximum number of calls in one message of a chat."""

MAX_VARIABLES: Final = 64
"""Maximum number of variables in `chat_template_kwargs`, which are passed to the model's template."""

_OWN_VARIABLES: Final = ("messages", "continue_final_message")
"""Parameters of a chat that `chat_template_kwargs` must not contain."""

DEFAULT_COMPLETION_TOKENS: Final = 16
"""Default of `max_tokens` in a completion, as in OpenAI's API."""

ALL_TOKENS: Final = -1
"""The value of `top_k` that keeps all tokens in other servers' APIs, and of `truncate_prompt_tokens` that keeps as many
tokens as fit."""

MAX_TOKEN_DIGITS: Final = 10
"""Maximum number of digits of a token's id. Python takes quadratic time to convert long strings of digits."""

_SAMPLING_NAMES: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Parameters of a request that have the same name and type in SamplingParameters."""

_OPENAI_NAMES: Final[Mapping[str, str]] = {"ignores_end": "ignore_eos"}
"""Names in a request of attributes of SamplingParameters that have another name there."""

_MESSAGE_MEMBERS: Final = ("role", "content", "name")
_ROLE_MEMBERS: Final = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
"""Accepted members of messages: `_MESSAGE_MEMBERS` for every role, and `_ROLE_MEMBERS` in addition for these roles."""

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Maps each accepted role to its name in the models' templates."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A validated request.

    Attributes:
        is_chat: Whether it is a chat.
        model: The model's name; "" if the request names none.
        prompts: Each prompt as text or as token ids; () for a chat.
        messages: A chat's messages, each with `role` and `content`; () for a completion.
        variables: Further variables for the chat's template, including the tools.
        continues: Whether the answer continues the chat's last message.
        begins: Whether prompts begin with the tokenizer's begin token; None for the default. By default, completions
            do, and for chats the tokenizer's files decide.
        cut: Which part of a too long prompt is kept; None to refuse such a prompt.
        cache_salt: The request's prompts share cached blocks only with requests that have the same salt.
        form: The form of the answer; None if any text is allowed.
        tools: The tools that the model may call; () if it may call none.
        must_call: Whether the answer must consist only of calls.
        is_parallel: Whether the answer may have several calls.
        tool_format: Name of the format in which the model writes calls (tool_formats.py); "" without tools, or until
            the model is known.
        max_tokens: Maximum number of tokens to emit; None if the caller set none. It may be 0 only with `is_echo`.
        choices: Number of answers to each prompt.
        tries: Number of sequences to compute for each prompt. The likeliest `choices` of them are sent.
        sampling: How tokens are chosen.
        is_seed_chosen: Whether the server chose the seed, because the caller sent none.
        bad_words: Texts that the answer must not contain. After tokenization, their tokens are in `sampling`.
        stops: Texts that end the answer.
        includes_stop: Whether the answer includes the stop, or the end token, that ends it.
        has_logprobs: Whether the reply has the log-probabilities of the answer's tokens.
        ranks: For how many of the likeliest tokens at each position of the answer the reply has log-probabilities.
        prompt_ranks: The same for each position of the prompt; None if the reply has no `prompt_logprobs`.
        is_echo: Whether the reply has the prompt before the answer.
        priority: The tenant's waiting request with the lowest number is admitted first.
        is_stream: Whether the answer is sent as it is computed.
        has_usage: Whether the stream ends with the token counts.
        has_running_usage: Whether each object of the stream has the token counts so far.
    """

    is_chat: bool
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    continues: bool
    begins: bool | None
    cut: Cut | None
    cache_salt: str
    form: AnswerForm | None
    tools: tuple[Tool, ...]
    must_call: bool
    is_parallel: bool
    tool_format: str
    max_tokens: int | None
    choices: int
    tries: int
    sampling: SamplingParameters
    is_seed_chosen: bool
    bad_words: tuple[str, ...]
    stops: tuple[str, ...]
    includes_stop: bool
    has_logprobs: bool
    ranks: int
    prompt_ranks: int | None
    is_echo: bool
    priority: int
    is_stream: bool
    has_usage: bool
    has_running_usage: bool


def parse_request(body: bytes, *, is_chat: bool, fresh_seed: int) -> CompletionRequest:
    """Parse a body.

    Args:
        body: The body, JSON.
        is_chat: Whether the body is for `/v1/chat/completions`.
        fresh_seed: The seed to use if the caller sent none.

    Raises ApiError, which names the invalid or unsupported parameter.
    """
    parameters = parse_object(body)
    # Check the names before the values, so that an unknown or unsupported parameter is reported first.
    check_parameters(parameters, PARAMETERS, is_chat=is_chat)
    seed = _integer(parameters, "seed")
    options = parameters.get("stream_options")
    is_stream = _flag(parameters, "stream")
    if options is not None and (not is_stream or not isinstance(options, dict)):
        raise invalid("stream_options must be an object, and needs stream", "stream_options")
    check_parameters(options or {}, STREAM_OPTIONS, is_chat=is_chat, where="stream_options.")
    has_usage, has_running_usage = (_flag(options or {}, name) for name in ("include_usage", "continuous_usage_stats"))
    if has_running_usage and not has_usage:
        text = "stream_options.continuous_usage_stats needs include_usage"
        raise invalid(text, "stream_options.continuous_usage_stats")
    prompts = () if is_chat else _prompts(parameters.get("prompt"))
    choices, tries = _choices(parameters, len(prompts) or 1, is_stream=is_stream)
    has_logprobs, ranks = _logprobs_of_chat(parameters) if is_chat else _logprobs_of_completion(parameters)
    is_echo = _flag(parameters, "echo")
    form = form_of(parameters, is_chat=is_chat)
    tools, must_call = _tools(parameters)
    messages, variables, continues = parse_chat_prompt(parameters) if is_chat else ((), {}, False)
    stops = _stops(parameters.get("stop"))
    _flag(parameters, "parallel_tool_calls")
    if form is not None or tools:
        _check_stops(parameters, stops, form, has_tools=bool(tools))
    return CompletionRequest(
        is_chat=is_chat,
        model=_text(parameters, "model"),
        prompts=prompts,
        messages=messages,
        variables=variables,
        continues=continues,
        begins=parse_begins(parameters),
        cut=parse_cut(parameters, _max_tokens(parameters, 0, is_chat=is_chat) or 1),
        cache_salt=_salt(parameters),
        form=form,
        tools=tools,
        must_call=must_call,
        # If tool_choice names a tool, clients expect exactly one call, as on OpenAI's servers.
        is_parallel=bool(tools)
        and parameters.get("parallel_tool_calls") is not False
        and not isinstance(parameters.get("tool_choice"), dict),
        tool_format="",
        max_tokens=_max_tokens(parameters, 0 if is_echo else 1, is_chat=is_chat),
        choices=choices,
        tries=tries,
        sampling=_sampling(parameters, fresh_seed if seed is None else seed % 2**64),
        is_seed_chosen=seed is None,
        bad_words=_bad_words(parameters.get("bad_words")),
        stops=stops,
        includes_stop=_flag(parameters, "include_stop_str_in_output"),
        has_logprobs=has_logprobs,
        ranks=ranks,
        prompt_ranks=_prompt_ranks(parameters, is_stream=is_stream),
        is_echo=is_echo,
        priority=_within(parameters, "priority", 0, -MAX_PRIORITY, MAX_PRIORITY),
        is_stream=is_stream,
        has_usage=has_usage,
        has_running_usage=has_running_usage,
    )


def parse_chat_prompt(parameters: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], Mapping[str, Any], bool]:
    """Return a chat's messages, its template's variables, and whether the answer continues the last message.

    Raises ApiError if one of them is invalid.
    """
    tools, _ = _tools(parameters)
    variables = _variables(parameters.get("chat_template_kwargs"))
    if parameters.get("add_generation_prompt") is not None:
        variables = {"add_generation_prompt": _flag(parameters, "add_generation_prompt")} | variables
    if tools:
        variables["tools"] = parameters["tools"]
    if (documents := parameters.get("documents")) is not None:
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            raise invalid("documents must be a list of objects", "documents")
        variables["documents"] = documents or None
    continues = _flag(parameters, "continue_final_message")
    if continues and variables.get("add_generation_prompt"):
        text = "continue_final_message can't be combined with add_generation_prompt, which begins another message"
        raise invalid(text, "continue_final_message")
    messages = _messages(parameters.get("messages"))
    if continues and messages[-1].get("tool_calls"):
        # The prompt could not end with the message's calls.
        text = "continue_final_message can't be combined with a last message that has tool_calls"
        raise invalid(text, "continue_final_message")
    return messages, variables, continues


def parse_begins(parameters: Mapping[str, Any]) -> bool | None:
    """Return a body's `add_special_tokens`; None if the body has none. Raises ApiError if it is not a boolean."""
    return None if parameters.get("add_special_tokens") is None else _flag(parameters, "add_special_tokens")


def parse_cut(parameters: Mapping[str, Any], answer_tokens: int) -> Cut | None:
    """Return which part of a prompt `truncate_prompt_tokens` keeps; None if the body does not have this parameter.

    With the value -1, an answer of `answer_tokens` tokens still fits after the prompt. Raises ApiError.
    """
    most = _within(parameters, "truncate_prompt_tokens", 0, ALL_TOKENS, MAX_POSITIONS)
    side = parameters.get("truncation_side")
    if side not in (None, "left", "right"):
        raise invalid(f"truncation_side must be left or right, not {quoted(side)}", "truncation_side")
    if parameters.get("truncate_prompt_tokens") is None:
        if side is not None:
            raise invalid("truncation_side needs truncate_prompt_tokens", "truncation_side")
        return None
    if most == 0:
        raise invalid("truncate_prompt_tokens must be 1 or more, or -1 for what fits, not 0", "truncate_prompt_tokens")
    return Cut(None if most == ALL_TOKENS else most, answer_tokens, side == "right")


def _tools(parameters: Mapping[str, Any]) -> tuple[tuple[Tool, ...], bool]:
    """Return the tools that an answer may call, and whether it must call one."""
    value, choice = parameters.get("tools"), parameters.get("tool_choice")
    if value is None or value == []:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return (), False
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} functions", "tools")
    tools = tuple(_tool(number, tool) for number, tool in enumerate(value))
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools must have different names", "tools")
    if choice in (None, "auto"):
        return tools, False
    if choice == "required":
        return tools, True
    if choice == "none":
        return (), False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    matches = tuple(tool for tool in tools if tool.name == name)
    if not matches:
        raise invalid("tool_choice must be auto, none, required, or name one of the tools", "tool_choice")
    return matches, True


def _tool(number: int, tool: Any) -> Tool:
    where = f"tools[{number}]"
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise invalid(f"{where} must have the type function and a function object", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise invalid(f"{where}: name {quoted(name)} must be 1 to 64 letters, digits, _ and -", "tools")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise invalid(f"{where}: parameters must be a JSON Schema, an object", "tools")
    return Tool(name, parameters)


def _check_stops(
    parameters: Mapping[str, Any], stops: tuple[str, ...], form: AnswerForm | None, *, has_tools: bool
) -> None:
    """Refuse parameters that could end an answer before its form is complete, or continue it afterwards.

    Lists of tokens are refused because they may exclude tokens that the form needs. `stop` is accepted with a regular
    expression, a grammar or tags, as in vLLM. Raises ApiError.
    """
    label = "tools" if form is None else form.parameter
    if has_tools and form is not None and form.is_own_grammar:
        raise invalid(f"{label} can't be combined with tools: a grammar has no place for calls", label)
    for name in ("stop", "stop_token_ids", "min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
        if name == "stop" and form is not None and form.is_text and not has_tools:
            continue
        if stops if name == "stop" else parameters.get(name):
            raise invalid(f"{name} can't be combined with {label}, which alone determines the form of the answer", name)


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise ApiError unless `name` is "" or in `names`, the names of the served model."""
    if name and name not in names:
        raise ApiError(404, "model_not_found", f"Model {quoted(name)} is not served here; use {names[0]}.", "model")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object. Raises ApiError if the body is not a JSON object."""
    try:
        # By default, Python accepts NaN and Infinity, which are not JSON.
        parameters = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {parse_problem(error)}", code="invalid_json") from None
    if not isinstance(parameters, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    return parameters


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(f"{name} = {quoted(value)}; send true or false", name)


def _integer(parameters: Mapping[str, Any], name: str) -> int | None:
    value = parameters.get(name)
    # Compare the type with int, because JSON's true is an instance of int, too.
    if value is None or type(value) is int:
        return value
    raise invalid(f"{name} = {quoted(value)}; send an integer", name)


def _within(parameters: Mapping[str, Any], name: str, default: int, minimum: int, maximum: int) -> int:
    value = _integer(parameters, name)
    if value is None:
        return default
    if not minimum <= value <= maximum:
        raise invalid(f"{name} = {quoted(value)}; send an integer from {minimum} to {maximum}", name)
    return value


def _choices(parameters: Mapping[str, Any], prompts: int, *, is_stream: bool) -> tuple[int, int]:
    """Return `n` and `best_of`: the number of answers to each prompt, and of sequences from which they are chosen."""
    choices = _within(parameters, "n", 1, 1, MAX_CHOICES)
    tries = _within(parameters, "best_of", choices, 1, MAX_CHOICES)
    if tries < choices:
        raise invalid(f"best_of = {tries} must be at least n = {choices}", "best_of")
    if tries > choices and is_stream:
        raise invalid(
            "best_of can't be combined with stream: the best answers are known only when all have ended",
            "best_of",
        )
    if prompts * tries > MAX_CHOICES:
        name = "prompt" if prompts > 1 else "n"
        raise invalid(f"the request has {prompts * tries} sequences; send at most {MAX_CHOICES}", name)
    return choices, tries


def _variables(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_VARIABLES:
        raise invalid(
            f"chat_template_kwargs must be an object of up to {MAX_VARIABLES} members", "chat_template_kwargs"
        )
    for name in _OWN_VARIABLES:
        if name in value:
            raise invalid(f"chat_template_kwargs: send {name} as a separate parameter", "chat_template_kwargs")
    return dict(value)


def _text(parameters: Mapping[str, Any], name: str) -> str:
    value = parameters.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise invalid(f"{name} = {quoted(value)}; send a string", name)


def _salt(parameters: Mapping[str, Any]) -> str:
    salt = _text(parameters, "cache_salt")
    if len(salt) > MAX_SALT_CHARACTERS:
        raise invalid(f"cache_salt must have at most {MAX_SALT_CHARACTERS} characters, not {len(salt)}", "cache_salt")
    return salt


def _max_tokens(parameters: Mapping[str, Any], least: int, *, is_chat: bool) -> int | None:
    names = ["max_tokens", *(["max_completion_tokens"] if is_chat else [])]
    # Chats have two names for the same limit. A body may have both if they are equal.
    values = {name: value for name in names if (value := _integer(parameters, name)) is not None}
    if len(set(values.values())) > 1:
        raise invalid("max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
    for name, value in values.items():
        if value < least:
            raise invalid(f"{name} = {quoted(value)}; send {least} or more", name)
        if value > MAX_POSITIONS:
            raise invalid(f"{name} = {quoted(value)} is more than any model supports", name)
        return value
    # A chat's default depends on the settings and on the length of its prompt.
    return None if is_chat else DEFAULT_COMPLETION_TOKENS


def _sampling(parameters: Mapping[str, Any], seed: int) -> SamplingParameters:
    # OpenAI's default temperature is 1, unlike this engine's.
    values: dict[str, Any] = {"temperature": 1.0}
    values |= {name: value for name in _SAMPLING_NAMES if (value := parameters.get(name)) is not None}
    values |= {"logit_bias": _biases(parameters.get("logit_bias")), "ignores_end": _flag(parameters, "ignore_eos")}
    values |= {name: _tokens(parameters, name) for name in ("stop_token_ids", "allowed_token_ids")}
    # Other servers use -1 for "all", and this engine 0.
    if type(values.get("top_k")) is int and values["top_k"] == ALL_TOKENS:
        values["top_k"] = 0
    # Check each value alone first, so that the error names its parameter.
    for name, value in values.items():
        parameter = str(_OPENAI_NAMES.get(name, name))
        _built(lambda name=name, value=value: SamplingParameters(**{name: value}), parameter)  # type: ignore[misc]
    return SamplingParameters(seed=seed, **values)


def _built(build: Callable[[], SamplingParameters], name: str) -> None:
    try:
        build()
    except (RequestRejected, OverflowError) as error:
        raise invalid(str(error)[:MAX_REFUSAL_CHARACTERS], name) from None


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    # Keys in JSON are strings, so OpenAI's API sends token ids as strings.
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("logit_bias must be an object that maps token ids to biases", "logit_bias")
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= MAX_TOKEN_DIGITS):
            raise invalid(f"logit_bias: {quoted(token)} must be a token id", "logit_bias")
    return tuple((int(token), bias) for token, bias in value.items())


def _tokens(parameters: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = parameters.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(f"{name} must be a list of token ids", name)
    # An empty list would allow no token. vLLM refuses it too.
    if name == "allowed_token_ids" and not value:
        raise invalid(f"{name} must have at least one token; leave it out to allow all", name)
    return tuple(value)


def check_reply_scores(request: CompletionRequest, lengths: Iterable[tuple[int, int]]) -> None:
    """Refuse a reply that may have more than MAX_REPLY_SCORES log-probabilities. Raises ApiError.

    Args:
        request: The request.
        lengths: For each prompt, its number of tokens and the maximum number of tokens of its answer.
    """
    scores_per_token = request.ranks + 1 if request.has_logprobs else 0
    scores = 0
    for prompt_tokens, max_tokens in lengths:
        # A stream's answers are not collected. A chat's reply has `prompt_logprobs` once, and a completion's reply once
        # in each choice.
        scores += (
            request.choices
            * scores_per_token
            * (prompt_tokens * request.is_echo + max_tokens * (not request.is_stream))
        )
        if request.prompt_ranks is not None:
            scores += prompt_tokens * (request.prompt_ranks + 1) * (1 if request.is_chat else request.choices)
    if scores > MAX_REPLY_SCORES:
        raise invalid(
            f"the reply could have {scores:,} log-probabilities; the limit is {MAX_REPLY_SCORES:,}: request fewer "
            "choices, tokens or log-probabilities of each",
            "logprobs" if request.prompt_ranks is None else "prompt_logprobs",
        )


def _logprobs_of_completion(parameters: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether a completion has log-probabilities, and for how many of the likeliest tokens at each position."""
    return parameters.get("logprobs") is not None, _within(parameters, "logprobs", 0, 0, MAX_RANKS)


def _prompt_ranks(parameters: Mapping[str, Any], *, is_stream: bool) -> int | None:
    if parameters.get("prompt_logprobs") is None:
        return None
    if is_stream:
        raise invalid("prompt_logprobs is not sent in a stream", "prompt_logprobs")
    return _within(parameters, "prompt_logprobs", 0, 0, MAX_RANKS)


def _logprobs_of_chat(parameters: Mapping[str, Any]) -> tuple[bool, int]:
    has_logprobs, ranks = _flag(parameters, "logprobs"), _within(parameters, "top_logprobs", 0, 0, MAX_RANKS)
    if ranks and not has_logprobs:
        raise invalid("top_logprobs requires logprobs = true", "top_logprobs")
    return has_logprobs, ranks


def _bad_words(value: Any) -> tuple[str, ...]:
    words = [] if value is None else value
    if not isinstance(words, list) or len(words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings", "bad_words")
    for word in words:
        # A word is forbidden with and without a space before it. A word of only spaces would be empty without it.
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_STOP_CHARACTERS:
            rule = f"each must be a string of at most {MAX_STOP_CHARACTERS} characters, not only spaces"
            raise invalid(f"bad_words: {quoted(word)}; {rule}", "bad_words")
    return tuple(words)


def _stops(value: Any) -> tuple[str, ...]:
    # A single string is the same as a list with that string.
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid(f"stop must be a string or a list of at most {MAX_STOPS} strings", "stop")
    for stop in stops:
        if not is_unicode_text(stop) or len(stop) > MAX_STOP_CHARACTERS:
            rule = f"each must be a string of 1 to {MAX_STOP_CHARACTERS} characters, without lone surrogates"
            raise invalid(f"stop {quoted(stop)}; {rule}", "stop")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    # A list of strings, or of lists of tokens, has several prompts; a list of tokens is one prompt.
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > MAX_CHOICES:
            raise invalid(f"prompt has {len(value)} prompts; send at most {MAX_CHOICES}", "prompt")
        return tuple(_prompt(item) for item in value)
    return (_prompt(value),)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    # A list of token ids is not tokenized.
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise invalid("prompt must be a string, a list of tokens, or a list of either, and not empty", "prompt")


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    return tuple(_message(number, message) for number, message in enumerate(value))


def _message(number: int, message: Any) -> Mapping[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}: role must be one of {', '.join(ROLES)}, not {quoted(role)}", "messages")
    for name, item in message.items():
        # Refuse other members, such as audio, unless they are null or [], which clients often send.
        if name not in (*_MESSAGE_MEMBERS, *_ROLE_MEMBERS.get(role, ())) and item not in (None, []):
            raise invalid(f"{where}: {quoted(name)} is not supported", "messages", "unsupported_parameter")
    content, calls = message.get("content"), message.get("tool_calls")
    if role == "assistant" and calls:
        # A message with calls may have no content.
        text = "" if content is None else _content(where, content)
        return {"role": role, "content": text, "tool_calls": _tool_calls(where, calls)}
    read = {"role": ROLES[role], "content": _content(where, content)}
    if role == "tool":
        for name in ("tool_call_id", "name"):
            # Some templates show to which call or tool the result belongs.
            if isinstance(message.get(name), str):
                read[name] = message[name]
    return read


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return an assistant's calls with their arguments as objects, which models' templates expect."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise invalid(f"{where}: tool_calls must be a list of at most {MAX_CALLS} calls", "messages")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(function, dict):
            raise invalid(f"{where}: each call must have a function with a name", "messages")
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments, parse_constant=_no_number) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"{where}: the arguments of {quoted(name)} must be a JSON object in a string", "messages")
        call_id = call.get("id")
        entry = {"type": "function", "function": {"name": name, "arguments": arguments}}
        read.append(entry | ({"id": call_id} if isinstance(call_id, str) else {}))
    return read


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: content must be a string or a list of parts", "messages")
    texts = []
    for part in content:
        # Parts other than text, such as images, are refused.
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid(f"{where}: each part of content must have the type text and a string as its text", "messages")
        texts.append(text)
    return "".join(texts)
