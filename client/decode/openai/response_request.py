"""Translates the bodies of requests to `/v1/responses` into chats. Texts and functions are supported.

The server stores no responses, so each request contains the whole conversation, in `input`. As for completions, an
unsupported parameter that would change the answer is refused by name.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.decode.openai.api_errors import ApiError, invalid
from gpulease.client.decode.openai.completion_request import parse_object
from gpulease.client.decode.openai.prompt_job import read_as_chat
from gpulease.client.decode.openai.request_parameters import RequestParameter, check_parameters
from gpulease.client.texts import quoted

if TYPE_CHECKING:
    from gpulease.client.decode.text.prompt_reader import PromptReader

_USED: Final = RequestParameter(is_used=True)
_IGNORED: Final = RequestParameter(is_ignored=True)
_REFUSED: Final = RequestParameter()

PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    "background": RequestParameter(neutral=(False,)),
    "context_management": _REFUSED,
    "conversation": _REFUSED,
    # Clients that ask the server to store nothing request the reasoning in this form. Accept the value, although there
    # is no reasoning to return.
    "include": RequestParameter(neutral=([], ["reasoning.encrypted_content"])),
    "input": _USED,
    "instructions": _USED,
    "max_output_tokens": _USED,
    "max_tool_calls": _REFUSED,
    "metadata": _IGNORED,
    "model": _USED,
    "parallel_tool_calls": _USED,
    "previous_response_id": _REFUSED,
    "prompt": _REFUSED,
    "prompt_cache_key": _IGNORED,
    "prompt_cache_retention": _IGNORED,
    "reasoning": RequestParameter(neutral=({}, {"effort": None}, {"effort": None, "summary": None})),
    "safety_identifier": _IGNORED,
    "service_tier": _IGNORED,
    "store": _IGNORED,
    "stream": _USED,
    "stream_options": RequestParameter(
        neutral=({}, {"include_obfuscation": False}, {"include_obfuscation": True}, {"include_obfuscation": None})
    ),
    "temperature": _USED,
    "text": _USED,
    "tool_choice": _USED,
    "tools": _USED,
    "top_logprobs": RequestParameter(neutral=(0,)),
    "top_p": _USED,
    "truncation": RequestParameter(neutral=("disabled",)),
    "user": _IGNORED,
}
"""The parameters of a request, by name."""

ECHOED: Final = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)
"""The parameters that the reply repeats."""

_SAME_NAMES: Final = ("model", "parallel_tool_calls", "stream", "temperature", "top_p")
"""The parameters that a chat has under the same name and with the same values."""

_NAMES: Final = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}
"""Maps a chat's parameters to parameters of `/v1/responses` with another name, to translate the chat's errors."""

_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_MESSAGE_MEMBERS: Final = ("type", "role", "content", "id", "status", "phase")


def read_response(
    reader: "PromptReader", body: bytes, is_chat: bool, fresh_seed: int, names: list[str]
) -> dict[str, Any]:
    """Parse a body, in a text process, as `read_completion` does.

    The result's `response` has the values that the reply repeats.

    Args:
        reader: Tokenizes the prompt.
        body: The body, as JSON.
        is_chat: Not used: all such functions take the parameters of `read_completion`.
        fresh_seed: The seed if the request has none.
        names: The names of the served model.
    """
    try:
        parameters = parse_object(body)
        check_parameters(parameters, PARAMETERS, is_chat=True)
        chat = chat_of(parameters)
    except ApiError as error:
        return {"error": error.parts}
    answer = read_as_chat(reader, chat, _NAMES, fresh_seed, names)
    return answer | {"response": {name: parameters[name] for name in ECHOED if parameters.get(name) is not None}}


def chat_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat request with the same meaning. Raises ApiError."""
    chat = {name: parameters[name] for name in _SAME_NAMES if parameters.get(name) is not None}
    if parameters.get("max_output_tokens") is not None:
        chat["max_tokens"] = parameters["max_output_tokens"]
    messages = _messages(parameters.get("input"))
    instructions = parameters.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise invalid("instructions must be a string", "instructions")
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages
    if (written := _response_format(parameters.get("text"))) is not None:
        chat["response_format"] = written
    if parameters.get("tools") is not None:
        chat["tools"] = _tools(parameters["tools"])
    choice = parameters.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None:
        chat["tool_choice"] = choice
    return chat


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return a chat's messages from the items of an input. Their contents are checked when the chat is parsed."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input must be a string or a list of items, and not empty", "input")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(value):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise invalid(f"{where} must be an object", "input")
        match item.get("type", "message"):
            case "message":
                messages.append(_message(where, item))
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                # In a chat, calls are part of the preceding message, the assistant's.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _content(where, item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case kind:
                raise invalid(f"{where}: the type {quoted(str(kind))} is not supported", "input")
    return messages


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in item.items():
        if name not in _MESSAGE_MEMBERS and value is not None:
            raise invalid(f"{where}: {quoted(name)} is not supported", "input", "unsupported_parameter")
    return {"role": item.get("role"), "content": _content(where, item.get("content"))}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise invalid(f"{where}: content must be a string, or a list of input_text and output_text", "input")
        texts.append(text)
    return "".join(texts)


def _response_format(text: Any) -> dict[str, Any] | None:
    """Return the chat's `response_format`; None if the answer may be any text."""
    if text is None:
        return None
    if not isinstance(text, dict) or any(value is not None for name, value in text.items() if name != "format"):
        raise invalid("text must be an object with a format alone", "text")
    written = text.get("format")
    if not isinstance(written, dict) or written.get("type") != "json_schema":
        return written
    return {"type": "json_schema", "json_schema": {name: written.get(name) for name in ("name", "schema")}}


def _tools(tools: Any) -> Any:
    """Return the chat's tools. Names and schemas are checked when the chat is parsed."""
    if not isinstance(tools, list):
        return tools
    functions = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"tools[{number}] must have the type function; the server has no tools of its own", "tools")
        members = ("name", "description", "parameters")
        function = {name: tool[name] for name in members if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions
