"""Bodies of `/v1/completions` and `/v1/chat/completions`: parsing, and errors that name the parameter."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.decode_requests import MAX_POSITIONS, SamplingParameters
from gpulease.client.decode.openai.api_errors import ApiError, invalid
from gpulease.client.decode.openai.request_parameters import PARAMETERS, STREAM_OPTIONS, check_parameters
from gpulease.client.texts import quoted

MAX_STOPS: Final = 4
"""Most stops, as in OpenAI's API. Every piece of text is searched for each."""

MAX_STOP_CHARACTERS: Final = 1024
"""Longest stop. Up to this much text is held back, and searched again with every token."""

MAX_REFUSAL_CHARACTERS: Final = 240
"""Most characters of the reason why a value is refused, which may quote the value."""

MAX_MESSAGES: Final = 4096
"""Most messages of a chat. The model's template processes each, in a time that only the process's limits bound."""

DEFAULT_COMPLETION_TOKENS: Final = 16
"""Default tokens of a completion, as in OpenAI's API."""

ALL_TOKENS: Final = -1
"""The top_k that keeps all tokens, in the API of other servers."""

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The accepted roles, and their names in models' templates."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request as its caller sent it, validated.

    Attributes:
        is_chat: Whether it is a chat.
        model: The model's name; "" for the one that is served.
        prompt: A text, or its tokens; "" for a chat.
        messages: A chat's messages, each with `role` and `content`; () for a completion.
        max_tokens: Most tokens to emit; None if the caller sent no limit.
        sampling: How tokens are chosen.
        is_seed_chosen: Whether the caller left the seed to the server.
        stops: Texts that end the answer.
        has_logprobs: Whether the tokens' log-probabilities are sent.
        is_stream: Whether the answer is sent as it is computed.
        has_usage: Whether the stream ends with the token counts.
    """

    is_chat: bool
    model: str
    prompt: str | tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int | None
    sampling: SamplingParameters
    is_seed_chosen: bool
    stops: tuple[str, ...]
    has_logprobs: bool
    is_stream: bool
    has_usage: bool


def parse_request(body: bytes, *, is_chat: bool, fresh_seed: int) -> CompletionRequest:
    """Parse a body.

    Args:
        body: The bytes of the body, JSON.
        is_chat: Whether it is a chat's.
        fresh_seed: The seed to use if the caller sent none.

    Raises ApiError for an invalid or unsupported parameter, which it names.
    """
    said = _object(body)
    # Names first: an unknown or unsupported parameter is reported even if the others are wrong, too.
    check_parameters(said, PARAMETERS, is_chat=is_chat)
    seed = _integer(said, "seed")
    options = said.get("stream_options")
    is_stream = _flag(said, "stream")
    if options is not None and (not is_stream or not isinstance(options, dict)):
        raise invalid("stream_options is an object, and taken with stream alone", "stream_options")
    check_parameters(options or {}, STREAM_OPTIONS, is_chat=is_chat, where="stream_options.")
    return CompletionRequest(
        is_chat=is_chat,
        model=_text(said, "model"),
        prompt="" if is_chat else _prompt(said.get("prompt")),
        messages=_messages(said.get("messages")) if is_chat else (),
        max_tokens=_max_tokens(said, is_chat=is_chat),
        sampling=_sampling(said, fresh_seed if seed is None else seed % 2**64),
        is_seed_chosen=seed is None,
        stops=_stops(said.get("stop")),
        has_logprobs=_flag(said, "logprobs") if is_chat else _wants_logprobs(said),
        is_stream=is_stream,
        has_usage=_flag(options or {}, "include_usage"),
    )


def check_model(asked: str, served: str) -> None:
    """Raise ApiError if a request names another model than the served one; "" means the served one."""
    if asked and asked != served:
        raise ApiError(404, "model_not_found", f"Model {quoted(asked)} is not served here; use {served}.", "model")


def _object(body: bytes) -> dict[str, Any]:
    try:
        # Python would also accept NaN and Infinity, which are not JSON.
        said = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(said, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    return said


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _flag(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(f"{name} = {quoted(value)}; send true or false", name)


def _integer(said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    # Exactly int: JSON's true would otherwise count as 1.
    if value is None or type(value) is int:
        return value
    raise invalid(f"{name} = {quoted(value)}; send an integer", name)


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise invalid(f"{name} = {quoted(value)}; send a text", name)


def _max_tokens(said: Mapping[str, Any], *, is_chat: bool) -> int | None:
    names = ["max_tokens", *(["max_completion_tokens"] if is_chat else [])]
    # Chats have two names for the same limit. Both are accepted if they agree.
    found = {name: value for name in names if (value := _integer(said, name)) is not None}
    if len(set(found.values())) > 1:
        raise invalid("max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
    for name, value in found.items():
        if value < 1:
            raise invalid(f"{name} = {quoted(value)}; send 1 or more", name)
        if value > MAX_POSITIONS:
            raise invalid(f"{name} = {quoted(value)} is more than any model has", name)
        return value
    # A chat's default depends on the settings and on the room that its prompt leaves.
    return None if is_chat else DEFAULT_COMPLETION_TOKENS


def _sampling(said: Mapping[str, Any], seed: int) -> SamplingParameters:
    # OpenAI's default temperature is 1, unlike this engine's.
    values = {"temperature": 1.0} | {
        name: value for name in ("temperature", "top_p", "top_k") if (value := said.get(name)) is not None
    }
    # Other servers write -1 for "all", where this engine has 0.
    if type(values.get("top_k")) is int and values["top_k"] == ALL_TOKENS:
        values["top_k"] = 0
    # Check each value alone first, so that the error can name its parameter.
    for name, value in values.items():
        _made(lambda name=name, value=value: SamplingParameters(**{name: value}), name)  # type: ignore[misc]
    return SamplingParameters(seed=seed, **values)


def _made(make: Callable[[], SamplingParameters], name: str) -> None:
    try:
        make()
    except (RequestRejected, OverflowError) as error:
        raise invalid(str(error)[:MAX_REFUSAL_CHARACTERS], name) from None


def _wants_logprobs(said: Mapping[str, Any]) -> bool:
    value = said.get("logprobs")
    if value is None or (type(value) is int and value in (0, 1)):
        return value is not None
    raise invalid(f"logprobs = {quoted(value)}; 0 or 1 is offered: the chosen token's alone", "logprobs")


def _stops(value: Any) -> tuple[str, ...]:
    # One text is a list of one.
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid(f"stop is a text, or a list of at most {MAX_STOPS} texts", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid(f"stop {quoted(stop)}; each is a text of 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(stops)


def _prompt(value: Any) -> str | tuple[int, ...]:
    # A list of one prompt is that prompt; several prompts would need several choices.
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    # Token ids, which need no tokenizer.
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
        raise invalid("prompt has several prompts; send one a request", "prompt", "unsupported_parameter")
    raise invalid("prompt is a text or a list of tokens, and not empty", "prompt")


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid(f"messages is a list of 1 to {MAX_MESSAGES} messages", "messages")
    return tuple(_message(number, message) for number, message in enumerate(value))


def _message(number: int, message: Any) -> Mapping[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}: role {quoted(role)} is none of {', '.join(ROLES)}", "messages")
    for name, item in message.items():
        # Tool calls and the like; clients often send such members as null or [].
        if name not in ("role", "content", "name") and item not in (None, []):
            raise invalid(f"{where}: {quoted(name)} is not supported", "messages", "unsupported_parameter")
    return {"role": ROLES[role], "content": _content(where, message.get("content"))}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: content is a text, or a list of parts", "messages")
    texts = []
    for part in content:
        # Parts other than texts, such as images, are refused by name below.
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid(f"{where}: each part of content has the type text, and a text", "messages")
        texts.append(text)
    return "".join(texts)
